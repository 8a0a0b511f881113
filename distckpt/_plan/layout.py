"""Layout of one rank's files: pieces become chunks, chunks files, files a plan.

Plans are cached, so that repeated saves of one structure exchange next to nothing. A plan has
regions, names and sizes; never a tensor, a pointer or a value.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import FORMAT_VERSION, OBJECT, Manifest
from distckpt._format.planned_manifest import PlannedManifest
from distckpt._format.safetensors_file import (
    CHECKSUMS_SUFFIX,
    GLOBAL_SHAPES,
    Entry,
    ShardFile,
    build_header,
    layout_order,
    object_file_name,
    shard_file_name,
    sharding_metadata,
)
from distckpt._geometry.region import IntArray, Region, regions_to_arrays, with_item
from distckpt._plan.save import Pieces
from distckpt._ranks.collectives import Ranks
from distckpt._state.shards import GlobalTable, Shard, ShardTable, find_ties
from distckpt._state.validation import replica_weights
from distckpt.mapping._wrappers import ShardedObject

_OF_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim\w*|states?)\.")
"""Keys of optimizers, and perhaps a few others: here names alone must tell."""

SMALL_CHUNK_BYTES = 256 << 10
"""Chunks of at most this size are adjacent in a file.

A load that needs only small chunks, such as a rank's few rows of small tensors, would otherwise
read each with its own request.
"""


class PlannedChunk(NamedTuple):
    """A chunk to write: a region of a global tensor, or an object.

    The `num_bytes` of an object are known once it is encoded. `pieces` has the `(shard id, region)`
    of each piece of the chunk, in the order of the bytes.
    """

    key_id: int
    key: str
    dtype: str
    region: Region
    num_bytes: int
    pieces: tuple[tuple[int, Region], ...] = ()


class PlannedFile(NamedTuple):
    """A file to write: the header, then all chunks without gaps."""

    name: str
    header: bytes
    chunks: list[PlannedChunk]

    @property
    def chunk_bytes(self) -> list[int]:
        """The size of each chunk."""
        return [chunk.num_bytes for chunk in self.chunks]


class SavePlan(NamedTuple):
    """The plan of a save for one rank.

    Attributes:
        number: identifies the plan on all ranks.
        files: files of tensors.
        objects: the objects that this rank writes; their file is laid out once they are encoded.
        manifest: on the coordinator, the manifest of all ranks.
        replicas: regions of shards that must be equal on several ranks; None if no rank has any.
        weights: a weight for each replica; the weights of all replicas of a region add up to 0,
            modulo 2**64.
        checksum_file: the name of the file with the checksums of this rank's blocks; None if they
            go into the manifest, or there are none.
    """

    number: int
    files: list[PlannedFile]
    objects: list[PlannedChunk]
    manifest: PlannedManifest | None
    replicas: Sequence[tuple[int, Region]] | None = None
    weights: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
    checksum_file: str | None = None

    def num_bytes(self, encoded: Mapping[str, bytes]) -> int:
        """Return the number of bytes that this rank writes."""
        num_tensor_bytes = sum(sum(file.chunk_bytes) for file in self.files)
        return num_tensor_bytes + sum(map(len, encoded.values()))


def manifest_of_keys(table: GlobalTable, aliases: Mapping[int, int]) -> Manifest:
    """Describe the stored keys in a manifest without chunks.

    For `aliases` see `find_aliases`.
    """
    shapes = [table.global_shape(key_id) for key_id in range(len(table.keys))]
    return manifest_without_chunks(table.keys, table.dtypes, shapes, aliases)


def manifest_without_chunks(
    keys: Sequence[str],
    dtypes: Sequence[str],
    global_shapes: Sequence[tuple[int, ...]],
    aliases: Mapping[int, int],
) -> Manifest:
    """Describe keys in a manifest, see `manifest_of_keys`."""
    stored = [key_id for key_id in range(len(keys)) if key_id not in aliases]
    return Manifest(
        keys=[keys[i] for i in stored],
        dtypes=[dtypes[i] for i in stored],
        global_shapes=[global_shapes[i] for i in stored],
        chunks=ChunkTable.empty(),
        aliases={keys[alias]: keys[key] for alias, key in aliases.items()},
    )


def lay_out_files(
    rank: int, table: ShardTable, pieces: Pieces, separate_optimizer: bool = False
) -> tuple[list[PlannedFile], list[PlannedChunk]]:
    """Arrange the pieces of one rank; return files of tensors, and objects.

    As torch's readers require, a file has at most one chunk of a key. Pieces that follow one
    another in memory order become one chunk; a key's further chunks go to further files.
    """
    objects: list[PlannedChunk] = []
    chunks_of_files = []
    groups = _groups_for_files(_chunks_of_pieces(table, pieces))
    for group in _divided(groups) if separate_optimizer else groups:
        objects += [chunk for chunk in group if chunk.dtype == OBJECT]
        tensors = [chunk for chunk in group if chunk.dtype != OBJECT]
        if tensors:
            chunks_of_files.append(tensors)
    global_shapes = dict(zip(table.keys, table.global_shapes, strict=True))
    files = []
    for number, chunks in enumerate(chunks_of_files):
        name = "tensors/" + shard_file_name(rank, number, len(chunks_of_files))
        files.append(lay_out_tensor_file(name, chunks, global_shapes))
    return files, objects


def _divided(groups: Iterable[list[PlannedChunk]]) -> Iterator[list[PlannedChunk]]:
    """Yield the chunks of optimizers apart from the others of a group."""
    for group in groups:
        for is_apart in (False, True):
            yield [chunk for chunk in group if bool(_OF_OPTIMIZER.search(chunk.key)) == is_apart]


def _groups_for_files(chunks: Iterable[PlannedChunk]) -> list[list[PlannedChunk]]:
    """Divide chunks into groups with one chunk of a key each."""
    by_key: dict[int, list[PlannedChunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key_id, []).append(chunk)
    groups: list[list[PlannedChunk]] = []
    for chunks_of_key in by_key.values():
        for number, chunk in enumerate(coalesced(chunks_of_key)):
            if number == len(groups):
                groups.append([])
            groups[number].append(chunk)
    return groups


def _chunks_of_pieces(table: ShardTable, pieces: Pieces) -> Iterator[PlannedChunk]:
    """Yield a chunk for each piece."""
    # A table lists shards in order; few of them may have pieces.
    indices = table.key_ids[np.searchsorted(table.shard_ids, pieces.shard_ids)]
    columns = (column.tolist() for column in (*pieces, indices))
    for key_id, shard_id, offset, shape, index in zip(*columns, strict=True):
        ndim = len(table.global_shapes[index])
        dtype = table.dtypes[index]
        region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
        num_bytes = 0
        if dtype != OBJECT:
            num_bytes = region.num_elements * ITEM_BYTES[dtype]
        parts = ((shard_id, region),)
        yield PlannedChunk(key_id, table.keys[index], dtype, region, num_bytes, parts)


def lay_out_tensor_file(
    name: str, chunks: Sequence[PlannedChunk], global_shapes: Mapping[str, tuple[int, ...]]
) -> PlannedFile:
    """Arrange chunks of different keys in the order that the format prescribes.

    Chunks that are in this order already give the same bytes.
    """
    # Stable: among items of one size, small chunks come last.
    chunks = sorted(chunks, key=lambda chunk: chunk.num_bytes <= SMALL_CHUNK_BYTES)
    entries = [Entry(c.key, c.dtype, c.region.shape, c.num_bytes) for c in chunks]
    order = layout_order(entries)
    in_order = [chunks[i] for i in order]
    shapes = {chunk.key: global_shapes[chunk.key] for chunk in in_order}
    own = {**_OWN_METADATA, GLOBAL_SHAPES: json.dumps(shapes, separators=(",", ":"))}
    metadata = sharding_metadata({chunk.key: chunk.region for chunk in in_order}, own)
    header, _ = build_header([entries[i] for i in order], metadata)
    return PlannedFile(name, header, in_order)


def open_object_file(rank: int, objects: Sequence[PlannedChunk]) -> PlannedFile:
    """Return the file of objects that are not encoded yet.

    It has no header, and its chunks no sizes.
    """
    return PlannedFile(f"objects/{object_file_name(rank)}", b"", list(objects))


def checksum_file_name(rank: int) -> str:
    """Name the file of a rank's checksums."""
    return f"objects/rank-{rank + 1:05d}{CHECKSUMS_SUFFIX}"


