"""What one rank writes: pieces become chunks, chunks become files, files a plan.

Plans are kept, so that saving the same structure again exchanges next to nothing. A plan has
regions, names and sizes; never a tensor, a pointer or a value.
"""

from __future__ import annotations

import json
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

SMALL_CHUNK_BYTES = 256 << 10
"""Chunks of at most this size lie side by side. A load by other ranks that needs only those, say
the few rows of small tensors that a rank has, would otherwise read each with a request of its own.
"""


class PlannedChunk(NamedTuple):
    """A chunk to be written: a region of a global tensor, or a cell of a grid of objects.

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
    """A file to be written: the header, then the bytes of the chunks without gaps."""

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
        files: of tensors.
        objects: that this rank writes; their file is laid out once they are encoded.
        manifest: on the coordinator, the manifest of what all ranks write.
        replicas: regions of shards that other ranks hold too, and that must be equal; None if no
            rank has any.
        weights: one for each of them; the weights of all replicas of a region add up to 0, modulo
            2**64.
        checksum_file: the name of the file that gets the checksums of what this rank writes; None
            if they go into the manifest, or there are none.
    """

    number: int
    files: list[PlannedFile]
    objects: list[PlannedChunk]
    manifest: PlannedManifest | None
    replicas: Sequence[tuple[int, Region]] | None = None
    weights: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
    checksum_file: str | None = None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors that this rank writes."""
        return sum(sum(file.chunk_bytes) for file in self.files)


def manifest_of_keys(table: GlobalTable, aliases: Mapping[int, int]) -> Manifest:
    """Describe the keys that are stored, in a manifest without chunks; for `aliases` see
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
    """Arrange the pieces of one rank, whose shards the table describes; return the files of
    tensors, and the objects.

    As torch's readers require, a file has at most one chunk of a key. Pieces that follow one
    another in memory order become one chunk; a key's further chunks go to further files.
    """
    groups = _groups_for_files(_chunks_of_pieces(table, pieces))
    objects = [chunk for group in groups for chunk in group if chunk.dtype == OBJECT]
    of_tensors = [[chunk for chunk in group if chunk.dtype != OBJECT] for group in groups]
    of_files = list(filter(None, of_tensors))
    global_shapes = dict(zip(table.keys, table.global_shapes, strict=True))
    files = [
        lay_out_tensor_file(
            "tensors/" + shard_file_name(rank, number, len(of_files)), chunks, global_shapes
        )
        for number, chunks in enumerate(of_files)
    ]
    return files, objects


def _groups_for_files(chunks: Iterable[tuple[int, PlannedChunk]]) -> list[list[PlannedChunk]]:
    """Put chunks, each after the number of its key, into groups with one chunk of a key each."""
    by_key: dict[int, list[PlannedChunk]] = {}
    for index, chunk in chunks:
        by_key.setdefault(index, []).append(chunk)
    groups: list[list[PlannedChunk]] = []
    for of_key in by_key.values():
        for number, chunk in enumerate(coalesced(of_key)):
            if number == len(groups):
                groups.append([])
            groups[number].append(chunk)
    return groups


def _chunks_of_pieces(table: ShardTable, pieces: Pieces) -> Iterator[tuple[int, PlannedChunk]]:
    """Make a chunk of each piece; yield it after the number that its key has in the table."""
    # A table lists shards in order. Those of pieces may be few of them.
    indices = table.key_ids[np.searchsorted(table.shard_ids, pieces.shard_ids)]
    columns = (column.tolist() for column in (*pieces, indices))
    for key_id, shard_id, offset, shape, index in zip(*columns, strict=True):
        ndim, dtype = len(table.global_shapes[index]), table.dtypes[index]
        region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
        num_bytes = 0 if dtype == OBJECT else region.num_elements * ITEM_BYTES[dtype]
        parts = ((shard_id, region),)
        yield index, PlannedChunk(key_id, table.keys[index], dtype, region, num_bytes, parts)


