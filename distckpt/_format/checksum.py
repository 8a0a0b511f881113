"""Checksums of chunks."""

from __future__ import annotations

from collections.abc import Sequence

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
    runs: Sequence[Bytes],
    block_bytes: int,
) -> list[int]:
    """Return the checksums of the blocks of byte strings that follow one another in `runs`.

    `sizes` are those of the byte strings; each begins a block.
    """
    digests = []
    index = position = 0
    for size in sizes:
        for start in range(0, size, block_bytes):
            missing = min(block_bytes, size - start)
            if position == len(runs[index]):
                index, position = index + 1, 0
            if len(runs[index]) - position >= missing:
                digests.append(checksum(runs[index][position : position + missing]))
                position += missing
                continue
            hasher = xxhash.xxh3_64()
            while missing:
                piece = runs[index][position : position + missing]
                hasher.update(piece)
                missing -= len(piece)
                position += len(piece)
                if missing:
                    index, position = index + 1, 0
            digests.append(hasher.intdigest())
    return digests
