"""Shared reads: one rank reads bytes that several request, and sends them.

This goes in waves. Every rank reads its part of a wave, straight into its targets where they hold
all of it; then the ranks exchange these values, while they read their parts of the next wave.
Before each exchange they agree that all have read, so that no rank waits for a failed one.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from distckpt._base.options import LoadOptions
from distckpt._base.threads import Pool
from distckpt._format.checksum import checksum
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region, whole
from distckpt._io.exchange import (
    ALIGN_BYTES,
    Message,
    copy_values,
    exchange,
    make_buffers,
    make_messages,
)
from distckpt._plan.load import Copy
from distckpt._plan.share import (
    ReadCosts,
    SharePlan,
    Units,
    costs_of,
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
SAMPLE_BYTES = 8 << 20
"""Size of the sample that each rank sends; it reads as much at most."""
MIN_SAMPLE_BYTES = 1 << 20
"""Size of the smallest sample that tells how fast a rank reads."""
MAX_SAMPLES_SHARE = 64
"""Share of a request, 1 / 64, for samples. Other ranks may read their bytes again."""
HELD_SHARE = 8
"""Share of the in-flight memory, 1 / 8, for other ranks' values. These are the values that do not
lie in a target. Two waves are under way at a time.
"""
_RATES = struct.Struct("<dd")
"""Bytes per second of reading and of sending; 0 if not measured."""

Read: TypeAlias = Callable[[Sequence[Copy], Sequence[torch.Tensor], int], None]
"""Function that fills the targets of copies, within a memory limit."""


class Sharing(NamedTuple):
    """The ranks that load together, and their settings for sharing reads.

    Ranks share within their `group`. `is_local` says that the checkpoint is read through this
    machine's file system, whose cache ranks share anyway. No rank requests more than `most_bytes`.
    `figures` gets fields of the `LoadReport`.
    """

    ranks: Ranks
    options: LoadOptions
    group: int
    is_local: bool
    most_bytes: int
    figures: dict[str, Any]

    @property
    def is_auto(self) -> bool:
        return self.options.share_reads == "auto"


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
    sending = 0.0
    if sharing.is_auto:
        members = _large_readers(sharing, targets)
        if not members:
            return copies
        sending = _sample_sending(ranks, members[sharing.group])
    with ranks.telling("describe the reads", answer_each=True) as message:
        costs = costs_of(stored)
        units = divide(costs.manifest, copies, unit_bytes_for(sharing.most_bytes))
        dtypes = [target.dtype for target in targets]
        left = np.arange(len(units))
        reading = 0.0
        if sharing.is_auto:
            with ranks.part("read"):
                # Rates are those of values, which are sent.
                values = replace(costs, quantized={})
                num_bytes = values.of(units.chunks, units.offsets, units.shapes)
                left, reading = _read_sample(sharing, units, num_bytes, targets, read)
        table = describe_units(costs, units.take(left), dtypes, sharing.group)
        message.payload = _RATES.pack(reading, sending) + table.to_bytes()
    data = ranks.decide_each(
        "plan shared reads", lambda: _plan_together(sharing, message.payloads, costs), message
    )
    reading, sending = _RATES.unpack_from(data)
    sharing.figures.update(read_rate=reading, send_rate=sending)
    if len(data) == _RATES.size:
        return units.join(left)
    plan = SharePlan.from_bytes(data[_RATES.size :])
    if plan.num_waves and not (sharing.is_auto and plan.most_bytes < MIN_SHARED_BYTES):
        sharing.figures.update(sent_bytes=plan.sent_bytes)
        _read_planned(sharing, plan, units, left, targets, read)
        left = left[plan.readers < 0]
    return units.join(left)


def _read_planned(
    sharing: Sharing,
    plan: SharePlan,
    units: Units,
    left: IntArray,
    targets: Sequence[torch.Tensor],
    read: Read,
) -> None:
    """Read and exchange the shared ones of the units that are `left`.

    Each wave is read during the previous exchange.
    """
    ranks = sharing.ranks
    own = OwnUnits(plan, units.take(left), targets)
    problems: list[Exception] = []

    def read_wave(wave: Wave) -> None:
        direct = units.join(left[wave.direct_units])
        held, memories = wave.held_copies(len(targets))
        read([*direct, *held], [*targets, *memories], read_bytes)
        wave.fill_own()

    with Pool(1, thread_name_prefix="distckpt-share") as background:
        for number in range(plan.num_waves):
            with ranks.phase("read for other ranks"):
                if number == 0:
                    with ranks.part("prepare to share reads"):
                        memory, buffers, read_bytes = _memory_for(
                            own, sharing.options.max_inflight_bytes
                        )
                        upcoming = Wave(own, 0, memory[0])
                    reading = background.submit(read_wave, upcoming)
                reading.result()
                if problems:
                    raise problems[0]
                wave = upcoming
                if number + 1 < plan.num_waves:
                    upcoming = Wave(own, number + 1, memory[(number + 1) % 2])
            if number + 1 < plan.num_waves:
                reading = background.submit(read_wave, upcoming)
            exchange(ranks, wave.messages(ranks.rank), buffers, problems)
    if problems:
        raise problems[0]


def _large_readers(
    sharing: Sharing, targets: Sequence[torch.Tensor]
) -> dict[int, list[tuple[int, int]]]:
    """Return the hosts and ranks that request much, by group.

    There are none if sharing cannot pay.
    """
    if sharing.most_bytes < MIN_REQUESTED_BYTES:
        return {}
    requested = sum(target.nbytes for target in targets)
    table = sharing.ranks.all_gather_numbers([host_number(), sharing.group, requested])
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    places: dict[int, set[int]] = defaultdict(set)
    for rank, (host, group, num_bytes) in enumerate(table.tolist()):
        if num_bytes >= MIN_REQUESTED_BYTES:
            members[group].append((host, rank))
            places[group].add(host if sharing.is_local else rank)
    if max(map(len, places.values()), default=0) < 2:
        return {}
    return members


def _sample_sending(ranks: Ranks, members: Sequence[tuple[int, int]]) -> float:
    """Send a sample to one of the members, and receive one.

    Return the bytes per second, 0 on other ranks.
    """
    ring = [rank for _, rank in sorted(members)]
    if ranks.rank not in ring or len(ring) == 1:
        return 0.0
    position = ring.index(ranks.rank)
    # Half of the ring away is another machine.
    distance = len(ring) // 2
    receiver = ring[(position + distance) % len(ring)]
    sender = ring[position - distance]
    sent, received = torch.zeros((2, SAMPLE_BYTES), dtype=torch.uint8, device="cpu")
    started = 0.0
    # The first round connects the ranks.
    for tag in range(2):
        started = time.perf_counter()
        transfers = [
            ranks.start_transfer(received, sender, tag, False),
            ranks.start_transfer(sent, receiver, tag, True),
        ]
        for transfer in transfers:
            ranks.finish(transfer)
    return SAMPLE_BYTES / (time.perf_counter() - started)


def host_number() -> int:
    """Return a number that identifies this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
    except OSError:
        boot = b""
    return checksum(socket.gethostname().encode() + b"\n" + boot) >> 2


