"""Shared reads: of the ranks that request the same bytes, one reads them and sends them to the
others.

This goes in waves. Every rank reads its part of a wave straight into its targets; then the ranks
exchange what they have read, while they read their parts of the next wave. Before each exchange
they agree that all have read, so that no rank waits for one that has failed.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.threads import Pool
from distckpt._format.checksum import checksum
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray
from distckpt._io.exchange import Message, exchange, make_buffers, make_messages
from distckpt._plan.load import Copy
from distckpt._plan.share import SharePlan, UnitTable, describe_units, divide, plan_shares
from distckpt._ranks.collectives import Ranks

MIN_REQUESTED_BYTES = 128 << 20
"""Mode "auto" does not share unless two ranks that may share request this much each,"""
MIN_SHARED_BYTES = 64 << 20
"""some rank has this much in common with others,"""
FAST_BYTES_PER_SECOND = 500 << 20
"""and some rank reads more slowly: otherwise sending would be no faster."""
SAMPLE_BYTES = 8 << 20
"""Mode "auto" measures how fast a rank reads by this much of what it requests."""

Read = Callable[[Sequence[Copy]], None]


class Sharing(NamedTuple):
    """The ranks that load together, and when they share reads.

    `mode` is "on", "off" or "auto"; ranks share within their `group`. `is_local` says that the
    checkpoint is read through this machine's file system, whose cache ranks share anyway. No rank
    requests more than `most_bytes`. `max_inflight_bytes` is memory for messages.
    """

    ranks: Ranks
    mode: str
    group: int
    is_local: bool
    most_bytes: int
    max_inflight_bytes: int

    @property
    def is_auto(self) -> bool:
        return self.mode == "auto"


def read_shared(
    sharing: Sharing,
    manifest: Manifest,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    read: Read,
) -> Sequence[Copy]:
    """Let one of several ranks that request the same bytes read them for all, if that pays; return
    the copies that are still to be read.

    Collective operation: all ranks must call it. `targets` has for each request a tensor of its
    region's shape, of any strides, device and dtype. `read` fills them from storage; calls do not
    overlap, but come from other threads too.

    Raises:
        RankFailedError: a rank could not read what others wait for.
    """
    ranks = sharing.ranks
    if not _may_pay(sharing, targets):
        return copies
    with ranks.phase("describe the reads"):
        units, copy_of = divide(manifest, copies)
        dtypes = [target.dtype for target in targets]
        table = describe_units(manifest, units, dtypes, sharing.group, _place_of(sharing))
        pieces = _Pieces(copies, units, copy_of)
    left = np.arange(len(units))
    if sharing.is_auto:
        left, is_fast = _read_sample(ranks, pieces, table.num_bytes, read)
        if is_fast:
            return pieces.join(left)
    table = table._replace(rows=table.rows[left], num_bytes=table.num_bytes[left])
    plan = _plan_together(ranks, table)
    if plan.num_waves and not (sharing.is_auto and plan.most_bytes < MIN_SHARED_BYTES):
        with ranks.phase("prepare to share reads"):
            own = [
                pieces.join(left[(plan.readers == ranks.rank) & (plan.waves == wave)])
                for wave in range(plan.num_waves)
            ]
            units = [units[i] for i in left.tolist()]
        _read_in_waves(sharing, plan, own, read, units, targets)
        left = left[plan.readers < 0]
    return pieces.join(left)


def _may_pay(sharing: Sharing, targets: Sequence[torch.Tensor]) -> bool:
    """Tell whether ranks may share, from what all of them request."""
    if sharing.ranks.size == 1 or sharing.mode == "off":
        return False
    if not sharing.is_auto:
        return True
    if sharing.most_bytes < MIN_REQUESTED_BYTES:
        return False
    requested = sum(target.nbytes for target in targets)
    numbers = [_place_of(sharing), sharing.group, requested]
    places = defaultdict(set)
    for place, group, num_bytes in sharing.ranks.all_gather_numbers(numbers).tolist():
        if num_bytes >= MIN_REQUESTED_BYTES:
            places[group].add(place)
    return any(len(members) > 1 for members in places.values())


def _place_of(sharing: Sharing) -> int:
    """Return a number that ranks have in common which do not share in any case."""
    return host_number() if sharing.is_auto and sharing.is_local else sharing.ranks.rank


def host_number() -> int:
    """Return a number that is the same for processes on one machine, and differs between
    machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
    except OSError:
        boot = b""
    return checksum(socket.gethostname().encode() + b"\n" + boot) >> 2


