"""Describing files of any format: pieces of tensors and objects, checked to make up the tensors,
become a manifest.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.manifest import OBJECT, ChunkTable, Manifest, ShardFile
from distckpt._format.marker import file_size
from distckpt._geometry.region import IntArray, Region, find_tiling_faults, regions_to_arrays
from distckpt._storage import locations

_MAX_ELEMENTS = 1 << 62


class StoredPiece(NamedTuple):
    """A region of a tensor, or a part of an object, and the bytes that hold it.

    Attributes:
        key: name of the tensor or object.
        dtype: safetensors name of the dtype, such as "F32" or "BF16"; `OBJECT` for an object.
        region: offset and shape inside the global tensor. The bytes hold it in row-major order. The
            parts of an object are the cells of a grid: `Region((0,), (1,))` is the only part of one
            that is not divided.
        global_shape: of the tensor, or of the object's grid; None when it ends where its pieces do.
        file: name of the file, relative to the checkpoint, with `/` between folders.
        first_byte: where in the file the bytes begin.
        num_bytes: how many there are.
    """

    key: str
    dtype: str
    region: Region
    global_shape: tuple[int, ...] | None
    file: str
    first_byte: int
    num_bytes: int


def build_manifest(
    format_name: str,
    location: str,
    pieces: Iterable[StoredPiece],
    files: Sequence[ShardFile] | None = None,
    fields: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Manifest:
    """Build the manifest of a checkpoint from the pieces in its files.

    Args:
        format_name: `name` of the `Reader` that reads the format.
        location: path or URL of the checkpoint.
        pieces: of all tensors and objects, in any order.
        files: what is known about the files; their sizes are looked up when it is None.
        fields: values that JSON can hold, to find again in `manifest.origin`.
        aliases: key -> key of the same tensor, for tied tensors, of which one is described.

    Returns:
        A manifest without checksums.

    Raises:
        CorruptCheckpointError: a file is missing, a piece contradicts itself, or the pieces of a
            tensor overlap, leave gaps or differ in dtype; naming file and key.
    """
    pieces = list(pieces)
    for piece in pieces:
        if fault := _fault_of(piece):
            raise CorruptCheckpointError(
                f"The reader of {format_name!r} describes {location!r} wrongly, or its files are "
                f"damaged: {fault} in {piece!r:.500}."
            )
    groups = _group_by_key(pieces)
    shapes = [_global_shape(location, group) for group in groups.values()]
    in_order = [piece for group in groups.values() for piece in group]
    key_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
    offsets, extents = regions_to_arrays([piece.region for piece in in_order])
    dtypes = [group[0].dtype for group in groups.values()]
    _check_tiling(location, list(groups.values()), shapes, (key_ids, offsets, extents))
    if files is None:
        key_in = {piece.file: piece.key for piece in reversed(in_order)}
        files = [look_up_file(location, name, key) for name, key in key_in.items()]
    _check_positions(location, in_order, {file.name: file.num_bytes for file in files})
    file_ids = {file.name: i for i, file in enumerate(files)}
    chunks = ChunkTable.empty()._replace(
        files=list(files),
        key_ids=key_ids,
        file_ids=np.array([file_ids[piece.file] for piece in in_order], np.int64),
        first_bytes=np.array([piece.first_byte for piece in in_order], np.int64),
        num_bytes=np.array([piece.num_bytes for piece in in_order], np.int64),
        offsets=offsets,
        shapes=extents,
    )
    origin = {**(fields or {}), "format": format_name}
    return Manifest(
        list(groups), dtypes, shapes, chunks, aliases or {}, has_checksums=False, origin=origin
    )


def _fault_of(piece: StoredPiece) -> str | None:
    """Return what is wrong with a piece by itself, None when nothing is."""
    key, dtype, (offset, shape), global_shape, file, first_byte, num_bytes = piece
    if not (isinstance(key, str) and isinstance(file, str)):
        return "a key or a file is no str"
    if dtype != OBJECT and (not isinstance(dtype, str) or dtype not in FROM_NAME):
        return "the dtype is unknown"
    numbers = (*offset, *shape, *(global_shape or ()), first_byte, num_bytes)
    if not all(
        isinstance(number, int | np.integer) and 0 <= number < _MAX_ELEMENTS for number in numbers
    ):
        return "a number is no integer from 0 on"
    if not len(offset) == len(shape) == len(offset if global_shape is None else global_shape):
        return "offset and shapes differ in their number of axes"
    if any(
        at + size > end for at, size, end in zip(offset, shape, global_shape or (), strict=False)
    ):
        return f"a region of {key!r} in {file!r} lies outside the global shape {global_shape}"
    if dtype == OBJECT and any(size != 1 for size in shape):
        return "a part of an object is not one cell of a grid"
    expected = num_bytes if dtype == OBJECT else math.prod(shape) * FROM_NAME[dtype].itemsize
    return None if num_bytes == expected else f"{num_bytes} bytes instead of {expected}"


def _group_by_key(pieces: Iterable[StoredPiece]) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each key, in the order of their offsets."""
    groups: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.key, []).append(piece)
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda piece: piece.region.offset)
    return groups


