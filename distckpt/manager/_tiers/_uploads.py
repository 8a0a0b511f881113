"""Uploads of steps from the hosts to the root."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distckpt._base.options import SaveOptions
from distckpt._format.chunk_table import Files, files_as_stored
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import marker_fields, version_of
from distckpt._format.manifest_reading import files_in
from distckpt._format.marker import parse_config
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.save_shards import PreparedSave
from distckpt._io.write import WriteSettings, in_folder
from distckpt._operations.planned_save import PlannedSave, SaveRequest
from distckpt._ranks.collectives import PhaseTimer, Ranks
from distckpt._storage import locations
from distckpt.manager._tiers._lane import Pace
from distckpt.manager._tiers._stored_files import reading, rewrite, stored_files

logger = logging.getLogger(__name__)

_MANIFEST_FIELDS = ("format_version", "min_reader_version", "manifest", "checksum")


class Progress:
    """The progress of an upload on one rank; a thread names one that stands still.

    Attributes:
        location: the file that is uploaded; empty while this rank has nothing to do.
        num_bytes: bytes that were handed over.
    """

    def __init__(self, step: int, seconds: float, note_stall: Callable[[str], None]) -> None:
        self.location = ""
        self.num_bytes = 0
        self._step = step
        self._seconds = seconds
        self._note_stall = note_stall
        self._before = -1
        self._since = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        threading.Thread(target=self._watch, name="distckpt-stalls", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def add(self, num_bytes: int) -> None:
        """Note that bytes were handed over."""
        self.num_bytes += num_bytes

    def stall(self, now: float) -> str | None:
        """Return a text if nothing was uploaded for long, else None."""
        if self.num_bytes != self._before or not self.location:
            self._before = self.num_bytes
            self._since = now
        if now - self._since < self._seconds:
            return None
        self._since = now
        return (
            f"host {os.uname().nodename!r} has uploaded nothing of {self.location!r} for "
            f"{self._seconds:g} s, after {self.num_bytes} bytes of this rank"
        )

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            text = self.stall(time.monotonic())
            if text is not None:
                logger.warning("step %d stays on the hosts: %s", self._step, text)
                self._note_stall(text)


@dataclass
class StoredFiles(PreparedSave):
    """The files of a step on this host that this rank uploads.

    Attributes:
        stored: the step in the local directory.
        own: names of the files that this rank uploads.
        progress: learns how far it is.
        pace: limits the bytes per second.
    """

    stored: StoredCheckpoint
    own: Sequence[str]
    progress: Progress
    pace: Pace
    durable: bool = True
    folder_suffix: str = ""
    exchanges_in_write = False

    def __post_init__(self) -> None:
        own = set(self.own)
        self.num_bytes = sum(f.num_bytes for f in self.stored.manifest.files if f.name in own)

    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        """Refuse: `write_own` and `complete` do all."""
        raise NotImplementedError

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        del ranks
        block_bytes = self.stored.manifest.block_bytes
        settings = WriteSettings(self.durable, block_bytes=block_bytes, progress=self.progress.add)
        for name, file in stored_files(self.stored, self.own).items():
            location = locations.join(checkpoint_dir, in_folder(name, self.folder_suffix))
            self.progress.location = location
            source = self._paced(locations.join(self.stored.location, name))
            rewrite(location, file, source, settings)
        # Now it waits for others, each of which watches itself.
        self.progress.location = ""
        return b""

    def _paced(self, path: str) -> Callable[[int, Any], None]:
        read = reading(path)

        def read_slowly(position: int, memory: Any) -> None:
            self.pace.take(len(memory))
            read(position, memory)

        return read_slowly

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any]:
        del told
        suffix = self.folder_suffix
        name = self.stored.marker["manifest"]["name"]
        data = locations.read_bytes(locations.join(self.stored.location, name))
        if suffix:
            data = _with_suffix(data, suffix)
            name = f"manifest{suffix}.safetensors"
        self.progress.location = locations.join(checkpoint_dir, name)
        locations.write_bytes(locations.join(checkpoint_dir, name), data, self.durable)
        files = [(file.name, file.num_bytes) for file in files_of_manifest(data)]
        self.written = [*files, (name, len(data))]
        return marker_fields(data, name, version_of(self.stored.manifest.files))


def files_of_manifest(data: bytes) -> Files:
    """Return the files that a manifest names, without decoding the rest."""
    return files_in(*unpack(data))


def _with_suffix(data: bytes, suffix: str) -> bytes:
    """Return a manifest whose files are in folders with a suffix; the rest stays as it is."""
    fields, columns = unpack(data)
    files = files_in(fields, columns)
    named: Files = [file._replace(name=in_folder(file.name, suffix)) for file in files]
    if not isinstance(files, list):
        # Imported when it is needed: few checkpoints are so large.
        from distckpt._format.file_table import FileTable

        named = FileTable.of(named)
    file_fields, file_columns = files_as_stored(named)
    return pack(fields | file_fields, columns | file_columns)


def planned_upload(
    rank: int,
    stored: StoredCheckpoint,
    own: Sequence[str],
    location: str,
    options: SaveOptions,
    progress: Progress,
    pace: Pace,
) -> PlannedSave:
    """Plan the save that copies a step to the root.

    Args:
        rank: this rank.
        stored: the step in the local directory of this host.
        own: names of the files that this rank copies.
        location: the location of the step in the root.
        options: options of the saves of the manager.
        progress: learns how far it is.
        pace: limits the bytes per second.
    """
    notes = {name: value for name, value in stored.marker.items() if name not in _MANIFEST_FIELDS}
    config = parse_config(stored.marker, stored.location)
    # The program was told of this save when the hosts had it.
    options = replace(options, on_report=None, progress=None)
    request = SaveRequest(path=location, overwrite=True, options=options, notes=notes)
    prepared = StoredFiles(stored, own, progress, pace, options.durable)
    progress.location = location
    timer = PhaseTimer("upload", rank, location)
    return PlannedSave(location, request, config, prepared, timer)
