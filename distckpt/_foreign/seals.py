"""Seals: checksums of another program's files, in a file beside them.

A seal is a manifest of files. Each has two keys, both tensors of its bytes: the chunks of one are
the pieces that the reader of the format describes, those of the other are the bytes between them.
Reads compare the blocks of pieces that they touch, as they do in checkpoints of distckpt. The
files that describe the others are compared before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._checkpoint.consistent_read import describing, states_of
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.foreign_formats import (
    DEEPSPEED,
    FORMATS,
    HUGGING_FACE,
    ORBAX,
    SEAL_NAME,
    TORCH_DIST,
)
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.marker import read_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._io.read import unit_bytes_at
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

SEALED = "sealed:"
"""Part of the URLs of arrays in a sealed directory."""
_VERSION = 1
_MAX_NAMED = 5
_NEAR_BYTES = 64 << 10
"""Bytes that one read spans, gaps between blocks included."""
_BLOCKS_AT_ONCE = 16
_ORBAX_VALUES = ("/metadata", "/metrics")
"""Files of items that hold JSON."""
_DESCRIBED_WHOLLY = (HUGGING_FACE.name, TORCH_DIST.name)
"""Formats whose readers look only at pieces after the description."""


@dataclass(frozen=True)
class Seal:
    """The seal of a directory.

    Attributes:
        home: path or URL of the directory.
        manifest: its files. Key i has the bytes between the pieces of file i, key n + i the
            pieces; `origin` has the format, and the checksum of its reader's description.
        prefix: beginning of the names of the files that are compared.
    """

    home: str
    manifest: Manifest
    prefix: str = ""

    @property
    def path(self) -> str:
        """The location of the seal itself."""
        return locations.join(self.home, SEAL_NAME)

    @property
    def format_name(self) -> Any:
        """The format of the sealed checkpoint."""
        return (self.manifest.origin or {}).get("format")

    @cached_property
    def _file_ids(self) -> dict[str, int]:
        """The numbers of the files that are compared, by location."""
        found = {}
        for number, file in enumerate(self.manifest.files):
            if file.name.startswith(self.prefix):
                found[self._path_of(file.name)] = number
        return found

    @cached_property
    def _is_same(self) -> npt.NDArray[np.bool_]:
        """Which blocks `compare` has found to be the same."""
        return np.zeros(len(self.manifest.block_checksums), bool)

    def forget(self) -> None:
        """Let `compare` read all blocks again."""
        self._is_same[:] = False

    def _path_of(self, name: str) -> str:
        return locations.join(self.home, *name.split("/"))

    def to_bytes(self) -> bytes:
        """Encode as the content of the file; `read_seal` undoes it."""
        data = self.manifest.to_bytes()
        return _head(data) + data

    def changed_files(self, names: tuple[str, ...] = ("",)) -> list[Problem]:
        """Return the files that were added, removed, or have another size.

        Only those that a reader of files with names of such endings looks at, see `describing`.
        """
        sealed = None
        if self.format_name != ORBAX.name:
            sealed = {file.name for file in self.manifest.files}
        present = list_files(self.home, sealed)
        inside = [self._path_of(name) for name in present if name.startswith(self.prefix)]
        paths = describing(sorted({*self._file_ids, *inside}), names)
        states = states_of(paths, locations.listed_states(self.home))
        problems = []
        for path in paths:
            state = states.get(path)
            number = self._file_ids.get(path)
            if number is None:
                problems.append(Problem(path, "was added"))
            elif state is None:
                problems.append(Problem(path, "was removed or renamed"))
            elif state.num_bytes != self.manifest.files[number].num_bytes:
                num_bytes = self.manifest.files[number].num_bytes
                text = f"has {state.num_bytes} bytes, {num_bytes} were sealed"
                problems.append(Problem(path, text))
        return problems

    def changed_blocks(
        self,
        rows: IntArray,
        num_threads: int | None = None,
        add_bytes: Callable[[int], None] = lambda _: None,
    ) -> tuple[list[Problem], int]:
        """Compare chunks with their checksums; return changes, and the bytes read."""
        table = self.manifest.all_chunks
        # Long ranges are read where there are no gaps.
        max_bytes = unit_bytes_at(self.home)
        if len(rows) < len(table.key_ids):
            max_bytes = _NEAR_BYTES
        part = self.manifest.replaced(chunks=table.take(rows, self.manifest.block_bytes))
        problems = []
        with OpenFiles() as files:
            stored = StoredCheckpoint(self.home, part, files=files)
            blocks = list_blocks(stored, range(len(part.files)), num_threads, keeps_checksums=False)
            units = cut(blocks, range(len(blocks.starts)), max_bytes)
            bad, num_read = check_units(stored, blocks, units, num_threads, add_bytes)
            for found in describe_blocks(stored, blocks, bad):
                text = f"is not as it was sealed: {found.message}"
                problems.append(replace(found, message=text, key=None, region=None))
        return problems, num_read

    def compare(self, values: str, path: str, start: int = 0, stop: int | None = None) -> None:
        """Compare some bytes of a file without pieces, each block once.

        Args:
            values: names the values there, in the error.
            path: location of the file.
            start: first position.
            stop: position behind the last; None for the whole file.
        """
        if path in self._file_ids:
            text = "is not as it was sealed: checksum mismatch"
            if self._is_same_within(path, start, stop):
                return
        elif locations.exists(path):
            text = "was added"
        else:
            return  # a chunk of zeros, which need not be stored
        raise changed(self, [Problem(path, text)], values)

    def _is_same_within(self, path: str, start: int, stop: int | None) -> bool:
        number = self._file_ids[path]
        step = self.manifest.block_bytes
        if stop is None:
            stop = self.manifest.files[number].num_bytes
        blocks = np.arange(start // step, -(-stop // step))
        if not len(blocks):
            return True
        # A file has one chunk; empty ones have none.
        row = np.searchsorted(self.manifest.file_ids, number)
        first = int(self.manifest.first_blocks[row])
        blocks = blocks[~self._is_same[first + blocks]]
        for place in range(0, len(blocks), _BLOCKS_AT_ONCE):
            group = blocks[place : place + _BLOCKS_AT_ONCE].tolist()
            begin = group[0] * step
            content = memoryview(locations.read_range(path, begin, (group[-1] + 1) * step))
            for block in group:
                digest = checksum(content[block * step - begin :][:step])
                if digest != self.manifest.block_checksums[first + block]:
                    return False
                self._is_same[first + block] = True
        return True

    def check(self, names: tuple[str, ...], *, is_whole: bool) -> None:
        """Check files that a reader looks at: sizes, and bytes without pieces.

        Unless `is_whole`, those of files with pieces are taken to be the same.
        """
        file_ids = self.manifest.file_ids
        files = [file.name for file in self.manifest.files]
        is_read = np.isin(files, describing(files, names))
        if not is_whole:
            is_read[file_ids[self.rows(are_pieces=True)]] = False
        rest = self.rows(are_pieces=False)
        rows = rest[is_read[file_ids[rest]]]
        problems = self.changed_files(names) or self.changed_blocks(rows)[0]
        if problems:
            raise changed(self, problems)

    def rows(self, *, are_pieces: bool) -> IntArray:
        """Return the chunks that are pieces, or the others."""
        table = self.manifest.all_chunks
        is_inside = np.isin(table.file_ids, list(self._file_ids.values()))
        is_piece = table.key_ids >= len(self.manifest.files)
        return np.flatnonzero(is_inside & (is_piece == are_pieces))

    def attached(self, manifest: Manifest, prefix: str, names: tuple[str, ...]) -> Manifest:
        """Return a reader's description with checksums, after comparing its files."""
        origin = manifest.origin or {}
        if self.format_name != origin["format"]:
            kind = f"is one of {origin['format']!r} now, no longer of {self.format_name!r}"
            raise changed(self, [Problem(self.home, kind)])
        # The same description was made of the same bytes between the pieces.
        sealed = (self.manifest.origin or {}).get("description")
        is_same = self.format_name in _DESCRIBED_WHOLLY and sealed == description_of(manifest)
        self.check(names, is_whole=not is_same)
        if holds_no_pieces(manifest):
            # Stored bytes are compared before they are decoded.
            return manifest.replaced(origin={**origin, "decoded": SEALED, "seal": True})
        table = manifest.all_chunks
        return manifest.replaced(
            chunks=table._replace(block_checksums=self._checksums_of(manifest, table, prefix)),
            block_bytes=self.manifest.block_bytes,
            has_checksums=True,
            origin={**origin, "seal": True},
        )

    def _checksums_of(
        self, manifest: Manifest, table: ChunkTable, prefix: str
    ) -> npt.NDArray[np.uint64]:
        """Return the checksums of a reader's chunks, which were sealed as pieces."""
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
        taken = self.manifest.all_chunks.take(pieces[places], self.manifest.block_bytes)
        return taken.block_checksums