def _plan_together(
    sharing: Sharing, payloads: Sequence[bytes], costs: ReadCosts
) -> Sequence[bytes]:
    """Return the slowest ranks' rates, and each rank's plan.

    There are no plans where ranks read from storage faster than they send.
    """
    columns = zip(*map(_RATES.unpack_from, payloads), strict=True)
    reading, sending = (min(filter(None, column), default=0.0) for column in columns)
    rates = _RATES.pack(reading, sending)
    if sharing.is_auto and sending <= reading:
        return [rates] * len(payloads)
    # Imported when it is needed: most loads share nothing.
    from distckpt._plan.share_out import plan_shares

    messages = [payload[_RATES.size :] for payload in payloads]
    held_bytes = sharing.options.max_inflight_bytes // HELD_SHARE
    return [rates + plan for plan in plan_shares(messages, costs, held_bytes)]


def _read_sample(
    sharing: Sharing,
    units: Units,
    num_bytes: IntArray,
    targets: Sequence[torch.Tensor],
    read: Read,
) -> tuple[IntArray, float]:
    """Read some units, different ones on each rank.

    Return the units that are left, and the bytes per second; 0 without units.
    """
    ranks = sharing.ranks
    order = np.roll(np.arange(len(num_bytes)), -(len(num_bytes) * ranks.rank // ranks.size))
    limit = min(SAMPLE_BYTES, sharing.most_bytes // (MAX_SAMPLES_SHARE * ranks.size))
    limit = max(MIN_SAMPLE_BYTES, limit)
    is_sample = np.cumsum(num_bytes[order]) - num_bytes[order] <= limit
    sample_bytes = int(num_bytes[order[is_sample]].sum())
    started = time.perf_counter()
    read(units.join(order[is_sample]), targets, sharing.options.max_inflight_bytes)
    rate = sample_bytes / (time.perf_counter() - started)
    return np.sort(order[~is_sample]), rate


def _memory_for(
    own: OwnUnits, max_inflight_bytes: int
) -> tuple[torch.Tensor, deque[torch.Tensor], int]:
    """Return held memory for two waves, message buffers, and memory for reads."""
    plan = own.plan
    wave_bytes = np.bincount(plan.read_waves, own.held_bytes, plan.num_waves).astype(np.int64)
    memory = torch.empty((2, int(wave_bytes.max())), dtype=torch.uint8, device="cpu")
    if not memory.nbytes:
        return memory, make_buffers(max_inflight_bytes // 2), max_inflight_bytes
    message_bytes = max_inflight_bytes // HELD_SHARE
    read_bytes = max_inflight_bytes - memory.nbytes - message_bytes
    return memory, make_buffers(message_bytes), read_bytes


# --- Wave -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnUnits:
    """The units of this rank in a plan: parts of copies into `targets`."""

    plan: SharePlan
    units: Units
    targets: Sequence[torch.Tensor]

    def target(self, unit: int) -> torch.Tensor:
        """Return the part of its target that a unit fills."""
        _, _, request, region = self.units[unit]
        target = self.targets[request]
        if region.shape == tuple(target.shape):
            return target
        return target[region.slices()]

    @cached_property
    def held_bytes(self) -> IntArray:
        """The memory to hold each region that this rank reads.

        It is 0 for a region that is read into a target.
        """
        items = [self.targets[self.units[unit].request].itemsize for unit in self._unit_in]
        sizes = np.prod(self.plan.read_shapes, axis=1) * np.array(items, np.int64)
        return np.where(self.plan.read_units < 0, -(-sizes // ALIGN_BYTES) * ALIGN_BYTES, 0)

    def regions(self, wave: int, held: torch.Tensor) -> dict[int, ReadRegion]:
        """Return this rank's regions in a wave, by number in the plan.

        Regions that no target holds go into `held`, bytes.
        """
        plan = self.plan
        regions: dict[int, ReadRegion] = {}
        end = 0
        numbers = np.flatnonzero(plan.read_waves == wave)
        places = zip(
            numbers.tolist(),
            plan.read_units[numbers].tolist(),
            self.held_bytes[numbers].tolist(),
            plan.read_offsets[numbers].tolist(),
            plan.read_shapes[numbers].tolist(),
            strict=True,
        )
        for number, unit, held_bytes, offset, shape in places:
            sample = self.units[self._unit_in[number]]
            ndim = len(sample.source.shape)
            region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
            if unit >= 0:
                memory = self.target(unit)
            else:
                target = self.targets[sample.request]
                num_bytes = region.num_elements * target.itemsize
                memory = held[end : end + num_bytes].view(target.dtype).view(region.shape)
                end += held_bytes
            regions[number] = ReadRegion(sample.chunk, region, memory, unit)
        return regions

    @cached_property
    def _unit_in(self) -> list[int]:
        """A unit in each region that this rank reads."""
        unit_in = np.zeros(len(self.plan.read_chunks), np.int64)
        mine = np.flatnonzero(self.plan.unit_reads >= 0)
        unit_in[self.plan.unit_reads[mine]] = mine
        return unit_in.tolist()


class ReadRegion(NamedTuple):
    """A region of a chunk that this rank reads for several.

    Its memory is the target of `unit`, or held memory if `unit` is -1.
    """

    chunk: int
    region: Region
    memory: torch.Tensor
    unit: int

    def part(self, part: Region) -> torch.Tensor:
        """Return a part of the region, by its place in the chunk."""
        if part.shape == self.region.shape:
            return self.memory
        return self.memory[part.relative_to(self.region.offset).slices()]


class Wave:
    """This rank's reads and messages in one wave."""

    def __init__(self, own: OwnUnits, number: int, held: torch.Tensor) -> None:
        self._own = own
        self._number = number
        self._regions = own.regions(number, held)

    @property
    def direct_units(self) -> IntArray:
        """The units that are read into their targets."""
        units = []
        for read in self._regions.values():
            if read.unit >= 0:
                units.append(read.unit)
        return np.array(units, np.int64)

    def held_copies(self, first_request: int) -> tuple[list[Copy], list[torch.Tensor]]:
        """Return the reads into held memory, and their targets.

        They are copies of further requests.
        """
        copies: list[Copy] = []
        memories = []
        for read in self._regions.values():
            if read.unit < 0:
                request = first_request + len(copies)
                copies.append(Copy(read.chunk, read.region, request, whole(read.region.shape)))
                memories.append(read.memory)
        return copies, memories

    def fill_own(self) -> None:
        """Fill this rank's other units from the regions it has read."""
        own = self._own
        plan = self._own.plan
        mine = np.flatnonzero((plan.waves == self._number) & (plan.unit_reads >= 0))
        others = mine[plan.read_units[plan.unit_reads[mine]] != mine]
        for unit in others.tolist():
            source = self._regions[int(plan.unit_reads[unit])].part(own.units[unit].source)
            copy_values(source.detach(), own.target(unit).detach())

    def messages(self, rank: int) -> list[Message]:
        """Put together the messages between this rank and each peer."""
        own = self._own
        plan = self._own.plan
        by_peer: dict[tuple[int, bool], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for peer, sequence, view in self._sent_views():
            by_peer[peer, True].append((sequence, view))
        received = np.flatnonzero((plan.waves == self._number) & (plan.readers != rank))
        for unit in received[np.argsort(plan.sequence[received])].tolist():
            content = int(plan.sequence[unit]), own.target(unit)
            by_peer[int(plan.readers[unit]), False].append(content)
        messages: list[Message] = []
        for (peer, is_sent), contents in by_peer.items():
            messages.extend(make_messages(rank, peer, is_sent, contents))
        return messages

    def _sent_views(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the peer, sequence number and memory of each sent part."""
        plan = self._own.plan
        sent = np.flatnonzero(plan.read_waves[plan.send_reads] == self._number)
        reads, *columns = (column[sent] for column in plan.sends)
        is_whole = (columns[-1] == plan.read_shapes[reads]).all(axis=1)
        for number, whole_region, peer, sequence, offset, shape in zip(
            reads.tolist(), is_whole.tolist(), *(c.tolist() for c in columns), strict=True
        ):
            read = self._regions[number]
            if whole_region:
                yield peer, sequence, read.memory
                continue
            ndim = len(read.region.shape)
            yield peer, sequence, read.part(Region(tuple(offset[:ndim]), tuple(shape[:ndim])))
