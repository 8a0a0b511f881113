"""Exchanges of byte strings, numbers and tensors over gloo.

No payload is pickled, and the error of a broken exchange names the rank that was lost.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException
from distckpt._base.lazy import LazyModule, torch
from distckpt._base.libc import keep_for_ever
from distckpt._geometry.region import IntArray
from distckpt._ranks import groups
from distckpt._ranks.attendance import ABANDONED, lost_contact
from distckpt._ranks.groups import (
    attendance_log_of,
    contact,
    cpu_group,
    is_initialized,
    mark_known,
    name_of,
    new_gloo_group,
    tree_of,
    turns,
    warn_if_others_are_meant,
)

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = LazyModule("torch.distributed")

logger = logging.getLogger(__name__)

WAITING_LOG_SECONDS = 30.0
"""Seconds after which a waiting rank logs the missing ones."""

_POLL = timedelta(seconds=0.5)
"""Longest time that waiting keeps Python from handling signals."""

_FRAME_BYTES = 512
"""Size of the first message of a gather, scatter or broadcast. Only longer payloads take a second
one.
"""
_BYTES_IN_FRAME = _FRAME_BYTES - 8


class Transfer(NamedTuple):
    """Memory on its way to or from another rank.

    Holding this keeps the memory alive.
    """

    work: Any
    memory: torch.Tensor


class Exchanges:
    """Exchanges between the processes of a group.

    A process without a process group is the only rank. `process_group` None is the default group,
    or this process alone if torch.distributed is not initialized. A thread that waits for other
    ranks gives up when `stop` is set. The coordinator is the rank that plans and commits for all,
    rank 0 of the group.
    """

    group: Any = None
    """The gloo group of the ranks; None for a process alone."""
    rank = 0
    size = 1

    def __init__(self, process_group: Any = None) -> None:
        self.stop = threading.Event()
        if not is_initialized():
            if process_group is not None:
                raise CheckpointingException(
                    "A process_group was given but torch.distributed is not initialized here: "
                    "call torch.distributed.init_process_group() first, or leave process_group out."
                )
            warn_if_others_are_meant()
            return
        group = process_group
        if group is None:
            group = dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointingException(
                f"Global rank {dist.get_rank()} is not a member of the given process_group: only "
                "its members may call."
            )
        if self.size > 1:
            # From here on the other ranks wait for this one.
            interrupts.defer_signals()
            interrupts.hold(turns.setdefault(group, threading.Lock()))
            self.group = cpu_group(group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits for all."""
        return self.rank == 0

    def use_group(self, group: Any) -> None:
        """Go on in a group of `group_over`, used by one thread."""
        self.stop = threading.Event()
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def use_new_group(self, timeout: float) -> None:
        """Go on in a new gloo group of the same ranks.

        There they wait up to `timeout` seconds for each other.
        """
        members = dist.get_process_group_ranks(self.group)
        with contact(self.group, "make a process group"):
            self.group = new_gloo_group(members, timedelta(seconds=timeout))

    @property
    def timeout(self) -> float:
        """Return the seconds that ranks wait for each other in an exchange."""
        # A backend of another program need not tell.
        with contextlib.suppress(AttributeError):
            if self.group is not None:
                backend = self.group._get_backend(torch.device("cpu"))
                return float(backend.options._timeout.total_seconds())
        return math.inf

    def is_known_to_all(self, error: BaseException) -> bool:
        """Return whether all ranks have raised this error together.

        An error with the same cause counts, too.
        """
        return self.group is not None and getattr(error, "known_in", None) == name_of(self.group)

    def are_in_step_after(self, error: BaseException) -> bool:
        """Return whether ranks may go on together after an error.

        They may if all have raised it, and no rank was lost.
        """
        return self.size == 1 or (
            self.is_known_to_all(error) and not getattr(error, "is_lost_contact", False)
        )

    def gather(self, payload: bytes, name: str = "gather") -> list[bytes]:
        """Send a payload to the coordinator, and return all payloads there.

        Other ranks get an empty list.
        """
        if self.size == 1:
            return [payload]
        with contact(self.group, name):
            return self._gather(payload, name)

    def gather_once(self, payloads: Sequence[bytes]) -> list[list[bytes]]:
        """Gather payloads; identical ones are sent by one rank only.

        Every rank has the same number of payloads, and the first rank with a payload sends it.
        Return for each of them the payloads of all ranks on the coordinator, an empty list
        elsewhere.
        """
        if self.size == 1:
            return [[payload] for payload in payloads]
        digests = b"".join(map(_digest_of, payloads))
        senders = np.empty((0, len(payloads)), np.int64)
        with contact(self.group, "gather"):
            gathered = self._gather(digests, "gather")
            if gathered:
                table = np.frombuffer(b"".join(gathered), np.int64)
                table = table.reshape(self.size, len(payloads), -1)
                columns = [_first_of_same(table[:, place]) for place in range(len(payloads))]
                senders = np.stack(columns, axis=1)
            sends = senders == np.arange(len(senders))[:, None]
            own_sends = self._scatter([row.tobytes() for row in sends], "gather")
            sent = list(itertools.compress(payloads, np.frombuffer(own_sends, np.bool_)))
            joined = self._gather(pack_parts(sent), "gather")
        parts = [iter(unpack_parts(message)) for message in joined]
        return [_each_of_same(senders[:, place].tolist(), parts) for place in range(len(payloads))]

    def scatter(self, payloads: Sequence[bytes], name: str = "scatter") -> bytes:
        """Hand every rank its payload from the coordinator's list.

        The argument is ignored elsewhere.
        """
        if self.size == 1:
            return payloads[0]
        with contact(self.group, name):
            return self._scatter(payloads, name)

    def broadcast(self, payload: bytes, name: str = "broadcast") -> bytes:
        """Return the coordinator's payload on every rank.

        The argument is ignored elsewhere.
        """
        if self.size == 1:
            return payload
        with contact(self.group, name):
            return self._broadcast_bytes(payload, name)

    def all_gather(self, payload: bytes, name: str = "all_gather") -> list[bytes]:
        """Return every rank's payload, by rank, on every rank.

        They go through the coordinator: gloo's own function sends as many messages as there are
        pairs of ranks.
        """
        if self.size == 1:
            return [payload]
        with contact(self.group, name):
            joined = pack_parts(self._gather(payload, name))
            return unpack_parts(self._broadcast_bytes(joined, name))

    def all_gather_numbers(self, numbers: Sequence[int]) -> IntArray:
        """Return the numbers of all ranks on every rank.

        Their shape is (ranks, numbers). Each rank has the same count of numbers.
        """
        own = np.array(numbers, np.int64)
        gathered = self.all_gather(own.tobytes(), "all_gather_numbers")
        return np.frombuffer(b"".join(gathered), np.int64).reshape(self.size, len(numbers))

    def all_reduce_sum(self, numbers: IntArray, name: str) -> IntArray:
        """Return the sum of all ranks' numbers at each place, everywhere."""
        total = torch.from_numpy(numbers.copy())
        if self.size > 1:
            with contact(self.group, name):
                work = dist.all_reduce(total, group=self.group, async_op=True)
                self._complete(work, name, [total], self.group)
        result: IntArray = total.numpy()
        return result

    def start_transfer(
        self,
        memory: torch.Tensor,
        peer: int,
        tag: int,
        is_sent: bool,
    ) -> Transfer:
        """Start to send contiguous bytes, or to receive them from a rank.

        The sender uses the same tag; see `finish`.
        """
        with contact(self.group, "exchange of tensors", of_all=False):
            if is_sent:
                work = dist.isend(memory, group=self.group, tag=tag, group_dst=peer)
            else:
                work = dist.irecv(memory, group=self.group, tag=tag, group_src=peer)
            return Transfer(work, memory)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer to end.

        Until then its memory must not change.
        """
        with contact(self.group, "exchange of tensors", of_all=False):
            transfer.work.wait()

    def broadcast_into(self, memory: npt.NDArray[np.uint8], src: int) -> None:
        """Fill memory on every rank with the bytes on rank `src`.

        It has the same size everywhere.
        """
        if self.size > 1 and len(memory):
            with contact(self.group, "broadcast of a tensor"):
                self._broadcast(torch.from_numpy(memory), src, "broadcast of a tensor")

    def _gather(self, payload: bytes, name: str) -> list[bytes]:
        if self.size <= groups.FAN_OUT:
            return self._gather_in(self.group, payload, name)
        parts = [payload]
        for group in tree_of(self.group):
            gathered = self._gather_in(group, pack_parts(parts), name)
            if not gathered:
                return []
            parts = []
            for message in gathered:
                parts += unpack_parts(message)
        return parts

    def _scatter(self, payloads: Sequence[bytes], name: str) -> bytes:
        if self.size <= groups.FAN_OUT:
            return self._scatter_in(self.group, payloads, name)
        parts = payloads
        tree = tree_of(self.group)
        for height, group in reversed([*enumerate(tree)]):
            count = groups.FAN_OUT**height
            below = [parts[first : first + count] for first in range(0, len(parts), count)]
            parts = unpack_parts(self._scatter_in(group, [*map(pack_parts, below)], name))
        return parts[0]

    def _broadcast_bytes(self, payload: bytes, name: str) -> bytes:
        levels: Iterable[Any] = [self.group]
        if self.size > groups.FAN_OUT:
            levels = reversed(tree_of(self.group))
        for group in levels:
            payload = self._broadcast_in(group, payload, name)
        return payload

    def _gather_in(self, group: Any, payload: bytes, name: str) -> list[bytes]:
        frame = _frame_of(payload)
        if group.rank() > 0:
            work = dist.gather(frame, group=group, group_dst=0, async_op=True)
            self._complete(work, name, [frame], group)
            _send(group, payload[_BYTES_IN_FRAME:], 0)
            return []
        frames = [torch.empty_like(frame) for _ in range(group.size())]
        work = dist.gather(frame, frames, group=group, group_dst=0, async_op=True)
        self._complete(work, name, [frame, *frames], group)
        others = [_content_of(group, frame, rank) for rank, frame in enumerate(frames[1:], 1)]
        return [payload, *others]

    def _scatter_in(self, group: Any, payloads: Sequence[bytes], name: str) -> bytes:
        own = _frame_of(b"")
        is_first = group.rank() == 0
        frames: list[torch.Tensor] | None = None
        if is_first:
            frames = [_frame_of(payload) for payload in payloads]
        work = dist.scatter(own, frames, group=group, group_src=0, async_op=True)
        self._complete(work, name, [own, *(frames or ())], group)
        if not is_first:
            return _content_of(group, own, 0)
        for rank, payload in enumerate(payloads[1:], start=1):
            _send(group, payload[_BYTES_IN_FRAME:], rank)
        return payloads[0]

    def _broadcast_in(self, group: Any, payload: bytes, name: str) -> bytes:
        frame = _frame_of(payload)
        is_first = group.rank() == 0
        self._broadcast(frame, 0, name, group)
        size, start = _size_and_start(frame)
        if size == len(start):
            return start
        rest = torch.empty(size - len(start), dtype=torch.uint8, device="cpu")
        if is_first:
            rest = _as_tensor(payload[_BYTES_IN_FRAME:])
        self._broadcast(rest, 0, name, group)
        if is_first:
            return payload
        return start + rest.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor, src: int, name: str, group: Any = None) -> None:
        group = group or self.group
        work = dist.broadcast(tensor, group=group, group_src=src, async_op=True)
        self._complete(work, name, [tensor], group)

    def _complete(self, work: Any, name: str, tensors: Sequence[torch.Tensor], group: Any) -> None:
        """Wait for a collective; after a while, log its absent ranks once."""
        log_at: float = time.monotonic() + WAITING_LOG_SECONDS
        with lent(group, work, tensors):
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):
                    work.wait(min(_POLL, timedelta(seconds=WAITING_LOG_SECONDS)))
                if self.stop.is_set():
                    raise mark_known(lost_contact({}, ABANDONED), self.group)
                if time.monotonic() >= log_at:
                    log_at = math.inf
                    logger.warning(
                        "rank %d: %s",
                        self.rank,
                        attendance_log_of(self.group).describe_wait(name),
                    )
            work.wait()  # raises the error of a collective that has failed


def _content_of(group: Any, frame: torch.Tensor, source: int) -> bytes:
    """Return a frame's payload, whose rest comes from the same rank."""
    size, start = _size_and_start(frame)
    return start + _receive(group, size - len(start), source)


