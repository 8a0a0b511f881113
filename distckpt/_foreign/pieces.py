"""What the files of others hold: pieces of tensors, checked to make up the tensors, as a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.manifest import ChunkTable, Manifest, ShardFile
from distckpt._geometry.region import IntArray, Region, TilingFault, find_tiling_faults, regions_to_arrays


class StoredPiece(NamedTuple):
    """A region of a tensor, or an object, and the bytes that hold it; `global_shape` is None where no file tells it."""

    key: str
    dtype: str
    region: Region
    global_shape: tuple[int, ...] | None
    file: str
    first_byte: int
    num_bytes: int


class PieceTable(NamedTuple):
    """Pieces by key; `key_ids`, in order, `offsets` and `extents` have a row for each of `pieces`."""

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    pieces: list[StoredPiece]
    key_ids: IntArray
    offsets: IntArray
    extents: IntArray


def group_by_key(pieces: Iterable[StoredPiece]) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each key, in the order of their offsets."""
    groups: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.key, []).append(piece)
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda piece: piece.region.offset)
    return groups


def tabulate(groups: Mapping[str, list[StoredPiece]], shapes: Sequence[tuple[int, ...]]) -> PieceTable:
    """Put pieces by key into one table; `shapes` are the global shapes of the keys."""
    pieces = [piece for group in groups.values() for piece in group]
    key_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
    dtypes = [group[0].dtype for group in groups.values()]
    return PieceTable(
        list(groups), dtypes, list(shapes), pieces, key_ids, *regions_to_arrays([piece.region for piece in pieces])
    )


def find_outside(table: PieceTable) -> StoredPiece | None:
    """Find a piece that reaches past the end of its tensor."""
    bounds = np.ones((len(table.keys), table.offsets.shape[1]), np.int64)
    for key_id, shape in enumerate(table.shapes):
        bounds[key_id, : len(shape)] = shape
    rows = np.flatnonzero((table.offsets + table.extents > bounds[table.key_ids]).any(axis=1))
    return table.pieces[rows[0]] if len(rows) else None


def find_fault(location: str, table: PieceTable) -> tuple[int, TilingFault] | None:
    """Find a tensor that its pieces, none of which lies outside, do not tile; returns its key id with the fault.

    Raises:
        CorruptCheckpointError: there are too many axes to tell.
    """
    ndims = np.array([len(shape) for shape in table.shapes], np.int64)
    for ndim in sorted(set(ndims.tolist())):
        members = np.flatnonzero(ndims == ndim)
        rows = np.flatnonzero(ndims[table.key_ids] == ndim)
        ids = np.searchsorted(members, table.key_ids[rows])
        shapes = np.array([table.shapes[i] for i in members.tolist()], np.int64).reshape(len(members), ndim)
        try:
            faults = find_tiling_faults(ids, table.offsets[rows, :ndim], table.extents[rows, :ndim], shapes)
        except ValueError as error:
            raise CorruptCheckpointError(f"The tensors with {ndim} axes in {location!r}: {error}.") from error
        for fault in faults[:1]:
            return int(members[fault.tensor]), fault
    return None


def to_manifest(table: PieceTable, files: Sequence[ShardFile], origin: Mapping[str, Any] | None = None) -> Manifest:
    """Make a manifest without checksums."""
    file_ids = {file.name: i for i, file in enumerate(files)}
    chunks = ChunkTable(
        files=list(files),
        key_ids=table.key_ids,
        file_ids=np.array([file_ids[piece.file] for piece in table.pieces], np.int64),
        first_bytes=np.array([piece.first_byte for piece in table.pieces], np.int64),
        num_bytes=np.array([piece.num_bytes for piece in table.pieces], np.int64),
        offsets=table.offsets,
        shapes=table.extents,
        block_checksums=np.zeros(0, np.uint64),
    )
    return Manifest(table.keys, table.dtypes, table.shapes, chunks, {}, has_checksums=False, origin=origin)
