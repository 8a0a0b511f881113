"""The time of each unit's packing, sending and taking, and its places.

Pure functions.

Units are packed in *waves*, and land in the same wave; units that are passed on land in a later
one. Buffers are used again every second wave.
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
from distckpt._move.fan_out import FanOut, Hop
from distckpt._move.pieces import Kind, PieceTable
from distckpt._move.rank_plan import TABLES, RankPlan

UNITS_PER_BUCKET = 4
"""Number of largest units per buffer, so that little stays empty."""


class Tables(NamedTuple):
    """The pieces that all ranks give and take."""

    sources: Sequence[PieceTable]
    targets: Sequence[PieceTable]

    @property
    def kinds(self) -> Iterator[Kind]:
        """The tensors as every rank knows them."""
        for table in (*self.sources, *self.targets):
            yield from table.kinds

    @property
    def ndim(self) -> int:
        """The largest number of axes of a tensor."""
        return max((len(kind.shape) for kind in self.kinds), default=0)


class Schedule:
    """The wave of every unit, and its places in buffers."""

    def __init__(self, assignment: Assignment, tables: Tables) -> None:
        self._assignment = assignment
        self._tables = tables
        self._ndim = tables.ndim
        self._hosts = assignment.settings.hosts
        self._bucket = assignment.settings.bucket_bytes
        self._dtypes = sorted({kind.dtype for kind in tables.kinds})
        num_ranks = assignment.sources.num_ranks
        # By rank, whether it is for units that have landed, and wave.
        self._used: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
        self._first_wave = [0] * num_ranks
        self._num_bytes = [0] * num_ranks
        units = list(assignment.units.values())
        self._fan_out = FanOut(units, self._hosts, self._bucket // UNITS_PER_BUCKET)
        self._rows: defaultdict[tuple[str, int], list[list[int]]] = defaultdict(list)
        # By wave, ranks, and for the last ones whether the sender is the giver.
        self._num_messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._last_messages: dict[tuple[int, int, int, bool], _Message] = {}
        self._num_waves = self._sent_bytes = 0
        self._slots: dict[tuple[int, str], int] = {}

    def plans(self) -> list[RankPlan]:
        """Return the plan of each rank."""
        for unit in self._fan_out.units():
            self._place(unit)
        for rank, key, source, row, region in self._assignment.copies:
            places = self._source_place(rank, source, region), self._target_place(rank, row, region)
            self._add("copies", rank, [source, row], *places, shapes=[region.shape])
            self._num_bytes[rank] += region.num_elements * self._item_bytes(key)
        for gap in self._assignment.gaps:
            place = self._target_place(gap.rank, gap.row, gap.region)
            self._add("gaps", gap.rank, [gap.row], place, shapes=[gap.region.shape])
        if self._assignment.settings.compares:
            self._add_comparisons()
        return [self._plan_of(rank) for rank in range(self._assignment.sources.num_ranks)]

    def _plan_of(self, rank: int) -> RankPlan:
        num_columns = {
            "copies": 2 + 3 * self._ndim,
            "packs": 3 + 2 * self._ndim,
            "takes": 6 + 4 * self._ndim,
            "gaps": 1 + 2 * self._ndim,
            "sent": 3 + 2 * self._ndim,
            "arrived": 3 + 2 * self._ndim,
        }
        columns = {}
        for name in TABLES:
            columns[name] = np.array(self._rows[name, rank], np.int64).reshape(
                -1, num_columns.get(name, 5)
            )
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
        """Let takers and givers sum all the values they take and give."""
        for key, rank, row, region in self._assignment.target_regions:
            slot = self._slots.setdefault((rank, key), len(self._slots))
            is_cast = (
                self._dtype_of_target(rank, row) != self._assignment.sources.by_key[key].kind.dtype
            )
            place = self._target_place(rank, row, region)
            self._add("arrived", rank, [slot, row, int(is_cast)], place, shapes=[region.shape])
        for giver, source, (rank, key, row, region) in self._assignment.gifts():
            dtype = self._dtypes.index(self._dtype_of_target(rank, row))
            numbers = [self._slots[rank, key], source, dtype]
            place = self._source_place(giver, source, region)
            self._add("sent", giver, numbers, place, shapes=[region.shape])

    def _dtype_of_target(self, rank: int, row: int) -> str:
        table = self._tables.targets[rank]
        kind: Kind = table.kinds[table.kind_ids[row]]
        return kind.dtype

    def _place(self, unit: Unit) -> None:
        max_elements = max(1, self._bucket // UNITS_PER_BUCKET // unit.item_bytes)
        for piece in cut_region(unit.region, max_elements):
            common = ((rank, row, intersect(piece, region)) for rank, row, region in unit.takes)
            takes = [(rank, row, part) for rank, row, part in common if part is not None]
            if takes:
                self._place_piece(unit, piece, takes)

    def _place_piece(self, unit: Unit, piece: Region, takes: list[tuple[int, int, Region]]) -> None:
        giver = unit.giver
        item = unit.item_bytes
        size = piece.num_elements * item
        by_host: defaultdict[int, list[tuple[int, int, Region]]] = defaultdict(list)
        for take in takes:
            by_host[self._hosts[take[0]]].append(take)
        own_host = self._hosts[giver]
        others = []
        for host in by_host:
            if host != own_host:
                others.append({r for r, _, _ in by_host[host]})
        hops = self._fan_out.hops(giver, others, size)
        wave = self._wave_of(giver, hops, size, item)
        start = self._reserve(giver, False, wave, size, item)
        place = self._source_place(giver, unit.row, piece)
        self._add("packs", giver, [wave, start, unit.row], place, shapes=[piece.shape])
        place_by_host = {own_host: (wave, giver, 0, start)}
        for hop in hops:
            landed = wave + hop.step - 1
            at = self._reserve(hop.receiver, True, landed, size, item)
            *_, sent_from = place_by_host[self._hosts[hop.sender]]
            self._send(landed, hop, sent_from, at, size)
            place_by_host[self._hosts[hop.receiver]] = (landed, hop.receiver, 1, at)
        dtype = self._dtypes.index(self._assignment.sources.by_key[unit.key].kind.dtype)
        for host, host_takes in by_host.items():
            for rank, row, part in host_takes:
                numbers = [*place_by_host[host], dtype, row]
                places = self._target_place(rank, row, part), part.relative_to(piece.offset).offset
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
        target_place, unit_place = places
        row = [*self._wide(target_place, 0), *self._wide(shape, 1), *self._wide(unit_place, 0)]
        self._rows["takes", rank].append([*numbers, *row, *self._wide(unit_shape, 1)])

    def _wave_of(self, giver: int, hops: Sequence[Hop], size: int, item: int) -> int:
        """Return the first wave with room in all buffers of a unit."""
        buffers = [(giver, False, 0), *((hop.receiver, True, hop.step - 1) for hop in hops)]
        wave = self._first_wave[giver]
        while any(
            self._end(rank, is_landed, wave + later, item) + size > self._bucket
            for rank, is_landed, later in buffers
        ):
            wave += 1
        if not hops:
            self._first_wave[giver] = wave
        self._num_waves = max(self._num_waves, *(wave + later + 1 for *_, later in buffers))
        return wave

    def _end(self, rank: int, is_landed: bool, wave: int, item: int) -> int:
        """Return the first place in a buffer where an item may begin."""
        return -(-self._used[rank, is_landed, wave] // item) * item

    def _reserve(self, rank: int, is_landed: bool, wave: int, size: int, item: int) -> int:
        start = self._end(rank, is_landed, wave, item)
        self._used[rank, is_landed, wave] = start + size
        return start

    def _send(self, wave: int, hop: Hop, start: int, at: int, size: int) -> None:
        """Add a message to both ranks' plans, or extend the last one."""
        sender, receiver, step = hop
        is_given = step == 1
        places = (start, at)
        self._sent_bytes += size
        last = self._last_messages.get((wave, sender, receiver, is_given))
        if last is not None and last.ends_at(places):
            last.lengthen(size)
            return
        number = self._num_messages[wave, sender, receiver]
        self._num_messages[wave, sender, receiver] += 1
        message = _Message([wave, receiver, start, size, number], [wave, sender, at, size, number])
        self._last_messages[wave, sender, receiver, is_given] = message
        self._rows["sends" if is_given else "forwards", sender].append(message.sent)
        self._rows["receives", receiver].append(message.received)

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
        return FROM_NAME[self._assignment.sources.by_key[key].kind.dtype].itemsize

    def _source_place(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.sources[rank].region(row).offset).offset

    def _target_place(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.targets[rank].region(row).offset).offset


class _Message(NamedTuple):
    """The rows of a message in its sender's and receiver's plans."""

    sent: list[int]
    received: list[int]

    def ends_at(self, places: tuple[int, int]) -> bool:
        """Whether it ends at these places in both buffers."""
        return all(row[2] + row[3] == place for row, place in zip(self, places, strict=True))

    def lengthen(self, num_bytes: int) -> None:
        """Add bytes that follow in both buffers."""
        for row in self:
            row[3] += num_bytes
