"""From a plan to files: lays out and writes what one rank owns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from distckpt import _dtypes, _shard_file, _storage
from distckpt._io import checksum
from distckpt._io_write import fill_from_tensors, write_file
from distckpt._manifest import FORMAT_VERSION, OBJECT, ShardFile
from distckpt._plan_save import ChunkLayout, Pieces, layout_files
from distckpt._records import Record, WrittenFile
from distckpt._shards import Shard, ShardTable, region_view
from distckpt.mapping import ShardedObject, ShardedTensor


def write_pieces(checkpoint_dir: str, rank: int, shards: Sequence[Shard], table: ShardTable, pieces: Pieces) -> Record:
    """Write the files of one rank.

    Args:
        checkpoint_dir: with its `tensors` and `objects` directories.
        rank: goes into the names of files.
        shards: of this rank; the data of objects is their encoding.
        table: describes `shards`.
        pieces: what this rank writes.
    """
    kinds = dict(zip(table.keys, zip(table.dtypes, table.global_shapes, strict=True), strict=True))
    dtypes = [kinds[shard.key][0] for shard in shards]
    layout = layout_files(pieces, [s.key for s in shards], dtypes, [len(s.global_shape) for s in shards])
    tensor_files = [file for file in ([c for c in file if c.dtype != OBJECT] for file in layout) if file]
    # Cells of one object have names of their own, so all fit into one file.
    object_chunks = [chunk for file in layout for chunk in file if chunk.dtype == OBJECT]
    written = []
    for index, chunks in enumerate(tensor_files):
        name = "tensors/" + _shard_file.shard_file_name(rank, index, len(tensor_files))
        shapes = {chunk.key: kinds[chunk.key][1] for chunk in chunks}
        contents = [_tensors_of(chunk, shards) for chunk in chunks]
        written.append(write_tensor_file(checkpoint_dir, name, chunks, contents, shapes))
    if object_chunks:
        sharded = [_object_of(chunk, shards) for chunk in object_chunks]
        entries = [_shard_file.Entry(s.unique_key, "U8", (len(s.data),), len(s.data)) for s in sharded]
        contents = [[torch.frombuffer(bytearray(s.data), dtype=torch.uint8)] for s in sharded]
        name = "objects/" + _shard_file.object_file_name(rank)
        written.append(_write(checkpoint_dir, name, object_chunks, entries, _own_metadata({}), contents))
    return Record.of(written)


def write_tensor_file(
    checkpoint_dir: str,
    name: str,
    chunks: Sequence[ChunkLayout],
    contents: Sequence[list[torch.Tensor]],
    global_shapes: Mapping[str, tuple[int, ...]],
) -> WrittenFile:
    """Write one shard file, its entries in the order the format asks for.

    Args:
        checkpoint_dir: where the file goes.
        name: relative to it.
        chunks: at most one for each key.
        contents: for each chunk the tensors that are its bytes, in order.
        global_shapes: by key.
    """
    entries = [_shard_file.Entry(c.key, c.dtype, c.region.shape, _num_bytes(c)) for c in chunks]
    order = _shard_file.layout_order(entries)
    chunks, entries, contents = [chunks[i] for i in order], [entries[i] for i in order], [contents[i] for i in order]
    metadata = _shard_file.sharding_metadata({c.key: c.region for c in chunks}, _own_metadata(global_shapes))
    return _write(checkpoint_dir, name, chunks, entries, metadata, contents)


def _write(
    checkpoint_dir: str,
    name: str,
    chunks: Sequence[ChunkLayout],
    entries: Sequence[_shard_file.Entry],
    metadata: Mapping[str, str],
    contents: Sequence[list[torch.Tensor]],
) -> WrittenFile:
    header, first_bytes = _shard_file.build_header(entries, metadata)
    sizes = [entry.num_bytes for entry in entries]
    location = _storage.join(checkpoint_dir, *name.split("/"))
    checksums = write_file(location, header, sizes, fill_from_tensors(contents))
    shard_file = ShardFile(name, len(header) + sum(sizes), len(header), checksum(header))
    return WrittenFile(shard_file, chunks, first_bytes, sizes, checksums)


def _own_metadata(global_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    metadata = {"distckpt_format": str(FORMAT_VERSION)}
    if global_shapes:
        metadata[_shard_file.GLOBAL_SHAPES] = json.dumps(global_shapes, separators=(",", ":"))
    return metadata


def _num_bytes(chunk: ChunkLayout) -> int:
    return chunk.region.num_elements * _dtypes.FROM_NAME[chunk.dtype].itemsize


def _tensors_of(chunk: ChunkLayout, shards: Sequence[Shard]) -> list[torch.Tensor]:
    tensors = []
    for shard_id, region in chunk.pieces:
        shard = shards[shard_id]
        assert isinstance(shard, ShardedTensor)
        tensors.append(region_view(shard, region))
    return tensors


def _object_of(chunk: ChunkLayout, shards: Sequence[Shard]) -> ShardedObject:
    shard = shards[chunk.pieces[0][0]]
    assert isinstance(shard, ShardedObject)
    return shard
