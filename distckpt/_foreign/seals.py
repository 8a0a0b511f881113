"""Seals: the checksums of another program's files, in one more file beside them.

A seal is a manifest of files. It has two keys for each file, both tensors of its bytes: the chunks
of one are the pieces in which the reader of the format describes the file, and those of the other
everything between them. Reads compare the blocks of the pieces that they touch, as they do in
checkpoints of distckpt; what the reader itself goes by is compared before it reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._checkpoint.file_states import describing, states_of
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.chunk_table import NO_CHECKSUMS
from distckpt._format.foreign_formats import (
    DEEPSPEED,
    FORMATS,
    HUGGING_FACE,
    SEAL_NAME,
    TORCH_DIST,
)
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.marker import read_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._operations.file_checks import (
    Problem,
    check_units,
    cut,
    describe_blocks,
    list_blocks,
    not_in,
)
from distckpt._storage import locations, object_store
from distckpt._storage.open_files import OpenFiles

_VERSION = 1
_MAX_NAMED = 5
_NEAR_BYTES = 64 << 10
"""Bytes that one read spans: what lies between the blocks is mostly read by others."""
_DESCRIBED_WHOLLY = (HUGGING_FACE.name, TORCH_DIST.name)
"""Formats whose readers look at nothing but pieces, and files without any, once they have described
the others."""


@dataclass(frozen=True)
class Seal:
    """The seal of a directory.

    Attributes:
        home: path or URL of the directory.
        manifest: its files. Key i is what lies between the pieces of file i, key n + i the pieces
            in it; `origin` has the format, and the checksum of its reader's description.
    """

    home: str
    manifest: Manifest

    @property
    def path(self) -> str:
        """Return the location of the seal itself."""
        return locations.join(self.home, SEAL_NAME)

    @property
    def rows_of_pieces(self) -> IntArray:
        """Return the chunks that are pieces."""
        return np.flatnonzero(self.manifest.key_ids >= len(self.manifest.files))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each file by its name."""
        return {file.name: number for number, file in enumerate(self.manifest.files)}

    def to_bytes(self) -> bytes:
        """Encode as the content of the file; `read_seal` undoes it."""
        data = self.manifest.to_bytes()
        return _head(data) + data

    def raise_changes(self, problems: Sequence[Problem]) -> NoReturn:
        """Raise an error that names files."""
        named = [f"{problem.file!r} {problem.message}" for problem in problems[:_MAX_NAMED]]
        more = f"; and {len(problems) - _MAX_NAMED} more" * (len(problems) > _MAX_NAMED)
        error = CorruptCheckpointError(
            f"{self.home!r} has changed since it was sealed: {'; '.join(named)}{more}. Restore the "
            f"files from a copy. If they were meant to change: `distckpt seal --overwrite "
            f"{self.home}`, or remove {SEAL_NAME!r} there."
        )
        error.file = problems[0].file
        raise error

    # --- Files

    def changed_files(self, format_name: str = "") -> list[Problem]:
        """Return the files that were added or removed, or have another size.

        Only those that the reader of a format looks at, if one is named.
        """
        sealed = {self._path_of(file.name): file.num_bytes for file in self.manifest.files}
        inner = {name for name in self.numbers if "/" in name}
        names = list_files(self.home, folders_of(inner))
        paths = sorted({*sealed, *map(self._path_of, names)})
        if format_name:
            paths = sorted(describing(paths, _names_of(format_name)))
        states = states_of(paths, locations.listed_states(self.home))
        problems = []
        for path in paths:
            state = states.get(path)
            if path not in sealed:
                problems.append(Problem(path, "was added"))
            elif state is None:
                problems.append(Problem(path, "was removed or renamed"))
            elif state.num_bytes != sealed[path]:
                text = f"has {state.num_bytes} bytes, {sealed[path]} were sealed"
                problems.append(Problem(path, text))
        return problems

    def _path_of(self, name: str) -> str:
        return locations.join(self.home, *name.split("/"))

    # --- Contents

    def rows_of_rest(self, format_name: str = "", holds_pieces: bool | None = None) -> IntArray:
        """Return the chunks that are no pieces.

        Only those of files that the reader of a format looks at, if one is named, and that hold
        pieces or not.
        """
        manifest = self.manifest
        is_wanted = np.ones(len(manifest.files), np.bool_)
        if format_name:
            wanted = describing(list(self.numbers), _names_of(format_name))
            is_wanted = np.isin(np.arange(len(manifest.files)), [self.numbers[n] for n in wanted])
        if holds_pieces is not None:
            with_pieces = manifest.file_ids[self.rows_of_pieces]
            is_wanted &= np.isin(np.arange(len(manifest.files)), with_pieces) == holds_pieces
        is_rest = manifest.key_ids < len(manifest.files)
        return np.flatnonzero(is_rest & is_wanted[manifest.file_ids])

    def compare(
        self,
        rows: IntArray,
        num_threads: int | None = None,
        add_bytes: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[Problem], int]:
        """Compare chunks with their checksums; return what differs, and the bytes read."""
        manifest = self.manifest
        taken = manifest.all_chunks.take(rows, manifest.block_bytes)
        with OpenFiles() as files:
            stored = StoredCheckpoint(self.home, manifest.replaced(chunks=taken), files=files)
            all_files = range(len(manifest.files))
            blocks = list_blocks(stored, all_files, num_threads, keeps_checksums=False)
            units = cut(blocks, range(len(blocks.starts)), _NEAR_BYTES)
            bad, num_read = check_units(stored, blocks, units, num_threads, add_bytes)
            problems = describe_blocks(stored, blocks, bad)
        text = "was changed after it was sealed (checksum mismatch)"
        return [replace(found, message=text, key=None, region=None) for found in problems], num_read

    # --- Descriptions

    def check(self, format_name: str, holds_pieces: bool | None) -> None:
        """Check the files that a reader looks at, see `rows_of_rest`."""
        problems = self.changed_files(format_name)
        problems = problems or self.compare(self.rows_of_rest(format_name, holds_pieces))[0]
        if problems:
            self.raise_changes(problems)

    def attached(self, manifest: Manifest, prefix: str) -> Manifest:
        """Return a reader's manifest with the checksums of its chunks."""
        added = [
            file.name for file in manifest.files if file.name[len(prefix) :] not in self.numbers
        ]
        if added:
            self.raise_changes([Problem(self._path_of(added[0][len(prefix) :]), "was added")])
        numbers = np.array([self.numbers[file.name[len(prefix) :]] for file in manifest.files], int)
        table = manifest.all_chunks
        rows = np.flatnonzero(table.num_bytes)
        sealed = self.manifest.all_chunks.rows(self.rows_of_pieces)
        # Pieces are sorted by file and position, and each has a number of its own then.
        stride = 1 + max([file.num_bytes for file in self.manifest.files], default=0)
        known = sealed.file_ids * stride + sealed.first_bytes
        wanted = numbers[table.file_ids[rows]] * stride + table.first_bytes[rows]
        places = np.searchsorted(known, wanted)
        is_there = places < len(known)
        places[~is_there] = 0
        if len(known):
            is_there &= (known[places] == wanted) & (
                sealed.num_bytes[places] == table.num_bytes[rows]
            )
        if not is_there.all():
            row = int(rows[np.flatnonzero(~is_there)[0]])
            raise CheckpointingException(
                f"The seal {self.path!r} has no checksums of key "
                f"{manifest.keys[table.key_ids[row]]!r}, byte {table.first_bytes[row]} of "
                f"{manifest.files[table.file_ids[row]].name!r}: the release of distckpt that made "
                "it read these files otherwise. They have not changed: seal them again, "
                f"`distckpt seal --overwrite {self.home}`."
            )
        pieces = self.rows_of_pieces[places]
        checksums = self.manifest.all_chunks.take(pieces, self.manifest.block_bytes).block_checksums
        return manifest.replaced(
            chunks=table._replace(block_checksums=checksums),
            block_bytes=self.manifest.block_bytes,
            has_checksums=True,
            origin={**(manifest.origin or {}), "seal": prefix},
        )