def _global_shape(location: str, pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    """Check that the pieces of a tensor agree, and return its global shape."""
    first = pieces[0]
    for other in pieces[1:]:
        same_kind = (other.dtype, len(other.region.shape)) == (first.dtype, len(first.region.shape))
        if not same_kind or other.global_shape != first.global_shape:
            raise CorruptCheckpointError(
                f"Key {first.key!r} in {location!r} is {_kind(first)} in {first.file!r} and "
                f"{_kind(other)} in {other.file!r}, which do not fit together: the files are of "
                "different saves. Remove those that do not belong here."
            )
    shape = first.global_shape
    if shape is None:
        shape = tuple(
            map(max, zip(*(map(operator.add, *piece.region) for piece in pieces), strict=True))
        )
    if math.prod([n + 1 for n in shape]) > _MAX_ELEMENTS:
        farthest = max(pieces, key=lambda piece: max(map(operator.add, *piece.region)))
        raise CorruptCheckpointError(
            f"Key {first.key!r} in {location!r} would have the global shape {shape}, larger than "
            f"any storage: {farthest.file!r}, which holds {farthest.region} of it, is damaged. "
            "Restore the file from a copy."
        )
    return shape


def _kind(piece: StoredPiece) -> str:
    whole = "" if piece.global_shape is None else f" of {piece.global_shape}"
    return f"{piece.dtype} {piece.region.shape}{whole}"


def _check_tiling(
    location: str,
    groups: Sequence[Sequence[StoredPiece]],
    shapes: Sequence[tuple[int, ...]],
    columns: tuple[IntArray, IntArray, IntArray],
) -> None:
    """Check that the pieces of each tensor cover it exactly once; parts of objects may be
    missing.
    """
    key_ids, offsets, extents = columns
    for group, shape in zip(groups, shapes, strict=True):
        if group[0].dtype == OBJECT:
            _check_parts_of_object(location, group, shape)
    ndims = np.array(
        [-1 if g[0].dtype == OBJECT else len(s) for g, s in zip(groups, shapes, strict=True)],
        np.int64,
    )
    for ndim in sorted(set(ndims.tolist()) - {-1}):
        members = np.flatnonzero(ndims == ndim)
        rows = np.flatnonzero(ndims[key_ids] == ndim)
        ids = np.searchsorted(members, key_ids[rows])
        bounds = np.array([shapes[i] for i in members.tolist()], np.int64).reshape(
            len(members), ndim
        )
        try:
            faults = find_tiling_faults(ids, offsets[rows, :ndim], extents[rows, :ndim], bounds)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"The tensors with {ndim} axes in {location!r}: {error}."
            ) from error
        if faults:
            key_id = int(members[faults[0].tensor])
            raise _tiling_error(location, groups[key_id], shapes[key_id], faults[0].element)


def _check_parts_of_object(
    location: str, parts: Sequence[StoredPiece], shape: tuple[int, ...]
) -> None:
    # Equal offsets follow one another.
    for first, second in itertools.pairwise(parts):
        if first.region.offset == second.region.offset:
            raise _tiling_error(location, parts, shape, first.region.offset)


def _check_positions(
    location: str, pieces: Sequence[StoredPiece], sizes: Mapping[str, int]
) -> None:
    for piece in pieces:
        if piece.first_byte + piece.num_bytes > sizes[piece.file]:
            raise CorruptCheckpointError(
                f"{locations.join(location, piece.file)!r} has {sizes[piece.file]} bytes, but "
                f"{piece.region} of key {piece.key!r} ends at byte "
                f"{piece.first_byte + piece.num_bytes}: the file was cut off. Restore it from a "
                "copy."
            )


def _tiling_error(
    location: str, pieces: Sequence[StoredPiece], shape: tuple[int, ...], element: tuple[int, ...]
) -> CorruptCheckpointError:
    def holds(region: Region) -> bool:
        return all(
            o <= e < o + n for o, n, e in zip(region.offset, region.shape, element, strict=True)
        )

    name = f"Key {pieces[0].key!r} (global shape {shape}) in {location!r}: element {element}"
    holders = [piece for piece in pieces if holds(piece.region)]
    places = [f"{piece.region} in {piece.file!r}" for piece in holders or pieces]
    if holders:
        return CorruptCheckpointError(
            f"{name} is stored several times: {' and '.join(places[:3])}. The files are damaged, "
            "or some are of an earlier save: remove those."
        )
    return CorruptCheckpointError(
        f"{name} is in no file. A shard file is missing or not visible yet, or shards were missing "
        f"during the save; there are {', '.join(places[:6])}."
    )


def look_up_file(location: str, name: str, key: str) -> ShardFile:
    """Describe a file that holds a key, after checking that it is there and inside of the
    checkpoint.
    """
    path = locations.join(location, *name.split("/"))
    if not locations.is_inner_name(name, max_parts=4):
        raise CorruptCheckpointError(
            f"{location!r} places {key!r:.300} in {name!r:.300}, which leads elsewhere."
        )
    try:
        return ShardFile(name, file_size(path), 0, 0)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing, but holds {key!r:.300}: restore it, or finish copying the "
            "directory."
        ) from error
