"""A quantized tensor as one value: codes, scales, and their product.

All functions are about the tensor in storage: its codes are packed along the last axis. Where
`transposed` is set, the model has the last two axes the other way round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._base.lazy import torch
from distckpt._geometry.region import Region, whole
from distckpt._quantization.numbers import NUMBERS, scratch, unpack_exponents

E8M0 = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two, by safetensors name."""
_CACHED_ELEMENTS = 1 << 20
_LARGE = 2.0**100
"""Scales from which the factor of a number format is applied later: multiplied by it, they could
become infinite, small ones zero.
"""


class StoredPart(NamedTuple):
    """A stored tensor: key, safetensors name of the dtype, and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor that is stored as codes and scales.

    Each value is a code times the scale of its block.

    Attributes:
        shape: shape in storage.
        dtype: safetensors name of the values' dtype in the model.
        number: the number format of the codes, a key of `NUMBERS`.
        block: the size of a block along each axis.
        parts: "codes" and "scale"; a scale of all scales is "global_scale", and "shape" holds the
            shape.
        transposed: whether the model has the last two axes the other way round.
        divided: whether the global scale divides instead of multiplying.
        companions: keys of tensors that only programs for quantized models need, such as scales of
            activations.
    """

    shape: tuple[int, ...]
    dtype: str
    number: str
    block: tuple[int, ...]
    parts: Mapping[str, StoredPart]
    transposed: bool = False
    divided: bool = False
    companions: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are stored for this tensor."""
        return (*(part.key for part in self.parts.values()), *self.companions)

    @property
    def num_bytes(self) -> int:
        """The bytes of its parts."""
        num_bytes = 0
        for part in self.parts.values():
            num_bytes += math.prod(part.shape) * ITEM_BYTES[part.dtype]
        return num_bytes

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape in the model."""
        return self.to_model(whole(self.shape)).shape

    def to_model(self, region: Region) -> Region:
        """Put a stored region into the order of the model's axes.

        Or the other way round.
        """
        if not self.transposed:
            return region
        offset, shape = region
        return Region((*offset[:-2], offset[-1], offset[-2]), (*shape[:-2], shape[-1], shape[-2]))

    @property
    def pack(self) -> int:
        """Columns that share an item of the codes.

        They share the last axis of the codes when these have one more.
        """
        codes = self.parts["codes"]
        per_item = NUMBERS[self.number].per_byte * ITEM_BYTES[codes.dtype]
        if len(codes.shape) > len(self.shape):
            return per_item * codes.shape[-1]
        return per_item

    @property
    def grid(self) -> tuple[int, ...]:
        """Numbers of blocks along each axis."""
        return tuple(-(-size // block) for size, block in zip(self.shape, self.block, strict=True))


def part_regions(quantized: QuantizedTensor, region: Region) -> dict[str, Region]:
    """Return the region of each part that a region consists of."""
    regions = {role: whole(part.shape) for role, part in quantized.parts.items()}
    codes = coarsened(region, (*(1,) * (len(region.shape) - 1), quantized.pack))
    if len(quantized.parts["codes"].shape) > len(region.shape):
        codes = Region((*codes.offset, 0), (*codes.shape, quantized.parts["codes"].shape[-1]))
    regions["codes"] = codes
    scale = quantized.parts["scale"].shape
    if math.prod(scale) > 1:
        grid = coarsened(region, quantized.block)
        # A column of scales may be stored without its axis.
        regions["scale"] = Region(grid.offset[: len(scale)], grid.shape[: len(scale)])
    overall = regions.get("global_scale")
    if overall and overall.num_elements > 1:
        regions["global_scale"] = Region(
            (region.offset[0], *overall.offset[1:]), (region.shape[0], *overall.shape[1:])
        )
    return regions


def coarsened(region: Region, block: tuple[int, ...]) -> Region:
    """Return the blocks that a region touches, counted in blocks."""
    first = tuple(o // b for o, b in zip(region.offset, block, strict=True))
    last = tuple(-(-(o + n) // b) for o, n, b in zip(*region, block, strict=True))
    return Region(first, tuple(b - a for a, b in zip(first, last, strict=True)))


def decode(
    quantized: QuantizedTensor,
    parts: Mapping[str, torch.Tensor],
    region: Region,
    target: torch.Tensor,
) -> None:
    """Compute the values of a region, a few rows at a time.

    So they stay in cache.

    Args:
        quantized: the tensor.
        parts: the regions of `part_regions`, by part.
        region: a region of the stored tensor.
        target: gets the values; of the shape of the region.
    """
    number = NUMBERS[quantized.number]
    *lead, columns = region.shape
    if not lead:
        lead = [1]
        target = target[None]
    codes = parts["codes"].view(torch.uint8).reshape(*lead, -1).numpy()
    skipped = region.offset[-1] % quantized.pack
    scales = combined_scales(quantized, parts)
    lowest, highest = scales.abs().aminmax()
    is_moderate = float(lowest) > 1 / _LARGE
    if number.factor >= 1:
        is_moderate = float(highest) < _LARGE
    if is_moderate:
        scales = scales * number.factor
    scales = scales_of_rows(quantized, scales, region).reshape(*lead, -1)
    width = codes.shape[-1] * number.per_byte
    num_rows = min(lead[-1], max(1, _CACHED_ELEMENTS // width))
    bits = scratch("bits", (num_rows, width), torch.int16)
    bits_array = bits.numpy()
    unpacked = bits.view(FROM_NAME[number.dtype])[:, skipped : skipped + columns]
    values = scratch("values", (num_rows, columns), torch.float32)
    # Half the bytes go over a bus, or to memory in another order, in the dtype of the target.
    is_near = target.is_cpu and target.stride(-1) == 1
    for index in itertools.product(*map(range, lead[:-1])):
        for begin in range(0, lead[-1], num_rows):
            rows: tuple[int | slice, ...] = (*index, slice(begin, begin + num_rows))
            goal = target[rows]
            number.unpack(codes[rows], bits_array[: len(goal)])
            products = values[: len(goal)].copy_(unpacked[: len(goal)])
            if not is_moderate:
                products.mul_(number.factor)
            apply_scales(quantized, products, scales[rows], region, torch.Tensor.mul_)
            if not is_near:
                products = products.to(goal.dtype)
            goal.copy_(products)


def combined_scales(quantized: QuantizedTensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the float32 scales of blocks, including the global scale."""
    scale = parts["scale"]
    is_exponent = quantized.parts["scale"].dtype in E8M0
    scales = unpack_exponents(scale) if is_exponent else scale.float()
    if "global_scale" in parts:
        # One, or one for each index of the first axis.
        factor = parts["global_scale"].float()
        factor_shape: tuple[int, ...] = ()
        if factor.numel() > 1:
            factor_shape = (-1, *(1,) * (scales.ndim - 1))
        factor = factor.reshape(factor_shape)
        if quantized.divided:
            return scales / factor
        return scales * factor
    return scales


def scales_of_rows(
    quantized: QuantizedTensor, scales: torch.Tensor, region: Region
) -> torch.Tensor:
    """Give each row of a region the scales of its blocks.

    They are the blocks that the region touches.
    """
    lead = region.shape[:-1]
    grid = coarsened(region, quantized.block)
    if scales.numel() == 1:
        return scales.reshape((1,) * len(region.shape)).expand(*lead, 1)
    scales = scales.reshape(grid.shape)
    if len(lead) and quantized.block[-2] > 1 and grid.shape[-2] > 1:
        first = region.offset[-2]
        rows = torch.arange(first, first + lead[-1], device=scales.device)
        scales = scales.index_select(-2, rows // quantized.block[-2] - grid.offset[-2])
    return scales.expand(*lead, grid.shape[-1])


def apply_scales(
    quantized: QuantizedTensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    region: Region,
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Multiply or divide rows of a region in place by their scales.

    See `scales_of_rows`.
    """
    width = quantized.block[-1]
    columns = values.shape[-1]
    first = region.offset[-1] % width
    num_groups = scales.shape[-1]
    if num_groups == 1:
        operation(values, scales)
    elif first == 0 and columns % width == 0:
        operation(values.view(*values.shape[:-1], num_groups, width), scales.unsqueeze(-1))
    else:
        wide = scales.unsqueeze(-1).expand(*scales.shape, width).flatten(-2)
        operation(values, wide[..., first : first + columns])
