"""Copies of a host's files on another host."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distckpt._base.memory import Bytes
from distckpt._base.threads import Pool
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.write import WriteSettings
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import Transfer
from distckpt._storage import locations
from distckpt.manager._tiers._hosts import Hosts, decide_together
from distckpt.manager._tiers._lane import Pace
from distckpt.manager._tiers._stored_files import StoredFile, reading, rewrite, stored_files
from distckpt.manager._tiers._survey import SpreadStep

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes that are sent at a time; sender and receiver hold two pieces each."""


class Delivery(NamedTuple):
    """A file that one rank sends to another.

    Attributes:
        name: its name in the step.
        num_bytes: its size.
        sender: a rank of a host that has the file.
        receiver: a rank of the host that gets it.
        tag: tells its messages from those of other files.
    """

    name: str
    num_bytes: int
    sender: int
    receiver: int
    tag: int


def deliveries(step: SpreadStep, hosts: Hosts) -> list[Delivery]:
    """Return the files of one host alone, which its peer gets.

    All ranks go through them in this order, so that no two wait for each other.
    """
    sent = [0] * len(hosts.of_rank)
    received = [0] * len(hosts.of_rank)
    result = []
    for tag, name in enumerate(sorted(step.sizes)):
        (host, *others) = step.hosts[name]
        peer = hosts.peers[host]
        if others or peer < 0:
            continue
        sender = min(hosts.members[host], key=sent.__getitem__)
        receiver = min(hosts.members[peer], key=received.__getitem__)
        sent[sender] += step.sizes[name]
        received[receiver] += step.sizes[name]
        result.append(Delivery(name, step.sizes[name], sender, receiver, tag))
    return result


def copy_to_peers(
    ranks: Ranks,
    stored: StoredCheckpoint,
    planned: Sequence[Delivery],
    durable: bool,
    pace: Pace,
) -> list[str]:
    """Send files to the hosts that keep copies; return the problems of all ranks.

    A copy appears under its name once all of it has been compared with its checksums. A rank with
    a problem goes on, so that others do not wait for it.

    Collective operation: all ranks must call it.
    """
    outgoing = [delivery for delivery in planned if delivery.sender == ranks.rank]
    incoming = [delivery for delivery in planned if delivery.receiver == ranks.rank]

    def copy() -> list[str]:
        problems: list[str] = []
        with Pool(1, thread_name_prefix="distckpt-copies") as pool:
            sending = pool.submit(_send_all, ranks, stored.location, outgoing, pace, problems)
            _receive_all(ranks, stored, incoming, durable, problems)
            sending.result()
        return problems

    of_ranks = decide_together(ranks, "copy to other hosts", copy, list)
    return list(itertools.chain(*of_ranks))


def _send_all(
    ranks: Ranks, directory: str, outgoing: Sequence[Delivery], pace: Pace, problems: list[str]
) -> None:
    for delivery in outgoing:
        read = reading(locations.join(directory, delivery.name))
        under_way: deque[Transfer] = deque()
        for start in range(0, delivery.num_bytes, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, delivery.num_bytes - start), dtype=torch.uint8)
            pace.take(piece.nbytes)
            try:
                read(start, piece.numpy())
            except Exception as error:
                # Sent all the same: the receiver waits for it, and will find it damaged.
                problems.append(_problem(delivery, error))
            if len(under_way) > 1:
                ranks.finish(under_way.popleft())
            under_way.append(
                ranks.start_transfer(piece, delivery.receiver, delivery.tag, is_sent=True)
            )
        for transfer in under_way:
            ranks.finish(transfer)


def _receive_all(
    ranks: Ranks,
    stored: StoredCheckpoint,
    incoming: Sequence[Delivery],
    durable: bool,
    problems: list[str],
) -> None:
    for delivery in incoming:
        arriving = _Arriving(ranks, delivery)
        try:
            file = stored_files(stored, [delivery.name])[delivery.name]
            _receive(stored, file, arriving, durable)
        except Exception as error:
            problems.append(_problem(delivery, error))
        arriving.drain()


def _receive(
    stored: StoredCheckpoint, file: StoredFile, arriving: _Arriving, durable: bool
) -> None:
    path = locations.join(stored.location, file.name)
    temporary = locations.temporary_beside(path)
    block_bytes = stored.manifest.block_bytes
    # One thread, which takes the bytes in their order.
    settings = WriteSettings(durable=durable, direct=False, block_bytes=block_bytes, num_threads=1)
    try:
        rewrite(temporary, file, arriving.read, settings)
        locations.rename(temporary, path, durable)
    finally:
        locations.remove_file(temporary)


class _Arriving:
    """The bytes of a file from another rank, in their order."""

    def __init__(self, ranks: Ranks, delivery: Delivery) -> None:
        self._ranks = ranks
        self._delivery = delivery
        self._num_asked = 0
        self._under_way: deque[Transfer] = deque()
        self._piece: Bytes = torch.empty(0, dtype=torch.uint8).numpy()
        self._ask()
        self._ask()

    def _ask(self) -> None:
        left = self._delivery.num_bytes - self._num_asked
        if left:
            piece = torch.empty(min(PIECE_BYTES, left), dtype=torch.uint8)
            self._num_asked += piece.nbytes
            self._under_way.append(
                self._ranks.start_transfer(
                    piece, self._delivery.sender, self._delivery.tag, is_sent=False
                )
            )

    def _next(self) -> None:
        transfer = self._under_way.popleft()
        self._ranks.finish(transfer)
        self._piece = transfer.memory.numpy()
        self._ask()

    def read(self, position: int, memory: Bytes) -> None:
        """Fill memory with the bytes that follow; `position` is where they begin."""
        del position
        filled = 0
        while filled < len(memory):
            if not len(self._piece):
                self._next()
            count = min(len(memory) - filled, len(self._piece))
            memory[filled : filled + count] = self._piece[:count]
            self._piece = self._piece[count:]
            filled += count

    def drain(self) -> None:
        """Receive the rest: the sender waits until all is received."""
        while self._under_way:
            self._next()


def _problem(delivery: Delivery, error: Exception) -> str:
    return f"{delivery.name} on host {os.uname().nodename}: {type(error).__name__}: {error}"
