"""Merge several checkpoints into one Hugging Face checkpoint: weighted sums, or a moving average."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal

from distckpt._base.interrupts import operation
from distckpt._base.messages import check_choice
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
    integers: Literal["equal", "last"] = "equal",
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
            shapes. Quantised ones become values first.
        output_dir: see `consolidate`.
        weights: one for each checkpoint; any numbers, whatever their sum: (1, 1, -1) adds the difference of two. None
            for 1 / number of checkpoints.
        ema: instead, an exponential moving average of checkpoints from the oldest to the newest: it begins with the
            first, and each further one makes it `ema * average + (1 - ema) * checkpoint`.
        integers: tensors without floating point numbers must be equal in all checkpoints, or are those of the last.
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
        check_choice("integers", integers, ("equal", "last"))
        places = tuple(locations.normalize(checkpoint) for checkpoint in checkpoints)
        what = Merge(places, _weights(len(places), weights, ema), integers == "equal")
    return consolidate(what, output_dir, **options)


def _weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    if not count:
        raise ValueError("There are no checkpoints to merge.")
    if ema is not None:
        if weights is not None or not 0 <= ema <= 1:
            raise ValueError(f"ema must be from 0 to 1, without weights; got {ema!r} and weights={weights!r}.")
        return (ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - index) for index in range(1, count)))
    chosen = tuple(float(weight) for weight in weights) if weights is not None else (1 / count,) * count
    if len(chosen) != count or not all(map(math.isfinite, chosen)):
        raise ValueError(f"Give a finite weight for each of the {count} checkpoints, got {weights!r}.")
    return chosen
