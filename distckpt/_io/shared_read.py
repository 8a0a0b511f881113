"""Shared reads: ranks that want the same bytes read each of them once, and send them to each other.

In waves: every rank reads its part of a wave straight into its targets; then the ranks exchange what they read, while
they read their parts of the next wave. Before each exchange they agree that all have read, so no rank waits in vain.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from distckpt._format.checksum import checksum
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray
from distckpt._io.exchange import Message, exchange, make_buffers, make_messages
from distckpt._plan.load import Copy
from distckpt._plan.share import SharePlan, UnitTable, describe_units, divide, plan_shares
from distckpt._ranks.collectives import Ranks

MIN_WANTED_BYTES = 128 << 20
"""When "auto" decides: where no two ranks that may share want so much each, it is not worth finding out more."""
MIN_SHARED_BYTES = 64 << 20
"""When "auto" decides: nor where no rank wants so much that others want too."""
FAST_BYTES_PER_SECOND = 500 << 20
"""When "auto" decides: sending is no faster than a rank that reads so much, so it is not tried out."""
SAMPLE_BYTES = 8 << 20
"""When "auto" decides: each rank measures how fast it reads by so much of what it wants."""
MIN_GAIN = 0.1
"""When "auto" decides: reads are shared when that is expected to save this part of the time."""

Read = Callable[[Sequence[Copy]], None]


class Sharing(NamedTuple):
    """Who shares reads, and when.

    Attributes:
        ranks: load together.
        mode: "on", "off" or "auto".
        group: number of the group of ranks that this rank shares with; others share in groups of their own.
        is_local: whether the checkpoint is read through this machine's file system, whose cache ranks share anyway.
        max_inflight_bytes: memory for messages.
    """

    ranks: Ranks
    mode: str
    group: int
    is_local: bool
    max_inflight_bytes: int


def read_sharing(
    sharing: Sharing, manifest: Manifest, copies: Sequence[Copy], targets: Sequence[torch.Tensor], read: Read
) -> None:
    """Fill requested regions from chunks; what several ranks want is read by one of them where that pays.

    Collective: every rank calls. Ranks exchange what they want, described, and what they have read.

    Args:
        sharing: see there.
        manifest: the same on every rank.
        copies: what this rank wants.
        targets: for each request a tensor of its region's shape, of any strides, device and dtype.
        read: fills targets from storage. Calls do not overlap, but are made from other threads too.

    Raises:
        RankFailedError: a rank could not read what it was to read for others.
    """
    if sharing.ranks.size == 1 or sharing.mode == "off":
        read(copies)
        return
    place = sharing.ranks.rank
    if sharing.mode == "auto":
        place = _host_number() if sharing.is_local else sharing.ranks.rank
        wanted = _count_bytes(targets, MIN_WANTED_BYTES)
        if not _may_pay(sharing.ranks.all_gather_numbers([place, sharing.group, wanted])):
            read(copies)
            return
    with sharing.ranks.phase("describe the reads"):
        units, copy_of = divide(manifest, copies)
        table = describe_units(manifest, units, [target.dtype for target in targets], sharing.group, place)
        pieces = _Pieces(copies, units, copy_of)
    left = np.arange(len(units))
    seconds_per_byte = None
    if sharing.mode == "auto":
        left, seconds_per_byte = _read_sample(sharing.ranks, pieces, table.num_bytes, read)
        if seconds_per_byte is None:
            read(pieces.join(left))
            return
    table = table._replace(rows=table.rows[left], num_bytes=table.num_bytes[left])
    plan = _plan_together(sharing.ranks, table)
    if plan.num_waves and (sharing.mode == "on" or plan.most_bytes >= MIN_SHARED_BYTES):
        with sharing.ranks.phase("prepare to share reads"):
            work = _Work(sharing, plan, pieces, left, table.num_bytes, targets)
        left = left[_read_in_waves(work, read, seconds_per_byte)]
    read(pieces.join(left))


def _may_pay(numbers: IntArray) -> bool:
    """Tell from every rank's (place, group, bytes) whether some group has two places with enough to read."""
    places = defaultdict(set)
    for place, group, num_bytes in numbers.tolist():
        if num_bytes >= MIN_WANTED_BYTES:
            places[group].add(place)
    return any(len(members) > 1 for members in places.values())


