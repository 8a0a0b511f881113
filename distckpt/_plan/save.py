"""Planning of saves: one owner for every byte.

The coordinator plans for all ranks, over numpy columns only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.manifest import OBJECT
from distckpt._geometry.region import (
    IntArray,
    flat_range_regions,
    mixed,
    regions_to_arrays,
    row_hashes,
    stable_order,
    widen,
)
from distckpt._state.shards import GlobalTable

BALANCE_TOLERANCE = 0.01
"""Largest distance of a cut from even, relative to one rank's bytes."""
MIN_SLICE_BYTES = 4096
"""Smallest slice: better balance is not worth another chunk below this size."""
MAX_SMALL_WRITERS = 16
"""Up to this many ranks share even small writes: parallelism outweighs more files."""
MIN_RANK_BYTES = 1 << 20
"""Smallest share of a rank among more ranks.

Otherwise, thousands of ranks would write thousands of tiny files.
"""


class Pieces(NamedTuple):
    """The regions of its shards that one rank writes.

    `key_ids` are the ids of keys in the manifest.
    """

    key_ids: IntArray
    shard_ids: IntArray
    offsets: IntArray
    shapes: IntArray


def find_aliases(table: GlobalTable) -> dict[int, int]:
    """Find tied keys, whose main shards share memory with another key.

    Every main shard of a tied key has, on its own rank, the memory of a shard of that one key.

    Returns:
        Key id -> id of the key that is stored instead.
    """
    tied = np.flatnonzero(table.is_main & (table.tie_ids != table.shard_ids))
    if not len(tied):
        return {}
    stride = int(table.shard_ids.max(initial=0)) + 1
    # Ascending, because tables are put together by rank and list shards in order.
    shards = table.ranks * stride + table.shard_ids
    partners = table.key_ids[
        np.searchsorted(shards, table.ranks[tied] * stride + table.tie_ids[tied])
    ]
    # Some ranks of an uneven division have shards without elements, which have no memory to share.
    counted = table.is_main & (table.shapes > 0).all(axis=1)
    num_main = np.bincount(table.key_ids[counted], minlength=len(table.keys))
    aliases: dict[int, int] = {}
    pairs, counts = np.unique(np.stack([table.key_ids[tied], partners]), axis=1, return_counts=True)
    for (alias, key), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        # A chain cannot arise: a tie always points to the rank's first shard in that memory.
        if (
            alias != key
            and count == num_main[alias]
            and key not in aliases
            and alias not in aliases.values()
        ):
            aliases[alias] = key
    return aliases


def plan_owners(
    table: GlobalTable,
    num_ranks: int,
    aliases: dict[int, int],
    exchange_groups: Sequence[int] | None = None,
) -> list[Pieces]:
    """Give every byte one owner among the ranks that hold it.

    The loads of ranks are balanced. Shards on the same set of ranks form one long line of bytes. It
    is cut into one run per rank; ranks with lower loads get longer runs. At most (ranks - 1)
    tensors of a line are cut, between rows. Keys in `aliases` are not stored. With
    `exchange_groups`, the id of each rank's group, replicas take over bytes only from a main
    replica in their own group.
    """
    groups = group_replicas(table, num_ranks, aliases, exchange_groups)
    return _pieces_of_lines(table, groups, list(groups.shared_lines()), aliases, num_ranks)


def plan_held(table: GlobalTable, num_ranks: int, holders: Sequence[range]) -> list[Pieces]:
    """Plan owners of regions that ranges of ranks hold.

    The result is the same as for a table with a row for each rank, which would be large.

    Args:
        table: the main replicas, each on the first rank of its range.
        num_ranks: the number of ranks that write.
        holders: the ranks that hold each row of the table.
    """
    groups = group_replicas(table, num_ranks, {}, None)
    members: dict[range, list[int]] = defaultdict(list)
    for group, row in enumerate(groups.rows.tolist()):
        if len(holders[row]) > 1 and groups.num_bytes[group]:
            members[holders[row]].append(group)
    # In the order of `lines`.
    in_order = sorted(members.items(), key=lambda item: (len(item[0]), item[1][0]))
    shared = [(np.array(line), np.array(ranks)) for ranks, line in in_order]
    return _pieces_of_lines(table, groups, shared, {}, num_ranks)


