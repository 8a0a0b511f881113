"""Checkpoints of torch.distributed.checkpoint as manifests, and their objects.

There are three kinds, all with a `.metadata` file next to their `.distcp` files: from PyTorch; from
Megatron Core's `torch_dist` strategy, which also have a marker and in most versions a `common.pt`;
and directories of such folders, one for each object (`folders.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import (
    CorruptCheckpointError,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import map_threads
from distckpt._base.tree import HOLE
from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest, look_up_file
from distckpt._foreign.torch_dist.folders import files_of_values, is_divided, read_folders
from distckpt._foreign.torch_dist.metadata import (
    Metadata,
    StoredItem,
    TensorEntry,
    read_metadata,
)
from distckpt._foreign.torch_dist.objects import locate_tensor, read_object
from distckpt._foreign.torch_dist.runs import contiguous_runs, unflattened_runs
from distckpt._foreign.torch_dist.unpickle import RefusedGlobalError
from distckpt._format.foreign_formats import TORCH_DIST
from distckpt._format.manifest import MAX_TABLE_BYTES, OBJECT, Manifest
from distckpt._format.marker import CONFIG_FNAME, read_file, read_marker
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read import read_chunks
from distckpt._state.common_state import COMMON_KEY, object_text
from distckpt._storage import locations
from distckpt.mapping._wrappers import ShardedObject

logger = logging.getLogger(__name__)

_MAX_LIST = 1 << 20
_MALFORMED = (ValueError, TypeError, IndexError, RecursionError)
"""Errors of reading untrusted pickles."""

METADATA_NAME = TORCH_DIST.marker
COMMON_NAME = "common.pt"
EXTRA_NAME = "meta.pt"
"""The file of Lightning's values outside state dicts.

Modules and optimizers have the state dicts.
"""

_MEGATRON_COMMON_KEY = "common_state"


class TorchDistReader(Reader):
    """Reads directories with a `.metadata` file, a `torch_dist` marker, or such folders."""

    name = TORCH_DIST.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        if marker is not None:
            return bool(marker["sharded_backend"] == self.name)
        return _has_metadata(location) or is_divided(location)

    def manifest(self, location: str) -> Manifest:
        return _read_directory(location)

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


def _has_metadata(location: str) -> bool:
    return locations.exists(locations.join(location, METADATA_NAME))


@paused_garbage_collection()
def _read_directory(location: str) -> Manifest:
    """Return the manifest of a checkpoint of torch.distributed.checkpoint.

    Reads `.metadata`, and the few bytes of each stored tensor that say where its elements lie. For
    a checkpoint of PyTorch, `origin` of the manifest has the path of each object in the state dict.
    """
    marker = read_marker(location)
    metadata, extra = _read_metadata(location, marker)
    items = []
    for entry in metadata.tensors:
        for _, item in entry.chunks:
            items.append((entry.key, item))
    files = _look_up_files(location, [*items, *metadata.objects.items()])
    pieces = _tensor_pieces(location, metadata.tensors)
    fields: dict[str, Any] = {}
    if marker is not None:
        cells = _megatron_objects(location, metadata.objects)
        if not any(cell.key == COMMON_KEY for cell in cells):
            cells += _common_file(location, marker, files)
    else:
        _check_is_not_of_megatron(location, metadata.objects)
        names = sorted(metadata.objects)
        fields["paths"] = [metadata.paths.get(name, (name,)) for name in names]
        cells = []
        for i, name in enumerate(names):
            cells.append(_cell(COMMON_KEY, (i,), (len(names),), metadata.objects[name]))
        if extra:
            fields["extra"] = extra
    pieces += cells
    return build_manifest(TORCH_DIST.name, location, pieces, list(files.values()), fields)


# ---- files


def _read_metadata(
    location: str, marker: Mapping[str, Any] | None
) -> tuple[Metadata, dict[str, str]]:
    """Read all `.metadata`, and list the files of other values.

    Those come with their entries in the common state.
    """
    if marker is None and not _has_metadata(location) and is_divided(location):
        return read_folders(location), files_of_values(location)
    extra = {}
    if locations.exists(locations.join(location, EXTRA_NAME)):
        extra[EXTRA_NAME] = ""
    return read_metadata(locations.join(location, METADATA_NAME)), extra


def _look_up_files(location: str, items: Sequence[tuple[str, StoredItem]]) -> dict[str, ShardFile]:
    """Look up the files named in `.metadata`, and check the items' bounds."""
    files: dict[str, ShardFile] = {}
    items_by_file: Counter[str] = Counter()
    for key, item in items:
        if item.file not in files:
            files[item.file] = look_up_file(location, item.file, key)
        if item.first_byte + item.num_bytes > files[item.file].num_bytes:
            raise CorruptCheckpointError(
                f"{locations.join(location, item.file)!r} has {files[item.file].num_bytes} bytes, "
                f"but {METADATA_NAME} says that {key!r} lies in it up to byte "
                f"{item.first_byte + item.num_bytes}: the file was cut off. Restore it from a copy."
            )
        items_by_file[item.file] += item.num_bytes
        if items_by_file[item.file] > files[item.file].num_bytes:
            raise CorruptCheckpointError(
                f"{METADATA_NAME} of {location!r} places {key!r} in {item.file!r} where other "
                "items lie: it is damaged. Restore it from a copy."
            )
    return files


