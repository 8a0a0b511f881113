"""Reading the header of a safetensors file at a path or URL."""

from __future__ import annotations

from dataclasses import dataclass

from distckpt._format.checksum import checksum
from distckpt._format.marker import file_size
from distckpt._format.safetensors_file import Entry, header_length, parse_header
from distckpt._storage import locations

_GUESSED_BYTES = 1 << 17
"""Size of the first read: most headers are no longer."""


@dataclass(frozen=True)
class Header:
    """Sizes of a file and its header, and the header's content."""

    num_bytes: int
    header_bytes: int
    checksum: int
    metadata: dict[str, str]
    entries: list[Entry]


def read_header(path: str) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    size, head = read_header_bytes(path)
    return Header(size, len(head), checksum(head), *parse_header(head, size))


def read_header_bytes(path: str) -> tuple[int, bytes]:
    """Return a safetensors file's size, and its header as stored.

    Raises:
        ValueError: its length is damaged.
    """
    size = file_size(path)
    head = locations.read_range(path, 0, min(size, _GUESSED_BYTES))
    header_bytes = header_length(head, size)
    if header_bytes > len(head):
        head += locations.read_range(path, len(head), header_bytes)
    return size, head[:header_bytes]
