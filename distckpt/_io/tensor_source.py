"""Sources of an export's values, between writing and computing tensors.

Averages, adapters and quantized forms, which few exports need, are sources of their own, which may
be around another one. Writing does not depend on the kind of source.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, intersect
from distckpt._io.read_values import read_apart, read_requests
from distckpt._plan.export import OutputTensor
from distckpt._plan.load import Request
from distckpt._storage.open_files import OpenFiles
from distckpt.rules._mapped import RegionCopy, change, resolve, target_view


class Wanted(NamedTuple):
    """A region of an export's tensor, and the view to fill."""

    tensor: OutputTensor
    region: Region
    view: torch.Tensor


class TensorSource:
    """The values of tensors as a checkpoint stores them.

    Sources that compute values derive from it.

    Rows of a transposed tensor are columns of what is stored, of which reading few costs as much as
    reading many. Two bands of such rows are kept, from which threads take theirs.

    Attributes:
        stored: the checkpoint, or a view of it.
    """

    def __init__(self, stored: StoredCheckpoint, band_bytes: int = 0) -> None:
        self.stored = stored
        self._band_bytes = band_bytes
        self._bands: dict[tuple[Any, ...], torch.Tensor] = {}
        self._lock = threading.Lock()

    def with_files(self, files: OpenFiles) -> TensorSource:
        """Return the same source with files that stay open."""
        return TensorSource(self.stored.with_files(files), self._band_bytes)

    def is_stored(self, tensor: OutputTensor) -> bool:
        """Whether values are stored as they are, for copying bytes."""
        return True

    def may_overflow(self, tensor: OutputTensor) -> bool:
        """Whether values may be infinite though no stored value is."""
        return any(part.factor != 1.0 for part in tensor.mapped.parts)

    def dtype_of(self, tensor: OutputTensor) -> torch.dtype:
        """Return the dtype to read values in, before they are converted."""
        return FROM_NAME[tensor.mapped.dtype]

    def converts(self, tensor: OutputTensor) -> bool:
        """Whether `read` may give the export's dtype, rounding at most once."""
        return is_lossless_cast(FROM_NAME[tensor.mapped.dtype], FROM_NAME[tensor.dtype])

    def keys_besides(self, tensor: OutputTensor) -> list[str]:
        """Return further keys that a tensor is made of, for messages."""
        return []

    def read(self, wanted: Sequence[Wanted], factor: float = 1.0) -> None:
        """Fill views with regions' values, times a factor, in this thread."""
        direct = []
        for item in wanted:
            axis = self._axis_of_bands(item)
            if axis is None:
                direct.append(item)
            else:
                self._read_in_bands(item, axis, factor)
        self._read(direct, factor)

    def _axis_of_bands(self, wanted: Wanted) -> int | None:
        """Return the axis along which the bands of a transposed tensor follow each other."""
        shape = wanted.tensor.shape
        wanted_shape = wanted.region.shape
        parts = wanted.tensor.mapped.parts[:1]
        is_direct = wanted_shape == shape or wanted.view.nbytes >= self._band_bytes
        if is_direct or all(list(part.order) == sorted(part.order) for part in parts):
            return None
        for axis in range(len(shape)):
            if math.prod(shape[axis + 1 :]) * wanted.view.itemsize <= self._band_bytes:
                # Elements that follow each other: whole rows, or some of one.
                is_run = wanted_shape[axis] == 1 or wanted_shape[axis + 1 :] == shape[axis + 1 :]
                return axis if is_run and math.prod(wanted_shape[:axis]) == 1 else None
        return None

    def _read_in_bands(self, wanted: Wanted, axis: int, factor: float) -> None:
        tensor, (offset, shape), view = wanted
        inner = tensor.shape[axis + 1 :]
        num_rows = self._band_bytes // (math.prod(inner) * view.itemsize)
        rows = range(tensor.shape[axis])
        for number in range(offset[axis] // num_rows, -(-(offset[axis] + shape[axis]) // num_rows)):
            own = rows[number * num_rows :][:num_rows]
            start = (*offset[:axis], own.start, *(0 for _ in inner))
            band = Region(start, (*shape[:axis], len(own), *inner))
            values = self._band(tensor, band, view.dtype, factor)
            common = intersect(wanted.region, band)
            assert common is not None
            place = common.relative_to(offset)
            view[place.slices()] = values[common.relative_to(start).slices()]

    def _band(
        self, tensor: OutputTensor, band: Region, dtype: torch.dtype, factor: float
    ) -> torch.Tensor:
        key = (tensor.name, band, dtype, factor)
        with self._lock:
            if key not in self._bands:
                # Threads may be at the end of one band, and at the beginning of the next.
                while len(self._bands) > 1:
                    del self._bands[next(iter(self._bands))]
                values = torch.empty(band.shape, dtype=dtype, device="cpu")
                self._read([Wanted(tensor, band, values)], factor)
                self._bands[key] = values
            return self._bands[key]

    def _read(self, wanted: Sequence[Wanted], factor: float) -> None:
        requests: list[Request] = []
        views: list[torch.Tensor] = []
        changes: list[tuple[torch.Tensor, RegionCopy]] = []
        for tensor, region, whole_view in wanted:
            if tensor.mapped.padding:
                whole_view.zero_()
            for place, part in resolve(tensor.mapped, region):
                view = target_view(whole_view, place, part)
                shape = self.stored.global_shape(part.key)
                requests.append(Request(part.key, shape, part.source, step=part.source_step))
                views.append(view)
                changes.append((view, part))
        if requests:
            self.read_requests(requests, views, factor)
        for view, part in changes:
            change(view, part.factor, part.add)

    def read_requests(
        self, requests: Sequence[Request], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        """Fill views with regions of stored tensors, times a factor."""
        dense = []
        dense_views = []
        for request, view in zip(requests, views, strict=True):
            if not request.step:
                dense.append(request)
                dense_views.append(view)
        read_requests(self.stored, dense, dense_views)
        read_apart(self.stored, requests, views, 1)
        if factor != 1.0:
            for view in views:
                view.mul_(factor)
