"""Hugging Face checkpoints: consolidation under the names of torch and NeMo Automodel, file names
and the index.

`consolidate_safetensors_files` and `consolidate_safetensors_files_on_every_rank` take the arguments
of torch's and NeMo Automodel's functions of these names; change the import. `distckpt.consolidate`
can do more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.memory import paused_garbage_collection
from distckpt._commit import posix
from distckpt._format.hf_names import (
    derive_base_prefix_from_path,
    group_keys_by_shard_size,
    index_filename,
    index_json,
    optimize_shard_layout,
    output_filenames,
    shard_filename,
)
from distckpt._operations.consolidate import ExportReport, consolidate, open_source, write_export
from distckpt._plan.export import plan_files, plan_tensors, select_tensors
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.strategies.base import ConsolidationStrategy

__all__ = [
    "HuggingFaceConsolidationStrategy",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "derive_base_prefix_from_path",
    "group_keys_by_shard_size",
    "index_filename",
    "index_json",
    "optimize_shard_layout",
    "output_filenames",
    "shard_filename",
]


class HuggingFaceConsolidationStrategy(ConsolidationStrategy):
    """Consolidation as a strategy, for programs that choose strategies by configuration.

    Args:
        options: the keyword arguments of `distckpt.consolidate`.
    """

    backend = "huggingface"
    version = 1

    def __init__(self, **options: Any) -> None:
        self._options = options

    def consolidate(self, checkpoint_dir: str, output_dir: str) -> ExportReport:
        """Do as `distckpt.consolidate` does. Collective operation: all ranks must call it."""
        return consolidate(checkpoint_dir, output_dir, **self._options)


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """Merge a folder of shard files into output files, in this process alone.

    Args:
        input_dir: path or URL of the folder that `HuggingFaceStorageWriter(save_distributed=True)`
            wrote, or of the `tensors` folder of a distckpt checkpoint.
        output_dir: path or URL; an export that is there is replaced, other files stay.
        fqn_to_index_mapping: key -> number of its output file, from 1. None: all in one file.
        num_threads: number of threads that read and write.

    Raises:
        ValueError: the shards do not belong together: one is missing, has no sharding metadata, is
            left over from another save, is damaged, or differs in dtype; naming file and key.
            Nothing is written then.
    """
    _consolidate(Ranks.alone(), input_dir, output_dir, fqn_to_index_mapping, num_threads)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: Any = None,
) -> None:
    """Merge a folder of shard files, the output files divided among the ranks.

    Collective operation: all ranks must call it; without torch.distributed, this process does all.

    Args not described here are those of `consolidate_safetensors_files`.

    Args:
        num_threads: number of threads per rank.
        process_group: the ranks that work together; None for the default group.

    Raises:
        ValueError: see `consolidate_safetensors_files`.
        RankFailedError: raised on all ranks when any rank failed otherwise.
    """
    _consolidate(Ranks(process_group), input_dir, output_dir, fqn_to_index_mapping, num_threads)


@paused_garbage_collection()
def _consolidate(
    ranks: Ranks,
    input_dir: str,
    output_dir: str,
    file_numbers: Mapping[str, int] | None,
    num_threads: int,
) -> None:
    with ranks.phase("check the arguments"):
        location, target = locations.normalize(input_dir), posix.resolve(output_dir)
    try:
        source, data = open_source(
            ranks, location, target, overwrite=True, verify="full", require_sharding_info=True
        )
        with ranks.phase("plan the export"):
            outputs = plan_tensors(
                select_tensors(source.manifest, None, write_tied=False), (), {}, None
            )
            files = plan_files(outputs, 2**63, file_numbers)
        write_export(ranks, source, [(source, data)], files, target, max(1, num_threads))
    except CorruptCheckpointError as error:
        raise ValueError(str(error)) from error
