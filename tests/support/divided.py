"""Plans of several planners, made in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt._io.divided.plan import Coordinator, PartPlanning
from distckpt._io.divided.planner import (
    Cuts,
    OwnKeys,
    PlannedRows,
    describe_rows,
    join_factors,
    join_pieces,
    planner_ranks,
    tied_keys,
)
from distckpt._plan.save import Pieces
from distckpt._ranks.exchanges import unpack_parts
from distckpt._state.shards import ShardTable


class Planned(NamedTuple):
    """What all ranks know in the end: pieces and factors by rank, and keys that are stored."""

    pieces: list[Pieces]
    factors: list[np.ndarray]
    keys: list[str]
    aliases: dict[str, str]
    coordinator: Coordinator


def plan_divided(
    tables: Sequence[ShardTable], num_planners: int, *, allow_gaps: bool = False
) -> Planned:
    """Do what the ranks do with `distckpt._io.divided.plan.plan_divided`, one after the other."""
    coordinator = Coordinator(len(tables), num_planners)
    told = coordinator.number_keys(
        [table.kinds_to_bytes() for table in tables], [tied_keys(table) for table in tables]
    )
    own_keys = [OwnKeys.from_bytes(data) for data in told]
    rows = [own.rows_of_planners(table) for own, table in zip(own_keys, tables, strict=True)]
    described = [
        [
            describe_rows(table, own, of_rank[number])
            for table, own, of_rank in zip(tables, own_keys, rows, strict=True)
        ]
        for number in range(num_planners)
    ]
    bundles = coordinator.hand_on(described)
    planners = {
        rank: PartPlanning(allow_gaps, False) for rank in planner_ranks(num_planners, len(tables))
    }
    found = [b""] * len(tables)
    for rank, planner in planners.items():
        found[rank] = planner.begin(bundles[rank])
    coordinator.share_out(found)
    aliases = coordinator.not_stored
    cuts = coordinator.cuts_by_rank()
    finished = [b""] * len(tables)
    for rank, planner in planners.items():
        finished[rank] = planner.finish(Cuts.from_bytes(cuts[rank]))
    coordinator.gather_shares(finished)
    pieces, factors = [], []
    for table, own, of_rank, shares in zip(
        tables, own_keys, rows, coordinator.shares_by_rank(), strict=True
    ):
        planned = [
            PlannedRows.from_bytes(*each)
            for each in zip(unpack_parts(shares), of_rank, strict=True)
        ]
        pieces.append(join_pieces(table, planned, own.ids, aliases))
        factors.append(join_factors(table, planned))
    manifest = coordinator.manifest
    return Planned(pieces, factors, manifest.keys, manifest.aliases, coordinator)
