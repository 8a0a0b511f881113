"""Sealing: checksums for a checkpoint that another program wrote."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import (
    CheckpointExistsError,
    CheckpointingException,
)
from distckpt._base.interrupts import operation
from distckpt._base.messages import check_count
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._base.version import __version__
from distckpt._checkpoint.consistent_read import changed_file, check_files, seconds_until_settled
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._foreign.seals import (
    Seal,
    changed,
    description_of,
    holds_no_pieces,
    home_of,
    list_files,
    read_seal,
)
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.foreign_formats import SEAL_NAME
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import CHECKSUMS_SUFFIX, ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.file_checks import (
    default_threads,
    list_blocks,
    read_blocks,
    units_of_blocks,
)
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.file_state import FileState, written_to
from distckpt._storage.open_files import OpenFiles

_MAX_PARTS = 40
"""Folders that a name may have, and the file, see `manifest_reading`."""


@dataclass(frozen=True)
class SealReport:
    """The outcome of `seal`.

    Attributes:
        location: the directory that has the seal.
        num_files: number of files that it covers.
        num_bytes: size of these files.
        is_new: False if the directory had a seal already, and nothing has changed since.
        seconds: duration of the call.
    """

    location: str
    num_files: int
    num_bytes: int
    is_new: bool
    seconds: float


@operation
def seal(
    checkpoint_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> SealReport:
    """Store the checksums of another program's checkpoint beside it.

        distckpt.seal("outputs/step_100")  # of torch.distributed.checkpoint, for example
        assert distckpt.verify("outputs/step_100").has_checksums

    Every later `load`, `open`, `verify` and so on compares the bytes that it reads with them. No
    other file changes, and the program that wrote them reads the directory as before. All files are
    read once. To take the seal away, remove the file `distckpt.seal`.

    Any process may call, alone.

    Args:
        checkpoint_dir: a path or URL of a directory that another program wrote.
        overwrite: replace a seal whose files have changed since.
        num_threads: number of threads that read, see `verify`.
        progress: called with the bytes read so far and the bytes to read, by one thread at a time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointExistsError: it was sealed before, and has changed since.
        CorruptCheckpointError: its seal is damaged.
        CheckpointingException: it is of distckpt and has checksums, or a program writes to it.
    """
    started = time.perf_counter()
    if num_threads is not None:
        check_count("num_threads", num_threads)
    location = locations.normalize(checkpoint_dir)
    stored = open_undisturbed(Ranks.alone(), location, verify=False)
    origin = stored.manifest.origin
    if origin is None:
        raise CheckpointingException(
            f"{location!r} is a checkpoint of distckpt, which has checksums already: compare it "
            f"with them by `distckpt verify {location}`."
        )
    if origin.get("is_file"):
        raise CheckpointingException(
            f"{location!r} is a file: seal its directory, `distckpt seal "
            f"{locations.split(location)[0]}`. The file is then compared, too, when it is read."
        )
    home = home_of(location, stored.manifest)[0]
    made = None if overwrite else read_seal(home)
    is_new = made is None
    if made is None:
        made = _make(stored, num_threads, progress)
        if overwrite:
            locations.write_bytes(made.path, made.to_bytes())
        elif not locations.create_bytes(made.path, made.to_bytes()):
            raise CheckpointExistsError(f"{home!r} was sealed by another process meanwhile.")
    else:
        _check_is_same(made, num_threads, progress)
    sizes = [file.num_bytes for file in made.manifest.files]
    return SealReport(home, len(sizes), sum(sizes), is_new, time.perf_counter() - started)


def _check_is_same(made: Seal, num_threads: int | None, progress: Progress | None) -> None:
    counter = ProgressCounter(progress, int(made.manifest.sums.bytes_in_files.sum()))
    rows = np.arange(len(made.manifest.key_ids))
    problems = made.changed_files() or made.changed_blocks(rows, num_threads, counter.add)[0]
    if problems:
        raise CheckpointExistsError(str(changed(made, problems)))


def _make(stored: StoredCheckpoint, num_threads: int | None, progress: Progress | None) -> Seal:
    """Read all files of a checkpoint, and return their seal."""
    try:
        return _read_and_seal(stored, num_threads, progress)
    except OSError as error:
        raise CheckpointingException(
            f"{error.filename or stored.location!r} cannot be sealed: {error.strerror or error}. "
            "Remove it from there if it is no file, or make it readable, and seal then."
        ) from error


def _read_and_seal(
    stored: StoredCheckpoint, num_threads: int | None, progress: Progress | None
) -> Seal:
    home, prefix = home_of(stored.location, stored.manifest)
    read = None
    if not holds_no_pieces(stored.manifest):
        read = {file.name[len(prefix) :] for file in stored.manifest.files}
    states: dict[str, FileState] = {}
    files = _describe_files(home, read, states)
    time.sleep(seconds_until_settled(states.values(), time.time()))
    files = _describe_files(home, read, states)
    unhashed = _manifest_of_files(stored, files, prefix)
    with OpenFiles() as open_files:
        place = StoredCheckpoint(home, unhashed, files=open_files)
        checksums = _checksums(place, num_threads, progress)
    check_files(stored)
    written = changed_file(home, states)
    if written is None and [file.name for file in files] != sorted(list_files(home, read)):
        written = home
    if written is not None:
        raise written_to(written)
    chunks = unhashed.all_chunks._replace(block_checksums=checksums)
    return Seal(home, unhashed.replaced(chunks=chunks, has_checksums=True))


def _describe_files(
    home: str, read: set[str] | None, states: dict[str, FileState]
) -> list[ShardFile]:
    """Return all files to seal, and note their states."""
    known = locations.listed_states(home)
    files = []
    for name in sorted(list_files(home, read)):
        if name.endswith(CHECKSUMS_SUFFIX) or not locations.is_inner_name(name, _MAX_PARTS):
            raise CheckpointingException(
                f"{home!r} has a file {name!r:.300}, and {SEAL_NAME} takes no name with a "
                f"backslash, or the ending {CHECKSUMS_SUFFIX}: move it elsewhere, and seal then."
            )
        path = locations.join(home, *name.split("/"))
        # Of links that lead nowhere and of pipes this raises the reason.
        states[path] = known.get(path) or locations.file_state(path)
        files.append(ShardFile(name, states[path].num_bytes, 0, 0))
    return files


def _manifest_of_files(stored: StoredCheckpoint, files: list[ShardFile], prefix: str) -> Manifest:
    """Return the manifest of a seal, see `Seal`, without checksums."""
    num_files = len(files)
    names = [file.name for file in files]
    numbers = dict(zip(names, range(num_files), strict=True))
    pieces = stored.manifest.all_chunks
    if holds_no_pieces(stored.manifest):
        pieces = ChunkTable.empty()
    ids = np.array([numbers[file.name[len(prefix) :]] for file in pieces.files], np.int64)
    rows = np.flatnonzero(pieces.num_bytes)
    starts = pieces.first_bytes[rows]
    stops = starts + pieces.num_bytes[rows]
    places = np.unique(np.stack([ids[pieces.file_ids[rows]], starts, stops]), axis=1)
    # Between two pieces, before the first one of each file, and behind the last.
    file_ids = np.concatenate([np.arange(num_files), places[0]])
    begins = np.concatenate([np.zeros(num_files, np.int64), places[2]])
    ends = np.concatenate([np.array([file.num_bytes for file in files], np.int64), places[1]])
    begins = begins[np.lexsort((begins, file_ids))]
    ends = ends[np.lexsort((ends, file_ids))]
    if (ends < begins).any():
        raise CheckpointingException(f"The reader of {stored.location!r} describes bytes twice.")
    rest = np.stack([np.sort(file_ids), begins, ends])[:, ends > begins]
    all_ids, first_bytes, last_bytes = np.concatenate([rest, places], axis=1)
    table = ChunkTable.empty()._replace(
        files=files,
        key_ids=np.concatenate([rest[0], places[0] + num_files]),
        file_ids=all_ids,
        first_bytes=first_bytes,
        num_bytes=last_bytes - first_bytes,
        offsets=first_bytes[:, None],
        shapes=(last_bytes - first_bytes)[:, None],
    )
    return Manifest(
        [*names, *(f"{name}/" for name in names)],
        ["U8"] * (2 * num_files),
        [(file.num_bytes,) for file in files * 2],
        table,
        {},
        has_checksums=False,
        origin={
            "format": (stored.manifest.origin or {})["format"],
            "description": description_of(stored.manifest),
            "version": __version__,
        },
    )


def _checksums(
    stored: StoredCheckpoint, num_threads: int | None, progress: Progress | None
) -> npt.NDArray[np.uint64]:
    """Return the checksums of all blocks, in the order of the chunks."""
    all_files = range(len(stored.manifest.files))
    blocks = list_blocks(stored, all_files, num_threads, keeps_checksums=False)
    digests = np.zeros(len(blocks.starts), np.uint64)
    counter = ProgressCounter(progress, int(stored.manifest.sums.bytes_in_files.sum()))

    def compute(unit: range) -> None:
        for numbers, data in read_blocks(stored, blocks, unit):
            first = blocks.starts[numbers.start]
            for number in numbers:
                # Fewer bytes where a file was cut off, which its state tells later.
                block = data[blocks.starts[number] - first : blocks.stops[number] - first]
                digests[number] = checksum(block)
            counter.add(len(data))

    units = units_of_blocks(blocks, stored.location)
    threads = num_threads or default_threads(stored.location)
    run_threads(compute, units, threads, in_stretches=locations.is_local(stored.location))
    # Blocks are in the order of files.
    return digests[np.argsort(blocks.chunks, kind="stable")]