def changed(seal: Seal, problems: Sequence[Problem], values: str = "") -> CorruptCheckpointError:
    """Return the error about a sealed directory that has changed.

    `values` names those that were to be read.
    """
    named = [f"{problem.file!r} {problem.message}" for problem in problems[:_MAX_NAMED]]
    more = f"; and {len(problems) - _MAX_NAMED} more" * (len(problems) > _MAX_NAMED)
    more += f" ({values})" * bool(values)
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


def find_seal(location: str, format_name: str) -> Seal | None:
    """Read the seal of a directory, or of the step around it."""
    seal = read_seal(location)
    home, item = locations.split(location)
    if seal is not None or format_name != ORBAX.name or home.endswith("://"):
        return seal
    around = None
    try:
        around = read_seal(home)
    except PermissionError:
        # A store may allow the item alone; a local seal is there.
        if locations.is_local(home):
            raise
    if around is None or around.format_name != ORBAX.name:
        return None
    return replace(around, prefix=f"{item}/")


def read_sealed(reader: Reader, location: str) -> Manifest:
    """Describe a checkpoint as its reader does, with checksums if sealed.

    Raises:
        CorruptCheckpointError: files have changed since, or the seal is damaged.
    """
    names = FORMATS[reader.name].names if reader.name in FORMATS else ()
    if reader.name == ORBAX.name:
        names = (*names, *_ORBAX_VALUES)
    seal = find_seal(location, reader.name)
    try:
        manifest = _description(reader, location, seal)
    except Exception:
        if seal is not None:
            seal.check(names, is_whole=True)
        raise
    home, prefix = home_of(location, manifest)
    if home != location:
        seal = read_seal(home)
    if seal is None:
        return manifest
    return seal.attached(manifest, prefix, names)


