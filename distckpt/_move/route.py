"""Moves of a state dict, again and again, between separate jobs.

They know only an address.
"""

from __future__ import annotations

import gc
import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distckpt._base import interrupts
from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import (
    MoveOptions,
    MoveReport,
    check_seconds,
    check_switch,
    with_changes,
)
from distckpt._move.agreements import Agreements
from distckpt._move.host_memory import HostMemory, bucket_bytes_of, share_memory
from distckpt._move.inbox import SOURCE, Start, check_host, name_host
from distckpt._move.redistribute import MoveRequest, run_move
from distckpt._move.roll_call import MAX_TARGETS, Leader, Member
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.groups import group_over, open_store
from distckpt.mapping._wrappers import ShardedStateDict
from distckpt.rules._rule import Rule

MAX_ATTEMPTS = 3
"""Attempts to move one version among the same members.

Where contact breaks and no member is lost, it will break again.

Altogether a version is moved as many times more as it had members at first: targets that start
again and die each time do not keep the other members in it.
"""


class Route:
    """A way for tensors from one job to others, again and again.

    The source, such as a trainer, and the targets, such as inference engines, may have different
    layouts. They know only an address.

        route = distckpt.Route("trainer-0:29700", source={"model": model})  # each trainer rank
        route = distckpt.Route("trainer-0:29700", target=parameters)  # each engine worker

        report = route.run(version=step)  # on both sides, at every step

    The first run compares descriptions and plans, as `redistribute` does; later ones use the plan
    as long as no description and no member changes. A target that comes later, or comes again after
    a restart, takes part from the next version on. A target that disappears is named in a warning,
    and the version is moved to the other targets.

    Args:
        address: "host:port" at which rank 0 of the job that gives can be reached, such as
            "trainer-0:29700" or "[fd00::1]:29700". It hosts a store there, on this address of its
            machine alone; "0.0.0.0:29700" on rank 0 stands for all of them. Connections are not
            authenticated: anyone who reaches the port can take the tensors, and disturb the move.
        source: the state to give, a state dict as for `save`. All ranks of the job give their
            shards, and make their Routes together.
        target: the state to fill, a state dict as for `load`. Each process that takes is a target
            of its own. Either `source` or `target` is given.
        rules: rules from the names of this side to the names of the move, such as the names of a
            Hugging Face directory; see `distckpt.rules`.
        family: afterwards, the rules of the model's family: the path of its `config.json`.
        process_group: process group of the ranks that give; None for the default group, or for this
            process alone when torch.distributed is not initialized.
        num_targets: number of targets that the first version waits for, at most 4,096.
        timeout: seconds to wait: for the store, for a version, for the ranks in the middle of a
            move. It must be longer than the time between two versions. A target waits up to twice
            as long for a version, since the source may be waiting for other targets. Each wait
            takes some seconds more, since other members notice only after `timeout`.
        options: further options.
        changes: options by keyword, such as `atomic=True`; see `MoveOptions` for all of them.
            `atomic` must be the same on all sides, as must the other options.

    Raises:
        CheckpointingException: the address cannot be reached or hosted, on all ranks of a source;
            or another program, another trainer or another release of distckpt is there.
    """

    def __init__(
        self,
        address: str,
        *,
        source: ShardedStateDict | None = None,
        target: ShardedStateDict | None = None,
        rules: Sequence[Rule] = (),
        family: str | os.PathLike[str] | None = None,
        process_group: Any = None,
        num_targets: int = 1,
        timeout: float = 600.0,
        options: MoveOptions | None = None,
        **changes: Any,
    ) -> None:
        if (source is None) == (target is None):
            raise ValueError("A Route has either a source or a target.")
        check_seconds("timeout", timeout)
        if num_targets not in range(MAX_TARGETS + 1):
            raise ValueError(f"num_targets is at most {MAX_TARGETS}, got {num_targets!r:.100}")
        self._address = host, port = _split(address)
        self._timeout = timeout
        self._source = source or {}
        self._target = target or {}
        self._request = MoveRequest(
            rules=() if source is None else rules,
            target_rules=rules if source is None else (),
            family=family,
            options=with_changes(Route, MoveOptions, options, changes),
            place=address,
            verb="route",
        )
        self._request.check()
        self._leader = self._member = None
        if source is None:
            self._store = open_store(host, port, False, timeout)
            check_host(self._store, address, timeout)
            self._member = Member.target(self._store, timeout)
        else:
            rank, size, self._store = _opened_together(process_group, host, port, timeout)
            if rank == 0:
                self._leader = Leader(self._store, size, num_targets, timeout)
            else:
                self._member = Member(self._store, SOURCE, rank, timeout)
        self._agreements: Agreements = {}
        self._group: tuple[int, Any, HostMemory] | None = None

    @interrupts.operation
    @paused_garbage_collection()
    def run(self, version: int | None = None, *, verify: bool = False) -> MoveReport:
        """Move a version from the source to all targets that are there.

        All ranks of the source call it, and all targets. Tensors must not change meanwhile. An
        error leaves targets with a part of the new values, unless `atomic` is set: run again before
        they are used.

        Args:
            version: a number for the state that is moved, such as the step. A target may pass None,
                and get the next version.
            verify: compare the fingerprint of each tensor, as it has arrived on a target, with the
                fingerprint of the source's tensor in memory; the same on all sides. See
                `distckpt.fingerprint`.

        Returns:
            The version, the bytes that were moved to all targets together, and the duration.

        Raises:
            CheckpointingException: a target asks for another version than the source moves. Or,
                with `verify`, the values that arrived differ from the values that were sent.
            LoadMismatchError: the source lacks a tensor that a target takes. Nothing is changed.
            RankFailedError: a rank of the source is lost, or no target is left, or the same members
                have lost contact three times, or new ones again and again. Or any member failed.
        """
        check_switch("verify", verify)
        request = replace(self._request, compares=verify)
        version = self._checked(version)
        num_attempts: Counter[tuple[str, ...]] = Counter()
        while True:
            start = self._start(version)
            if version not in (None, start.version):
                raise CheckpointingException(
                    f"Rank 0 moves version {start.version}, and this rank version {version}."
                )
            try:
                return self._move(start, request)
            except RankFailedError as error:
                self._group = None
                if not error.is_lost_contact:
                    raise
                if self._leader is not None:
                    self._leader.note_lost(error.failures)
                members = tuple(start.names)
                num_attempts[members] += 1
                num_first = len(next(iter(num_attempts)))
                is_last = num_attempts.total() >= num_first + MAX_ATTEMPTS
                if is_last or num_attempts[members] == MAX_ATTEMPTS:
                    raise
            # The error, which refers to itself, keeps the group: other members notice when that
            # ends.
            gc.collect()

    def close(self) -> None:
        """Leave the route.

        The source does not wait for a target that has left. When rank 0 of the source leaves,
        targets can take no further version.
        """
        if self._member is not None:
            self._member.leave()
        self._group = self._store = self._leader = self._member = None

    def __enter__(self) -> Route:
        """Return the route."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the route."""
        self.close()

    def _checked(self, version: int | None) -> int | None:
        if version is None and self._leader is not None:
            raise ValueError("The side that gives names the version: route.run(version=step).")
        try:
            if version is None:
                return None
            return operator.index(version)
        except TypeError:
            raise TypeError(f"version is a whole number, got {version!r:.100}") from None

    def _start(self, version: int | None) -> Start:
        if self._leader is not None:
            assert version is not None
            return self._leader.start(version)
        if self._member is None:
            raise CheckpointingException("This route is closed.")
        return self._member.wait_for_start(version)

    def _move(self, start: Start, request: MoveRequest) -> MoveReport:
        rank = 0
        if self._member is not None:
            rank = start.names.index(self._member.name)
        ranks = Ranks.alone()
        if self._group is None or self._group[0] != start.number:
            # The old one first: its connections end.
            self._group = None
            members = (start.number, rank, len(start.names))
            ranks.use_group(group_over(self._store, *members, self._timeout, self._address))
            memory = share_memory(ranks, bucket_bytes_of(request.options))
            self._group = (start.number, ranks, memory)
        _, ranks, memory = self._group
        with ranks.phase("check the arguments", same=request.of_all_ranks()):
            pass
        request = replace(request, version=start.version)
        return run_move(ranks, self._source, self._target, request, self._agreements, memory)


