"""Laying out what one rank writes: pieces become chunks, chunks become files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._format.checksum import checksum
from distckpt._format.manifest import FORMAT_VERSION, OBJECT, ChunkTable, Manifest, ShardFile
from distckpt._format.safetensors_file import (
    GLOBAL_SHAPES,
    Entry,
    build_header,
    layout_order,
    object_file_name,
    shard_file_name,
    sharding_metadata,
)
from distckpt._geometry.region import Region, regions_to_arrays
from distckpt._plan.save import Pieces
from distckpt._state.shards import GlobalTable, ShardTable


class PlannedChunk(NamedTuple):
    """A chunk to be written: a region of the global tensor, or a cell of the grid of objects.

    `num_bytes` of an object is known when that is encoded. `pieces` are `(shard id, region)` of
    what is put together to the chunk, in the order of the bytes.
    """

    key_id: int
    key: str
    dtype: str
    region: Region
    num_bytes: int
    pieces: tuple[tuple[int, Region], ...] = ()


class PlannedFile(NamedTuple):
    """A file to be written: the header, then the bytes of the chunks without gaps."""

    name: str
    header: bytes
    chunks: list[PlannedChunk]

    @property
    def chunk_bytes(self) -> list[int]:
        """The size of each chunk."""
        return [chunk.num_bytes for chunk in self.chunks]


def manifest_of_keys(table: GlobalTable, aliases: Mapping[int, int]) -> Manifest:
    """Describe the keys that are stored, in a manifest without chunks; `aliases` are those of
    `plan_owners`.
    """
    stored = [key_id for key_id in range(len(table.keys)) if key_id not in aliases]
    return Manifest(
        keys=[table.keys[i] for i in stored],
        dtypes=[table.dtypes[i] for i in stored],
        global_shapes=[table.global_shape(i) for i in stored],
        chunks=ChunkTable.empty(),
        aliases={table.keys[alias]: table.keys[key] for alias, key in aliases.items()},
    )


def lay_out_files(
    rank: int, table: ShardTable, pieces: Pieces
) -> tuple[list[PlannedFile], list[PlannedChunk]]:
    """Arrange the pieces of one rank, whose shards the table describes; returns the files of
    tensors, and the objects.

    As torch's readers require, a file has at most one chunk of a key. Pieces that follow one
    another in memory order become one chunk; a key's further chunks go to further files.
    """
    key_of_shard = dict(zip(table.shard_ids.tolist(), table.key_ids.tolist(), strict=True))
    by_key: dict[int, list[PlannedChunk]] = {}
    for key_id, shard_id, offset, shape in zip(
        *(column.tolist() for column in pieces), strict=True
    ):
        index = key_of_shard[shard_id]
        ndim, dtype = len(table.global_shapes[index]), table.dtypes[index]
        region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
        num_bytes = 0 if dtype == OBJECT else region.num_elements * FROM_NAME[dtype].itemsize
        chunk = PlannedChunk(
            key_id, table.keys[index], dtype, region, num_bytes, ((shard_id, region),)
        )
        by_key.setdefault(index, []).append(chunk)
    groups: list[list[PlannedChunk]] = []
    for chunks in by_key.values():
        for number, chunk in enumerate(_coalesce(chunks) if len(chunks) > 1 else chunks):
            if number == len(groups):
                groups.append([])
            groups[number].append(chunk)
    objects = [chunk for group in groups for chunk in group if chunk.dtype == OBJECT]
    of_tensors = [
        tensors
        for group in groups
        if (tensors := [chunk for chunk in group if chunk.dtype != OBJECT])
    ]
    global_shapes = dict(zip(table.keys, table.global_shapes, strict=True))
    files = []
    for number, chunks in enumerate(of_tensors):
        name = "tensors/" + shard_file_name(rank, number, len(of_tensors))
        files.append(
            lay_out_tensor_file(
                name, chunks, {chunk.key: global_shapes[chunk.key] for chunk in chunks}
            )
        )
    return files, objects


def lay_out_tensor_file(
    name: str, chunks: Sequence[PlannedChunk], global_shapes: Mapping[str, tuple[int, ...]]
) -> PlannedFile:
    """Arrange chunks, at most one for each key, in the order that the format prescribes."""
    entries = [Entry(c.key, c.dtype, c.region.shape, c.num_bytes) for c in chunks]
    order = layout_order(entries)
    own = {**_OWN_METADATA, GLOBAL_SHAPES: json.dumps(global_shapes, separators=(",", ":"))}
    metadata = sharding_metadata({chunks[i].key: chunks[i].region for i in order}, own)
    header, _ = build_header([entries[i] for i in order], metadata)
    return PlannedFile(name, header, [chunks[i] for i in order])


def lay_out_object_file(
    rank: int, objects: Sequence[PlannedChunk], sizes: Mapping[str, int]
) -> PlannedFile:
    """Arrange encoded objects; `sizes` has, in their order, the size of each by its unique key."""
    header, _ = build_header(
        [Entry(key, "U8", (size,), size) for key, size in sizes.items()], _OWN_METADATA
    )
    chunks = [
        chunk._replace(num_bytes=size) for chunk, size in zip(objects, sizes.values(), strict=True)
    ]
    # Cells of one object have names of their own, so all fit into one file.
    return PlannedFile("objects/" + object_file_name(rank), header, chunks)


_OWN_METADATA = {"distckpt_format": str(FORMAT_VERSION)}


def chunk_table(files: Sequence[PlannedFile]) -> ChunkTable:
    """Tabulate the chunks of files; checksums are not known yet."""
    chunks = [chunk for file in files for chunk in file.chunks]
    offsets, shapes = regions_to_arrays([chunk.region for chunk in chunks])
    first_bytes: list[int] = []
    described: list[ShardFile] = []
    for file in files:
        position = len(file.header)
        for size in file.chunk_bytes:
            first_bytes.append(position)
            position += size
        described.append(ShardFile(file.name, position, len(file.header), checksum(file.header)))
    return ChunkTable.empty()._replace(
        files=described,
        key_ids=np.array([chunk.key_id for chunk in chunks], np.int64),
        file_ids=np.repeat(np.arange(len(files)), [len(file.chunks) for file in files]),
        first_bytes=np.array(first_bytes, np.int64),
        num_bytes=np.array([chunk.num_bytes for chunk in chunks], np.int64),
        offsets=offsets,
        shapes=shapes,
    )


def _coalesce(chunks: list[PlannedChunk]) -> list[PlannedChunk]:
    merged: list[PlannedChunk] = []
    for chunk in sorted(chunks, key=lambda c: c.region.offset):
        while merged and chunk.dtype != OBJECT:
            region = _joined(merged[-1].region, chunk.region)
            if region is None:
                break
            previous = merged.pop()
            num_bytes = previous.num_bytes + chunk.num_bytes
            chunk = chunk._replace(
                region=region, num_bytes=num_bytes, pieces=previous.pieces + chunk.pieces
            )
        merged.append(chunk)
    return merged


def _joined(first: Region, second: Region) -> Region | None:
    """Return the region whose row-major content is that of two regions, one after the other; None
    if there is none.
    """
    axis = next((i for i, size in enumerate(map(max, first.shape, second.shape)) if size > 1), 0)
    for candidate in range(axis + 1):
        same = all(
            i == candidate
            or (first.offset[i] == second.offset[i] and first.shape[i] == second.shape[i])
            for i in range(len(first.shape))
        )
        if (
            same
            and first.shape
            and first.offset[candidate] + first.shape[candidate] == second.offset[candidate]
        ):
            extent = first.shape[candidate] + second.shape[candidate]
            return Region(
                first.offset, (*first.shape[:candidate], extent, *first.shape[candidate + 1 :])
            )
    return None
