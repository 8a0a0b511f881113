"""Parts of large manifests: files that hold the chunks of a range of keys each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import numpy as np

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.checksum import checksum
from distckpt._format.columns import narrow, pack, pack_table, require, unpack
from distckpt._format.manifest import (
    CARRIED_PART,
    MAX_TABLE_BYTES,
    TABLE_COLUMNS,
    ChunkTable,
    files_in,
    judging_manifest,
)
from distckpt._format.marker import read_file
from distckpt._format.planned_manifest import PlannedManifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._geometry.region import IntArray
from distckpt._storage import locations

PART_ROWS = 1 << 20
"""With more chunks, a manifest is divided into parts of about as many."""
_NAME = re.compile(r"objects(?:-[0-9a-f]{16})?/chunks-\d+\.safetensors")


def divided(chunks: ChunkTable) -> tuple[ChunkTable, dict[str, bytes]]:
    """Return what of chunks, sorted by key, the manifest itself holds, and the contents of its
    parts by name.

    Few chunks stay in the manifest.
    """
    if len(chunks.key_ids) <= PART_ROWS:
        return chunks, {}
    parts = parts_by_name(cut_into_parts(chunks))
    rest = chunks.without_blocks(np.zeros(0, np.int64))
    rest = rest._replace(files=[*chunks.files, *files_of(parts)])
    return rest._replace(block_checksums=chunks.block_checksums), parts


def parts_by_name(parts: Iterable[bytes]) -> dict[str, bytes]:
    """Name parts, in their order."""
    return {
        f"objects/chunks-{number:05d}.safetensors": part for number, part in enumerate(parts, 1)
    }


def part_of(chunks: ChunkTable, rows: slice) -> bytes:
    """Encode some rows of chunks as the content of a part."""
    return pack_table({name: narrow(getattr(chunks, name)[rows]) for name in TABLE_COLUMNS})


def files_of(parts: Mapping[str, bytes]) -> list[ShardFile]:
    """Describe parts."""
    return [ShardFile(name, len(p), len(p), checksum(p)) for name, p in parts.items()]


def cut_into_parts(chunks: ChunkTable) -> list[bytes]:
    """Return the contents of the parts that hold some chunks, which are sorted by key."""
    edges = [0, *_cuts(chunks.key_ids), len(chunks.key_ids)]
    return [part_of(chunks, slice(*edge)) for edge in itertools.pairwise(edges) if edge[1]]


def with_parts(planned: PlannedManifest, chunks: ChunkTable) -> tuple[ChunkTable, dict[str, bytes]]:
    """Do the same with the completed chunks of a plan, which may have parts already."""
    if not planned.parts:
        return divided(chunks)
    return chunks._replace(files=[*chunks.files, *files_of(planned.parts)]), dict(planned.parts)


def _cuts(key_ids: IntArray) -> list[int]:
    """Return where to cut chunks, between keys, into parts of at least `PART_ROWS`."""
    begins = np.flatnonzero(key_ids[1:] != key_ids[:-1]) + 1
    cuts: list[int] = begins[np.diff(begins // PART_ROWS, prepend=0) > 0].tolist()
    return cuts


def joined(data: bytes, location: str) -> bytes:
    """Return a manifest that carries its parts at a location, see `Manifest.from_bytes`.

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
        require(min(sizes) >= 0 and sum(sizes) <= MAX_TABLE_BYTES, "its parts are too large")
        for number, content in enumerate(_read_parts(parts, location), 1):
            columns[f"{CARRIED_PART}{number:05d}"] = np.frombuffer(content, np.uint8)
        return pack(fields, columns)


def _read_parts(parts: list[ShardFile], location: str) -> list[bytes]:
    contents = [b""] * len(parts)

    def read(number: int) -> None:
        part = parts[number]
        path = locations.join(location, *part.name.split("/"))
        try:
            data = read_file(path, part.num_bytes)
        except FileNotFoundError as error:
            raise _damaged(
                path, f"{path!r} is missing, a part of the manifest: restore it from a copy."
            ) from error
        if len(data) != part.num_bytes or checksum(data) != part.header_checksum:
            raise _damaged(
                path,
                f"{path!r}, a part of the manifest, is not the one that was saved (size or "
                "checksum differs): restore it from a copy, or load another checkpoint.",
            )
        contents[number] = data

    num_threads = 1 if locations.is_local(location) else NUM_REQUESTS
    run_threads(read, range(len(parts)), num_threads)
    return contents


def _damaged(path: str, message: str) -> CorruptCheckpointError:
    error = CorruptCheckpointError(message)
    error.file = path
    return error
