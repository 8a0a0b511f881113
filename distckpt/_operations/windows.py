"""Windows of tensors, which threads read and compute on in cache."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.threads import ProgressCounter, run_threads
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._geometry.region import Region, whole
from distckpt._geometry.units import cut_region
from distckpt._io.read import num_threads_at
from distckpt._io.read_values import read_requests
from distckpt._plan.load import Request
from distckpt._quantization.numbers import scratch

WINDOW_ELEMENTS = 1 << 22
"""Elements per side that a thread reads at a time, of one or more tensors."""
_BATCH_WINDOWS = 256
_GROUP_BATCHES = 128
"""Batches that are in work together, with their results in memory."""

_Result = TypeVar("_Result")


class Window(NamedTuple):
    """A region of a tensor, which has this number on its side."""

    tensor: int
    region: Region


def map_windows(
    sides: Sequence[Sequence[StoredTensor]],
    compute: Callable[..., _Result],
    counter: ProgressCounter,
) -> Iterator[list[_Result]]:
    """Yield for each tensor its windows' results, in order.

    The results are `compute(window, *values)`.

    Each side has tensors of one checkpoint; the tensors at one place of both sides have the same
    shape. `values`, one for each side, are in memory that is used again.
    """
    results = map_some_windows(sides, windows_of(sides[0]), compute, counter.add)
    for _, group in itertools.groupby(results, operator.itemgetter(0)):
        yield [result for _, result in group]


def windows_of(tensors: Sequence[StoredTensor]) -> Iterator[Window]:
    """Return the windows of all tensors of a side, in order."""
    for number, tensor in enumerate(tensors):
        for region in window_regions(tensor.shape):
            yield Window(number, region)


def window_regions(shape: tuple[int, ...]) -> Iterator[Region]:
    """Return the windows of a tensor."""
    return cut_region(whole(shape), WINDOW_ELEMENTS)


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Group windows that are read together."""
    batch: list[Window] = []
    room = 0
    for window in windows:
        if batch and (window.region.num_elements > room or len(batch) == _BATCH_WINDOWS):
            yield batch
            batch = []
        room = (room if batch else WINDOW_ELEMENTS) - window.region.num_elements
        batch.append(window)
    if batch:
        yield batch


def map_some_windows(
    sides: Sequence[Sequence[StoredTensor]],
    windows: Iterable[Window],
    compute: Callable[..., _Result],
    add_bytes: Callable[[int], None],
) -> Iterator[tuple[int, _Result]]:
    """Yield a tensor's number and a result for each of some windows.

    See `map_windows`.
    """
    batches = _batches(windows)
    while group := list(itertools.islice(batches, _GROUP_BATCHES)):
        results: dict[int, list[_Result]] = {}

        def work(
            item: tuple[int, list[Window]], results: dict[int, list[_Result]] = results
        ) -> None:
            number, batch = item
            values = [_read(f"side {side}", tensors, batch) for side, tensors in enumerate(sides)]
            results[number] = [
                compute(*arguments) for arguments in zip(batch, *values, strict=True)
            ]
            add_bytes(sum(part.nbytes for part in itertools.chain(*values)))

        num_threads = max(num_threads_at(tensors[0].stored.location) for tensors in sides)
        run_threads(work, enumerate(group), num_threads)
        for number, batch in enumerate(group):
            yield from zip((window.tensor for window in batch), results[number], strict=True)


def _read(
    purpose: str, tensors: Sequence[StoredTensor], batch: Sequence[Window]
) -> list[torch.Tensor]:
    """Read windows of a checkpoint into this thread's scratch memory."""
    requests = []
    dtypes = []
    sizes = []
    for window in batch:
        tensor = tensors[window.tensor]
        dtype = FROM_NAME[tensor.dtype]
        requests.append(Request(tensor.key, tensor.shape, window.region))
        dtypes.append(dtype)
        sizes.append(window.region.num_elements * dtype.itemsize)
    # A multiple of the size of every item, so that each window can be viewed in its dtype.
    spaces = [-(-size // 16) * 16 for size in sizes]
    pieces = torch.split(scratch(purpose, (sum(spaces),), torch.uint8), spaces)
    values = []
    for piece, size, dtype, window in zip(pieces, sizes, dtypes, batch, strict=True):
        values.append(piece[:size].view(dtype).view(window.region.shape))
    stored = tensors[0].stored
    read_requests(stored, requests, values)
    return values
