"""Fingerprints of tensors, independent of the tensors' division.

The fingerprint of a tensor is the sum, over its elements, of the bits of the element times a
pseudo-random factor of its place, modulo a prime. Regions of a tensor have sums of their own, and
the sums of regions that tile it add up to its own.

The bits of an element are one or several lanes of at most 16 bits. A factor is the product of one
number for each axis; along the last axis, of one for each group of elements and one for each lane
in it. So most of the work is a product of matrices of lanes, which float64 does exactly: lanes are
below 2**15, factors are divided into two halves below 2**30, and a group has 2**8 lanes.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import FROM_NAME, flat_bytes
from distckpt._geometry.region import IntArray, mixed

PRIME = (1 << 61) - 1

_Numbers: TypeAlias = npt.NDArray[np.uint64]

_PRIME = np.uint64(PRIME)
_GROUP_LANES = 256
"""Lanes whose products float64 adds up exactly."""
_BATCH_LANES = 1 << 17
"""Lanes that are converted to float64 at once. They are few enough to stay in the cache of a
processor, and for OpenBLAS to multiply them in the thread that calls it.
"""
_HALF_BITS = 30
_MAX_TERMS = 128
"""Maximum terms of a sum that float64 adds up exactly. Terms are products of 16 bits and half a
factor.
"""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a tensor.

    Two tensors of one dtype and shape whose bits differ anywhere have the same number with a
    probability of about 2**-58. This finds accidents. It does not protect from deliberate
    deception: the number is no cryptographic hash.

    Attributes:
        dtype: safetensors name of the dtype, such as "BF16".
        shape: shape of the whole tensor.
        number: the sum of the bits of all elements times a factor of the place of each, modulo
            2**61 - 1.
    """

    dtype: str
    shape: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        """Return dtype, shape and the number in hexadecimal."""
        return f"{self.dtype} {list(self.shape)} {self.number:016x}"

    def changed(self, indices: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Fingerprint:
        """Return the fingerprint after some elements have changed.

        This takes time in proportion to their number.

        Args:
            indices: indices of the elements in the flattened tensor, each once, of shape (n,),
                integers.
            old: their values before, of shape (n,), in the dtype of the tensor.
            new: their values after.

        Raises:
            ValueError: shapes or dtypes do not fit, or an index is outside of the tensor or there
                twice.
        """
        flat = indices.detach().cpu().to(torch.int64).numpy()
        self._check_change(flat, old, new)
        *outer, last = np.unravel_index(flat, self.shape or (1,))
        factors = np.ones(len(flat), np.uint64)
        for axis, index in enumerate(outer):
            factors = _times(factors, _factors_at(axis, index))
        group = _group_elements(old.dtype)
        factors = _times(factors, _factors_at(len(outer), last // group))
        num_lanes = _num_lanes(old.dtype)
        within = _lane_factors().reshape(group, num_lanes)[last % group]
        before, after = (_lanes(part).reshape(-1, num_lanes).cpu().numpy() for part in (old, new))
        differences = _modulo(after.astype(np.int64) - before.astype(np.int64))
        change = _total(_times(_times(differences, within), factors[:, None]))
        return replace(self, number=(self.number + change) % PRIME)

    def _check_change(self, indices: IntArray, old: torch.Tensor, new: torch.Tensor) -> None:
        dtype = FROM_NAME[self.dtype]
        for values in (old, new):
            if values.shape != indices.shape or values.dtype != dtype or indices.ndim != 1:
                raise ValueError(
                    f"Values that change have dtype {dtype} and the shape of their indices, (n,); "
                    f"got {values.dtype} of {tuple(values.shape)} for indices of {indices.shape}."
                )
        size = math.prod(self.shape)
        if len(indices) and not 0 <= indices.min() <= indices.max() < size:
            raise ValueError(f"Indices lie in [0, {size}), got {indices.min()} to {indices.max()}.")
        if len(np.unique(indices)) < len(indices):
            raise ValueError("Each element changes once, and some indices are there twice.")


def region_number(values: torch.Tensor, offset: tuple[int, ...]) -> int:
    """Return the sum of a region of a tensor, in [0, `PRIME`).

    Args:
        values: values of the region, in its shape and its stored dtype, on any device, with any
            strides.
        offset: offset of the region in the tensor.
    """
    if not values.numel():
        return 0
    # A tensor without axes has the sum of one with a single element.
    shape = tuple(values.shape) or (1,)
    offset = offset or (0,)
    rows = _lanes(values).reshape(-1, shape[-1], _num_lanes(values.dtype))
    factors_of_rows = np.ones(1, np.uint64)
    for axis, (start, size) in enumerate(zip(offset[:-1], shape[:-1], strict=True)):
        factors = _factors(axis, start, size)
        factors_of_rows = _times(factors_of_rows[:, None], factors).reshape(-1)
    total = 0
    for strip in _strips(offset[-1], shape[-1], _group_elements(values.dtype)):
        total += _strip_number(rows, strip, len(shape) - 1, factors_of_rows)
    return total % PRIME


# --- Lanes ----------------------------------------------------------------------------------------


def _num_lanes(dtype: torch.dtype) -> int:
    return max(1, dtype.itemsize // 2)


def _group_elements(dtype: torch.dtype) -> int:
    """Return the number of last-axis elements that share a factor."""
    return _GROUP_LANES // _num_lanes(dtype)


def _lanes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values as small integers, contiguous in memory.

    They have at most 16 bits.
    """
    return flat_bytes(values).view(torch.int8 if values.dtype.itemsize == 1 else torch.int16)


class _Strip(NamedTuple):
    """Elements [start, stop) of a region's rows, in consecutive groups.

    If there is more than one group, each is complete. `within` is the beginning of the elements in
    their group.
    """

    start: int
    stop: int
    first_group: int
    num_groups: int
    within: int


def _strips(offset: int, size: int, group: int) -> Iterator[_Strip]:
    """Divide a row at an offset into strips, at most three.

    The offset is one of the last axis.
    """
    end = offset + size
    whole = (-(-offset // group) * group, end // group * group)
    edges = [offset, *(edge for edge in whole if offset < edge < end), end]
    for low, high in itertools.pairwise(sorted(set(edges))):
        num_groups = max(1, (high - low) // group)
        yield _Strip(low - offset, high - offset, low // group, num_groups, low % group)


def _strip_number(rows: torch.Tensor, strip: _Strip, axis: int, row_factors: _Numbers) -> int:
    """Return the sum of the elements of a strip."""
    num_rows, _, num_lanes = rows.shape
    lanes = rows[:, strip.start : strip.stop].reshape(num_rows * strip.num_groups, -1)
    begin = strip.within * num_lanes
    sums = _group_sums(lanes, _lane_factors()[begin : begin + lanes.shape[1]])
    group_factors = _factors(axis, strip.first_group, strip.num_groups)
    if strip.num_groups == 1:
        return int(_weighted(sums, row_factors)[0]) * int(group_factors[0])
    return _total(_times(_weighted(sums, group_factors), row_factors))


def _group_sums(lanes: torch.Tensor, factors: _Numbers) -> npt.NDArray[np.int64]:
    """Return the sums of rows of lanes times their factors, exactly.

    They are two numbers below 2**53 with signs, of shape (2, n): `low + high * 2**30`.
    """
    halves = _halves(factors)
    step = max(1, _BATCH_LANES // lanes.shape[1])
    starts = range(0, len(lanes), step)
    if lanes.device.type == "cpu":
        # For two rows of factors numpy's BLAS takes half the time of torch's.
        here = lanes.numpy()
        wide = _scratch_of_thread()
        products = []
        for first in starts:
            batch = here[first : first + step]
            converted = wide[: batch.size].reshape(batch.shape)
            np.copyto(converted, batch)
            products.append(np.matmul(halves, converted.T))
        return np.concatenate(products, axis=1).astype(np.int64)
    there = torch.from_numpy(halves).to(lanes.device)
    sums = [torch.mm(there, lanes[first : first + step].double().t()) for first in starts]
    return torch.cat(sums, dim=1).to(torch.int64).cpu().numpy()


_scratch = threading.local()


def _scratch_of_thread() -> npt.NDArray[np.float64]:
    """Return memory for a batch.

    New memory for each would take as long as the conversion.
    """
    if not hasattr(_scratch, "batch"):
        _scratch.batch = np.empty(_BATCH_LANES)
    batch: npt.NDArray[np.float64] = _scratch.batch
    return batch


def _weighted(sums: npt.NDArray[np.int64], factors: _Numbers) -> _Numbers:
    """Return the sums of rows times factors, modulo the prime.

    Rows are numbers of `_group_sums`. This is a product of float64, too: of numbers in four parts
    of 16 bits, and factors in halves.
    """
    size = min(len(factors), _MAX_TERMS)
    fill = -len(factors) % size
    rows = sums.reshape(2, -1, len(factors))
    if fill:
        rows = np.pad(rows, [(0, 0), (0, 0), (0, fill)])
        factors = np.pad(factors, (0, fill))
    # Parts have no signs.
    parts = (rows + (1 << 53)).view(np.uint16).reshape(2, rows.shape[1], -1, size, 4)
    halves = _halves(factors).reshape(2, -1, size).transpose(1, 0, 2)
    products = np.matmul(halves, parts.astype(np.float64)).astype(np.int64)
    # Axes: a number low or high, row, run of factors, half of a factor, part.
    half = np.arange(2) * _HALF_BITS
    part = np.arange(4) * 16
    num_bits = half[:, None, None, None, None] + half[:, None] + part
    powers = _rotated(_modulo(products), (num_bits % 61).astype(np.uint64))
    totals = _row_totals(powers.swapaxes(0, 1).reshape(rows.shape[1], -1))
    excess = _total(factors) * ((1 << 53) + (1 << 53 + _HALF_BITS)) % PRIME
    return _reduced(totals + np.uint64(PRIME - excess))


# --- Factors --------------------------------------------------------------------------------------


def _factors(axis: int, first: int, count: int) -> _Numbers:
    """Return the factors of indices along an axis.

    Along the last axis, they are of groups.
    """
    return _factors_at(axis, np.arange(first, first + count))


def _factors_at(axis: int, indices: npt.NDArray[np.int64]) -> _Numbers:
    seeds = mixed(np.full(1, axis).astype(np.uint64))
    return mixed(mixed(indices.astype(np.uint64)) ^ seeds) % _PRIME


@functools.cache
def _lane_factors() -> _Numbers:
    """Return the factors of the lanes of any group."""
    return _factors(-1, 0, _GROUP_LANES)


def _halves(factors: _Numbers) -> npt.NDArray[np.float64]:
    """Divide factors into two signed halves, of shape (2, n).

    A factor is `low + high * 2**30`.
    """
    # Modulo the prime, large numbers are small negative ones.
    signed = np.where(factors > _PRIME // np.uint64(2), factors - _PRIME, factors).view(np.int64)
    middle = np.int64(1 << (_HALF_BITS - 1))
    high = (signed + middle) >> _HALF_BITS
    low = signed - (high << _HALF_BITS)
    return np.stack([low, high]).astype(np.float64)


# --- Arithmetic modulo the prime, of numbers below it ---------------------------------------------


def _modulo(numbers: npt.NDArray[np.int64]) -> _Numbers:
    """Return integers between -2**60 and 2**60 modulo the prime."""
    return np.where(numbers < 0, numbers + PRIME, numbers).view(np.uint64)


def _reduced(numbers: _Numbers) -> _Numbers:
    """Return numbers below 2**62 modulo the prime."""
    return np.where(numbers >= _PRIME, numbers - _PRIME, numbers)


def _added(first: _Numbers, second: _Numbers) -> _Numbers:
    return _reduced(first + second)


def _rotated(numbers: _Numbers, num_bits: np.uint64 | _Numbers) -> _Numbers:
    """Return numbers times `2**num_bits`, modulo the prime.

    There are fewer than 61 bits: 2**61 is 1.
    """
    up = numbers << num_bits & _PRIME
    return _reduced(up | numbers >> (np.uint64(61) - num_bits))


def _times(first: _Numbers, second: _Numbers) -> _Numbers:
    """Return products, by way of halves of 31 and 30 bits."""
    mask = np.uint64((1 << 31) - 1)
    first_low = first & mask
    first_high = first >> np.uint64(31)
    second_low = second & mask
    second_high = second >> np.uint64(31)
    middle = _folded(first_low * second_high + first_high * second_low)
    low = _folded(first_low * second_low)
    # 2**62 is 2.
    high = _folded((first_high * second_high) << np.uint64(1))
    return _added(_added(low, high), _rotated(middle, np.uint64(31)))


def _folded(numbers: _Numbers) -> _Numbers:
    """Return any numbers of 64 bits modulo the prime."""
    return _reduced((numbers & _PRIME) + (numbers >> np.uint64(61)))


def _row_totals(numbers: _Numbers) -> _Numbers:
    """Return the sum of each row of a matrix.

    It has fewer than 2**32 columns.
    """
    low = (numbers & np.uint64(0xFFFFFFFF)).sum(axis=1)
    high = (numbers >> np.uint64(32)).sum(axis=1)
    return _added(_folded(low), _rotated(_folded(high), np.uint64(32)))


def _total(numbers: _Numbers) -> int:
    return int(_row_totals(numbers.reshape(1, -1))[0])
