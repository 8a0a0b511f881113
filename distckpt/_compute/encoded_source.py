"""Tensors that are quantized when they are written.

Their codes and scales are computed from another source's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._compute.encode import encode, needs_maximum, regions_to_encode
from distckpt._compute.quantize_plan import EncodedPart
from distckpt._geometry.region import Region, intersect, whole
from distckpt._geometry.units import cut_region
from distckpt._io.tensor_source import TensorSource, Wanted
from distckpt._plan.export import OutputTensor
from distckpt._quantization.numbers import scratch
from distckpt._quantization.quantized import part_regions
from distckpt._storage.open_files import OpenFiles

_ENCODED_AT_ONCE = 1 << 20
"""Elements that are encoded at a time."""


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
        is_part = tensor.name in self._parts
        if is_part:
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
        if needs_maximum(quantized):
            maximum = self._maximum_of(part)
        for region in regions_to_encode(quantized, role, wanted, _ENCODED_AT_ONCE):
            values = self._read_values(part, region)
            try:
                encoded = encode(quantized, values, region, maximum)[role]
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