@interrupts.operation
def _opened_together(
    process_group: Any, host: str, port: int, timeout: float
) -> tuple[int, int, Any]:
    """Open a store that rank 0 hosts, on all giving ranks.

    Return the rank, the number of ranks and the store. Collective operation: all ranks that give
    must call it, so that none joins another job.
    """
    ranks = Ranks(process_group)
    address = f"{host}:{port}"
    store = None
    number = 0
    with ranks.phase("host the route", decision=True):
        if ranks.is_coordinator:
            store = open_store(host, port, True, timeout)
            number = name_host(store)
    with ranks.phase("reach the route") as vote:
        store = store or open_store(host, port, False, timeout)
        vote.number = number or check_host(store, address, timeout)
    if not vote.are_equal:
        raise CheckpointingException(
            f"Ranks of one job reach different trainers at {address}: rank 0 hosts it where others "
            "do not reach it. Give the name of its machine, and a port of its own to each job."
        )
    return ranks.rank, ranks.size, store


def _split(address: str) -> tuple[str, int]:
    host, _, port = str(address).rpartition(":")
    has_port = port.isdigit() and 0 < int(port) < 1 << 16
    if not host or "/" in host or not has_port:
        raise ValueError(f"address is 'host:port', got {address!r:.100}")
    # The brackets of "[::1]:29700" are no part of the host.
    return host.removeprefix("[").removesuffix("]"), int(port)
