"""Reading a region with gaps from a local file: its runs only, many with one call, straight to where they belong."""

from __future__ import annotations

import ctypes
import math
import os

import numpy as np
import torch

from distckpt._geometry.region import IntArray, Region, covering_elements, flat_start, num_outer_axes
from distckpt._io import aio

PITCH_BYTES = 8 << 10
"""Mean distance from the beginning of a run to that of the next. Closer runs take less time with the gaps between."""
FETCH_PITCH_BYTES = 64 << 10
"""When runs are closer than this, a disk delivers them faster with the gaps than one by one."""
MAX_RUN_BYTES = 1 << 20
"""Longer runs gain nothing from sharing a call."""
CALL_BYTES = 4 << 20
"""Read with one call at most."""


def is_worthwhile(shape: tuple[int, ...], region: Region, item: int) -> bool:
    """Tell whether to read the runs of a region of a row-major tensor without the gaps; `item` is in bytes."""
    outer = num_outer_axes(shape, region)
    num_runs = math.prod(region.shape[:outer])
    run_bytes = math.prod(region.shape[outer:]) * item
    if num_runs < 2 or not 0 < run_bytes <= MAX_RUN_BYTES:
        return False
    first_to_last = covering_elements(shape, region) * item - run_bytes
    return first_to_last >= (num_runs - 1) * PITCH_BYTES and aio.is_available()


def max_elements(shape: tuple[int, ...], region: Region, item: int) -> int:
    """Return how many elements of a region are read with one call at most."""
    run = math.prod(region.shape[num_outer_axes(shape, region) :])
    return min(aio.MAX_RUNS * run, CALL_BYTES // item)


def holds_runs(target: torch.Tensor, num_outer: int) -> bool:
    """Tell whether a tensor's values are its bytes in CPU memory, contiguous behind its first `num_outer` axes."""
    is_bytes = target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
    return is_bytes and target[(0,) * num_outer].is_contiguous()


def read_sparse_region(
    file: str, first_byte: int, shape: tuple[int, ...], region: Region, target: torch.Tensor
) -> int | None:
    """Read a region, which is not empty, of a row-major tensor that begins at `first_byte` of a local file.

    `target` has the shape of the region and the dtype of the tensor; `holds_runs` is true of it. Returns the position
    behind the last byte that was read: where the region ends, or where the file does. None when the system does not
    offer reads of this kind.
    """
    item, outer = target.element_size(), num_outer_axes(shape, region)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(outer))
    positions = first_byte + item * (flat_start(shape, region) + _steps(region.shape[:outer], strides))
    addresses = target.data_ptr() + item * _steps(region.shape[:outer], target.stride()[:outer])
    run_bytes = math.prod(region.shape[outer:]) * item
    start, stop = int(positions[0]), int(positions[-1]) + run_bytes
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stop - start < len(positions) * FETCH_PITCH_BYTES:
            os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_WILLNEED)
        num_read = aio.read_runs(fd, positions, addresses, run_bytes)
        if num_read is None:
            return None
        for index in np.flatnonzero(num_read < run_bytes).tolist():
            # A network file system, or the end of the file.
            done = int(num_read[index])
            done += _read_rest(fd, int(positions[index]) + done, int(addresses[index]) + done, run_bytes - done)
            if done < run_bytes:
                return int(positions[index]) + done
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error
    finally:
        os.close(fd)
    return stop


def _steps(counts: tuple[int, ...], strides: tuple[int, ...]) -> IntArray:
    """Return the distances of all runs from the first, in elements."""
    steps = np.zeros(1, np.int64)
    for count, stride in zip(counts, strides, strict=True):
        steps = (steps[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return steps


def _read_rest(fd: int, position: int, address: int, num_bytes: int) -> int:
    memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    done = 0
    while done < num_bytes:
        step = os.preadv(fd, [memory[done:]], position + done)
        if step == 0:
            break
        done += step
    return done
