"""Checks of a checkpoint's files: sizes, headers and checksum blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.libc import read_into
from distckpt._base.memory import Bytes, bounce_buffer
from distckpt._base.threads import NUM_REQUESTS, Pool, run_threads
from distckpt._format.checksum import CHECKSUM_BYTES, Checksums, checksum
from distckpt._format.chunk_table import NO_CHECKSUMS
from distckpt._format.columns import joined_ranges
from distckpt._format.manifest import Manifest
from distckpt._format.marker import file_size
from distckpt._format.stored_checkpoint import StoredCheckpoint, read_checksums
from distckpt._geometry.region import IntArray
from distckpt._io.read import PIECE_BYTES, num_threads_at, unit_bytes_at
from distckpt._storage import locations, object_store

_DISK_THREADS = 4


@dataclass(frozen=True)
class Problem:
    """A deviation of a checkpoint from its save.

    Attributes:
        file: its location.
        message: description of the problem.
        key: key of the tensor or object, None when a whole file is concerned.
        region: region of the chunk in the global tensor, `[start:stop, ...]` along each axis.
        first_byte: position in the file at which the damage begins, as far as it can be narrowed
            down (to a checksum block).
        stop_byte: position at which it ends.
    """

    file: str
    message: str
    key: str | None = None
    region: str | None = None
    first_byte: int | None = None
    stop_byte: int | None = None


def check_files(
    stored: StoredCheckpoint, file_ids: Sequence[int], num_threads: int | None
) -> list[Problem]:
    """Check that files are there, with their written sizes and headers."""
    # Opening files and reading their headers is mostly waiting, also for a disk.
    num_threads = num_threads or NUM_REQUESTS
    # An interrupt ends the iteration, which cancels the files that have not begun.
    with Pool(num_threads, thread_name_prefix="distckpt-verify") as pool:
        checked = list(pool.map(partial(_check_file, stored), file_ids))
    return [problem for problem in checked if problem is not None]


def _check_file(stored: StoredCheckpoint, file_id: int) -> Problem | None:
    expected = stored.manifest.files[file_id]
    path = stored.path_of_file(file_id)
    if stored.root != stored.location:
        # Its size was found when it was opened; it has no header.
        return None
    try:
        num_bytes = file_size(path)
        if num_bytes != expected.num_bytes:
            return _wrong_size(path, num_bytes, expected.num_bytes)
        header = locations.read_range(path, 0, expected.header_bytes)
    except FileNotFoundError:
        return Problem(path, "the file is missing")
    except CorruptCheckpointError as error:
        return Problem(path, str(error))
    except OSError as error:
        return _unreadable(path, error)
    compares = stored.manifest.has_checksums and expected.header_bytes
    if compares and checksum(header) != expected.header_checksum:
        is_all_header = expected.header_bytes == expected.num_bytes
        text = "checksum mismatch" if is_all_header else "checksum mismatch in the header"
        return Problem(path, text, first_byte=0, stop_byte=expected.header_bytes)
    return None


def _unreadable(path: str, error: OSError) -> Problem:
    return Problem(path, f"cannot be read: {error.strerror or error}")


def default_threads(location: str) -> int:
    """Return the number of threads that read whole checkpoints."""
    # Verified files are mostly not in memory: four threads read them faster than one per core.
    return max(_DISK_THREADS, num_threads_at(location))


def _wrong_size(path: str, num_bytes: int, expected: int) -> Problem:
    how = "cut off" if num_bytes < expected else "extended or replaced"
    message = f"the file was {how}: it has {num_bytes} bytes, {expected} were saved"
    return Problem(path, message, first_byte=min(num_bytes, expected), stop_byte=expected)


# --- Blocks ---------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """The checksum blocks of some files, in file order, as columns.

    `expected` is empty without checksums. `unread` are files of checksums that cannot be read,
    whose blocks are left out.
    """

    chunks: IntArray
    file_ids: IntArray
    starts: IntArray
    stops: IntArray
    expected: npt.NDArray[np.uint64]
    unread: Sequence[Problem] = ()


def list_blocks(
    stored: StoredCheckpoint, file_ids: range, num_threads: int | None, *, keeps_checksums: bool
) -> Blocks:
    """Return the blocks of some files whose checksums can be read.

    Args:
        stored: the checkpoint.
        file_ids: one of its ranges of files.
        num_threads: number of threads that read files of checksums.
        keeps_checksums: whether the manifest keeps the checksums for later reads.
    """
    manifest = stored.manifest
    block_bytes = stored.manifest.block_bytes
    rows, chunks = manifest.in_file_order(np.array(file_ids))
    counts = -(-chunks.num_bytes // block_bytes)
    places = np.repeat(np.arange(len(rows)), counts)
    numbers = joined_ranges(np.zeros_like(counts), counts)
    starts = chunks.first_bytes[places] + numbers * block_bytes
    stops = starts + np.minimum(chunks.num_bytes[places] - numbers * block_bytes, block_bytes)
    blocks = Blocks(rows[places], chunks.file_ids[places], starts, stops, NO_CHECKSUMS)
    if len(manifest.checksum_files):
        holders = []
        for holder in manifest.checksum_files.tolist():
            if holder in file_ids:
                holders.append(holder)
        known, unread = _readable_checksums(stored, holders, num_threads)
        if keeps_checksums:
            manifest.fetched.contents.update(known)
        return _with_known(manifest, blocks, holders, known)._replace(unread=unread)
    if manifest.has_checksums:
        first_blocks = manifest.first_blocks[blocks.chunks]
        blocks = blocks._replace(expected=manifest.block_checksums[first_blocks + numbers])
    return blocks


def _readable_checksums(
    stored: StoredCheckpoint, holders: Sequence[int], num_threads: int | None
) -> tuple[dict[int, Checksums], list[Problem]]:
    """Return readable files' checksums, and problems of all other files."""
    fetched = stored.manifest.fetched.contents
    known: dict[int, Checksums] = {}
    missing = []
    for holder in holders:
        if holder in fetched:
            known[holder] = fetched[holder]
        else:
            missing.append(holder)
    unread: list[Problem] = []

    def read(holder: int) -> None:
        try:
            known[holder] = read_checksums(stored, holder)
        except CorruptCheckpointError as error:
            unread.append(Problem(stored.path_of_file(holder), str(error)))
        except OSError as error:
            unread.append(_unreadable(stored.path_of_file(holder), error))

    run_threads(read, missing, num_threads or default_threads(stored.location))
    return known, unread


