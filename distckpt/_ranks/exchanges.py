"""Exchanges of byte strings, numbers and tensors over gloo; only this module imports
torch.distributed.

No payload is pickled, and the error of a broken exchange names the rank that was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException
from distckpt._base.lazy import LazyModule, torch
from distckpt._geometry.region import IntArray
from distckpt._ranks.attendance import ABANDONED, AttendanceLog, lost_contact
from distckpt._ranks.lent_tensors import lent

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = LazyModule("torch.distributed")

logger = logging.getLogger(__name__)

WAITING_LOG_SECONDS = 30.0
"""How long a rank waits for others before it logs which ones it waits for."""

_POLL = timedelta(seconds=0.5)
"""How long waiting may keep Python from handling signals."""

_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Process group of the caller -> gloo group of the same ranks, for groups that cannot move CPU
tensors.
"""

_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
"""By process group of the caller: held by the thread that uses it, since exchanges of two threads
could not be told apart.
"""

_lone_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Default group -> the group of this process alone."""

_attendance_logs: weakref.WeakKeyDictionary[Any, AttendanceLog] = weakref.WeakKeyDictionary()
"""By gloo group: later calls with the same group continue the count."""


class Transfer(NamedTuple):
    """Memory on its way to or from another rank; holding this keeps the memory alive."""

    work: Any
    memory: torch.Tensor


class Exchanges:
    """What the processes of a group send each other; a process without a process group is the only
    rank.

    `process_group` None is the default group, or this process alone if torch.distributed is not
    initialized. A thread that waits for others gives up when `stop` is set. The coordinator is the
    rank that plans and commits for all, rank 0 of the group.
    """

    _group: Any = None
    rank = 0
    size = 1
    is_coordinator = True

    def __init__(self, process_group: Any = None) -> None:
        self.stop = threading.Event()
        if not _is_initialized():
            if process_group is not None:
                raise CheckpointingException(
                    "A process_group was given but torch.distributed is not initialized here: "
                    "call torch.distributed.init_process_group() first, or leave process_group out."
                )
            return
        group = dist.group.WORLD if process_group is None else process_group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointingException(
                f"Global rank {dist.get_rank()} is not a member of the given process_group: only "
                "its members may call."
            )
        self.is_coordinator = self.rank == 0
        if self.size > 1:
            # From here on the others wait for this rank.
            interrupts.defer_signals()
            interrupts.hold(_turns.setdefault(group, threading.Lock()))
            self._group = _cpu_group(group)

    def use_new_group(self, timeout: float) -> None:
        """Go on in a new gloo group of the same ranks, which wait up to `timeout` seconds for each
        other there.
        """
        members, limit = dist.get_process_group_ranks(self._group), timedelta(seconds=timeout)
        with _contact(self._group, "make a process group"):
            self._group = dist.new_group(
                members, limit, backend="gloo", use_local_synchronization=True
            )

    @property
    def timeout(self) -> float:
        """Return how many seconds the ranks wait for each other in an exchange."""
        # A backend of another program need not tell.
        with contextlib.suppress(AttributeError):
            if self._group is not None:
                backend = self._group._get_backend(torch.device("cpu"))
                return float(backend.options._timeout.total_seconds())
        return math.inf

    def is_known_to_all(self, error: BaseException) -> bool:
        """Tell whether all ranks have raised this error, or one with the same cause, together."""
        return (
            self._group is not None and getattr(error, "known_in", None) == self._group.group_name
        )

    def are_in_step_after(self, error: BaseException) -> bool:
        """Tell whether ranks may go on together after an error: all have raised it, and no rank was
        lost.
        """
        return self.size == 1 or (
            self.is_known_to_all(error) and not getattr(error, "is_lost_contact", False)
        )

    def gather(self, payload: bytes) -> list[bytes]:
        """Send a payload to the coordinator; return the payloads of all ranks there, an empty list
        elsewhere.
        """
        if self.size == 1:
            return [payload]
        with _contact(self._group, "gather"):
            sizes = torch.cat(self._all_gather(torch.tensor([len(payload)]), "gather")).tolist()
            return self._gather(payload, sizes)

    def gather_once(self, payloads: Sequence[bytes]) -> list[list[bytes]]:
        """Gather several payloads, the same number from each rank; of ranks with an equal one, only
        the first sends it.

        Return for each of them the payloads of all ranks on the coordinator, an empty list
        elsewhere.
        """
        if self.size == 1:
            return [[payload] for payload in payloads]
        own = [_digest_and_size(payload) for payload in payloads]
        with _contact(self._group, "gather"):
            # By rank and payload: two numbers of its digest, and its size.
            table = torch.stack(self._all_gather(torch.tensor(own), "gather")).numpy()
            senders = np.stack(
                [_first_of_same(table[:, place]) for place in range(len(payloads))], axis=1
            )
            sends = senders == np.arange(self.size)[:, None]
            sizes = np.where(sends, table[:, :, 2], 0)
            sent = b"".join(itertools.compress(payloads, sends[self.rank]))
            joined = self._gather(sent, sizes.sum(axis=1).tolist())
        if not joined:
            return [[] for _ in payloads]
        stops = sizes.cumsum(axis=1)
        starts = stops - sizes
        return [
            [
                joined[rank][starts[rank, place] : stops[rank, place]]
                for rank in senders[:, place].tolist()
            ]
            for place in range(len(payloads))
        ]

    def _gather(self, payload: bytes, sizes: Sequence[int]) -> list[bytes]:
        if not self.is_coordinator:
            self._send(payload, 0)
            return []
        others = [self._receive(size, rank) for rank, size in enumerate(sizes[1:], start=1)]
        return [payload, *others]

    def scatter(self, payloads: Sequence[bytes], name: str = "scatter") -> bytes:
        """Hand every rank its payload from the coordinator's list; the argument is ignored
        elsewhere.
        """
        if self.size == 1:
            return payloads[0]
        with _contact(self._group, name):
            own_sizes = [len(payload) for payload in payloads]
            sizes = torch.tensor(own_sizes if self.is_coordinator else [0] * self.size)
            self._broadcast(sizes, 0, name)
            if not self.is_coordinator:
                return self._receive(int(sizes[self.rank]), 0)
            for rank, payload in enumerate(payloads[1:], start=1):
                self._send(payload, rank)
            return payloads[0]

    def broadcast(self, payload: bytes, name: str = "broadcast") -> bytes:
        """Return the coordinator's payload on every rank; the argument is ignored elsewhere."""
        if self.size == 1:
            return payload
        with _contact(self._group, name):
            size = torch.tensor([len(payload)])
            self._broadcast(size, 0, name)
            if not size:
                return b""
            if self.is_coordinator:
                self._broadcast(_as_tensor(payload), 0, name)
                return payload
            content = torch.empty(int(size), dtype=torch.uint8)
            self._broadcast(content, 0, name)
            return content.numpy().tobytes()

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank, on every rank."""
        if self.size == 1:
            return [payload]
        with _contact(self._group, "all_gather"):
            sizes = torch.cat(self._all_gather(torch.tensor([len(payload)]), "all_gather")).tolist()
            if not any(sizes):
                return [b""] * self.size
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(payload)] = _as_tensor(payload)
            gathered = self._all_gather(padded, "all_gather")
            return [
                tensor[:size].numpy().tobytes()
                for tensor, size in zip(gathered, sizes, strict=True)
            ]

    def all_gather_numbers(self, numbers: Sequence[int]) -> IntArray:
        """Return the numbers of every rank, the same count from each, on every rank; of shape
        (ranks, numbers).
        """
        own = np.array(numbers, np.int64)
        if self.size == 1:
            return own[None]
        with _contact(self._group, "all_gather_numbers"):
            gathered = self._all_gather(torch.from_numpy(own), "all_gather_numbers")
            return torch.stack(gathered).numpy()

    def all_reduce_max(self, numbers: Sequence[int], name: str) -> list[int]:
        """Return the largest number that any rank gave at each place, on every rank."""
        largest = torch.tensor(numbers, dtype=torch.int64)
        with _contact(self._group, name):
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._complete(work, name, [largest])
        return largest.tolist()

    def all_reduce_sum(self, numbers: IntArray, name: str) -> IntArray:
        """Return the sum of the numbers that all ranks gave at each place, on every rank."""
        total = torch.from_numpy(numbers.copy())
        if self.size > 1:
            with _contact(self._group, name):
                work = dist.all_reduce(total, group=self._group, async_op=True)
                self._complete(work, name, [total])
        summed: IntArray = total.numpy()
        return summed

    def start_transfer(
        self,
        memory: torch.Tensor,
        peer: int,
        tag: int,
        is_sent: bool,
    ) -> Transfer:
        """Start to send contiguous bytes, or to fill them with those that a rank sends under the
        same tag; see `finish`.
        """
        with _contact(self._group, "exchange of tensors", of_all=False):
            start = dist.isend if is_sent else dist.irecv
            of_peer = {"group_dst" if is_sent else "group_src": peer}
            return Transfer(start(memory, group=self._group, tag=tag, **of_peer), memory)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer to end; until then its memory must not change."""
        with _contact(self._group, "exchange of tensors", of_all=False):
            transfer.work.wait()

    def broadcast_into(self, memory: npt.NDArray[np.uint8], src: int) -> None:
        """Fill memory, of the same size on every rank, with the bytes that it holds on rank
        `src`.
        """
        if self.size > 1 and len(memory):
            with _contact(self._group, "broadcast of a tensor"):
                self._broadcast(torch.from_numpy(memory), src, "broadcast of a tensor")

    def _send(self, payload: bytes, to: int) -> None:
        if payload:
            dist.send(_as_tensor(payload), group=self._group, group_dst=to)

    def _receive(self, size: int, source: int) -> bytes:
        received = torch.empty(size, dtype=torch.uint8)
        if size:
            # Not `recv`, which looks for a global rank among all members.
            work = dist.irecv(received, group=self._group, group_src=source)
            work.wait()  # type: ignore[union-attr]
        return received.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor, src: int, name: str) -> None:
        self._complete(
            dist.broadcast(tensor, group=self._group, group_src=src, async_op=True), name, [tensor]
        )

    def _all_gather(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(gathered, tensor, group=self._group, async_op=True)
        self._complete(work, name, [tensor, *gathered])
        return gathered

    def _complete(self, work: Any, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for a collective; after a while, log once which ranks have not come to it."""
        log_at: float = time.monotonic() + WAITING_LOG_SECONDS
        with lent(self._group, work, tensors):
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):
                    work.wait(min(_POLL, timedelta(seconds=WAITING_LOG_SECONDS)))
                if self.stop.is_set():
                    raise mark_known(lost_contact({}, ABANDONED), self._group)
                if time.monotonic() >= log_at:
                    log_at = math.inf
                    logger.warning(
                        "rank %d: %s",
                        self.rank,
                        _attendance_log_of(self._group).describe_wait(name),
                    )
            work.wait()  # raises the error of a collective that has failed


@contextlib.contextmanager
def _contact(group: Any, name: str, *, of_all: bool = True) -> Iterator[None]:
    """Turn a broken exchange, after a rank died or timed out, into an error that names the rank.

    Every rank counts the exchanges that all take part in (`of_all`).
    """
    log = _attendance_log_of(group)
    if of_all:
        log.record(interrupts.running_operation())
    try:
        yield
    except RuntimeError as error:
        raise mark_known(log.lost_contact(name, error), group) from error


def _digest_and_size(payload: bytes) -> list[int]:
    digest = np.frombuffer(hashlib.blake2b(payload, digest_size=16).digest(), np.int64)
    return [*digest.tolist(), len(payload)]


def _first_of_same(rows: IntArray) -> IntArray:
    """Return for each row the index of the first one that equals it."""
    _, firsts, same = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return firsts[same.ravel()]


def mark_known(error: BaseException, group: Any) -> BaseException:
    """Note that the ranks of a group have raised an error together, or no longer can."""
    error.known_in = group.group_name  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def gloo_group(rank: int, num_ranks: int, rendezvous: str) -> Iterator[None]:
    """Make the default process group of processes of this machine that meet in the file
    `rendezvous`.
    """
    # Whatever the name of this machine resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_of(process_group: Any) -> Any:
    """Return the process group, or the default one for None; None if torch.distributed is not
    initialized.
    """
    if process_group is None and _is_initialized():
        return dist.group.WORLD
    return process_group


def _is_initialized() -> bool:
    # Who has made a process group has imported it.
    return "torch.distributed" in sys.modules and dist.is_available() and dist.is_initialized()


def num_exchanges(process_group: Any) -> int:
    """Return how many exchanges of all ranks this one has reached, for a process group of a
    caller.
    """
    group = group_of(process_group)
    if not (group and isinstance(group, dist.ProcessGroup)):
        return 0
    log = _attendance_logs.get(_cpu_groups.get(group, group))
    return log.num_exchanges if log else 0


def own_rank() -> int:
    """Return the rank of this process in the default group; 0 if there is none."""
    return dist.get_rank() if _is_initialized() else 0


def group_number(process_group: Any) -> int:
    """Return a number that tells disjoint groups apart, the lowest global rank of one; 0 for
    None.
    """
    return 0 if process_group is None else min(dist.get_process_group_ranks(process_group))


def lone_group() -> Any:
    """Return a process group of this process alone; None if torch.distributed is not initialized.

    Not a collective operation.
    """
    world = group_of(None)
    if world is not None and world not in _lone_groups:
        _lone_groups[world] = dist.new_group(
            [dist.get_rank()], backend="gloo", use_local_synchronization=True
        )
    return world and _lone_groups[world]


def _cpu_group(group: Any) -> Any:
    # Such as "cpu:gloo,cuda:nccl"; what serves other devices does not matter.
    if "cpu:gloo" in str(dist.get_backend_config(group)).split(","):
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        with _contact(group, "make a process group"):
            _attendance_log_of(group).wait_for_all()
            _cpu_groups[group] = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=True
            )
    return _cpu_groups[group]


def _attendance_log_of(group: Any) -> AttendanceLog:
    if group not in _attendance_logs:
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        shared = store and dist.PrefixStore("distckpt", store)  # type: ignore[attr-defined]
        _attendance_logs[group] = AttendanceLog(shared, group.rank(), group.size())
    return _attendance_logs[group]


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=np.uint8))