# ---- tensors


def _tensor_pieces(location: str, entries: Sequence[TensorEntry]) -> list[StoredPiece]:
    chunks = []
    for entry in entries:
        if entry.dtype not in TO_NAME:
            raise UnsupportedObjectError(
                f"Key {entry.key!r} in {location!r} has dtype {entry.dtype}, which checkpoints of "
                "distckpt cannot hold: remove or convert it with the program that wrote it."
            )
        chunks += [(entry, region, item) for region, item in entry.chunks]

    def read(chunk: tuple[TensorEntry, Region, StoredItem]) -> list[StoredPiece]:
        entry, region, item = chunk
        try:
            return list(_pieces_of_chunk(location, entry, region, item))
        except ValueError as error:
            reason = str(error)
            if isinstance(error, RefusedGlobalError):
                reason = f"names {error.name!r:.200}"
            raise CorruptCheckpointError(
                f"{locations.join(location, item.file)!r}, bytes {item.first_byte} to "
                f"{item.first_byte + item.num_bytes}, does not hold {region} of key {entry.key!r} "
                f"as a tensor: {reason}. Nothing of it was run. Restore the file from a copy."
            ) from error

    # Each takes two small reads, which take mostly latency on a network file system.
    pieces = list(itertools.chain.from_iterable(map_threads(read, chunks)))
    without = {entry.key for entry in entries} - {piece.key for piece in pieces}
    if without:
        raise CorruptCheckpointError(
            f"{METADATA_NAME} of {location!r} does not say where {summarize_keys(without)} lies."
        )
    return pieces


def _pieces_of_chunk(
    location: str, entry: TensorEntry, region: Region, item: StoredItem
) -> Iterator[StoredPiece]:
    """Yield the pieces of the chunk that an item holds."""
    path = locations.join(location, item.file)

    def read_range(start: int, stop: int) -> bytes:
        return locations.read_range(path, item.first_byte + start, item.first_byte + stop)

    stored, first_byte = locate_tensor(read_range, item.num_bytes)
    if stored.dtype != entry.dtype or stored.shape != region.shape:
        raise ValueError(
            f"it is {stored.dtype} {stored.shape}, {METADATA_NAME} says {entry.dtype} "
            f"{region.shape}"
        )
    dtype = TO_NAME[entry.dtype]
    item_bytes = entry.dtype.itemsize
    first = item.first_byte + first_byte
    if entry.original_shape is None:
        shape = entry.shape
        runs = contiguous_runs(stored, region)
    else:
        shape = entry.original_shape
        runs = unflattened_runs(stored, region, entry.shape, shape)
    for run, position in runs:
        start = first + position * item_bytes
        num_bytes = run.num_elements * item_bytes
        yield StoredPiece(entry.key, dtype, run, shape, item.file, start, num_bytes)


# ---- objects


def _cell(
    key: str, offset: tuple[int, ...], shape: tuple[int, ...], item: StoredItem
) -> StoredPiece:
    """Return the piece of a cell in an object's grid."""
    return StoredPiece(key, OBJECT, Region(offset, (1,) * len(offset)), shape, *item)


