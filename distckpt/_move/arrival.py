"""Comparing received values with sent ones, by fingerprints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._format.fingerprint import PRIME
from distckpt._geometry.region import Region
from distckpt._io.figures import LiveRegion, sum_over_ranks, sums_of
from distckpt._move.pieces import Pieces, PieceTable
from distckpt._move.rank_plan import RankPlan
from distckpt._ranks.collectives import Ranks


def check_arrival(
    ranks: Ranks, plan: RankPlan, sources: Pieces, targets: Pieces, views: Sequence[torch.Tensor]
) -> None:
    """Compare the values that each rank received with their givers' values.

    Collective operation: all ranks must call it. They exchange one number for each tensor and rank.
    `views` are the filled memory of the targets.

    Raises:
        CheckpointingException: they differ, on all ranks.
    """
    with ranks.phase("compute fingerprints"), torch.no_grad():
        regions = [*_sent(plan, sources), *_arrived(plan, targets.table, views)]
        # Givers and takers have slots of their own: each sum is of one side.
        sums = sums_of(regions, 2 * len(plan.compared))
    totals = sum_over_ranks(ranks, sums)
    pairs = zip(plan.compared, totals[::2], totals[1::2], strict=True)
    faults = []
    for (rank, key), sent, arrived in pairs:
        if (sent - arrived) % PRIME:
            text = f" on rank {rank}"
            faults.append(KeyFault(key, text, text))
    if faults:
        lines = "\n- ".join(summarize_faults(faults))
        raise CheckpointingException(
            f"What has arrived is not what was sent:\n- {lines}\nEither was changed during the "
            "move, or two tensors with different values are one on the side that takes, or memory "
            "or a connection is faulty. Move it again before it is used."
        )


def _sent(plan: RankPlan, sources: Pieces) -> Iterator[LiveRegion]:
    for slot, row, dtype, *place in plan.sent.tolist():
        region, view = _place(sources.table, row, sources.views[row], place)
        add = sources.adds[row]
        moved = view
        if add:
            moved = view - add
        taken_as = FROM_NAME[plan.dtypes[dtype]]
        values = moved
        if moved.dtype != taken_as:
            values = _one_nan(moved.to(taken_as))
        yield LiveRegion(2 * slot, region, values)


def _arrived(
    plan: RankPlan, table: PieceTable, views: Sequence[torch.Tensor]
) -> Iterator[LiveRegion]:
    for slot, row, is_cast, *place in plan.arrived.tolist():
        region, view = _place(table, row, views[row], place)
        yield LiveRegion(2 * slot + 1, region, _one_nan(view) if is_cast else view)


def _place(
    table: PieceTable, row: int, view: torch.Tensor, place: Sequence[int]
) -> tuple[Region, torch.Tensor]:
    """Return a region of a piece in its tensor, and its values."""
    region = table.region(row)
    ndim = len(region.shape)
    half = len(place) // 2
    within = Region(tuple(place[:ndim]), tuple(place[half : half + ndim]))
    offset = tuple(map(int.__add__, region.offset, within.offset))
    return Region(offset, within.shape), view[within.slices()] if ndim else view


def _one_nan(values: torch.Tensor) -> torch.Tensor:
    """Give all NaN the same bits.

    A conversion makes different ones at different places in memory.
    """
    if not values.dtype.is_floating_point:
        return values
    wide = values
    if values.dtype.itemsize != 8:
        wide = values.float()
    return torch.where(wide.isnan(), torch.nan, wide).to(values.dtype)
