"""Seals: checksums of another program's files, in a file beside them.

A seal is a manifest of files. Each has two keys, both tensors of its bytes: the chunks of one are
the pieces that the reader of the format describes, those of the other are the bytes between them.
Reads compare the blocks of pieces that they touch, as they do in checkpoints of distckpt. The
files that describe the others are compared before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._checkpoint.file_states import describing, states_of
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._format.checksum import checksum
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
"""Bytes that one read spans, gaps between blocks included."""
_DESCRIBED_WHOLLY = (HUGGING_FACE.name, TORCH_DIST.name)
"""Formats whose readers look only at pieces after the description."""


@dataclass(frozen=True)
class Seal:
    """The seal of a directory.

    Attributes:
        home: path or URL of the directory.
        manifest: its files. Key i has the bytes between the pieces of file i, key n + i the
            pieces; `origin` has the format, and the checksum of its reader's description.
    """

    home: str
    manifest: Manifest

    @property
    def path(self) -> str:
        """The location of the seal itself."""
        return locations.join(self.home, SEAL_NAME)

    def to_bytes(self) -> bytes:
        """Encode as the content of the file; `read_seal` undoes it."""
        data = self.manifest.to_bytes()
        return _head(data) + data

    def changed_files(self, names: tuple[str, ...] | None = None) -> list[Problem]:
        """Return the files that were added, removed, or have another size.

        With `names`, only those that a reader looks at, see `describing`.
        """
        sealed = {self._path_of(file.name): file.num_bytes for file in self.manifest.files}
        present = list_files(self.home, {file.name for file in self.manifest.files})
        paths = sorted({*sealed, *map(self._path_of, present)})
        if names is not None:
            paths = describing(paths, names)
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

    def changed_blocks(
        self,
        rows: IntArray,
        num_threads: int | None = None,
        add_bytes: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[Problem], int]:
        """Compare chunks with their checksums; return changes, and the bytes read."""
        taken = self.manifest.all_chunks.take(rows, self.manifest.block_bytes)
        with OpenFiles() as files:
            part = self.manifest.replaced(chunks=taken)
            stored = StoredCheckpoint(self.home, part, files=files)
            all_files = range(len(taken.files))
            blocks = list_blocks(stored, all_files, num_threads, keeps_checksums=False)
            units = cut(blocks, range(len(blocks.starts)), _NEAR_BYTES)
            bad, num_read = check_units(stored, blocks, units, num_threads, add_bytes)
            problems = describe_blocks(stored, blocks, bad)
        text = "was changed after it was sealed (checksum mismatch)"
        return [replace(found, message=text, key=None, region=None) for found in problems], num_read

    def check(self, names: tuple[str, ...], *, holds_pieces: bool) -> None:
        """Check files that a reader looks at: sizes, and bytes without pieces."""
        manifest = self.manifest
        files = [file.name for file in manifest.files]
        are_read = np.isin(files, describing(files, names))
        with_pieces = np.isin(np.arange(len(files)), manifest.file_ids[self.rows(are_pieces=True)])
        rest = self.rows(are_pieces=False)
        rows = rest[(are_read & (with_pieces == holds_pieces))[manifest.file_ids[rest]]]
        problems = self.changed_files(names) or self.changed_blocks(rows)[0]
        if problems:
            raise changed(self, problems)

    def rows(self, *, are_pieces: bool) -> IntArray:
        """Return the chunks that are pieces, or the others."""
        is_piece = self.manifest.key_ids >= len(self.manifest.files)
        return np.flatnonzero(is_piece == are_pieces)

    def attached(self, manifest: Manifest, prefix: str) -> Manifest:
        """Return a reader's manifest with the checksums of its chunks."""
        table = manifest.all_chunks
        numbers = {file.name: number for number, file in enumerate(self.manifest.files)}
        ids = np.array([numbers.get(file.name[len(prefix) :], -1) for file in table.files], int)
        rows = np.flatnonzero(table.num_bytes)
        pieces = self.rows(are_pieces=True)
        sealed = self.manifest.all_chunks.rows(pieces)
        # Pieces are in the order of files and positions.
        stride = 1 + max([file.num_bytes for file in self.manifest.files], default=0)
        known = sealed.file_ids * stride + sealed.first_bytes
        wanted = ids[table.file_ids[rows]] * stride + table.first_bytes[rows]
        places = np.searchsorted(known, wanted)
        ends = np.append(known, -1)[places] + np.append(sealed.num_bytes, 0)[places]
        missing = rows[(ends != wanted + table.num_bytes[rows]) | (wanted < 0)]
        if len(missing):
            row = int(missing[0])
            raise CheckpointingException(
                f"The seal {self.path!r} has no checksums of key "
                f"{manifest.keys[table.key_ids[row]]!r}, byte {table.first_bytes[row]} of "
                f"{table.files[table.file_ids[row]].name!r}, which the release of distckpt that "
                f"made it read otherwise: `distckpt seal --overwrite {self.home}` makes a new one."
            )
        block_bytes = self.manifest.block_bytes
        checksums = self.manifest.all_chunks.take(pieces[places], block_bytes).block_checksums
        return manifest.replaced(
            chunks=table._replace(block_checksums=checksums),
            block_bytes=block_bytes,
            has_checksums=True,
            origin={**(manifest.origin or {}), "seal": prefix},
        )


