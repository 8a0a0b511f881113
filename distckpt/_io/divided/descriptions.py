"""Messages about keys, shards and chunks among ranks and several planners.

Pure functions. The coordinator numbers the keys of all ranks. Each planner then receives a range of
them, with the shards of all ranks, and later sorts the chunks of its keys into parts of the
manifest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.columns import compress, decompress, narrow, pack, unpack
from distckpt._format.manifest import OBJECT
from distckpt._format.planned_manifest import cut_into_parts
from distckpt._geometry.region import IntArray, stacked, widen
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.shards import GlobalTable, ShardTable, choose_main_replicas, number_kinds

_IS_MAIN = 1
_IS_BUFFER = 2
_OPEN_RANK = 4

_Result = TypeVar("_Result")


def planner_ranks(num_planners: int, num_ranks: int) -> list[int]:
    """Return the ranks that plan: far apart, to use different hosts."""
    return [(2 * i + 1) * num_ranks // (2 * num_planners) for i in range(num_planners)]


# --- Keys -----------------------------------------------------------------------------------------


def tied_keys(table: ShardTable) -> bytes:
    """Encode the positions of keys whose tensors this rank holds twice."""
    tied_rows = np.flatnonzero(table.tie_ids != table.shard_ids)
    # Rows list shards in order.
    partners = np.searchsorted(table.shard_ids, table.tie_ids[tied_rows])
    return np.unique(table.key_ids[np.concatenate((tied_rows, partners))]).tobytes()


class Numbering(NamedTuple):
    """The keys of all ranks in the order of the manifest.

    Keys of tied tensors come first, since one planner must see them together; keys of objects come
    last.

    Attributes:
        keys: all keys, parallel to `dtypes` and `global_shapes`.
        ids_of_ranks: for each rank the numbers of its keys; ranks with equal keys share one array.
        edges: the first key of each planner, then the number of keys.
    """

    keys: list[str]
    dtypes: list[str]
    global_shapes: list[tuple[int, ...]]
    ids_of_ranks: list[IntArray]
    edges: list[int]

    @property
    def ndim(self) -> int:
        """The largest number of axes of any tensor."""
        return max(map(len, self.global_shapes), default=0)

    def to_planner(self, planner: int) -> bytes:
        """Encode the first number and the kinds of a planner's keys."""
        first = self.edges[planner]
        own = slice(first, self.edges[planner + 1])
        kinds = [self.keys[own], self.dtypes[own], self.global_shapes[own]]
        return compress(json.dumps([first, self.ndim, *kinds]).encode())

    def to_ranks(self) -> list[bytes]:
        """Encode for each rank the numbers of its keys, see `KeysOfRank`."""
        fields = [self.ndim, self.edges]
        return _call_once_per_array(
            self.ids_of_ranks, lambda ids: pack(fields, {"ids": narrow(ids)})
        )


