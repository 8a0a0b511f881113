"""Opening of checkpoints: of distckpt, or of a format with a reader."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.wings import wing
from distckpt._checkpoint.consistent_read import (
    ReadAttempt,
    check_files,
    describe,
    read_attempts,
    reading_unchanged,
)
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._commit.presence import check_marker
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.foreign_formats import FORMATS, SEAL_NAME, is_export
from distckpt._format.manifest import MANIFEST_NAME, MAX_TABLE_BYTES, Manifest, is_manifest_name
from distckpt._format.manifest_reading import joined, manifest_from_bytes
from distckpt._format.marker import CONFIG_FNAME, read_file, read_marker, replaced
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt._storage.file_state import FileState

logger = logging.getLogger(__name__)

BACKEND = "safetensors"
VERSION = 1

NO_CONTENT = Manifest([], [], [], ChunkTable.empty(), {})

REGISTERED: dict[str, Reader] = {}
"""Readers of users by name, the latest registration last."""
_RESERVED_NAMES = {*FORMATS, BACKEND, "distckpt"}


@cache
def _built_in(name: str) -> Reader:
    known = FORMATS[name]
    reader: Reader = getattr(wing(known.name), known.reader)()
    return reader


def _readers() -> Iterator[Reader]:
    """Yield all readers, in the order in which they are asked.

    Readers of users come first, the latest before all others.
    """
    yield from reversed(list(REGISTERED.values()))
    yield from map(_built_in, FORMATS)


def register_reader(reader: Reader) -> None:
    """Read checkpoints of one more format. Call it on every rank.

    Args:
        reader: replaces an earlier one of the same name, and looks at checkpoints before all other
            readers do.

    Raises:
        TypeError: `reader` is no instance of `Reader`.
        ValueError: its name is empty, or names a built-in format.
    """
    if not isinstance(reader, Reader):
        raise TypeError(f"register_reader takes an instance of a Reader, got {reader!r:.100}.")
    if not isinstance(reader.name, str) or not reader.name or reader.name in _RESERVED_NAMES:
        raise ValueError(
            f"{reader.name!r:.100} cannot name a format: use a string other than "
            f"{sorted(_RESERVED_NAMES)}."
        )
    REGISTERED.pop(reader.name, None)
    REGISTERED[reader.name] = reader


@contextlib.contextmanager
def naming_reader(reader: Reader, location: str) -> Iterator[None]:
    """Name the reader and the location in errors not meant for users."""
    try:
        yield
    except (CheckpointingException, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (reader.name in _RESERVED_NAMES or error.errno is None):
            raise
        if isinstance(error, OSError):
            text = f"{error.strerror} (in the reader of {reader.name!r}, for {location!r})"
            raise OSError(error.errno, text, error.filename) from error
        raise CheckpointingException(
            f"The reader of {reader.name!r} failed on {location!r}: {type(error).__name__}: {error}"
        ) from error


def identify(location: str, marker: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the marker of a checkpoint; a made one for foreign formats.

    The made marker names the reader. Pass the marker when it was read already: on an object store
    each look takes a request. Raises CheckpointNotFoundError where there is nothing to read.
    """
    if marker is None:
        marker = read_marker(location)
    if marker is not None:
        marker = check_marker(marker, location)
        is_foreign = marker["sharded_backend"] != BACKEND
    else:
        # A reader is only asked about existing files.
        is_foreign = locations.exists(location)
    if is_foreign:
        reader = _detect(location, marker, _readers())
        if reader is not None:
            config = {"sharded_backend": BACKEND, "sharded_backend_version": VERSION}
            return {**config, "manifest": None, "reader": reader.name}
    if marker is None:
        if locations.exists(locations.join(location, SEAL_NAME)):
            raise CorruptCheckpointError(
                f"{location!r} was sealed, and is no checkpoint any more: distckpt verify names "
                f"the files that are missing. Restore them, or remove {SEAL_NAME!r}."
            )
        return check_marker(None, location)
    return marker


def holds_checkpoint(location: str) -> bool:
    """Return whether a location is a checkpoint of any format but exports."""
    marker = read_marker(location)
    if locations.exists(location):
        readers = (reader for reader in _readers() if not is_export(reader.name))
        if _detect(location, marker, readers) is not None:
            return True
    return "sharded_backend" in (marker or {})


def _detect(
    location: str, marker: dict[str, Any] | None, readers: Iterable[Reader]
) -> Reader | None:
    """Return the first reader that reads a checkpoint, or None."""
    for reader in readers:
        with naming_reader(reader, location):
            if reader.detect(location, marker):
                return reader
    return None