def lay_out_tensor_file(
    name: str, chunks: Sequence[PlannedChunk], global_shapes: Mapping[str, tuple[int, ...]]
) -> PlannedFile:
    """Arrange chunks, at most one for each key, in the order that the format prescribes.

    Chunks that are in this order already give the same bytes.
    """
    # Stable: of items of one size, small chunks follow the others.
    chunks = sorted(chunks, key=lambda chunk: chunk.num_bytes <= SMALL_CHUNK_BYTES)
    entries = [Entry(c.key, c.dtype, c.region.shape, c.num_bytes) for c in chunks]
    order = layout_order(entries)
    shapes = {chunks[i].key: global_shapes[chunks[i].key] for i in order}
    own = {**_OWN_METADATA, GLOBAL_SHAPES: json.dumps(shapes, separators=(",", ":"))}
    metadata = sharding_metadata({chunks[i].key: chunks[i].region for i in order}, own)
    header, _ = build_header([entries[i] for i in order], metadata)
    return PlannedFile(name, header, [chunks[i] for i in order])


def open_object_file(rank: int, objects: Sequence[PlannedChunk]) -> PlannedFile:
    """Return the file of objects that are not encoded yet: without a header, and without sizes."""
    return PlannedFile(object_file_of_rank(rank), b"", list(objects))


def object_file_of_rank(rank: int) -> str:
    """Name the file of the objects that a rank writes."""
    return "objects/" + object_file_name(rank)


def checksum_file_name(rank: int) -> str:
    """Name the file of the checksums of what a rank writes."""
    return f"objects/rank-{rank + 1:05d}{CHECKSUMS_SUFFIX}"


def lay_out_object_file(
    rank: int, objects: Sequence[PlannedChunk], sizes: Mapping[str, int]
) -> PlannedFile:
    """Arrange encoded objects; `sizes` has, in their order, the size of each by its unique key."""
    pairs = zip(objects, sizes.values(), strict=True)
    chunks = [chunk._replace(num_bytes=size) for chunk, size in pairs]
    entries = [Entry(key, "U8", (size,), size) for key, size in sizes.items()]
    header, _ = build_header(entries, _OWN_METADATA)
    # Cells of one object have different names, so all fit into one file.
    return PlannedFile(object_file_of_rank(rank), header, chunks)


_OWN_METADATA = {"distckpt_format": str(FORMAT_VERSION)}


def chunk_table(files: Sequence[PlannedFile]) -> ChunkTable:
    """Tabulate the chunks of files; checksums are not known yet."""
    first_bytes: list[int] = []
    described: list[ShardFile] = []
    for file in files:
        position = len(file.header)
        for size in file.chunk_bytes:
            first_bytes.append(position)
            position += size
        described.append(ShardFile(file.name, position, len(file.header), checksum(file.header)))
    chunks = [chunk for file in files for chunk in file.chunks]
    offsets, shapes = regions_to_arrays([chunk.region for chunk in chunks])
    return ChunkTable(
        files=described,
        key_ids=np.array([chunk.key_id for chunk in chunks], np.int64),
        file_ids=np.repeat(np.arange(len(files)), [len(file.chunks) for file in files]),
        first_bytes=np.array(first_bytes, np.int64),
        num_bytes=np.array([chunk.num_bytes for chunk in chunks], np.int64),
        offsets=offsets,
        shapes=shapes,
        block_checksums=np.empty(0, np.uint64),
    )


def coalesced(chunks: list[PlannedChunk]) -> list[PlannedChunk]:
    """Put chunks of one key together whose contents follow one another; cells of objects stay as
    they are.
    """
    if len(chunks) == 1:
        return chunks
    in_order = sorted(chunks, key=lambda chunk: chunk.region.offset)
    if in_order[0].dtype == OBJECT:
        return in_order
    merged: list[PlannedChunk] = []
    for chunk in in_order:
        while merged and (region := _joined(merged[-1].region, chunk.region)) is not None:
            previous = merged.pop()
            chunk = chunk._replace(
                region=region,
                num_bytes=previous.num_bytes + chunk.num_bytes,
                pieces=previous.pieces + chunk.pieces,
            )
        merged.append(chunk)
    return merged


