"""Checksums of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import xxhash

from distckpt._base.memory import Bytes

BLOCK_BYTES = 256 << 10
"""New chunks are checksummed in blocks of this size: large enough to keep manifests small, and
small enough to read a whole block where only a part of it is wanted.
"""
CHECKSUM_BYTES = 8

checksum: Callable[[bytes | memoryview | Bytes], int] = xxhash.xxh3_64_intdigest
"""Returns the xxh3-64 digest of some bytes."""


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
    run, position, end = _NO_BYTES, 0, 0
    for size in sizes:
        while size:
            missing = min(size, block_bytes)
            size -= missing
            if position == end:
                run = next(following)
                position, end = 0, len(run)
            if position + missing <= end:
                digests.append(checksum(run[position : position + missing]))
                position += missing
                continue
            hasher = xxhash.xxh3_64()
            while missing:
                if position == end:
                    run = next(following)
                    position, end = 0, len(run)
                piece = run[position : position + missing]
                hasher.update(piece)
                missing -= len(piece)
                position += len(piece)
            digests.append(hasher.intdigest())
    return digests


_NO_BYTES: Bytes = np.empty(0, np.uint8)
