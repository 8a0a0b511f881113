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
from distckpt._checkpoint.consistent_read import check_files
from distckpt._checkpoint.file_states import changed_file, seconds_until_settled, states_of
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
from distckpt._storage.file_state import written_to
from distckpt._storage.open_files import OpenFiles

_MAX_PARTS = 40
"""Folders that a name may have, and the file."""


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
    add_bytes = ProgressCounter(progress, int(made.manifest.sums.bytes_in_files.sum())).add
    rows = np.arange(len(made.manifest.key_ids))
    problems = made.changed_files() or made.changed_blocks(rows, num_threads, add_bytes)[0]
    if problems:
        raise CheckpointExistsError(str(changed(made, problems)))


def _make(stored: StoredCheckpoint, num_threads: int | None, progress: Progress | None) -> Seal:
    """Read all files of a checkpoint, and return their seal."""
    home, prefix = home_of(stored.location, stored.manifest)
    read = None
    if not holds_no_pieces(stored.manifest):
        read = {file.name[len(prefix) :] for file in stored.manifest.files}
    names = _names_at(home, read)
    paths = [locations.join(home, *name.split("/")) for name in names]
    states = states_of(paths, locations.listed_states(home))
    time.sleep(seconds_until_settled(states.values(), time.time()))
    states = states_of(paths, locations.listed_states(home))
    files = []
    for name, path in zip(names, paths, strict=True):
        _check_name(home, name)
        # Links that lead nowhere, pipes and directories have no state: this raises the reason.
        size = states[path].num_bytes if path in states else locations.file_size(path)
        files.append(ShardFile(name, size, 0, 0))
    unhashed = _manifest_of_files(stored, files, prefix)
    checksums = _checksums(StoredCheckpoint(home, unhashed), num_threads, progress)
    check_files(stored)
    written = changed_file(home, states)
    if written is None and names != _names_at(home, read):
        written = home
    if written is not None:
        raise written_to(written)
    chunks = unhashed.all_chunks._replace(block_checksums=checksums)
    return Seal(home, unhashed.replaced(chunks=chunks, has_checksums=True))


def _names_at(home: str, read: set[str] | None) -> list[str]:
    """Return the names of all files to seal."""
    return sorted({*list_files(home, read), *(read or ())})


def _check_name(home: str, name: str) -> None:
    if name.endswith(CHECKSUMS_SUFFIX) or not locations.is_inner_name(name, _MAX_PARTS):
        raise CheckpointingException(
            f"{home!r} has a file {name!r:.300}, and {SEAL_NAME} takes no name with a backslash, "
            f"more than {_MAX_PARTS - 1} folders, or the ending {CHECKSUMS_SUFFIX}: move it "
            "elsewhere, and seal then."
        )


def _manifest_of_files(stored: StoredCheckpoint, files: list[ShardFile], prefix: str) -> Manifest:
    """Return the manifest of a seal, see `Seal`, without checksums."""
    num_files = len(files)
    sizes = np.array([file.num_bytes for file in files], np.int64)
    names = [file.name for file in files]
    numbers = dict(zip(names, range(num_files), strict=True))
    pieces = stored.manifest.all_chunks
    if holds_no_pieces(stored.manifest):
        pieces = ChunkTable.empty()
    ids = np.array([numbers[file.name[len(prefix) :]] for file in pieces.files], np.int64)
    rows = np.flatnonzero(pieces.num_bytes)
    columns = (ids[pieces.file_ids[rows]], pieces.first_bytes[rows], pieces.num_bytes[rows])
    file_ids, starts, lengths = np.unique(np.stack(columns), axis=1)
    stops = starts + lengths
    # Between two pieces, before the first one of each file, and behind the last.
    all_ids = np.concatenate([np.arange(num_files), file_ids])
    ends = np.concatenate([np.zeros(num_files, np.int64), stops])
    order = np.lexsort((ends, all_ids))
    rest_ids = all_ids[order]
    rest_starts = ends[order]
    rest_stops = sizes[rest_ids].copy()
    is_before = np.flatnonzero(rest_ids[1:] == rest_ids[:-1])
    rest_stops[is_before] = starts
    if (rest_stops < rest_starts).any():
        raise CheckpointingException(f"The reader of {stored.location!r} describes bytes twice.")
    is_rest = rest_stops > rest_starts
    rest = (rest_ids[is_rest], rest_starts[is_rest], rest_stops[is_rest])
    both = [np.concatenate(pair) for pair in zip(rest, (file_ids, starts, stops), strict=True)]
    table = ChunkTable.empty()._replace(
        files=files,
        key_ids=np.concatenate([rest[0], file_ids + num_files]),
        file_ids=both[0],
        first_bytes=both[1],
        num_bytes=both[2] - both[1],
        offsets=both[1][:, None],
        shapes=(both[2] - both[1])[:, None],
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
    manifest = stored.manifest
    all_files = range(len(manifest.files))
    blocks = list_blocks(stored, all_files, num_threads, keeps_checksums=False)
    digests = np.zeros(len(blocks.starts), np.uint64)
    counter = ProgressCounter(progress, int(manifest.sums.bytes_in_files.sum()))
    with OpenFiles() as files:
        opened = stored.with_files(files)

        def compute(unit: range) -> None:
            for numbers, data in read_blocks(opened, blocks, unit):
                first = blocks.starts[numbers.start]
                for number in numbers:
                    start = int(blocks.starts[number] - first)
                    stop = int(blocks.stops[number] - first)
                    if stop > len(data):
                        raise written_to(opened.path_of_file(int(blocks.file_ids[number])))
                    digests[number] = checksum(data[start:stop])
                counter.add(len(data))

        threads = num_threads or default_threads(stored.location)
        is_local = locations.is_local(stored.location)
        units = units_of_blocks(blocks, stored.location)
        run_threads(compute, units, threads, in_stretches=is_local)
    # Blocks are in the order of files.
    return digests[np.argsort(blocks.chunks, kind="stable")]
