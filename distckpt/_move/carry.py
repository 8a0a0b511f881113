"""Carrying out the plan of a move on one rank: the memory to fill, the rounds, the comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, as_integers
from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._base.memory import overlapping, repeats_memory
from distckpt._base.messages import KeyFault, summarize_faults
from distckpt._format.fingerprint import PRIME
from distckpt._geometry.region import Region
from distckpt._io.exchange import copy_values
from distckpt._io.figures import LiveRegion, sum_over_ranks, sums_of
from distckpt._move.host_memory import HostMemory
from distckpt._move.pieces import Piece, Pieces
from distckpt._move.plan import RankPlan
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import Transfer
from distckpt.rules._mapped import UNCHANGED, change


def carry(
    ranks: Ranks,
    plan: RankPlan,
    memory: HostMemory,
    sources: Pieces,
    targets: Sequence[torch.Tensor],
) -> None:
    """Fill the targets of all ranks.

    Collective operation: all ranks must call it. No rank starts a round before all have done the
    one before. So each buffer holds the units that its readers expect, and no rank waits for one
    that has failed. Within a round no transfer waits for another one: a unit that is sent was there
    when the round began, and every rank starts all of its transfers before it waits for one. So
    ranks that pass units on, whatever to whom, do not wait for each other in a circle.
    """
    carrier = _Carrier(ranks, plan, memory, sources, targets)
    num_rounds = plan.num_waves + 1 + (plan.sent_bytes > 0)
    for number in range(num_rounds):
        with ranks.phase("move tensors"), torch.no_grad():
            carrier.do_round(number)


@dataclass
class _Carrier:
    """The work of one rank in each round of a move."""

    ranks: Ranks
    plan: RankPlan
    memory: HostMemory
    sources: Pieces
    targets: Sequence[torch.Tensor]

    def __post_init__(self) -> None:
        self._packs = _by_wave(self.plan.packs)
        self._takes = _by_wave(self.plan.takes)
        self._sends = _by_wave(self.plan.sends)
        self._forwards = _by_wave(self.plan.forwards)
        self._receives = _by_wave(self.plan.receives)

    def do_round(self, number: int) -> None:
        """Pack a wave, transfer the one before, and pass on received units.

        Units are taken in the round in which they are sent or passed on.
        """
        transfers = self._start_transfers(number - 1)
        try:
            if number == 0:
                self._copy()
            self._pack(number)
            self._take(number - 1, is_landed=False)
            self._take(number - 2, is_landed=True)
        finally:
            # The other ranks wait for them, even if something has failed here.
            for transfer in transfers:
                self.ranks.finish(transfer)

    def _start_transfers(self, wave: int) -> list[Transfer]:
        started = []
        for messages, is_sent, is_landed, buffer_wave in (
            (self._sends, True, False, wave),
            (self._forwards, True, True, wave - 1),
            (self._receives, False, True, wave),
        ):
            for _, peer, start, num_bytes, tag in messages.get(wave, ()):
                buffer = self.memory.buffer(self.ranks.rank, is_landed, buffer_wave)
                part = buffer[start : start + num_bytes]
                started.append(self.ranks.start_transfer(part, peer, tag, is_sent))
        return started

    def _copy(self) -> None:
        for source, target, at, to, shape in self.plan.copies:
            view = _part(self.sources.views[source], at, shape)
            place = _part(self.targets[target], to, shape)
            copy_values(_moved(view, self.sources.changes[source]), place)

    def _pack(self, wave: int) -> None:
        for _, start, source, at, shape in self._packs.get(wave, ()):
            view = _part(self.sources.views[source], at, shape)
            buffer = self.memory.buffer(self.ranks.rank, False, wave)
            moved = _moved(view, self.sources.changes[source])
            copy_values(moved, _unit(buffer[start:], view.dtype, shape))

    def _take(self, wave: int, is_landed: bool) -> None:
        for _, holder, has_landed, start, dtype, target, *places in self._takes.get(wave, ()):
            if has_landed != is_landed:
                continue
            to, shape, at, unit_shape = places
            place = _part(self.targets[target], to, shape)
            buffer = self.memory.buffer(holder, is_landed, wave)
            unit = _unit(buffer[start:], FROM_NAME[dtype], unit_shape)
            copy_values(_part(unit, at, shape), place)


def _by_wave(rows: Iterable[Sequence[Any]]) -> dict[int, list[Sequence[Any]]]:
    by_wave: defaultdict[int, list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        by_wave[row[0]].append(row)
    return by_wave


def _part(view: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return a region of a tensor."""
    region = Region(tuple(offset), tuple(shape))
    if region.shape == tuple(view.shape):
        return view
    return view[region.slices()]


