"""The giver of every element that a rank takes in a move.

Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.messages import KeyFault, did_you_mean, other_prefix, summarize_faults
from distckpt._geometry.region import (
    IntArray,
    Region,
    intersect,
    intersect_many,
    regions_to_arrays,
    subtract,
)
from distckpt._move.pieces import Kind, Piece
from distckpt._state.validation import find_overlap


class Held(NamedTuple):
    """A piece that a rank gives, and its row."""

    rank: int
    row: int
    piece: Piece


class Holders(NamedTuple):
    """The nonempty pieces of one tensor on all ranks, in order."""

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


# --- Who gives what -------------------------------------------------------------------------------


class MoveSettings(NamedTuple):
    """The settings of a plan, apart from the pieces.

    Attributes:
        hosts: a number for each rank; ranks with equal ones share memory.
        bucket_bytes: the size of a buffer.
        allow_dtype_cast: convert values to dtypes that change them.
        has_fallback: elements that no rank holds come from elsewhere.
        compares: arriving values are compared with sent ones.
    """

    hosts: Sequence[int]
    bucket_bytes: int
    allow_dtype_cast: bool = False
    has_fallback: bool = False
    compares: bool = False


@dataclass(slots=True)
class Unit:
    """A region that a rank packs.

    `row` is the row of its piece. `takes` has the ranks that take it, each with its row and the
    region it takes.
    """

    key: str
    giver: int
    row: int
    region: Region
    item_bytes: int
    takes: list[tuple[int, int, Region]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """The size of the region."""
        return self.region.num_elements * self.item_bytes

    def machines(self, hosts: Sequence[int]) -> set[int]:
        """Return the machines that take it, without the giver's."""
        return {hosts[rank] for rank, _, _ in self.takes} - {hosts[self.giver]}


_Hit: TypeAlias = tuple[tuple[bool, int], int, int, Region]
"""A giver for a region, in order of preference.

It has whether the giver is on another machine, how much it gives, the giver, the row of its piece,
and its part of the region.
"""


class TargetRegion(NamedTuple):
    """A region that a rank takes, and the `row` of its piece."""

    key: str
    rank: int
    row: int
    region: Region