def find_reader(stored: StoredCheckpoint) -> Reader | None:
    """Return the reader of a checkpoint's format, None for distckpt's own."""
    origin = stored.manifest.origin
    if origin is None:
        return None
    return _reader_named(origin.get("format"), stored.location)


def _reader_named(name: Any, location: str) -> Reader:
    reader = None
    # A damaged marker may hold anything here.
    if isinstance(name, str):
        reader = REGISTERED.get(name)
        if reader is None and name in FORMATS:
            reader = _built_in(name)
    if reader is None:
        raise CheckpointingException(
            f"{location!r} is of the format {name!r:.100}, for which no reader is registered here: "
            "call register_reader on every rank."
        )
    return reader


def _describe(
    location: str, marker: Mapping[str, Any], states: dict[str, FileState], verify: bool
) -> Manifest:
    """Let the reader of another format make a manifest, see `describe`."""
    reader = _reader_named(marker.get("reader"), location)
    names = FORMATS[reader.name].names if reader.name in FORMATS else ()
    read = partial(wing("seals").read_sealed, reader) if verify else reader.manifest
    with naming_reader(reader, location):
        manifest = describe(location, read, states, names)
        if COMMON_KEY in manifest.keys and reader.name not in _RESERVED_NAMES:
            raise CheckpointingException(
                f"The reader of {reader.name!r} gives an object of {location!r} the key "
                f"{COMMON_KEY!r}, which is reserved: return what it holds from "
                "load_common_state, or give it another key."
            )
        return manifest


def manifest_bytes(location: str, marker: Mapping[str, Any]) -> bytes:
    """Read the manifest that a marker of distckpt names."""
    expected = marker.get("manifest", {})
    if not isinstance(expected, dict) or not is_manifest_name(expected.get("name")):
        raise CorruptCheckpointError(
            f"The marker of {location!r} names no {MANIFEST_NAME}: it was not written by the "
            f"{BACKEND!r} backend, or was damaged."
        )
    path = locations.join(location, expected["name"])
    try:
        data = read_file(path, MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"The manifest {path!r} is missing: restore it from a copy."
        ) from error
    if len(data) != expected.get("bytes") or f"{checksum(data):016x}" != expected.get("checksum"):
        raise CorruptCheckpointError(
            f"The manifest {path!r} is not the one that was saved (size or checksum differs from "
            f"{CONFIG_FNAME}): restore both from a copy, or load another checkpoint."
        )
    return joined(data, location)


def check_is_unchanged(stored: StoredCheckpoint) -> None:
    """Check that a checkpoint has not changed since it was opened."""
    location = stored.location
    fields = identify(location)
    if fields.get("manifest") is None:
        # A checkpoint of another format has no marker that would tell.
        reader = _reader_named(fields.get("reader"), location)
        with naming_reader(reader, location):
            is_same = "seal" in (stored.manifest.origin or {}) or reader.is_unchanged(stored)
    else:
        is_same = fields["manifest"] == stored.marker.get("manifest")
    if not is_same:
        raise replaced(location)
    check_files(stored)


def check_is_same(rank: int, location: str, manifest_checksum: str | None, of_first: str) -> None:
    """Check that a rank sees the checkpoint that rank 0 has opened.

    A format without a manifest checksum (None) only has to exist. A warning names a directory that
    is another one than that of rank 0 (`of_first`), where both are in sight: it may be a copy, but
    nothing tells.

    Only on local paths: nodes may have disks of their own, an object store is the same one for all.
    """
    if not locations.is_local(location):
        return
    state = _difference(location, manifest_checksum)
    if state is None:
        if manifest_checksum is None and not _is_same_place(location, of_first):
            logger.warning(
                "rank %d reads %r, and rank 0 reads %r: unless one is a copy of the other, tensors "
                "of two models are mixed; give all ranks the same location",
                rank,
                location,
                of_first,
            )
        return
    raise CheckpointingException(
        f"{location!r} on rank {rank} (host {os.uname().nodename!r}) {state}. Give all ranks the "
        "same location, on storage that all nodes share, or copy the checkpoint to every node, "
        "all its files included."
    )


def _is_same_place(location: str, other: str) -> bool:
    """Return whether two paths are the same, or cannot be compared."""
    if location == other:
        return True
    if not all(locations.is_local(place) and os.path.exists(place) for place in (location, other)):
        return True
    return os.path.samefile(location, other)