def _count_bytes(targets: Iterable[torch.Tensor], limit: int) -> int:
    """Add up the sizes of tensors until they reach a limit."""
    total = 0
    for target in targets:
        total += target.nbytes
        if total >= limit:
            break
    return total


def _host_number() -> int:
    """Return a number that is the same for processes on one machine, and differs between machines."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
    except OSError:
        boot = b""
    return checksum(socket.gethostname().encode() + b"\n" + boot) >> 2


def _plan_together(ranks: Ranks, table: UnitTable) -> SharePlan:
    tables = ranks.gather(table.to_bytes())
    plans: list[bytes] = []
    with ranks.phase("plan shared reads", decision=True):
        if ranks.is_coordinator:
            plans = [plan.to_bytes() for plan in plan_shares([UnitTable.from_bytes(data) for data in tables])]
    return SharePlan.from_bytes(ranks.scatter(plans))


class _Pieces(NamedTuple):
    """What this rank wants: copies, the units they are divided into, and which copy each of these is of."""

    copies: Sequence[Copy]
    units: Sequence[Copy]
    copy_of: IntArray

    def join(self, units: IntArray) -> list[Copy]:
        """Return what to read for some units; the original copy where these are all units of it."""
        num_given = np.bincount(self.copy_of[units], minlength=len(self.copies))
        is_whole = num_given == np.bincount(self.copy_of, minlength=len(self.copies))
        whole_copies = [self.copies[i] for i in np.flatnonzero(is_whole & (num_given > 0)).tolist()]
        return [*whole_copies, *(self.units[i] for i in units[~is_whole[self.copy_of[units]]].tolist())]


def _read_sample(ranks: Ranks, pieces: _Pieces, num_bytes: IntArray, read: Read) -> tuple[IntArray, float | None]:
    """Read some units, others on each rank.

    Returns:
        `(left, seconds per byte)`: the units that are left, and how long reading took; None on all ranks when they
        read so fast that it is in vain to see how fast they send.
    """
    in_turn = np.roll(np.arange(len(num_bytes)), -(len(num_bytes) * ranks.rank // ranks.size))
    is_sample = np.cumsum(num_bytes[in_turn]) - num_bytes[in_turn] < SAMPLE_BYTES
    sample_bytes = int(num_bytes[in_turn[is_sample]].sum())
    with ranks.phase("read"):
        started = time.perf_counter()
        read(pieces.join(in_turn[is_sample]))
        seconds = time.perf_counter() - started
    is_fast = sample_bytes >= FAST_BYTES_PER_SECOND * seconds
    all_fast = bool(ranks.all_gather_numbers([is_fast or not sample_bytes]).all())
    return np.sort(in_turn[~is_sample]), None if all_fast else seconds / max(1, sample_bytes)


@dataclass
class _Work:
    """The part of one rank in a plan, and the memory it needs to carry it out. The plan counts units in `planned`."""

    sharing: Sharing
    plan: SharePlan
    pieces: _Pieces
    planned: IntArray
    num_bytes: IntArray
    targets: Sequence[torch.Tensor]
    buffers: deque[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = make_buffers(self.sharing.max_inflight_bytes // 2)

    def to_read(self, wave: int) -> list[Copy]:
        """Return what this rank reads in a wave."""
        is_own = (self.plan.readers == self.sharing.ranks.rank) & (self.plan.waves == wave)
        return self.pieces.join(self.planned[is_own])

    def view(self, unit: int) -> torch.Tensor:
        """Return the part of a target that a planned unit fills."""
        copy = self.pieces.units[int(self.planned[unit])]
        target = self.targets[copy.request]
        return target if copy.target.shape == tuple(target.shape) else target[copy.target.slices()]


def _read_in_waves(work: _Work, read: Read, seconds_per_byte: float | None) -> IntArray:
    """Read and exchange shared units, unless the first wave shows that this does not pay.

    Args:
        work: what to do.
        read: fills targets from storage.
        seconds_per_byte: that reading takes; None not to ask whether it pays.

    Returns:
        The planned units that are left.
    """
    ranks, plan = work.sharing.ranks, work.plan
    problems: list[Exception] = []
    judged_by = seconds_per_byte if plan.num_waves > 1 else None
    with ThreadPoolExecutor(1, thread_name_prefix="distckpt-share") as background:
        reading = background.submit(read, work.to_read(0))
        for wave in range(plan.num_waves):
            with ranks.phase("read for other ranks"):
                reading.result()
                _raise_first(problems)
            # The exchange that is measured does not happen beside anything else.
            if wave + 1 < plan.num_waves and (wave > 0 or judged_by is None):
                reading = background.submit(read, work.to_read(wave + 1))
            started = time.perf_counter()
            exchange(ranks, _messages(work, wave), work.buffers, problems)
            if wave == 0 and judged_by is not None:
                if not _pays(work, judged_by, time.perf_counter() - started):
                    _raise_first(problems)
                    return np.flatnonzero(plan.waves != 0)
                reading = background.submit(read, work.to_read(1))
    _raise_first(problems)
    return np.flatnonzero(plan.readers < 0)


def _raise_first(problems: Sequence[Exception]) -> None:
    if problems:
        raise problems[0]


def _pays(work: _Work, seconds_per_byte: float, exchange_seconds: float) -> bool:
    """Agree on whether sharing the rest takes less time than if all read alone, judging by the first wave."""
    ranks, plan, num_bytes = work.sharing.ranks, work.plan, work.num_bytes
    is_own, is_left = plan.readers == ranks.rank, plan.waves > 0
    is_shared = plan.readers >= 0
    sent = num_bytes[plan.send_units]
    to_exchange = num_bytes[is_shared & ~is_own & is_left].sum() + sent[is_left[plan.send_units]].sum()
    exchanged = num_bytes[is_shared & ~is_own & ~is_left].sum() + sent[~is_left[plan.send_units]].sum()
    shared = num_bytes[is_own & is_left].sum() * seconds_per_byte
    shared += to_exchange * exchange_seconds / max(1, exchanged)
    part_left = num_bytes[is_left].sum() / max(1, num_bytes[is_shared].sum())
    alone = plan.alone_bytes * part_left * seconds_per_byte
    # The slowest rank counts.
    expected = ranks.all_gather_numbers([int(shared * 1e6), int(alone * 1e6)]).max(axis=0)
    return bool(expected[0] < (1 - MIN_GAIN) * expected[1])


def _messages(work: _Work, wave: int) -> list[Message]:
    """Put together what this rank exchanges with each peer in a wave."""
    rank, plan = work.sharing.ranks.rank, work.plan
    units_by_peer: dict[tuple[int, bool], list[int]] = defaultdict(list)
    sends = np.flatnonzero(plan.waves[plan.send_units] == wave)
    for unit, peer in zip(plan.send_units[sends].tolist(), plan.send_ranks[sends].tolist(), strict=True):
        units_by_peer[peer, True].append(unit)
    received = np.flatnonzero((plan.waves == wave) & (plan.readers != rank))
    for unit in received[np.argsort(plan.sequence[received])].tolist():
        units_by_peer[int(plan.readers[unit]), False].append(unit)
    messages: list[Message] = []
    for (peer, is_sent), units in units_by_peer.items():
        content = [(int(plan.sequence[unit]), work.view(unit)) for unit in units]
        messages.extend(make_messages(rank, peer, is_sent, content))
    return messages
