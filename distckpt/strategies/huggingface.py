"""Consolidation: merges shards into a Hugging Face checkpoint, without the model and within bounded memory."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from distckpt._base.errors import CheckpointExistsError, CheckpointingException, CorruptCheckpointError
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice, summarize_keys
from distckpt._base.threads import NUM_THREADS, UNIT_BYTES
from distckpt._commit import posix
from distckpt._foreign import hugging_face, opening
from distckpt._format.hf_names import belongs_to_export, index_json
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import write_output_file
from distckpt._plan.export import (
    DEFAULT_MAX_FILE_BYTES,
    OutputFile,
    OutputTensor,
    assign_files,
    plan_files,
    plan_tensors,
    select_tensors,
)
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import counting
from distckpt._storage import locations
from distckpt.rules import Rule
from distckpt.strategies.base import ConsolidationStrategy, Verify

logger = logging.getLogger(__name__)

WINDOWS_PER_THREAD = 4
"""Buffers of `UNIT_BYTES` a thread may use at a time: window, bounce buffer with its widening, conversion."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class ExportReport:
    """The content of an export, after comparison with the headers of the written files.

    Attributes:
        num_tensors: number of tensors.
        num_bytes: size of their data.
        num_parameters: number of their elements.
        files: names of the files that hold them.
        dtypes: number of tensors of each safetensors dtype.
        overflows: for each tensor with values that did not fit the dtype they were converted to (finite ones that
            became infinite or, in 8-bit floats without infinities, NaN; numbers beyond an integer's range), how many.
        seconds: that it took.
    """

    num_tensors: int
    num_bytes: int
    num_parameters: int
    files: tuple[str, ...]
    dtypes: Mapping[str, int]
    overflows: Mapping[str, int]
    seconds: float


@dataclass
class HuggingFaceConsolidationStrategy(ConsolidationStrategy):
    """Merge a checkpoint into `model*.safetensors` files and their index; see `distckpt.consolidate`."""

    keys: str | Sequence[str] | None = None
    rules: Sequence[Rule] = ()
    rename: Mapping[str, str] | None = None
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    tied: Literal["drop", "write"] = "drop"
    unmatched: Literal["error", "keep"] = "error"
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    fqn_to_index_mapping: Mapping[str, int] | None = None
    like: str | os.PathLike[str] | None = None
    extra_files_from: str | os.PathLike[str] | None = None
    overwrite: bool = False
    verify: Verify = "full"
    max_inflight_bytes: int = 256 << 20
    num_threads: int = NUM_THREADS
    progress: Callable[[int, int], object] | None = None
    process_group: Any = None
    alone: bool = False
    require_sharding_info: bool = False
    backend: str = "huggingface"
    version: int = 1

    def __post_init__(self) -> None:
        check_choice("tied", self.tied, ("drop", "write"))
        check_choice("unmatched", self.unmatched, ("error", "keep"))
        check_choice("verify", self.verify, get_args(Verify))

    @paused_garbage_collection()
    def consolidate(self, checkpoint_dir: str, output_dir: str) -> ExportReport:
        """Write the export.

        Collective operation: all ranks must call it; each writes whole files. Every rank makes the plan from the
        manifest, which rank 0 reads.

        Raises:
            CheckpointExistsError: there is an export in `output_dir` and `overwrite` is False.
            CorruptCheckpointError: shards are missing, overlap, leave gaps or are damaged.
            RankFailedError: a rank failed.
        """
        started = time.perf_counter()
        ranks = Ranks.alone() if self.alone else Ranks(self.process_group)
        location, target = locations.normalize(checkpoint_dir), posix.resolve(output_dir)

        # 1. Read the manifest and plan: everything is checked before a byte is written.
        data = ranks.decide("open the checkpoint", partial(self._check_and_read, location, target))
        with ranks.phase("plan the export"):
            stored = opening.decode_manifest(location, data, self.verify)
            files = self._plan(stored.manifest, is_speaker=ranks.is_coordinator)

        # 2. Write beside the target.
        nonce = ranks.broadcast(secrets.token_hex(8).encode()).decode()
        staging = posix.staging_location(target, nonce)
        try:
            overflows = self._write_all(ranks, stored, files, staging)

            # 3. Check what was written, write the index, commit.
            with ranks.phase("commit the export", decision=True):
                if ranks.is_coordinator:
                    if self._manifest_bytes(location) != data:
                        raise CheckpointingException(
                            f"{location!r} was overwritten while it was exported: nothing was exported, try again."
                        )
                    for file in files:
                        _check_written(locations.join(staging, file.name), file)
                    self._write_others(staging, files)
                    posix.commit_beside_others(staging, target, belongs_to_export)
        except BaseException:
            if ranks.is_coordinator:
                _abandon(staging, target, files)
            raise
        if overflows and ranks.is_coordinator:
            logger.warning("values did not fit the dtype they were converted to in %s", summarize_keys(overflows))
        return _report(files, overflows, time.perf_counter() - started)

    def _write_all(
        self, ranks: Ranks, stored: StoredCheckpoint, files: Sequence[OutputFile], staging: str
    ) -> dict[str, int]:
        """Write this rank's share of the files; return the overflows in those of all ranks."""
        overflows: dict[str, int] = {}
        with ranks.phase("write output files"):
            locations.make_directories(staging)
            mine = [files[index] for index in assign_files(files, ranks.size)[ranks.rank]]
            progress = counting(self.progress, sum(file.num_bytes for file in mine))
            num_threads = min(self.num_threads, num_export_threads(self.max_inflight_bytes))
            for file in mine:
                path = locations.join(staging, file.name)
                overflows.update(write_output_file(stored, file, path, num_threads, progress))
            locations.sync_directory(staging)
        for other in ranks.all_gather(json.dumps(overflows).encode()):
            overflows.update(json.loads(other))
        return overflows

    def _check_and_read(self, location: str, target: str) -> bytes:
        """Check that an export may be written to the target; return the bytes of the manifest."""
        source = posix.resolve(location)
        if target in (source, *(locations.join(source, name) for name in posix.SUBDIRECTORIES)):
            raise CheckpointingException(f"The export cannot replace its own source {location!r}.")
        posix.put_back(target)
        exists = locations.exists(target)
        if exists and not locations.isdir(target):
            raise CheckpointExistsError(f"{target!r} is a file, an export is a directory.")
        present = [name for name in locations.list_names(target) if belongs_to_export(name)] if exists else []
        if present and not (self.overwrite and locations.is_local(target)):
            raise CheckpointExistsError(
                f"{target!r} already holds an export ({present[0]!r}). Choose another directory, or, on local file "
                "systems, pass overwrite=True."
            )
        return self._manifest_bytes(location)

    def _manifest_bytes(self, location: str) -> bytes:
        if self.require_sharding_info:
            return hugging_face.read_directory(location, require_sharding_info=True).to_bytes()
        return opening.manifest_bytes(location, opening.identify(location))

    def _plan(self, manifest: Manifest, is_speaker: bool) -> list[OutputFile]:
        tensors = select_tensors(manifest, self.keys, write_tied=self.tied == "write")
        keep = self.unmatched == "keep"
        outputs = plan_tensors(tensors, self.rules, self.rename or {}, self.dtype, keep_unmatched=keep)
        numbers = self.fqn_to_index_mapping
        if self.like is not None:
            numbers = _file_numbers(locations.normalize(self.like), outputs, is_speaker)
        return plan_files(outputs, self.max_file_bytes, numbers)

    def _write_others(self, staging: str, files: Sequence[OutputFile]) -> None:
        """Copy the extra files, and write the index of several files."""
        if self.extra_files_from is not None:
            origin = locations.normalize(self.extra_files_from)
            for name in locations.list_names(origin):
                path = locations.join(origin, name)
                if not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES) and not locations.isdir(path):
                    locations.write_bytes(locations.join(staging, name), locations.read_bytes(path))
        if len(files) > 1:
            weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
            num_parameters = sum(tensor.num_elements for file in files for tensor in file.tensors)
            index = index_json(weight_map, sum(file.num_bytes for file in files), num_parameters)
            locations.write_bytes(locations.join(staging, hugging_face.INDEX_NAME), index)