def not_in(problems: Iterable[Problem], unread: Iterable[Problem]) -> list[Problem]:
    """Return the unreadable files that have no problem yet."""
    reported = {problem.file for problem in problems}
    new_problems = []
    for problem in unread:
        if problem.file not in reported:
            new_problems.append(problem)
    return new_problems


def _with_known(
    manifest: Manifest, blocks: Blocks, holders: Sequence[int], known: Mapping[int, Checksums]
) -> Blocks:
    """Return the blocks whose checksums are known, with their checksums.

    `holders` are the files that hold the checksums of all blocks.
    """
    counts = [manifest.files[holder].num_bytes // CHECKSUM_BYTES for holder in holders]
    is_known = np.repeat([holder in known for holder in holders], counts)
    expected = np.concatenate([NO_CHECKSUMS, *(known[holder] for holder in sorted(known))])
    columns = zip(Blocks._fields, blocks[:4], strict=False)
    return Blocks(**{name: column[is_known] for name, column in columns}, expected=expected)


class BadBlock(NamedTuple):
    """The number of a damaged block, and a message about it."""

    number: int
    message: str


def units_of_blocks(blocks: Blocks, location: str) -> Iterator[range]:
    """Cut blocks into ranges of one file for threads to read.

    The blocks of a range are near each other.
    """
    return cut(blocks, range(len(blocks.starts)), unit_bytes_at(location))


def cut(blocks: Blocks, numbers: range, max_bytes: int) -> Iterator[range]:
    """Cut a range of blocks into ranges of one file.

    Each spans at most `max_bytes`, or is one block.
    """
    within = slice(numbers.start, numbers.stop)
    file_ids = blocks.file_ids[within].tolist()
    starts = blocks.starts[within].tolist()
    stops = blocks.stops[within].tolist()
    first = 0
    for index in range(1, len(numbers) + 1):
        ends = (
            index == len(numbers)
            or file_ids[index] != file_ids[first]
            or stops[index] - starts[first] > max_bytes
        )
        if ends:
            yield numbers[first:index]
            first = index


def check_units(
    stored: StoredCheckpoint,
    blocks: Blocks,
    units: Iterable[range],
    num_threads: int | None,
    add_bytes: Callable[[int], None],
) -> tuple[list[BadBlock], int]:
    """Compare the checksums of ranges of blocks.

    Return the bad blocks in order, and the bytes read.
    """
    bad: list[BadBlock] = []
    num_read: list[int] = []

    def check(unit: range) -> None:
        bad_blocks, num_of_unit = _check_unit(stored, blocks, unit)
        bad.extend(bad_blocks)
        num_read.append(num_of_unit)
        add_bytes(num_of_unit)

    num_threads = num_threads or default_threads(stored.location)
    # Threads that read far apart would decode the same chunks several times.
    run_threads(check, units, num_threads, in_stretches=locations.is_local(stored.root))
    return sorted(bad), sum(num_read)


def _check_unit(
    stored: StoredCheckpoint, blocks: Blocks, unit: range
) -> tuple[list[BadBlock], int]:
    """Read some blocks of a file; return the bad ones and the bytes read."""
    bad: list[BadBlock] = []
    num_read = 0
    try:
        for numbers, data in read_blocks(stored, blocks, unit):
            bad += _compare(blocks, numbers, data)
            num_read += len(data)
    except (CorruptCheckpointError, OSError) as error:
        is_of_file = isinstance(error, CorruptCheckpointError | FileNotFoundError)
        if is_of_file and stored.root == stored.location:
            # Problems of the file are reported already.
            return bad, num_read
        if len(unit) == 1:
            reason = getattr(error, "strerror", None) or error
            return [BadBlock(unit[0], f"a chunk cannot be read: {reason}")], 0
        # One by one, to find the blocks that cannot be read.
        bad = []
        num_read = 0
        for number in unit:
            bad_blocks, num_of_block = _check_unit(stored, blocks, range(number, number + 1))
            bad += bad_blocks
            num_read += num_of_block
    return bad, num_read


def _compare(blocks: Blocks, numbers: range, data: Bytes) -> list[BadBlock]:
    """Compare consecutive blocks with their checksums.

    `data` begins with the first block.
    """
    within = slice(numbers.start, numbers.stop)
    starts = (blocks.starts[within] - blocks.starts[numbers.start]).tolist()
    stops = (blocks.stops[within] - blocks.starts[numbers.start]).tolist()
    # None without checksums.
    expected = blocks.expected[within].tolist() or [None] * len(numbers)
    bad = []
    for number, start, stop, digest in zip(numbers, starts, stops, expected, strict=True):
        if stop > len(data):
            bad.append(BadBlock(number, "a chunk was cut off"))
        elif digest is not None and checksum(data[start:stop]) != digest:
            bad.append(BadBlock(number, "checksum mismatch in a chunk"))
    return bad


def describe_blocks(
    stored: StoredCheckpoint,
    blocks: Blocks,
    bad: Sequence[BadBlock],
) -> list[Problem]:
    """Describe bad chunks, with one problem for consecutive blocks of a chunk."""
    problems: list[Problem] = []
    for number, message in bad:
        chunk = int(blocks.chunks[number])
        start = int(blocks.starts[number])
        stop = int(blocks.stops[number])
        region = str(stored.manifest.chunk_region(chunk))
        problem = Problem(stored.path_of(chunk), message, stored.key_of(chunk), region, start, stop)
        last = problems[-1] if problems else None
        if last and last == replace(problem, first_byte=last.first_byte, stop_byte=start):
            problems[-1] = replace(problem, first_byte=last.first_byte)
        else:
            problems.append(problem)
    return problems


def read_blocks(
    stored: StoredCheckpoint, blocks: Blocks, unit: range
) -> Iterator[tuple[range, Bytes]]:
    """Yield the blocks of a unit with their bytes.

    There are fewer bytes when the file is shorter. A local file is read few blocks at a time into
    the thread's scratch memory, which stays in the cache.
    """
    path = stored.path_of_file(int(blocks.file_ids[unit[0]]))
    assert stored.files is not None
    if not locations.is_local(path):
        start, stop = _place_of(blocks, unit)
        yield unit, object_store.at(path, stored.files.decoded).read_range(start, stop - start)
        return
    file_size(path)  # raises where this is no file
    with stored.files.open(path) as fd:
        for numbers in cut(blocks, unit, PIECE_BYTES):
            start, stop = _place_of(blocks, numbers)
            buffer = bounce_buffer("read", stop - start)
            yield numbers, buffer[: read_into(fd, [buffer], start)]


def _place_of(blocks: Blocks, numbers: range) -> tuple[int, int]:
    """Return the byte range of some blocks in their file."""
    return int(blocks.starts[numbers[0]]), int(blocks.stops[numbers[-1]])