def _megatron_objects(location: str, objects: Mapping[str, StoredItem]) -> list[StoredPiece]:
    """Return the cells of Megatron's objects.

    Their names end in `/shard_<offset>_<shape>`; in later versions common state is one.
    """
    shards: list[tuple[ShardedObject, StoredItem]] = []
    last_sizes: dict[str, int] = {}
    for name, item in objects.items():
        shard = _shard_named(name)
        if shard is None:
            raise CorruptCheckpointError(
                f"The {METADATA_NAME} of {location!r} holds an object {name!r}, which is not a "
                "name that Megatron gives."
            )
        shards.append((shard, item))
        last = max(shard.global_offset[-1:], default=0)
        last_sizes[shard.key] = max(last_sizes.get(shard.key, 1), last + 1)
    cells = []
    for shard, item in shards:
        shape = list(shard.global_shape)
        for axis, size in enumerate(shape):
            # Old names lack the last size.
            if size < 0:
                shape[axis] = last_sizes[shard.key]
        key = COMMON_KEY if shard.key == _MEGATRON_COMMON_KEY else shard.key
        cells.append(_cell(key, shard.global_offset, tuple(shape), item))
    return cells


def _shard_named(name: str) -> ShardedObject | None:
    """Return the shard with a name of Megatron's form; None for any other name."""
    try:
        return ShardedObject.empty_from_unique_key(name)
    except InvalidShardingError:
        return None


def _check_is_not_of_megatron(location: str, names: Iterable[str]) -> None:
    """Refuse a checkpoint of Megatron without the marker that it writes last.

    Its objects show where it comes from.
    """
    name = next(filter(_shard_named, names), None)
    if name is not None:
        raise CorruptCheckpointError(
            f"{location!r} holds an object of Megatron ({name!r}), but not the {CONFIG_FNAME} that "
            "Megatron writes at the end: its save did not finish, or not all files were copied. "
            "Restore the file from a copy, or load another checkpoint."
        )


def _common_file(
    location: str, marker: Mapping[str, Any], files: dict[str, ShardFile]
) -> Iterator[StoredPiece]:
    """Yield the cell of Megatron's file of common state, where it exists."""
    path = locations.join(location, COMMON_NAME)
    if locations.exists(path):
        files[COMMON_NAME] = look_up_file(location, COMMON_NAME, COMMON_KEY)
        item = StoredItem(COMMON_NAME, 0, files[COMMON_NAME].num_bytes)
        yield _cell(COMMON_KEY, (0,), (1,), item)
    elif "common_backend" in marker:
        raise CorruptCheckpointError(
            f"{path!r} is missing, in which Megatron stores the iteration and other common state: "
            "it was deleted, or not copied. Restore it from a copy. If tensors alone are needed, "
            f"put an empty one in its place: torch.save({{}}, {path!r})."
        )


# ---- values


def _extra_values(stored: StoredCheckpoint) -> dict[Any, Any]:
    """Load the values of Lightning and accelerate in further files.

    Those of a file with objects of unreadable classes are left out, with a warning.
    """
    values: dict[Any, Any] = {}
    for name, entry in (stored.manifest.notes.get("extra") or {}).items():
        own = _values_in(locations.join(stored.location, name))
        if entry and own is not None:
            values[entry] = own
        elif isinstance(own, dict):
            values.update(own)
    return values


def _values_in(path: str) -> Any:
    """Read a file of values; None, with a warning, if it needs an unreadable class."""
    try:
        return read_object(read_file(path, MAX_TABLE_BYTES))
    except RefusedGlobalError as error:
        logger.warning(
            "%s is not read, and nothing of it was run: it needs %r. If this is an Enum class, a "
            "dataclass or a namedtuple class that you trust, pass it to "
            "distckpt.register_object_type before loading.",
            path,
            error.name,
        )
        return None
    except _MALFORMED as error:
        raise CorruptCheckpointError(
            f"{path!r} is damaged or of an unknown form ({error!s:.300}): restore it from a copy."
        ) from error


def _paths(stored: StoredCheckpoint) -> Any:
    """Return the path of each value of PyTorch's common state.

    None for Megatron's common state.
    """
    return stored.manifest.notes.get("paths")


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
    except _MALFORMED as error:
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
        fresh: Any = {}
        if following is None:
            fresh = value
        elif type(following) is int:
            fresh = []
        if isinstance(node, dict):
            node.setdefault(step, HOLE)
        elif isinstance(node, list) and type(step) is int and 0 <= step < _MAX_LIST:
            num_missing = max(0, step + 1 - len(node))
            node.extend([HOLE] * num_missing)
            num_added += num_missing
        else:
            raise CorruptCheckpointError(
                f"{location!r} stores a value at {list(path)}, inside another one."
            )
        if node[step] is HOLE:
            node[step] = fresh
        node = node[step]
    return num_added
