"""Planning a move: the giver, taker and time of each part of each tensor.

Pure functions.

A rank copies elements that it holds itself. Everything else is a *unit*: a region that one rank,
its giver, packs into a buffer, from which the ranks of its machine take their parts. Every other
machine that wants it gets it once, from the giver or another machine, into a buffer of one rank
there, and its ranks take it from that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from distckpt._base.dtypes import FROM_NAME, is_convertible, is_lossless_cast
from distckpt._base.errors import LoadMismatchError
from distckpt._format.code_names import (
    are_codes_beside_scales,
    may_be_codes,
    places_of_scales,
    scale_beside,
)
from distckpt._move.assignment import Assignment, MoveSettings
from distckpt._move.held import SourcePieces
from distckpt._move.pieces import Kind, PieceTable
from distckpt._move.rank_plan import RankPlan
from distckpt._move.schedule import Schedule, Tables


def plan_moves(
    sources: Sequence[PieceTable], targets: Sequence[PieceTable], settings: MoveSettings
) -> list[RankPlan]:
    """Find a giver for every element that is taken; return a plan per rank.

    Raises:
        InvalidShardingError: ranks give one element as main replicas of different shards, or
            describe one tensor differently.
        LoadMismatchError: no rank holds elements that are taken, or values would change in the
            dtype of a target.
    """
    source_pieces = SourcePieces.of(sources)
    assignment = Assignment(source_pieces, settings)
    rows_by_host = _rows_by_host(targets, settings.hosts)
    _check_kinds(source_pieces, targets, settings)
    for (_, key), rows in sorted(rows_by_host.items(), key=lambda item: item[0][1]):
        for rank, row in rows:
            table = targets[rank]
            assignment.fill(key, table.kinds[table.kind_ids[row]], rank, row, table.region(row))
    assignment.check_gaps()
    return Schedule(assignment, Tables(sources, targets)).plans()


def _rows_by_host(
    targets: Sequence[PieceTable], hosts: Sequence[int]
) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return the pieces that are taken, `(rank, row)`, by machine and key."""
    rows_by_host: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, table in enumerate(targets):
        for row in np.flatnonzero((table.shapes > 0).all(axis=1)).tolist():
            key = table.kinds[table.kind_ids[row]].key
            rows_by_host[hosts[rank], key].append((rank, row))
    return rows_by_host


def _check_kinds(
    source_pieces: SourcePieces, targets: Sequence[PieceTable], settings: MoveSettings
) -> None:
    """Refuse targets whose shape or dtype does not fit the given tensors."""
    scales: dict[str, str] | None = None
    for rank, table in enumerate(targets):
        for kind in table.kinds:
            if kind.key not in source_pieces.by_key:
                continue
            source = source_pieces.by_key[kind.key].kind
            _check_kind(source, kind, rank, settings)
            if source.dtype != kind.dtype and may_be_codes(source.dtype):
                scales = places_of_scales(source_pieces.by_key) if scales is None else scales
                _check_codes(source, kind, rank, scales)


def _check_kind(source: Kind, target: Kind, rank: int, settings: MoveSettings) -> None:
    may_differ = target.may_differ and len(target.shape) == len(source.shape)
    if source.shape != target.shape and not may_differ:
        raise LoadMismatchError(
            f"Key {target.key!r} is given with the global shape {source.shape}, and rank {rank} "
            f"takes it with {target.shape}: correct one of the state dicts, or set "
            "allow_shape_mismatch=True on the ShardedTensor that takes it if it is padded.",
            unexpected=[target.key],
        )
    dtypes = FROM_NAME[source.dtype], FROM_NAME[target.dtype]
    fits = is_lossless_cast
    if settings.allow_dtype_cast:
        fits = is_convertible
    if not fits(*dtypes):
        way_out = ""
        if is_convertible(*dtypes):
            way_out = ", or pass allow_dtype_cast=True"
        raise LoadMismatchError(
            f"Key {target.key!r} is given as {dtypes[0]}, and rank {rank} takes it as {dtypes[1]}, "
            f"which would change values: take the dtype that is given or a wider one{way_out}.",
            unexpected=[target.key],
        )


def _check_codes(source: Kind, target: Kind, rank: int, scales: dict[str, str]) -> None:
    """Refuse to convert a quantized tensor's codes as if they were values.

    Codes are recognized by their scales, which are given as well.
    """
    beside = scale_beside(source.key, scales)
    if beside is None or not are_codes_beside_scales(source.key, source.dtype):
        return
    dtypes = FROM_NAME[source.dtype], FROM_NAME[target.dtype]
    raise LoadMismatchError(
        f"Key {source.key!r} is given as {dtypes[0]}, and rank {rank} takes it as {dtypes[1]}, but "
        f"its values are codes of a quantized tensor, as {beside!r} beside it shows: converted "
        f"without scales they would be wrong weights. Take it as {dtypes[0]}, with its scales, or "
        "give its values.",
        unexpected=[source.key],
    )
