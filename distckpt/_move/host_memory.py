"""Buffers in memory that the ranks of a machine share.

The memory has no name in any file system: other processes open it through its maker, nothing is
left behind when processes are killed, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import MoveOptions
from distckpt._io.shared_read import host_number
from distckpt._ranks.collectives import Ranks

NUM_BUFFERS = 4
"""Number of buffers of a rank: two for packed units, two for received ones."""
_PAGE = 4096
_HEADER_BYTES = _PAGE


class HostMemory(NamedTuple):
    """The buffers of the ranks that share memory with this one.

    Attributes:
        number: the same on all ranks, and different for each time that they make buffers.
        hosts: for each rank the number of its machine; ranks that cannot share memory have
            different ones.
        bucket_bytes: the size of a buffer.
        memory: all buffers of a rank, by rank.
    """

    number: int
    hosts: list[int]
    bucket_bytes: int
    memory: dict[int, torch.Tensor]

    def buffer(self, rank: int, is_landed: bool, wave: int) -> torch.Tensor:
        """Return a rank's buffer for a wave, for packed or received units."""
        start = _HEADER_BYTES + (2 * is_landed + wave % 2) * self.bucket_bytes
        return self.memory[rank][start : start + self.bucket_bytes]


def bucket_bytes_of(options: MoveOptions) -> int:
    """Return the buffer size that an option leaves room for."""
    return max(options.max_inflight_bytes // NUM_BUFFERS // _PAGE * _PAGE, _PAGE)


def share_memory(ranks: Ranks, bucket_bytes: int) -> HostMemory:
    """Make the buffers of all ranks.

    Collective operation: all ranks must call it. Memory is used only where something is written.
    """
    num_bytes = _HEADER_BYTES + NUM_BUFFERS * bucket_bytes
    if ranks.size == 1:
        return HostMemory(0, [0], bucket_bytes, {})
    with contextlib.ExitStack() as stack:
        with ranks.phase("make buffers"):
            descriptor = _new_file(num_bytes)
            if descriptor >= 0:
                stack.callback(os.close, descriptor)
            try:
                own = _mapped(descriptor, num_bytes)
            except (OSError, OverflowError, RuntimeError, TypeError) as error:
                raise CheckpointingException(
                    f"No memory for buffers of {num_bytes} bytes: set a smaller max_inflight_bytes."
                ) from error
        return _shared(ranks, bucket_bytes, descriptor, own)


def _shared(ranks: Ranks, bucket_bytes: int, descriptor: int, own: torch.Tensor) -> HostMemory:
    """Let the ranks of a machine open each other's memory."""
    token = int.from_bytes(os.urandom(7), "big")
    own[:8] = torch.from_numpy(np.array([token]).view(np.uint8))
    host = ranks.rank
    if descriptor >= 0:
        host = host_number()
    numbers = [host, os.getpid(), descriptor, token]
    table = ranks.all_gather_numbers(numbers).tolist()
    hosts = [row[0] for row in table]
    memory = {ranks.rank: own}
    with ranks.phase("share memory") as vote:
        for rank, (other, *place) in enumerate(table):
            if other == host and rank != ranks.rank:
                vote.number |= not _open(memory, rank, place, len(own))
    if vote.largest:
        # For example containers on one machine, which do not see each other's processes.
        hosts = list(range(ranks.size))
        memory = {ranks.rank: own}
    return HostMemory(table[0][-1], hosts, bucket_bytes, memory)


def _new_file(num_bytes: int) -> int:
    """Make a file in memory; return its descriptor, or -1."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        descriptor = os.memfd_create("distckpt")
    except OSError:
        return -1
    try:
        os.truncate(descriptor, num_bytes)
    except (OSError, OverflowError):
        os.close(descriptor)
        return -1
    return descriptor


def _mapped(descriptor: int, num_bytes: int) -> torch.Tensor:
    if descriptor < 0:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _open(memory: dict[int, torch.Tensor], rank: int, place: Sequence[int], num_bytes: int) -> bool:
    """Add the memory of another rank, and return whether that has worked."""
    pid, number, token = place
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        memory[rank] = _mapped(descriptor, num_bytes)
    except (OSError, ValueError):
        return False
    finally:
        os.close(descriptor)
    return int(memory[rank][:8].numpy().view(np.int64)[0]) == token