def _send(group: Any, payload: bytes, to: int) -> None:
    if payload:
        dist.send(_as_tensor(payload), group=group, group_dst=to)


def _receive(group: Any, size: int, source: int) -> bytes:
    received = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        # Not `recv`, which looks for a global rank among all members.
        work = dist.irecv(received, group=group, group_src=source)
        work.wait()  # type: ignore[union-attr]
    return received.numpy().tobytes()


def _frame_of(payload: bytes) -> torch.Tensor:
    """Return a message of the common size: a payload's length and beginning."""
    start = len(payload).to_bytes(8, "little") + payload[:_BYTES_IN_FRAME]
    return _as_tensor(start.ljust(_FRAME_BYTES, b"\0"))


def _size_and_start(frame: torch.Tensor) -> tuple[int, bytes]:
    content = frame.numpy().tobytes()
    size = int.from_bytes(content[:8], "little")
    return size, content[8:][:size]


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Join byte strings into one, see `unpack_parts`."""
    sizes = np.array([len(parts), *map(len, parts)], np.int64)
    return b"".join([sizes.tobytes(), *parts])


def unpack_parts(message: bytes) -> list[bytes]:
    """Return the byte strings that `pack_parts` has joined."""
    count = int.from_bytes(message[:8], "little")
    stops = np.frombuffer(message, np.int64, count + 1).cumsum()
    # The sizes themselves come first; the first of those numbers is their count.
    stops += 8 * (count + 1) - count
    return [message[start:stop] for start, stop in itertools.pairwise(stops.tolist())]


def _digest_of(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _each_of_same(senders: Sequence[int], parts: Sequence[Iterator[bytes]]) -> list[bytes]:
    """Return the payload of each rank, given the senders.

    `parts` are the payloads that each rank has sent.
    """
    payloads = {rank: next(parts[rank]) for rank in sorted(set(senders))}
    return [payloads[rank] for rank in senders]


def _first_of_same(rows: IntArray) -> IntArray:
    """Return for each row the index of its first equal row."""
    _, firsts, same = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return firsts[same.ravel()]


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=np.uint8))


# --- Lent tensors ---------------------------------------------------------------------------------


SECONDS_TO_LET_GO = 5.0
"""Longest time that the exit waits."""

_lent: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""Gloo group, whose threads end with it -> tensors."""


@contextlib.contextmanager
def lent(group: Any, work: Any, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Wait in the body for a collective that works on tensors."""
    try:
        yield
    finally:
        if work.is_completed():
            _lent[group] = [*filter(_is_held, _lent.get(group, ())), *tensors]
        else:
            # It goes on without us. As long as the work is here, no thread of gloo is the last to
            # let go of tensors. The end of the group would wait for that thread.
            keep_for_ever([group, work, *tensors])


def _is_held(tensor: torch.Tensor) -> bool:
    """Return whether anything but Python holds a tensor.

    Some versions of torch do not tell.
    """
    return bool(getattr(tensor, "_use_count", lambda: 1)() > 1)


def _wait() -> None:
    deadline = time.monotonic() + SECONDS_TO_LET_GO
    while any(map(_is_held, itertools.chain(*_lent.values()))) and time.monotonic() < deadline:
        time.sleep(0.001)


# Exit functions run in the reverse order: this one after the functions of programs, which may save.
atexit.register(_wait)
