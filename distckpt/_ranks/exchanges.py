"""Exchanges of byte strings, numbers and tensors over gloo.

Only this module imports torch.distributed. No payload is pickled, and the error of a broken
exchange names the rank that was lost.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import math
import os
import socket
import sys
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
from distckpt._base.messages import first_line
from distckpt._geometry.region import IntArray
from distckpt._ranks.attendance import ABANDONED, AttendanceLog, answer_of, lost_contact
from distckpt._ranks.lent_tensors import lent

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

_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Process group of the caller -> gloo group of the same ranks. It is for groups that cannot move
CPU tensors.
"""

_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
"""Process group of the caller -> lock of the thread that uses it. Exchanges of two threads could
not be told apart.
"""

FAN_OUT = 16
"""Size of groups above which messages go along a tree. No rank has more than 15 other ranks below
it for each level, so that a rank of 65,536 has at most 61 connections.
"""

_trees: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Gloo group -> this rank's groups of its tree, leaves first."""

_lone_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Default group -> the group of this process alone."""

_attendance_logs: weakref.WeakKeyDictionary[Any, AttendanceLog] = weakref.WeakKeyDictionary()
"""Gloo group -> its count, which later calls with the group continue."""


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
            _warn_if_others_are_meant()
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
        self.is_coordinator = self.rank == 0
        if self.size > 1:
            # From here on the other ranks wait for this one.
            interrupts.defer_signals()
            interrupts.hold(_turns.setdefault(group, threading.Lock()))
            self._group = _cpu_group(group)

    def use_group(self, group: Any) -> None:
        """Go on in a group of `group_over`, used by one thread."""
        self.stop = threading.Event()
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        self.is_coordinator = self.rank == 0

    def use_new_group(self, timeout: float) -> None:
        """Go on in a new gloo group of the same ranks.

        There they wait up to `timeout` seconds for each other.
        """
        members = dist.get_process_group_ranks(self._group)
        with _contact(self._group, "make a process group"):
            self._group = _new_gloo_group(members, timedelta(seconds=timeout))

    @property
    def group(self) -> Any:
        """The gloo group of the ranks; None for a process alone."""
        return self._group

    @property
    def timeout(self) -> float:
        """Return the seconds that ranks wait for each other in an exchange."""
        # A backend of another program need not tell.
        with contextlib.suppress(AttributeError):
            if self._group is not None:
                backend = self._group._get_backend(torch.device("cpu"))
                return float(backend.options._timeout.total_seconds())
        return math.inf

    def is_known_to_all(self, error: BaseException) -> bool:
        """Return whether all ranks have raised this error together.

        An error with the same cause counts, too.
        """
        return self._group is not None and getattr(error, "known_in", None) == _name_of(self._group)

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
        with _contact(self._group, name):
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
        with _contact(self._group, "gather"):
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
        with _contact(self._group, name):
            return self._scatter(payloads, name)

    def broadcast(self, payload: bytes, name: str = "broadcast") -> bytes:
        """Return the coordinator's payload on every rank.

        The argument is ignored elsewhere.
        """
        if self.size == 1:
            return payload
        with _contact(self._group, name):
            return self._broadcast_bytes(payload, name)

    def all_gather(self, payload: bytes, name: str = "all_gather") -> list[bytes]:
        """Return every rank's payload, by rank, on every rank.

        They go through the coordinator: gloo's own function sends as many messages as there are
        pairs of ranks.
        """
        if self.size == 1:
            return [payload]
        with _contact(self._group, name):
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
            with _contact(self._group, name):
                work = dist.all_reduce(total, group=self._group, async_op=True)
                self._complete(work, name, [total], self._group)
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
        with _contact(self._group, "exchange of tensors", of_all=False):
            if is_sent:
                work = dist.isend(memory, group=self._group, tag=tag, group_dst=peer)
            else:
                work = dist.irecv(memory, group=self._group, tag=tag, group_src=peer)
            return Transfer(work, memory)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer to end.

        Until then its memory must not change.
        """
        with _contact(self._group, "exchange of tensors", of_all=False):
            transfer.work.wait()

    def broadcast_into(self, memory: npt.NDArray[np.uint8], src: int) -> None:
        """Fill memory on every rank with the bytes on rank `src`.

        It has the same size everywhere.
        """
        if self.size > 1 and len(memory):
            with _contact(self._group, "broadcast of a tensor"):
                self._broadcast(torch.from_numpy(memory), src, "broadcast of a tensor")

    def _gather(self, payload: bytes, name: str) -> list[bytes]:
        if self.size <= FAN_OUT:
            return self._gather_in(self._group, payload, name)
        parts = [payload]
        for group in _tree_of(self._group):
            gathered = self._gather_in(group, pack_parts(parts), name)
            if not gathered:
                return []
            parts = []
            for message in gathered:
                parts += unpack_parts(message)
        return parts

    def _scatter(self, payloads: Sequence[bytes], name: str) -> bytes:
        if self.size <= FAN_OUT:
            return self._scatter_in(self._group, payloads, name)
        parts = payloads
        tree = _tree_of(self._group)
        for height, group in reversed([*enumerate(tree)]):
            count = FAN_OUT**height
            below = [parts[first : first + count] for first in range(0, len(parts), count)]
            parts = unpack_parts(self._scatter_in(group, [*map(pack_parts, below)], name))
        return parts[0]

    def _broadcast_bytes(self, payload: bytes, name: str) -> bytes:
        groups: Iterable[Any] = [self._group]
        if self.size > FAN_OUT:
            groups = reversed(_tree_of(self._group))
        for group in groups:
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
        group = group or self._group
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
    """Turn a broken exchange into an error that names the rank.

    The rank died or timed out. Every rank counts the exchanges that all take part in (`of_all`).
    """
    log = _attendance_log_of(group)
    if of_all:
        log.record(interrupts.running_operation())
    try:
        yield
    except RuntimeError as error:
        raise mark_known(log.lost_contact(name, error), group) from error


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


