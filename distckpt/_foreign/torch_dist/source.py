"""Checkpoints of torch.distributed.checkpoint as manifests: everything that reads chunks reads them
too.

Two kinds, both with a `.metadata` file beside their `.distcp` files: those that PyTorch wrote, and
those that Megatron Core wrote with its `torch_dist` strategy, which has a marker beside them and in
most versions a `common.pt`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import (
    CorruptCheckpointError,
    InvalidShardingError,
    UnsupportedObjectError,
)
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import run_threads
from distckpt._checkpoint.stored_pieces import StoredPiece, build_manifest, look_up_file
from distckpt._foreign.torch_dist.metadata import StoredItem, TensorEntry, read_metadata
from distckpt._foreign.torch_dist.objects import TensorView, locate_tensor
from distckpt._foreign.torch_dist.unpickle import RefusedGlobalError
from distckpt._format.manifest import OBJECT, Manifest, ShardFile
from distckpt._format.marker import read_marker
from distckpt._geometry.region import Region, flat_range_regions
from distckpt._mapping.wrappers import ShardedObject
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"

_MEGATRON_COMMON_KEY = "common_state"
_Cell = tuple[str, tuple[int, ...], tuple[int, ...], StoredItem]
"""A part of an object: its key, its place in the grid of parts, the shape of that grid, and where
it is stored.
"""
_MAX_RUNS = 1 << 20
"""Contiguous runs that one stored tensor is divided into at most."""


@paused_garbage_collection()
def read_directory(location: str, format_name: str) -> Manifest:
    """Describe a checkpoint of torch.distributed.checkpoint.

    Reads `.metadata`, and of every stored tensor the few bytes that say where its elements lie. The
    manifest's `origin` has the paths in the state dict of PyTorch's objects, one for each.
    """
    is_megatron = read_marker(location) is not None
    metadata = read_metadata(locations.join(location, METADATA_NAME))
    items = [(entry.key, item) for entry in metadata.tensors for _, item in entry.parts]
    files = _look_up_files(location, [*items, *metadata.objects.items()])
    pieces = _tensor_pieces(location, metadata.tensors)
    fields: dict[str, Any] = {}
    if is_megatron:
        cells = _megatron_objects(location, metadata.objects, files)
    else:
        names = sorted(metadata.objects)
        fields["paths"] = [metadata.paths.get(name, (name,)) for name in names]
        cells = [
            (COMMON_KEY, (i,), (len(names),), metadata.objects[name])
            for i, name in enumerate(names)
        ]
    for key, offset, shape, item in cells:
        pieces.append(StoredPiece(key, OBJECT, Region(offset, (1,) * len(offset)), shape, *item))
    return build_manifest(format_name, location, pieces, list(files.values()), fields)


# ---- files


def _look_up_files(location: str, items: Sequence[tuple[str, StoredItem]]) -> dict[str, ShardFile]:
    """Look up the files that `.metadata` names, and check that they hold the items it places in
    them.
    """
    files: dict[str, ShardFile] = {}
    in_file: Counter[str] = Counter()
    for key, item in items:
        if item.file not in files:
            files[item.file] = look_up_file(location, item.file, key)
        if item.first_byte + item.num_bytes > files[item.file].num_bytes:
            raise CorruptCheckpointError(
                f"{locations.join(location, item.file)!r} has {files[item.file].num_bytes} bytes, "
                f"but {METADATA_NAME} says that {key!r} lies in it up to byte "
                f"{item.first_byte + item.num_bytes}: the file was cut off. Restore it from a copy."
            )
        in_file[item.file] += item.num_bytes
        if in_file[item.file] > files[item.file].num_bytes:
            raise CorruptCheckpointError(
                f"{METADATA_NAME} of {location!r} places {key!r} in {item.file!r} where other "
                "items lie: it is damaged. Restore it from a copy."
            )
    return files


# ---- tensors


def _tensor_pieces(location: str, entries: Sequence[TensorEntry]) -> list[StoredPiece]:
    for entry in entries:
        if entry.dtype not in TO_NAME:
            raise UnsupportedObjectError(
                f"Key {entry.key!r} in {location!r} has dtype {entry.dtype}, which checkpoints of "
                "distckpt cannot hold: remove or convert it with the program that wrote it."
            )
    parts = [(entry, region, item) for entry in entries for region, item in entry.parts]
    found: dict[int, list[StoredPiece]] = {}

    def read(number: int) -> None:
        entry, region, item = parts[number]
        try:
            found[number] = list(_pieces_of_part(location, entry, region, item))
        except ValueError as error:
            refused = (
                f"names {error.name!r:.200}"
                if isinstance(error, RefusedGlobalError)
                else str(error)
            )
            raise CorruptCheckpointError(
                f"{locations.join(location, item.file)!r}, bytes {item.first_byte} to "
                f"{item.first_byte + item.num_bytes}, does not hold {region} of key {entry.key!r} "
                f"as a tensor: {refused}. Nothing of it was run. Restore the file from a copy."
            ) from error

    # Two small reads each: on a network file system it is their latency that takes time.
    run_threads(read, range(len(parts)))
    pieces = [piece for number in range(len(parts)) for piece in found[number]]
    without = {entry.key for entry in entries} - {piece.key for piece in pieces}
    if without:
        raise CorruptCheckpointError(
            f"{METADATA_NAME} of {location!r} places nothing of {summarize_keys(without)}."
        )
    return pieces


def _pieces_of_part(
    location: str, entry: TensorEntry, region: Region, item: StoredItem
) -> Iterator[StoredPiece]:
    path = locations.join(location, *item.file.split("/"))

    def read_range(start: int, stop: int) -> bytes:
        return locations.read_range(path, item.first_byte + start, item.first_byte + stop)

    stored, first_byte = locate_tensor(read_range, item.num_bytes)
    if stored.dtype != entry.dtype or stored.shape != region.shape:
        raise ValueError(
            f"it is {stored.dtype} {stored.shape}, {METADATA_NAME} says {entry.dtype} "
            f"{region.shape}"
        )
    dtype, first = TO_NAME[entry.dtype], item.first_byte + first_byte
    if entry.original_shape is None:
        shape, regions = entry.shape, contiguous_runs(stored, region)
    else:
        shape, regions = (
            entry.original_shape,
            _unflattened(entry, entry.original_shape, stored, region),
        )
    for piece, start in regions:
        yield StoredPiece(
            entry.key, dtype, piece, shape, item.file, first + start * entry.dtype.itemsize,
            piece.num_elements * entry.dtype.itemsize,
        )  # fmt: skip


def contiguous_runs(stored: TensorView, region: Region) -> Iterator[tuple[Region, int]]:
    """Divide a stored tensor into regions whose elements follow one another, each with the position
    of the first.
    """
    shape, strides = region.shape, stored.strides
    if region.num_elements == 0:
        yield region, 0
        return
    # The axes from `outer` on lie as in a contiguous tensor; an axis of size 1 may have any stride.
    outer, step = len(shape), 1
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == step):
        outer -= 1
        step *= shape[outer]
    if outer == 0:
        yield region, 0
        return
    # A transposed tensor has its runs along another axis.
    axes = [axis for axis in range(len(shape)) if strides[axis] == 1 and shape[axis] > 1][:1]
    inner = set(axes if axes and shape[axes[0]] > step else range(outer, len(shape)))
    outside = [axis for axis in range(len(shape)) if axis not in inner]
    if math.prod(shape[axis] for axis in outside) > _MAX_RUNS:
        raise ValueError(
            f"it is stored with strides {strides}, in more than {_MAX_RUNS} runs; save contiguous "
            "tensors"
        )
    extent = tuple(n if axis in inner else 1 for axis, n in enumerate(shape))
    for index in itertools.product(
        *(range(1 if axis in inner else n) for axis, n in enumerate(shape))
    ):
        offset = tuple(a + b for a, b in zip(region.offset, index, strict=True))
        yield Region(offset, extent), sum(a * b for a, b in zip(index, strides, strict=True))


def _unflattened(
    entry: TensorEntry, original: tuple[int, ...], stored: TensorView, region: Region
) -> Iterator[tuple[Region, int]]:
    """Divide a flattened shard into regions of the tensor, whose shape is `original`.

    Such a tensor is stored as an array of one more axis: the first axes number the shards of a
    regular grid, the last one counts the elements of each, flattened.
    """
    grid, flat_size = entry.shape[:-1], entry.shape[-1]
    divides = len(grid) == len(original) and all(
        g and n % g == 0 for n, g in zip(original, grid, strict=False)
    )
    local = tuple(n // g for n, g in zip(original, grid, strict=False)) if divides else ()
    if not divides or math.prod(local) != flat_size or region.shape[:-1] != (1,) * len(grid):
        raise ValueError(f"a flattened tensor of shape {original} in a grid {entry.shape}")
    if stored.strides and stored.strides[-1] != 1 and region.shape[-1] > 1:
        raise ValueError(f"a flattened tensor with strides {stored.strides}")
    if region.num_elements == 0:
        yield Region((0,) * len(local), (0,) * len(local)), 0
        return
    cell = tuple(index * n for index, n in zip(region.offset, local, strict=False))
    first = region.offset[-1]
    position = 0
    for piece in flat_range_regions(local, first, first + region.shape[-1]):
        yield (
            Region(tuple(a + b for a, b in zip(cell, piece.offset, strict=True)), piece.shape),
            position,
        )
        position += piece.num_elements


# ---- objects


def _megatron_objects(
    location: str, objects: Mapping[str, StoredItem], files: dict[str, ShardFile]
) -> list[_Cell]:
    """Place Megatron's objects, whose names end in `/shard_<offset>_<shape>`, and its common
    state.
    """
    cells: list[_Cell] = []
    num_parts: dict[str, int] = {}
    for name, item in objects.items():
        try:
            shard = ShardedObject.empty_from_unique_key(name)
        except InvalidShardingError as error:
            raise CorruptCheckpointError(
                f"The {METADATA_NAME} of {location!r} holds an object {name!r}, which is no name "
                "that Megatron gives."
            ) from error
        key = COMMON_KEY if shard.key == _MEGATRON_COMMON_KEY else shard.key
        cells.append((key, shard.global_offset, shard.global_shape, item))
        last = shard.global_offset[-1] if shard.global_offset else 0
        num_parts[key] = max(num_parts.get(key, 1), last + 1)
    if COMMON_KEY not in num_parts and locations.exists(locations.join(location, COMMON_NAME)):
        files[COMMON_NAME] = look_up_file(location, COMMON_NAME, COMMON_KEY)
        cells.append(
            (COMMON_KEY, (0,), (1,), StoredItem(COMMON_NAME, 0, files[COMMON_NAME].num_bytes))
        )
    # Old names lack the last size.
    return [
        (key, at, tuple(num_parts[key] if n < 0 else n for n in shape), item)
        for key, at, shape, item in cells
    ]
