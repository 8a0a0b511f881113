"""Reading a manifest: joining its parts, decoding it, and checking that it is consistent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distckpt._base.dtypes import ITEM_BYTES, is_known
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.checksum import BLOCK_BYTES, CHECKSUM_BYTES
from distckpt._format.chunk_table import (
    FILE_PATTERNS,
    TABLE_COLUMNS,
    ChunkChecks,
    ChunkTable,
    Files,
    file_sizes,
    files_of_checksums,
    judging_manifest,
)
from distckpt._format.columns import (
    INTEGERS,
    Column,
    pack,
    stored_column,
    stored_integers,
    unpack,
)
from distckpt._format.manifest import (
    CHECKSUM,
    KEY_COLUMNS,
    MAX_TABLE_BYTES,
    OBJECT,
    Chunks,
    KeyFigures,
    Manifest,
)
from distckpt._format.safetensors_file import MAX_HEADER_BYTES, ShardFile, read_as_saved
from distckpt._geometry.region import IntArray
from distckpt._storage import locations

MAX_BLOCK_BYTES = 64 << 20
"""Readers hold a few whole blocks in memory."""
CARRIED_PART = "part:"
"""Prefix of columns with the bytes of parts of the chunk table.

Manifests that are sent to other ranks carry their parts.
"""
_NAME = re.compile(r"objects(?:-[0-9a-f]{16})?/chunks-\d+\.safetensors")


# --- Joining parts --------------------------------------------------------------------------------


def joined(data: bytes, location: str) -> bytes:
    """Return a manifest that carries its parts at a location, see `manifest_from_bytes`.

    Raises:
        CorruptCheckpointError: a part is missing or damaged.
    """
    if b"/chunks-" not in data:
        return data
    with judging_manifest(location):
        fields, columns = unpack(data)
        files = files_in(fields, columns)
        if not isinstance(files, list):
            files = [files[number] for number in files.containing("/chunks-").tolist()]
        parts = [file for file in files if _NAME.fullmatch(str(file.name))]
        if not parts:
            return data
        sizes = [int(part.num_bytes) for part in parts]
        if not 0 <= min(sizes) <= sum(sizes) <= MAX_TABLE_BYTES:
            raise ValueError("its parts are too large")
        for number, content in enumerate(_read_parts(parts, location), 1):
            columns[f"{CARRIED_PART}{number:05d}"] = np.frombuffer(content, np.uint8)
        return pack(fields, columns)


def _read_parts(parts: list[ShardFile], location: str) -> list[bytes]:
    contents = [b""] * len(parts)

    def read(number: int) -> None:
        path = locations.join(location, parts[number].name)
        contents[number] = read_as_saved(
            path, parts[number], "The part of the manifest", "load another checkpoint"
        )

    num_threads = 1 if locations.is_local(location) else NUM_REQUESTS
    run_threads(read, range(len(parts)), num_threads)
    return contents


# --- Decoding -------------------------------------------------------------------------------------


def manifest_from_bytes(data: bytes, location: str) -> Manifest:
    """Decode a manifest, which may carry parts, and check it.

    Raises:
        CorruptCheckpointError: it contradicts itself, or is none.
    """
    with judging_manifest(location):
        fields, columns = unpack(data)
        num_checksums = len(columns["block_checksums"])
        stored_column(columns, "block_checksums", (num_checksums,), (np.uint64,))
        files = files_in(fields, columns)
        keys = [str(key) for key in fields["keys"]]
        dtypes = [str(name) for name in fields["dtypes"]]
        if len(dtypes) != len(keys):
            raise ValueError("keys and dtypes differ in number")
        key_shapes, global_shapes = _shapes_in(columns, len(keys))
        block_bytes = _known_block_bytes(fields["block_bytes"])
        has_checksums = _known_checksum(fields["checksum"])
        checks = ChunkChecks(
            key_shapes,
            np.array([ITEM_BYTES.get(name, 0) for name in dtypes], np.int64),
            files,
            block_bytes,
            files_of_checksums(files) if has_checksums else np.zeros(0, np.int64),
            has_checksums,
            num_checksums,
        )
        manifest = Manifest(
            keys,
            dtypes,
            global_shapes,
            chunks=_read_chunks(location, files, columns, checks),
            aliases={str(alias): str(key) for alias, key in fields["aliases"].items()},
            block_bytes=block_bytes,
            has_checksums=has_checksums,
            origin=fields.get("origin"),
            quantization=fields.get("quantization"),
            figures=_figures_in(columns, [name == OBJECT for name in dtypes]),
        )
        _check(manifest, checks)
        if isinstance(manifest.chunks, ChunkTable):
            checks.check(manifest.chunks)
        else:
            _ = manifest.key_starts  # which refuses chunks in a wrong order
    return manifest


def files_in(fields: Mapping[str, Any], columns: Mapping[str, Column]) -> Files:
    """Return the files of a manifest, from its fields and columns."""
    if FILE_PATTERNS not in fields:
        return list(map(ShardFile._make, fields["files"]))
    # Few checkpoints are so large.
    from distckpt._format.file_table import FileTable

    return FileTable.from_columns(fields[FILE_PATTERNS], columns, MAX_TABLE_BYTES)


def _figures_in(columns: Mapping[str, Column], are_objects: Sequence[bool]) -> KeyFigures:
    """Find the figures among the columns of a manifest, and check them.

    Args:
        columns: all columns.
        are_objects: for each key, whether it is one of objects, which have no figures.

    Raises:
        ValueError: they do not fit the keys.
    """
    figures = {}
    kinds = {column.kind for name, column in KEY_COLUMNS.items() if name in columns}
    for name, column in KEY_COLUMNS.items():
        if column.kind not in kinds:
            continue
        dtypes = INTEGERS if column.dtype is np.int64 else (column.dtype,)
        stored = stored_column(columns, name, (len(are_objects), *column.shape), dtypes)
        figures[name] = found = stored.astype(column.dtype, copy=False)
        if found.dtype == np.int64 and found.min(initial=0) < 0:
            raise ValueError(f"column {name!r} counts less than nothing")
        if not column.misses(found[np.array(are_objects, bool)]).all():
            raise ValueError(f"an object has {column.kind}")
    return figures


def _read_chunks(
    location: str, files: Files, columns: dict[str, Column], checks: ChunkChecks
) -> Chunks:
    """Return the chunk table of a manifest, which may carry parts: they are removed from it."""
    carried = sorted(name for name in columns if name.startswith(CARRIED_PART))
    if not carried:
        shape = (len(columns["key_ids"]),)
        regions = (*shape, checks.key_shapes.shape[1])
        shapes = {"offsets": regions, "shapes": regions}
        table = {
            name: stored_integers(columns, name, shapes.get(name, shape)) for name in TABLE_COLUMNS
        }
        return ChunkTable(files, **table, block_checksums=columns["block_checksums"])
    # Few checkpoints are so large.
    from distckpt._format.lazy_columns import LazyChunks

    parts = [columns.pop(name).tobytes() for name in carried]
    return LazyChunks.of_parts(location, files, parts, columns, checks)


# --- Checking -------------------------------------------------------------------------------------


def _check(manifest: Manifest, checks: ChunkChecks) -> None:
    """Check a manifest that was read.

    Raises:
        ValueError: it contradicts itself.
    """
    keys = set(manifest.keys)
    dtypes = set(manifest.dtypes) - {OBJECT}
    checksums = manifest.block_checksums
    has_checksums = manifest.has_checksums
    are_here = has_checksums and not len(checks.checksum_files)
    is_usual = has_checksums or manifest.block_bytes == BLOCK_BYTES
    faults = {
        "keys are not distinct": len(keys) < len(manifest.keys),
        "a dtype is unknown": not all(map(is_known, dtypes)),
        "an alias has no target": not keys.issuperset(manifest.aliases.values()),
        "an alias has the name of a key": not keys.isdisjoint(manifest.aliases),
        "its origin is not described": not isinstance(manifest.origin, dict | None),
        "blocks of an unusual size, without checksums": not is_usual,
        "checksums are in the manifest and in files": len(checksums) and not are_here,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(fault)
    if manifest.quantization is not None:
        # Few checkpoints have settings.
        from distckpt._format.code_names import are_settings

        if not are_settings(manifest.quantization):
            raise ValueError("the settings of quantized tensors are none")
    if isinstance(manifest.files, list):
        _check_files(manifest.files, is_foreign=manifest.origin is not None)
    _check_files_of_checksums(checks)


def _check_files(files: list[ShardFile], is_foreign: bool) -> None:
    # Our own files lie at most one folder down; others may have a folder for each axis.
    max_parts = 40 if is_foreign else 2
    for name, num_bytes, header_bytes, header_checksum in files:
        if not locations.is_inner_name(name, max_parts):
            raise ValueError(f"the file name {name!r:.300} leads elsewhere")
        is_all_header = header_bytes == num_bytes
        limit = MAX_TABLE_BYTES if is_all_header else 8 + MAX_HEADER_BYTES
        if not 0 <= header_bytes <= num_bytes or header_bytes > limit:
            raise ValueError(f"the file {name!r} has a header of {header_bytes} bytes")
        if not type(num_bytes) is type(header_bytes) is type(header_checksum) is int:
            raise TypeError(f"the numbers of the file {name!r} are not integers")


def _check_files_of_checksums(checks: ChunkChecks) -> None:
    holders = checks.checksum_files
    if not len(holders):
        return
    sizes, header_sizes = (column[holders] for column in file_sizes(checks.files))
    is_wrong = (sizes % CHECKSUM_BYTES != 0) | (sizes != header_sizes)
    for place in np.flatnonzero(is_wrong)[:1]:
        name = checks.files[int(holders[place])].name
        raise ValueError(f"the size of the file of checksums {name!r} is wrong")


def _known_checksum(name: object) -> bool:
    if name not in (CHECKSUM, None):
        raise ValueError(f"the checksum {name!r:.99} is unknown")
    return name == CHECKSUM


def _known_block_bytes(number: Any) -> int:
    block_bytes = int(number)
    # Blocks must begin between items of any size.
    if not 0 < block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
        raise ValueError(f"block_bytes is {block_bytes}")
    return block_bytes


def _shapes_in(
    columns: Mapping[str, Column], num_keys: int
) -> tuple[IntArray, list[tuple[int, ...]]]:
    """Return the global shapes of keys, padded with 1 and as tuples."""
    key_ndims = stored_integers(columns, "key_ndims", (num_keys,))
    key_shapes = stored_integers(
        columns, "key_shapes", (num_keys, *columns["key_shapes"].shape[-1:])
    )
    if (key_shapes < 0).any():
        raise ValueError("a global shape is negative")
    # Floating point detects products that would wrap around in int64.
    num_elements = np.prod(key_shapes.astype(np.float64), axis=1)
    if (num_elements >= 2.0**62).any():
        raise ValueError("a tensor has more elements than any storage holds")
    is_axis = np.arange(key_shapes.shape[1]) < key_ndims[:, None]
    if (is_axis.sum(axis=1) != key_ndims).any():
        raise ValueError("a key has more axes than the table")
    padded = np.where(is_axis, key_shapes, 1)
    shapes = zip(padded.tolist(), key_ndims.tolist(), strict=True)
    return padded, [tuple(shape[:ndim]) for shape, ndim in shapes]