def lay_out_object_file(
    rank: int, objects: Sequence[PlannedChunk], sizes: Mapping[str, int]
) -> PlannedFile:
    """Arrange encoded objects.

    `sizes` has the size of each object by its unique key, in the order of the objects.
    """
    pairs = zip(objects, sizes.values(), strict=True)
    chunks = [chunk._replace(num_bytes=size) for chunk, size in pairs]
    entries = [Entry(key, "U8", (size,), size) for key, size in sizes.items()]
    header, _ = build_header(entries, _OWN_METADATA)
    # Cells of one object have different names, so all fit into one file.
    return open_object_file(rank, chunks)._replace(header=header)


_OWN_METADATA = {"distckpt_format": str(FORMAT_VERSION)}


def chunk_table(files: Sequence[PlannedFile]) -> ChunkTable:
    """Tabulate the chunks of files; checksums are not known yet."""
    first_bytes: list[int] = []
    shard_files: list[ShardFile] = []
    chunks: list[PlannedChunk] = []
    for file in files:
        position = len(file.header)
        for size in file.chunk_bytes:
            first_bytes.append(position)
            position += size
        header = file.header
        shard_files.append(ShardFile(file.name, position, len(header), checksum(header)))
        chunks += file.chunks
    offsets, shapes = regions_to_arrays([chunk.region for chunk in chunks])
    return ChunkTable(
        files=shard_files,
        key_ids=np.array([chunk.key_id for chunk in chunks], np.int64),
        file_ids=np.repeat(np.arange(len(files)), [len(file.chunks) for file in files]),
        first_bytes=np.array(first_bytes, np.int64),
        num_bytes=np.array([chunk.num_bytes for chunk in chunks], np.int64),
        offsets=offsets,
        shapes=shapes,
        block_checksums=np.empty(0, np.uint64),
    )


