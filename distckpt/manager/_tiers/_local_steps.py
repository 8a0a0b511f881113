"""Steps in the local directory of a host: some files of each, with marker and manifest."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distckpt._base.errors import CorruptCheckpointError
from distckpt._checkpoint.opening import manifest_bytes, open_checkpoint
from distckpt._commit import hidden_directories, posix
from distckpt._format.manifest import is_manifest_name
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._storage import locations
from distckpt.manager import _rejections as rejections
from distckpt.manager import _steps as steps
from distckpt.manager._tiers._run_files import RUN, RUN_FILE, encode_run, read_run
from distckpt.manager._tiers._stored_files import problems_of

logger = logging.getLogger(__name__)

ATTEMPT = "attempt"
NUM_FILES = "files"
NUM_BYTES = "bytes"
NUMBERS = (ATTEMPT, NUM_FILES, NUM_BYTES)
"""Fields of the manager's note in the marker of a local step."""


class HeldStep(NamedTuple):
    """The part of a step that a host has.

    Attributes:
        step: its number.
        save: names the save.
        attempt: when the job began that saved it, in seconds since 1970.
        num_files: number of files that the whole step has.
        num_bytes: their size.
        files: sizes of the files that are here, by name.
        rejection: the reason why the step was rejected, if it was.
    """

    step: int
    save: str
    attempt: int
    num_files: int
    num_bytes: int
    files: Mapping[str, int]
    rejection: str | None = None


@dataclass(frozen=True)
class LocalRoot:
    """The directory of one run on this host.

    Attributes:
        location: its path.
        run: identity of the run.
        root: the location where its steps are uploaded.
        is_new: whether the root may not know the run.
    """

    location: str
    run: str
    root: str
    is_new: bool

    def step(self, step: int) -> str:
        """Return the directory of a step."""
        return steps.step_location(self.location, step)

    def hidden(self, step: int, nonce: str) -> str:
        """Return the directory in which a step is written."""
        return hidden_directories.beside(self.step(step), "tmp", nonce)

    def make(self) -> None:
        """Make the directory."""
        locations.make_directories(self.location)
        path = locations.join(self.location, RUN_FILE)
        content = encode_run(self.run, self.root, self.is_new)
        if not locations.exists(path) or not (self.is_new or locations.read_bytes(path) == content):
            locations.write_bytes(path, content)

    def held(self) -> list[HeldStep]:
        """Return the steps that are here, ascending."""
        found = map(self._held, steps.all_steps(self.location))
        return [held for held in found if held is not None]

    def _held(self, step: int, save: str | None = None) -> HeldStep | None:
        directory = self.step(step)
        with locations.only_logging(f"look into {directory}"):
            note = steps.note_in(read_marker(directory))
            name = str(note.get("save"))
            attempt, num_files, num_bytes = (note.get(field) for field in NUMBERS)
            if (note.get("step"), note.get(RUN)) != (step, self.run) or save not in (None, name):
                return None
            if isinstance(attempt, int) and isinstance(num_files, int):
                rejection = rejections.rejection_of(self.location, step)
                size = int(num_bytes or 0)
                files = files_in(directory)
                return HeldStep(step, name, attempt, num_files, size, files, rejection)
        return None

    def small_files(self, step: int, save: str | None = None) -> dict[str, bytes]:
        """Return marker and manifest of a step; nothing if damaged."""
        directory = self.step(step)
        with locations.only_logging(f"read the manifest in {directory}"):
            if self._held(step, save) is not None:
                manifest_bytes(directory, read_marker(directory) or {})
                names = [*filter(is_manifest_name, locations.list_names(directory)), CONFIG_FNAME]
                return {
                    name: locations.read_bytes(locations.join(directory, name)) for name in names
                }
        return {}

    def mend(self, step: int, save: str, contents: Mapping[str, bytes]) -> None:
        """Replace a damaged manifest; files of the step stay."""
        if self._held(step, save) is not None:
            with locations.only_logging(f"mend the manifest in {self.step(step)}"):
                for name, content in contents.items():
                    locations.write_bytes(locations.join(self.step(step), name), content)

    def adopt(self, step: int, contents: Mapping[str, bytes]) -> None:
        """Begin a step with marker and manifest; its files come later."""
        self.remove(step)
        directory = self.hidden(step, secrets.token_hex(8))
        for name in posix.SUBDIRECTORIES:
            locations.make_directories(locations.join(directory, name))
        self.commit(step, directory, contents, durable=True)

    def commit(
        self, step: int, directory: str, contents: Mapping[str, bytes], durable: bool
    ) -> None:
        """Complete the directory of a step with marker and manifest.

        It gets its name. An earlier one of the same step is replaced.
        """
        for name, content in contents.items():
            locations.write_bytes(locations.join(directory, name), content, durable)
        posix.commit(directory, self.step(step), overwrite=True, durable=durable)

    def drop_damaged(self, step: int, save: str) -> int:
        """Remove the damaged files of a step; return their number."""
        if self._held(step, save) is None:
            return 0
        directory = self.step(step)
        if not self.small_files(step):
            logger.warning("%s is removed: no host has a whole manifest", directory)
            self.remove(step)
            return 1
        stored = open_checkpoint(Ranks.alone(), directory)
        damaged: dict[str, str] = {}
        for problem in problems_of(stored, files_in(directory)):
            damaged.setdefault(problem.file, problem.message)
        for path, message in damaged.items():
            logger.warning("%s is damaged, and removed: %s", path, message)
            locations.remove_file(path)
        return len(damaged)

    def remove(self, step: int) -> None:
        """Remove a step; readers that have opened its files go on."""
        trash = hidden_directories.beside(self.step(step), "trash")
        with contextlib.suppress(FileNotFoundError):
            locations.rename(self.step(step), trash, durable=False)
            locations.remove_tree(trash)

    def clear_leftovers(self) -> None:
        """Remove leftovers of interrupted saves, copies and removals.

        For the leader, before any of them begins.
        """
        names = steps.list_root(self.location)
        rejections.clear_stale(self.location, names)
        for name in names:
            if steps.is_leftover(name) or steps.replaced_step(name) is not None:
                locations.remove_tree(locations.join(self.location, name))
        # A copy that was interrupted would refuse the next save of its step.
        for step in steps.all_steps(self.location):
            for path in Path(self.step(step)).glob("*/.*"):
                locations.remove_file(str(path))