def number_keys(kinds: Sequence[bytes], ties: Sequence[bytes], num_planners: int) -> Numbering:
    """Number the keys of all ranks, see `ShardTable.kinds_to_bytes` and `tied_keys`.

    Raises:
        InvalidShardingError: ranks do not agree on a key.
    """
    keys, kind_of_key, positions = number_kinds(kinds)
    dtypes = [dtype for dtype, _ in kind_of_key]
    shapes = [shape for _, shape in kind_of_key]
    # 0 for keys of tied tensors, 1 for other tensors, 2 for objects.
    group = 1 + (np.array(dtypes, np.str_) == OBJECT)
    for ids, tied in zip(positions, ties, strict=True):
        if tied:
            group[ids[np.frombuffer(tied, np.int64)]] = 0
    order = np.argsort(group, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    ids_of_ranks = _call_once_per_array(positions, lambda ids: number[ids])
    in_order = order.tolist()
    return Numbering(
        keys=[keys[i] for i in in_order],
        dtypes=[dtypes[i] for i in in_order],
        global_shapes=[shapes[i] for i in in_order],
        ids_of_ranks=ids_of_ranks,
        edges=_edges(ids_of_ranks, len(keys), num_planners, int((group == 0).sum())),
    )


def _call_once_per_array(
    arrays: Sequence[IntArray], function: Callable[[IntArray], _Result]
) -> list[_Result]:
    """Call a function once for each distinct array."""
    results: dict[int, _Result] = {}
    for array in arrays:
        if id(array) not in results:
            results[id(array)] = function(array)
    return [results[id(array)] for array in arrays]


def _edges(
    ids_of_ranks: Sequence[IntArray], num_keys: int, num_planners: int, num_tied: int
) -> list[int]:
    """Divide keys into ranges with similar numbers of shards.

    The first range has all keys of tied tensors.
    """
    num_shards = np.zeros(num_keys, np.int64)
    for ids in ids_of_ranks:
        num_shards[ids] += 1
    ends = np.cumsum(num_shards)
    even = np.arange(1, num_planners) * int(num_shards.sum()) // num_planners
    inner = np.maximum(np.searchsorted(ends, even), num_tied)
    return [0, *inner.tolist(), num_keys]


class KeysOfRank(NamedTuple):
    """The part of a `Numbering` that one rank needs.

    Attributes:
        ndim: the largest number of axes of any tensor.
        edges: see `Numbering`.
        ids: the numbers of the keys of this rank.
    """

    ndim: int
    edges: list[int]
    ids: IntArray

    @classmethod
    def from_bytes(cls, data: bytes) -> KeysOfRank:
        """Decode a message of `Numbering.to_ranks`."""
        (ndim, edges), columns = unpack(data)
        return cls(ndim, edges, columns["ids"].astype(np.int64))

    def rows_of_planners(self, table: ShardTable) -> list[IntArray]:
        """Return the rows of this rank's table for each planner."""
        key_ids = self.ids[table.key_ids]
        planner = np.searchsorted(self.edges[1:-1], key_ids, side="right")
        return [np.flatnonzero(planner == number) for number in range(len(self.edges) - 1)]


# --- Shards ---------------------------------------------------------------------------------------


def describe_rows(table: ShardTable, own_keys: KeysOfRank, rows: IntArray) -> bytes:
    """Encode some rows of a rank's table for their planner."""
    flags = _IS_MAIN * table.is_main[rows] + _IS_BUFFER * table.is_buffer[rows]
    numbers = np.vstack(
        (
            own_keys.ids[table.key_ids[rows]],
            table.shard_ids[rows],
            table.tie_ids[rows],
            flags + _OPEN_RANK * table.open_ranks[rows],
            np.full(len(rows), table.exchange_group),
            *table.digests[rows].view(np.int32).reshape(-1, 2).T,
            widen(table.offsets[rows], own_keys.ndim, 0).T,
            widen(table.shapes[rows], own_keys.ndim, 1).T,
        )
    )
    return _to_bytes(numbers)


def _to_bytes(numbers: IntArray) -> bytes:
    """Encode columns of numbers, behind their dtype."""
    dtype = b"<i8" if numbers.max(initial=0) > np.iinfo(np.int32).max else b"<i4"
    return dtype + compress(numbers.astype(dtype.decode()).tobytes())


def _joined(messages: Iterable[bytes], num_columns: int) -> tuple[IntArray, IntArray]:
    """Decode columns of numbers, one after the other; return them, and their ends."""

    @functools.cache
    def read(message: bytes) -> IntArray:
        numbers = np.frombuffer(decompress(message[3:]), message[:3].decode())
        return numbers.reshape(num_columns, -1)

    tables = list(map(read, messages))
    return np.concatenate(tables, axis=1), np.cumsum([table.shape[1] for table in tables])


def read_descriptions(
    keys: bytes, messages: Sequence[bytes]
) -> tuple[GlobalTable, IntArray, list[int]]:
    """Decode the descriptions of all ranks into one table.

    Return the table, rank by rank, with keys numbered from the planner's first key; the first row
    of each rank, then the number of rows; and the exchange group of each rank.

    Args:
        keys: see `Numbering.to_planner`.
        messages: the descriptions, by rank.
    """
    first_key, ndim, names, dtypes, shapes = json.loads(decompress(keys))
    numbers, ends = _joined(messages, 7 + 2 * ndim)
    flags = numbers[3]
    table = GlobalTable(
        keys=names,
        dtypes=dtypes,
        global_shapes=stacked([tuple(shape) for shape in shapes], ndim, 1),
        ndims=np.array([len(shape) for shape in shapes], np.int64),
        ranks=np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)),
        key_ids=numbers[0] - first_key,
        shard_ids=numbers[1],
        tie_ids=numbers[2],
        is_main=(flags & _IS_MAIN) != 0,
        is_buffer=(flags & _IS_BUFFER) != 0,
        digests=numbers[5:7].T.astype(np.int32, "C").view(np.uint64).ravel(),
        offsets=numbers[7 : 7 + ndim].T,
        shapes=numbers[7 + ndim :].T,
    )
    choose_main_replicas(table, (flags // _OPEN_RANK).astype(np.uint8))
    exchange_groups = np.zeros(len(ends), np.int64)
    exchange_groups[table.ranks] = numbers[4]
    return table, np.append(0, ends), exchange_groups.tolist()


# --- Chunks ---------------------------------------------------------------------------------------


def split_chunks(table: ChunkTable, edges: Sequence[int], ndim: int) -> tuple[ChunkTable, bytes]:
    """Separate the chunks that planners receive from the rest.

    `ndim` is the largest number of axes of any stored tensor.

    Returns:
        The chunks whose files are not laid out yet, with all files of the rank; and a message to
        the coordinator with the number of files, and for each planner the other chunks of its keys.
    """
    is_open = np.array([not file.header_bytes for file in table.files], np.bool_)
    is_rest = is_open[table.file_ids]
    planner = np.searchsorted(edges[1:-1], table.key_ids, side="right")
    columns = (table.key_ids, table.file_ids, table.first_bytes, table.num_bytes)
    offsets = widen(table.offsets, ndim, 0)
    shapes = widen(table.shapes, ndim, 1)
    numbers = np.vstack((*columns, offsets.T, shapes.T))
    parts = [len(table.files).to_bytes(8, "little")]
    for number in range(len(edges) - 1):
        parts.append(_to_bytes(numbers[:, ~is_rest & (planner == number)]))
    return table.rows(np.flatnonzero(is_rest)), pack_parts(parts)


def chunks_by_planner(messages: list[bytes]) -> list[bytes]:
    """Sort the chunks of all ranks by planner; return a message for each.

    `messages` are of `split_chunks`. The list is emptied.
    """
    counts, *columns = zip(*map(unpack_parts, messages), strict=True)
    messages.clear()
    ends = np.cumsum([int.from_bytes(count, "little") for count in counts])
    first_files = np.append(0, ends[:-1]).astype(np.int64).tobytes()
    return [pack_parts([first_files, *chunks]) for chunks in columns]


def parts_of_chunks(bundle: bytes, ndim: int) -> list[bytes]:
    """Sort the chunks in a message of `chunks_by_planner` into manifest parts."""
    files, *messages = unpack_parts(bundle)
    numbers, ends = _joined(messages, 4 + 2 * ndim)
    key_ids, file_ids, first_bytes, num_bytes, *regions = numbers
    if not len(key_ids):
        return []
    first_files = np.repeat(np.frombuffer(files, np.int64), np.diff(ends, prepend=0))
    chunks = ChunkTable.empty()._replace(
        key_ids=key_ids,
        file_ids=file_ids + first_files,
        first_bytes=first_bytes,
        num_bytes=num_bytes,
        offsets=np.array(regions[:ndim]).T,
        shapes=np.array(regions[ndim:]).T,
    )
    return cut_into_parts(chunks.rows(chunks.sorted_rows))