def coalesced(chunks: list[PlannedChunk]) -> list[PlannedChunk]:
    """Join chunks of one key whose contents follow one another.

    Objects stay as they are.
    """
    if len(chunks) == 1:
        return chunks
    in_order = sorted(chunks, key=lambda chunk: chunk.region.offset)
    if in_order[0].dtype == OBJECT:
        return in_order
    merged: list[PlannedChunk] = []
    for chunk in in_order:
        while merged:
            region = _joined(merged[-1].region, chunk.region)
            if region is None:
                break
            previous = merged.pop()
            chunk = chunk._replace(
                region=region,
                num_bytes=previous.num_bytes + chunk.num_bytes,
                pieces=previous.pieces + chunk.pieces,
            )
        merged.append(chunk)
    return merged


def _joined(first: Region, second: Region) -> Region | None:
    """Return the region with the row-major contents of two regions in sequence.

    None if there is no such region.
    """
    if not first.shape:
        return None
    largest = map(max, first.shape, second.shape)
    # Joined along an axis after the first long one, they would not be contiguous in memory.
    last_axis = next((axis for axis, size in enumerate(largest) if size > 1), 0)
    for axis in range(last_axis + 1):
        next_region = Region(
            with_item(first.offset, axis, first.offset[axis] + first.shape[axis]),
            with_item(first.shape, axis, second.shape[axis]),
        )
        if second == next_region:
            extent = first.shape[axis] + second.shape[axis]
            return Region(first.offset, with_item(first.shape, axis, extent))
    return None


def compared_replicas(
    table: ShardTable, factors: IntArray, stride: int
) -> tuple[list[tuple[int, Region]] | None, npt.NDArray[np.uint64]]:
    """Return the `replicas` and `weights` of a plan for one rank.

    See `replica_weights`. A stride of 0 stands for no replicas on any rank.
    """
    if not stride:
        return None, np.empty(0, np.uint64)
    weights = replica_weights(table, factors, stride)
    rows = np.flatnonzero(weights)
    columns = table.shard_ids, table.key_ids, table.offsets, table.shapes
    lists = [column[rows].tolist() for column in columns]
    ndims = [len(shape) for shape in table.global_shapes]
    replicas = []
    for shard_id, key_id, offset, shape in zip(*lists, strict=True):
        ndim = ndims[key_id]
        replicas.append((shard_id, Region(tuple(offset[:ndim]), tuple(shape[:ndim]))))
    return replicas, weights[rows]


# --- Cached plans ---------------------------------------------------------------------------------

Structure: TypeAlias = tuple[Any, ...]
"""Everything about the shards of one rank that its plan depends on.

Equal structures have equal plans.
"""

MAX_PLANS = 8
"""Structures per cache, for programs that save several state dicts in turn."""


class PlanCache:
    """The latest structures of one strategy and their plans, latest use first."""

    def __init__(self) -> None:
        self._plans: list[tuple[Structure, SavePlan | None]] = []
        self._lock = threading.Lock()

    def find(self, structure: Structure) -> tuple[bool, SavePlan | None]:
        """Return whether the cache has a structure, and its plan."""
        with self._lock:
            for place, (known, plan) in enumerate(self._plans):
                if known == structure:
                    self._plans.insert(0, self._plans.pop(place))
                    return True, plan
        return False, None

    def keep(self, structure: Structure, plan: SavePlan | None) -> None:
        """Cache a structure; it replaces the least recently used one.

        A plan of None stands for a state dict that ranks had to describe together: its own
        structure has no plan.
        """
        with self._lock:
            others = [item for item in self._plans if item[0] != structure]
            self._plans = [(structure, plan), *others[: MAX_PLANS - 1]]


def structure_of(shards: Sequence[Shard], ranks: Ranks, *settings: object) -> Structure:
    """Return the key of a plan in the cache.

    It has everything that the plan depends on: all shards except for their data, shared memory, the
    ranks and the settings.
    """
    tensor_getter = attrgetter(
        "key",
        "dtype",
        "local_shape",
        "global_shape",
        "global_offset",
        "replica_id",
        "prepend_axis_num",
        "flattened_range",
    )
    object_getter = attrgetter("key", "global_shape", "global_offset", "replica_id")
    # One check for each class, not for each shard: there may be many.
    getters: dict[type, attrgetter[Any]] = {}
    for kind in set(map(type, shards)):
        getters[kind] = tensor_getter
        if issubclass(kind, ShardedObject):
            getters[kind] = object_getter
    attributes = [getters[type(shard)](shard) for shard in shards]
    # Replica ids of different types may compare equal.
    replica_types = [type(shard.replica_id) for shard in shards]
    return (ranks.rank, ranks.size, settings, find_ties(shards), attributes, replica_types)
