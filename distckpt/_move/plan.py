"""Planning a move: which rank gives which part of which tensor to whom, and when. Pure functions.

What a rank holds itself it copies. Everything else is a *unit*: a region that one rank, its giver,
packs into a buffer, from which the ranks of its machine take what they want. For every other
machine that wants it, the unit is sent once, into a buffer of one rank there, and taken from that.
Units are packed in *waves*: buffers are used again every second wave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import FROM_NAME, is_convertible, is_lossless_cast
from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.messages import KeyFault, did_you_mean, summarize_faults
from distckpt._format.columns import compress, decompress, pack, unpack
from distckpt._geometry.region import (
    IntArray,
    Region,
    intersect,
    intersect_many,
    subtract,
    widen,
)
from distckpt._geometry.units import cut_region
from distckpt._move.pieces import Kind, PieceTable
from distckpt._state.validation import find_overlap

Flags = npt.NDArray[np.bool_]

UNITS_PER_BUCKET = 4
"""The largest unit is this part of a buffer, so that little of it stays empty."""


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


class RankPlan(NamedTuple):
    """The part of one rank in a plan of `num_waves` waves, as rows of numbers.

    Attributes:
        num_waves: of all ranks.
        sent_bytes: what all ranks together send to other machines.
        has_gaps: whether any rank has `gaps`.
        num_bytes: that this rank gets, in the dtypes in which they are moved.
        dtypes: safetensors names, which `takes` refers to.
        copies: `source, target, *source offset, *target offset, *shape`: pieces of this rank, and
            the places of a region in them.
        packs: `wave, start, source, *offset, *shape`: a region of a piece, and where its bytes
            begin in the buffer.
        takes: `wave, holder, is_landed, start, dtype, target, *offset, *shape, *place, *unit shape`:
            which rank's buffer for units that it has packed or received (landed) holds a unit, and
            where the unit begins there; the place of a region in the target, and in the unit.
        sends: `wave, peer, start, bytes, tag`: in the buffer for packed units.
        receives: the same, in the buffer for units that have landed.
        gaps: `target, *offset, *shape`: regions that no rank holds.
    """

    num_waves: int
    sent_bytes: int
    has_gaps: bool
    num_bytes: int
    dtypes: list[str]
    copies: IntArray
    packs: IntArray
    takes: IntArray
    sends: IntArray
    receives: IntArray
    gaps: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return compress(pack(self[:5], dict(zip(self._fields[5:], self[5:], strict=True))))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPlan:
        """Decode what `to_bytes` made."""
        fields, columns = unpack(decompress(data))
        return cls(*fields, *(columns[name] for name in cls._fields[5:]))


def plan_moves(
    sources: Sequence[PieceTable], targets: Sequence[PieceTable], settings: MoveSettings
) -> list[RankPlan]:
    """Find for every element that a rank takes the rank that gives it; return a plan for each rank.

    Raises:
        InvalidShardingError: ranks give one element as main replicas of different shards, or
            describe one tensor differently.
        LoadMismatchError: no rank holds what is taken, or values would change in the dtype of a
            target.
    """
    held = _Held.of(sources)
    planner = _Planner(held, settings)
    wanted = _wanted(targets, settings.hosts)
    _check_kinds(held, targets, settings)
    for (_, key), rows in sorted(wanted.items(), key=lambda item: item[0][1]):
        for rank, row in rows:
            table = targets[rank]
            planner.fill(key, table.kinds[table.kind_ids[row]], rank, row, table.region(row))
    planner.check_gaps()
    return _Schedule(planner, _Tables(sources, targets)).plans()


def _wanted(
    targets: Sequence[PieceTable], hosts: Sequence[int]
) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return the pieces that are taken, `(rank, row)`, by machine and key."""
    wanted: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, table in enumerate(targets):
        for row in np.flatnonzero((table.shapes > 0).all(axis=1)).tolist():
            key = table.kinds[table.kind_ids[row]].key
            wanted[hosts[rank], key].append((rank, row))
    return wanted


# --- What is held ---------------------------------------------------------------------------------