def _description(reader: Reader, location: str, seal: Seal | None) -> Manifest:
    read: Callable[..., Manifest] = reader.manifest
    if seal is not None and reader.name == ORBAX.name:
        # It decodes numbers, whose stored bytes are compared before.
        return read(location, seal)
    return read(location)


def holds_no_pieces(manifest: Manifest) -> bool:
    """Return whether files have no tensors as bytes, since they are decoded."""
    return "decoded" in (manifest.origin or {})


def description_of(manifest: Manifest) -> str:
    """Return the checksum of a reader's manifest."""
    return f"{checksum(manifest.to_bytes()):016x}"


def check_rest(
    location: str, manifest: Manifest | None, mode: str, num_threads: int | None
) -> tuple[list[Problem], int]:
    """Check the sealed bytes of no key, or all without a manifest."""
    seal = None
    with contextlib.suppress(CorruptCheckpointError):  # as opening it has said
        if manifest is None:
            seal = read_seal(location)
        else:
            home = home_of(location, manifest)[0]
            seal = find_seal(home, (manifest.origin or {})["format"])
    if seal is None:
        return [], 0
    problems = seal.changed_files()
    if mode == "fast":
        return problems, 0
    rows = seal.rows(are_pieces=False)
    if manifest is None:
        rows = np.arange(len(seal.manifest.key_ids))
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
    folders = None if names is None else {name.partition("/")[0] for name in names}
    if locations.is_local(home):
        present = _names_in(home, folders)
    else:
        present = iter(object_store.at(home).list_files())
    listed = []
    for name in present:
        first, slash, _ = name.partition("/")
        # The seal, or one that is being written.
        is_seal = name.rpartition("/")[2].removeprefix(".").startswith(SEAL_NAME)
        if not is_seal and (not slash or folders is None or first in folders):
            listed.append(name)
    return listed


def _names_in(home: str, folders: set[str] | None) -> Iterator[str]:
    for folder, inner, names in os.walk(home, onerror=_raise, followlinks=True):
        if folder == home and folders is not None:
            inner[:] = folders.intersection(inner)
        for name in names:
            yield os.path.relpath(f"{folder}/{name}", home)


def _raise(error: OSError) -> None:
    raise error
