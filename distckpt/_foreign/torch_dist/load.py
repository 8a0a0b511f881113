"""Loading the objects of checkpoints of torch.distributed.checkpoint: sharded objects, and common state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CorruptCheckpointError, UnsupportedObjectError
from distckpt._foreign.torch_dist.objects import read_object
from distckpt._foreign.torch_dist.source import COMMON_NAME
from distckpt._foreign.torch_dist.unpickle import RefusedGlobalError
from distckpt._format.codec import HOLE
from distckpt._format.manifest import Manifest
from distckpt._io.read import read_chunks
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations


def load_objects(location: str, manifest: Manifest, chunks: Mapping[str, int]) -> dict[str, Any]:
    """Read sharded objects.

    Args:
        location: of the checkpoint.
        manifest: of a checkpoint that `_dcp_source` described.
        chunks: for each object that is wanted the chunk that holds it, by any name.

    Returns:
        The objects by those names.

    Raises:
        UnsupportedObjectError: an object is of a class that is not read from pickles.
        CorruptCheckpointError: an object is damaged.
    """
    blobs = read_chunks(location, manifest, list(chunks.values()), "none")
    pairs = zip(chunks.items(), blobs, strict=True)
    return {name: _decode(location, manifest, chunk, blob) for (name, chunk), blob in pairs}


def load_common_state(location: str, manifest: Manifest) -> Any:
    """Read the common state: Megatron's whole, PyTorch's from the values that are stored one by one."""
    rows = manifest.chunk_rows(manifest.key_index[COMMON_KEY])
    chunks = list(range(rows.start, rows.stop))
    values = list(load_objects(location, manifest, {str(chunk): chunk for chunk in chunks}).values())
    paths = (manifest.origin or {}).get("paths")
    if paths is None:
        return values[0]
    if len(paths) != len(values) or not all(isinstance(path, list) and path for path in paths):
        raise CorruptCheckpointError(f"The manifest of {location!r} does not say where its values belong.")
    tree: dict[Any, Any] = {}
    for path, value in zip(paths, values, strict=True):
        _put(tree, path, value, location)
    return tree


def _decode(location: str, manifest: Manifest, chunk: int, blob: bytes) -> Any:
    file = manifest.files[int(manifest.file_ids[chunk])].name
    key = manifest.keys[int(manifest.key_ids[chunk])]
    first = int(manifest.first_bytes[chunk])
    where = (
        f"{'Common state' if key == COMMON_KEY else f'The object {key!r}'} in {locations.join(location, file)!r}, "
        f"bytes {first} to {first + len(blob)},"
    )
    try:
        value = read_object(blob)
    except RefusedGlobalError as error:
        raise UnsupportedObjectError(
            f"{where} was refused, and nothing of it was run: it needs {error.name!r:.200}. Pickles can name any code, "
            "so only plain types, tensors and arrays are read from them. If this is an Enum class, a dataclass or a "
            "namedtuple class that you trust, import it and pass it to distckpt.register_object_type before loading; "
            "distckpt.interop.megatron.register_types() does so for those of Megatron Core."
        ) from error
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where} is damaged or of an unknown form ({error!s:.300}): restore the file from a copy."
        ) from error
    is_megatron = (manifest.origin or {}).get("paths") is None
    if not is_megatron or file == COMMON_NAME:
        return value
    # Megatron stores a list of the objects that share a name, which is one.
    if type(value) is not list or not value:
        raise CorruptCheckpointError(f"{where} is no list with an object, which Megatron stores.")
    return value[0]


def _put(tree: dict[Any, Any], path: Sequence[Any], value: Any, location: str) -> None:
    """Put a value into nested dicts (for names) and lists (for numbers), which grow as needed."""
    node: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        fresh: Any = value if following is None else [] if type(following) is int else {}
        if isinstance(node, list) and type(part) is int and 0 <= part < _MAX_LIST:
            node.extend([HOLE] * (part + 1 - len(node)))
            known = node[part]
        elif isinstance(node, dict):
            known = node.get(part, HOLE)
        else:
            raise CorruptCheckpointError(f"{location!r} stores a value at {list(path)}, inside of another one.")
        if known is HOLE:
            node[part] = known = fresh
        node = known


_MAX_LIST = 1 << 20
