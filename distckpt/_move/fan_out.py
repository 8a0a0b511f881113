"""The ways of units that several machines want.

Pure functions.

A giver sends a unit to each machine, unless its own would send more than twice as much as any
receives. Then it sends the unit once, to the first of them: that machine, and later ones, pass it
on to two more each, along a binary tree. So `n` machines have it after `log2(n) + 1` steps at most,
and each gets it once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from distckpt._geometry.region import Region, regions_to_arrays
from distckpt._move.assignment import Unit, divide
from distckpt._state.validation import find_overlap

MAX_TIMES = 2
"""Most bytes a machine sends, as a multiple of the most received.

Above it, other machines pass units on.
"""


class Hop(NamedTuple):
    """A unit's way between two ranks, in step `step` after packing."""

    sender: int
    receiver: int
    step: int


class FanOut:
    """The receiver of each unit on each machine, and its sender.

    The rank that receives a unit for a machine also passes it on. Units for the same machines take
    two trees by turns. Machines that pass on in one tree do not in the other, so that none sends
    more than it receives, and about the same in each wave.
    """

    def __init__(self, units: Sequence[Unit], hosts: Sequence[int], stretch_bytes: int) -> None:
        self._units = units
        self._hosts = hosts
        self._stretch_bytes = stretch_bytes
        self._overloaded = overloaded_machines(units, hosts)
        self._received: defaultdict[int, int] = defaultdict(int)
        # By the ranks that take, of each machine.
        self._stretches: dict[tuple[tuple[int, ...], ...], _Stretch] = {}
        # By the ranks that receive: the bytes of the first tree minus the bytes of the second one.
        self._leads: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def units(self) -> Iterable[Unit]:
        """Return the units to move, some of them cut into parts."""
        if not self._overloaded:
            return self._units
        return _join_overlaps(self._units, self._hosts, self._overloaded)

    def hops(self, giver: int, takers: Sequence[Collection[int]], num_bytes: int) -> list[Hop]:
        """Return a unit's way to the other machines that take it."""
        if len(takers) > MAX_TIMES and self._hosts[giver] in self._overloaded:
            hops = _tree(giver, self._receivers(takers, num_bytes))
        else:
            hops = [Hop(giver, self._receiver(ranks), 1) for ranks in takers]
        for hop in hops:
            self._received[hop.receiver] += num_bytes
        return hops

    def _receiver(self, ranks: Collection[int]) -> int:
        return min(ranks, key=lambda rank: self._received[rank])

    def _receivers(self, takers: Sequence[Collection[int]], num_bytes: int) -> Sequence[int]:
        """Return the ranks of a tree, in its order.

        It is the tree of the last unit if both units are small and become one message.
        """
        machines = tuple(tuple(sorted(ranks)) for ranks in takers)
        stretch = self._stretches.get(machines)
        if stretch is None or stretch.num_left < num_bytes:
            receivers = tuple(map(self._receiver, machines))
            # The second tree has the order of the first one reversed.
            is_second = self._leads[receivers] > 0
            stretch = _Stretch(receivers, is_second, self._stretch_bytes)
        receivers, is_second, left = stretch
        self._stretches[machines] = stretch._replace(num_left=left - num_bytes)
        self._leads[receivers] += -num_bytes if is_second else num_bytes
        if is_second:
            return receivers[::-1]
        return receivers


class _Stretch(NamedTuple):
    """Consecutive units in one tree.

    It has the ranks in the order of the first tree, whether it is the second one, and the number of
    bytes that may follow.
    """

    receivers: tuple[int, ...]
    is_second: bool
    num_left: int


def overloaded_machines(units: Iterable[Unit], hosts: Sequence[int]) -> set[int]:
    """Return the machines that would send too much without passing on."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for unit in units:
        for other in unit.machines(hosts):
            sent[hosts[unit.giver]] += unit.num_bytes
            received[other] += unit.num_bytes
    limit = MAX_TIMES * max(received.values(), default=0)
    return {host for host, num_bytes in sent.items() if num_bytes > limit}


def _tree(giver: int, receivers: Sequence[int]) -> list[Hop]:
    """Return the way along a binary tree; its first half sends."""
    senders = [giver]
    for rank in receivers:
        senders += [rank, rank]
    hops = []
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=False), 1):
        hops.append(Hop(sender, receiver, number.bit_length()))
    return hops


# --- Different layouts ----------------------------------------------------------------------------


def _join_overlaps(
    units: Iterable[Unit], hosts: Sequence[int], overloaded: Container[int]
) -> Iterator[Unit]:
    """Cut overlapping units, so that common parts become units of their own.

    Units overlap where a piece is wanted under different layouts. A machine that wants the whole of
    a unit gets all of its parts. The takes of a part may exceed its region.
    """
    by_piece: defaultdict[tuple[str, int, int], list[Unit]] = defaultdict(list)
    for unit in units:
        by_piece[unit.key, unit.giver, unit.row].append(unit)
    for piece_units in by_piece.values():
        if hosts[piece_units[0].giver] in overloaded and len(piece_units) > 1:
            regions = [unit.region for unit in piece_units]
            if find_overlap(*regions_to_arrays(regions)) is not None:
                piece_units = _parts(piece_units)
        yield from piece_units


def _parts(units: Iterable[Unit]) -> list[Unit]:
    """Cut units into disjoint parts."""
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
