"""Merge several checkpoints into one Hugging Face checkpoint: weighted sums, or a moving average."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from distckpt._base.interrupts import operation
from distckpt._operations.consolidate import ExportReport, consolidate
from distckpt._plan.merged import Merge
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations


@operation
def merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    **options: Any,
) -> ExportReport:
    """Merge the tensors of several checkpoints into a Hugging Face checkpoint: their average, unless weights are given.

    Each tensor is the sum of those of its key times the weights of their checkpoints, computed in float64 in the order
    of the checkpoints, and rounded once. Formats and layouts may differ. Memory is bounded whatever the number and
    sizes of checkpoints. `load` reads the result.

        distckpt.merge(["run/step_800", "run/step_900", "run/step_1000"], "merged", keys="model.")

    Collective operation: all ranks must call it; each writes whole files. Works in one process as well.

    Args:
        checkpoints: what `consolidate` reads. Those tensors that `keys` selects must be in all of them, with the same
            shapes; tensors without floating point numbers must be equal. Quantised ones become values first.
        output_dir: see `consolidate`.
        weights: one for each checkpoint; any numbers, whatever their sum: (1, 1, -1) adds the difference of two. None
            for 1 / number of checkpoints.
        ema: instead, an exponential moving average of checkpoints from the oldest to the newest: it begins with the
            first, and each further one makes it `ema * average + (1 - ema) * checkpoint`.
        options: `keys`, `rules`, `dtype` and all others of `consolidate`. A tensor keeps its dtype without `dtype`; one
            with different dtypes gets one that holds the values of all.

    Returns:
        The content of the export, see `consolidate`.

    Raises:
        LoadMismatchError: a tensor is missing in one of the checkpoints, or has another shape there.
        CheckpointingException: integers differ.
        ValueError: weights are not finite, or not one for each checkpoint.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    with Ranks(options.get("process_group")).phase("check the arguments"):
        if isinstance(checkpoints, str | os.PathLike):
            raise TypeError(f"merge takes a list of checkpoints, got {checkpoints!r}.")
        places = tuple(locations.normalize(checkpoint) for checkpoint in checkpoints)
        what = Merge(places, _weights(len(places), weights, ema))
    return consolidate(what, output_dir, **options)


def _weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    if ema is not None and weights is None and 0 <= ema <= 1:
        return (ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - index) for index in range(1, count)))
    chosen = tuple(map(float, weights)) if weights is not None else (1 / max(count, 1),) * count
    if ema is not None or not count or len(chosen) != count or not all(map(math.isfinite, chosen)):
        raise ValueError(
            f"{count} checkpoints, weights={weights!r}, ema={ema!r}: give at least one checkpoint, and a finite weight "
            "for each, or an ema from 0 to 1, or neither."
        )
    return chosen
