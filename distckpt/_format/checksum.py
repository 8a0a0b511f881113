"""Checksums of chunks."""

from __future__ import annotations

import xxhash

from distckpt._base.memory import Bytes

BLOCK_BYTES = 256 << 10
"""New chunks are checksummed in blocks of this size: large enough for manifests to stay small, small enough for blocks
to be read whole where only a part of them is wanted."""


def checksum(data: bytes | memoryview | Bytes) -> int:
    """Return the xxh3-64 digest of some bytes."""
    return xxhash.xxh3_64_intdigest(data)
