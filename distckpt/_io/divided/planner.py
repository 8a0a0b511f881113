"""Planning a save of many shards in parts: each planner gets the shards of a range of keys from all
ranks. Pure functions.

The coordinator numbers the keys, and evens the bytes of ranks over what all planners have found. So
the plan is the same for any number of planners.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.columns import compress, decompress, narrow, pack, unpack
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.planned_manifest import cut_into_parts
from distckpt._geometry.region import IntArray, stacked
from distckpt._plan.save import (
    Groups,
    OwnedParts,
    Pieces,
    Slice,
    cut_line,
    cut_tolerance,
    find_aliases,
    group_replicas,
    owned_parts,
    writer_shares,
)
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._state.shards import GlobalTable, ShardTable, choose_main_replicas, number_kinds

_IS_MAIN, _IS_BUFFER, _OPEN_RANK = 1, 2, 4


def planner_ranks(num_planners: int, num_ranks: int) -> list[int]:
    """Return the ranks that plan, far apart, so that they are on different hosts."""
    return [(2 * i + 1) * num_ranks // (2 * num_planners) for i in range(num_planners)]


# --- Keys -----------------------------------------------------------------------------------------


def tied_keys(table: ShardTable) -> bytes:
    """Return the positions of keys of which this rank holds a tensor twice, encoded."""
    tied = np.flatnonzero(table.tie_ids != table.shard_ids)
    # Rows list shards in order.
    partners = np.searchsorted(table.shard_ids, table.tie_ids[tied])
    return np.unique(table.key_ids[np.concatenate((tied, partners))]).tobytes()


class Numbering(NamedTuple):
    """The keys of all ranks in the order of the manifest: first those of tied tensors, which one
    planner must see together, last those of objects.

    Attributes:
        keys: with `dtypes` and `global_shapes`, of all ranks.
        ids_of_ranks: the numbers of the keys of each rank; of ranks with equal keys the same array.
        edges: where the range of keys of each planner begins, and the end.
    """

    keys: list[str]
    dtypes: list[str]
    global_shapes: list[tuple[int, ...]]
    ids_of_ranks: list[IntArray]
    edges: list[int]

    @property
    def ndim(self) -> int:
        """The most axes that a tensor has."""
        return max(map(len, self.global_shapes), default=0)

    def to_planner(self, number: int) -> bytes:
        """Encode what a planner learns about its keys."""
        own = slice(self.edges[number], self.edges[number + 1])
        kinds = [self.keys[own], self.dtypes[own], self.global_shapes[own]]
        return compress(json.dumps([self.ndim, *kinds]).encode())

    def to_ranks(self) -> list[bytes]:
        """Encode what each rank learns."""
        distinct = {id(ids): ids for ids in self.ids_of_ranks}
        fields = [self.ndim, self.edges]
        encoded = {each: pack(fields, {"ids": narrow(ids)}) for each, ids in distinct.items()}
        return [encoded[id(ids)] for ids in self.ids_of_ranks]


def number_keys(kinds: Sequence[bytes], ties: Sequence[bytes], num_planners: int) -> Numbering:
    """Number the keys of all ranks, see `ShardTable.kinds_to_bytes` and `tied_keys`.

    Raises:
        InvalidShardingError: ranks do not agree on a key.
    """
    keys, kind_of_key, found = number_kinds(kinds)
    dtypes, shapes = map(list, zip(*kind_of_key, strict=True)) if keys else ([], [])
    # 0 for keys of tied tensors, 1 for others, 2 for objects.
    group = 1 + (np.array(dtypes, np.str_) == OBJECT)
    for ids, tied in zip(found, ties, strict=True):
        if tied:
            group[ids[np.frombuffer(tied, np.int64)]] = 0
    order = np.argsort(group, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    ids_of_ranks = _each_once(found, lambda ids: number[ids])
    in_order = order.tolist()
    return Numbering(
        keys=[keys[i] for i in in_order],
        dtypes=[dtypes[i] for i in in_order],
        global_shapes=[shapes[i] for i in in_order],
        ids_of_ranks=ids_of_ranks,
        edges=_edges(ids_of_ranks, len(keys), num_planners, int((group == 0).sum())),
    )


def _each_once(
    arrays: Sequence[IntArray], function: Callable[[IntArray], IntArray]
) -> list[IntArray]:
    """Call a function with each array once, however often it is listed."""
    results = {number: function(array) for number, array in {id(a): a for a in arrays}.items()}
    return [results[id(array)] for array in arrays]


def _edges(
    ids_of_ranks: Sequence[IntArray], num_keys: int, num_planners: int, num_tied: int
) -> list[int]:
    """Divide keys into ranges of about as many shards; the first has all of tied tensors."""
    num_shards = np.zeros(num_keys, np.int64)
    for ids in ids_of_ranks:
        num_shards[ids] += 1
    ends = np.cumsum(num_shards)
    even = np.arange(1, num_planners) * int(num_shards.sum()) // num_planners
    inner = np.maximum(np.searchsorted(ends, even), num_tied)
    return [0, *inner.tolist(), num_keys]


class OwnKeys(NamedTuple):
    """What a rank learns from a `Numbering`."""

    ndim: int
    edges: list[int]
    ids: IntArray

    @classmethod
    def from_bytes(cls, data: bytes) -> OwnKeys:
        """Decode what `Numbering.to_ranks` made."""
        (ndim, edges), columns = unpack(data)
        return cls(ndim, edges, columns["ids"].astype(np.int64))

    def rows_of_planners(self, table: ShardTable) -> list[IntArray]:
        """Return the rows of this rank's table that each planner gets."""
        key_ids = self.ids[table.key_ids]
        planner = np.searchsorted(self.edges[1:-1], key_ids, side="right")
        return [np.flatnonzero(planner == number) for number in range(len(self.edges) - 1)]