def _pieces_of_lines(
    table: GlobalTable,
    groups: Groups,
    shared: Sequence[tuple[IntArray, IntArray]],
    aliases: Collection[int],
    num_ranks: int,
) -> list[Pieces]:
    """Divide the shared lines; groups in no line go to the only rank that holds them."""
    whole_owner = groups.lone_owners()
    for members, _ in shared:
        whole_owner[members] = -1
    loads = groups.loads_of(whole_owner, num_ranks)
    lines_to_cut = []
    for members, candidates in shared:
        num_bytes = int(groups.num_bytes[members].sum())
        shares = writer_shares(loads[candidates], num_bytes)
        loads[candidates] += shares
        tolerance = cut_tolerance(num_bytes, len(candidates))
        lines_to_cut.append((members, candidates, np.cumsum(shares)[:-1], tolerance))
    pieces = assign_pieces(table, groups, whole_owner, lines_to_cut)
    return _pieces_of_ranks(table, aliases, pieces, num_ranks)


def cut_tolerance(num_bytes: int, num_ranks: int) -> int:
    """Return the largest distance of a cut from its even position."""
    return max(MIN_SLICE_BYTES, int(num_bytes / num_ranks * BALANCE_TOLERANCE))


class Groups(NamedTuple):
    """Groups of equal regions: each is a main replica with its copies.

    Attributes:
        rows: the row of each main replica.
        ranks: the rank of each main replica.
        num_bytes: the size of each region.
        holder_ranks: the ranks that can write each group, sorted by group and rank.
        holder_rows: the rows of these ranks.
        holder_starts: the first holder of each group, then the number of holders.
    """

    rows: IntArray
    ranks: IntArray
    num_bytes: IntArray
    holder_ranks: IntArray
    holder_rows: IntArray
    holder_starts: IntArray

    @property
    def is_shared(self) -> npt.NDArray[np.bool_]:
        """Whether several ranks can write parts of each group."""
        return (np.diff(self.holder_starts) > 1) & (self.num_bytes > 0)

    def lone_owners(self) -> IntArray:
        """Return the only writer of each group; -1 where there are several."""
        first_holders = self.holder_ranks[self.holder_starts[:-1]]
        owners = np.where(self.num_bytes > 0, first_holders, self.ranks)
        return np.where(self.is_shared, -1, owners)

    def loads_of(self, owners: IntArray, num_ranks: int) -> IntArray:
        """Return the bytes of each rank in groups that have an owner."""
        has_owner = owners >= 0
        # Floating point is exact up to 2**53 bytes.
        loads = np.bincount(owners[has_owner], self.num_bytes[has_owner], num_ranks)
        return loads.astype(np.int64)

    def shared_lines(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield the `lines` of groups that several ranks hold."""
        counts = np.diff(self.holder_starts)
        is_shared = self.is_shared
        shared = np.flatnonzero(is_shared)
        ranks = self.holder_ranks[np.repeat(is_shared, counts)]
        for members, candidates in lines(ranks, np.append(0, np.cumsum(counts[shared]))):
            yield shared[members], candidates


def group_replicas(
    table: GlobalTable,
    num_ranks: int,
    aliases: dict[int, int],
    exchange_groups: Sequence[int] | None,
    *,
    by_key: bool = False,
) -> Groups:
    """Find the ranks that hold each region; see `plan_owners`.

    Groups are in the order of the table or, with `by_key`, in the order of their keys.
    """
    sizes = {**ITEM_BYTES, OBJECT: 1}
    item_bytes = np.array([sizes[dtype] for dtype in table.dtypes], np.int64)
    num_bytes = np.prod(table.shapes, axis=1, dtype=np.int64) * item_bytes[table.key_ids]
    is_empty_key = (table.global_shapes == 0).any(axis=1)
    stored = (num_bytes > 0) | is_empty_key[table.key_ids]
    if aliases:
        stored &= ~np.isin(table.key_ids, np.fromiter(aliases, np.int64))
    main_of_row = _main_rows(table, stored, is_empty_key)
    is_first = np.zeros(len(stored), np.bool_)
    is_first[main_of_row[main_of_row >= 0]] = True
    rows = np.flatnonzero(is_first)
    if by_key:
        rows = rows[stable_order(table.key_ids[rows], len(table.keys))]
    # The last item is for regions without a main replica.
    group_of_row = np.full(len(stored) + 1, -1, np.int64)
    group_of_row[rows] = np.arange(len(rows))
    group = group_of_row[main_of_row]
    belongs = stored & (group >= 0)
    # Objects and buffers stay with their main replica: copies need not be equal, and copies of
    # objects are not encoded.
    is_object = np.array([dtype == OBJECT for dtype in table.dtypes], np.bool_)
    belongs &= table.is_main | ~(is_object[table.key_ids] | table.is_buffer)
    if exchange_groups is not None:
        group_of_rank = np.asarray(exchange_groups, np.int64)
        # The last item is for regions without a main replica.
        belongs &= (
            group_of_rank[table.ranks] == np.append(group_of_rank[table.ranks[rows]], -1)[group]
        )
    holders = np.flatnonzero(belongs)
    # The ranks are already in ascending order.
    holders = holders[np.argsort(group[holders], kind="stable")]
    pair = group[holders] * num_ranks + table.ranks[holders]
    holders = holders[np.diff(pair, prepend=-1) != 0]
    return Groups(
        rows=rows,
        ranks=table.ranks[rows],
        num_bytes=num_bytes[rows],
        holder_ranks=table.ranks[holders],
        holder_rows=holders,
        holder_starts=np.searchsorted(group[holders], np.arange(len(rows) + 1)),
    )


def _main_rows(
    table: GlobalTable, stored: npt.NDArray[np.bool_], is_empty_key: npt.NDArray[np.bool_]
) -> IntArray:
    """Return the first main row of each row's region; -1 without one."""
    main_of_row = np.where(stored & table.is_main, np.arange(len(stored)), -1)
    # Regions of main replicas alone are all different, except for empty ones.
    is_copied = is_empty_key.copy()
    is_copied[table.key_ids[~table.is_main]] = True
    rows = np.flatnonzero(is_copied[table.key_ids])
    columns = (table.key_ids, *table.offsets.T, *table.shapes.T)
    # One sort instead of look-ups in the order of the ranks, which would all miss the CPU's cache.
    regions, region = np.unique(
        row_hashes([column[rows] for column in columns]), return_inverse=True
    )
    first = np.full(len(regions), -1, np.int64)
    is_main = main_of_row[rows] >= 0
    first[region[is_main][::-1]] = rows[is_main][::-1]
    main_of_row[rows] = first[region]
    return main_of_row


def lines(ranks: IntArray, starts: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield `(members, ranks)` for each distinct set of ranks.

    Smaller sets come first, in a fixed order. The ranks of member i are
    `ranks[starts[i] : starts[i + 1]]`.
    """
    if len(starts) == 1:
        return
    sizes = np.diff(starts)
    numbers = mixed(np.arange(int(ranks.max(initial=0)) + 1, dtype=np.uint64))
    signature = np.add.reduceat(numbers[ranks], starts[:-1])
    _, first, line = np.unique(signature, return_index=True, return_inverse=True)
    members_of = np.split(np.argsort(line, kind="stable"), np.cumsum(np.bincount(line))[:-1])
    for index in sorted(range(len(first)), key=lambda i: (sizes[first[i]], first[i])):
        start = starts[first[index]]
        yield members_of[index], ranks[start : start + sizes[first[index]]]


def writer_shares(loads: IntArray, total: int) -> IntArray:
    """Split `total` bytes among the ranks that write them.

    As `even_shares`, but with many ranks only so many get a share that each writes at least
    `MIN_RANK_BYTES`. Ranks that have a file anyway come first.
    """
    count = max(MAX_SMALL_WRITERS, total // MIN_RANK_BYTES)
    if len(loads) <= count:
        return even_shares(loads, total)
    shares = np.zeros(len(loads), np.int64)
    writers = np.lexsort((loads, loads == 0))[:count]
    shares[writers] = even_shares(loads[writers], total)
    return shares


def even_shares(loads: IntArray, total: int) -> IntArray:
    """Split `total` bytes to make loads as equal as possible."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    # With the lowest k ranks filled, the level is (total + their loads) / k; take the smallest
    # level that works.
    levels = (total + np.cumsum(ascending)) / np.arange(1, len(loads) + 1)
    fills_next = np.append(levels[:-1] > ascending[1:], False)
    count = int(np.argmin(fills_next)) + 1
    shares = np.zeros(len(loads), np.int64)
    level = int(levels[count - 1])
    shares[order[:count]] = np.maximum(level - ascending[:count], 0)
    # The remainder from rounding, in parts that differ by at most one.
    rest, more = divmod(total - int(shares.sum()), count)
    shares[order[:count]] += rest + (np.arange(count) < more)
    return shares


Slice: TypeAlias = tuple[int, int, int, int]
"""A piece of a cut group: group, rank, first element, last element + 1."""


def _cut_line(
    table: GlobalTable,
    groups: Groups,
    members: IntArray,
    cuts: IntArray,
    candidates: IntArray,
    tolerance: int,
) -> tuple[IntArray, list[Slice]]:
    """Cut the line of `members` among its ranks, the `candidates`.

    Each cut is at most `tolerance` from its even position in `cuts`, in bytes.

    Returns:
        The rank that writes each group whole, -1 if it is cut; and the pieces of cut groups.
    """
    sizes = groups.num_bytes[members]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    # The position of each cut in bytes, moved to a border between groups or between rows.
    borders: list[int] = []
    border = 0
    for cut in cuts.tolist():
        index = min(int(np.searchsorted(ends, cut, side="right")), len(members) - 1)
        inside = cut - int(starts[index])
        size = int(sizes[index])
        step = size
        if size > tolerance:
            step = _row_bytes(table, int(groups.rows[members[index]]), tolerance)
        moved = min(size, (inside + step // 2) // max(step, 1) * step)
        border = max(int(starts[index]) + moved, border)
        borders.append(border)
    edges = np.array([0, *borders, int(ends[-1])], np.int64)
    # A group belongs to the run in which it begins; it is cut if it ends beyond that run.
    run = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, len(candidates) - 1)
    owners = candidates[run].copy()
    slices: list[Slice] = []
    for index in np.flatnonzero(ends > edges[run + 1]).tolist():
        group = int(members[index])
        owners[index] = -1
        start = int(starts[index])
        end = int(ends[index])
        item = int(sizes[index]) // math.prod(table.row_region(int(groups.rows[group])).shape)
        for rank, low, high in zip(
            candidates.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
        ):
            first = max(low, start)
            last = min(high, end)
            if first < last:
                slices.append((group, rank, (first - start) // item, (last - start) // item))
    return owners, slices


def _row_bytes(table: GlobalTable, row: int, tolerance: int) -> int:
    """Return the size of the rows between which a tensor is cut.

    The first axis with rows of at most `tolerance` bytes divides it into rows.
    """
    shape = table.row_region(row).shape
    step = ITEM_BYTES[table.dtypes[table.key_ids[row]]] * math.prod(shape)
    for extent in shape:
        step //= extent
        if step <= tolerance:
            break
    return step


CutLine: TypeAlias = tuple[IntArray, IntArray, IntArray, int]
"""A line to cut: its members, candidates, cuts and tolerance, see `_cut_line`."""


class OwnedPieces(NamedTuple):
    """The pieces that ranks write, in the order of the ranks.

    Attributes:
        ranks: the writer of each piece.
        rows: the row of the table that has each piece.
        offsets: with `shapes`, the region of each piece.
        shapes: see `offsets`.
        is_whole: whether the piece is the whole region of its row.
    """

    ranks: IntArray
    rows: IntArray
    offsets: IntArray
    shapes: IntArray
    is_whole: npt.NDArray[np.bool_]

    def bounds(self, num_ranks: int) -> list[int]:
        """Return the first piece of each rank, then the number of pieces."""
        bounds: list[int] = np.searchsorted(self.ranks, np.arange(num_ranks + 1)).tolist()
        return bounds


def assign_pieces(
    table: GlobalTable, groups: Groups, whole_owner: IntArray, lines_to_cut: Iterable[CutLine]
) -> OwnedPieces:
    """Cut lines, and list the pieces that ranks write; those of one rank in the order of groups.

    `whole_owner` has the rank that writes a group which is in no line.
    """
    whole_owner = whole_owner.copy()
    cut: list[Slice] = []
    for members, candidates, cuts, tolerance in lines_to_cut:
        owners, slices = _cut_line(table, groups, members, cuts, candidates, tolerance)
        whole_owner[members] = owners
        cut += slices
    group_ids = [np.flatnonzero(whole_owner >= 0)]
    owners_of_pieces = [whole_owner[group_ids[0]]]
    num_whole = len(group_ids[0])
    whole_rows = groups.rows[group_ids[0]]
    offsets = [table.offsets[whole_rows]]
    shapes = [table.shapes[whole_rows]]
    ndim = table.offsets.shape[1]
    for group, rank, first, last in cut:
        origin = table.row_region(int(groups.rows[group]))
        regions = list(flat_range_regions(origin.shape, first, last))
        piece_offsets, piece_shapes = regions_to_arrays(regions)
        offsets.append(widen(piece_offsets + np.array(origin.offset, np.int64), ndim, 0))
        shapes.append(widen(piece_shapes, ndim, 1))
        group_ids.append(np.full(len(regions), group))
        owners_of_pieces.append(np.full(len(regions), rank))
    group_id = np.concatenate(group_ids)
    owner = np.concatenate(owners_of_pieces)
    order = np.arange(num_whole)
    if cut:
        order = np.argsort(group_id, kind="stable")
    order = order[stable_order(owner[order], int(owner.max(initial=0)) + 1)]
    return OwnedPieces(
        ranks=owner[order],
        rows=_rows_of_holders(groups, group_id[order], owner[order]),
        offsets=np.concatenate(offsets)[order],
        shapes=np.concatenate(shapes)[order],
        is_whole=order < num_whole,
    )


def _rows_of_holders(groups: Groups, group_id: IntArray, owner: IntArray) -> IntArray:
    """Return each owner's row, or the only row of the group."""
    counts = np.diff(groups.holder_starts)
    position = groups.holder_starts[group_id]
    several = np.flatnonzero(counts[group_id] > 1)
    stride = int(groups.holder_ranks.max(initial=0)) + 1
    holder_pairs = np.repeat(np.arange(len(counts)), counts) * stride + groups.holder_ranks
    pairs = group_id[several] * stride + owner[several]
    position[several] = np.searchsorted(holder_pairs, pairs)
    assert (groups.holder_ranks[position[several]] == owner[several]).all()
    return groups.holder_rows[position]


def _pieces_of_ranks(
    table: GlobalTable, aliases: Collection[int], owned: OwnedPieces, num_ranks: int
) -> list[Pieces]:
    is_stored = np.ones(len(table.keys), np.bool_)
    is_stored[list(aliases)] = False
    pieces = Pieces(
        (np.cumsum(is_stored) - 1)[table.key_ids[owned.rows]],
        table.shard_ids[owned.rows],
        owned.offsets,
        owned.shapes,
    )
    pieces_of_ranks = []
    for low, high in itertools.pairwise(owned.bounds(num_ranks)):
        pieces_of_ranks.append(Pieces(*(column[low:high] for column in pieces)))
    return pieces_of_ranks
