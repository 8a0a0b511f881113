"""What all ranks give, checked and sorted by tensor. Pure functions."""

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
    """The pieces of one tensor on all ranks: their `ranks`, `rows` in the tables of these, and
    regions; by rank.
    """

    kind: Kind
    ranks: IntArray
    rows: IntArray
    offsets: IntArray
    shapes: IntArray


class Held(NamedTuple):
    """All that ranks give, by key."""

    by_key: dict[str, Holders]
    num_ranks: int

    @classmethod
    def of(cls, tables: Sequence[PieceTable]) -> Held:
        """Join the tables of all ranks."""
        kinds = _one_kind_per_key(tables)
        numbers = {key: number for number, key in enumerate(kinds)}
        of_rows = [
            np.array([numbers[kind.key] for kind in table.kinds], np.int64)[table.kind_ids]
            for table in tables
        ]
        ndim = max((table.offsets.shape[1] for table in tables), default=0)
        keys = np.concatenate(of_rows)
        ranks = np.repeat(np.arange(len(tables)), [len(each) for each in of_rows])
        rows = np.concatenate([np.arange(len(each)) for each in of_rows])
        offsets = np.concatenate([widen(table.offsets, ndim, 0) for table in tables])
        shapes = np.concatenate([widen(table.shapes, ndim, 1) for table in tables])
        is_main = np.concatenate([table.is_main for table in tables])
        is_buffer = np.concatenate([table.is_buffer for table in tables])
        places = np.concatenate([offsets, shapes], axis=1)
        order = np.argsort(keys, kind="stable")
        order = order[(shapes[order] > 0).all(axis=1)]
        edges = np.searchsorted(keys[order], np.arange(len(kinds) + 1))
        by_key = {}
        faults: list[KeyFault] = []
        for number, (key, kind) in enumerate(kinds.items()):
            mine = _first_of_buffers(order[edges[number] : edges[number + 1]], is_buffer, places)
            axes = len(kind.shape)
            holders = Holders(
                kind, ranks[mine], rows[mine], offsets[mine, :axes], shapes[mine, :axes]
            )
            faults += _overlaps(holders, is_main[mine])
            by_key[key] = holders
        if faults:
            lines = "\n- ".join(summarize_faults(faults))
            raise InvalidShardingError(f"Invalid sharding:\n- {lines}")
        return cls(by_key, len(tables))


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


def _first_of_buffers(rows: IntArray, is_buffer: Flags, places: IntArray) -> IntArray:
    """Leave out copies of buffers, which may differ: those of the first rank count."""
    buffers = is_buffer[rows]
    if not buffers.any():
        return rows
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(places[rows], axis=0, return_index=True)[1]] = True
    return rows[is_first | ~buffers]


def _overlaps(holders: Holders, is_main: Flags) -> Iterator[KeyFault]:
    """Find elements of a tensor that several ranks give as main replicas of different shards."""
    mains = np.flatnonzero(is_main)
    if len(mains) < 2:
        return
    places = np.column_stack([holders.ranks, holders.offsets, holders.shapes])[mains]
    # Tied tensors of one rank are the same memory.
    mains = mains[np.sort(np.unique(places, axis=0, return_index=True)[1])]
    found = find_overlap(holders.offsets[mains], holders.shapes[mains])
    if found is None:
        return
    both = " and ".join(
        f"{_region(holders, place)} on rank {int(holders.ranks[place])}"
        for place in mains[list(found)].tolist()
    )
    text = (
        f": two main replicas hold the same elements, {both}. If they are copies, number them "
        "with replica_id (one has 0); if they are different tensors, give them different keys or "
        "offsets."
    )
    yield KeyFault(holders.kind.key, text, text)


def _region(holders: Holders, place: int) -> Region:
    return Region(tuple(holders.offsets[place].tolist()), tuple(holders.shapes[place].tolist()))
