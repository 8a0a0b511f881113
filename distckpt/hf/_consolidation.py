"""Consolidation under the names of torch and NeMo Automodel. `distckpt.hf` is the public path."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, as_torch_dtype
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._base.options import ExportOptions, check_switch, with_changes
from distckpt._checkpoint.consistent_read import describe, read_attempts
from distckpt._foreign.hugging_face import HuggingFaceReader, read_directory
from distckpt._foreign.seals import read_sealed
from distckpt._format.foreign_formats import HUGGING_FACE
from distckpt._format.manifest import Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.tensor_source import TensorSource
from distckpt._operations.consolidate import ExportReport, consolidate, write_and_commit
from distckpt._operations.export_plan import ExportPlan, plan_export
from distckpt._operations.export_request import OpenedSources, check_request
from distckpt._plan.export import (
    OutputTensor,
    check_codes,
    number_files,
    plan_files,
)
from distckpt._ranks.collectives import Ranks
from distckpt._storage.file_state import FileState
from distckpt.strategies.base import ConsolidationStrategy

logger = logging.getLogger(__name__)

_UNLIMITED = 2**63


class HuggingFaceConsolidationStrategy(ConsolidationStrategy):
    """Consolidation as a strategy, for programs that choose strategies by configuration.

    Args:
        overwrite: replace an export that is there.
        process_group: the ranks that work together, see `distckpt.consolidate`.
        options: further options.
        changes: options by keyword, see `ExportOptions`.
    """

    backend = "huggingface"
    version = 1

    def __init__(
        self,
        *,
        overwrite: bool = False,
        process_group: Any = None,
        options: ExportOptions | None = None,
        **changes: Any,
    ) -> None:
        self._overwrite = overwrite
        self._process_group = process_group
        self._options = with_changes(type(self), ExportOptions, options, changes)

    def consolidate(self, checkpoint_dir: str, output_dir: str) -> ExportReport:
        """Do as `distckpt.consolidate` does. Collective operation: all ranks must call it."""
        return consolidate(
            checkpoint_dir,
            output_dir,
            overwrite=self._overwrite,
            process_group=self._process_group,
            options=self._options,
        )


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    use_staging: bool = False,
    staging_dir: str | None = None,
    cast_dtype: torch.dtype | None = None,
    fqn_to_dtype_mapping: Mapping[str, str] | None = None,
) -> None:
    """Merge a folder of shard files into output files, in this process.

    Args:
        input_dir: path or URL of the folder that `HuggingFaceStorageWriter(save_distributed=True)`
            wrote, or of the `tensors` folder of a distckpt checkpoint.
        output_dir: path or URL; an export that is there is replaced, other files stay.
        fqn_to_index_mapping: key -> number of its output file, from 0 or 1; all keys, and no
            further ones. None: all in `model.safetensors`.
        num_threads: number of threads that read and write.
        use_staging: of NeMo Automodel, which writes elsewhere first. Files are always written next
            to `output_dir`, where they appear in one step.
        staging_dir: likewise; not used.
        cast_dtype: convert floating point tensors of 16 bits and more, except those for which
            `fqn_to_dtype_mapping` has float32.
        fqn_to_dtype_mapping: key -> name of its dtype, such as "BF16". Without `cast_dtype`,
            floating point tensors get this dtype; those that have one of integers or 8-bit floats
            there stay as they are, with a warning.

    Raises:
        ValueError: the shards do not belong together: one is missing, has no sharding metadata, is
            left over from another save, is damaged, differs in dtype, or a key that has a file
            number is in none; naming file and key. Nothing is written then.
    """
    options = _Conversions(use_staging, staging_dir, cast_dtype, fqn_to_dtype_mapping)
    _consolidate(Ranks.alone(), input_dir, output_dir, fqn_to_index_mapping, num_threads, options)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: Any = None,
    use_staging: bool = False,
    staging_dir: str | None = None,
    cast_dtype: torch.dtype | None = None,
    fqn_to_dtype_mapping: Mapping[str, str] | None = None,
) -> None:
    """Merge a folder of shard files, dividing output files among ranks.

    Collective operation: all ranks must call it; without torch.distributed, this process does all.

    All further arguments are as in `consolidate_safetensors_files`.

    Args:
        num_threads: number of threads per rank.
        process_group: the ranks that work together; None for the default group.

    Raises:
        ValueError: see `consolidate_safetensors_files`.
        RankFailedError: raised on all ranks when any rank failed otherwise.
    """
    ranks = Ranks(process_group)
    options = _Conversions(use_staging, staging_dir, cast_dtype, fqn_to_dtype_mapping)
    _consolidate(ranks, input_dir, output_dir, fqn_to_index_mapping, num_threads, options)


class _Conversions(NamedTuple):
    """The dtypes to convert to, which only NeMo Automodel's functions take."""

    use_staging: bool
    staging_dir: str | None
    cast_dtype: torch.dtype | None
    dtype_names: Mapping[str, str] | None