def changed(seal: Seal, problems: Sequence[Problem]) -> CorruptCheckpointError:
    """Return the error about a sealed directory that has changed."""
    named = [f"{problem.file!r} {problem.message}" for problem in problems[:_MAX_NAMED]]
    more = f"; and {len(problems) - _MAX_NAMED} more" * (len(problems) > _MAX_NAMED)
    return CorruptCheckpointError(
        f"{seal.home!r} has changed since it was sealed: {'; '.join(named)}{more}. Restore the "
        f"files from a copy. If they were meant to change: `distckpt seal --overwrite {seal.home}`,"
        f" or remove {SEAL_NAME!r} there."
    )


def _head(data: bytes) -> bytes:
    return f"distckpt seal {_VERSION} {checksum(data):016x}\n".encode()


def read_seal(home: str) -> Seal | None:
    """Read the seal of a directory, None if it has none."""
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
    """Describe a checkpoint as its reader does, with checksums if sealed.

    Raises:
        CorruptCheckpointError: files have changed since, or the seal is damaged.
    """
    names = FORMATS[reader.name].names if reader.name in FORMATS else ()
    seal = _checked_seal(location, names)
    try:
        manifest = reader.manifest(location)
    except Exception:
        if seal is not None:
            seal.check(names, holds_pieces=True)
        raise
    home, prefix = home_of(location, manifest)
    if home != location:
        seal = _checked_seal(home, names)
    return manifest if seal is None else _compared(seal, manifest, prefix, names)


def _compared(seal: Seal, manifest: Manifest, prefix: str, names: tuple[str, ...]) -> Manifest:
    """Compare a description with a seal, and return it with checksums."""
    fields = seal.manifest.origin or {}
    name = (manifest.origin or {})["format"]
    if fields.get("format") != name:
        kind = f"is one of {name!r} now, no longer of {fields.get('format')!r}"
        raise changed(seal, [Problem(seal.home, kind)])
    if holds_no_pieces(manifest):
        # Most such formats have checksums of their own; `verify` compares all.
        if problems := seal.changed_files():
            raise changed(seal, problems)
        return manifest.replaced(origin={**(manifest.origin or {}), "seal": prefix})
    # The same description was made of the same bytes between the pieces.
    is_same = fields.get("description") == description_of(manifest)
    if not (is_same and name in _DESCRIBED_WHOLLY):
        seal.check(names, holds_pieces=True)
    return seal.attached(manifest, prefix)


def _checked_seal(home: str, names: tuple[str, ...]) -> Seal | None:
    """Read a seal, and check the files that describe the others."""
    seal = read_seal(home)
    if seal is not None:
        seal.check(names, holds_pieces=False)
    return seal


def holds_no_pieces(manifest: Manifest) -> bool:
    """Return whether files have no tensors as bytes, since they are decoded."""
    return "decoded" in (manifest.origin or {})


def description_of(manifest: Manifest) -> str:
    """Return the checksum of a reader's manifest."""
    return f"{checksum(manifest.to_bytes()):016x}"


def check_rest(
    location: str, manifest: Manifest | None, mode: str, num_threads: int | None
) -> tuple[list[Problem], int]:
    """Check the sealed bytes of no key; all bytes without a manifest."""
    home = location if manifest is None else home_of(location, manifest)[0]
    try:
        seal = read_seal(home)
    except CorruptCheckpointError:
        seal = None  # as opening it has said
    if seal is None:
        return [], 0
    problems = seal.changed_files()
    if mode == "fast":
        return problems, 0
    rows = np.arange(len(seal.manifest.key_ids))
    if manifest is not None:
        rows = seal.rows(are_pieces=False)
    different, num_read = seal.changed_blocks(rows, num_threads)
    return [*problems, *not_in(problems, different)], num_read


def home_of(location: str, manifest: Manifest) -> tuple[str, str]:
    """Return the directory of a seal, and the prefix of its files.

    Not the location: for a single file, and where `latest` names the folder of one of several
    saves.
    """
    origin = manifest.origin or {}
    if origin.get("is_file"):
        return locations.split(location)[0], ""
    if origin.get("format") == DEEPSPEED.name:
        folder, slash, _ = str(origin["common"]).rpartition("/")
        return locations.join(location, folder) if slash else location, folder + slash
    return location, ""


def list_files(home: str, names: Iterable[str] | None) -> list[str]:
    """Return the files directly in a directory, and in folders of `names`.

    Other folders may hold other checkpoints. None stands for all folders.
    """
    folders = None
    if names is not None:
        folders = {name.partition("/")[0] for name in names if "/" in name}
    if locations.is_local(home):
        present = list(_names_in(home, "", folders))
    else:
        present = object_store.at(home).list_files()
    listed = []
    for name in present:
        first, slash, _ = name.partition("/")
        # The seal, or one that is being written.
        is_seal = name.rpartition("/")[2].removeprefix(".").startswith(SEAL_NAME)
        if not is_seal and (not slash or folders is None or first in folders):
            listed.append(name)
    return listed


def _names_in(folder: str, prefix: str, folders: Set[str] | None) -> Iterator[str]:
    for name in locations.list_names(folder):
        path = locations.join(folder, name)
        if not locations.isdir(path):
            yield prefix + name
        elif (folders is None or name in folders) and not os.path.islink(path):
            yield from _names_in(path, f"{prefix}{name}/", None)
