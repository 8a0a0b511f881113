"""Merge the shards of a checkpoint into a Hugging Face checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from distckpt._base.memory import paused_garbage_collection
from distckpt._io import background
from distckpt._plan.export import DEFAULT_MAX_FILE_BYTES
from distckpt.rules import Rule
from distckpt.strategies.base import Verify
from distckpt.strategies.huggingface import ExportReport, HuggingFaceConsolidationStrategy


@paused_garbage_collection()
def consolidate(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] | None = None,
    rules: Sequence[Rule] = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    tied: Literal["drop", "write"] = "drop",
    unmatched: Literal["error", "keep"] = "error",
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    like: str | os.PathLike[str] | None = None,
    extra_files_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: Verify = "full",
    max_inflight_bytes: int = 256 << 20,
    process_group: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> ExportReport:
    """Merge the shards of a checkpoint into a Hugging Face checkpoint, without building the model.

    Everything is checked before a byte is written: shards must tile every tensor. The export is written beside
    `output_dir` and appears there in one step; an earlier one stays complete until then. Memory is bounded whatever the
    size of a tensor.

        distckpt.consolidate("checkpoints/step_100", "exports/step_100", keys="model.", dtype=torch.bfloat16)

    Collective operation: all ranks must call it; each writes whole files. Works in one process as well.

    Args:
        checkpoint: what `load` reads: a distckpt checkpoint, a folder of shards that torch's
            `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote, or a checkpoint of
            `torch.distributed.checkpoint` or Megatron Core (`torch_dist`).
        output_dir: gets `model.safetensors`, or several files and their index. Other files that are there stay.
        keys: which tensors: a beginning of their keys, a pattern with `*`, or a list of such; None for all.
        rules: changes of names and shapes, see `distckpt.rules`.
        rename: afterwards, old beginnings of names -> new ones.
        dtype: convert floating point tensors of 16 bits and more; or a dict of patterns of new names. Integers and
            8-bit floats are converted only by a pattern that is exactly their name.
        tied: of tied tensors, write the first only ("drop", as Hugging Face does) or each ("write").
        unmatched: with rules, a tensor that none of them matches is an error, or keeps name and shape ("keep").
        max_file_bytes: how much data goes into one file.
        fqn_to_index_mapping: new name -> number of its file, from 1, instead.
        like: divide the tensors among files as this Hugging Face directory does, and compare shapes with it.
        extra_files_from: a directory whose other files (config, tokenizer, code) are copied.
        overwrite: replace an export that is there.
        verify: as in `load`; checksums of a distckpt checkpoint are verified by default.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
        process_group: the ranks that work together; None for the default group, or for this process alone when
            torch.distributed is not initialised.
        progress: called with the bytes this rank has written so far and the bytes it will have, now and then, from one
            thread at a time.

    Returns:
        The content of the export, after comparison with the headers of the written files.

    Raises:
        CheckpointNotFoundError: there is nothing to consolidate.
        CheckpointExistsError: `output_dir` holds an export and `overwrite` is False.
        CorruptCheckpointError: shards are missing, overlap, contradict each other or are damaged.
        LoadMismatchError: `keys` or a rule matches nothing, or no rule matches some tensor.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    background.wait_for_location(os.fspath(checkpoint))
    strategy = HuggingFaceConsolidationStrategy(
        keys=keys,
        rules=rules,
        rename=rename,
        dtype=dtype,
        tied=tied,
        unmatched=unmatched,
        max_file_bytes=max_file_bytes,
        fqn_to_index_mapping=fqn_to_index_mapping,
        like=like,
        extra_files_from=extra_files_from,
        overwrite=overwrite,
        verify=verify,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
        process_group=process_group,
    )
    return strategy.consolidate(os.fspath(checkpoint), os.fspath(output_dir))
