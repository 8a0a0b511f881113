"""Checksums of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from distckpt._base.memory import Bytes

BLOCK_BYTES = 256 << 10
"""Size of the blocks of new chunks' checksums. It is large enough to keep manifests small, and
small enough to read a whole block where only a part of it is requested.
"""
CHECKSUM_BYTES = 8
Checksums: TypeAlias = npt.NDArray[np.uint64]

checksum: Callable[[bytes | memoryview | Bytes], int] = xxhash.xxh3_64_intdigest
"""Return the xxh3-64 digest of some bytes."""


def block_checksums(
    sizes: Sequence[int],
    runs: Iterable[Bytes],
    block_bytes: int,
) -> list[int]:
    """Return the checksums of the blocks of consecutive byte strings.

    The strings follow one another in `runs`, and `sizes` are their sizes; each begins a block. A
    run is asked for when the ones before it are hashed.
    """
    digests = []
    following = iter(runs)
    run = _NO_BYTES
    position = 0
    end = 0
    for size in sizes:
        while size:
            missing = min(size, block_bytes)
            size -= missing
            if position == end:
                run = next(following)
                position = 0
                end = len(run)
            if position + missing <= end:
                digests.append(checksum(run[position : position + missing]))
                position += missing
                continue
            hasher = xxhash.xxh3_64()
            while missing:
                if position == end:
                    run = next(following)
                    position = 0
                    end = len(run)
                piece = run[position : position + missing]
                hasher.update(piece)
                missing -= len(piece)
                position += len(piece)
            digests.append(hasher.intdigest())
    return digests


_NO_BYTES: Bytes = np.empty(0, np.uint8)
