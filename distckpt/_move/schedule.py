"""When each unit of a move is packed, sent and taken, and where in the buffers. Pure functions.

Units are packed in *waves*: buffers are used again every second wave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._geometry.region import Region, intersect
from distckpt._geometry.units import cut_region
from distckpt._move.assignment import Assignment, Unit
from distckpt._move.pieces import Kind, PieceTable
from distckpt._move.rank_plan import TABLES, RankPlan

UNITS_PER_BUCKET = 4
"""The largest unit is this part of a buffer, so that little of it stays empty."""


class Tables(NamedTuple):
    """What all ranks give and take."""

    sources: Sequence[PieceTable]
    targets: Sequence[PieceTable]

    @property
    def kinds(self) -> Iterator[Kind]:
        """What all ranks know of tensors."""
        for table in (*self.sources, *self.targets):
            yield from table.kinds

    @property
    def ndim(self) -> int:
        """The number of axes of the tensor that has most."""
        return max((len(kind.shape) for kind in self.kinds), default=0)


class Schedule:
    """Gives every unit a wave and a place in the buffers that it passes."""

    def __init__(self, assignment: Assignment, tables: Tables) -> None:
        self._assignment, self._tables, self._ndim = assignment, tables, tables.ndim
        self._hosts, self._bucket = assignment.settings.hosts, assignment.settings.bucket_bytes
        self._dtypes = sorted({kind.dtype for kind in tables.kinds})
        num_ranks = assignment.held.num_ranks
        # By rank, whether it is for units that have landed, and wave.
        self._used: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
        self._first_wave, self._landed = [0] * num_ranks, [0] * num_ranks
        self._num_bytes = [0] * num_ranks
        self._rows: defaultdict[tuple[str, int], list[list[int]]] = defaultdict(list)
        self._num_messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._num_waves = self._sent_bytes = 0
        self._slots: dict[tuple[int, str], int] = {}

    def plans(self) -> list[RankPlan]:
        """Return the plan of each rank."""
        for unit in self._assignment.units.values():
            self._place(unit)
        for rank, key, source, row, region in self._assignment.copies:
            places = self._in_source(rank, source, region), self._in_target(rank, row, region)
            self._add("copies", rank, [source, row], *places, shapes=[region.shape])
            self._num_bytes[rank] += region.num_elements * self._item_bytes(key)
        for gap in self._assignment.gaps:
            place = self._in_target(gap.rank, gap.row, gap.region)
            self._add("gaps", gap.rank, [gap.row], place, shapes=[gap.region.shape])
        if self._assignment.settings.compares:
            self._add_comparisons()
        return [self._plan_of(rank) for rank in range(self._assignment.held.num_ranks)]

    def _plan_of(self, rank: int) -> RankPlan:
        num_columns = {
            "copies": 2 + 3 * self._ndim,
            "packs": 3 + 2 * self._ndim,
            "takes": 6 + 4 * self._ndim,
            "gaps": 1 + 2 * self._ndim,
            "sent": 3 + 2 * self._ndim,
            "arrived": 3 + 2 * self._ndim,
        }
        columns = {
            name: np.array(self._rows[name, rank], np.int64).reshape(-1, num_columns.get(name, 5))
            for name in TABLES
        }
        return RankPlan(
            num_waves=self._num_waves,
            sent_bytes=self._sent_bytes,
            has_gaps=bool(self._assignment.gaps),
            num_bytes=self._num_bytes[rank],
            dtypes=self._dtypes,
            compared=list(self._slots),
            **columns,
        )

    def _add_comparisons(self) -> None:
        """Let takers add up all that they want, whoever gives it, and givers what they give."""
        for key, rank, row, region in self._assignment.wanted:
            slot = self._slots.setdefault((rank, key), len(self._slots))
            is_cast = self._taken_as(rank, row) != self._assignment.held.by_key[key].kind.dtype
            place = self._in_target(rank, row, region)
            self._add("arrived", rank, [slot, row, int(is_cast)], place, shapes=[region.shape])
        for giver, source, (rank, key, row, region) in self._assignment.gifts():
            dtype = self._dtypes.index(self._taken_as(rank, row))
            numbers = [self._slots[rank, key], source, dtype]
            place = self._in_source(giver, source, region)
            self._add("sent", giver, numbers, place, shapes=[region.shape])

    def _taken_as(self, rank: int, row: int) -> str:
        table = self._tables.targets[rank]
        kind: Kind = table.kinds[table.kind_ids[row]]
        return kind.dtype

    def _place(self, unit: Unit) -> None:
        item = self._item_bytes(unit.key)
        pieces = list(cut_region(unit.region, max(1, self._bucket // UNITS_PER_BUCKET // item)))
        for piece in pieces:
            common = ((rank, row, intersect(piece, region)) for rank, row, region in unit.takes)
            takes = [(rank, row, part) for rank, row, part in common if part is not None]
            if takes:
                self._place_piece(unit, piece, takes, item)

    def _place_piece(
        self, unit: Unit, piece: Region, takes: list[tuple[int, int, Region]], item: int
    ) -> None:
        giver, size = unit.giver, piece.num_elements * item
        by_host: defaultdict[int, list[tuple[int, int, Region]]] = defaultdict(list)
        for take in takes:
            by_host[self._hosts[take[0]]].append(take)
        landings = {
            host: min({rank for rank, _, _ in of_host}, key=lambda rank: self._landed[rank])
            for host, of_host in by_host.items()
            if host != self._hosts[giver]
        }
        wave = self._wave_of(giver, list(landings.values()), size, item)
        start = self._reserve(giver, False, wave, size, item)
        place = self._in_source(giver, unit.row, piece)
        self._add("packs", giver, [wave, start, unit.row], place, shapes=[piece.shape])
        dtype = self._dtypes.index(self._assignment.held.by_key[unit.key].kind.dtype)
        for host, of_host in by_host.items():
            holder, at = giver, start
            if host in landings:
                holder = landings[host]
                at = self._reserve(holder, True, wave, size, item)
                self._send(wave, (giver, start), (holder, at), size)
            for rank, row, part in of_host:
                numbers = [wave, holder, int(host in landings), at, dtype, row]
                places = self._in_target(rank, row, part), part.relative_to(piece.offset).offset
                self._take(rank, numbers, places, part.shape, piece.shape)
                self._num_bytes[rank] += part.num_elements * item

    def _take(
        self,
        rank: int,
        numbers: list[int],
        places: tuple[tuple[int, ...], tuple[int, ...]],
        shape: tuple[int, ...],
        unit_shape: tuple[int, ...],
    ) -> None:
        in_target, in_unit = places
        row = [*self._wide(in_target, 0), *self._wide(shape, 1), *self._wide(in_unit, 0)]
        self._rows["takes", rank].append([*numbers, *row, *self._wide(unit_shape, 1)])

    def _wave_of(self, giver: int, landings: Sequence[int], size: int, item: int) -> int:
        """Return the first wave in which there is room for a unit in all buffers that it passes."""
        buffers = [(giver, False), *((rank, True) for rank in landings)]
        wave = self._first_wave[giver]
        while any(self._end(*buffer, wave, item) + size > self._bucket for buffer in buffers):
            wave += 1
        if not landings:
            self._first_wave[giver] = wave
        self._num_waves = max(self._num_waves, wave + 1)
        return wave

    def _end(self, rank: int, is_landed: bool, wave: int, item: int) -> int:
        """Return the first place behind what a buffer holds at which an item may begin."""
        return -(-self._used[rank, is_landed, wave] // item) * item

    def _reserve(self, rank: int, is_landed: bool, wave: int, size: int, item: int) -> int:
        start = self._end(rank, is_landed, wave, item)
        self._used[rank, is_landed, wave] = start + size
        self._landed[rank] += size if is_landed else 0
        return start

    def _send(self, wave: int, source: tuple[int, int], target: tuple[int, int], size: int) -> None:
        """Add a message to the plans of both ranks, or lengthen the last one."""
        (giver, start), (holder, at) = source, target
        self._sent_bytes += size
        sends, receives = self._rows["sends", giver], self._rows["receives", holder]
        number = self._num_messages[wave, giver, holder]
        follows = _ends_at(sends, wave, holder, start, number)
        if follows and _ends_at(receives, wave, giver, at, number):
            sends[-1][3] += size
            receives[-1][3] += size
            return
        sends.append([wave, holder, start, size, number])
        receives.append([wave, giver, at, size, number])
        self._num_messages[wave, giver, holder] += 1

    def _add(
        self,
        name: str,
        rank: int,
        numbers: list[int],
        *offsets: tuple[int, ...],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        row = [*numbers]
        for offset in offsets:
            row += self._wide(offset, 0)
        for shape in shapes:
            row += self._wide(shape, 1)
        self._rows[name, rank].append(row)

    def _wide(self, values: tuple[int, ...], fill: int) -> list[int]:
        return [*values, *[fill] * (self._ndim - len(values))]

    def _item_bytes(self, key: str) -> int:
        return FROM_NAME[self._assignment.held.by_key[key].kind.dtype].itemsize

    def _in_source(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.sources[rank].region(row).offset).offset

    def _in_target(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.targets[rank].region(row).offset).offset


def _ends_at(messages: list[list[int]], wave: int, peer: int, start: int, number: int) -> bool:
    """Tell whether the last message is also the last to its peer in a wave, and ends at a place."""
    if not messages:
        return False
    *who, begin, size, tag = messages[-1]
    return who == [wave, peer] and begin + size == start and tag == number - 1
