"""The pieces that all ranks give, checked and sorted by tensor.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._geometry.region import IntArray, Region, widen
from distckpt._move.pieces import Kind, PieceTable
from distckpt._state.validation import find_overlap

Flags = npt.NDArray[np.bool_]


class Holders(NamedTuple):
    """The pieces of one tensor on all ranks.

    They have their `ranks`, `rows` in the tables of these, and regions, in order of rank.
    """

    kind: Kind
    ranks: IntArray
    rows: IntArray
    offsets: IntArray
    shapes: IntArray


class SourcePieces(NamedTuple):
    """All pieces that ranks give, by key."""

    by_key: dict[str, Holders]
    num_ranks: int

    @classmethod
    def of(cls, tables: Sequence[PieceTable]) -> SourcePieces:
        """Join the tables of all ranks.

        Raises:
            InvalidShardingError: ranks describe one tensor differently, or give the same elements
                as main replicas of different shards.
        """
        kinds = _one_kind_per_key(tables)
        joined = _join(tables, list(kinds))
        edges = np.searchsorted(joined.key_ids, np.arange(len(kinds) + 1))
        by_key: dict[str, Holders] = {}
        faults: list[KeyFault] = []
        for number, (key, kind) in enumerate(kinds.items()):
            rows = _first_of_buffers(joined, np.arange(edges[number], edges[number + 1]))
            axes = len(kind.shape)
            by_key[key] = holders = Holders(
                kind,
                joined.ranks[rows],
                joined.rows[rows],
                joined.offsets[rows, :axes],
                joined.shapes[rows, :axes],
            )
            faults += _overlaps(holders, joined.is_main[rows])
        if faults:
            lines = "\n- ".join(summarize_faults(faults))
            raise InvalidShardingError(f"Invalid sharding:\n- {lines}")
        return cls(by_key, len(tables))


class _Columns(NamedTuple):
    """The nonempty pieces of all ranks, sorted by key and rank."""

    key_ids: IntArray
    ranks: IntArray
    rows: IntArray
    is_main: Flags
    is_buffer: Flags
    offsets: IntArray
    shapes: IntArray


def _join(tables: Sequence[PieceTable], keys: Sequence[str]) -> _Columns:
    numbers = {key: number for number, key in enumerate(keys)}
    ndim = max((table.offsets.shape[1] for table in tables), default=0)
    columns = []
    for rank, table in enumerate(tables):
        columns.append(
            _Columns(
                np.array([numbers[kind.key] for kind in table.kinds], np.int64)[table.kind_ids],
                np.full(len(table.kind_ids), rank),
                np.arange(len(table.kind_ids)),
                table.is_main,
                table.is_buffer,
                widen(table.offsets, ndim, 0),
                widen(table.shapes, ndim, 1),
            )
        )
    joined = _Columns(*map(np.concatenate, zip(*columns, strict=True)))
    nonempty = np.flatnonzero((joined.shapes > 0).all(axis=1))
    nonempty = nonempty[np.argsort(joined.key_ids[nonempty], kind="stable")]
    return _Columns(*[column[nonempty] for column in joined])  # type: ignore[arg-type]


def _one_kind_per_key(tables: Sequence[PieceTable]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    first: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for kind in table.kinds:
            known = kinds.setdefault(kind.key, kind)
            first.setdefault(kind.key, rank)
            if known[:3] != kind[:3]:
                raise InvalidShardingError(
                    f"Rank {first[kind.key]} gives key {kind.key!r} as {known.dtype} of "
                    f"{known.shape}, and rank {rank} as {kind.dtype} of {kind.shape}: one tensor "
                    "has the same dtype and global shape on all ranks."
                )
    return kinds


def _first_of_buffers(joined: _Columns, rows: IntArray) -> IntArray:
    """Leave out copies of buffers, which may differ: the first rank's count."""
    buffers = joined.is_buffer[rows]
    if not buffers.any():
        return rows
    places = np.concatenate([joined.offsets[rows], joined.shapes[rows]], axis=1)
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(places, axis=0, return_index=True)[1]] = True
    return rows[is_first | ~buffers]


def _overlaps(holders: Holders, is_main: Flags) -> Iterator[KeyFault]:
    """Find elements that several ranks give as main replicas of different shards."""
    mains = np.flatnonzero(is_main)
    if len(mains) < 2:
        return
    places = np.column_stack([holders.ranks, holders.offsets, holders.shapes])[mains]
    # Tied tensors of one rank are the same memory.
    mains = mains[np.sort(np.unique(places, axis=0, return_index=True)[1])]
    overlap = find_overlap(holders.offsets[mains], holders.shapes[mains])
    if overlap is None:
        return
    both = " and ".join(
        f"{_region(holders, place)} on rank {int(holders.ranks[place])}"
        for place in mains[list(overlap)].tolist()
    )
    text = (
        f": two main replicas hold the same elements, {both}. If they are copies, number them "
        "with replica_id (one has 0); if they are different tensors, give them different keys or "
        "offsets."
    )
    yield KeyFault(holders.kind.key, text, text)


def _region(holders: Holders, place: int) -> Region:
    return Region(tuple(holders.offsets[place].tolist()), tuple(holders.shapes[place].tolist()))
