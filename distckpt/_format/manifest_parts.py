"""Parts of large manifests: files that hold the chunks of a range of keys each."""

from __future__ import annotations

import itertools
import re

import numpy as np

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.checksum import checksum
from distckpt._format.columns import Column, pack, unpack
from distckpt._format.manifest import (
    MAX_TABLE_BYTES,
    ChunkTable,
    ShardFile,
    judging_manifest,
    narrow,
    require,
)
from distckpt._format.marker import read_file
from distckpt._geometry.region import IntArray
from distckpt._storage import locations

PART_ROWS = 1 << 20
"""With more chunks, a manifest is divided into parts of about as many."""
_NAME = re.compile(r"objects(?:-[0-9a-f]{16})?/chunks-\d+\.safetensors")
_COLUMNS = [name for name in ChunkTable._fields if name not in ("files", "block_checksums")]


def divided(chunks: ChunkTable) -> tuple[ChunkTable, dict[str, bytes]]:
    """Return what of chunks, sorted by key, the manifest itself holds, and the contents of its
    parts by name.

    Few chunks stay in the manifest.
    """
    if len(chunks.key_ids) <= PART_ROWS:
        return chunks, {}
    parts = {}
    edges = [0, *_cuts(chunks.key_ids), len(chunks.key_ids)]
    for number, (first, end) in enumerate(itertools.pairwise(edges), 1):
        columns = {name: narrow(getattr(chunks, name)[first:end]) for name in _COLUMNS}
        parts[f"objects/chunks-{number:05d}.safetensors"] = pack({}, columns)
    files = [ShardFile(name, len(p), len(p), checksum(p)) for name, p in parts.items()]
    rest = chunks.without_blocks(np.zeros(0, np.int64))
    rest = rest._replace(files=[*chunks.files, *files], block_checksums=chunks.block_checksums)
    return rest, parts


def _cuts(key_ids: IntArray) -> list[int]:
    """Return where to cut chunks, between keys, into parts of at least `PART_ROWS`."""
    begins = np.flatnonzero(key_ids[1:] != key_ids[:-1]) + 1
    cuts: list[int] = begins[np.diff(begins // PART_ROWS, prepend=0) > 0].tolist()
    return cuts


def joined(data: bytes, location: str) -> bytes:
    """Return a manifest that holds what its parts at a location hold too.

    Raises:
        CorruptCheckpointError: a part is missing or damaged.
    """
    if b"/chunks-" not in data:
        return data
    with judging_manifest(location):
        fields, columns = unpack(data)
        files = [ShardFile(*file) for file in fields["files"]]
        parts = [file for file in files if _NAME.fullmatch(str(file.name))]
        if not parts:
            return data
        sizes = [int(part.num_bytes) for part in parts]
        require(min(sizes) >= 0 and sum(sizes) <= MAX_TABLE_BYTES, "its parts are too large")
        contents = _read_parts(parts, location)
        for name in _COLUMNS:
            columns[name] = np.concatenate([*(part[name] for part in contents), columns[name]])
        return pack(fields, columns)


def _read_parts(parts: list[ShardFile], location: str) -> list[dict[str, Column]]:
    contents: list[dict[str, Column]] = [{} for _ in parts]

    def read(number: int) -> None:
        part = parts[number]
        path = locations.join(location, *part.name.split("/"))
        try:
            data = read_file(path, part.num_bytes)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"{path!r} is missing, a part of the manifest: restore it from a copy."
            ) from error
        if len(data) != part.num_bytes or checksum(data) != part.header_checksum:
            raise CorruptCheckpointError(
                f"{path!r}, a part of the manifest, is not the one that was saved (size or "
                "checksum differs): restore it from a copy, or load another checkpoint."
            )
        _, contents[number] = unpack(data)

    num_threads = 1 if locations.is_local(location) else NUM_REQUESTS
    run_threads(read, range(len(parts)), num_threads)
    return contents
