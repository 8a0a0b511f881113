"""Checks of the shards of all ranks, before anything is written.

Each element has one main replica, and replicas agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._format.checksum import checksum
from distckpt._format.manifest import OBJECT
from distckpt._geometry.region import (
    IntArray,
    find_tiling_faults,
    mixed,
    row_hashes,
    stable_order,
)
from distckpt._state.shards import GlobalTable, ShardTable

MAX_COMPARED = 256
"""Approximate number of regions that a repeated save compares with replicas. Its plan is known."""


def validate_shards(table: GlobalTable, *, allow_gaps: bool = False) -> None:
    """Check that main replicas tile every global tensor and object grid.

    They must cover it exactly once. With `allow_gaps`, elements that no rank holds are accepted:
    they will not be in the checkpoint, or one process requests a part.
    """
    faults: list[tuple[int, tuple[int, ...]]] = []
    is_checked = ~_is_trivial(table, allow_gaps)
    _check_sizes(table)
    is_checked &= ~_are_in_line(table, np.flatnonzero(table.is_main & is_checked[table.key_ids]))
    main = np.flatnonzero(table.is_main & is_checked[table.key_ids])
    for ndim in np.unique(table.ndims).tolist():
        keys = np.flatnonzero((table.ndims == ndim) & is_checked)
        renumbered = np.full(len(table.keys), -1, np.int64)
        renumbered[keys] = np.arange(len(keys))
        rows = main[renumbered[table.key_ids[main]] >= 0]
        wrong = find_tiling_faults(
            renumbered[table.key_ids[rows]],
            table.offsets[rows, :ndim],
            table.shapes[rows, :ndim],
            table.global_shapes[keys, :ndim],
        )
        faults.extend((int(keys[fault.tensor]), fault.element) for fault in wrong)
    if faults:
        _refuse(table, faults, allow_gaps)


def _invalid(faults: Sequence[KeyFault]) -> InvalidShardingError:
    return InvalidShardingError("Invalid sharding:\n- " + "\n- ".join(summarize_faults(faults)))


def _is_trivial(table: GlobalTable, allow_gaps: bool) -> npt.NDArray[np.bool_]:
    """Mark keys with nothing to check.

    One main region is the whole tensor or, if gaps are allowed, one shard has all main regions,
    since its own never overlap.
    """
    if allow_gaps:
        is_next = (np.diff(table.ranks) != 0) | (np.diff(table.shard_ids) != 0)
        is_first = np.append(True, is_next)[: len(table.key_ids)]
        mains = table.key_ids[table.is_main & is_first]
        return np.asarray(np.bincount(mains, minlength=len(table.keys)) < 2, np.bool_)
    is_whole = table.is_main & (table.shapes == table.global_shapes[table.key_ids]).all(axis=1)
    num_main = np.bincount(table.key_ids[table.is_main], minlength=len(table.keys))
    num_whole = np.bincount(table.key_ids[is_whole], minlength=len(table.keys))
    return np.asarray((num_main == 1) & (num_whole == 1), np.bool_)


def _are_in_line(table: GlobalTable, rows: IntArray) -> npt.NDArray[np.bool_]:
    """Mark keys whose rows follow one another without a gap.

    The rows are divided along one axis, and go from one end of the tensor to the other. Tensors
    divided in another way take a closer look.
    """
    proven = np.zeros(len(table.keys), np.bool_)
    rows = rows[(table.shapes[rows] > 0).all(axis=1)]
    rows = rows[stable_order(table.key_ids[rows], len(table.keys))]
    if not table.shapes[rows].size:
        return proven
    key_ids = table.key_ids[rows]
    begins = np.flatnonzero(np.diff(key_ids, prepend=-1))
    keys = key_ids[begins]
    is_divided = np.logical_or.reduceat(table.shapes[rows] != table.global_shapes[key_ids], begins)
    axes = np.argmax(is_divided, axis=1)
    row_axes = np.repeat(axes, np.diff(begins, append=len(rows)))
    low = table.offsets[rows, row_axes]
    size = table.shapes[rows, row_axes]
    if (np.delete(np.diff(low), begins[1:] - 1) < 0).any():
        order = np.lexsort((low, key_ids))
        low = low[order]
        size = size[order]
    high = low + size
    expected = np.append(0, high[:-1])
    expected[begins] = 0
    follows = np.logical_and.reduceat(low == expected, begins)
    reaches = high[np.append(begins[1:], len(rows)) - 1] == table.global_shapes[keys, axes]
    proven[keys] = follows & reaches & (is_divided.sum(axis=1) == 1)
    return proven


def _check_sizes(table: GlobalTable) -> None:
    too_large = np.prod(table.global_shapes.astype(np.float64) + 1, axis=1) >= 2.0**62
    if too_large.any():
        key_id = int(np.flatnonzero(too_large)[0])
        raise InvalidShardingError(
            f"Key {table.keys[key_id]!r} has the global shape {table.global_shape(key_id)}, more "
            "elements than any storage holds: check global_shape."
        )


def _refuse(
    table: GlobalTable, faults: Sequence[tuple[int, tuple[int, ...]]], allow_gaps: bool
) -> None:
    """Refuse a table with faults of some keys, at an element of each, unless they are allowed."""
    # One sort: where a rank is missing, there may be a fault in every key.
    by_key = np.argsort(table.key_ids, kind="stable")
    starts = np.searchsorted(table.key_ids[by_key], np.arange(len(table.keys) + 1))
    key_faults = []
    for key_id, element in faults:
        rows = by_key[starts[key_id] : starts[key_id + 1]]
        text = _explain_fault(table, key_id, rows, element, allow_gaps)
        if text:
            key_faults.append(KeyFault(table.keys[key_id], text, text))
    if key_faults:
        raise _invalid(key_faults)


def _explain_fault(
    table: GlobalTable, key_id: int, rows: IntArray, element: tuple[int, ...], allow_gaps: bool
) -> str:
    """Describe the fault of a key, whose shards are in `rows`.

    It is "" for a gap if gaps are allowed.
    """
    ndim = int(table.ndims[key_id])
    point = np.array(element, np.int64)
    low = table.offsets[rows, :ndim]
    high = low + table.shapes[rows, :ndim]
    holders = rows[((low <= point) & (point < high)).all(axis=1)]
    mains = holders[table.is_main[holders]]
    if allow_gaps and len(mains) == 0:
        main_rows = rows[table.is_main[rows]]
        pair = find_overlap(table.offsets[main_rows, :ndim], table.shapes[main_rows, :ndim])
        if pair is None:
            return ""
        mains = main_rows[list(pair)]
    about = f" (global shape {table.global_shape(key_id)})"
    if len(mains) > 1:
        where = "" if allow_gaps else f" {element}"
        return (
            f"{about}: {len(mains)} main replicas hold the same element"
            f"{where}: {_places(table, mains)}. If they are copies, "
            "number them with replica_id (one has 0); if they are different tensors, such as "
            "experts counted from 0 on every rank, give them different keys or offsets."
        )
    if len(holders):
        return (
            f"{about}: no main replica holds element {element}; it is only in copies with another "
            f"replica_id: {_places(table, holders)}. Exactly one replica of each shard has "
            "replica_id 0, also of one that several pipeline stages hold, such as tied "
            "embeddings: 0 on one stage, 1 on the other."
        )
    return (
        f"{about}: no rank holds element {element}. Check the offsets and "
        "fragmentations (layers of a later pipeline stage do not begin at 0), and that every rank "
        "of the layout takes part. With validate_access_integrity=False, gaps are allowed."
    )


def _places(table: GlobalTable, rows: IntArray) -> str:
    return " and ".join(
        f"{table.row_region(row)} on rank {int(table.ranks[row])}" for row in rows[:3].tolist()
    )


def find_overlap(offsets: IntArray, shapes: IntArray) -> tuple[int, int] | None:
    """Find two regions that share an element, sweeping along the first axis."""
    if offsets.shape[1] == 0:
        if len(offsets) < 2:
            return None
        return 0, 1
    rows = np.flatnonzero((shapes > 0).all(axis=1))
    rows = rows[np.argsort(offsets[rows, 0], kind="stable")]
    low = offsets[rows]
    high = low + shapes[rows]
    for i in range(len(rows)):
        last = int(np.searchsorted(low[:, 0], high[i, 0], side="left"))
        others = slice(i + 1, last)
        hit = np.flatnonzero(((low[others] < high[i]) & (high[others] > low[i])).all(axis=1))
        if len(hit):
            return int(rows[i]), int(rows[i + 1 + hit[0]])
    return None


class ReplicaDifferences(NamedTuple):
    """Rows whose content differs from the main replica of their region.

    Digests are compared.

    Attributes:
        rows: (n,), rows of a global table.
        firsts: (n,), the first row of each one's region, which is the main replica.
    """

    rows: IntArray
    firsts: IntArray


def find_differences(table: GlobalTable) -> ReplicaDifferences:
    """Compare the digests of replicas, where they were computed."""
    hashed = rows_with_copies(table)
    hashed = hashed[(table.digests[hashed] != 0) & ~table.is_buffer[hashed]]
    if not len(hashed):
        return ReplicaDifferences(hashed, hashed)
    rows, firsts = _replicas(table, hashed)
    different = np.flatnonzero(table.digests[rows] != table.digests[firsts])
    # In the order of the keys, then of the ranks.
    different = different[np.lexsort((rows[different], table.key_ids[rows[different]]))]
    return ReplicaDifferences(rows[different], firsts[different])


def different_replicas_error(
    table: GlobalTable, differences: ReplicaDifferences
) -> InvalidShardingError:
    """Return the error about replicas that differ."""
    faults = []
    for row, first in zip(differences.rows.tolist(), differences.firsts.tolist(), strict=True):
        ranks = int(table.ranks[first]), int(table.ranks[row])
        text = (
            f": region {table.row_region(row)} differs between rank {ranks[0]} and rank "
            f"{ranks[1]}, which hold it as replicas of each other. Make them equal "
            "(DistributedDataParallel, torch.distributed.broadcast), or save what each rank has "
            "on its own under different keys, or in a distckpt.PerRank. validate_replicas=False "
            "compares nothing."
        )
        faults.append(KeyFault(table.keys[table.key_ids[row]], text, ranks))
    return _invalid(faults)


def keep_whole(table: GlobalTable, differences: ReplicaDifferences) -> None:
    """Mark regions with differing replicas, in place.

    The main replica alone is written, as for a buffer.
    """
    if len(differences.rows):
        rows, firsts = _replicas(table, np.arange(len(table.key_ids)))
        table.is_buffer[rows[np.isin(firsts, np.unique(differences.firsts))]] = True


def replica_factors(table: GlobalTable) -> IntArray:
    """Return a factor for each row; replicas' factors add up to 0.

    A region's replicas have the factor 1, all but one of them. A factor is 0 for regions that only
    one rank has, or that may differ.
    """
    is_tensor = np.array([dtype != OBJECT for dtype in table.dtypes], np.bool_)
    compared = rows_with_copies(table)
    compared = compared[is_tensor[table.key_ids[compared]] & ~table.is_buffer[compared]]
    rows, firsts = _replicas(table, compared)
    is_copy = rows != firsts
    factors = -np.bincount(firsts[is_copy], minlength=len(table.key_ids))
    factors[rows[is_copy]] = 1
    return factors


def num_replicated(factors: IntArray) -> int:
    """Return the number of regions with replicas.

    The factors are of all ranks.
    """
    return int((factors < 0).sum())


def stride_of(num_regions: int) -> int:
    """Return the `stride` for regions with replicas, 0 without any.

    See `replica_weights`.
    """
    if not num_regions:
        return 0
    return 1 + num_regions // MAX_COMPARED


def replica_weights(
    table: ShardTable, factors: IntArray, stride: int = 1
) -> npt.NDArray[np.uint64]:
    """Return a weight for each row of one rank, given its factors.

    The weights of the replicas of a region, on all ranks, add up to 0, modulo 2**64. Of `stride`
    regions all but one have the weight 0, as rows have whose factor is 0.
    """
    weights = np.zeros(len(factors), np.uint64)
    rows = np.flatnonzero(factors)
    if len(rows):
        hashes = _hashes_of_regions(table, rows)
        is_selected = (hashes >> np.uint64(1)) % np.uint64(stride) == 0
        weights[rows] = np.where(
            is_selected, hashes * factors[rows].astype(np.uint64), np.uint64(0)
        )
    return weights


def _hashes_of_regions(table: ShardTable, rows: IntArray) -> npt.NDArray[np.uint64]:
    """Return odd hashes of regions that are equal on all ranks.

    Ranks number keys in their own ways and pad regions to different numbers of axes.
    """
    key_ids = table.key_ids[rows]
    used = np.unique(key_ids)
    key_hashes = np.zeros(len(table.keys), np.uint64)
    key_hashes[used] = [checksum(table.keys[key_id].encode()) for key_id in used.tolist()]
    hashes = key_hashes[key_ids]
    spans = zip(table.offsets[rows].T, table.shapes[rows].T, strict=True)
    for axis, (offsets, shapes) in enumerate(spans):
        own = row_hashes([np.full(len(rows), axis), offsets, shapes])
        hashes ^= np.where((offsets == 0) & (shapes == 1), np.uint64(0), own)
    return mixed(hashes) | np.uint64(1)


def rows_with_copies(table: GlobalTable) -> IntArray:
    """Return the rows of keys with copies among their shards.

    Main replicas alone are all different, since they cover a tensor once.
    """
    is_copied = np.zeros(len(table.keys), np.bool_)
    is_copied[table.key_ids[~table.is_main]] = True
    return np.flatnonzero(is_copied[table.key_ids])


def _replicas(table: GlobalTable, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Order rows, which ascend, by region.

    Return them, and for each the first one of the same region, which is the main replica if it is
    among them.
    """
    columns = (table.key_ids, *table.offsets.T, *table.shapes.T)
    identity = row_hashes([column[rows] for column in columns])
    order = np.lexsort((~table.is_main[rows], identity))
    rows = rows[order]
    identity = identity[order]
    is_first = np.append(True, identity[1:] != identity[:-1])[: len(rows)]
    return rows, rows[np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))]