def _plan_together(ranks: Ranks, table: UnitTable) -> SharePlan:
    tables = ranks.gather(table.to_bytes())

    def plan() -> list[bytes]:
        units = [UnitTable.from_bytes(data) for data in tables]
        return [share.to_bytes() for share in plan_shares(units)]

    return SharePlan.from_bytes(ranks.decide_each("plan shared reads", plan))


class _Pieces(NamedTuple):
    """The copies that this rank requests, the units they are divided into, and for each of these
    its copy.
    """

    copies: Sequence[Copy]
    units: Sequence[Copy]
    copy_of: IntArray

    def join(self, units: IntArray) -> list[Copy]:
        """Return what to read for some units; the original copy if these are all units of it."""
        num_given = np.bincount(self.copy_of[units], minlength=len(self.copies))
        is_complete = num_given == np.bincount(self.copy_of, minlength=len(self.copies))
        complete = np.flatnonzero(is_complete & (num_given > 0))
        others = units[~is_complete[self.copy_of[units]]]
        return [
            *(self.copies[i] for i in complete.tolist()),
            *(self.units[i] for i in others.tolist()),
        ]


def _read_sample(
    ranks: Ranks, pieces: _Pieces, num_bytes: IntArray, read: Read
) -> tuple[IntArray, bool]:
    """Read some units, different ones on each rank; return the units that are left, and whether all
    ranks read fast.
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
    return np.sort(in_turn[~is_sample]), all_fast


def _read_in_waves(
    sharing: Sharing,
    plan: SharePlan,
    to_read: Sequence[Sequence[Copy]],
    read: Read,
    units: Sequence[Copy],
    targets: Sequence[torch.Tensor],
) -> None:
    """Read and exchange shared units: each wave is read while the one before is exchanged.

    `to_read` has what this rank reads in each wave, `units` the units of the plan.
    """
    ranks = sharing.ranks
    problems: list[Exception] = []
    buffers = make_buffers(sharing.max_inflight_bytes // 2)
    with Pool(1, thread_name_prefix="distckpt-share") as background:
        reading = background.submit(read, to_read[0])
        for wave in range(plan.num_waves):
            with ranks.phase("read for other ranks"):
                reading.result()
                if problems:
                    raise problems[0]
            if wave + 1 < plan.num_waves:
                reading = background.submit(read, to_read[wave + 1])
            exchange(ranks, _messages(ranks.rank, plan, wave, units, targets), buffers, problems)
    if problems:
        raise problems[0]


def _messages(
    rank: int, plan: SharePlan, wave: int, units: Sequence[Copy], targets: Sequence[torch.Tensor]
) -> list[Message]:
    """Put together what this rank exchanges with each peer in a wave."""

    def content(number: int) -> tuple[int, torch.Tensor]:
        unit = units[number]
        target = targets[unit.request]
        view = target if unit.target.shape == tuple(target.shape) else target[unit.target.slices()]
        return int(plan.sequence[number]), view

    by_peer: dict[tuple[int, bool], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    sent = plan.waves[plan.send_units] == wave
    numbers, peers = plan.send_units[sent].tolist(), plan.send_ranks[sent].tolist()
    for number, peer in zip(numbers, peers, strict=True):
        by_peer[peer, True].append(content(number))
    received = np.flatnonzero((plan.waves == wave) & (plan.readers != rank))
    for number in received[np.argsort(plan.sequence[received])].tolist():
        by_peer[int(plan.readers[number]), False].append(content(number))
    return [
        message
        for (peer, is_sent), contents in by_peer.items()
        for message in make_messages(rank, peer, is_sent, contents)
    ]