def _head(data: bytes) -> bytes:
    return f"distckpt seal {_VERSION} {checksum(data):016x}\n".encode()


def read_seal(home: str) -> Seal | None:
    """Read the seal of a directory, None if it has none.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    path = locations.join(home, SEAL_NAME)
    try:
        content = read_file(path, MAX_TABLE_BYTES)
    except FileNotFoundError:
        return None
    head, end, data = content.partition(b"\n")
    if head + end != _head(data):
        raise CorruptCheckpointError(
            f"The seal {path!r} is damaged, or a newer release of distckpt made it: restore it "
            "from a copy. To go on without it, remove it; to make another one of the files as they "
            f"are now, `distckpt seal --overwrite {home}`."
        )
    return Seal(home, manifest_from_bytes(data, path))


def read_sealed(reader: Reader, location: str) -> Manifest:
    """Describe a checkpoint as its reader does, with the checksums of its seal if it has one.

    Raises:
        CorruptCheckpointError: files have changed since, or the seal is damaged.
    """
    seal = read_seal(location)
    if seal is not None:
        # What has no pieces describes the rest, and the reader would not say that it was sealed.
        seal.check(reader.name, holds_pieces=False)
    try:
        manifest = reader.manifest(location)
    except Exception:
        if seal is not None:
            seal.check(reader.name, holds_pieces=True)
        raise
    home, prefix = home_of(location, manifest)
    if home != location:
        seal = read_seal(home)
        if seal is not None:
            seal.check(reader.name, holds_pieces=False)
    if seal is None:
        return manifest
    fields = seal.manifest.origin or {}
    if fields.get("format") != reader.name:
        raise CorruptCheckpointError(
            f"{home!r} was sealed as {fields.get('format')!r}, and now {reader.name!r} is read "
            "there: files were removed or added. Restore them, or remove the seal "
            f"{seal.path!r}."
        )
    # The description of the same files is the same: nothing between the pieces is read again.
    is_same = fields.get("description") == description_of(manifest)
    if not (is_same and reader.name in _DESCRIBED_WHOLLY):
        seal.check(reader.name, holds_pieces=True)
    return seal.attached(manifest, prefix)


def description_of(manifest: Manifest) -> str:
    """Return the checksum of a reader's manifest."""
    return f"{checksum(manifest.to_bytes()):016x}"


