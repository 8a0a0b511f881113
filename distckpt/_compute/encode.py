"""Quantization: from values to codes and scales, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._geometry.region import Region, whole
from distckpt._geometry.units import cut_region
from distckpt._quantization.numbers import NUMBERS, unpack_exponents
from distckpt._quantization.quantized import (
    E8M0,
    QuantizedTensor,
    apply_scales,
    coarsened,
    scales_of_rows,
)

_LARGEST_SCALE = 448.0
"""Largest number of E4M3, for scales that have a scale themselves."""


def needs_maximum(quantized: QuantizedTensor) -> bool:
    """Return whether codes depend on the largest magnitude of the tensor."""
    return "global_scale" in quantized.parts or math.prod(quantized.grid) == 1


def cell(quantized: QuantizedTensor) -> tuple[int, ...]:
    """Return the shape of the smallest regions to quantize by themselves."""
    block = quantized.block
    if math.prod(quantized.grid) == 1:
        block = (1,) * len(quantized.shape)
    return (*block[:-1], math.lcm(block[-1], quantized.pack))


def regions_to_encode(
    quantized: QuantizedTensor, role: str, part_region: Region, max_elements: int
) -> Iterator[Region]:
    """Yield regions of whole cells that make up a part's region."""
    ndim = len(quantized.shape)
    part = quantized.parts[role]
    if role == "codes":
        covered = Region(part_region.offset[:ndim], part_region.shape[:ndim])
        factors = (*(1,) * (ndim - 1), quantized.pack)
    elif role == "scale" and math.prod(part.shape) > 1:
        covered = part_region
        factors = quantized.block
    else:
        covered = whole((1,) * ndim)
        factors = (1,) * ndim
    region = _refined(covered, factors, quantized.shape)
    shape = cell(quantized)
    max_cells = max(1, max_elements // math.prod(shape))
    for cells in cut_region(coarsened(region, shape), max_cells):
        yield _refined(cells, shape, quantized.shape)


def _refined(blocks: Region, block: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    """Return the elements of blocks, cut at the end of the tensor."""
    first = tuple(o * size for o, size in zip(blocks.offset, block, strict=True))
    last = ((o + n) * size for o, n, size in zip(*blocks, block, strict=True))
    stops = map(min, last, shape)
    return Region(first, tuple(stop - start for start, stop in zip(first, stops, strict=True)))


def encode(
    quantized: QuantizedTensor, values: torch.Tensor, region: Region, maximum: float
) -> dict[str, torch.Tensor]:
    """Quantize a region of whole cells.

    Args:
        quantized: the tensor.
        values: values of the region in the order of storage, float32; overwritten.
        region: a region of the tensor.
        maximum: the largest magnitude in the whole tensor, where `needs_maximum`.

    Returns:
        For each part its region, see `part_regions`.

    Raises:
        ValueError: a value is infinite or not a number.
    """
    number = NUMBERS[quantized.number]
    parts: dict[str, torch.Tensor] = {}
    is_one = math.prod(quantized.grid) == 1
    maxima = torch.tensor(maximum, device="cpu") if is_one else _maxima(values, quantized.block)
    if not maxima.isfinite().all():
        raise ValueError("some values are infinite or not a number")
    scale = quantized.parts["scale"]
    if "global_scale" in quantized.parts:
        ratio = 1.0
        if maximum > 1e-30:
            ratio = number.largest * _LARGEST_SCALE / maximum
        factor = torch.tensor(ratio, device="cpu")
        parts["global_scale"] = factor.reshape(quantized.parts["global_scale"].shape)
        stored = (maxima / number.largest * factor).to(FROM_NAME[scale.dtype])
        # A scale cannot be zero: the smallest number replaces it.
        stored = stored.float()
        stored = torch.where(stored == 0, 2.0**-9, stored).to(FROM_NAME[scale.dtype])
        scales = stored.float() / factor
    elif scale.dtype in E8M0:
        exponents = _exponents(maxima, number.largest)
        stored = (exponents + 127).clamp_(0, 254).to(torch.uint8)
        scales = unpack_exponents(stored)
    else:
        stored = torch.where(maxima == 0, 1.0, maxima / number.largest).to(FROM_NAME[scale.dtype])
        scales = stored.float()
    apply_scales(
        quantized, values, scales_of_rows(quantized, scales, region), region, torch.Tensor.div_
    )
    codes = _PACK[quantized.number](values.clamp_(-number.largest, number.largest))
    parts["codes"] = codes
    parts["scale"] = stored
    if "shape" in quantized.parts:
        parts["shape"] = torch.tensor(
            quantized.shape, dtype=FROM_NAME[quantized.parts["shape"].dtype], device="cpu"
        )
    return parts


def _maxima(values: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """Return the largest magnitude of each block.

    The last blocks may be smaller.
    """
    magnitudes = values.abs()
    for axis in range(1, min(2, len(block)) + 1):
        size = block[-axis]
        if size > 1:
            padding = (0, 0) * (axis - 1) + (0, -magnitudes.shape[-axis] % size)
            padded = torch.nn.functional.pad(magnitudes, padding).movedim(-axis, -1)
            blocks = padded.reshape(*padded.shape[:-1], -1, size).amax(-1)
            magnitudes = blocks.movedim(-1, -axis)
    return magnitudes


def _exponents(maxima: torch.Tensor, largest: float) -> torch.Tensor:
    """Return exponents of two for scales, 0 where all values are zero.

    They are rounded up, so that nothing is cut off. With codes of 4 bits the largest magnitude is
    rounded first, to the nearest power of two that a code with its three bits would become: a value
    beyond the largest code by less than half a step is cut off.
    """
    if largest > 8:
        fractions, exponents = torch.frexp(maxima / largest)
        exponents = exponents - (fractions == 0.5).int()
    else:
        fractions, exponents = torch.frexp(maxima)
        exponents = exponents - (fractions < 0.875).int() - math.floor(math.log2(largest))
    return torch.where(maxima == 0, 0, exponents)


def _pack_halves(nibbles: torch.Tensor) -> torch.Tensor:
    codes = nibbles.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    # The middle between neighbors goes to the even code: the one below for every second, just above
    # it for the rest.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cpu")
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(3, device="cpu"))
    return _pack_halves(torch.bucketize(values.abs(), middles) + 8 * values.signbit())


_PACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8),
    "int8": lambda values: values.round().to(torch.int8).view(torch.uint8),
    "e2m1": _pack_e2m1,
    "int4": lambda values: _pack_halves(values.round() + 8),
}
"""Functions from float32 values, within the range of a number format, to bytes."""
