"""From a plan to files: lays out and writes what one rank owns."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._format import safetensors_file
from distckpt._format.checksum import checksum
from distckpt._format.manifest import FORMAT_VERSION, MANIFEST_NAME, OBJECT, ShardFile, marker_fields
from distckpt._io.write import Fill, NewFile, WriteSettings, file_of_tensors, write_files
from distckpt._plan.layout import FileLayout, ManifestLayout, WrittenRecord, assemble_manifest
from distckpt._plan.save import ChunkLayout, Pieces, layout_files
from distckpt._state.shards import Shard, ShardTable, region_view
from distckpt._storage import locations
from distckpt.mapping import ShardedObject, ShardedTensor

Contents: TypeAlias = list[list[torch.Tensor]]
"""For each chunk of a file the tensors that are its bytes, one after the other."""


class FilesToWrite(NamedTuple):
    """All that one rank writes: for each file of tensors its layout and contents, and encoded objects.

    `wrap_fill`, given the number of a file of tensors and what fills it, returns what fills it instead.
    """

    tensor_files: list[tuple[FileLayout, Contents]]
    objects: dict[str, bytes]
    wrap_fill: Callable[[int, Fill], Fill] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of data, without headers."""
        in_tensors = sum(sum(layout.num_bytes) for layout, _ in self.tensor_files)
        return in_tensors + sum(map(len, self.objects.values()))


def lay_out_files(rank: int, shards: Sequence[Shard], table: ShardTable, pieces: Pieces) -> list[FileLayout]:
    """Decide where in which file each piece of one rank goes.

    Args:
        rank: goes into the names of files.
        shards: of this rank.
        table: describes `shards`.
        pieces: what this rank writes.

    Returns:
        One layout for each file; one of objects comes last.
    """
    kinds = dict(zip(table.keys, zip(table.dtypes, table.global_shapes, strict=True), strict=True))
    dtypes = [kinds[shard.key][0] for shard in shards]
    layout = layout_files(pieces, [s.key for s in shards], dtypes, [len(s.global_shape) for s in shards])
    tensor_files = [file for file in ([c for c in file if c.dtype != OBJECT] for file in layout) if file]
    # Cells of one object have names of their own, so all fit into one file.
    object_chunks = [chunk for file in layout for chunk in file if chunk.dtype == OBJECT]
    layouts = []
    for index, chunks in enumerate(tensor_files):
        name = "tensors/" + safetensors_file.shard_file_name(rank, index, len(tensor_files))
        layouts.append(lay_out_tensor_file(name, chunks, {chunk.key: kinds[chunk.key][1] for chunk in chunks}))
    if object_chunks:
        unknown = [0] * len(object_chunks)
        file = ShardFile("objects/" + safetensors_file.object_file_name(rank), 0, 0, 0)
        layouts.append(FileLayout(file, b"", object_chunks, unknown, unknown))
    return layouts


def lay_out_tensor_file(
    name: str, chunks: Sequence[ChunkLayout], global_shapes: Mapping[str, tuple[int, ...]]
) -> FileLayout:
    """Arrange chunks, at most one for each key, in the order the format asks for."""
    entries = [safetensors_file.Entry(c.key, c.dtype, c.region.shape, _num_bytes(c)) for c in chunks]
    order = safetensors_file.layout_order(entries)
    chunks, entries = [chunks[i] for i in order], [entries[i] for i in order]
    metadata = safetensors_file.sharding_metadata({c.key: c.region for c in chunks}, _own_metadata(global_shapes))
    header, first_bytes = safetensors_file.build_header(entries, metadata)
    sizes = [entry.num_bytes for entry in entries]
    file = ShardFile(name, len(header) + sum(sizes), len(header), checksum(header))
    return FileLayout(file, header, chunks, first_bytes, sizes)


def collect(layouts: Sequence[FileLayout], shards: Sequence[Shard]) -> FilesToWrite:
    """Look up the contents of files: views of the tensors of shards, and the encodings of objects."""
    files = FilesToWrite([], {})
    for layout in layouts:
        if layout.header:
            files.tensor_files.append((layout, [_tensors_of(chunk, shards) for chunk in layout.chunks]))
        else:
            for chunk in layout.chunks:
                shard = shards[chunk.pieces[0][0]]
                assert isinstance(shard, ShardedObject)
                files.objects[shard.unique_key] = shard.data
    return files


