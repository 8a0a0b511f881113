"""Files of a step that are written again, and verified meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.libc import read_into
from distckpt._base.memory import Bytes
from distckpt._format.checksum import Checksums, checksum
from distckpt._format.chunk_table import NO_CHECKSUMS
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.units import Span
from distckpt._io.write import NewFile, WriteSettings, write_files
from distckpt._operations.file_checks import (
    Blocks,
    Problem,
    check_files,
    check_units,
    describe_blocks,
    list_blocks,
    units_of_blocks,
)
from distckpt._storage.open_files import OpenFiles

Read = Callable[[int, Bytes], None]
"""Function that fills memory from a position of a file on."""


class StoredFile(NamedTuple):
    """A file of a step.

    Attributes:
        name: its name in the step.
        header_bytes: size of its header.
        header_checksum: checksum of its header.
        chunk_bytes: sizes of its chunks, which follow the header without gaps.
        checksums: checksums of the blocks of all chunks.
    """

    name: str
    header_bytes: int
    header_checksum: int
    chunk_bytes: Sequence[int]
    checksums: Checksums

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.header_bytes + sum(self.chunk_bytes)


def stored_files(stored: StoredCheckpoint, names: Sequence[str]) -> dict[str, StoredFile]:
    """Return some files of a step, in the order of its manifest.

    Checksums that have a file of their own are read from the step.
    """
    manifest = stored.manifest
    wanted = set(names)
    found = {}
    for file_ids in manifest.ranges_of_files():
        mine = [file_id for file_id in file_ids if manifest.files[file_id].name in wanted]
        if not mine:
            continue
        blocks = list_blocks(stored, file_ids, None, keeps_checksums=False)
        for file_id in mine:
            file = manifest.files[file_id]
            _, chunks = manifest.in_file_order(np.array([file_id]))
            found[file.name] = StoredFile(
                file.name,
                file.header_bytes,
                file.header_checksum,
                chunks.num_bytes.tolist(),
                blocks.expected[blocks.file_ids == file_id],
            )
    for file in manifest.files:
        # Files without chunks are all header.
        if file.name in wanted and file.name not in found:
            found[file.name] = StoredFile(
                file.name, file.num_bytes, file.header_checksum, [], NO_CHECKSUMS
            )
    return found


def rewrite(location: str, file: StoredFile, read: Read, settings: WriteSettings) -> None:
    """Write a file again, and compare its bytes with their checksums.

    Raises:
        CorruptCheckpointError: bytes are not the ones that were saved.
    """
    header = np.empty(file.header_bytes, np.uint8)
    read(0, header)
    if checksum(header) != file.header_checksum:
        raise _damaged(file, "its header")
    starts = np.cumsum([file.header_bytes, *file.chunk_bytes])

    def fill(unit: Sequence[Span], scratch: Bytes) -> list[Bytes]:
        # The spans of a unit follow one another in the file.
        num_bytes = sum(span.num_bytes for span in unit)
        read(int(starts[unit[0].chunk]) + unit[0].start, scratch[:num_bytes])
        return [scratch[:num_bytes]]

    new_file = NewFile(location, header.tobytes(), file.chunk_bytes, fill)
    actual = write_files([new_file], settings)
    if not np.array_equal(actual, file.checksums):
        raise _damaged(file, "a block")


def problems_of(stored: StoredCheckpoint, names: Collection[str]) -> list[Problem]:
    """Return the problems of some files; all their bytes are compared."""
    manifest = stored.manifest
    file_ids = [number for number, file in enumerate(manifest.files) if file.name in names]
    problems = check_files(stored, file_ids, None)
    with OpenFiles() as opened:
        stored = stored.with_files(opened)
        for some in manifest.ranges_of_files():
            blocks = list_blocks(stored, some, None, keeps_checksums=False)
            mine = np.isin(blocks.file_ids, file_ids)
            blocks = Blocks(
                blocks.chunks[mine],
                blocks.file_ids[mine],
                blocks.starts[mine],
                blocks.stops[mine],
                blocks.expected[mine],
            )
            units = units_of_blocks(blocks, stored.location)
            bad, _ = check_units(stored, blocks, units, None, lambda num_bytes: None)
            problems += describe_blocks(stored, blocks, bad)
    return problems


def _damaged(file: StoredFile, part: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file.name!r} on host {os.uname().nodename!r} differs from its checksums ({part}): it "
        "was damaged after the save."
    )


def reading(path: str) -> Read:
    """Return a function that reads a local file."""

    def read(position: int, memory: Bytes) -> None:
        # Opened each time: a rank may have more files than it may have open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_read = read_into(fd, [memory], position)
        finally:
            os.close(fd)
        if num_read < len(memory):
            raise CorruptCheckpointError(f"{path!r} ends at byte {position + num_read}.")

    return read
