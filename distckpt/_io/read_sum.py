"""Reading tensors of merged checkpoints: weighted sums of regions of several, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distckpt._base.dtypes import FROM_NAME, as_integers, is_summed
from distckpt._base.errors import CheckpointingException
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read_values import read_values
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._quantization.numbers import scratch


def read_merged(view: StoredCheckpoint, copies: Sequence[Copy], targets: Sequence[torch.Tensor]) -> None:
    """Fill requested regions of a view of merged checkpoints; sums are rounded to the dtypes of the targets.

    A thread has memory for a region in the dtype of a checkpoint, and in float64 where a target is narrower.
    """
    for copy in copies:
        key, target = view.key_of(copy.chunk), targets[copy.request][copy.target.slices()]
        if is_summed(view.dtype_of(copy.chunk)):
            _read_sum(view, key, copy.source, target)
        else:
            _read_equal(view, key, copy.source, target)


def _read_sum(view: StoredCheckpoint, key: str, region: Region, target: torch.Tensor) -> None:
    wide = torch.complex128 if FROM_NAME[view.dtype_name(key)].is_complex else torch.float64
    total = target if target.dtype == wide else scratch("sum", region.shape, wide)
    for index, (source, weight) in enumerate(view.sources):
        values = _read(source, key, region)
        if index == 0:
            total.copy_(values).mul_(weight)
        else:
            # torch adds no 8-bit floats to others.
            total.add_(values.to(wide) if values.dtype.itemsize == 1 else values, alpha=weight)
    if total is not target:
        target.copy_(total)


def _read_equal(view: StoredCheckpoint, key: str, region: Region, target: torch.Tensor) -> None:
    last = view.sources[-1][0]
    target.copy_(_read(last, key, region))
    for source, _ in view.sources[:-1] if view.integers_equal else ():
        if not torch.equal(as_integers(_read(source, key, region)), as_integers(target)):
            raise CheckpointingException(
                f"Key {key!r} is {view.dtype_name(key)}, of which there is no sum, and its values differ in region "
                f"{region} of {source.location!r} and {last.location!r}. Take them from the last checkpoint with "
                "integers='last', or leave the key out with `keys`."
            )


def _read(source: StoredCheckpoint, key: str, region: Region) -> torch.Tensor:
    values = scratch("to merge", region.shape, FROM_NAME[source.dtype_name(key)])
    read_values(source, plan_load(source, [Request(key, source.global_shape(key), region)]), [values], 1)
    return values