def in_folder(name: str, suffix: str) -> str:
    """Return the name of a file with a suffix to that of its folder, see `PreparedSave.folder_suffix`."""
    folder, _, file = name.partition("/")
    return f"{folder}{suffix}/{file}"


def write_all(
    checkpoint_dir: str, rank: int, files: FilesToWrite, settings: WriteSettings, suffix: str = ""
) -> WrittenRecord:
    """Write the files of one rank into the folders `tensors` and `objects`, whose names end in a suffix."""
    new = [new_tensor_file(checkpoint_dir, layout, contents, suffix) for layout, contents in files.tensor_files]
    if files.wrap_fill is not None:
        new = [file._replace(fill=files.wrap_fill(number, file.fill)) for number, file in enumerate(new)]
    object_file = None
    sizes = [len(data) for data in files.objects.values()]
    if files.objects:
        new_file, object_file = new_object_file(checkpoint_dir, rank, files.objects, suffix)
        new.append(new_file)
    checksums = write_files(new, settings)
    joined = np.concatenate(checksums) if checksums else np.zeros(0, np.uint64)
    return WrittenRecord(object_file, np.array(sizes, np.int64), joined)


def new_object_file(
    checkpoint_dir: str, rank: int, objects: Mapping[str, bytes], suffix: str = ""
) -> tuple[NewFile, ShardFile]:
    """Lay out encoded objects, by unique key, as the file of objects of one rank."""
    name = in_folder("objects/" + safetensors_file.object_file_name(rank), suffix)
    entries = [safetensors_file.Entry(key, "U8", (len(data),), len(data)) for key, data in objects.items()]
    header, _ = safetensors_file.build_header(entries, _own_metadata({}))
    contents = [[torch.frombuffer(bytearray(data), dtype=torch.uint8)] for data in objects.values()]
    size = len(header) + sum(map(len, objects.values()))
    file = file_of_tensors(locations.join(checkpoint_dir, *name.split("/")), header, contents)
    return file, ShardFile(name, size, len(header), checksum(header))


def new_tensor_file(checkpoint_dir: str, layout: FileLayout, contents: Contents, suffix: str = "") -> NewFile:
    """Put a layout and its contents together."""
    location = locations.join(checkpoint_dir, *in_folder(layout.file.name, suffix).split("/"))
    return file_of_tensors(location, layout.header, contents)


def write_manifest(
    checkpoint_dir: str, layout: ManifestLayout, records: Sequence[WrittenRecord], suffix: str, durable: bool
) -> dict[str, Any]:
    """Write the manifest of what all ranks have written; returns the marker fields that name it.

    On an object store none is ever replaced, since a marker may name it: it gets another name where there is one.
    """
    files = [file._replace(name=in_folder(file.name, suffix)) for file in layout.files]
    data = assemble_manifest(layout._replace(files=files), records).to_bytes()
    name = MANIFEST_NAME
    if not locations.create_bytes(locations.join(checkpoint_dir, name), data, durable):
        name = f"manifest{suffix or '-' + secrets.token_hex(8)}.safetensors"
        locations.write_bytes(locations.join(checkpoint_dir, name), data, durable)
    return marker_fields(data, name)


def _own_metadata(global_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    metadata = {"distckpt_format": str(FORMAT_VERSION)}
    if global_shapes:
        metadata[safetensors_file.GLOBAL_SHAPES] = json.dumps(global_shapes, separators=(",", ":"))
    return metadata


def _num_bytes(chunk: ChunkLayout) -> int:
    return chunk.region.num_elements * FROM_NAME[chunk.dtype].itemsize


def _tensors_of(chunk: ChunkLayout, shards: Sequence[Shard]) -> list[torch.Tensor]:
    tensors = []
    for shard_id, region in chunk.pieces:
        shard = shards[shard_id]
        assert isinstance(shard, ShardedTensor)
        tensors.append(region_view(shard, region))
    return tensors
