"""Tables of the shards of ranks, without data.

They are the input of validation and planning. Flat shards appear as the regions that their range
consists of, objects as single cells of their grid, so that everything after this point is about
regions only.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import InvalidShardingError, UnsupportedObjectError
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._format.columns import compress, decompress, pack, unpack
from distckpt._format.manifest import OBJECT
from distckpt._geometry.region import (
    IntArray,
    Region,
    flat_range_regions,
    flat_start,
    intersect,
    regions_to_arrays,
    row_hashes,
    stacked,
    widen,
)
from distckpt.mapping._base import BufferReplicaId, OpenReplicaId, ReplicaId, flat_bounds
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, is_main_replica

Shard: TypeAlias = ShardedTensor | ShardedObject
_Kind: TypeAlias = tuple[str, tuple[int, ...]]
_KindColumns: TypeAlias = tuple[list[str], list[str], list[tuple[int, ...]]]
"""The keys of a rank, with dtypes and global shapes."""

_ROW_COLUMNS = (
    "key_ids",
    "shard_ids",
    "tie_ids",
    "is_main",
    "open_ranks",
    "is_buffer",
    "digests",
    "offsets",
    "shapes",
)


class ShardTable(NamedTuple):
    """The shards of one rank.

    `keys`, `dtypes` (safetensors names or `OBJECT`) and `global_shapes` have one item per distinct
    key. The columns have one row per region: `key_ids`, `shard_ids` (index of the shard on its
    rank), `tie_ids` (first shard of the rank that is the same memory), `is_main`, `open_ranks` (of
    an `OpenReplicaId`: 1, or 2 for a copy; else 0), `is_buffer` (only the main replica is written),
    `digests` (content hashes, 0 when not computed), and `offsets`, `shapes` of shape (n, max ndim),
    padded with 0 and 1. Ranks take over bytes of replicas in their `exchange_group`.
    """

    keys: list[str]
    dtypes: list[str]
    global_shapes: list[tuple[int, ...]]
    key_ids: IntArray
    shard_ids: IntArray
    tie_ids: IntArray
    is_main: npt.NDArray[np.bool_]
    open_ranks: npt.NDArray[np.uint8]
    is_buffer: npt.NDArray[np.bool_]
    digests: npt.NDArray[np.uint64]
    offsets: IntArray
    shapes: IntArray
    exchange_group: int = 0

    def row_region(self, row: int) -> Region:
        """Return the region of one row."""
        return _region_at(self, row, len(self.global_shapes[self.key_ids[row]]))

    def to_messages(self) -> tuple[bytes, bytes]:
        """Encode the table for sending: keys with their kinds, and rows.

        Keys and kinds are the same on many ranks.
        """
        rows = pack(self.exchange_group, {name: getattr(self, name) for name in _ROW_COLUMNS})
        return self.kinds_to_bytes(), compress(rows)

    def kinds_to_bytes(self) -> bytes:
        """Encode the keys with their kinds, the first of the messages."""
        kinds = json.dumps([self.keys, self.dtypes, self.global_shapes], separators=(",", ":"))
        return compress(kinds.encode())

    @classmethod
    def all_from_messages(
        cls,
        kinds: Sequence[bytes],
        rows: Sequence[bytes],
    ) -> list[ShardTable]:
        """Decode the messages of all ranks, see `to_messages`.

        Equal messages are decoded once, so that tables share their columns.
        """
        parse = functools.cache(_parse_kinds)
        read = functools.cache(lambda data: unpack(decompress(data)))
        tables = []
        for message, row_message in zip(kinds, rows, strict=True):
            exchange_group, columns = read(row_message)
            keys, dtypes, shapes = parse(message)
            tables.append(cls(keys, dtypes, shapes, exchange_group=exchange_group, **columns))
        return tables


def _parse_kinds(data: bytes) -> _KindColumns:
    keys, dtypes, shapes = json.loads(decompress(data))
    return keys, dtypes, [tuple(shape) for shape in shapes]


def shard_regions(shard: Shard) -> list[Region]:
    """Return the regions of a shard, in the order of its data.

    They are regions of the global tensor, even empty ones.
    """
    offset = tuple(shard.global_offset)
    if not isinstance(shard, ShardedTensor):
        return [Region(offset, (1,) * len(offset))]
    prepended = (1,) * shard.prepend_axis_num
    local_shape = tuple(shard.local_shape)
    if shard.flattened_range is None:
        return [Region(offset, prepended + local_shape)]
    runs = flat_range_regions(local_shape, *flat_bounds(shard.flattened_range, local_shape))
    lead = (0,) * len(prepended)
    regions = []
    for run in runs:
        run_offset = tuple(map(int.__add__, offset, lead + run.offset))
        regions.append(Region(run_offset, prepended + run.shape))
    return regions


def region_view(shard: ShardedTensor, region: Region) -> torch.Tensor:
    """Return the view of a shard's data with a region.

    The region is one of the global tensor; the view has its shape.
    """
    assert shard.data is not None
    data = shard.data
    if data.requires_grad:
        data = data.detach()
    if region.shape == data.shape and shard.flattened_range is None:
        return data
    local = region.relative_to(tuple(shard.global_offset))
    prepended = shard.prepend_axis_num
    if shard.flattened_range is None:
        if not region.offset:
            return data
        return data[(None,) * prepended][local.slices()]
    inner = Region(local.offset[prepended:], local.shape[prepended:])
    first = flat_bounds(shard.flattened_range, shard.local_shape)[0]
    start = flat_start(shard.local_shape, inner) - first
    return data[start : start + inner.num_elements].view(region.shape)


def shard_table(shards: Sequence[Shard], ties: Mapping[int, int] | None = None) -> ShardTable:
    """Return the table of this rank's shards.

    They must fit their global tensors and agree with one another. `ties` are the result of
    `find_ties` for them, if it was called before.
    """
    if ties is None:
        ties = find_ties(shards)
    keys, kinds, key_ids = _own_kinds(shards)
    regions: list[Region] = []
    counts = []
    for shard in shards:
        own = shard_regions(shard)
        regions += own
        counts.append(len(own))
    numbers = np.arange(len(shards))
    shard_ids = np.repeat(numbers, counts)
    numbers[list(ties)] = list(ties.values())
    copies = [_copy_kind(shard.replica_id) for shard in shards]
    is_main, open_ranks, is_buffers = stacked(copies, 3, 0)[shard_ids].T
    offsets, shapes = regions_to_arrays(regions)
    table = ShardTable(
        keys=keys,
        dtypes=[dtype for dtype, _ in kinds],
        global_shapes=[shape for _, shape in kinds],
        key_ids=key_ids[shard_ids],
        shard_ids=shard_ids,
        tie_ids=numbers[shard_ids],
        is_main=is_main.astype(np.bool_),
        open_ranks=open_ranks.astype(np.uint8),
        is_buffer=is_buffers.astype(np.bool_),
        digests=np.zeros(len(regions), np.uint64),
        offsets=offsets,
        shapes=shapes,
    )
    _check_inside(table)
    return table


def _copy_kind(replica: ReplicaId) -> tuple[bool, int, bool]:
    """Return `is_main`, `open_ranks` and `is_buffer` of a copy.

    See `ShardTable`.
    """
    if type(replica) is int or not isinstance(replica, OpenReplicaId):
        return is_main_replica(replica), 0, False
    return False, 1 + any(replica[:1]), isinstance(replica, BufferReplicaId)


def _own_kinds(shards: Sequence[Shard]) -> tuple[list[str], list[_Kind], IntArray]:
    """Number the keys of some shards.

    Return the keys, the kind of each, and the number of each shard's key.
    """
    key_index: dict[str, int] = {}
    kinds: list[_Kind] = []
    key_ids = []
    for shard in shards:
        kind = (_dtype_name(shard), tuple(map(int, shard.global_shape)))
        key_id = key_index.setdefault(shard.key, len(kinds))
        key_ids.append(key_id)
        if key_id == len(kinds):
            kinds.append(kind)
        elif kinds[key_id] != kind:
            text = _contradiction(shard.key, kinds[key_id], kind, "in one state dict")
            raise _sharding_error([text])
    keys = list(key_index)
    _check_names(keys)
    return keys, kinds, np.array(key_ids, np.int64)


def _check_inside(table: ShardTable) -> None:
    ndim = table.offsets.shape[1]
    # Longer shapes belong to keys of which this rank holds no element.
    bounds = stacked([shape[:ndim] for shape in table.global_shapes], ndim, 1)
    outside = (table.offsets < 0) | (table.offsets + table.shapes > bounds[table.key_ids])
    rows = np.flatnonzero(outside.any(axis=1))
    if len(rows):
        key_id = table.key_ids[rows[0]]
        raise InvalidShardingError(
            f"Shard {table.row_region(rows[0])} of key {table.keys[key_id]!r} lies outside its "
            f"global shape {table.global_shapes[key_id]}: check global_offset and global_shape (or "
            "the rank offsets they were made from)."
        )


class GlobalTable(NamedTuple):
    """The shards of all ranks: a `ShardTable` with a `ranks` column.

    Keys are numbered over all ranks. `global_shapes` is (t, max ndim), padded with 1; `ndims` is
    (t,).
    """

    keys: list[str]
    dtypes: list[str]
    global_shapes: IntArray
    ndims: IntArray
    ranks: IntArray
    key_ids: IntArray
    shard_ids: IntArray
    tie_ids: IntArray
    is_main: npt.NDArray[np.bool_]
    is_buffer: npt.NDArray[np.bool_]
    digests: npt.NDArray[np.uint64]
    offsets: IntArray
    shapes: IntArray

    def global_shape(self, key_id: int) -> tuple[int, ...]:
        """Return the global shape of a key."""
        return tuple(self.global_shapes[key_id, : self.ndims[key_id]].tolist())

    def row_region(self, row: int) -> Region:
        """Return the region of one row."""
        return _region_at(self, row, self.ndims[self.key_ids[row]])


def _region_at(table: ShardTable | GlobalTable, row: int, ndim: int) -> Region:
    offset = table.offsets[row, :ndim].tolist()
    return Region(tuple(offset), tuple(table.shapes[row, :ndim].tolist()))


def merge_tables(tables: Sequence[ShardTable]) -> GlobalTable:
    """Join the tables of all ranks.

    They must agree on the dtype and global shape of every key.
    """
    key_index, kinds, id_maps = _number_keys(
        [(table.keys, table.dtypes, table.global_shapes) for table in tables]
    )
    ndim = max((len(shape) for _, shape in kinds), default=0)

    def joined(column: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(table, column) for table in tables])

    merged = GlobalTable(
        keys=list(key_index),
        dtypes=[dtype for dtype, _ in kinds],
        global_shapes=stacked([shape for _, shape in kinds], ndim, 1),
        ndims=np.array([len(shape) for _, shape in kinds], np.int64),
        ranks=np.repeat(np.arange(len(tables)), [len(table.key_ids) for table in tables]),
        key_ids=np.concatenate(
            [ids[table.key_ids] for ids, table in zip(id_maps, tables, strict=True)]
        ),
        shard_ids=joined("shard_ids"),
        tie_ids=joined("tie_ids"),
        is_main=joined("is_main"),
        is_buffer=joined("is_buffer"),
        digests=joined("digests"),
        offsets=np.concatenate([widen(table.offsets, ndim, 0) for table in tables]),
        shapes=np.concatenate([widen(table.shapes, ndim, 1) for table in tables]),
    )
    choose_main_replicas(merged, joined("open_ranks"))
    return merged


def choose_main_replicas(table: GlobalTable, open_ranks: npt.NDArray[np.uint8]) -> None:
    """Choose the main replica, in place, of each region without one.

    That is a region for which it was not named.
    """
    if not open_ranks.any():
        return
    # Named ones come first, then by rank: the table lists rows in this order.
    candidates = np.flatnonzero(table.is_main | (open_ranks > 0))
    candidates = candidates[np.argsort(open_ranks[candidates], kind="stable")]
    identity = row_hashes(
        [column[candidates] for column in (table.key_ids, *table.offsets.T, *table.shapes.T)]
    )
    _, first = np.unique(identity, return_index=True)
    mains = candidates[np.sort(first)]
    table.is_main[mains] = True
    # One tensor under several layouts (tied weights of stages that are divided differently): the
    # first of overlapping regions.
    sizes = np.prod(table.shapes[mains], axis=1, dtype=np.float64)
    main_sizes = np.bincount(table.key_ids[mains], sizes, len(table.keys))
    global_sizes = np.prod(table.global_shapes, axis=1, dtype=np.float64)
    for key_id in np.flatnonzero(main_sizes > global_sizes).tolist():
        regions: list[Region] = []
        for row in mains[table.key_ids[mains] == key_id].tolist():
            region = table.row_region(row)
            if open_ranks[row] and any(intersect(region, other) for other in regions):
                table.is_main[row] = False
            else:
                regions.append(region)


def _number_keys(
    columns: Sequence[_KindColumns],
) -> tuple[dict[str, int], list[_Kind], list[IntArray]]:
    """Number the keys of all ranks.

    Return key -> id, the kind of each id, and for each rank the ids of its keys.
    """
    # The keys of one rank differ.
    keys, dtypes, shapes = columns[0]
    key_index = {key: key_id for key_id, key in enumerate(keys)}
    kinds = [*zip(dtypes, shapes, strict=True)]
    first_rank = [0] * len(kinds)
    id_maps: list[IntArray] = []
    seen = {tuple(map(id, columns[0])): np.arange(len(kinds))}
    disagreements: list[KeyFault] = []
    for rank, own in enumerate(columns):
        # Replicas share lists, and one look is enough.
        identity = tuple(map(id, own))
        if identity not in seen:
            ids = np.empty(len(own[0]), np.int64)
            for i, (key, dtype, shape) in enumerate(zip(*own, strict=True)):
                ids[i] = key_id = key_index.setdefault(key, len(kinds))
                if key_id == len(kinds):
                    kinds.append((dtype, shape))
                    first_rank.append(rank)
                elif kinds[key_id] != (dtype, shape):
                    where = f"on rank {first_rank[key_id]} and on rank {rank}"
                    disagreements.append(_contradiction(key, kinds[key_id], (dtype, shape), where))
            seen[identity] = ids
        id_maps.append(seen[identity])
    if disagreements:
        raise _sharding_error(disagreements)
    return key_index, kinds, id_maps


def number_kinds(kinds: Sequence[bytes]) -> tuple[list[str], list[_Kind], list[IntArray]]:
    """Number the keys of all ranks, see `ShardTable.kinds_to_bytes`.

    Return the keys, the kind of each, and the numbers of the keys of each rank: the same array for
    equal messages.
    """
    columns = list(map(functools.cache(_parse_kinds), kinds))
    key_index, all_kinds, id_maps = _number_keys(columns)
    return list(key_index), all_kinds, id_maps


def _check_names(keys: Sequence[str]) -> None:
    try:
        "".join(keys).encode()
    except UnicodeEncodeError as error:
        key = next(key for key in keys if any("\ud800" <= letter <= "\udfff" for letter in key))
        raise InvalidShardingError(
            f"The key {key!r} is not Unicode text (it has half of a surrogate pair), so it cannot "
            "be a name in a safetensors file: rename it."
        ) from error
    if "__metadata__" in keys:
        raise InvalidShardingError(
            "The key '__metadata__' has a meaning of its own in safetensors files: rename it."
        )


def _dtype_name(shard: Shard) -> str:
    if not isinstance(shard, ShardedTensor):
        return OBJECT
    name = TO_NAME.get(shard.dtype)
    if name is None:
        raise UnsupportedObjectError(
            f"Key {shard.key!r} has dtype {shard.dtype}, which safetensors files cannot hold. "
            "Convert it first, or wrap it in a ShardedObject if it is small."
        )
    return name


def find_ties(shards: Sequence[Shard]) -> dict[int, int]:
    """Find the shards that are the same memory as an earlier one.

    Return the index of each -> the index of the first. The memory is the same part of the same
    memory.
    """
    pointers = []
    for shard in shards:
        data = shard.data if isinstance(shard, ShardedTensor) else None
        pointers.append(0 if data is None else data.data_ptr())
    addresses = list(filter(None, pointers))
    if len(set(addresses)) == len(addresses):
        return {}
    num_at = Counter(addresses)
    first: dict[Any, int] = {}
    ties: dict[int, int] = {}
    for index, pointer in enumerate(pointers):
        # Hardly any tensors begin at the same address; the rest need no closer look.
        if num_at[pointer] > 1:
            identity = _memory_identity(shards[index])
            if identity is not None and first.setdefault(identity, index) != index:
                ties[index] = first[identity]
    return ties


def _memory_identity(shard: Shard) -> Any:
    """Return the identity of a shard's memory; None if the shard is empty."""
    data = shard.data
    if not isinstance(shard, ShardedTensor) or data is None or not data.numel():
        return None
    bounds = None
    flat = shard.flattened_range
    if flat is not None:
        bounds = (flat.start, flat.stop)
    return (
        data.device,
        data.data_ptr(),
        data.dtype,
        tuple(data.shape),
        data.stride(),
        data.is_conj(),
        data.is_neg(),
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        tuple(shard.local_shape),
        bounds,
    )


def _contradiction(key: str, first: _Kind, second: _Kind, where: str) -> KeyFault:
    names = []
    for dtype, shape in (first, second):
        if dtype == OBJECT:
            names.append(f"an object grid {shape}")
        else:
            names.append(f"{dtype} of {shape}")
    text = (
        f" has two meanings {where}: {names[0]} and {names[1]}. "
        "Give different tensors different keys, and one tensor the same dtype and global shape "
        "everywhere."
    )
    return KeyFault(key, text, text)


def _sharding_error(faults: Sequence[KeyFault]) -> InvalidShardingError:
    lines = [line[0].upper() + line[1:] for line in summarize_faults(faults)]
    return InvalidShardingError("\n".join(lines))
