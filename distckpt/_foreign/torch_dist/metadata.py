"""The `.metadata` file of torch.distributed.checkpoint: the places of all chunks."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from distckpt._base.dtypes import LazyTable
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._foreign.torch_dist.unpickle import (
    GlobalName,
    Record,
    RefusedGlobalError,
    made,
    read_pickle,
    record,
)
from distckpt._format.codec.tree import DTYPES
from distckpt._format.manifest import MAX_TABLE_BYTES
from distckpt._format.marker import read_file
from distckpt._geometry.region import MAX_NDIM, Region

_MAX_DEPTH = 256
"""Greatest depth of nested containers."""

_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_RECORDS: dict[str, tuple[str, ...]] = {
    f"{_DCP}.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_DCP}.planner": (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    ),
    f"{_SHARDED}.metadata": ("ShardMetadata",),
    f"{_SHARDED}.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    _MEGATRON: ("MCoreMetadata", "MCoreSavePlan"),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip
"""Classes and functions of PyTorch and Megatron Core, read as records."""


def _make_table() -> dict[GlobalName, Any]:
    functions: dict[GlobalName, Any] = {
        ("torch", "Size"): lambda sizes=(): _counts(sizes),
        ("collections", "OrderedDict"): dict,
    }
    table: dict[GlobalName, Any] = {**made(functions)}
    for module, names in _RECORDS.items():
        for name in names:
            table[module, name] = record(f"{module}.{name}")
    for name, dtype in DTYPES.items():
        table["torch", name] = dtype
    return table


_TABLE: Mapping[GlobalName, Any] = LazyTable(_make_table)


class StoredItem(NamedTuple):
    """Bytes [first_byte, first_byte + num_bytes) of a file: an archive of `torch.save`."""

    file: str
    first_byte: int
    num_bytes: int


_StoredItems = dict[tuple[str, tuple[int, ...] | None], StoredItem]
"""Items by key and offset; objects have no offset."""


class TensorEntry(NamedTuple):
    """A stored tensor.

    Attributes:
        key: its name.
        dtype: of its elements.
        shape: as it is stored.
        chunks: regions of it and the items that hold them.
        original_shape: its own shape, if it was stored as an array of flattened shards.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[tuple[Region, StoredItem]]
    original_shape: tuple[int, ...] | None


_Path = tuple[str | int, ...]
"""Keys and positions of a place in nested dicts and lists."""


class Metadata(NamedTuple):
    """The content of a `.metadata` file.

    It has tensors, objects by name, and the places of both in the state dict.
    """

    tensors: list[TensorEntry]
    objects: dict[str, StoredItem]
    paths: dict[str, _Path]


def read_metadata(path: str) -> Metadata:
    """Read a `.metadata` file."""
    try:
        data = read_file(path, MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing: it says where in the .distcp files everything lies. Restore it "
            "from a copy. A save that did not finish has none. Ranks that save each for itself "
            "leave one each, and such checkpoints are not read: save together."
        ) from error
    try:
        return _interpret(read_pickle(data, _TABLE), len(data))
    except RefusedGlobalError as error:
        raise CorruptCheckpointError(
            f"{path!r} was refused, and nothing of it was run: it names {error.name!r:.200}, which "
            "is not one of the classes that PyTorch and Megatron Core store there. The file may be "
            "hostile: find out where it comes from."
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path!r} is damaged ({type(error).__name__}: {error!s:.300}): restore it from a copy."
        ) from error


def _interpret(root: Any, num_bytes: int) -> Metadata:
    """Interpret the content of a pickle of `num_bytes`."""
    is_metadata = _is_record(root, "Metadata") or _is_record(root, "MCoreMetadata")
    _require(is_metadata, "it holds no Metadata")
    stored = _stored_items(_dict(root.get("storage_data")))
    mcore = root.get("mcore_data") or {}
    tensors: list[TensorEntry] = []
    objects: dict[str, StoredItem] = {}
    # One list in many places of the pickle could describe more chunks than it has bytes.
    max_chunks = num_bytes
    for key, entry in _dict(root.get("state_dict_metadata")).items():
        _require(type(key) is str and isinstance(entry, Record), "an entry without a name")
        if entry.kind == "BytesStorageMetadata":
            _require((key, None) in stored, f"nothing says where {key!r} lies")
            objects[key] = stored[key, None]
            continue
        _require(entry.kind == "TensorStorageMetadata", f"{key!r} is a {entry.kind}")
        max_chunks -= len(entry.get("chunks"))
        _require(max_chunks >= 0, "its tensors have more parts than it has bytes")
        tensors.append(_tensor_entry(key, entry, stored, _dict(mcore).get(key)))
    return Metadata(tensors, objects, _paths(root.get("planner_data"), max_chunks))


