"""Sources of an export's values, between writing and computing tensors.

Averages, adapters and quantized forms, which few exports need, are sources of their own, which may
be around another one. Writing does not depend on the kind of source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read_values import read_requests
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

    Attributes:
        stored: the checkpoint, or a view of it.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.stored = stored

    def with_files(self, files: OpenFiles) -> TensorSource:
        """Return the same source with files that stay open."""
        return TensorSource(self.stored.with_files(files))

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
        read_requests(self.stored, requests, views)
        if factor != 1.0:
            for view in views:
                view.mul_(factor)
