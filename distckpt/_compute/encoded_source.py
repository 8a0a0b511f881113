"""Tensors that are quantized when they are written, block by block.

Their codes and scales are computed from another source's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._compute.formats import EncodedPart
from distckpt._geometry.region import Region, intersect, whole
from distckpt._geometry.units import cut_region
from distckpt._io.tensor_source import TensorSource, Wanted
from distckpt._plan.export import OutputTensor
from distckpt._quantization.numbers import NUMBERS, scratch, unpack_exponents
from distckpt._quantization.quantized import (
    E8M0,
    QuantizedTensor,
    apply_scales,
    coarsened,
    part_regions,
    scales_of_rows,
)
from distckpt._storage.open_files import OpenFiles

_ENCODED_AT_ONCE = 1 << 20
"""Elements that are encoded at a time."""
_LARGEST_SCALE = 448.0
"""Largest number of E4M3, for scales that have a scale themselves."""


class EncodedSource(TensorSource):
    """Another source's values, and quantized parts of some of them."""

    def __init__(self, values: TensorSource, parts: Mapping[str, EncodedPart]) -> None:
        super().__init__(values.stored)
        self._values = values
        self._parts = parts
        self._maxima: dict[str, float] = {}

    def with_files(self, files: OpenFiles) -> TensorSource:
        return EncodedSource(self._values.with_files(files), self._parts)

    def is_stored(self, tensor: OutputTensor) -> bool:
        return tensor.name not in self._parts and self._values.is_stored(tensor)

    def may_overflow(self, tensor: OutputTensor) -> bool:
        return tensor.name not in self._parts and self._values.may_overflow(tensor)

    def dtype_of(self, tensor: OutputTensor) -> torch.dtype:
        if tensor.name in self._parts:
            return FROM_NAME[tensor.dtype]
        return self._values.dtype_of(tensor)

    def converts(self, tensor: OutputTensor) -> bool:
        return tensor.name in self._parts or self._values.converts(tensor)

    def keys_besides(self, tensor: OutputTensor) -> list[str]:
        part = self._parts.get(tensor.name)
        if part is not None:
            tensor = part.tensor
        return self._values.keys_besides(tensor)

    def read(self, wanted: Sequence[Wanted], factor: float = 1.0) -> None:
        plain = [request for request in wanted if request.tensor.name not in self._parts]
        self._values.read(plain, factor)
        for tensor, region, view in wanted:
            part = self._parts.get(tensor.name)
            if part is not None:
                self._encode(tensor.name, part, region, view)

    def _encode(
        self,
        name: str,
        part: EncodedPart,
        wanted: Region,
        view: torch.Tensor,
    ) -> None:
        """Quantize the values that a region of a part encodes."""
        quantized = part.quantized
        role = part.role
        maximum = 0.0
        if "global_scale" in quantized.parts or math.prod(quantized.grid) == 1:
            maximum = self._maximum_of(part)
        for region in _regions_to_encode(quantized, role, wanted):
            values = self._read_values(part, region)
            try:
                encoded = _encode(quantized, values, region, maximum)[role]
            except ValueError as error:
                raise CheckpointingException(
                    f"{name!r} cannot be quantized: {error}, in region {region} of the tensor it "
                    "is made of. Leave the tensor out of `quantize`, or correct it."
                ) from error
            place = part_regions(quantized, region)[role]
            common = intersect(place, wanted)
            if common is not None:
                encoded = encoded.contiguous().view(view.dtype).view(place.shape)
                goal = view[common.relative_to(wanted.offset).slices()]
                goal.copy_(encoded[common.relative_to(place.offset).slices()])

    def _maximum_of(self, part: EncodedPart) -> float:
        """Return the largest magnitude in a tensor; two threads may both look for it."""
        key = part.tensor.name
        if key not in self._maxima:
            pieces = cut_region(whole(part.quantized.shape), _ENCODED_AT_ONCE)
            maxima = [float(self._read_values(part, piece).abs_().max()) for piece in pieces]
            self._maxima[key] = max(maxima)
        return self._maxima[key]

    def _read_values(self, part: EncodedPart, region: Region) -> torch.Tensor:
        """Read a region of a tensor to quantize, as float32.

        Its axes are in the order of the quantized form.
        """
        quantized = part.quantized
        values = scratch("to encode", region.shape, torch.float32)
        view = values
        if quantized.transposed:
            view = values.transpose(-2, -1)
        self._values.read([Wanted(part.tensor, quantized.to_model(region), view)])
        return values


# --- From values to codes and scales --------------------------------------------------------------


def _cell(quantized: QuantizedTensor) -> tuple[int, ...]:
    """Return the shape of the smallest regions to quantize by themselves."""
    block = quantized.block
    if math.prod(quantized.grid) == 1:
        block = (1,) * len(quantized.shape)
    return (*block[:-1], math.lcm(block[-1], quantized.pack))


def _regions_to_encode(
    quantized: QuantizedTensor, role: str, part_region: Region
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
    shape = _cell(quantized)
    max_cells = max(1, _ENCODED_AT_ONCE // math.prod(shape))
    for cells in cut_region(coarsened(region, shape), max_cells):
        yield _refined(cells, shape, quantized.shape)


def _refined(blocks: Region, block: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    """Return the elements of blocks, cut at the end of the tensor."""
    first = tuple(o * size for o, size in zip(blocks.offset, block, strict=True))
    last = ((o + n) * size for o, n, size in zip(*blocks, block, strict=True))
    stops = map(min, last, shape)
    return Region(first, tuple(stop - start for start, stop in zip(first, stops, strict=True)))


def _encode(
    quantized: QuantizedTensor, values: torch.Tensor, region: Region, maximum: float
) -> dict[str, torch.Tensor]:
    """Quantize a region of whole cells.

    Args:
        quantized: the tensor.
        values: values of the region in the order of storage, float32; overwritten.
        region: a region of the tensor.
        maximum: the largest magnitude in the whole tensor, where codes depend on it.

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
"""Functions from float32 values within a format's range to bytes."""