def unsealed(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Return a checkpoint as its reader describes it."""
    manifest = stored.manifest
    origin = dict(manifest.origin or {})
    if origin.pop("seal", None) is None:
        return stored
    without = manifest.replaced(
        chunks=manifest.all_chunks._replace(block_checksums=NO_CHECKSUMS),
        block_bytes=BLOCK_BYTES,
        has_checksums=False,
        origin=origin,
    )
    return replace(stored, manifest=without)


def check_is_not_lost(location: str) -> None:
    """Refuse a location with a seal where no checkpoint is recognized.

    Raises:
        CorruptCheckpointError: there is one; the message names the files that are missing.
    """
    seal = read_seal(location)
    if seal is not None:
        seal.raise_changes(seal.changed_files() or [Problem(seal.path, "is alone")])


def check_rest(
    stored: StoredCheckpoint, mode: str, num_threads: int | None
) -> tuple[list[Problem], int]:
    """Check the files of a sealed directory, and in the mode "full" all that are no pieces."""
    seal = read_seal(home_of(stored.location, stored.manifest)[0])
    if seal is None:
        return [], 0
    problems = seal.changed_files()
    if mode == "fast":
        return problems, 0
    different, num_read = seal.compare(seal.rows_of_rest(), num_threads)
    return [*problems, *not_in(problems, different)], num_read


def changes_at(location: str, mode: str) -> list[Problem]:
    """Return all changes of a directory that cannot be opened, if it has a whole seal."""
    with contextlib.suppress(CorruptCheckpointError):
        seal = read_seal(location)
        if seal is not None:
            problems = seal.changed_files()
            if mode == "full":
                rows = np.arange(len(seal.manifest.key_ids))
                problems += not_in(problems, seal.compare(rows)[0])
            return problems
    return []


# --- Places ---------------------------------------------------------------------------------------


def home_of(location: str, manifest: Manifest) -> tuple[str, str]:
    """Return the directory of a checkpoint's seal, and the prefix of its files' names.

    It is another one than the location for a single file, and for a directory whose file `latest`
    names the folder of a save: the next save is in another one.
    """
    origin = manifest.origin or {}
    if origin.get("is_file"):
        return locations.split(location)[0], ""
    if origin.get("format") == DEEPSPEED.name:
        folder, slash, _ = str(origin["common"]).rpartition("/")
        if slash:
            return locations.join(location, folder), f"{folder}/"
    return location, ""


def folders_of(names: Set[str]) -> set[str]:
    """Return the first folders in names of files."""
    return {name.partition("/")[0] for name in names if "/" in name}


def list_files(home: str, folders: Set[str]) -> list[str]:
    """Return the names of a directory's files, and of all files in some folders there.

    Other folders may hold other checkpoints.
    """
    if locations.is_local(home):
        names = list(_names_in(home, "", folders))
    else:
        names = object_store.at(home).list_files()
    listed = []
    for name in names:
        first, slash, _ = name.partition("/")
        if (not slash or first in folders) and not _is_seal(name):
            listed.append(name)
    return listed


def _names_in(folder: str, prefix: str, folders: Set[str] | None) -> Iterator[str]:
    for name in locations.list_names(folder):
        path = locations.join(folder, name)
        if not locations.isdir(path):
            yield prefix + name
        elif (folders is None or name in folders) and not os.path.islink(path):
            yield from _names_in(path, f"{prefix}{name}/", None)


def _is_seal(name: str) -> bool:
    """Return whether a file is a seal, or one that is being written."""
    return name.rpartition("/")[2].removeprefix(".").startswith(SEAL_NAME)


def _names_of(format_name: str) -> tuple[str, ...]:
    return FORMATS[format_name].names if format_name in FORMATS else ()
