"""Carrying out the plan of a move on one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._geometry.region import Region
from distckpt._io.exchange import copy_values
from distckpt._move.host_memory import HostMemory
from distckpt._move.pieces import Pieces
from distckpt._move.plan import RankPlan
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import Transfer


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


class _Carrier:
    """The work of one rank in each round of a move."""

    def __init__(
        self,
        ranks: Ranks,
        plan: RankPlan,
        memory: HostMemory,
        sources: Pieces,
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._memory = memory
        self._sources = sources
        self._targets = targets
        self._packs = _by_wave(plan.packs)
        self._takes = _by_wave(plan.takes)
        self._sends = _by_wave(plan.sends)
        self._forwards = _by_wave(plan.forwards)
        self._receives = _by_wave(plan.receives)

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
                self._ranks.finish(transfer)

    def _start_transfers(self, wave: int) -> list[Transfer]:
        started = []
        for messages, is_sent, is_landed, buffer_wave in (
            (self._sends, True, False, wave),
            (self._forwards, True, True, wave - 1),
            (self._receives, False, True, wave),
        ):
            for _, peer, start, num_bytes, tag in messages.get(wave, ()):
                buffer = self._memory.buffer(self._ranks.rank, is_landed, buffer_wave)
                part = buffer[start : start + num_bytes]
                started.append(self._ranks.start_transfer(part, peer, tag, is_sent))
        return started

    def _copy(self) -> None:
        for source, target, at, to, shape in self._plan.copies:
            view = _part(self._sources.views[source], at, shape)
            place = _part(self._targets[target], to, shape)
            copy_values(_moved(view, self._sources.adds[source]), place)

    def _pack(self, wave: int) -> None:
        for _, start, source, at, shape in self._packs.get(wave, ()):
            view = _part(self._sources.views[source], at, shape)
            buffer = self._memory.buffer(self._ranks.rank, False, wave)
            copy_values(
                _moved(view, self._sources.adds[source]), _unit(buffer[start:], view.dtype, shape)
            )

    def _take(self, wave: int, is_landed: bool) -> None:
        for _, holder, has_landed, start, dtype, target, *places in self._takes.get(wave, ()):
            if has_landed != is_landed:
                continue
            to, shape, at, unit_shape = places
            place = _part(self._targets[target], to, shape)
            buffer = self._memory.buffer(holder, is_landed, wave)
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


def _moved(view: torch.Tensor, add: float) -> torch.Tensor:
    """Return the values to move for values in memory."""
    if add:
        return view - add
    return view