def runs_in(directory: str, root: str) -> list[tuple[str, bool]]:
    """Return the runs of a root in a local directory; are they new?"""
    runs = []
    for name in locations.list_names(directory):
        if name.startswith("run-"):
            run, of, is_new = read_run(locations.join(directory, name, RUN_FILE))
            if name == f"run-{run}" and of == root:
                runs.append((run, is_new))
    return runs


def run_of_root(root: str, new: str) -> str:
    """Return the identity of the run of a root; `new` where it has none yet.

    Raises:
        CorruptCheckpointError: its file is damaged.
        OSError: the root cannot be read or written.
    """
    path = locations.join(root, RUN_FILE)
    if not locations.exists(path):
        locations.make_directories(root)
        locations.create_bytes(path, encode_run(new, root))
    # Another job may have been faster.
    content = locations.read_bytes(path, 4096)
    try:
        return str(json.loads(content)[RUN])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f'{path!r} is damaged ({error}). Write {{"{RUN}": "ID"}} into it: the directory of the '
            "run on each host is named run-ID. If you remove the file, steps on hosts are ignored."
        ) from error


def pack_files(contents: Mapping[str, bytes]) -> bytes:
    """Put small files into one message."""
    parts: list[bytes] = []
    for name, content in contents.items():
        parts += [name.encode(), content]
    return pack_parts(parts)


def unpack_files(message: bytes) -> dict[str, bytes]:
    """Return the files in a message of `pack_files`."""
    parts = unpack_parts(message)
    return {name.decode(): content for name, content in zip(parts[::2], parts[1::2], strict=True)}


def files_in(directory: str) -> dict[str, int]:
    """Return the sizes of the files of a step here.

    Marker and manifest are not among them, nor are copies that have not arrived whole.
    """
    sizes = {}
    for folder in posix.SUBDIRECTORIES:
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{directory}/{folder}") as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    sizes[f"{folder}/{entry.name}"] = entry.stat().st_size
    return sizes