def _unit(buffer: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View the beginning of a buffer as a tensor."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return buffer[:num_bytes].view(dtype).view(tuple(shape))


def _moved(view: torch.Tensor, change: tuple[float, float]) -> torch.Tensor:
    """Return the values to move for values in memory."""
    factor, add = change
    return view if change == UNCHANGED else (view - add) / factor


# --- The memory that is filled --------------------------------------------------------------------


class Staged(NamedTuple):
    """The targets of a rank.

    Attributes:
        targets: as the caller gave them.
        views: the memory to fill for each: its own, or a copy.
    """

    targets: Pieces
    views: list[torch.Tensor]

    @classmethod
    def of(cls, sources: Pieces, targets: Pieces, atomic: bool, fresh: Collection[int]) -> Staged:
        """Choose the memory; with `atomic`, no target is changed before `commit`.

        A target in memory that is given from is filled at the end in any case, as are `fresh` ones.
        """
        _refuse_repeated_memory(targets)
        num_sources = len(sources.views)
        staged = set(fresh)
        if not atomic:
            for first, second in overlapping([*sources.views, *targets.views]):
                if first < num_sources <= second:
                    staged.add(second - num_sources)
        views = []
        for row, view in enumerate(targets.views):
            if atomic or row in staged:
                view = torch.empty_like(view, memory_format=torch.contiguous_format)
            views.append(view)
        for view, piece in zip(views, targets.table, strict=True):
            if piece.kind.may_differ:
                view.detach().zero_()
        return cls(targets, views)

    @torch.no_grad()
    def commit(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Give the targets their values.

        Return the pairs (first, second) among `pairs` whose second target changed elements of the
        first.
        """
        earlier: dict[int, list[int]] = {}
        for first, second in pairs:
            earlier.setdefault(second, []).append(first)
        changed: list[tuple[int, int]] = []
        for row, (view, target) in enumerate(zip(self.views, self.targets.views, strict=True)):
            firsts = earlier.get(row, [])
            before = self._bits(firsts)
            if view is not target:
                copy_values(view, target)
            for first, old, new in zip(firsts, before, self._bits(firsts), strict=True):
                if not torch.equal(old, new):
                    changed.append((first, row))
        self._complete()
        return changed

    def _bits(self, rows: Iterable[int]) -> list[torch.Tensor]:
        """Return copies of the values of targets, which NaN equals as well."""
        views = (self.targets.views[row].detach() for row in rows)
        return [as_integers(view.resolve_conj().resolve_neg().clone()) for view in views]

    def _complete(self) -> None:
        """Write the values that are not moved."""
        for padding in self.targets.padding:
            padding.zero_()
        # Once, if several targets are the same memory.
        changes = {}
        for view, how in zip(self.targets.views, self.targets.changes, strict=True):
            changes[(view.data_ptr(), view.shape, view.stride())] = (view, how)
        for view, how in changes.values():
            change(view, *how)


def _refuse_repeated_memory(targets: Pieces) -> None:
    """Refuse targets with several elements at one address, as in expanded tensors."""
    for row, view in enumerate(targets.views):
        if repeats_memory(view):
            raise InvalidShardingError(
                f"Key {targets.key(row)!r} is to be filled in memory where several of its elements "
                f"are one (shape {tuple(view.shape)}, strides {view.stride()}): give it a tensor "
                "that is not expanded or overlapping."
            )


# --- Whether all has arrived ----------------------------------------------------------------------


def check_arrival(
    ranks: Ranks, plan: RankPlan, sources: Pieces, targets: Pieces, views: Sequence[torch.Tensor]
) -> None:
    """Compare the values that each rank received with their givers' values.

    Collective operation: all ranks must call it. They exchange one number for each tensor and rank.
    `views` are the filled memory of the targets.

    Raises:
        CheckpointingException: they differ, on all ranks.
    """
    with ranks.phase("compute fingerprints"), torch.no_grad():
        regions = [*_sent(plan, sources), *_arrived(plan, targets.table, views)]
        # Givers and takers have slots of their own: each sum is of one side.
        sums = sums_of(regions, 2 * len(plan.compared))
    totals = sum_over_ranks(ranks, sums)
    pairs = zip(plan.compared, totals[::2], totals[1::2], strict=True)
    faults = []
    for (rank, key), sent, arrived in pairs:
        if (sent - arrived) % PRIME:
            text = f" on rank {rank}"
            faults.append(KeyFault(key, text, text))
    if faults:
        lines = "\n- ".join(summarize_faults(faults))
        raise CheckpointingException(
            f"What has arrived is not what was sent:\n- {lines}\nEither was changed during the "
            "move, or two tensors with different values are one on the side that takes, or memory "
            "or a connection is faulty. Move it again before it is used."
        )


def _sent(plan: RankPlan, sources: Pieces) -> Iterator[LiveRegion]:
    for slot, row, dtype, offset, shape in plan.sent:
        region, view = _place(sources.table[row], sources.views[row], offset, shape)
        moved = _moved(view, sources.changes[row])
        taken_as = FROM_NAME[dtype]
        values = moved
        if moved.dtype != taken_as:
            values = _one_nan(moved.to(taken_as))
        yield LiveRegion(2 * slot, region, values)


def _arrived(
    plan: RankPlan, table: Sequence[Piece], views: Sequence[torch.Tensor]
) -> Iterator[LiveRegion]:
    for slot, row, is_cast, offset, shape in plan.arrived:
        region, view = _place(table[row], views[row], offset, shape)
        yield LiveRegion(2 * slot + 1, region, _one_nan(view) if is_cast else view)


def _place(
    piece: Piece, view: torch.Tensor, offset: Sequence[int], shape: Sequence[int]
) -> tuple[Region, torch.Tensor]:
    """Return a region of a piece in its tensor, and its values."""
    start = tuple(map(int.__add__, piece.region.offset, offset))
    return Region(start, tuple(shape)), _part(view, offset, shape)


def _one_nan(values: torch.Tensor) -> torch.Tensor:
    """Give all NaN the same bits.

    A conversion makes different ones at different places in memory.
    """
    if not values.dtype.is_floating_point:
        return values
    wide = values
    if values.dtype.itemsize != 8:
        wide = values.float()
    return torch.where(wide.isnan(), torch.nan, wide).to(values.dtype)
