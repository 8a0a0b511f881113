"""Archives of `torch.save`: zip files without compression.

Any entry can be read alone.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

_WINDOW_BYTES = 4096
"""Bytes read at once at either end of an archive.

The pickle of a tensor is at one end, the directory at the other.
"""
_LOCAL_HEADER_BYTES = 30
_ENCRYPTED = 1

ReadRange = Callable[[int, int], bytes]
"""A function that returns the bytes [start, stop) of an archive."""


class Archive:
    """A zip file without compression, of which only necessary parts are read."""

    def __init__(self, read_range: ReadRange, size: int) -> None:
        self._read_range = _windowed(read_range, size)
        self._size = size
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            entries = zipfile.ZipFile(_RangeFile(self._read_range, size)).infolist()
        except (
            zipfile.BadZipFile,
            zipfile.LargeZipFile,
            NotImplementedError,
            OSError,
            UnicodeDecodeError,
        ) as error:
            raise ValueError(f"not a complete archive of torch.save ({error!s:.200})") from error
        # All entries lie in one folder and are told apart by the rest of their names.
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        if "data.pkl" not in self._entries or len(self._entries) != len(entries):
            raise ValueError("not an archive of torch.save: it has no data.pkl")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError(
                "its entries take more room than it has: several are the same bytes, or compressed"
            )
        if "byteorder" in self._entries and self.read("byteorder") != b"little":
            raise ValueError("it was written by a machine that stores the highest byte first")

    def span(self, name: str) -> tuple[int, int]:
        """Return the begin and end of an entry's content."""
        if name in self._spans:
            return self._spans[name]
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"the archive has no entry {name!r:.100}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"the entry {name!r:.100} is compressed")
        if entry.flag_bits & _ENCRYPTED or entry.header_offset < 0:
            raise ValueError(f"the entry {name!r:.100} is encrypted, or begins before the archive")
        header = self._read_range(entry.header_offset, entry.header_offset + _LOCAL_HEADER_BYTES)
        if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\3\4":
            raise ValueError(f"the entry {name!r:.100} is not where the directory says")
        # The lengths of name and padding, lowest byte first.
        extra_bytes = header[26] + header[28] + 256 * (header[27] + header[29])
        start = entry.header_offset + _LOCAL_HEADER_BYTES + extra_bytes
        if start + entry.file_size > self._size:
            raise ValueError(f"the entry {name!r:.100} reaches past the end")
        self._spans[name] = start, start + entry.file_size
        return self._spans[name]

    def read(self, name: str) -> bytes:
        return self._read_range(*self.span(name))


def _windowed(read_range: ReadRange, size: int) -> ReadRange:
    """Read both ends of an archive now, and the rest on demand."""
    if size <= 2 * _WINDOW_BYTES:
        whole = read_range(0, size)
        return lambda start, stop: whole[start:stop]
    head = read_range(0, _WINDOW_BYTES)
    tail_start = size - _WINDOW_BYTES
    tail = read_range(tail_start, size)

    def read(start: int, stop: int) -> bytes:
        if stop <= len(head):
            return head[start:stop]
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return read_range(start, min(stop, size))

    return read


class _RangeFile:
    """A file for zipfile that reads only requested bytes."""

    def __init__(self, read_range: ReadRange, size: int) -> None:
        self._read_range = read_range
        self._size = size
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        count = size
        if size < 0:
            count = self._size
        stop = max(self._position, min(self._position + count, self._size))
        data = self._read_range(self._position, stop)
        self._position += len(data)
        return data