def _difference(location: str, manifest_checksum: str | None) -> str | None:
    """Return the difference from the expected checkpoint, see `check_is_same`."""
    if manifest_checksum is None:
        return None if locations.exists(location) else "does not exist"
    marker = read_marker(location)
    if marker is None:
        return "is no checkpoint"
    manifest = marker.get("manifest")
    if isinstance(manifest, dict) and manifest.get("checksum") == manifest_checksum:
        return None
    return "is another checkpoint than the one that rank 0 has opened"


def find_checkpoint(
    ranks: Ranks,
    location: str,
    *,
    verify: bool = True,
    marker: dict[str, Any] | None = None,
    attempt: ReadAttempt | None = None,
) -> StoredCheckpoint:
    """Find the checkpoint at a location, and open it if possible.

    Of a format that a strategy of the user reads, it has the marker only, see `is_built_in`.

    Collective operation: all ranks must call it, in one of `read_attempts`. Rank 0 reads marker and
    manifest and sends them to the other ranks, which check on local paths that they see the same
    checkpoint.

    Args:
        ranks: the ranks that read together.
        location: path or URL.
        verify: whether later reads compare checksums.
        marker: the marker that rank 0 has read already: on an object store each look takes a
            request.
        attempt: the attempt in which it is opened; it has read the marker, too, and learns the
            states of files.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    states: dict[str, FileState] = {}
    if attempt is not None:
        marker = marker or attempt.marker
        states = attempt.states

    def read() -> bytes:
        fields = identify(location, marker)
        data = b""
        if fields.get("manifest", {}) is None:
            data = _describe(location, fields, states, verify).to_bytes()
        elif is_built_in(fields):
            data = manifest_bytes(location, fields)
        return json.dumps([location, fields]).encode() + b"\n" + data

    text, _, data = ranks.decide("find the checkpoint", read).partition(b"\n")
    with ranks.phase("open the checkpoint"):
        of_first, fields = json.loads(text)
        manifest = fields.get("manifest", {})
        manifest_checksum = manifest.get("checksum") if isinstance(manifest, dict) else None
        # A strategy of the user may place its files anywhere.
        if ranks.size > 1 and (manifest_checksum is not None or is_built_in(fields)):
            check_is_same(ranks.rank, location, manifest_checksum, of_first)
        if not is_built_in(fields):
            return StoredCheckpoint(location, NO_CONTENT, marker=fields)
        return StoredCheckpoint(
            location,
            manifest_from_bytes(data, location),
            verify,
            marker=fields,
            states=states,
            # Copies of the same tensors, in files of the same size, may have them at other places.
            compares_headers=not ranks.is_coordinator and manifest is None,
        )


def open_checkpoint(
    ranks: Ranks,
    location: str,
    *,
    verify: bool = True,
    marker: dict[str, Any] | None = None,
    attempt: ReadAttempt | None = None,
) -> StoredCheckpoint:
    """Open the checkpoint at a location, see `find_checkpoint`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointingException: it has a format that only a strategy of the user reads.
    """
    stored = find_checkpoint(ranks, location, verify=verify, marker=marker, attempt=attempt)
    if not is_built_in(stored.marker):
        raise CheckpointingException(
            f"{location!r} was written by the strategy {stored.marker['sharded_backend']!r}: "
            "only distckpt.load reads it, with the strategy of that name."
        )
    return stored


def open_undisturbed(ranks: Ranks, location: str, *, verify: bool = True) -> StoredCheckpoint:
    """Open the checkpoint at a location, again if it is overwritten meanwhile.

    See `open_checkpoint`. Waits first for this process to finish writing there. Later reads of the
    checkpoint run in the context `reading` or `reading_unchanged`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or it was removed while it was opened.
    """
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, verify=verify, attempt=attempt)
    return stored


@contextlib.contextmanager
def opened(ranks: Ranks, location: str) -> Iterator[StoredCheckpoint]:
    """Open the checkpoint at a location for a body that reads it.

    See `open_undisturbed`.
    """
    stored = open_undisturbed(ranks, location)
    with reading_unchanged(ranks, [stored]):
        yield stored


def is_built_in(marker: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is read without a strategy of the user."""
    version = marker.get("sharded_backend_version", 1)
    return (marker["sharded_backend"], version) == (BACKEND, VERSION)


def open_export(location: str) -> StoredCheckpoint:
    """Open a directory in the format of exports, in this process alone."""
    reader = next(reader for reader in _readers() if is_export(reader.name))
    return StoredCheckpoint(location, reader.manifest(location))
