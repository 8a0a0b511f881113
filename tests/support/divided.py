"""Plans of several planners, made in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt._io import planned_shards, shared_plan
from distckpt._io.divided.descriptions import (
    KeysOfRank,
    describe_rows,
    planner_ranks,
    tied_keys,
)
from distckpt._io.divided.owners import (
    CutPoints,
    PlannedRows,
    columns_of,
    join_factors,
    join_pieces,
)
from distckpt._io.divided.plan import Coordinator, PartPlanning
from distckpt._plan.save import Pieces
from distckpt._ranks.exchanges import unpack_parts
from distckpt._state.shards import ShardTable


def plan_on_ranks(shards_of_planner: int) -> None:
    """From now on let a rank plan at most so many shards; the plans that are kept go."""
    shared_plan.SHARDS_OF_PLANNER = shards_of_planner
    planned_shards._PLANS._plans.clear()


class Planned(NamedTuple):
    """Pieces and factors by rank, and the stored keys."""

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
    key_messages = coordinator.number_keys(
        [table.kinds_to_bytes() for table in tables], [tied_keys(table) for table in tables]
    )
    own_keys = [KeysOfRank.from_bytes(data) for data in key_messages]
    rows = [own.rows_of_planners(table) for own, table in zip(own_keys, tables, strict=True)]
    descriptions = []
    for number in range(num_planners):
        messages = []
        for table, own, rows_of_rank in zip(tables, own_keys, rows, strict=True):
            messages.append(describe_rows(table, own, rows_of_rank[number]))
        descriptions.append(messages)
    bundles = coordinator.bundles_by_rank(descriptions)
    planners = {
        rank: PartPlanning(allow_gaps, False) for rank in planner_ranks(num_planners, len(tables))
    }
    reports = [b""] * len(tables)
    for rank, planner in planners.items():
        reports[rank] = planner.begin(bundles[rank])
    coordinator.balance(reports)
    aliases = coordinator.not_stored
    cuts = coordinator.cuts_by_rank()
    payloads = [b""] * len(tables)
    for rank, planner in planners.items():
        payloads[rank] = planner.finish(CutPoints(**columns_of(cuts[rank])))
    shares_of_ranks = coordinator.join_shares(payloads)
    pieces = []
    factors = []
    for table, own, rows_of_rank, shares in zip(
        tables, own_keys, rows, shares_of_ranks, strict=True
    ):
        answers = []
        _, *messages = unpack_parts(shares)
        for message, rows_of_planner in zip(messages, rows_of_rank, strict=True):
            answers.append(PlannedRows.from_bytes(message, rows_of_planner))
        pieces.append(join_pieces(table, answers, own.ids, aliases))
        factors.append(join_factors(table, answers))
    manifest = coordinator.manifest
    return Planned(pieces, factors, manifest.keys, manifest.aliases, coordinator)
