"""Draw the chunks of one tensor and the ranks that wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._cli.output import count_text, printable, swatch
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT_WIDTH, _TEXT_HEIGHT = 64, 16


class Chunk(NamedTuple):
    """A piece of a tensor on disk; `owner` is the rank that wrote it, or the file if its name
    contains no rank.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: str
    rank: int | None
    file: str
    first_byte: int
    num_bytes: int


def rank_of_file(name: str) -> int | None:
    """Return the rank that wrote a file, from its name; None if that does not contain it."""
    match = re.fullmatch(r"(?:.*/)?(?:shard|rank)-(\d+)(?:-model-\d+-of-\d+)?\.safetensors", name)
    return int(match[1]) - 1 if match else None


def list_files(manifest: Manifest) -> list[dict[str, Any]]:
    """List the files, with the rank in the name of each (None without one) and the bytes of its
    data.
    """
    data_bytes = np.zeros(len(manifest.files), np.int64)
    np.add.at(data_bytes, manifest.file_ids, manifest.num_bytes)
    return [
        {
            "name": file.name,
            "rank": rank_of_file(file.name),
            "bytes": file.num_bytes,
            "data_bytes": int(size),
        }
        for file, size in zip(manifest.files, data_bytes, strict=True)
    ]


def list_writers(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up files by the rank that wrote them; a file without a rank in its name is listed
    itself.
    """
    writers: dict[Any, dict[str, Any]] = {}
    for file in files:
        rank = file["rank"]
        name = file["name"] if rank is None else None
        found = writers.setdefault(
            name if rank is None else rank,
            {"rank": rank, "file": name, "num_files": 0, "data_bytes": 0},
        )
        found["num_files"] += 1
        found["data_bytes"] += file["data_bytes"]
    return sorted(
        writers.values(), key=lambda writer: (writer["rank"] is None, writer["rank"] or 0)
    )


def balance_text(writers: Sequence[dict[str, Any]]) -> str:
    """Compare the bytes of ranks in a sentence; an empty string for fewer than two."""
    sizes = [writer["data_bytes"] for writer in writers if writer["rank"] is not None]
    if len(sizes) < 2 or not sum(sizes):
        return ""
    ratio = max(sizes) * len(sizes) / sum(sizes)
    return f"{count_text(len(sizes), 'rank')} wrote; the largest share is {ratio:.3f} x the mean"


def chunks_of(stored: StoredCheckpoint, key: str) -> list[Chunk]:
    """List the chunks of a key."""
    manifest = stored.manifest
    found = []
    for row in stored.chunks_of(key):
        region = manifest.chunk_region(row)
        file = manifest.files[int(manifest.file_ids[row])].name
        rank = rank_of_file(file)
        owner = file if rank is None else f"rank {rank}"
        place = (int(manifest.first_bytes[row]), int(manifest.num_bytes[row]))
        found.append(Chunk(region.offset, region.shape, owner, rank, file, *place))
    return found


def drawn_axes(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[int, ...] | None:
    """Choose the axes of a picture: those that the tensor is divided along; None if there are more
    than two.
    """
    if not chunks or math.prod(shape) == 0:
        return None
    divided = [
        axis
        for axis, size in enumerate(shape)
        if any(chunk.shape[axis] != size for chunk in chunks)
    ]
    if len(divided) > 2:
        return None
    # The last axes fill up: an undivided matrix is drawn as a rectangle.
    for axis in reversed(range(len(shape))):
        if len(divided) < 2 and axis not in divided:
            divided.append(axis)
    return tuple(sorted(divided))


def text_picture(
    shape: tuple[int, ...], chunks: Sequence[Chunk], axes: tuple[int, ...], in_colour: bool
) -> Iterator[str]:
    """Yield the lines of a picture: one character or coloured cell per part of the tensor, and a
    legend.
    """
    owners = _owners(chunks)
    rows, columns = _extent(shape, axes)
    height, width = min(_TEXT_HEIGHT, rows), min(_TEXT_WIDTH, columns)
    rectangles = [(*_rectangle(chunk, axes), owners[chunk.owner]) for chunk in chunks]
    for line in range(height):
        at_row = (2 * line + 1) * rows // (2 * height)
        cells = [
            _owner_at(rectangles, at_row, (2 * i + 1) * columns // (2 * width))
            for i in range(width)
        ]
        yield "".join(_cell(owner, in_colour) for owner in cells)
    for owner, index in owners.items():
        yield f"{_cell(index, in_colour)} {printable(owner)}"
    if len(shape) > 1:
        yield f"down: axis {axes[0]}, across: axis {axes[1]}"


def _owners(chunks: Sequence[Chunk]) -> dict[str, int]:
    """Return the number of each owner: its rank, or where files tell no ranks, one after the
    other.
    """
    owners = sorted(
        {chunk.owner: chunk.rank for chunk in chunks}.items(),
        key=lambda item: (len(item[0]), item[0]),
    )
    return {owner: place if rank is None else rank for place, (owner, rank) in enumerate(owners)}


def _extent(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int]:
    sizes = [shape[axis] for axis in axes]
    rows, columns = [1] * (2 - len(sizes)) + sizes
    return rows, columns


def _rectangle(chunk: Chunk, axes: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return first row, first column, rows and columns of a chunk in the picture."""
    offsets, sizes = [chunk.offset[axis] for axis in axes], [chunk.shape[axis] for axis in axes]
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


def _cell(owner: int | None, in_colour: bool) -> str:
    if owner is None:
        return "."  # not stored
    letter = _LETTERS[owner % len(_LETTERS)]
    return swatch(owner, letter) if in_colour else letter