class _Holders(NamedTuple):
    """The pieces of one tensor on all ranks: their `ranks`, `rows` in the tables of these, and
    regions; by rank.
    """

    kind: Kind
    ranks: IntArray
    rows: IntArray
    offsets: IntArray
    shapes: IntArray


class _Held(NamedTuple):
    """All that ranks give, by key."""

    by_key: dict[str, _Holders]
    num_ranks: int

    @classmethod
    def of(cls, tables: Sequence[PieceTable]) -> _Held:
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
            holders = _Holders(
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


def _overlaps(holders: _Holders, is_main: Flags) -> Iterator[KeyFault]:
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


def _region(holders: _Holders, place: int) -> Region:
    return Region(tuple(holders.offsets[place].tolist()), tuple(holders.shapes[place].tolist()))


def _check_kinds(held: _Held, targets: Sequence[PieceTable], settings: MoveSettings) -> None:
    """Refuse targets whose shape or dtype does not fit what is held."""
    for rank, table in enumerate(targets):
        for kind in table.kinds:
            if kind.key in held.by_key:
                _check_kind(held.by_key[kind.key].kind, kind, rank, settings)


def _check_kind(given: Kind, taken: Kind, rank: int, settings: MoveSettings) -> None:
    may_differ = taken.may_differ and len(taken.shape) == len(given.shape)
    if given.shape != taken.shape and not may_differ:
        raise LoadMismatchError(
            f"Key {taken.key!r} is given with the global shape {given.shape}, and rank {rank} "
            f"takes it with {taken.shape}: correct one of the state dicts, or set "
            "allow_shape_mismatch=True on the ShardedTensor that takes it if it is padded.",
            unexpected=[taken.key],
        )
    dtypes = FROM_NAME[given.dtype], FROM_NAME[taken.dtype]
    fits = is_convertible if settings.allow_dtype_cast else is_lossless_cast
    if not fits(*dtypes):
        raise LoadMismatchError(
            f"Key {taken.key!r} is given as {dtypes[0]}, and rank {rank} takes it as {dtypes[1]}, "
            "which would change values: take the dtype that is given or a wider one, or pass "
            "allow_dtype_cast=True.",
            unexpected=[taken.key],
        )


# --- Who gives what -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unit:
    """A region that a rank packs: the `row` of its piece, and `takes`: the rank, its row, and the
    region that it takes.
    """

    key: str
    giver: int
    row: int
    region: Region
    takes: list[tuple[int, int, Region]] = field(default_factory=list)


class _Gap(NamedTuple):
    key: str
    rank: int
    row: int
    region: Region


class _Planner:
    """Finds for each target the units that fill it; those on a machine do for all its ranks."""

    def __init__(self, held: _Held, settings: MoveSettings) -> None:
        self.held, self.settings = held, settings
        self.units: dict[tuple[str, int, int, Region], _Unit] = {}
        self.copies: list[tuple[int, str, int, int, Region]] = []
        self.gaps: list[_Gap] = []
        self.given = [0] * held.num_ranks
        self._of_host: defaultdict[tuple[int, str], list[_Unit]] = defaultdict(list)

    def fill(self, key: str, kind: Kind, rank: int, row: int, region: Region) -> None:
        """Find what fills the region of a piece that a rank takes."""
        holders = self.held.by_key.get(key)
        if holders is None:
            self.gaps.append(_Gap(key, rank, row, region))
            return
        wanted = region
        if kind.may_differ:
            clipped = intersect(region, Region((0,) * len(region.shape), holders.kind.shape))
            if clipped is None:
                return
            wanted = clipped
        left = self._from_holders(holders, rank, row, [wanted])
        self.gaps += [_Gap(key, rank, row, gap) for gap in left]

    def _from_holders(
        self, holders: _Holders, rank: int, row: int, left: list[Region]
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

    def _unit(self, key: str, giver: int, row: int, region: Region, host: int) -> _Unit:
        identity = (key, giver, row, region)
        if identity not in self.units:
            self.units[identity] = _Unit(*identity)
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

    def _lack(self, gap: _Gap) -> str:
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


# --- When it is given -----------------------------------------------------------------------------


class _Tables(NamedTuple):
    """What all ranks give and take."""

    sources: Sequence[PieceTable]
    targets: Sequence[PieceTable]

    @property
    def ndim(self) -> int:
        """The number of axes of the tensor that has most."""
        tables = (*self.sources, *self.targets)
        return max((len(kind.shape) for table in tables for kind in table.kinds), default=0)


class _Schedule:
    """Gives every unit a wave and a place in the buffers that it passes."""

    def __init__(self, planner: _Planner, tables: _Tables) -> None:
        self._planner, self._tables, self._ndim = planner, tables, tables.ndim
        self._hosts, self._bucket = planner.settings.hosts, planner.settings.bucket_bytes
        kinds = (each.kind for each in planner.held.by_key.values())
        self._dtypes = sorted({kind.dtype for kind in kinds})
        num_ranks = planner.held.num_ranks
        # By rank, whether it is for units that have landed, and wave.
        self._used: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
        self._first_wave, self._landed = [0] * num_ranks, [0] * num_ranks
        self._num_bytes = [0] * num_ranks
        self._rows: defaultdict[tuple[str, int], list[list[int]]] = defaultdict(list)
        self._num_messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._num_waves = self._sent_bytes = 0

    def plans(self) -> list[RankPlan]:
        """Return the plan of each rank."""
        for unit in self._planner.units.values():
            self._place(unit)
        for rank, key, source, row, region in self._planner.copies:
            places = self._in_source(rank, source, region), self._in_target(rank, row, region)
            self._add("copies", rank, [source, row], *places, shapes=[region.shape])
            self._num_bytes[rank] += region.num_elements * self._item_bytes(key)
        for gap in self._planner.gaps:
            place = self._in_target(gap.rank, gap.row, gap.region)
            self._add("gaps", gap.rank, [gap.row], place, shapes=[gap.region.shape])
        return [self._plan_of(rank) for rank in range(self._planner.held.num_ranks)]

    def _plan_of(self, rank: int) -> RankPlan:
        num_columns = {
            "copies": 2 + 3 * self._ndim,
            "packs": 3 + 2 * self._ndim,
            "takes": 6 + 4 * self._ndim,
            "gaps": 1 + 2 * self._ndim,
        }
        columns = {
            name: np.array(self._rows[name, rank], np.int64).reshape(-1, num_columns.get(name, 5))
            for name in RankPlan._fields[5:]
        }
        return RankPlan(
            num_waves=self._num_waves,
            sent_bytes=self._sent_bytes,
            has_gaps=bool(self._planner.gaps),
            num_bytes=self._num_bytes[rank],
            dtypes=self._dtypes,
            **columns,
        )

    def _place(self, unit: _Unit) -> None:
        item = self._item_bytes(unit.key)
        pieces = list(cut_region(unit.region, max(1, self._bucket // UNITS_PER_BUCKET // item)))
        for piece in pieces:
            common = ((rank, row, intersect(piece, region)) for rank, row, region in unit.takes)
            takes = [(rank, row, part) for rank, row, part in common if part is not None]
            if takes:
                self._place_piece(unit, piece, takes, item)

    def _place_piece(
        self, unit: _Unit, piece: Region, takes: list[tuple[int, int, Region]], item: int
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
        dtype = self._dtypes.index(self._planner.held.by_key[unit.key].kind.dtype)
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
        if sends and receives and _ends_at(sends[-1], wave, holder, start, number):
            if _ends_at(receives[-1], wave, giver, at, number):
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
        return FROM_NAME[self._planner.held.by_key[key].kind.dtype].itemsize

    def _in_source(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.sources[rank].region(row).offset).offset

    def _in_target(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._tables.targets[rank].region(row).offset).offset


def _ends_at(message: list[int], wave: int, peer: int, start: int, number: int) -> bool:
    """Tell whether a message is the last one to a peer in a wave, and ends at a place."""
    return message[:2] == [wave, peer] and sum(message[2:4]) == start and message[4] == number - 1
