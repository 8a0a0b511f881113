"""Process groups of gloo: of the caller, trees over large ones, and groups over a store."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException
from distckpt._base.lazy import LazyModule, torch
from distckpt._base.messages import first_line
from distckpt._ranks.attendance import AttendanceLog, answer_of

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = LazyModule("torch.distributed")

logger = logging.getLogger(__name__)

_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Process group of the caller -> gloo group of the same ranks. It is for groups that cannot move
CPU tensors.
"""

turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
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


@contextlib.contextmanager
def contact(group: Any, name: str, *, of_all: bool = True) -> Iterator[None]:
    """Turn a broken exchange into an error that names the rank.

    The rank died or timed out. Every rank counts the exchanges that all take part in (`of_all`).
    """
    log = attendance_log_of(group)
    if of_all:
        log.record(interrupts.running_operation())
    try:
        yield
    except RuntimeError as error:
        raise mark_known(log.lost_contact(name, error), group) from error


def mark_known(error: BaseException, group: Any) -> BaseException:
    """Note that a group's ranks have raised an error together.

    The same holds for an error that they can no longer raise together.
    """
    error.known_in = name_of(group)  # type: ignore[attr-defined]
    return error


def name_of(group: Any) -> str:
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
            own = own_address(*address)
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


def own_address(host: str, port: int) -> str | None:
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
    if process_group is None and is_initialized():
        return dist.group.WORLD
    return process_group


@functools.cache
def warn_if_others_are_meant() -> None:
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


def is_initialized() -> bool:
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
    if not is_initialized():
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


def cpu_group(group: Any) -> Any:
    # Such as "cpu:gloo,cuda:nccl"; backends of other devices do not matter.
    if "cpu:gloo" in str(dist.get_backend_config(group)).split(","):
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        with contact(group, "make a process group"):
            attendance_log_of(group).wait_for_all()
            _cpu_groups[group] = new_gloo_group(ranks)
    return _cpu_groups[group]


def new_gloo_group(members: Sequence[int], timeout: timedelta | None = None) -> Any:
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


def tree_of(group: Any) -> list[Any]:
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
            level = new_gloo_group(members, limit)
            if is_in:
                _trees[group].append(level)
            ranks = ranks[::FAN_OUT]
    return _trees[group]


def attendance_log_of(group: Any) -> AttendanceLog:
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
