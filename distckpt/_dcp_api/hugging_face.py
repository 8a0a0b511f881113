"""Hugging Face checkpoints: consolidation under the names of torch and NeMo Automodel, file names
and the index.

`consolidate_safetensors_files` and `consolidate_safetensors_files_on_every_rank` take the arguments
of torch's and NeMo Automodel's functions of these names; change the import. `distckpt.consolidate`
can do more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.options import ExportOptions, with_changes
from distckpt._checkpoint.opening import decode_manifest
from distckpt._foreign.hugging_face import read_directory
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.tensor_source import TensorSource
from distckpt._operations.consolidate import consolidate
from distckpt._operations.export_plan import plan_export
from distckpt._operations.export_request import check_request
from distckpt._operations.export_write import ExportReport, write_and_commit
from distckpt._ranks.collectives import Ranks
from distckpt.strategies.base import ConsolidationStrategy

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
    options = ExportOptions(max_file_bytes=_UNLIMITED, fqn_to_index_mapping=file_numbers)
    checked = check_request(ranks, [input_dir], output_dir, overwrite=True, options=options)
    request = replace(checked, num_threads=max(1, num_threads))
    try:
        stored = _open_shards(ranks, request.sources.checkpoints[0])
        plan = plan_export(ranks, TensorSource(stored), options)
        write_and_commit(ranks, request, [stored], plan)
    except CorruptCheckpointError as error:
        raise ValueError(str(error)) from error


def _open_shards(ranks: Ranks, location: str) -> StoredCheckpoint:
    """Open a folder all of whose files must be shards, of which positions are known."""

    def read() -> bytes:
        return read_directory(location, require_sharding_info=True).to_bytes()

    data = ranks.decide("open the checkpoint", read)
    with ranks.phase("open the checkpoint"):
        return decode_manifest(location, data)
