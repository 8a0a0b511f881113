"""Merging of several checkpoints into one Hugging Face checkpoint.

The result is a weighted sum, or a moving average.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_summed
from distckpt._base.errors import CheckpointExistsError, CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._base.options import ExportOptions, with_changes
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.model_keys import left_out
from distckpt._checkpoint.opening import holds_checkpoint
from distckpt._commit import posix
from distckpt._compute.summed_source import SummedSource
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.marker import names_of_module, note_of_objects, prefixes_of_modules
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.consolidate import ExportReport, write_and_commit
from distckpt._operations.export_plan import ExportPlan, plan_export
from distckpt._operations.export_request import (
    OpenedSources,
    check_export_options,
    check_request,
    locate_sources,
    open_sources,
)
from distckpt._plan.codes import check_scales_cast
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.selection import select_tensors
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._storage import locations


@collective()
@paused_garbage_collection()
def merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    overwrite: bool = False,
    process_group: Any = None,
    options: ExportOptions | None = None,
    **changes: Any,
) -> ExportReport:
    """Merge several checkpoints into a Hugging Face checkpoint: their average, unless weights are
    given.

    Each tensor is the sum of the tensors of its key times the weights of their checkpoints,
    computed in float64 in the order of the checkpoints, and rounded once. Formats and layouts may
    differ. Memory is bounded whatever the number and sizes of checkpoints. `load` reads the result.

        distckpt.merge(["run/step_800", "run/step_900", "run/step_1000"], "merged")

    Collective operation: all ranks must call it; each writes whole files. Works in one process as
    well.

    Args:
        checkpoints: two or more that `consolidate` reads. Tensors that `keys` selects must be in
            all, with the same shapes; tensors without floating-point numbers must be equal.
            Quantized tensors become values first.
        output_dir: see `consolidate`; neither a checkpoint nor inside of one.
        weights: one for each checkpoint; any numbers, whatever their sum: (1, 1, -1) adds the
            difference of two. None for 1 / number of checkpoints.
        ema: instead, an exponential moving average of checkpoints from the oldest to the newest: it
            begins with the first, and each further one makes it `ema * average + (1 - ema) *
            checkpoint`.
        overwrite: replace an export that is there.
        process_group: the ranks that work together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        options: further options. Without a dtype, a tensor keeps its own; one with different dtypes
            gets one that holds the values of all.
        changes: options by keyword, such as `dtype=torch.bfloat16`; see `ExportOptions` for all of
            them.

    Returns:
        The content of the export, see `consolidate`.

    Raises:
        LoadMismatchError: a tensor is missing in one of the checkpoints, or has another shape
            there.
        CheckpointingException: integers differ.
        CheckpointExistsError: `output_dir` is a checkpoint, or holds an export and `overwrite` is
            False.
        ValueError: weights are not finite, or not one for each checkpoint, or there are fewer than
            two.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    ranks = Ranks(process_group)
    export_options = with_changes(merge, ExportOptions, options, changes)
    with ranks.phase("check the weights", decision=True, same={"weights": weights, "ema": ema}):
        sources, factors = check_terms(checkpoints, weights, ema)
        if ranks.is_coordinator:
            check_is_apart(output_dir, sources)
    request = check_request(ranks, sources, output_dir, overwrite, export_options)
    with PhaseTimer("consolidate", ranks.rank, request.target).phase("plan"):
        opened = open_sources(ranks, request.sources, export_options.verify)
        plan = plan_opened_sum(ranks, opened, factors, ema, export_options)
    return write_and_commit(ranks, request, opened.all, plan)


def plan_merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | None,
    ema: float | None,
    options: ExportOptions,
) -> ExportPlan:
    """Return the plan of a `merge`, made in this process alone."""
    ranks = Ranks.alone()
    sources, factors = check_terms(checkpoints, weights, ema)
    check_export_options(options)
    opened = open_sources(ranks, locate_sources(sources, options), options.verify)
    return plan_opened_sum(ranks, opened, factors, ema, options)


def plan_opened_sum(
    ranks: Ranks,
    opened: OpenedSources,
    factors: Sequence[float],
    ema: float | None,
    options: ExportOptions,
) -> ExportPlan:
    """Plan the export of the weighted sum of open checkpoints.

    Collective operation: all ranks must call it.
    """
    with reading(ranks, opened.all):
        with ranks.phase("compare the checkpoints"):
            view, terms = _merged(opened.checkpoints, options.keys, options.tied == "write")
        source = SummedSource(view, terms, factors, decay=1.0 if ema is None else float(ema))
        return plan_export(ranks, opened, source, options)


def check_terms(
    checkpoints: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | None,
    ema: float | None,
) -> tuple[list[str], list[float]]:
    """Return the locations and factors of the checkpoints."""
    if isinstance(checkpoints, str | os.PathLike) or not isinstance(checkpoints, Iterable):
        raise TypeError(f"merge takes a list of checkpoints, got {checkpoints!r}.")
    sources = [locations.normalize(checkpoint) for checkpoint in checkpoints]
    if len(sources) < 2:
        raise ValueError(
            f"merge takes two checkpoints or more, got {sources} only: `consolidate` exports one."
        )
    return sources, _factors(len(sources), weights, ema)


def check_is_apart(output_dir: str | os.PathLike[str], sources: Sequence[str]) -> None:
    """Refuse a target that is a checkpoint, or inside of a source."""
    target = posix.resolve(output_dir)
    for source in sources:
        if f"{target}/".startswith(f"{posix.resolve(source)}/"):
            raise CheckpointingException(
                f"The export cannot replace its own source {source!r}, nor be inside it."
            )
    if holds_checkpoint(target):
        raise CheckpointExistsError(
            f"{target!r} is a checkpoint: choose a directory of its own for the export."
        )


