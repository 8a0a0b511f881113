"""Reading the header of a safetensors file at a path or URL."""

from __future__ import annotations

from dataclasses import dataclass

from distckpt._format.marker import file_size
from distckpt._format.safetensors_file import Entry, header_length, parse_header
from distckpt._storage import locations

_GUESSED_BYTES = 1 << 17
"""Read at first: most headers are no longer."""


@dataclass(frozen=True)
class Header:
    """The size of a file, and the size and content of its header."""

    num_bytes: int
    header_bytes: int
    metadata: dict[str, str]
    entries: list[Entry]


def read_header(path: str) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    size = file_size(path)
    head = locations.read_range(path, 0, min(size, _GUESSED_BYTES))
    header_bytes = header_length(head, size)
    if header_bytes > len(head):
        head += locations.read_range(path, len(head), header_bytes)
    return Header(size, header_bytes, *parse_header(head[:header_bytes], size))
