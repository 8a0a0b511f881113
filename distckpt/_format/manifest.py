"""The manifest: the keys of a checkpoint, and the files that hold their chunks.

Its tables are columns, so that reads of 10^6 chunks are planned in milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.errors import CheckpointingException
from distckpt._format.checksum import BLOCK_BYTES, Checksums, checksum
from distckpt._format.chunk_table import (
    MAX_TABLE_NUMBERS,
    ChunkTable,
    Files,
    files_as_stored,
    files_of_checksums,
)
from distckpt._format.columns import Column, narrow, pack
from distckpt._geometry.region import IntArray, Region, stacked

if TYPE_CHECKING:
    from distckpt._format.lazy_columns import LazyChunks

FORMAT_VERSION = 3
MIN_READER_VERSION = 3
DIVIDED_VERSION = 4
"""Version of manifests in parts, and of their oldest reader."""
MANIFEST_NAME = "manifest.safetensors"
_MANIFEST_NAMES = re.compile(r"manifest(-[0-9a-f]{16})?\.safetensors")
"""With a nonce where an object store already holds another manifest."""
MAX_TABLE_BYTES = 4 << 30
"""Limit of the bytes of a manifest.

It holds for files of checksums, too, and for indices of other formats.
"""
CHUNKS_AT_ONCE = 1 << 19
"""Number of chunks or blocks that are processed at a time.

In memory, they take some 100 MB.
"""
MAX_BLOCKS = 1 << 16
"""Limit of the blocks whose checksums are in the manifest (16 GiB of data).

The checksums of more are in files of their own, beside the shards.
"""
CHECKSUM = "xxh3-64"
OBJECT = "OBJECT"
"""Takes the place of a dtype name for keys of objects.

Each chunk of such a key is an encoded object, one for each cell of the global shape.
"""


FINGERPRINTS = "fingerprints"
NO_FINGERPRINT = (1 << 64) - 1
STATS_COUNTS = "stats_counts"
STATS_VALUES = "stats_values"


class KeyColumn(NamedTuple):
    """A column with figures of each key about its values.

    Attributes:
        kind: the figures that it is a part of; a manifest has all columns of a kind, or none.
        dtype: of the numbers.
        shape: of the figures of one key.
        missing: the first number of keys without figures, such as objects.
    """

    kind: str
    dtype: type[np.generic]
    shape: tuple[int, ...]
    missing: float

    def misses(self, figures: Column) -> npt.NDArray[np.bool_]:
        """Return which keys have no figures, one flag for each."""
        first = figures[:, 0] if self.shape else figures
        is_missing = np.isnan(first) if math.isnan(self.missing) else first == self.missing
        flags: npt.NDArray[np.bool_] = np.asarray(is_missing)
        return flags


KEY_COLUMNS = {
    FINGERPRINTS: KeyColumn("fingerprints", np.uint64, (), NO_FINGERPRINT),
    # How many values are NaN, infinite and zero.
    STATS_COUNTS: KeyColumn("statistics", np.int64, (3,), 0),
    # Norm, mean, minimum and maximum of the finite values.
    STATS_VALUES: KeyColumn("statistics", np.float64, (4,), math.nan),
}
"""Optional columns of a manifest, by name. Selecting keys, storing and checking go by this table.

A save computes them with the modules in `_MEASURES` of `_io.save_shards`.
"""

Chunks: TypeAlias = "ChunkTable | LazyChunks"
"""All chunks of a manifest, in memory or computed on demand.