@paused_garbage_collection()
def _consolidate(
    ranks: Ranks,
    input_dir: str,
    output_dir: str,
    file_numbers: Mapping[str, int] | None,
    num_threads: int,
    conversions: _Conversions,
) -> None:
    options = ExportOptions(keys="*", max_file_bytes=_UNLIMITED)
    same = {"fqn_to_index_mapping": file_numbers, **conversions._asdict()}
    with ranks.phase("check the arguments", decision=True, same=same):
        _check_arguments(file_numbers, num_threads, conversions)
    checked = check_request(ranks, [input_dir], output_dir, overwrite=True, options=options)
    request = replace(checked, num_threads=max(1, num_threads))
    try:
        stored = _open_shards(ranks, request.sources.checkpoints[0])
        plan = plan_export(ranks, OpenedSources([stored]), TensorSource(stored), options)
        with ranks.phase("plan the output files"):
            plan = _converted(plan, stored, conversions, ranks.is_coordinator)
            if file_numbers is not None:
                absent = set(file_numbers).difference(stored.manifest.key_index)
                if absent:
                    raise CorruptCheckpointError(
                        f"fqn_to_index_mapping names {summarize_keys(absent)}, which no shard in "
                        f"{stored.location!r} has: a shard file is missing, or the tensor was not "
                        "saved. Take the names of tensors that are tied to others out of the "
                        "mapping."
                    )
                plan = replace(plan, files=number_files(plan.outputs, file_numbers, lowest=0))
        write_and_commit(ranks, request, [stored], plan)
    except CorruptCheckpointError as error:
        raise ValueError(str(error)) from error


def _check_arguments(
    file_numbers: Mapping[str, int] | None, num_threads: int, conversions: _Conversions
) -> None:
    for name, value in (
        ("fqn_to_index_mapping", file_numbers),
        ("fqn_to_dtype_mapping", conversions.dtype_names),
    ):
        if not isinstance(value, Mapping | None):
            raise TypeError(f"{name} is a dict from keys, or None, got {value!r:.100}.")
    if type(num_threads) is not int:
        raise TypeError(f"num_threads is a number of threads, got {num_threads!r:.100}.")
    check_switch("use_staging", conversions.use_staging)
    if not isinstance(conversions.cast_dtype, torch.dtype | None):
        raise TypeError(
            f"cast_dtype is a torch.dtype, or None, got {conversions.cast_dtype!r:.100}."
        )


# --- Conversions ----------------------------------------------------------------------------------


def _converted(
    plan: ExportPlan, stored: StoredCheckpoint, conversions: _Conversions, logs_warnings: bool
) -> ExportPlan:
    """Give the tensors of a plan their dtypes."""
    named = {}
    for key, name in (conversions.dtype_names or {}).items():
        try:
            named[key] = as_torch_dtype(name)
        except (TypeError, ValueError) as error:
            raise CheckpointingException(
                f"fqn_to_dtype_mapping has {name!r:.100} for {key!r}, which names no dtype: give "
                "one of safetensors, such as 'BF16'."
            ) from error
    unchanged: list[str] = []
    outputs = []
    for output in plan.outputs:
        outputs.append(_with_dtype(output, conversions.cast_dtype, named, unchanged))
    if unchanged and logs_warnings:
        logger.warning(
            "fqn_to_dtype_mapping has dtypes of integers or codes for tensors that are stored as "
            "floating point, and stay so: %s",
            summarize_keys(unchanged),
        )
    check_codes(stored, outputs)
    return replace(plan, outputs=outputs, files=plan_files(outputs, _UNLIMITED, None))


def _with_dtype(
    output: OutputTensor,
    cast_dtype: torch.dtype | None,
    named: Mapping[str, torch.dtype],
    unchanged: list[str],
) -> OutputTensor:
    """Return a tensor in its dtype.

    Append its name to `unchanged` where another one does not apply.
    """
    target = named.get(output.name)
    stored = FROM_NAME[output.dtype]
    if cast_dtype is not None and target != torch.float32:
        target = cast_dtype
    if target is None or not _is_ordinary(stored):
        return output
    if not _is_ordinary(target):
        unchanged.append(output.name)
        return output
    num_bytes = output.num_elements * target.itemsize
    return output._replace(dtype=TO_NAME[target], num_bytes=num_bytes)


def _is_ordinary(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating point of 16 bits or more."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _open_shards(ranks: Ranks, location: str) -> StoredCheckpoint:
    """Open a folder of shards, all of which must have positions."""
    for attempt in read_attempts(ranks, location):
        with attempt:
            read = partial(_describe_shards, location, attempt.states)
            data = ranks.decide("open the checkpoint", read)
    with ranks.phase("open the checkpoint"):
        stored = StoredCheckpoint(location, manifest_from_bytes(data, location))
        is_copy = not ranks.is_coordinator
        return replace(stored, states=attempt.states, compares_headers=is_copy)


def _describe_shards(location: str, states: dict[str, FileState]) -> bytes:
    read_manifest = partial(read_sealed, _ShardsReader())
    return describe(location, read_manifest, states, HUGGING_FACE.names).to_bytes()


class _ShardsReader(HuggingFaceReader):
    """Reads folders of shards, all of which must have positions."""

    def manifest(self, location: str) -> Manifest:
        return read_directory(location, require_sharding_info=True)
