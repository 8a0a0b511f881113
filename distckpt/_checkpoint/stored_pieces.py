"""Manifests for files of any format, from the pieces in them."""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import ITEM_BYTES, is_known
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.marker import file_size
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    IntArray,
    Region,
    find_tiling_faults,
    regions_to_arrays,
    stacked,
)
from distckpt._storage import locations

_INTEGERS = (int, np.integer)
_MAX_ELEMENTS = 1 << 62
_OBJECT_NDIM = -1
"""Number of axes that stands for an object."""


class StoredPiece(NamedTuple):
    """A region of a tensor, or part of an object, in bytes.

    Attributes:
        key: name of the tensor or object.
        dtype: safetensors name of the dtype, such as "F32" or "BF16"; `OBJECT` for an object.
        region: offset and shape inside the global tensor, which the bytes hold in row-major order.
            The parts of an object are the cells of a grid; an object that is not divided has one
            part, `Region((0,), (1,))`.
        global_shape: shape of the tensor, or of the object's grid; None if it ends where its pieces
            do.
        file: name of the file, relative to the checkpoint, with `/` between folders.
        first_byte: position of the bytes in the file.
        num_bytes: number of bytes.
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
        pieces: pieces of all tensors and objects, in any order.
        files: names and sizes of the files; looked up if it is None.
        fields: values that JSON can hold, for the reader to find again in `manifest.origin`.
        aliases: for tied tensors, of which only one has pieces, the key of that one by the keys of
            the other ones.

    Returns:
        A manifest without checksums.

    Raises:
        CorruptCheckpointError: a file is missing, a piece contradicts itself, or the pieces of a
            tensor overlap, leave gaps or differ in dtype. The message names file and key.
    """
    pieces = list(pieces)
    _check_each(format_name, location, pieces)
    groups = _group_by_key(pieces)
    by_key = list(groups.values())
    in_order = list(itertools.chain.from_iterable(by_key))
    dtypes = [group[0].dtype for group in by_key]
    shapes = _global_shapes(location, by_key)
    key_ids = np.repeat(np.arange(len(by_key)), list(map(len, by_key)))
    offsets, extents = regions_to_arrays([piece.region for piece in in_order])
    _check_tiling(location, by_key, shapes, (key_ids, offsets, extents))
    if files is None:
        files = _look_up_files(location, in_order)
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
    _check_positions(location, in_order, chunks)
    origin = {**(fields or {}), "format": format_name}
    return Manifest(
        list(groups), dtypes, shapes, chunks, aliases or {}, has_checksums=False, origin=origin
    )


# ---- each piece by itself


def _check_each(format_name: str, location: str, pieces: Sequence[StoredPiece]) -> None:
    different: Iterable[StoredPiece] = pieces
    if pieces and _are_ordinary(pieces):
        # Most pieces have the dtype, shape and size of another one.
        different = {(*piece[1:4], piece.num_bytes): piece for piece in pieces}.values()
    for piece in different:
        if fault := _fault_of_values(piece) or _fault_of_region(piece):
            raise CorruptCheckpointError(
                f"The reader of {format_name!r} describes {location!r} wrongly, or its files are "
                f"damaged: {fault} in {piece!r:.500}."
            )


def _are_ordinary(pieces: Sequence[StoredPiece]) -> bool:
    """Whether pieces have nothing but strings, and tuples of positive integers.

    Other values are checked in each piece: 1.0 and True equal 1, and are no sizes.
    """
    keys, dtypes, regions, shapes, files, first_bytes, sizes = zip(*pieces, strict=True)
    rows = [*itertools.chain.from_iterable(regions), *(s for s in shapes if s is not None)]
    if not {tuple}.issuperset(map(type, rows)):
        return False
    numbers = [*itertools.chain.from_iterable(rows), *first_bytes, *sizes]
    are_strings = {str}.issuperset(map(type, itertools.chain(keys, dtypes, files)))
    are_integers = {int}.issuperset(map(type, numbers))
    return are_strings and are_integers and 0 <= min(numbers) <= max(numbers) < _MAX_ELEMENTS


