"""Merge the shards of a checkpoint into a Hugging Face checkpoint, without the model and within
bounded memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from distckpt._base.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
)
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice, check_num_bytes, summarize_keys
from distckpt._checkpoint import opening
from distckpt._commit import posix
from distckpt._commit.staging import choose_staging, make_staging
from distckpt._commit.target import check_replaceable
from distckpt._foreign import hugging_face
from distckpt._format.checksum import checksum
from distckpt._format.hf_names import belongs_to_export, index_json
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io import background
from distckpt._io.direct_reads import unread_files
from distckpt._io.export import check_tied, num_export_threads, write_output_file
from distckpt._io.extra_files import ExtraFiles, adapt_config, list_extra_files, write_extra_files
from distckpt._operations.export_plan import ExportPlan, Selection, check_is_adapter, plan_export
from distckpt._plan.export import (
    DEFAULT_MAX_FILE_BYTES,
    OutputFile,
    OutputTensor,
    assign_files,
    plan_files,
)
from distckpt._plan.merged import Merge, merged
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, counting
from distckpt._rules.rules import Rule
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.strategies.base import Verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The content of an export, after comparison with the headers of the written files.

    Attributes:
        num_tensors: number of tensors.
        num_bytes: size of their data.
        num_parameters: number of their elements.
        files: names of the files that hold them.
        dtypes: number of tensors of each safetensors dtype.
        overflows: for each tensor with values that did not fit the dtype they were converted to
            (finite ones that became infinite or, in 8-bit floats without infinities, NaN; numbers
            beyond an integer's range), how many.
        seconds: duration of the call.
    """

    num_tensors: int
    num_bytes: int
    num_parameters: int
    files: tuple[str, ...]
    dtypes: Mapping[str, int]
    overflows: Mapping[str, int]
    seconds: float