class Assignment:
    """The units that fill each target. One unit per machine serves all of its ranks."""

    def __init__(
        self, holders: Mapping[str, Holders], num_ranks: int, settings: MoveSettings
    ) -> None:
        self.holders = holders
        self.settings = settings
        self.units: dict[tuple[str, int, int, Region], Unit] = {}
        self.copies: list[tuple[int, str, int, int, Region]] = []
        self.gaps: list[TargetRegion] = []
        self.target_regions: list[TargetRegion] = []
        self.given_bytes = [0] * num_ranks
        self._units_by_host: defaultdict[tuple[int, str], list[Unit]] = defaultdict(list)

    def fill(self, rank: int, row: int, piece: Piece) -> None:
        """Assign givers for the region of a piece that a rank takes."""
        kind, region, *_ = piece
        key = kind.key
        holders = self.holders.get(key)
        if holders is None:
            self.gaps.append(TargetRegion(key, rank, row, region))
            return
        if kind.may_differ:
            clipped = intersect(region, Region((0,) * len(region.shape), holders.kind.shape))
            if clipped is None:
                return
            region = clipped
        self.target_regions.append(TargetRegion(key, rank, row, region))
        left = self._from_holders(holders, rank, row, [region])
        self.gaps += [TargetRegion(key, rank, row, gap) for gap in left]

    def _from_holders(
        self, holders: Holders, rank: int, row: int, left: list[Region]
    ) -> list[Region]:
        """Take regions from their holders, the nearest first; return the rest."""
        key = holders.kind.key
        hosts = self.settings.hosts
        host = hosts[rank]
        own, others = self._find_holders(holders, rank, left[0])
        for _, _, row_of_giver, region in own:
            common, left = divide(left, region)
            self.copies += [(rank, key, row_of_giver, row, part) for part in common]
        for unit in self._units_by_host[host, key] if left else ():
            common, left = divide(left, unit.region)
            unit.takes += [(rank, row, part) for part in common]
        for _, giver, row_of_giver, region in sorted(others) if left else ():
            common, left = divide(left, region)
            for part in common:
                unit = self._unit(key, giver, row_of_giver, part, host)
                unit.takes.append((rank, row, part))
        return left

    def _find_holders(
        self, holders: Holders, rank: int, region: Region
    ) -> tuple[list[_Hit], list[_Hit]]:
        """Return the holders of elements of a region: this rank, and other ranks."""
        hosts = self.settings.hosts
        places, offsets, shapes = intersect_many(holders.offsets, holders.shapes, *region)
        own: list[_Hit] = []
        others: list[_Hit] = []
        for place, offset, shape in zip(
            places.tolist(), offsets.tolist(), shapes.tolist(), strict=True
        ):
            giver, row, _ = holders.held[place]
            distance = (hosts[giver] != hosts[rank], self.given_bytes[giver])
            hit = (distance, giver, row, Region(tuple(offset), tuple(shape)))
            (own if giver == rank else others).append(hit)
        return own, others

    def _unit(self, key: str, giver: int, row: int, region: Region, host: int) -> Unit:
        identity = (key, giver, row, region)
        if identity not in self.units:
            self.units[identity] = Unit(*identity, self.item_bytes(key))
            self.given_bytes[giver] += self.units[identity].num_bytes
        unit = self.units[identity]
        self._units_by_host[host, key].append(unit)
        return unit

    def item_bytes(self, key: str) -> int:
        """Return the size of an element of a given tensor."""
        return FROM_NAME[self.holders[key].kind.dtype].itemsize

    def gifts(self) -> Iterator[tuple[int, int, tuple[int, str, int, Region]]]:
        """Yield all regions that are given.

        With each come the giver and the row of its piece, the taker, its key, the row of its piece,
        and the region.
        """
        for rank, key, source, row, region in self.copies:
            yield rank, source, (rank, key, row, region)
        for unit in self.units.values():
            for rank, row, region in unit.takes:
                yield unit.giver, unit.row, (rank, unit.key, row, region)

    def check_gaps(self) -> None:
        """Refuse elements that no rank holds, unless they come from elsewhere."""
        if not self.gaps or self.settings.has_fallback:
            return
        faults = []
        for gap in self.gaps:
            text = self._lack(gap)
            faults.append(KeyFault(gap.key, text, text))
        lines = "\n- ".join(summarize_faults(faults))
        keys = {gap.key for gap in self.gaps}
        prefix = other_prefix(sorted(keys - self.holders.keys()), self.holders, "given")
        way_out = (
            "Describe it on the rank that has it, or name a checkpoint that has it as fallback."
        )
        if prefix:
            way_out = (
                f"Names differ{prefix}: give modules on both sides at the same place, or state "
                "dicts on both, or rename what is given with rules=."
            )
        raise LoadMismatchError(f"Not held by any rank:\n- {lines}\n{way_out}", unexpected=keys)

    def _lack(self, gap: TargetRegion) -> str:
        holders = self.holders.get(gap.key)
        if holders is None:
            hint = did_you_mean(gap.key, self.holders)
            return f": rank {gap.rank} takes region {gap.region}, and no rank has this key{hint}"
        who = ", ".join(map(str, sorted({rank for rank, _, _ in holders.held})))
        return (
            f": rank {gap.rank} takes region {gap.region}, which is in none of the shards of "
            f"rank {who}"
        )


def divide(left: Iterable[Region], region: Region) -> tuple[list[Region], list[Region]]:
    """Divide regions into their intersections with another one, and the rest."""
    inside: list[Region] = []
    rest: list[Region] = []
    for part in left:
        common = intersect(part, region)
        if common is None:
            rest.append(part)
            continue
        inside.append(common)
        rest += subtract(part, common)
    return inside, rest
