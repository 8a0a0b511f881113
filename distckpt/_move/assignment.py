"""Who gives what in a move: a giver for every element that a rank takes. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import KeyFault, did_you_mean, summarize_faults
from distckpt._geometry.region import Region, intersect, intersect_many, subtract
from distckpt._move.held import Held, Holders
from distckpt._move.pieces import Kind


class MoveSettings(NamedTuple):
    """What a plan depends on besides what is given and taken.

    Attributes:
        hosts: a number for each rank; ranks with equal ones share memory.
        bucket_bytes: the size of a buffer.
        allow_dtype_cast: convert values to dtypes that change them.
        has_fallback: what no rank holds comes from elsewhere.
    """

    hosts: Sequence[int]
    bucket_bytes: int
    allow_dtype_cast: bool = False
    has_fallback: bool = False


@dataclass(slots=True)
class Unit:
    """A region that a rank packs: the `row` of its piece, and `takes`: the rank, its row, and the
    region that it takes.
    """

    key: str
    giver: int
    row: int
    region: Region
    takes: list[tuple[int, int, Region]] = field(default_factory=list)


class Gap(NamedTuple):
    key: str
    rank: int
    row: int
    region: Region


class Assignment:
    """Finds for each target the units that fill it; those on a machine do for all its ranks."""

    def __init__(self, held: Held, settings: MoveSettings) -> None:
        self.held, self.settings = held, settings
        self.units: dict[tuple[str, int, int, Region], Unit] = {}
        self.copies: list[tuple[int, str, int, int, Region]] = []
        self.gaps: list[Gap] = []
        self.given = [0] * held.num_ranks
        self._of_host: defaultdict[tuple[int, str], list[Unit]] = defaultdict(list)

    def fill(self, key: str, kind: Kind, rank: int, row: int, region: Region) -> None:
        """Find what fills the region of a piece that a rank takes."""
        holders = self.held.by_key.get(key)
        if holders is None:
            self.gaps.append(Gap(key, rank, row, region))
            return
        wanted = region
        if kind.may_differ:
            clipped = intersect(region, Region((0,) * len(region.shape), holders.kind.shape))
            if clipped is None:
                return
            wanted = clipped
        left = self._from_holders(holders, rank, row, [wanted])
        self.gaps += [Gap(key, rank, row, gap) for gap in left]

    def _from_holders(
        self, holders: Holders, rank: int, row: int, left: list[Region]
    ) -> list[Region]:
        """Take regions from whoever has them, the nearest first; return what nobody has."""
        key, host = holders.kind.key, self.settings.hosts[rank]
        places, offsets, shapes = intersect_many(holders.offsets, holders.shapes, *left[0])
        regions = list(map(Region, map(tuple, offsets.tolist()), map(tuple, shapes.tolist())))
        found = list(zip(places.tolist(), holders.ranks[places].tolist(), regions, strict=True))
        for place, giver, region in found:
            if giver == rank:
                taken, left = _divide(left, region)
                source = int(holders.rows[place])
                self.copies += [(rank, key, source, row, part) for part in taken]
        for unit in self._of_host[host, key] if left else ():
            taken, left = _divide(left, unit.region)
            unit.takes += [(rank, row, part) for part in taken]
        others = [each for each in found if each[1] != rank] if left else []
        hosts = self.settings.hosts
        for place, giver, region in sorted(
            others, key=lambda each: (hosts[each[1]] != host, self.given[each[1]], each)
        ):
            taken, left = _divide(left, region)
            for part in taken:
                unit = self._unit(key, giver, int(holders.rows[place]), part, host)
                unit.takes.append((rank, row, part))
            if not left:
                break
        return left

    def _unit(self, key: str, giver: int, row: int, region: Region, host: int) -> Unit:
        identity = (key, giver, row, region)
        if identity not in self.units:
            self.units[identity] = Unit(*identity)
            item = FROM_NAME[self.held.by_key[key].kind.dtype].itemsize
            self.given[giver] += region.num_elements * item
        unit = self.units[identity]
        self._of_host[host, key].append(unit)
        return unit

    def check_gaps(self) -> None:
        """Refuse what no rank holds, unless it comes from elsewhere."""
        if not self.gaps or self.settings.has_fallback:
            return
        faults = [KeyFault(gap.key, text, text) for gap in self.gaps for text in [self._lack(gap)]]
        lines = "\n- ".join(summarize_faults(faults))
        raise LoadMismatchError(
            f"Not held by any rank:\n- {lines}\nDescribe it on the rank that has it, or name a "
            "checkpoint that has it as fallback.",
            unexpected={gap.key for gap in self.gaps},
        )

    def _lack(self, gap: Gap) -> str:
        holders = self.held.by_key.get(gap.key)
        if holders is None:
            hint = did_you_mean(gap.key, self.held.by_key)
            return f": rank {gap.rank} takes region {gap.region}, and no rank has this key{hint}"
        who = ", ".join(map(str, np.unique(holders.ranks).tolist()))
        return (
            f": rank {gap.rank} takes region {gap.region}, which is in none of the shards of "
            f"rank {who}"
        )


def _divide(left: Iterable[Region], region: Region) -> tuple[list[Region], list[Region]]:
    """Divide regions into what they have in common with another one, and the rest."""
    taken: list[Region] = []
    rest: list[Region] = []
    for part in left:
        common = intersect(part, region)
        if common is None:
            rest.append(part)
            continue
        taken.append(common)
        rest += subtract(part, common)
    return taken, rest