@operation
@paused_garbage_collection()
def consolidate(
    checkpoint: str | os.PathLike[str] | Merge,
    output_dir: str | os.PathLike[str],
    *,
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
    """Merge the shards of a checkpoint into a Hugging Face checkpoint, without building the model.

    Everything is checked before a byte is written: shards must tile every tensor. The export is
    written beside `output_dir` and appears there in one step; an earlier one stays complete until
    then. Memory is bounded whatever the size of a tensor.

        distckpt.consolidate("checkpoints/step_100", "exports/step_100", keys="model.",
        dtype=torch.bfloat16)

    Collective operation: all ranks must call it; each writes whole files. Works in one process as
    well.

    Args:
        checkpoint: what `load` reads: a distckpt checkpoint, a folder of shards that torch's
            `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote, or a
            checkpoint of `torch.distributed.checkpoint`, Megatron Core (`torch_dist`) or DeepSpeed.
        output_dir: gets `model.safetensors`, or several files and their index. Other files that are
            there stay.
        keys: which tensors: a beginning of their keys, a pattern with `*`, or a list of such;
            `!optimizer.` for all but those. None for all.
        rules: changes of names and shapes, see `distckpt.rules`.
        family: afterwards, the rules of the model's family, from the names of Megatron Core or of
            transformers in memory: "auto" reads the `config.json` of `like`, a path another one,
            see `distckpt.families`.
        rename: afterwards, old beginnings of names -> new ones.
        dtype: convert floating point tensors of 16 bits and more; or a dict of patterns of new
            names. Integers and 8-bit floats are converted only by a pattern that is exactly their
            name. With a dtype for all tensors, rules or a family, quantized tensors become values,
            else they are written as they are stored.
        quantize: quantize what models usually quantize to a format: "fp8-block", "fp8-block-ue8m0",
            "fp8-tensor", "fp8-channel", "int8-channel", "mxfp4", "mxfp4-packed", "int4" or "nvfp4".
            Or a dict of patterns of new names -> format; the first that matches counts.
            `config.json` says what was done.
        tied: of tied tensors, write the first only ("drop", as Hugging Face does) or each
            ("write").
        unmatched: with rules, a tensor that none of them matches is an error, or keeps name and
            shape ("keep").
        max_file_bytes: maximum size of the data in one file.
        fqn_to_index_mapping: new name -> number of its file, from 1, instead.
        like: divide the tensors among files as this Hugging Face directory does, and compare shapes
            with it. When it is quantized, `quantize` with one format is for the same tensors.
        merge_adapter: a directory that PEFT saved, with LoRA for a model of the names of the
            export: its products are added to the weights, and modules that it saved take the place
            of the model's, as in PEFT's `merge_and_unload`. Quantized tensors become values.
        extra_files_from: a directory whose other files (config, tokenizer) are copied, with their
            modes: files of at most 256 MiB, and links to such files inside the directory; with a
            family, `like` where it is left out. In `config.json` the dtype follows `dtype`, or that
            of all tensors; what it says of quantized ones, too.
        extra_code: copy `*.py` files too, which programs that trust the export may run.
        overwrite: replace an export that is there.
        verify: as in `load`; checksums of a distckpt checkpoint are verified by default.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
        process_group: the ranks that work together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        progress: called with the bytes this rank has written so far and the bytes it will have, now
            and then, from one thread at a time.

    Returns:
        The content of the export, after comparison with the headers of the written files.

    Raises:
        CheckpointNotFoundError: there is nothing to consolidate.
        CheckpointExistsError: `output_dir` holds an export and `overwrite` is False.
        CorruptCheckpointError: shards are missing, overlap, contradict each other or are damaged.
        CheckpointingException: an extra file must not be copied.
        LoadMismatchError: `keys` or a rule matches nothing, or no rule matches some tensor.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    started = time.perf_counter()
    ranks = Ranks(process_group)
    selection = Selection(keys, rules, family, rename, dtype, quantize, tied, unmatched, like)
    weights = checkpoint.weights if isinstance(checkpoint, Merge) else None
    paths = [] if merge_adapter is None else [merge_adapter]
    paths.extend(checkpoint.locations if isinstance(checkpoint, Merge) else [checkpoint])
    # Paths may differ between nodes.
    same: dict[str, object] = selection._replace(family=None, like=None)._asdict()
    same |= {"overwrite": overwrite, "max_file_bytes": max_file_bytes, "verify": verify}
    same |= {"merge_adapter": merge_adapter is not None, "weights": weights}
    with ranks.phase("check the arguments", same=same):
        selection.check()
        check_choice("verify", verify, get_args(Verify))
        check_num_bytes("max_inflight_bytes", max_inflight_bytes)
        sources = [locations.normalize(path) for path in paths]
        target = posix.resolve(output_dir)
        for location in sources:
            background.wait_for_location(location)

    with PhaseTimer("consolidate", ranks.rank, target).phase("plan"):
        # 1. Read the manifests.
        if merge_adapter is not None:
            ranks.decide_json("open the adapter", lambda: check_is_adapter(sources[0]))
        opened = [open_source(ranks, location, target, overwrite, verify) for location in sources]

        # 2. Plan: everything is checked before a byte is written.
        with ranks.phase("plan the export"):
            views = [source for source, _ in opened]
            adapter = None if merge_adapter is None else views.pop(0)
            stored = views[0] if weights is None else merged(views, weights, keys, tied == "write")
            plan = plan_export(stored, selection, ranks.is_coordinator, adapter)
            files = plan_files(plan.outputs, max_file_bytes, plan.numbers or fqn_to_index_mapping)
            extra_from = (
                like if family is not None and extra_files_from is None else extra_files_from
            )
            extra_files = (
                _choose_extra_files(plan, extra_from, extra_code, dtype)
                if ranks.is_coordinator
                else None
            )
        with ranks.phase("compare what is tied"):
            check_tied(plan.stored, plan.tied if ranks.is_coordinator else ())

    # 3. Write beside the target, and commit.
    num_threads = num_export_threads(max_inflight_bytes)
    overflows = write_export(
        ranks, plan.stored, opened, files, target, num_threads, progress, extra_files
    )
    return _report(plan.outputs, files, overflows, time.perf_counter() - started)


# --- Steps ----------------------------------------------------------------------------------------


def _choose_extra_files(
    plan: ExportPlan,
    directory: str | os.PathLike[str] | None,
    extra_code: bool,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
) -> ExtraFiles:
    """Choose the files that go beside the tensors: those of a directory, with a configuration that
    fits the export.
    """
    taken = (
        [] if directory is None else list_extra_files(locations.normalize(directory), extra_code)
    )
    return adapt_config(taken, plan.outputs, plan.quantization, dtype)


def _report(
    outputs: Sequence[OutputTensor],
    files: Sequence[OutputFile],
    overflows: dict[str, int],
    seconds: float,
) -> ExportReport:
    return ExportReport(
        len(outputs),
        sum(tensor.num_bytes for tensor in outputs),
        sum(tensor.num_elements for tensor in outputs),
        tuple(file.name for file in files),
        dict(Counter(tensor.dtype for tensor in outputs)),
        overflows,
        seconds,
    )


def open_source(
    ranks: Ranks,
    location: str,
    target: str,
    overwrite: bool,
    verify: Verify,
    require_sharding_info: bool = False,
) -> tuple[StoredCheckpoint, bytes]:
    """Check that an export may be written to the target; return the opened checkpoint and the bytes
    of its manifest.

    Collective operation: all ranks must call it; rank 0 reads.
    """

    def check_and_read() -> bytes:
        _check_target(location, target, overwrite)
        if require_sharding_info:
            return hugging_face.read_directory(location, require_sharding_info=True).to_bytes()
        return opening.manifest_bytes(location, opening.identify(location))

    data = ranks.decide("open the checkpoint", check_and_read)
    with ranks.phase("open the checkpoint"):
        stored = opening.decode_manifest(location, data, verify)
        own_checksum = f"{checksum(data):016x}" if stored.manifest.has_checksums else None
        opening.check_is_same(ranks.rank, location, own_checksum)
        return stored, data


def _check_target(location: str, target: str, overwrite: bool) -> None:
    source = posix.resolve(location)
    if target in (source, *(locations.join(source, name) for name in posix.SUBDIRECTORIES)):
        raise CheckpointingException(f"The export cannot replace its own source {location!r}.")
    posix.put_back(target)
    exists = locations.exists(target)
    if exists and not locations.isdir(target):
        raise CheckpointExistsError(f"{target!r} is a file, an export is a directory.")
    check_replaceable(target)
    present = (
        [name for name in locations.list_names(target) if belongs_to_export(name)] if exists else []
    )
    if present and not (overwrite and locations.is_local(target)):
        raise CheckpointExistsError(
            f"{target!r} already holds an export ({present[0]!r}). Choose another directory, or, "
            "on local file systems, pass overwrite=True."
        )


def write_export(
    ranks: Ranks,
    stored: StoredCheckpoint,
    sources: Sequence[tuple[StoredCheckpoint, bytes]],
    files: Sequence[OutputFile],
    target: str,
    num_threads: int,
    progress: Callable[[int, int], object] | None = None,
    extra_files: ExtraFiles | None = None,
) -> dict[str, int]:
    """Write an export beside the target, check it and make it visible; return the overflows by
    tensor.

    Collective operation: all ranks must call it; each writes whole files. `stored` is a view of the
    sources, which are what `open_source` returned.
    """
    timer = PhaseTimer("consolidate", ranks.rank, target)
    mine = [files[index] for index in assign_files(files, ranks.size)[ranks.rank]]
    own_bytes = sum(file.num_bytes for file in mine)
    place, held = choose_staging(ranks, target, own_bytes), contextlib.ExitStack()
    staging = place.location
    try:
        with timer.phase("write") as details:
            details["bytes"] = own_bytes
            make_staging(ranks, place, held, names=())
            overflows: dict[str, int] = {}
            with ranks.phase("write output files"):
                count = counting(progress, own_bytes)
                kept = stored.with_files(
                    held.enter_context(OpenFiles.for_many_reads(unread_files(stored)))
                )
                for file in mine:
                    path = locations.join(staging, file.name)
                    overflows |= write_output_file(kept, file, path, num_threads, count)
                locations.sync_directory(staging)
            for other in ranks.all_gather(json.dumps(overflows).encode()):
                overflows |= json.loads(other)
        with timer.phase("commit"), ranks.phase("commit the export", decision=True):
            if ranks.is_coordinator:
                _check_unchanged(sources)
                for file in files:
                    _check_written(locations.join(staging, file.name), file)
                write_extra_files(extra_files or ExtraFiles(), staging)
                _write_index(staging, files)
                posix.commit_beside_others(staging, target, belongs_to_export)
    except BaseException:
        if ranks.is_coordinator:
            _abandon(staging, target, files)
        raise
    finally:
        held.close()
    if overflows and ranks.is_coordinator:
        logger.warning(
            "values did not fit the dtype they were converted to in %s", summarize_keys(overflows)
        )
    return overflows


def _write_index(staging: str, files: Sequence[OutputFile]) -> None:
    """Write the index of several files."""
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        num_parameters = sum(tensor.num_elements for file in files for tensor in file.tensors)
        index = index_json(weight_map, sum(file.num_bytes for file in files), num_parameters)
        locations.write_bytes(locations.join(staging, hugging_face.INDEX_NAME), index)


def _abandon(staging: str, target: str, files: Sequence[OutputFile]) -> None:
    if staging != target:
        locations.remove_tree(staging)
        return
    # On an object store the files are in their final place; the index was not written.
    for file in files:
        locations.remove_file(locations.join(target, file.name))


def _check_unchanged(sources: Sequence[tuple[StoredCheckpoint, bytes]]) -> None:
    """Compare the manifests of the sources with what they were when the export began."""
    for source, data in sources:
        if opening.manifest_bytes(source.location, opening.identify(source.location)) != data:
            raise CheckpointingException(
                f"{source.location!r} was overwritten while it was exported: nothing was exported, "
                "try again."
            )


def _check_written(path: str, file: OutputFile) -> None:
    """Compare the header of a written file with the plan."""
    written = {
        entry.name: (entry.dtype, entry.shape) for entry in hugging_face.read_header(path).entries
    }
    planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors}
    if written != planned:
        different = summarize_keys({name for name, _ in written.items() ^ planned.items()})
        raise CorruptCheckpointError(
            f"{path!r} was changed while it was written: it differs in {different}."
        )