def num_export_threads(max_inflight_bytes: int) -> int:
    """Return how many threads, one at least, may write output within a limit of memory."""
    return max(1, max_inflight_bytes // (WINDOWS_PER_THREAD * UNIT_BYTES))


def _abandon(staging: str, target: str, files: Sequence[OutputFile]) -> None:
    if staging != target:
        locations.remove_tree(staging)
        return
    # On an object store the files are in their final place; the index was not written.
    for file in files:
        locations.remove_file(locations.join(target, file.name))


def _file_numbers(like: str, outputs: Sequence[OutputTensor], is_speaker: bool) -> dict[str, int]:
    """Number the files of a reference directory, after checking that it holds tensors of the same shapes."""
    reference = hugging_face.read_directory(like)
    absent = set(reference.keys) - {tensor.name for tensor in outputs}
    if absent and is_speaker:
        logger.warning("%s holds tensors that are not exported: %s", like, summarize_keys(absent))
    for tensor in outputs:
        key_id = reference.key_index.get(tensor.name)
        if key_id is not None and reference.global_shapes[key_id] != tensor.mapped.shape:
            raise CheckpointingException(
                f"Tensor {tensor.name!r} would be exported with shape {tensor.mapped.shape}; in {like!r} it has "
                f"{reference.global_shapes[key_id]}. A shard may be missing, or rules are needed."
            )
    return {
        key: int(reference.file_ids[reference.chunk_rows(key_id).start]) + 1
        for key, key_id in reference.key_index.items()
    }


def _report(files: Sequence[OutputFile], overflows: Mapping[str, int], seconds: float) -> ExportReport:
    tensors = [tensor for file in files for tensor in file.tensors]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    num_parameters = sum(tensor.num_elements for tensor in tensors)
    dtypes = dict(Counter(tensor.dtype for tensor in tensors))
    return ExportReport(
        len(tensors), num_bytes, num_parameters, tuple(file.name for file in files), dtypes, overflows, seconds
    )


def _check_written(path: str, file: OutputFile) -> None:
    """Compare the header of a written file with the plan."""
    written = {entry.name: (entry.dtype, entry.shape) for entry in hugging_face.read_header(path).entries}
    planned = {tensor.name: (tensor.dtype, tensor.mapped.shape) for tensor in file.tensors}
    if written != planned:
        different = summarize_keys({name for name, _ in written.items() ^ planned.items()})
        raise CorruptCheckpointError(f"{path!r} was changed while it was written: it differs in {different}.")