def _stored_items(storage_data: Mapping[Any, Any]) -> _StoredItems:
    items = {}
    for index, info in storage_data.items():
        _require(_is_record(index, "MetadataIndex"), "a place without a name")
        _require(_is_record(info, "_StorageInfo"), "a name without a place")
        name = index.get("fqn")
        offset = index.get("offset")
        item = _stored_item(name, info)
        items[name, None if offset is None else _counts(offset)] = item
    return items


def _stored_item(name: Any, info: Record) -> StoredItem:
    """Return the place of the item with a name."""
    file = info.get("relative_path")
    first = info.get("offset")
    count = info.get("length")
    _require(type(name) is str and type(file) is str, "a name that is not a string")
    _require(_is_count(first) and _is_count(count), f"the place of {name!r} is not a number")
    if extensions := info.get("transform_descriptors"):
        names = ", ".join(text for text in extensions if type(text) is str)
        raise CheckpointingException(
            f"{name!r} in {file!r} was written through {names:.100}, which only the program "
            "that wrote it undoes: save without such extensions."
        )
    return StoredItem(file, first, count)


def _tensor_entry(
    key: str,
    entry: Record,
    stored: _StoredItems,
    mcore: Any,
) -> TensorEntry:
    properties = entry.get("properties")
    _require(isinstance(properties, Record), f"{key!r} has no properties")
    state = properties.state
    dtype: Any = state.get("dtype") if isinstance(state, dict) else state[0]
    _require(isinstance(dtype, torch.dtype), f"{key!r} has no dtype")
    shape = _counts(entry.get("size"))
    _require(
        math.prod(n + 1 for n in shape) < 2**62,
        f"{key!r} has the shape {shape}, larger than any storage",
    )
    # Ranks without elements of a tensor may have stored the same nothing.
    chunks = {}
    for chunk in entry.get("chunks"):
        region = _region(key, chunk, shape)
        if (key, region.offset) not in stored:
            raise ValueError(f"nothing says where {region} of {key!r} lies")
        chunks[region] = stored[key, region.offset]
    original = (mcore or {}).get("nd_reformulated_orig_global_shape")
    original_shape = None
    if original is not None:
        original_shape = _counts(original)
    return TensorEntry(key, dtype, shape, list(chunks.items()), original_shape)


def _region(key: str, chunk: Record, shape: tuple[int, ...]) -> Region:
    """Return the region that a chunk of a tensor holds."""
    region = Region(_counts(chunk.get("offsets")), _counts(chunk.get("sizes")))
    if not len(region.offset) == len(region.shape) == len(shape):
        raise ValueError(f"a chunk of {key!r} has other axes")
    ends = map(operator.add, region.offset, region.shape)
    if not all(map(operator.le, ends, shape)):
        raise ValueError(f"{region} of {key!r} lies outside its global shape {shape}")
    return region


def _paths(planner_data: Any, max_chars: int) -> dict[str, _Path]:
    """Return the places of named items in the state dict."""
    paths: dict[str, _Path] = {}
    for name, path in planner_data.items() if isinstance(planner_data, dict) else ():
        _require(type(name) is str and _is_path(path), f"{name!r:.100} has no path")
        # A name is its path, with dots between.
        max_chars -= sum(len(str(part)) for part in path) - len(name)
        _require(max_chars >= 0, "its paths are longer than their names")
        paths[name] = path
    return paths


def _is_path(value: Any) -> bool:
    if not isinstance(value, tuple) or not 0 < len(value) <= _MAX_DEPTH:
        return False
    return all(map(_is_step, value))


def _is_step(value: object) -> bool:
    return type(value) is str or (type(value) is int and abs(value) < 2**62)


def _is_record(value: object, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _counts(values: Any) -> tuple[int, ...]:
    # Their text is not shown: a small pickle can make very long ones.
    if not isinstance(values, (tuple, list)) or len(values) > MAX_NDIM:
        raise ValueError("a shape that is not a list of sizes")
    if not all(map(_is_count, values)):
        raise ValueError("a shape or offset that holds something other than sizes")
    return tuple(values)


def _dict(value: Any) -> dict[Any, Any]:
    _require(isinstance(value, dict), f"a {type(value).__name__} where a dict should be")
    return value  # type: ignore[no-any-return]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
