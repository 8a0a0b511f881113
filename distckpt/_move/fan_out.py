"""How what several machines want reaches all of them. Pure functions.

For one or two machines the giver sends it to each. For more it sends it once, to the first of them:
that machine, and others after it, pass it on to two more each, along a binary tree. So `n`
machines have it after `log2(n) + 1` steps at most, and each gets it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distckpt._geometry.region import Region
from distckpt._move.assignment import Unit, divide
from distckpt._state.validation import find_overlap

_NUM_DIRECT = 2
"""So many machines get a unit from its giver."""


class Hop(NamedTuple):
    """A unit goes from one rank to another one, in the `step`th step after it was packed."""

    sender: int
    receiver: int
    step: int


class FanOut:
    """Chooses for each unit the rank that receives it on each machine, and who sends it there.

    Whoever receives a unit for a machine also passes it on. What a giver has for the same machines
    takes two trees by turns. Machines that pass on in one of them do not in the other one, so that
    none sends more than it receives. Those of the next giver begin with the next machine, so that
    each has all places in them.
    """

    def __init__(self, stretch_bytes: int) -> None:
        self._stretch_bytes = stretch_bytes
        self._received: defaultdict[int, int] = defaultdict(int)
        self._ways: dict[tuple[int, tuple[tuple[int, ...], ...]], _Way] = {}

    def hops(self, giver: int, takers: Sequence[Collection[int]], num_bytes: int) -> list[Hop]:
        """Return the way of a unit to the machines whose ranks take it, the giver's left out."""
        if len(takers) <= _NUM_DIRECT:
            hops = [Hop(giver, self._receiver(ranks), 1) for ranks in takers]
        else:
            hops = self._way(giver, takers, num_bytes).hops
        for hop in hops:
            self._received[hop.receiver] += num_bytes
        return hops

    def _receiver(self, ranks: Collection[int]) -> int:
        return min(ranks, key=lambda rank: self._received[rank])

    def _way(self, giver: int, takers: Sequence[Collection[int]], num_bytes: int) -> _Way:
        """Return the way of the next unit: that of the last one, if both are small and become one
        message, else the other tree, and in the end other ranks.
        """
        identity = giver, tuple(tuple(sorted(ranks)) for ranks in takers)
        way = self._ways.get(identity)
        if way is None:
            first = giver % len(takers)
            way = _Way([*identity[1][first:], *identity[1][:first]], [], [], -1)
        left = way.num_left - num_bytes
        if left < 0:
            left = self._stretch_bytes - num_bytes
            receivers = [self._receiver(ranks) for ranks in way.machines]
            trees = way.next_trees or [_tree(giver, receivers), _tree(giver, receivers[::-1])]
            way = way._replace(hops=trees[0], next_trees=trees[1:])
        self._ways[identity] = way = way._replace(num_left=left)
        return way


class _Way(NamedTuple):
    """How units go to some machines.

    Attributes:
        machines: their ranks, in the order in which they are in the first tree.
        hops: of the last unit.
        next_trees: the hops of units after that.
        num_left: so many bytes may follow in the same tree.
    """

    machines: list[tuple[int, ...]]
    hops: list[Hop]
    next_trees: list[list[Hop]]
    num_left: int


def _tree(giver: int, receivers: Sequence[int]) -> list[Hop]:
    """Return the way along a binary tree: the first half of the receivers send, the others do
    not.
    """
    senders = [giver, *(rank for rank in receivers for _ in range(2))]
    return [
        Hop(sender, receiver, number.bit_length())
        for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=False), 1)
    ]


# --- Different layouts ----------------------------------------------------------------------------


def joined_units(units: Iterable[Unit], hosts: Sequence[int]) -> Iterator[Unit]:
    """Cut the units that overlap, so that what many machines want is one unit for all of them.

    Units overlap where a piece is wanted under different layouts. A machine that wants the whole of
    a unit gets the parts that this is cut into. The takes of a part may exceed its region.
    """
    if len(set(hosts)) <= 1 + _NUM_DIRECT:
        yield from units
        return
    by_piece: defaultdict[tuple[str, int, int], list[Unit]] = defaultdict(list)
    for unit in units:
        by_piece[unit.key, unit.giver, unit.row].append(unit)
    for of_piece in by_piece.values():
        others = {hosts[rank] for unit in of_piece for rank, _, _ in unit.takes}
        others.discard(hosts[of_piece[0].giver])
        are_apart = len(of_piece) == 1 or len(others) <= _NUM_DIRECT or not _overlap(of_piece)
        yield from of_piece if are_apart else _parts(of_piece)


def _overlap(units: Sequence[Unit]) -> bool:
    offsets, shapes = (np.array([unit.region[i] for unit in units]) for i in (0, 1))
    return find_overlap(offsets, shapes) is not None


def _parts(units: Iterable[Unit]) -> list[Unit]:
    """Cut units into parts that do not overlap."""
    parts: list[Unit] = []
    for unit in units:
        divided: list[Unit] = []
        left = [unit.region]
        for part in parts:
            common, others = divide([part.region], unit.region)
            divided += [_part(part, region, [*part.takes, *unit.takes]) for region in common]
            divided += [_part(part, region, part.takes) for region in others]
            _, left = divide(left, part.region)
        parts = [*divided, *(_part(unit, region, unit.takes) for region in left)]
    return parts


def _part(unit: Unit, region: Region, takes: list[tuple[int, int, Region]]) -> Unit:
    return replace(unit, region=region, takes=takes)