Those in memory were checked when the manifest was decoded, the others are when they are used.
"""

KeyFigures: TypeAlias = Mapping[str, Column]
"""Those of the columns that a manifest has, by name."""


def take_figures(figures: KeyFigures, key_ids: Sequence[int]) -> KeyFigures:
    """Return the figures of some keys, in their order; -1 stands for a key without figures."""
    places = np.array(key_ids, np.int64)
    taken = {}
    for name, figure in figures.items():
        column = KEY_COLUMNS[name]
        missing = np.full((1, *column.shape), column.missing, column.dtype)
        taken[name] = np.concatenate([figure, missing])[places]
    return taken


class Sums(NamedTuple):
    """Sums over all chunks; int64.

    Attributes:
        bytes_of_keys: the size of the chunks of each key.
        bytes_in_files: the size of those in each file.
        blocks_in_files: the number of their blocks.
    """

    bytes_of_keys: IntArray
    bytes_in_files: IntArray
    blocks_in_files: IntArray


@dataclass(eq=False)
class Manifest:
    """The content of a checkpoint: its keys and the table of their chunks.

    Attributes:
        keys: distinct names of tensors and objects.
        dtypes: the safetensors dtype name of each key, or `OBJECT`.
        global_shapes: the global shape of each key.
        chunks: sorted by key id.
        aliases: for tied tensors, which are stored once, the key that has the chunks by each other
            key.
        block_bytes: size of the blocks in which chunks are checksummed; the last block of a chunk
            may be shorter.
        has_checksums: False for files of other programs; `block_checksums` is empty then.
            Otherwise it is empty when files beside the shards hold the checksums, see
            `checksum_files`.
        origin: None for distckpt's own checkpoints; otherwise the name of the reader as `format`,
            and JSON fields for that reader.
        quantization: settings of quantized tensors from the configuration beside another program's
            files, see `_foreign.quantization_settings`.
        figures: the columns of `KEY_COLUMNS` that were stored, such as fingerprints and statistics
            of the tensors as they were when they were saved.
        fetched: the checksums that were fetched from `checksum_files`.
    """

    keys: Sequence[str]
    dtypes: Sequence[str]
    global_shapes: Sequence[tuple[int, ...]]
    chunks: Chunks
    aliases: Mapping[str, str]
    block_bytes: int = BLOCK_BYTES
    has_checksums: bool = True
    origin: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    figures: KeyFigures = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column in self.figures.values():
            assert len(column) == len(self.keys)
        self.quantization = self.quantization or (self.origin or {}).get("quantization")
        self.files = self.chunks.files
        self.key_ids: Any = self.chunks.key_ids
        self.file_ids: Any = self.chunks.file_ids
        self.first_bytes: Any = self.chunks.first_bytes
        self.num_bytes: Any = self.chunks.num_bytes
        self.offsets: Any = self.chunks.offsets
        self.shapes: Any = self.chunks.shapes
        self.block_checksums = self.chunks.block_checksums
        self.fetched = FetchedChecksums()

    def replaced(self, **fields: Any) -> Manifest:
        """Return a manifest with other values of some fields.

        With other `keys`, `figures` need their rows: see `take_figures`.
        """
        return replace(self, **fields)

    # --- Chunks

    @functools.cached_property
    def all_chunks(self) -> ChunkTable:
        """All chunks in one table. Those of a manifest in parts take much more memory than it."""
        return self.chunks.whole()

    @functools.cached_property
    def sums(self) -> Sums:
        """Sums over all chunks, which are checked.

        Raises:
            CorruptCheckpointError: the chunks contradict each other, or the rest of the manifest.
        """
        bytes_of_keys = np.zeros(len(self.keys), np.int64)
        bytes_in_files = np.zeros(len(self.files), np.int64)
        blocks_in_files = np.zeros(len(self.files), np.int64)
        for chunks in self.chunks.parts():
            np.add.at(bytes_of_keys, chunks.key_ids, chunks.num_bytes)
            np.add.at(bytes_in_files, chunks.file_ids, chunks.num_bytes)
            np.add.at(blocks_in_files, chunks.file_ids, -(-chunks.num_bytes // self.block_bytes))
        return Sums(bytes_of_keys, bytes_in_files, blocks_in_files)

    def in_file_order(self, file_ids: IntArray) -> tuple[IntArray, ChunkTable]:
        """Return rows and chunks of files, in the order of their bytes.

        The chunks have no checksums.

        Raises:
            CorruptCheckpointError: a chunk does not lie inside of its tensor and file, or all of a
                file take more room than it has.
        """
        rows, chunks = self.chunks.in_files(file_ids)
        order = chunks.file_order
        return rows[order], chunks.rows(order)

    def ranges_of_files(self) -> list[range]:
        """Cut the files that hold chunks into ranges of about `CHUNKS_AT_ONCE` blocks.

        Files whose checksums are in one file stay together.
        """
        ends = np.arange(1, len(self.files) + 1)
        if len(self.checksum_files):
            ends = self.checksum_files + 1
        num_blocks = np.cumsum(self.sums.blocks_in_files)[ends - 1] // CHUNKS_AT_ONCE
        edges = [0, *ends[:-1][np.diff(num_blocks) > 0].tolist(), *ends[-1:].tolist()]
        return [range(*edge) for edge in itertools.pairwise(edges)]

    def chunk_region(self, row: int) -> Region:
        """Return the region of the global tensor that a chunk holds."""
        ndim = len(self.global_shapes[self.key_ids[row]])
        return Region(
            tuple(self.offsets[row, :ndim].tolist()), tuple(self.shapes[row, :ndim].tolist())
        )

    # --- Checksums

    @functools.cached_property
    def checksum_files(self) -> IntArray:
        """The numbers of the files that hold checksums; none if `block_checksums` has them."""
        return files_of_checksums(self.files) if self.has_checksums else np.zeros(0, np.int64)

    @functools.cached_property
    def first_blocks(self) -> Column:
        """The place of the checksum of each chunk's first block.

        It is in the file that holds the checksums, as far as `fetched` says, or in
        `block_checksums`.
        """
        if len(self.checksum_files):
            # Filled by `fetch_checksums`; pages that nobody fills take no memory.
            return np.zeros(len(self.key_ids), np.uint32)
        if not isinstance(self.chunks, ChunkTable):
            _ = self.sums  # which checks all chunks
        counts: IntArray = -(-self.num_bytes[:] // self.block_bytes)
        return np.cumsum(counts) - counts

    # --- Keys

    @functools.cached_property
    def key_starts(self) -> IntArray:
        """The first row of each key, and the number of all rows."""
        return self.chunks.key_starts(len(self.keys))

    @property
    def shapes_by_key(self) -> dict[str, tuple[int, ...]]:
        """Global shape of each key."""
        return dict(zip(self.keys, self.global_shapes, strict=True))

    @functools.cached_property
    def key_index(self) -> dict[str, int]:
        """Index of each key; a tied key has the index of the stored one."""
        index = {key: i for i, key in enumerate(self.keys)}
        index.update((alias, index[key]) for alias, key in self.aliases.items())
        return index

    @property
    def num_tensors(self) -> int:
        """Number of the names of tensors; each tied one counts."""
        return sum(self.dtypes[key_id] != OBJECT for key_id in self.key_index.values())

    @functools.cached_property
    def scales_key(self) -> str | None:
        """Some key of scales that belong to codes; None without any."""
        # Few checkpoints hold codes.
        from distckpt._format import code_names as names

        dtypes = zip(self.keys, self.dtypes, strict=True)
        codes = [(key, dtype) for key, dtype in dtypes if names.may_be_codes(dtype)]
        for key, dtype in codes:
            if scales := names.scales_of(key, self.key_index):
                return scales[0]
            if not names.are_codes_beside_scales(key, dtype):
                continue
            if beside := names.scale_beside(key, self.scale_places):
                return beside
        return names.MARKER if names.MARKER in self.key_index else None

    @functools.cached_property
    def scale_places(self) -> dict[str, str]:
        """Places of keys that are named like scales, see `places_of_scales`."""
        from distckpt._format import code_names as names

        return names.places_of_scales(self.key_index)

    def chunk_rows(self, key_id: int) -> slice:
        """Return the rows of the chunk table that belong to a key."""
        return slice(int(self.key_starts[key_id]), int(self.key_starts[key_id + 1]))

    def to_bytes(self) -> bytes:
        """Encode as the content of `manifest.safetensors`; `manifest_from_bytes` undoes it."""
        chunks = self.all_chunks
        file_fields, file_columns = files_as_stored(chunks.files)
        fields = {
            "format_version": version_of(chunks.files),
            "keys": self.keys,
            "dtypes": self.dtypes,
            **file_fields,
            "aliases": self.aliases,
            "block_bytes": self.block_bytes,
            "checksum": CHECKSUM if self.has_checksums else None,
        }
        columns = {
            "key_shapes": stacked(self.global_shapes, chunks.offsets.shape[1], 1),
            "key_ndims": np.array([len(shape) for shape in self.global_shapes], np.int64),
            **chunks.columns(),
            **self.figures,
            **file_columns,
        }
        if self.origin is not None:
            fields["origin"] = self.origin
        elif self.quantization is not None:
            fields["quantization"] = self.quantization
        data = pack(fields, {name: narrow(column) for name, column in columns.items()})
        if len(data) > MAX_TABLE_BYTES:
            raise too_large(f"{len(data)} bytes")
        return data


class FetchedChecksums:
    """Checksums that were fetched from files beside the shards.

    Attributes:
        contents: of these files, by number.
        located: the numbers of the files for whose chunks `Manifest.first_blocks` is filled.
        lock: held by a thread that fetches many, or fills `first_blocks`.
    """

    def __init__(self) -> None:
        self.contents: dict[int, Checksums] = {}
        self.located: set[int] = set()
        self.lock = threading.Lock()


def version_of(files: Files) -> int:
    """Return the format version of a manifest with these files."""
    return FORMAT_VERSION if isinstance(files, list) else DIVIDED_VERSION


def needs_checksum_files(num_blocks: int) -> bool:
    """Tell whether so many checksums are stored beside the shards."""
    return num_blocks > MAX_BLOCKS


def num_blocks_of(manifest: Manifest) -> int:
    """Return the least number of blocks of the tensors, however divided."""
    sizes = (
        math.prod(shape) * ITEM_BYTES[dtype]
        for shape, dtype in zip(manifest.global_shapes, manifest.dtypes, strict=True)
        if dtype != OBJECT
    )
    return sum(sizes) // manifest.block_bytes


def too_large(size: str) -> CheckpointingException:
    """Return the error about a manifest that readers would refuse."""
    return CheckpointingException(
        f"The manifest of this checkpoint would have {size}, and readers accept {MAX_TABLE_BYTES} "
        f"bytes and {MAX_TABLE_NUMBERS} numbers. "
        "Nothing was committed: save the state as several checkpoints."
    )


def is_manifest_name(name: object) -> bool:
    """Tell whether a marker may give this name to the manifest."""
    return isinstance(name, str) and _MANIFEST_NAMES.fullmatch(name) is not None


def marker_fields(
    data: bytes, name: str = MANIFEST_NAME, version: int = FORMAT_VERSION
) -> dict[str, Any]:
    """Return the fields by which a marker names a manifest."""
    return {
        "format_version": version,
        "min_reader_version": max(version, MIN_READER_VERSION),
        "manifest": {"name": name, "bytes": len(data), "checksum": f"{checksum(data):016x}"},
    }
