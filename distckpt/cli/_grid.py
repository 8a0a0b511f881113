"""Draw the chunks of one tensor and the ranks that wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt.cli._output import printable, swatch
from distckpt.cli._writers import owner_of, rank_of_file

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT_WIDTH = 64
_TEXT_HEIGHT = 16


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor on disk.

    `owner` is the rank that wrote it, or the file if its name contains no rank.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: str
    rank: int | None
    file: str
    first_byte: int
    num_bytes: int


def chunks_of(stored: StoredCheckpoint, key: str) -> list[Chunk]:
    """List the chunks of a key."""
    manifest = stored.manifest
    rows = stored.chunks_of(key)
    ndim = len(stored.global_shape(key))
    table = manifest.chunks.rows(np.arange(rows.start, rows.stop))
    regions = table.offsets[:, :ndim].tolist(), table.shapes[:, :ndim].tolist()
    places = (table.file_ids.tolist(), table.first_bytes.tolist(), table.num_bytes.tolist())
    chunks = []
    for offset, shape, file_id, first_byte, num_bytes in zip(*regions, *places, strict=True):
        file = manifest.files[file_id].name
        rank = rank_of_file(file)
        owner = owner_of(rank, file)
        chunks.append(Chunk(tuple(offset), tuple(shape), owner, rank, file, first_byte, num_bytes))
    return chunks


def drawn_axes(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[int, ...] | None:
    """Choose the axes of a picture, along which the tensor is divided.

    None if there are more than two.
    """
    if not chunks or math.prod(shape) == 0:
        return None
    divided = []
    for axis, size in enumerate(shape):
        if any(chunk.shape[axis] != size for chunk in chunks):
            divided.append(axis)
    if len(divided) > 2:
        return None
    # The last axes fill up: an undivided matrix is drawn as a rectangle.
    for axis in reversed(range(len(shape))):
        if len(divided) < 2 and axis not in divided:
            divided.append(axis)
    return tuple(sorted(divided))


def text_picture(
    shape: tuple[int, ...], chunks: Sequence[Chunk], axes: tuple[int, ...], in_color: bool
) -> Iterator[str]:
    """Yield the lines of a picture and its legend.

    There is one character or colored cell per part of the tensor.
    """
    owners = _owners(chunks)
    rows, columns = _extent(shape, axes)
    height = min(_TEXT_HEIGHT, rows)
    width = min(_TEXT_WIDTH, columns)
    rectangles = []
    for chunk in chunks:
        rectangles.append((*_rectangle(chunk, axes), owners[chunk.owner]))
    for line in range(height):
        at_row = (2 * line + 1) * rows // (2 * height)
        cells = []
        for i in range(width):
            cells.append(_owner_at(rectangles, at_row, (2 * i + 1) * columns // (2 * width)))
        yield "".join(_cell(owner, in_color) for owner in cells)
    for owner, index in owners.items():
        yield f"{_cell(index, in_color)} {printable(owner)}"
    if len(shape) > 1:
        yield f"down: axis {axes[0]}, across: axis {axes[1]}"


def _owners(chunks: Sequence[Chunk]) -> dict[str, int]:
    """Return the number of each owner.

    It is its rank, or its place if the names of files contain no ranks.
    """
    owners = sorted(
        {chunk.owner: chunk.rank for chunk in chunks}.items(),
        key=lambda item: (len(item[0]), item[0]),
    )
    numbers = {}
    for place, (owner, rank) in enumerate(owners):
        numbers[owner] = place if rank is None else rank
    return numbers


def _extent(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int]:
    sizes = [shape[axis] for axis in axes]
    rows, columns = [1] * (2 - len(sizes)) + sizes
    return rows, columns


def _rectangle(chunk: Chunk, axes: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return first row, first column, rows and columns of a drawn chunk."""
    offsets = [chunk.offset[axis] for axis in axes]
    sizes = [chunk.shape[axis] for axis in axes]
    row, column = [0] * (2 - len(axes)) + offsets
    num_rows, num_columns = [1] * (2 - len(axes)) + sizes
    return row, column, num_rows, num_columns


def _owner_at(
    rectangles: Sequence[tuple[int, int, int, int, int]], row: int, column: int
) -> int | None:
    for first_row, first_column, num_rows, num_columns, owner in rectangles:
        if 0 <= row - first_row < num_rows and 0 <= column - first_column < num_columns:
            return owner
    return None


def _cell(owner: int | None, in_color: bool) -> str:
    if owner is None:
        return "."  # not stored
    letter = _LETTERS[owner % len(_LETTERS)]
    if in_color:
        return swatch(owner, letter)
    return letter