def _joined(first: Region, second: Region) -> Region | None:
    """Return the region whose row-major content is the content of two regions, one after the other;
    None if there is no such region.
    """
    if not first.shape:
        return None
    largest = map(max, first.shape, second.shape)
    # Along an axis behind the first long one, they would not follow one another in memory.
    last_axis = next((axis for axis, size in enumerate(largest) if size > 1), 0)
    for axis in range(last_axis + 1):
        wanted = Region(
            with_item(first.offset, axis, first.offset[axis] + first.shape[axis]),
            with_item(first.shape, axis, second.shape[axis]),
        )
        if second == wanted:
            extent = first.shape[axis] + second.shape[axis]
            return Region(first.offset, with_item(first.shape, axis, extent))
    return None


def compared_replicas(
    table: ShardTable, factors: IntArray, stride: int
) -> tuple[list[tuple[int, Region]] | None, npt.NDArray[np.uint64]]:
    """Return the `replicas` and `weights` of a plan for the shards of one rank, see
    `replica_weights`; a stride of 0 stands for no replicas on any rank.
    """
    if not stride:
        return None, np.empty(0, np.uint64)
    weights = replica_weights(table, factors, stride)
    rows = np.flatnonzero(weights)
    columns = table.shard_ids, table.key_ids, table.offsets, table.shapes
    ndims = [len(shape) for shape in table.global_shapes]
    replicas = [
        (shard_id, Region(tuple(offset[: ndims[key_id]]), tuple(shape[: ndims[key_id]])))
        for shard_id, key_id, offset, shape in zip(
            *(column[rows].tolist() for column in columns), strict=True
        )
    ]
    return replicas, weights[rows]


# --- Plans that are kept --------------------------------------------------------------------------

Structure: TypeAlias = tuple[Any, ...]
"""Everything that a plan depends on about the shards of one rank; equal structures have equal
plans.
"""

MAX_PLANS = 8
"""Structures that are kept, for programs that save several state dicts in turn."""


class PlanCache:
    """The latest structures of one strategy and their plans; the last used come first."""

    def __init__(self) -> None:
        self._plans: list[tuple[Structure, SavePlan | None]] = []
        self._lock = threading.Lock()

    def find(self, structure: Structure) -> tuple[bool, SavePlan | None]:
        """Return whether a structure was kept, and its plan."""
        with self._lock:
            for place, (known, plan) in enumerate(self._plans):
                if known == structure:
                    self._plans.insert(0, self._plans.pop(place))
                    return True, plan
        return False, None

    def keep(self, structure: Structure, plan: SavePlan | None) -> None:
        """Keep a structure in the place of the one that was used longest ago.

        A plan of None stands for a state dict that ranks had to describe together: its own
        structure has no plan.
        """
        with self._lock:
            others = [item for item in self._plans if item[0] != structure]
            self._plans = [(structure, plan), *others[: MAX_PLANS - 1]]


def structure_of(shards: Sequence[Shard], ranks: Ranks, *settings: object) -> Structure:
    """Return what a plan depends on: every shard except for its data, which of them share memory,
    who saves, and how.
    """
    of_tensor = attrgetter(
        "key",
        "dtype",
        "local_shape",
        "global_shape",
        "global_offset",
        "replica_id",
        "prepend_axis_num",
        "flattened_range",
    )
    of_object = attrgetter("key", "global_shape", "global_offset", "replica_id")
    # One isinstance for each class, not for each shard: there may be many.
    getters = {
        kind: of_object if issubclass(kind, ShardedObject) else of_tensor
        for kind in set(map(type, shards))
    }
    described = [getters[type(shard)](shard) for shard in shards]
    # Some compare equal to replica ids that the author has chosen.
    copies = [type(shard.replica_id) for shard in shards]
    return (ranks.rank, ranks.size, settings, find_ties(shards), described, copies)
