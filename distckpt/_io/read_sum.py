"""Reading tensors of merged checkpoints: weighted sums of regions of several, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distckpt._base.dtypes import FROM_NAME, as_integers, is_summed
from distckpt._base.errors import CheckpointingException
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read_values import read_values
from distckpt._plan.load import Request, plan_load
from distckpt._quantization.numbers import scratch

_WINDOW_ELEMENTS = 1 << 18
"""So many products are computed before they are added."""


def read_merged(view: StoredCheckpoint, requests: Sequence[Request], targets: Sequence[torch.Tensor]) -> None:
    """Fill requested regions of a view of merged checkpoints; sums are rounded to the dtypes of the targets.

    A thread has memory for a region in the dtype of a checkpoint, and in float64 where that is not the target's.
    """
    for request, target in zip(requests, targets, strict=True):
        dtype = FROM_NAME[view.dtype_name(request.key)]
        if not is_summed(dtype):
            _read_equal(view, request.key, request.region, target)
            continue
        wide = torch.complex128 if dtype.is_complex else torch.float64
        is_direct = target.dtype == wide and target.is_contiguous()
        total = target if is_direct else scratch("sum", request.region.shape, wide)
        for index, (source, weight) in enumerate(view.sources):
            _add(total.view(-1), _read(source, request.key, request.region).view(-1), weight, is_first=index == 0)
        if not is_direct:
            target.copy_(total)


def _add(total: torch.Tensor, values: torch.Tensor, weight: float, is_first: bool) -> None:
    for start in range(0, len(total), _WINDOW_ELEMENTS):
        sums, window = total[start : start + _WINDOW_ELEMENTS], values[start : start + _WINDOW_ELEMENTS]
        # Not `add_(window, alpha=weight)`, which rounds products or not, depending on where they are.
        terms = sums if is_first else scratch("terms", sums.shape, total.dtype)
        terms.copy_(window).mul_(weight)
        if not is_first:
            sums.add_(terms)


def _read_equal(view: StoredCheckpoint, key: str, region: Region, target: torch.Tensor) -> None:
    last = view.sources[-1][0]
    values = _read(last, key, region).clone()
    for source, _ in view.sources[:-1] if view.integers_equal else ():
        if not torch.equal(as_integers(_read(source, key, region)), as_integers(values)):
            raise CheckpointingException(
                f"Key {key!r} is {view.dtype_name(key)}, of which there is no sum, and its values differ in region "
                f"{region} of {source.location!r} and {last.location!r}. Take them from the last checkpoint with "
                "integers='last', or leave the key out with `keys`."
            )
    is_same = target.dtype == values.dtype
    (as_integers(target) if is_same else target).copy_(as_integers(values) if is_same else values)


def _read(source: StoredCheckpoint, key: str, region: Region) -> torch.Tensor:
    values = scratch("to merge", region.shape, FROM_NAME[source.dtype_name(key)])
    read_values(source, plan_load(source, [Request(key, source.global_shape(key), region)]), [values], 1)
    return values
