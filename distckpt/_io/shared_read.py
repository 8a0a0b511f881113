"""Shared reads: one rank reads bytes that several request, and sends them.

This goes in waves. Every rank reads its part of a wave, straight into its targets where they hold
all of it; then the ranks exchange these values, while they read their parts of the next wave.
Before each exchange they agree that all have read, so that no rank waits for a failed one.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from distckpt._base.threads import Pool
from distckpt._format.checksum import checksum
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._io.exchange import exchange, make_buffers
from distckpt._io.wave import OwnUnits, Wave
from distckpt._plan.load import Copy
from distckpt._plan.share import (
    ReadCosts,
    SharePlan,
    Units,
    UnitTable,
    describe_units,
    divide,
    unit_bytes_for,
)
from distckpt._ranks.collectives import Ranks

MIN_REQUESTED_BYTES = 128 << 20
"""Smallest request for sharing in mode "auto": two ranks that may share must each request this
much.
"""
MIN_SHARED_BYTES = 64 << 20
"""Smallest overlap for sharing in mode "auto": some rank must have this much in common with other
ranks.
"""
FAST_BYTES_PER_SECOND = 500 << 20
"""Fastest reads for sharing in mode "auto": if every rank reads faster, sending would be no
faster.
"""
SAMPLE_BYTES = 8 << 20
"""Size of the sample by which mode "auto" measures reading speed."""
HELD_SHARE = 8
"""Share of the in-flight memory, 1 / 8, for other ranks' values. These are the values that do not
lie in a target. Two waves are under way at a time.
"""
_FAST = b"+"
_SLOW = b"-"
"""First byte of a rank's message: did it read its sample fast?"""

Read: TypeAlias = Callable[[Sequence[Copy], Sequence[torch.Tensor], int], None]
"""Function that fills the targets of copies, within a memory limit."""


class Sharing(NamedTuple):
    """The ranks that load together, and their settings for sharing reads.

    `mode` is "on", "off" or "auto"; ranks share within their `group`. `is_local` says that the
    checkpoint is read through this machine's file system, whose cache ranks share anyway. No rank
    requests more than `most_bytes`. `max_inflight_bytes` is memory for bytes on their way.
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
    stored: StoredCheckpoint,
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
    read: Read,
) -> Sequence[Copy]:
    """Let one rank read for all that request the same bytes.

    Reads are only shared if that pays. Return the copies that are still to be read.

    Collective operation: all ranks must call it. `targets` has for each request a tensor of its
    region's shape, of any strides, device and dtype. Calls of `read` do not overlap, but come from
    other threads too.

    Raises:
        RankFailedError: a rank could not read bytes that other ranks wait for.
    """
    ranks = sharing.ranks
    if not _may_pay(sharing, targets):
        return copies
    with ranks.telling("describe the reads", answer_each=True) as message:
        costs = ReadCosts(stored.manifest, sharing.is_local and not stored.verifies)
        divided, table = _describe(sharing, costs, copies, targets)
        pieces = _Pieces(copies, divided)
        left = np.arange(len(divided.units))
        is_fast = False
        if sharing.is_auto:
            with ranks.part("read"):
                left, is_fast = _read_sample(sharing, pieces, table.num_bytes, targets, read)
        message.payload = (_FAST if is_fast else _SLOW) + table.take(left).to_bytes()
    data = ranks.answer_each(
        message, "plan shared reads", lambda: _plan_together(sharing, message.payloads, costs)
    )
    if not data:
        return pieces.join(left)
    plan = SharePlan.from_bytes(data)
    if plan.num_waves and not (sharing.is_auto and plan.most_bytes < MIN_SHARED_BYTES):
        own = OwnUnits(plan, [divided.units[i] for i in left.tolist()], targets)

        def read_wave(wave: Wave, max_bytes: int) -> None:
            direct = pieces.join(left[wave.direct_units])
            held, memories = wave.held_copies(len(targets))
            read([*direct, *held], [*targets, *memories], max_bytes)
            wave.fill_own()

        _read_in_waves(sharing, own, read_wave)
        left = left[plan.readers < 0]
    return pieces.join(left)


def _may_pay(sharing: Sharing, targets: Sequence[torch.Tensor]) -> bool:
    """Whether sharing may pay, given the requests of all ranks."""
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
    """Return a number that is equal for ranks which never share."""
    if sharing.is_auto and sharing.is_local:
        return host_number()
    return sharing.ranks.rank


def host_number() -> int:
    """Return a number that identifies this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
    except OSError:
        boot = b""
    return checksum(socket.gethostname().encode() + b"\n" + boot) >> 2