# --- Descriptions ---------------------------------------------------------------------------------


def describe_rows(table: ShardTable, own: OwnKeys, rows: IntArray) -> bytes:
    """Encode some rows of a rank's table for their planner."""
    flags = _IS_MAIN * table.is_main[rows] + _IS_BUFFER * table.is_buffer[rows]
    numbers = np.zeros((4 + 2 * own.ndim, len(rows)), np.int64)
    numbers[0] = own.ids[table.key_ids[rows]]
    numbers[1], numbers[2] = table.shard_ids[rows], table.tie_ids[rows]
    numbers[3] = flags + _OPEN_RANK * table.open_ranks[rows]
    ndim = table.offsets.shape[1]
    numbers[4 : 4 + ndim] = table.offsets[rows].T
    numbers[4 + own.ndim :] = 1
    numbers[4 + own.ndim : 4 + own.ndim + ndim] = table.shapes[rows].T
    head = np.array([len(rows), table.exchange_group], np.int64)
    return head.tobytes() + table.digests[rows].tobytes() + _numbers_to_bytes(numbers)


def _numbers_to_bytes(numbers: IntArray) -> bytes:
    """Encode columns of numbers from 0 on."""
    is_wide = bool(numbers.max(initial=0) > np.iinfo(np.int32).max)
    body = numbers.astype(np.int64 if is_wide else np.int32).tobytes()
    return bytes([is_wide]) + compress(body)


def _numbers_from_bytes(data: bytes, num_columns: int) -> Any:
    body = np.frombuffer(decompress(data[1:]), np.int64 if data[0] else np.int32)
    return body.reshape(num_columns, -1)


class _Rows(NamedTuple):
    exchange_group: int
    digests: npt.NDArray[np.uint64]
    numbers: IntArray


def _read_rows(message: bytes, ndim: int) -> _Rows:
    count, group = np.frombuffer(message, np.int64, 2).tolist()
    digests = np.frombuffer(message, np.uint64, count, 16)
    numbers = _numbers_from_bytes(message[16 + 8 * count :], 4 + 2 * ndim)
    return _Rows(group, digests, numbers)


class Described(NamedTuple):
    """What a planner gets: its keys, and the rows of all ranks.

    Attributes:
        table: of all ranks; keys are numbered from the first one of the planner.
        row_starts: where the rows of each rank begin, and the end.
        exchange_groups: of the ranks.
    """

    table: GlobalTable
    row_starts: IntArray
    exchange_groups: list[int]


