"""The pieces that all ranks give, checked and sorted by tensor.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._geometry.region import IntArray, regions_to_arrays
from distckpt._move.pieces import Kind, Piece
from distckpt._state.validation import find_overlap


class Held(NamedTuple):
    """A piece that a rank gives, and its row in the table of the rank."""

    rank: int
    row: int
    piece: Piece


class Holders(NamedTuple):
    """The nonempty pieces of one tensor on all ranks, in order of rank, with their regions."""

    kind: Kind
    held: Sequence[Held]
    offsets: IntArray
    shapes: IntArray


def holders_by_key(tables: Sequence[Sequence[Piece]]) -> dict[str, Holders]:
    """Return the holders of each tensor, given the pieces of all ranks.

    Raises:
        InvalidShardingError: ranks describe one tensor differently, or give the same elements as
            main replicas of different shards.
    """
    held_by_key: dict[str, list[Held]] = {}
    for rank, table in enumerate(tables):
        for row, piece in enumerate(table):
            held_by_key.setdefault(piece.kind.key, []).append(Held(rank, row, piece))
    holders = {}
    faults: list[KeyFault] = []
    for key, held in held_by_key.items():
        kind = _one_kind(held)
        held = list(_that_count(held))
        regions = [item.piece.region for item in held]
        holders[key] = Holders(kind, held, *regions_to_arrays(regions, len(kind.shape)))
        faults += _overlaps(holders[key])
    if faults:
        lines = "\n- ".join(summarize_faults(faults))
        raise InvalidShardingError(f"Invalid sharding:\n- {lines}")
    return holders


def _one_kind(held: Sequence[Held]) -> Kind:
    first, _, (known, *_) = held[0]
    for rank, _, (kind, *_) in held:
        if known[:3] != kind[:3]:
            raise InvalidShardingError(
                f"Rank {first} gives key {kind.key!r} as {known.dtype} of {known.shape}, and rank "
                f"{rank} as {kind.dtype} of {kind.shape}: one tensor has the same dtype and global "
                "shape on all ranks."
            )
    return known


def _that_count(held: Sequence[Held]) -> Iterator[Held]:
    """Leave out empty pieces, and copies of buffers, which may differ."""
    regions = set()
    for item in held:
        region = item.piece.region
        is_copy = item.piece.is_buffer and region in regions
        regions.add(region)
        if region.num_elements and not is_copy:
            yield item


def _overlaps(holders: Holders) -> Iterator[KeyFault]:
    """Find elements that several ranks give as main replicas of different shards."""
    # Tied tensors of one rank are the same memory.
    mains = {}
    for rank, _, piece in holders.held:
        if piece.is_main:
            mains[rank, piece.region] = piece.region
    if len(mains) < 2:
        return
    overlap = find_overlap(*regions_to_arrays(list(mains.values())))
    if overlap is None:
        return
    places = list(mains)
    both = " and ".join(
        f"{region} on rank {rank}" for rank, region in map(places.__getitem__, overlap)
    )
    text = (
        f": two main replicas hold the same elements, {both}. If they are copies, number them "
        "with replica_id (one has 0); if they are different tensors, give them different keys or "
        "offsets."
    )
    yield KeyFault(holders.kind.key, text, text)