def _describe(
    sharing: Sharing, costs: ReadCosts, copies: Sequence[Copy], targets: Sequence[torch.Tensor]
) -> tuple[Units, UnitTable]:
    """Divide this rank's requests into units, and describe them."""
    divided = divide(costs.manifest, copies, unit_bytes_for(sharing.most_bytes))
    dtypes = [target.dtype for target in targets]
    place = _place_of(sharing)
    return divided, describe_units(costs, divided, dtypes, sharing.group, place)


def _plan_together(
    sharing: Sharing, payloads: Sequence[bytes], costs: ReadCosts
) -> Sequence[bytes]:
    """Return each rank's reads and messages, given all ranks' units.

    There are none if all ranks read fast.
    """
    if all(payload[:1] == _FAST for payload in payloads):
        return [b""] * len(payloads)
    # Imported when it is needed: most loads share nothing.
    from distckpt._plan.share_out import plan_shares

    messages = [payload[1:] for payload in payloads]
    held_bytes = sharing.max_inflight_bytes // HELD_SHARE
    return list(plan_shares(messages, costs, held_bytes))


class _Pieces(NamedTuple):
    """The copies that this rank requests, and their units."""

    copies: Sequence[Copy]
    divided: Units

    def join(self, numbers: IntArray) -> list[Copy]:
        """Return the copies for some units. A copy whose units are all among them stays whole."""
        units, copy_of, _ = self.divided
        num_given = np.bincount(copy_of[numbers], minlength=len(self.copies))
        is_complete = num_given == np.bincount(copy_of, minlength=len(self.copies))
        complete = np.flatnonzero(is_complete & (num_given > 0))
        others = numbers[~is_complete[copy_of[numbers]]]
        return [
            *(self.copies[i] for i in complete.tolist()),
            *(units[i] for i in others.tolist()),
        ]


def _read_sample(
    sharing: Sharing,
    pieces: _Pieces,
    num_bytes: IntArray,
    targets: Sequence[torch.Tensor],
    read: Read,
) -> tuple[IntArray, bool]:
    """Read some units, different ones on each rank.

    Return the units that are left, and whether this rank reads fast.
    """
    ranks = sharing.ranks
    units = np.roll(np.arange(len(num_bytes)), -(len(num_bytes) * ranks.rank // ranks.size))
    is_sample = np.cumsum(num_bytes[units]) - num_bytes[units] < SAMPLE_BYTES
    sample_bytes = int(num_bytes[units[is_sample]].sum())
    started = time.perf_counter()
    read(pieces.join(units[is_sample]), targets, sharing.max_inflight_bytes)
    is_fast = sample_bytes >= FAST_BYTES_PER_SECOND * (time.perf_counter() - started)
    return np.sort(units[~is_sample]), is_fast or not sample_bytes


def _read_in_waves(
    sharing: Sharing,
    own: OwnUnits,
    read: Callable[[Wave, int], None],
) -> None:
    """Read and exchange shared units, reading each wave during the previous exchange.

    `read` fills the regions of a wave, within a limit of memory.
    """
    ranks = sharing.ranks
    num_waves = own.plan.num_waves
    problems: list[Exception] = []
    with Pool(1, thread_name_prefix="distckpt-share") as background:
        for number in range(num_waves):
            with ranks.phase("read for other ranks"):
                if number == 0:
                    with ranks.part("prepare to share reads"):
                        memory, buffers, read_bytes = _memory_for(own, sharing.max_inflight_bytes)
                        upcoming = Wave(own, 0, memory[0])
                    reading = background.submit(read, upcoming, read_bytes)
                reading.result()
                if problems:
                    raise problems[0]
                wave = upcoming
                if number + 1 < num_waves:
                    upcoming = Wave(own, number + 1, memory[(number + 1) % 2])
            if number + 1 < num_waves:
                reading = background.submit(read, upcoming, read_bytes)
            exchange(ranks, wave.messages(ranks.rank), buffers, problems)
    if problems:
        raise problems[0]


def _memory_for(
    own: OwnUnits, max_inflight_bytes: int
) -> tuple[torch.Tensor, deque[torch.Tensor], int]:
    """Return held memory for two waves, message buffers, and memory for reads."""
    plan = own.plan
    wave_bytes = np.bincount(plan.read_waves, own.held_bytes(), plan.num_waves).astype(np.int64)
    memory = torch.empty((2, int(wave_bytes.max())), dtype=torch.uint8, device="cpu")
    message_bytes, read_bytes = _budget(max_inflight_bytes, memory.nbytes)
    return memory, make_buffers(message_bytes), read_bytes


def _budget(max_inflight_bytes: int, held_bytes: int) -> tuple[int, int]:
    """Divide memory between messages and reads, after the held memory."""
    if not held_bytes:
        return max_inflight_bytes // 2, max_inflight_bytes
    message_bytes = max_inflight_bytes // HELD_SHARE
    return message_bytes, max_inflight_bytes - held_bytes - message_bytes
