"""The places of tensors in DeepSpeed's flat vectors, and tensors stored singly."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.deepspeed.files import Shape, StateFile, is_contiguous
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._foreign.torch_dist.runs import contiguous_runs
from distckpt._geometry.region import flat_range_regions, whole


class FlatVector(NamedTuple):
    """A flat vector in one or several files.

    Attributes:
        dtype: of its elements.
        runs: file and first byte of each stretch of it.
        ends: the end of each stretch in the vector.
    """

    dtype: torch.dtype
    runs: list[tuple[str, int]]
    ends: list[int]


def flat_vector(runs: Sequence[tuple[StateFile, TensorView, int]]) -> FlatVector:
    """Join one-dimensional tensors, each with its file and length.

    Elements past that length do not count.
    """
    dtype = runs[0][1].dtype
    for file, view, size in runs:
        is_flat = len(view.shape) == 1 and is_contiguous(view)
        if not is_flat or view.shape[0] < size or view.dtype != dtype:
            raise file.damaged("a tensor where a flat vector should be")
    places = [(file.name, file.first_byte(view)) for file, view, _ in runs]
    ends = list(itertools.accumulate(size for _, _, size in runs))
    return FlatVector(dtype, places, ends)


def pieces_in_vectors(
    key: str, shape: Shape, vectors: Sequence[FlatVector], at: int
) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor that vectors hold in equal shares.

    Each share begins at element `at`.

    The shares of the last vectors may be cut off.
    """
    total = math.prod(shape)
    dtype = vectors[0].dtype
    if odd := [vector for vector in vectors if vector.dtype != dtype]:
        raise CorruptCheckpointError(
            f"{odd[0].runs[0][0]!r} has {key!r} as {odd[0].dtype}, not {dtype}: restore it."
        )
    name = TO_NAME[dtype]
    item_bytes = dtype.itemsize
    if not total:
        yield StoredPiece(key, name, whole(shape), shape, *vectors[0].runs[0], 0)
    share = -(-total // len(vectors))
    for rank, vector in enumerate(vectors):
        first = min(rank * share, total)
        last = min(rank * share + share, total)
        for start, stop, file, byte in _stretches(vector, first, last, at):
            for region in flat_range_regions(shape, start, stop):
                num_bytes = region.num_elements * item_bytes
                yield StoredPiece(key, name, region, shape, file, byte, num_bytes)
                byte += num_bytes


def _stretches(
    vector: FlatVector, first: int, last: int, at: int
) -> Iterator[tuple[int, int, str, int]]:
    """Yield the places of elements [first, last) from position `at` on.

    Each stretch is given as its range of elements, its file and its first byte.
    """
    run = bisect.bisect_right(vector.ends, at)
    position = at
    while first < last and run < len(vector.ends):
        file, byte = vector.runs[run]
        run_start = 0
        if run:
            run_start = vector.ends[run - 1]
        size = min(last - first, vector.ends[run] - position)
        yield first, first + size, file, byte + (position - run_start) * vector.dtype.itemsize
        first += size
        position += size
        run += 1


def pieces_of_view(key: str, file: StateFile, view: TensorView) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor that is stored as it is."""
    byte = file.first_byte(view)
    item = view.dtype.itemsize
    name = TO_NAME[view.dtype]
    for region, start in contiguous_runs(view, whole(view.shape)):
        first_byte = byte + start * item
        num_bytes = region.num_elements * item
        yield StoredPiece(key, name, region, view.shape, file.name, first_byte, num_bytes)