def read_descriptions(
    keys: bytes, first_key: int, messages: Sequence[bytes], senders: IntArray
) -> Described:
    """Put together what all ranks have described.

    Args:
        keys: see `Numbering.to_planner`.
        first_key: the number of the first one.
        messages: the distinct ones.
        senders: for each rank, which of them it has sent.
    """
    ndim, names, dtypes, shapes = json.loads(decompress(keys))
    distinct = [_read_rows(message, ndim) for message in messages]
    sent = [distinct[i] for i in senders.tolist()]
    numbers = np.concatenate([rows.numbers for rows in sent], axis=1)
    counts = np.array([len(rows.digests) for rows in sent], np.int64)
    flags = numbers[3]
    table = GlobalTable(
        keys=names,
        dtypes=dtypes,
        global_shapes=stacked([tuple(shape) for shape in shapes], ndim, 1),
        ndims=np.array([len(shape) for shape in shapes], np.int64),
        ranks=np.repeat(np.arange(len(sent)), counts),
        key_ids=numbers[0] - first_key,
        shard_ids=numbers[1],
        tie_ids=numbers[2],
        is_main=(flags & _IS_MAIN) != 0,
        is_buffer=(flags & _IS_BUFFER) != 0,
        digests=np.concatenate([rows.digests for rows in sent]),
        offsets=numbers[4 : 4 + ndim].T,
        shapes=numbers[4 + ndim :].T,
    )
    choose_main_replicas(table, (flags // _OPEN_RANK).astype(np.uint8))
    row_starts = np.append(0, np.cumsum(counts))
    return Described(table, row_starts, [rows.exchange_group for rows in sent])


# --- Owners ---------------------------------------------------------------------------------------


class Lines(NamedTuple):
    """What a planner has found that ranks hold, see `lines`.

    Attributes:
        loads: bytes that only one rank can write, by rank.
        totals: bytes of each line that several ranks share.
        starts: where the ranks of each line begin in `candidates`, and the end.
        candidates: ranks.
    """

    loads: IntArray
    totals: IntArray
    starts: IntArray
    candidates: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(None, {name: narrow(column) for name, column in self._asdict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Lines:
        """Decode what `to_bytes` made."""
        _, columns = unpack(data)
        return cls(*(columns[name].astype(np.int64) for name in cls._fields))


class Cuts(NamedTuple):
    """Where the lines of a planner are cut, in bytes from the beginning of its part of each; see
    `Lines` and `cut_line`.
    """

    cuts: IntArray
    tolerances: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(None, {name: narrow(column) for name, column in self._asdict().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Cuts:
        """Decode what `to_bytes` made."""
        _, columns = unpack(data)
        return cls(*(columns[name].astype(np.int64) for name in cls._fields))


def share_lines(found: Sequence[Lines]) -> list[Cuts]:
    """Give each rank as many bytes as the others as far as possible, as `plan_owners` does: a line
    is what all planners have found of it, one after the other.
    """
    loads = np.sum([lines.loads for lines in found], axis=0)
    cuts = [np.zeros(len(lines.candidates) - len(lines.totals), np.int64) for lines in found]
    tolerances = [np.zeros(len(lines.totals), np.int64) for lines in found]
    parts: dict[bytes, list[tuple[int, int]]] = {}
    for planner, lines in enumerate(found):
        for line, (low, high) in enumerate(itertools.pairwise(lines.starts.tolist())):
            ranks = lines.candidates[low:high].tobytes()
            parts.setdefault(ranks, []).append((planner, line))
    # As within one planner: smaller sets of ranks first, then in the order of the keys.
    for ranks in sorted(parts, key=len):
        candidates = np.frombuffer(ranks, np.int64)
        totals = [int(found[planner].totals[line]) for planner, line in parts[ranks]]
        shares = writer_shares(loads[candidates], sum(totals))
        loads[candidates] += shares
        ends, begin = np.cumsum(shares)[:-1], 0
        for (planner, line), total in zip(parts[ranks], totals, strict=True):
            low = int(found[planner].starts[line]) - line
            cuts[planner][low : low + len(ends)] = np.clip(ends - begin, 0, total)
            tolerances[planner][line] = cut_tolerance(sum(totals), len(candidates))
            begin += total
    return [Cuts(*each) for each in zip(cuts, tolerances, strict=True)]


class Planner:
    """Plans the shards of a range of keys, which were validated."""

    def __init__(self, described: Described) -> None:
        self.table, self.row_starts, exchange_groups = described
        self.num_ranks = len(exchange_groups)
        self.aliases = find_aliases(self.table)
        self.groups: Groups = group_replicas(
            self.table, self.num_ranks, self.aliases, exchange_groups, by_key=True
        )
        self._owners = self.groups.lone_owners()
        self._shared = list(self.groups.shared_lines())

    def lines(self) -> Lines:
        """Return what the coordinator shares out."""
        sizes = [len(candidates) for _, candidates in self._shared]
        none = [np.zeros(0, np.int64)]
        totals = [int(self.groups.num_bytes[members].sum()) for members, _ in self._shared]
        return Lines(
            loads=self.groups.loads_of(self._owners, self.num_ranks),
            totals=np.array(totals, np.int64),
            starts=np.append(0, np.cumsum(sizes)).astype(np.int64),
            candidates=np.concatenate([*none, *(ranks for _, ranks in self._shared)]),
        )

    def own(self, cuts: Cuts) -> OwnedParts:
        """Return what each rank writes."""
        owners, slices, low = self._owners.copy(), list[Slice](), 0
        for (members, candidates), tolerance in zip(
            self._shared, cuts.tolerances.tolist(), strict=True
        ):
            high = low + len(candidates) - 1
            own_cuts = cuts.cuts[low:high]
            owners[members], cut = cut_line(
                self.table, self.groups, members, own_cuts, candidates, tolerance
            )
            slices += cut
            low = high
        return owned_parts(self.table, self.groups, owners, slices)

    def shares(
        self, parts: OwnedParts, factors: IntArray, sampled: Sequence[Sequence[int]]
    ) -> list[bytes]:
        """Encode what each rank learns, see `PlannedRows`."""
        shares, ndim = [], self.table.offsets.shape[1]
        local_rows = parts.rows - self.row_starts[parts.ranks]
        regions = np.hstack((parts.offsets, parts.shapes)).astype(np.int64)
        with_factor = np.flatnonzero(factors)
        factor_bounds = np.searchsorted(with_factor, self.row_starts).tolist()
        of_rank = zip(
            itertools.pairwise(parts.bounds(self.num_ranks)),
            itertools.pairwise(factor_bounds),
            self.row_starts.tolist(),
            sampled,
            strict=False,
        )
        for (low, high), (first, last), row_start, sampled_rows in of_rank:
            rows, is_whole = local_rows[low:high], parts.is_whole[low:high]
            is_cut = ~is_whole
            factor_rows = with_factor[first:last]
            counts = [is_whole.sum(), is_cut.sum(), len(factor_rows), len(sampled_rows), ndim]
            arrays = (
                np.array(counts, np.int64),
                rows[is_cut].astype(np.int64),
                regions[low:high][is_cut],
                factors[factor_rows].astype(np.int64),
                (factor_rows - row_start).astype(np.int64),
                np.array(sampled_rows, np.int64),
                rows[is_whole].astype(np.int32),
            )
            shares.append(b"".join(array.tobytes() for array in arrays))
        return shares


class PlannedRows(NamedTuple):
    """What a planner tells a rank. Rows are those of the rank's own table.

    Attributes:
        whole_rows: that the rank writes whole.
        cut_rows: of which it writes the regions in `offsets` and `shapes`.
        factor_rows: that have one of the `factors`, see `replica_factors`.
        sampled_rows: whose samples the coordinator needs.
    """

    whole_rows: IntArray
    cut_rows: IntArray
    offsets: IntArray
    shapes: IntArray
    factors: IntArray
    factor_rows: IntArray
    sampled_rows: IntArray

    @classmethod
    def from_bytes(cls, data: bytes, rows: IntArray) -> PlannedRows:
        """Decode what `Planner.shares` made for a rank that had sent some rows of its table."""
        num_whole, num_cut, num_factors, num_sampled, ndim = np.frombuffer(
            data, np.int64, 5
        ).tolist()
        sizes = [num_cut, num_cut * 2 * ndim, num_factors, num_factors, num_sampled]
        words = np.frombuffer(data, np.int64, 5 + sum(sizes))
        cut, regions, factors, with_factor, sampled, _ = np.split(words[5:], np.cumsum(sizes))
        whole = np.frombuffer(data, np.int32, num_whole, words.nbytes)
        regions = regions.reshape(num_cut, 2 * ndim)
        return cls(
            rows[whole],
            rows[cut],
            regions[:, :ndim],
            regions[:, ndim:],
            factors,
            rows[with_factor],
            rows[sampled],
        )


def join_pieces(
    table: ShardTable, planned: Sequence[PlannedRows], ids: IntArray, aliases: Sequence[int]
) -> Pieces:
    """Return what a rank writes by all planners.

    Args:
        table: of the rank.
        planned: by planner.
        ids: the numbers of its keys.
        aliases: the numbers of keys that are not stored.
    """
    # Of keys that are stored, in the manifest.
    stored_ids = ids - np.searchsorted(np.sort(np.array(aliases, np.int64)), ids)
    ndim = table.offsets.shape[1]
    whole = np.concatenate([each.whole_rows for each in planned])
    cut = np.concatenate([each.cut_rows for each in planned])
    rows = np.concatenate((whole, cut))
    return Pieces(
        key_ids=stored_ids[table.key_ids[rows]],
        shard_ids=table.shard_ids[rows],
        offsets=np.concatenate(
            [table.offsets[whole], *(each.offsets[:, :ndim] for each in planned)]
        ),
        shapes=np.concatenate([table.shapes[whole], *(each.shapes[:, :ndim] for each in planned)]),
    )


def join_factors(table: ShardTable, planned: Sequence[PlannedRows]) -> IntArray:
    """Return the factors of the rows of a rank's table, see `replica_factors`."""
    factors = np.zeros(len(table.key_ids), np.int64)
    for each in planned:
        factors[each.factor_rows] = each.factors
    return factors


# --- The manifest ---------------------------------------------------------------------------------


def split_chunks(table: ChunkTable, edges: Sequence[int]) -> tuple[ChunkTable, list[bytes]]:
    """Return the chunks of a rank whose files are not laid out yet, with all of its files; and the
    others encoded, for each planner those of its keys.
    """
    is_open = np.array([not file.header_bytes for file in table.files], np.bool_)
    is_rest = is_open[table.file_ids]
    planner = np.searchsorted(edges[1:-1], table.key_ids, side="right")
    columns = (table.key_ids, table.file_ids, table.first_bytes, table.num_bytes)
    numbers = np.vstack((*columns, table.offsets.T, table.shapes.T))
    of_planners = [numbers[:, ~is_rest & (planner == number)] for number in range(len(edges) - 1)]
    encoded = [len(each).to_bytes(1, "little") + _numbers_to_bytes(each) for each in of_planners]
    return table.rows(np.flatnonzero(is_rest)), encoded


def chunks_message(rest: ChunkTable, encoded: Sequence[bytes]) -> bytes:
    """Join what `split_chunks` has returned into what the coordinator gets."""
    return pack_parts([len(rest.files).to_bytes(8, "little"), *encoded])


def chunks_by_planner(messages: list[bytes], manifest: Manifest) -> list[bytes]:
    """Return what each planner gets of the messages of all ranks, a list that is emptied.

    Args:
        messages: see `chunks_message`.
        manifest: of the keys.
    """
    counts, *of_planners = zip(*map(unpack_parts, messages), strict=True)
    messages.clear()
    ends = np.cumsum([int.from_bytes(count, "little") for count in counts])
    first_files = np.append(0, ends[:-1]).astype(np.int64).tobytes()
    ndim = max(map(len, manifest.global_shapes), default=0).to_bytes(1, "little")
    return [pack_parts([ndim, first_files, *of_planner]) for of_planner in of_planners]


def parts_of_chunks(bundle: bytes) -> list[bytes]:
    """Return the parts of the manifest that hold what all ranks have sent a planner, see
    `chunks_by_planner`.
    """
    axes, files, *messages = unpack_parts(bundle)
    ndim, first_files = axes[0], np.frombuffer(files, np.int64)
    sent = [_numbers_from_bytes(message[1:], message[0]) for message in messages]
    counts = [each.shape[1] for each in sent]
    numbers = np.concatenate([_widened(each, ndim) for each in sent], axis=1)
    key_ids, file_ids, first_bytes, num_bytes, *regions = numbers
    if not len(key_ids):
        return []
    chunks = ChunkTable.empty()._replace(
        key_ids=key_ids,
        file_ids=file_ids + np.repeat(first_files, counts),
        first_bytes=first_bytes,
        num_bytes=num_bytes,
        offsets=np.array(regions[:ndim]).T,
        shapes=np.array(regions[ndim:]).T,
    )
    return cut_into_parts(chunks.rows(chunks.sorted_rows))


def _widened(numbers: IntArray, ndim: int) -> IntArray:
    """Give regions as many axes as others have."""
    missing = ndim - (len(numbers) - 4) // 2
    if not missing:
        return numbers
    middle = 4 + (len(numbers) - 4) // 2
    zeros = np.zeros((missing, numbers.shape[1]), numbers.dtype)
    return np.vstack((numbers[:middle], zeros, numbers[middle:], zeros + 1))
