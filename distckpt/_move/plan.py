"""Planning a move: the giver, taker and time of each part of each tensor.

Pure functions.

A rank copies elements that it holds itself. Everything else is a *unit*: a region that one rank,
its giver, packs into a buffer, from which the ranks of its machine take their parts. Every other
machine that wants it gets it once, from the giver or another machine, into a buffer of one rank
there, and its ranks take it from that.

Units are packed in *waves*, and land in the same wave; units that are passed on land in a later
one. Buffers are used again every second wave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from distckpt._base.dtypes import FROM_NAME, is_convertible, is_lossless_cast
from distckpt._base.errors import LoadMismatchError
from distckpt._format.code_names import (
    are_codes_beside_scales,
    may_be_codes,
    places_of_scales,
    scale_beside,
)
from distckpt._geometry.region import Region, intersect
from distckpt._geometry.units import cut_region
from distckpt._move.assignment import (
    Assignment,
    Holders,
    MoveSettings,
    Unit,
    holders_by_key,
)
from distckpt._move.fan_out import FanOut, Hop
from distckpt._move.pieces import Kind, Piece

UNITS_PER_BUCKET = 4
"""Number of largest units per buffer, so that little stays empty."""

_Rows: TypeAlias = list[Sequence[Any]]


class RankPlan(NamedTuple):
    """The part of one rank in a move's waves, as numbers.

    Attributes:
        copies: `source, target, source offset, target offset, shape`: pieces of this rank, and the
            places of a region in them.
        packs: `wave, start, source, offset, shape`: a region of a piece, and where its bytes begin
            in the buffer.
        takes: `wave, holder, is_landed, start, dtype, target, offset, shape, place, unit shape`:
            the rank whose buffer holds a unit, whether it is the buffer for received (landed) units
            or for packed ones, and the unit's start there; the place of a region in the target, and
            in the unit, and the shape of the unit.
        sends: `wave, peer, start, bytes, tag`: in the buffer for packed units.
        forwards: the same, in the buffer for units that landed in the wave before.
        receives: the same, in the buffer for units that land.
        gaps: `target, offset, shape`: regions that no rank holds.
        sent: `slot, source, dtype, offset, shape`: a region of a piece that another rank gets, and
            the dtype in which it keeps it.
        arrived: `slot, target, is_cast, offset, shape`: a region that this rank gets, and whether
            it keeps it in another dtype than the one in which it is moved.
        compared: `rank, key`: for each, arrived values are compared with sent ones; their places in
            this list are slots.
        num_waves: the number of waves on all ranks.
        sent_bytes: bytes that all ranks together send to other machines.
        has_gaps: whether any rank has `gaps`.
        num_bytes: bytes that this rank gets, in the dtypes in which they are moved.
    """

    copies: _Rows
    packs: _Rows
    takes: _Rows
    sends: _Rows
    forwards: _Rows
    receives: _Rows
    gaps: _Rows
    sent: _Rows
    arrived: _Rows
    compared: Sequence[tuple[int, str]] = ()
    num_waves: int = 0
    sent_bytes: int = 0
    has_gaps: bool = False
    num_bytes: int = 0


def plan_moves(
    sources: Sequence[Sequence[Piece]],
    targets: Sequence[Sequence[Piece]],
    settings: MoveSettings,
) -> list[RankPlan]:
    """Find a giver for every element that is taken; return a plan per rank.

    Raises:
        InvalidShardingError: ranks give one element as main replicas of different shards, or
            describe one tensor differently.
        LoadMismatchError: no rank holds elements that are taken, or values would change in the
            dtype of a target.
    """
    assignment = Assignment(holders_by_key(sources), len(sources), settings)
    _check_kinds(assignment.holders, targets, settings)
    # By machine and key.
    taken: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, table in enumerate(targets):
        for row, piece in enumerate(table):
            if piece.region.num_elements:
                taken[settings.hosts[rank], piece.kind.key].append((rank, row))
    for _, places in sorted(taken.items(), key=lambda item: item[0][1]):
        for rank, row in places:
            assignment.fill(rank, row, targets[rank][row])
    assignment.check_gaps()
    return _Schedule(assignment, sources, targets).plans()


def _check_kinds(
    holders: Mapping[str, Holders], targets: Sequence[Sequence[Piece]], settings: MoveSettings
) -> None:
    """Refuse targets whose shape or dtype does not fit the given tensors."""
    scales: dict[str, str] | None = None
    for rank, table in enumerate(targets):
        for kind in dict.fromkeys(piece.kind for piece in table):
            if kind.key not in holders:
                continue
            source = holders[kind.key].kind
            _check_kind(source, kind, rank, settings)
            if source.dtype != kind.dtype and may_be_codes(source.dtype):
                scales = places_of_scales(holders) if scales is None else scales
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


# --- The schedule ---------------------------------------------------------------------------------


class _Schedule:
    """The wave of every unit, and its places in buffers."""

    def __init__(
        self,
        assignment: Assignment,
        sources: Sequence[Sequence[Piece]],
        targets: Sequence[Sequence[Piece]],
    ) -> None:
        self._assignment = assignment
        self._sources = sources
        self._targets = targets
        self._hosts = assignment.settings.hosts
        self._bucket = assignment.settings.bucket_bytes
        self._plans: list[RankPlan] = []
        for _ in sources:
            self._plans.append(RankPlan([], [], [], [], [], [], [], [], []))
        # By rank, whether it is for units that have landed, and wave.
        self._used: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
        self._first_wave = [0] * len(sources)
        self._num_bytes = [0] * len(sources)
        units = list(assignment.units.values())
        self._fan_out = FanOut(units, self._hosts, self._bucket // UNITS_PER_BUCKET)
        # By wave, ranks, and for the last ones whether the sender is the giver.
        self._num_messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        # The rows in the plans of sender and receiver.
        self._last_messages: dict[tuple[int, int, int, bool], list[list[int]]] = {}
        self._num_waves = self._sent_bytes = 0
        self._slots: dict[tuple[int, str], int] = {}

    def plans(self) -> list[RankPlan]:
        """Return the plan of each rank."""
        assignment = self._assignment
        for unit in self._fan_out.units():
            self._place(unit)
        for rank, key, source, row, region in assignment.copies:
            given_from = self._source_place(rank, source, region)
            place = self._target_place(rank, row, region)
            self._plans[rank].copies.append((source, row, given_from, place, region.shape))
            self._num_bytes[rank] += region.num_elements * assignment.item_bytes(key)
        for _, rank, row, region in assignment.gaps:
            place = self._target_place(rank, row, region)
            self._plans[rank].gaps.append((row, place, region.shape))
        if assignment.settings.compares:
            self._add_comparisons()
        plans = []
        for plan, num_bytes in zip(self._plans, self._num_bytes, strict=True):
            plans.append(
                plan._replace(
                    compared=list(self._slots),
                    num_waves=self._num_waves,
                    sent_bytes=self._sent_bytes,
                    has_gaps=bool(assignment.gaps),
                    num_bytes=num_bytes,
                )
            )
        return plans

    def _add_comparisons(self) -> None:
        """Let takers and givers sum all the values they take and give."""
        for key, rank, row, region in self._assignment.target_regions:
            slot = self._slots.setdefault((rank, key), len(self._slots))
            taken_as = self._targets[rank][row].kind.dtype
            is_cast = taken_as != self._assignment.holders[key].kind.dtype
            place = self._target_place(rank, row, region)
            self._plans[rank].arrived.append((slot, row, is_cast, place, region.shape))
        for giver, source, (rank, key, row, region) in self._assignment.gifts():
            slot = self._slots[rank, key]
            taken_as = self._targets[rank][row].kind.dtype
            place = self._source_place(giver, source, region)
            self._plans[giver].sent.append((slot, source, taken_as, place, region.shape))

    def _place(self, unit: Unit) -> None:
        max_elements = max(1, self._bucket // UNITS_PER_BUCKET // unit.item_bytes)
        for region in cut_region(unit.region, max_elements):
            takes = []
            for rank, row, taken in unit.takes:
                common = intersect(region, taken)
                if common is not None:
                    takes.append((rank, row, common))
            if takes:
                self._place_region(unit, region, takes)

    def _place_region(
        self, unit: Unit, region: Region, takes: list[tuple[int, int, Region]]
    ) -> None:
        giver = unit.giver
        item = unit.item_bytes
        size = region.num_elements * item
        own_host = self._hosts[giver]
        takers: defaultdict[int, set[int]] = defaultdict(set)
        for rank, _, _ in takes:
            takers[self._hosts[rank]].add(rank)
        takers.pop(own_host, None)
        hops = self._fan_out.hops(giver, list(takers.values()), size)
        wave = self._wave_of(giver, hops, size, item)
        start = self._reserve(giver, False, wave, size, item)
        given_from = self._source_place(giver, unit.row, region)
        self._plans[giver].packs.append((wave, start, unit.row, given_from, region.shape))
        place_by_host = {own_host: (wave, giver, False, start)}
        for hop in hops:
            landed = wave + hop.step - 1
            at = self._reserve(hop.receiver, True, landed, size, item)
            *_, sent_from = place_by_host[self._hosts[hop.sender]]
            self._send(landed, hop, sent_from, at, size)
            place_by_host[self._hosts[hop.receiver]] = (landed, hop.receiver, True, at)
        dtype = self._assignment.holders[unit.key].kind.dtype
        for rank, row, part in takes:
            packed = place_by_host[self._hosts[rank]]
            place = self._target_place(rank, row, part)
            within = part.relative_to(region.offset).offset
            self._plans[rank].takes.append(
                (*packed, dtype, row, place, part.shape, within, region.shape)
            )
            self._num_bytes[rank] += part.num_elements * item

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
        self._sent_bytes += size
        last = self._last_messages.get((wave, sender, receiver, is_given), ())
        if [row[2] + row[3] for row in last] == [start, at]:
            for row in last:
                row[3] += size
            return
        number = self._num_messages[wave, sender, receiver]
        self._num_messages[wave, sender, receiver] += 1
        sent = [wave, receiver, start, size, number]
        received = [wave, sender, at, size, number]
        self._last_messages[wave, sender, receiver, is_given] = [sent, received]
        plan = self._plans[sender]
        (plan.sends if is_given else plan.forwards).append(sent)
        self._plans[receiver].receives.append(received)

    def _source_place(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._sources[rank][row].region.offset).offset

    def _target_place(self, rank: int, row: int, region: Region) -> tuple[int, ...]:
        return region.relative_to(self._targets[rank][row].region.offset).offset
