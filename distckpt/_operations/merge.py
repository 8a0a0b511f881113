"""Merge several checkpoints into one Hugging Face checkpoint: weighted sums, or a moving
average.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from distckpt._base.errors import CheckpointExistsError, CheckpointingException
from distckpt._base.interrupts import operation
from distckpt._checkpoint.opening import holds_checkpoint
from distckpt._commit import posix
from distckpt._operations.consolidate import ExportReport, consolidate
from distckpt._plan.export import DEFAULT_MAX_FILE_BYTES
from distckpt._plan.merged import Merge
from distckpt._ranks.collectives import Ranks
from distckpt._rules.rules import Rule
from distckpt._storage import locations
from distckpt.strategies.base import Verify


@operation
def merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    keys: str | Sequence[str] | None = None,
    rules: Sequence[Rule] = (),
    family: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    tied: Literal["drop", "write"] = "drop",
    unmatched: Literal["error", "keep"] = "error",
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    quantize: str | Mapping[str, str] | None = None,
    like: str | os.PathLike[str] | None = None,
    merge_adapter: str | os.PathLike[str] | None = None,
    extra_files_from: str | os.PathLike[str] | None = None,
    extra_code: bool = False,
    overwrite: bool = False,
    verify: Verify = "full",
    max_inflight_bytes: int = 256 << 20,
    process_group: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> ExportReport:
    """Merge the tensors of several checkpoints into a Hugging Face checkpoint: their average,
    unless weights are given.

    Each tensor is the sum of those of its key times the weights of their checkpoints, computed in
    float64 in the order of the checkpoints, and rounded once. Formats and layouts may differ.
    Memory is bounded whatever the number and sizes of checkpoints. `load` reads the result.

        distckpt.merge(["run/step_800", "run/step_900", "run/step_1000"], "merged", keys="model.")

    Collective operation: all ranks must call it; each writes whole files. Works in one process as
    well.

    Args:
        checkpoints: two or more that `consolidate` reads. Tensors that `keys` selects must be in
            all, with the same shapes; those without floating point numbers must be equal. Quantised
            ones become values first.
        output_dir: see `consolidate`; neither a checkpoint nor inside one of those.
        weights: one for each checkpoint; any numbers, whatever their sum: (1, 1, -1) adds the
            difference of two. None for 1 / number of checkpoints.
        ema: instead, an exponential moving average of checkpoints from the oldest to the newest: it
            begins with the first, and each further one makes it `ema * average + (1 - ema) *
            checkpoint`.
        dtype: see `consolidate`, as for all others. Without it a tensor keeps its dtype; one with
            different dtypes gets one that holds the values of all.

    Returns:
        The content of the export, see `consolidate`.

    Raises:
        LoadMismatchError: a tensor is missing in one of the checkpoints, or has another shape
            there.
        CheckpointingException: integers differ.
        CheckpointExistsError: `output_dir` is a checkpoint, or holds an export and `overwrite` is
            False.
        ValueError: weights are not finite, or not one for each checkpoint, or there are less than
            two.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments"):
        if isinstance(checkpoints, str | os.PathLike):
            raise TypeError(f"merge takes a list of checkpoints, got {checkpoints!r}.")
        places = tuple(locations.normalize(checkpoint) for checkpoint in checkpoints)
        if len(places) < 2:
            raise ValueError(
                f"merge takes two checkpoints or more, got {places} only: `consolidate` exports "
                "one."
            )
        what = Merge(places, _weights(len(places), weights, ema))
        for place in places:
            if f"{posix.resolve(output_dir)}/".startswith(f"{posix.resolve(place)}/"):
                raise CheckpointingException(
                    f"The export cannot replace its own source {place!r}, nor be inside it."
                )
        if ranks.is_coordinator and holds_checkpoint(target := posix.resolve(output_dir)):
            raise CheckpointExistsError(
                f"{target!r} is a checkpoint: choose a directory of its own for the export."
            )
    return consolidate(
        what,
        output_dir,
        keys=keys,
        rules=rules,
        family=family,
        rename=rename,
        dtype=dtype,
        tied=tied,
        unmatched=unmatched,
        max_file_bytes=max_file_bytes,
        fqn_to_index_mapping=fqn_to_index_mapping,
        quantize=quantize,
        like=like,
        merge_adapter=merge_adapter,
        extra_files_from=extra_files_from,
        extra_code=extra_code,
        overwrite=overwrite,
        verify=verify,
        max_inflight_bytes=max_inflight_bytes,
        process_group=process_group,
        progress=progress,
    )


def _weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    try:
        if (
            ema is not None
            and weights is None
            and 0 <= (decay := float(ema)) <= 1
            and not isinstance(ema, str)
        ):
            return (
                decay ** (count - 1),
                *((1 - decay) * decay ** (count - 1 - index) for index in range(1, count)),
            )
        chosen = tuple(map(float, weights)) if weights is not None else (1 / count,) * count
    except (TypeError, ValueError, OverflowError):
        chosen = ()
    if ema is not None or len(chosen) != count or not all(map(math.isfinite, chosen)):
        raise ValueError(
            f"{count} checkpoints, weights={weights!r:.200}, ema={ema!r:.200}: give a finite "
            "weight for each, or an ema from 0 to 1, or neither."
        )
    return chosen