def mark_known(error: BaseException, group: Any) -> BaseException:
    """Note that a group's ranks have raised an error together.

    The same holds for an error that they can no longer raise together.
    """
    error.known_in = _name_of(group)  # type: ignore[attr-defined]
    return error


def _name_of(group: Any) -> str:
    return getattr(group, "group_name", None) or f"group at {id(group)}"


OPEN_SECONDS = 5.0
"""Seconds that torch may need beyond its timeout to open a store. It tries again at first."""
_BACKLOG = 1024
"""Connections that may wait until a store accepts them."""


def open_store(host: str, port: int, is_host: bool, timeout: float) -> Any:
    """Open the store at an address, where processes of any jobs meet.

    The host listens on this address alone; torch would listen on all addresses of the machine.

    Raises:
        CheckpointingException: no process hosts it within `timeout` seconds, or the port is taken.
    """
    if torch.__version__.startswith("2.6."):
        raise CheckpointingException(
            f"The store at {host}:{port} needs a newer torch than {torch.__version__}, which makes "
            "no groups of processes of several jobs: upgrade torch on all sides."
        )
    limit = timedelta(seconds=timeout)

    def open_there() -> Any:
        listener = _listener(host, port) if is_host else None
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            None,
            is_host,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    try:
        return answer_of(open_there, timeout + OPEN_SECONDS)
    except (RuntimeError, OSError) as error:
        problem = f"did not answer within {timeout:g} s"
        if is_host:
            problem = "cannot be hosted here"
        text = f"The store at {host}:{port} {problem}: {first_line(error)}"
        raise CheckpointingException(text) from error


