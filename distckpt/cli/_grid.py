"""Chunks and files of a checkpoint, and the ranks that wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt.cli._output import count_text, printable, swatch

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT_WIDTH = 64
_TEXT_HEIGHT = 16


# --- Files ----------------------------------------------------------------------------------------


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a file, or None."""
    pattern = r"(?:.*/)?(?:shard|rank)-(\d+)(?:-model-\d+-of-\d+)?\.(?:safetensors|checksums)"
    match = re.fullmatch(pattern, name)
    if match:
        return int(match[1]) - 1
    return None


def owner_of(rank: int | None, file: str) -> str:
    """Return a name for the writer of a file: its rank, or the file itself."""
    if rank is None:
        return file
    return f"rank {rank}"


def list_files(manifest: Manifest) -> list[dict[str, Any]]:
    """List the files with their size and the rank in their name."""
    rows = []
    for file, size in zip(manifest.files, manifest.sums.bytes_in_files.tolist(), strict=True):
        rank = rank_of_file(file.name)
        rows.append({"name": file.name, "rank": rank, "bytes": file.num_bytes, "data_bytes": size})
    return rows


def list_writers(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up files by the rank that wrote them.

    A file without a rank in its name stands for itself.
    """
    writers: dict[object, dict[str, Any]] = {}
    for file in files:
        rank = file["rank"]
        name = None
        if rank is None:
            name = file["name"]
        new = {"rank": rank, "file": name, "num_files": 0, "data_bytes": 0}
        writer = writers.setdefault((rank, name), new)
        writer["num_files"] += 1
        writer["data_bytes"] += file["data_bytes"]
    return sorted(writers.values(), key=_order)


def _order(writer: dict[str, Any]) -> tuple[bool, int]:
    return writer["rank"] is None, writer["rank"] or 0


def balance_text(writers: Sequence[dict[str, Any]]) -> str:
    """Compare the bytes of ranks in a sentence; an empty string for fewer than two."""
    sizes = []
    for writer in writers:
        if writer["rank"] is not None:
            sizes.append(writer["data_bytes"])
    if len(sizes) < 2 or not sum(sizes):
        return ""
    ratio = max(sizes) * len(sizes) / sum(sizes)
    return f"{count_text(len(sizes), 'rank')} wrote; the largest share is {ratio:.3f} x the mean"


# --- Chunks ---------------------------------------------------------------------------------------


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
    rows, columns = _drawn(shape, axes, 1)
    height = min(_TEXT_HEIGHT, rows)
    width = min(_TEXT_WIDTH, columns)
    rectangles = []
    for chunk in chunks:
        row, column = _drawn(chunk.offset, axes, 0)
        num_rows, num_columns = _drawn(chunk.shape, axes, 1)
        rectangles.append((row, column, num_rows, num_columns, owners[chunk.owner]))
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


def _drawn(values: tuple[int, ...], axes: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Return the values of the axes down and across.

    A tensor of one axis has none down: its value is `missing`.
    """
    drawn = [values[axis] for axis in axes]
    row, column = [missing] * (2 - len(axes)) + drawn
    return row, column


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
