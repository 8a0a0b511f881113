"""Where the values of an export come from: the one place between writing tensors and computing
them.

What few exports need (averages, adapters, quantized forms) is a source of its own, which may be
around another one; nothing that writes knows which it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read_values import read_values
from distckpt._plan.export import OutputTensor
from distckpt._plan.load import Request, plan_load
from distckpt._rules.mapped import resolve, target_view
from distckpt._storage.open_files import OpenFiles


class Wanted(NamedTuple):
    """A region of a tensor of the export to read, and the view of its shape to read it into."""

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
        """Tell whether values are what is stored, so that its bytes may be copied."""
        return True

    def may_overflow(self, tensor: OutputTensor) -> bool:
        """Tell whether values may be infinite though nothing that is stored is."""
        return False

    def dtype_of(self, tensor: OutputTensor) -> torch.dtype:
        """Return the dtype in which values are to be read before they are converted."""
        return FROM_NAME[tensor.mapped.dtype]

    def converts(self, tensor: OutputTensor) -> bool:
        """Tell whether `read` itself may give the dtype of the export, rounding at most once."""
        return is_lossless_cast(FROM_NAME[tensor.mapped.dtype], FROM_NAME[tensor.dtype])

    def keys_besides(self, tensor: OutputTensor) -> list[str]:
        """Name what a tensor is made of besides that which it is mapped to."""
        return []

    def read(self, wanted: Sequence[Wanted], factor: float = 1.0) -> None:
        """Fill views with the values of regions, times a factor, in this thread."""
        requests: list[Request] = []
        views: list[torch.Tensor] = []
        sums: list[tuple[torch.Tensor, float]] = []
        for tensor, region, whole_view in wanted:
            if tensor.mapped.padding:
                whole_view.zero_()
            for place, part in resolve(tensor.mapped, region):
                view = target_view(whole_view, place, part)
                shape = self.stored.global_shape(part.key)
                requests.append(Request(part.key, shape, part.source))
                views.append(view)
                if part.add:
                    sums.append((view, part.add))
        if requests:
            self.read_requests(requests, views, factor)
        for view, number in sums:
            view.add_(number)

    def read_requests(
        self, requests: Sequence[Request], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        """Fill views with regions of stored tensors, times a factor."""
        read_values(self.stored, plan_load(self.stored, requests), views, num_threads=1)
        if factor != 1.0:
            for view in views:
                view.mul_(factor)