def _fault_of_values(piece: StoredPiece) -> str | None:
    """Return the value with a wrong type in a piece, or None."""
    if not (isinstance(piece.key, str) and isinstance(piece.file, str)):
        return "a key or a file is not a str"
    if not (isinstance(piece.dtype, str) and (piece.dtype == OBJECT or is_known(piece.dtype))):
        return "the dtype is unknown"
    offset, shape = piece.region
    sizes = piece.global_shape or ()
    for number in (*offset, *shape, *sizes, piece.first_byte, piece.num_bytes):
        if not isinstance(number, _INTEGERS) or not 0 <= number < _MAX_ELEMENTS:
            return "a number is not an integer from 0 on"
    return None


def _fault_of_region(piece: StoredPiece) -> str | None:
    """Return the contradiction within a piece, or None."""
    offset, shape = piece.region
    ends = tuple(map(operator.add, offset, shape))
    limits = ends if piece.global_shape is None else piece.global_shape
    if not len(offset) == len(shape) == len(limits):
        return "offset and shapes differ in their number of axes"
    if any(map(operator.gt, ends, limits)):
        return (
            f"a region of {piece.key!r} in {piece.file!r} lies outside the global shape "
            f"{piece.global_shape}"
        )
    if piece.dtype == OBJECT:
        if set(shape) <= {1}:
            return None
        return "a part of an object is not one cell of a grid"
    expected = math.prod(shape) * ITEM_BYTES[piece.dtype]
    if piece.num_bytes != expected:
        return f"{piece.num_bytes} bytes instead of {expected}"
    return None


# ---- the pieces of a key


def _group_by_key(pieces: Iterable[StoredPiece]) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each key, in the order of their offsets."""
    groups: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.key, []).append(piece)
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda piece: piece.region.offset)
    return groups


def _global_shapes(location: str, groups: Sequence[Sequence[StoredPiece]]) -> list[tuple[int, ...]]:
    """Return the global shapes of tensors, whose pieces must agree."""
    shapes = []
    for pieces in groups:
        shape = pieces[0].global_shape
        if len(pieces) > 1 or shape is None:
            shape = _united_shape(location, pieces)
        shapes.append(tuple(shape))
    for shape in set(shapes):
        if math.prod([n + 1 for n in shape]) > _MAX_ELEMENTS:
            pieces = groups[shapes.index(shape)]
            farthest = max(pieces, key=lambda piece: max(map(operator.add, *piece.region)))
            raise CorruptCheckpointError(
                f"Key {farthest.key!r} in {location!r} would have the global shape {shape}, larger "
                f"than any storage: {farthest.file!r}, which holds {farthest.region} of it, is "
                "damaged. Restore the file from a copy."
            )
    return shapes


def _united_shape(location: str, pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    """Return the global shape of pieces of a tensor, which must agree."""
    first = pieces[0]
    for other in pieces[1:]:
        same_kind = (other.dtype, len(other.region.shape)) == (first.dtype, len(first.region.shape))
        if not same_kind or other.global_shape != first.global_shape:
            raise CorruptCheckpointError(
                f"Key {first.key!r} in {location!r} is {_kind(first)} in {first.file!r} and "
                f"{_kind(other)} in {other.file!r}, which do not fit together: the files are of "
                "different saves. Remove those that do not belong here."
            )
    if first.global_shape is not None:
        return first.global_shape
    ends = [map(operator.add, *piece.region) for piece in pieces]
    return tuple(map(max, zip(*ends, strict=True)))


def _kind(piece: StoredPiece) -> str:
    whole = "" if piece.global_shape is None else f" of {piece.global_shape}"
    return f"{piece.dtype} {piece.region.shape}{whole}"


def _check_tiling(
    location: str,
    groups: Sequence[Sequence[StoredPiece]],
    shapes: Sequence[tuple[int, ...]],
    columns: tuple[IntArray, IntArray, IntArray],
) -> None:
    """Check that the pieces of each tensor cover it exactly once.

    Cells of objects may be missing.
    """
    key_ids, offsets, extents = columns
    ndims = np.fromiter(map(len, shapes), np.int64, len(shapes))
    for key_id, group in enumerate(groups):
        if group[0].dtype == OBJECT:
            _check_cells(location, group, shapes[key_id])
            ndims[key_id] = _OBJECT_NDIM
    for ndim in sorted(set(ndims.tolist()) - {_OBJECT_NDIM}):
        members = np.flatnonzero(ndims == ndim)
        rows = np.flatnonzero(ndims[key_ids] == ndim)
        ids = np.searchsorted(members, key_ids[rows])
        bounds = stacked([shapes[i] for i in members.tolist()], ndim, 1)
        try:
            faults = find_tiling_faults(ids, offsets[rows, :ndim], extents[rows, :ndim], bounds)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"The tensors with {ndim} axes in {location!r}: {error}."
            ) from error
        if faults:
            key_id = int(members[faults[0].tensor])
            raise _tiling_error(location, groups[key_id], shapes[key_id], faults[0].element)


def _check_cells(
    location: str,
    cells: Sequence[StoredPiece],
    shape: tuple[int, ...],
) -> None:
    """Check that no cell of an object is stored twice."""
    # Equal offsets follow one another.
    for first, second in itertools.pairwise(cells):
        if first.region.offset == second.region.offset:
            raise _tiling_error(location, cells, shape, first.region.offset)


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


# ---- files


def _look_up_files(location: str, pieces: Sequence[StoredPiece]) -> list[ShardFile]:
    keys = {piece.file: piece.key for piece in reversed(pieces)}
    return [look_up_file(location, name, key) for name, key in keys.items()]


def look_up_file(location: str, name: str, key: str) -> ShardFile:
    """Return the file that holds a key, with its size.

    It must lie in the checkpoint.
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