def _factors(
    count: int,
    weights: Sequence[float] | None,
    ema: float | None,
) -> list[float]:
    """Return the factor of each checkpoint."""
    factors: list[float] = []
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if ema is None:
            factors = [1 / count] * count if weights is None else [*map(float, weights)]
        elif weights is None and 0 <= ema <= 1:
            # The sum is multiplied with it before each further term.
            factors = [1.0, *[1 - float(ema)] * (count - 1)]
    # The digits of a text would be weights.
    is_text = isinstance(weights, str)
    if is_text or len(factors) != count or not all(map(math.isfinite, factors)):
        raise ValueError(
            f"{count} checkpoints, weights={weights!r:.200}, ema={ema!r:.200}: give a finite "
            "weight for each, or an ema from 0 to 1, or neither."
        )
    return factors


# --- The tensors that all have --------------------------------------------------------------------


def _merged(
    checkpoints: Sequence[StoredCheckpoint], keys: str | Sequence[str] | None, write_tied: bool
) -> tuple[StoredCheckpoint, Sequence[StoredCheckpoint]]:
    """Return a checkpoint that describes the sums, and the terms.

    The sums are of the tensors that match `keys`, which must be in all checkpoints, with the same
    shapes. They have no chunks: only exports read them. Names are tied if they are tied in all
    checkpoints.

    Raises:
        LoadMismatchError: a tensor is missing in one of the checkpoints, or has another shape
            there.
        CheckpointingException: a tensor has dtypes that cannot be added.
    """
    terms = []
    ids = []
    for checkpoint in checkpoints:
        terms.append(decoded(checkpoint))
        ids.append(_select(terms[-1], keys, left_out(checkpoint, keys)))
    common = []
    for name in ids[0]:
        if all(name in others for others in ids):
            common.append(name)
    _check_all_are_common(terms, ids, common, write_tied)
    firsts: dict[tuple[int, ...], str] = {}
    aliases = {}
    for name in common:
        # Names that all checkpoints tie have the same indices.
        first = firsts.setdefault(tuple(own[name] for own in ids), name)
        if first != name:
            aliases[name] = first
    names = list(firsts.values())
    dtypes = []
    shapes = []
    for name in names:
        dtypes.append(_dtype_of_sum(name, terms))
        shapes.append(terms[0].global_shape(name))
    manifest = Manifest(names, dtypes, shapes, ChunkTable.empty(), aliases, has_checksums=False)
    stored = terms[0].marker
    marker = note_of_objects(names_of_module(stored), prefixes_of_modules(stored), {})
    return StoredCheckpoint(terms[0].location, manifest, marker=marker), terms


def _select(
    stored: StoredCheckpoint, keys: str | Sequence[str] | None, unused: Set[str]
) -> dict[str, int]:
    """Return the index of each name that matches, tied ones included."""
    tensors = select_tensors(stored.manifest, keys, True, hidden_keys(stored), unused)
    summed = []
    for key, info in tensors.items():
        if is_summed(FROM_NAME[info.dtype]):
            summed.append(key)
    check_scales_cast(stored, dict.fromkeys(summed, torch.float64))
    return {name: n for name, n in stored.manifest.key_index.items() if name in tensors}


def _check_all_are_common(
    terms: Sequence[StoredCheckpoint],
    ids: Sequence[Mapping[str, int]],
    common: Sequence[str],
    write_tied: bool,
) -> None:
    for term, own in zip(terms, ids, strict=True):
        common_ids = {own[name] for name in common}
        lacking = set(own).difference(common)
        absent = []
        for name in own:
            # A name that is only tied to another one may be absent elsewhere, as in Hugging Face
            # directories.
            is_tied = own[name] in common_ids and not write_tied
            if name in lacking and not is_tied:
                absent.append(name)
        for other, names in zip(terms, ids, strict=True):
            if absent and absent[0] not in names:
                raise LoadMismatchError(
                    f"Merging needs the same tensors in all checkpoints: {summarize_keys(absent)} "
                    f"of {term.location!r} cannot be found in {other.location!r}. Leave them out "
                    "with `keys`, or convert one of the checkpoints (`consolidate` with rules) so "
                    "that their names agree.",
                    missing=absent,
                )


def _dtype_of_sum(name: str, terms: Sequence[StoredCheckpoint]) -> str:
    """Return the dtype of a merged tensor, which holds all values.

    8-bit floats next to other dtypes do not count.
    """
    shapes = {}
    dtypes = {}
    for term in terms:
        shapes[term.location] = term.global_shape(name)
        dtypes[term.location] = FROM_NAME[term.dtype_name(name)]
    if len(set(shapes.values())) > 1:
        raise LoadMismatchError(
            f"Key {name!r} has different shapes: {shapes}. Leave it out with `keys`."
        )
    different = set(dtypes.values())
    if len(different) == 1:
        return TO_NAME[different.pop()]
    # Float16 has all values of 8-bit floats.
    wide = {dtype for dtype in different if dtype.itemsize > 1} or {torch.float16}
    of_sum = functools.reduce(torch.promote_types, wide)
    if of_sum not in TO_NAME or not all(map(is_summed, different)):
        raise CheckpointingException(
            f"Key {name!r} has dtypes of which there is no sum: {dtypes}. Leave it out with "
            "`keys`, or convert one of the checkpoints first."
        )
    return TO_NAME[of_sum]
