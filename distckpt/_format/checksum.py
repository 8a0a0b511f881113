"""Checksums of chunks."""

from __future__ import annotations

import xxhash

from distckpt._base.memory import Bytes

BLOCK_BYTES = 1 << 20
"""Chunks are checksummed in blocks of this size."""


def checksum(data: bytes | memoryview | Bytes) -> int:
    """Return the xxh3-64 digest of some bytes."""
    return xxhash.xxh3_64_intdigest(data)