def _check_positions(location: str, pieces: Sequence[StoredPiece], chunks: ChunkTable) -> None:
    """Check that no piece ends behind its file."""
    sizes = np.array([file.num_bytes for file in chunks.files], np.int64)
    ends = chunks.first_bytes + chunks.num_bytes
    for row in np.flatnonzero(ends > sizes[chunks.file_ids])[:1].tolist():
        piece = pieces[row]
        file = chunks.files[chunks.file_ids[row]]
        raise CorruptCheckpointError(
            f"{locations.join(location, piece.file)!r} has {file.num_bytes} bytes, but "
            f"{piece.region} of key {piece.key!r} ends at byte {ends[row]}: the file was cut off. "
            "Restore it from a copy."
        )


# --- Reader ---------------------------------------------------------------------------------------


class Reader(ABC):
    """Reader of the checkpoints of one format that is not distckpt's.

    A reader describes the bytes of files that hold the regions of tensors. Everything else follows
    from that: `load` with any parallel layout, `consolidate`, `reshard`, `verify`, `diff` and the
    command line.

    Attributes:
        name: the name of the format. Rank 0 opens checkpoints, and other ranks find the reader by
            the name in the manifest: register it on every rank.
    """

    name: str

    @abstractmethod
    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        """Return whether a checkpoint of this format is at a location.

        Args:
            location: a path or URL.
            marker: the fields of the `metadata.json` there, None if there is no such file. A marker
                of distckpt is never given.
        """

    @abstractmethod
    def manifest(self, location: str) -> Manifest:
        """Describe a checkpoint, see `build_manifest`.

        Called in one process only.

        Raises:
            CorruptCheckpointError: a file is damaged or missing; the message names it.
        """

    def is_unchanged(self, stored: StoredCheckpoint) -> bool:
        """Return whether a checkpoint still is as `manifest` described it.

        Exports ask before they commit. By default it is described again.
        """
        return self.manifest(stored.location).to_bytes() == stored.manifest.to_bytes()

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        """Load parts of objects, see `read_chunks`.

        It is for formats that hold objects as well as tensors.

        Args:
            stored: the checkpoint.
            chunks: the chunks to load; `stored.key_of(chunk)` is the key of one.

        Returns:
            A value for each chunk.
        """
        if chunks:
            raise CheckpointingException(
                f"{type(self).__name__} describes objects, but has no load_objects."
            )
        return []

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Return the state outside of tensors, such as arguments and step counters.

        It must be a dict, and is an empty one by default.
        """
        del stored
        return {}

    @property
    def holds_objects(self) -> bool:
        """Return whether the format has objects or common state at all."""
        cls = type(self)
        return (
            cls.load_objects is not Reader.load_objects
            or cls.load_common_state is not Reader.load_common_state
        )
