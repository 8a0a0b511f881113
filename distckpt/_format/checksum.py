"""Checksums of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from distckpt._base.memory import Bytes

BLOCK_BYTES = 256 << 10
"""New chunks are checksummed in blocks of this size: large enough to keep manifests small, and
small enough to read a whole block where only a part of it is wanted.
"""


def checksum(data: bytes | memoryview | Bytes) -> int:
    """Return the xxh3-64 digest of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def block_checksums(
    sizes: Sequence[int],
    runs: Iterable[Bytes],
    block_bytes: int,
) -> list[int]:
    """Return the checksums of the blocks of byte strings that follow one another in `runs`.

    `sizes` are those of the byte strings; each begins a block. A run is asked for when the ones
    before it are hashed.
    """
    digests = []
    following = iter(runs)
    run, position = _NO_BYTES, 0
    for size in sizes:
        for start in range(0, size, block_bytes):
            missing = min(block_bytes, size - start)
            if position == len(run):
                run, position = next(following), 0
            if len(run) - position >= missing:
                digests.append(checksum(run[position : position + missing]))
                position += missing
                continue
            hasher = xxhash.xxh3_64()
            while missing:
                if position == len(run):
                    run, position = next(following), 0
                piece = run[position : position + missing]
                hasher.update(piece)
                missing -= len(piece)
                position += len(piece)
            digests.append(hasher.intdigest())
    return digests


_NO_BYTES: Bytes = np.empty(0, np.uint8)