def _listener(host: str, port: int) -> int:
    """Return the descriptor of a socket listening on this machine.

    Raises:
        OSError: none of the addresses of the host is one of this machine, or the port is taken.
    """
    candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in candidates:
        with contextlib.closing(socket.socket(family, kind, protocol)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError as error:
                failure = error
                continue
            _warn_of_loopback(host, str(address[0]))
            return listener.detach()
    addresses = ", ".join(sorted({str(address[0]) for *_, address in candidates}))
    if failure.errno != errno.EADDRNOTAVAIL:
        raise failure
    raise OSError(
        f"{addresses} is no address of this machine; give rank 0 one of its own, or 0.0.0.0 to "
        "listen on all of them"
    )


def _warn_of_loopback(host: str, address: str) -> None:
    """Warn of a name that leads to this machine only here.

    Some systems set up their own name so.
    """
    is_loopback = address == "::1" or address.startswith("127.")
    if is_loopback and host not in (address, "localhost"):
        logger.warning(
            "%s is %s on this machine, where other machines do not reach it: give the address of a "
            "network interface unless all is on this machine.",
            host,
            address,
        )


def group_over(
    store: Any, number: int, rank: int, size: int, timeout: float, address: tuple[str, int]
) -> Any:
    """Make a gloo group of processes of any jobs, without default group.

    Its connections use the interface that leads to `address`, unless GLOO_SOCKET_IFNAME names one.
    Collective operation: all `size` processes must call it, within `timeout` seconds.
    """
    prefixed = dist.PrefixStore  # type: ignore[attr-defined]
    shared = prefixed(_prefix_of(number), store)
    attendance = AttendanceLog(prefixed("attendance", shared), rank, size)
    limit = timedelta(seconds=timeout)

    def connect() -> Any:
        settings = limit
        if not os.environ.get("GLOO_SOCKET_IFNAME"):
            own = _own_address(*address)
            if own is not None:
                settings = _gloo_options(own, limit)
        return dist.ProcessGroupGloo(shared, rank, size, settings)

    try:
        group = answer_of(connect, 2 * timeout)
    except RuntimeError as error:
        raise attendance.lost_contact("make a process group", error) from error
    _attendance_logs[group] = attendance
    return group


def forget_group(store: Any, number: int, size: int) -> None:
    """Delete the entries of a group's members in a store.

    They wrote them when they made the group.
    """
    prefix = _prefix_of(number)
    for rank in range(size):
        # The address that gloo listens on, and the count of exchanges.
        store.delete_key(f"{prefix}/0/{rank}")
        store.delete_key(f"{prefix}/attendance/{rank}")


def _gloo_options(own_address: str, limit: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo.create_device(hostname=own_address)]
    # The number that gloo uses without options, for one device.
    options._threads = 2
    options._timeout = limit
    return options


def _prefix_of(number: int) -> str:
    return f"group {number}"


def _own_address(host: str, port: int) -> str | None:
    """Return this machine's address for packets to a host.

    None where the host is all addresses of this machine, or cannot be reached.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            if address[0] in ("0.0.0.0", "::"):
                return None
            # Nothing is sent.
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


@contextlib.contextmanager
def gloo_group(rank: int, num_ranks: int, rendezvous: str) -> Iterator[None]:
    """Make the default process group of processes of this machine.

    They meet in the file `rendezvous`.
    """
    # The name of this machine may resolve to any address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_of(process_group: Any) -> Any:
    """Return the process group, or the default one for None.

    None if torch.distributed is not initialized.
    """
    if process_group is None and _is_initialized():
        return dist.group.WORLD
    return process_group


@functools.cache
def _warn_if_others_are_meant() -> None:
    """Warn, once, of processes that a launcher has started together.

    They do not know it.
    """
    rank = os.environ.get("RANK", "")
    size = os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        logger.warning(
            "This process is rank %s of %s to its launcher, but torch.distributed is not "
            "initialized: it saves and loads as if it were alone. Call "
            "torch.distributed.init_process_group() first.",
            rank,
            size,
        )


def _is_initialized() -> bool:
    # A program that has made a process group has imported it.
    return "torch.distributed" in sys.modules and dist.is_available() and dist.is_initialized()


def num_exchanges(process_group: Any) -> int:
    """Return the number of a group's exchanges that this rank has reached.

    The group is a caller's.
    """
    group = group_of(process_group)
    if not (group and isinstance(group, dist.ProcessGroup)):
        return 0
    log = _attendance_logs.get(_cpu_groups.get(group, group))
    if log is None:
        return 0
    return log.num_exchanges


def own_rank() -> int:
    """Return this process's rank in the default group; 0 without one."""
    if not _is_initialized():
        return 0
    return dist.get_rank()


def group_number(process_group: Any) -> int:
    """Return a number that tells disjoint groups apart; 0 for None.

    It is the lowest global rank of a group.
    """
    if process_group is None:
        return 0
    return min(dist.get_process_group_ranks(process_group))


def lone_group() -> Any:
    """Return a process group of this process alone.

    None if torch.distributed is not initialized. Not a collective operation.
    """
    world = group_of(None)
    if world is not None and world not in _lone_groups:
        _lone_groups[world] = dist.new_group(
            [dist.get_rank()], backend="gloo", use_local_synchronization=True
        )
    return world and _lone_groups[world]


def _cpu_group(group: Any) -> Any:
    # Such as "cpu:gloo,cuda:nccl"; backends of other devices do not matter.
    if "cpu:gloo" in str(dist.get_backend_config(group)).split(","):
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        with _contact(group, "make a process group"):
            _attendance_log_of(group).wait_for_all()
            _cpu_groups[group] = _new_gloo_group(ranks)
    return _cpu_groups[group]


def _new_gloo_group(members: Sequence[int], timeout: timedelta | None = None) -> Any:
    """Make a gloo group whose ranks connect at their first exchange.

    Every rank connects to all other ranks if torch cannot do that. Collective operation: all
    members must call it.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    sets_it = len(members) >= FAN_OUT and name not in os.environ
    # A version of torch that cannot leave ranks in their order has no groups in another one.
    order: dict[str, Any] = {}
    if list(members) != sorted(members):
        order["sort_ranks"] = False
    if sets_it:
        os.environ[name] = "1"
    try:
        return dist.new_group(
            list(members), timeout, backend="gloo", use_local_synchronization=True, **order
        )
    finally:
        if sets_it:
            os.environ.pop(name, None)


def _tree_of(group: Any) -> list[Any]:
    """Return the tree's groups with this rank, from its leaves on.

    The first rank of each group is in the next one. Collective operation when a group is first
    given: all its ranks must call it.
    """
    if group not in _trees:
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank()
        limit = group._get_backend(torch.device("cpu")).options._timeout
        _trees[group] = []
        while len(ranks) > 1:
            is_in = own in ranks
            # All ranks make as many groups, though some are of one rank: torch counts them, and
            # names groups of the same ranks by the count.
            members = [own]
            if is_in:
                first = ranks.index(own) // FAN_OUT * FAN_OUT
                members = ranks[first : first + FAN_OUT]
            level = _new_gloo_group(members, limit)
            if is_in:
                _trees[group].append(level)
            ranks = ranks[::FAN_OUT]
    return _trees[group]


def _attendance_log_of(group: Any) -> AttendanceLog:
    if group not in _attendance_logs:
        shared = dist.PrefixStore("distckpt", _store_of(group))  # type: ignore[attr-defined]
        _attendance_logs[group] = AttendanceLog(shared, group.rank(), group.size())
    return _attendance_logs[group]


def _store_of(group: Any) -> Any:
    """Return the store through which a group's ranks have met."""
    # Groups of torch 2.6 do not tell their store.
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=np.uint8))
