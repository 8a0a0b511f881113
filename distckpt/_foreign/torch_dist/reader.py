"""Reader of torch.distributed.checkpoint's checkpoints.

PyTorch and Megatron Core (`torch_dist`) write them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CorruptCheckpointError, UnsupportedObjectError
from distckpt._base.tree import HOLE
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._foreign.torch_dist.objects import read_object
from distckpt._foreign.torch_dist.source import COMMON_NAME, METADATA_NAME, read_directory
from distckpt._foreign.torch_dist.unpickle import RefusedGlobalError
from distckpt._format.foreign_formats import TORCH_DIST
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest
from distckpt._format.marker import read_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.read import read_chunks
from distckpt._state.common_state import COMMON_KEY, object_text
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_MAX_LIST = 1 << 20


class TorchDistReader(Reader):
    """Reads directories with a `.metadata` file, or a `torch_dist` marker."""

    name = TORCH_DIST.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        if marker is not None:
            return bool(marker["sharded_backend"] == self.name)
        return locations.exists(locations.join(location, METADATA_NAME))

    def manifest(self, location: str) -> Manifest:
        return read_directory(location, self.name)

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        values = []
        for pair in zip(chunks, read_chunks(stored, chunks), strict=True):
            values.append(_decode(stored, *pair))
        return values

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load Megatron's common state, or join the values of PyTorch's.

        Megatron's is one object; PyTorch stores each value by itself.
        """
        if COMMON_KEY not in stored.manifest.key_index:
            return _extra_values(stored)
        values = self.load_objects(stored, stored.chunks_of(COMMON_KEY))
        paths = _paths(stored)
        if paths is None:
            return values[0]
        if len(paths) != len(values) or not all(isinstance(path, list) and path for path in paths):
            raise CorruptCheckpointError(
                f"The manifest of {stored.location!r} does not say where its values belong."
            )
        tree = _extra_values(stored)
        # Each item of a list holds a tensor or an object.
        max_items = len(stored.manifest.keys) + len(paths)
        for path, value in zip(paths, values, strict=True):
            max_items -= _put(tree, path, value, stored.location)
            if max_items < 0:
                raise CorruptCheckpointError(
                    f"{stored.location!r} stores lists with more items than it has values."
                )
        return tree


def _extra_values(stored: StoredCheckpoint) -> dict[Any, Any]:
    """Load the values that Lightning stores next to state dicts.

    If there are objects of unreadable classes, the result is empty, with a warning.
    """
    name = (stored.manifest.origin or {}).get("extra")
    if name is None:
        return {}
    path = locations.join(stored.location, name)
    try:
        extra = read_object(read_file(path, MAX_TABLE_BYTES))
    except RefusedGlobalError as error:
        logger.warning(
            "%s is not read, and nothing of it was run: it needs %r. If this is an Enum class, a "
            "dataclass or a namedtuple class that you trust, pass it to "
            "distckpt.register_object_type before loading.",
            path,
            error.name,
        )
        return {}
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path!r} is damaged or of an unknown form ({error!s:.300}): restore it from a copy."
        ) from error
    if isinstance(extra, dict):
        return extra
    return {}


def _paths(stored: StoredCheckpoint) -> Any:
    """Return the path of each value of PyTorch's common state.

    None for Megatron's common state.
    """
    return (stored.manifest.origin or {}).get("paths")


def _decode(stored: StoredCheckpoint, chunk: int, blob: bytes) -> Any:
    key = stored.key_of(chunk)
    first = int(stored.manifest.first_bytes[chunk])
    where = (
        f"{object_text(key)} in {stored.path_of(chunk)!r}, bytes {first} to {first + len(blob)},"
    )
    try:
        value = read_object(blob)
    except RefusedGlobalError as error:
        raise UnsupportedObjectError(
            f"{where} was refused, and nothing of it was run: it needs {error.name!r:.200}. "
            "Pickles can name any code, so only plain types, tensors and arrays are read from "
            "them. If this is an Enum class, a dataclass or a namedtuple class that you trust, "
            "import it and pass it to distckpt.register_object_type before loading; "
            "distckpt.megatron.interop.register_types() does so for those of Megatron Core."
        ) from error
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where} is damaged or of an unknown form ({error!s:.300}): restore the file from a "
            "copy."
        ) from error
    file_name = stored.manifest.files[int(stored.manifest.file_ids[chunk])].name
    if _paths(stored) is not None or file_name == COMMON_NAME:
        return value
    # Megatron stores a list of the objects that share a name, of which there is one.
    if type(value) is not list or not value:
        raise CorruptCheckpointError(
            f"{where} is not a list with an object, as Megatron stores it."
        )
    return value[0]


def _put(tree: dict[Any, Any], path: Sequence[Any], value: Any, location: str) -> int:
    """Put a value into nested dicts (for names) and lists (for numbers).

    Return the number of items added to lists.
    """
    node: Any = tree
    num_added = 0
    for step, following in zip(path, [*path[1:], None], strict=True):
        if following is None:
            fresh: Any = value
        else:
            fresh = {}
            if type(following) is int:
                fresh = []
        if isinstance(node, list) and type(step) is int and 0 <= step < _MAX_LIST:
            num_added += max(0, step + 1 - len(node))
            node.extend([HOLE] * (step + 1 - len(node)))
            known = node[step]
        elif isinstance(node, dict):
            known = node.get(step, HOLE)
        else:
            raise CorruptCheckpointError(
                f"{location!r} stores a value at {list(path)}, inside another one."
            )
        if known is HOLE:
            node[step] = known = fresh
        node = known
    return num_added
