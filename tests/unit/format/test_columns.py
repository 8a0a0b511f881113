"""Tables of columns as they are sent."""

from __future__ import annotations

import zlib

import pytest

from distckpt._format.columns import compress, decompress


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(8)), bytes(range(250)) * 5])
def test_what_is_compressed_comes_back(data):
    assert decompress(compress(data)) == data


def announced(num_bytes: int, content: bytes) -> bytes:
    return num_bytes.to_bytes(8, "big") + content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        announced(1 << 62, zlib.compress(bytes(64))),
        announced(8, zlib.compress(bytes(1 << 20))),
        announced(1024, zlib.compress(bytes(64))),
        announced(1024, zlib.compress(bytes(1024))[:-8]),
        announced(64, b"not zlib at all" * 4),
    ],
    ids=["empty", "short", "huge", "bomb", "too little", "cut off", "other bytes"],
)
def test_hostile_messages_are_refused(data):
    with pytest.raises(ValueError, match=r"^not compressed"):
        decompress(data)
