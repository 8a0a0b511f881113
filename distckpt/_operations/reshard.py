"""Rewriting a checkpoint as other ranks would have saved it, in one process and within bounded
memory.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._checkpoint.opening import BACKEND, VERSION, open_checkpoint
from distckpt._checkpoint.stored_values import object_keys, read_encoded
from distckpt._commit import posix
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.marker import (
    CheckpointingConfig,
    names_of_module,
    note_of_module,
    read_marker,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._io import background
from distckpt._io.direct_reads import unread_files
from distckpt._io.export import filling, num_export_threads
from distckpt._io.save_shards import encoded_objects, object_file_of
from distckpt._io.write import NewFile, WriteSettings
from distckpt._mapping.wrappers import ShardedObject, ShardedTensor
from distckpt._operations.planned_save import PlannedSave, SaveSettings, write_and_commit
from distckpt._plan.cache import SavePlan
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.export import (
    OutputTensor,
    check_codes,
    is_for_all,
    matches,
    plan_tensors,
    renamed,
    select_tensors,
)
from distckpt._plan.layout import (
    PlannedChunk,
    PlannedFile,
    chunk_table,
    lay_out_files,
    manifest_of_keys,
)
from distckpt._plan.save import plan_owners
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, counting
from distckpt._rules.mapped import crop
from distckpt._rules.rules import Rule
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import GlobalTable, Shard, describe, merge_tables
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.strategies.safetensors import SafetensorsSave


@dataclass(frozen=True)
class ReshardReport:
    """The content of a rewritten checkpoint.

    Attributes:
        location: location of the new checkpoint.
        num_tensors: stored tensors; tied ones count once.
        num_objects: stored objects, without common state.
        num_chunks: pieces that the tensors are stored in.
        num_files: number of files that hold them.
        num_bytes: size of tensors and objects.
        overflows: for each tensor with values that did not fit the dtype they were converted to,
            how many.
        seconds: duration of the call.
    """

    location: str
    num_tensors: int
    num_objects: int
    num_chunks: int
    num_files: int
    num_bytes: int
    overflows: Mapping[str, int]
    seconds: float


@operation
@paused_garbage_collection()
def reshard(
    source_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    num_ranks: int = 1,
    grids: Mapping[str, Sequence[int]] | None = None,
    keys: str | Sequence[str] | None = None,
    rules: Sequence[Rule] = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    overwrite: bool = False,
    verify: Literal["none", "read", "full"] = "full",
    max_inflight_bytes: int = 256 << 20,
    progress: Callable[[int, int], object] | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint as other ranks would have saved it: in fewer files, or on another grid.

    A load needs none of this: it takes any division. Rewriting makes few files of many, lets a job
    of another layout read whole chunks, and makes a checkpoint with checksums of a Hugging Face
    directory. Objects and common state are kept. The new checkpoint appears in one step; memory is
    bounded whatever the size of a tensor.

        distckpt.reshard("checkpoints/step_100", "resharded/step_100", num_ranks=8,
        grids={"*.up.weight": (4, 1)})

    One process calls, alone. Arguments that are not described here are those of `consolidate`.

    Args:
        source_dir: what `load` reads: a checkpoint of distckpt, a Hugging Face directory, and those
            of others.
        checkpoint_dir: location of the new checkpoint, not that of the source.
        num_ranks: as many ranks' files are written, each with the same share of the bytes as far as
            grids allow.
        grids: pattern of new keys -> into how many parts each axis is divided. Part i (row-major)
            goes to rank i, from the first rank again after the last; with more ranks than parts,
            several share it as replicas do. The first pattern that fits counts. Other tensors are
            held by all ranks.
        rules: as in `consolidate`; what no rule matches is kept as it is.
        overwrite: replace a checkpoint that is there.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
            Objects are in memory whole.

    Returns:
        What was written.

    Raises:
        CheckpointNotFoundError: there is nothing that can be read.
        CheckpointExistsError: a complete checkpoint is there and `overwrite` is False.
        CheckpointingException: a grid fits no tensor, or not the one it is for.
        CorruptCheckpointError: the source is damaged. Nothing is committed.
        LoadMismatchError: `keys` or a rule matches nothing.
    """
    started = time.perf_counter()
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks!r}")
    location, target = locations.normalize(source_dir), posix.resolve(os.fspath(checkpoint_dir))
    if target == posix.resolve(location):
        raise CheckpointingException(
            f"A checkpoint cannot be rewritten in its own place {location!r}."
        )
    background.wait_for_location(location)
    posix.check_target(target, overwrite, os.fspath(checkpoint_dir))

    # 1. What is written.
    stored = open_checkpoint(location, verify)
    if rules or is_for_all(dtype):
        stored = decoded(stored)
    outputs = _outputs(stored, keys, rules, rename or {}, dtype)
    aliases = {} if rules else _aliases(stored, keys, rename or {})
    objects = _read_objects(stored)

    # 2. Who writes it.
    shards, holders = _divide(outputs, objects, num_ranks, grids or {})
    new_manifest, planned, object_files = _lay_out(shards, holders, num_ranks, aliases)
    if not stored.quantized:
        new_manifest.quantization = stored.manifest.quantization

    # 3. Write beside the target, and commit.
    num_bytes = sum(output.num_bytes for output in outputs) + sum(
        len(shard.data) for shard in objects
    )
    num_threads = num_export_threads(max_inflight_bytes)
    settings = WriteSettings(num_threads=num_threads, progress=counting(progress, num_bytes))
    overflows: dict[str, int] = {}
    open_files = OpenFiles.for_many_reads(unread_files(stored))
    files = _files_of(stored.with_files(open_files), outputs, planned, object_files, overflows)
    chunks = chunk_table(planned)
    new_manifest.check_size([chunks])
    rewrite = SafetensorsSave(
        lambda: files, SavePlan(0, [], [], new_manifest, [chunks]), {}, settings, num_bytes
    )
    timer = PhaseTimer("reshard", 0, target)
    names = [] if rules or rename else names_of_module(read_marker(location) or {})
    save_settings = SaveSettings(overwrite=overwrite, notes=note_of_module(names))
    config = CheckpointingConfig(BACKEND, VERSION)
    with open_files:
        write_and_commit(Ranks.alone(), PlannedSave(target, save_settings, config, rewrite, timer))
    num_objects = len({shard.key for shard in objects} - {COMMON_KEY})
    num_chunks, seconds = len(chunks.key_ids) - len(objects), time.perf_counter() - started
    return ReshardReport(
        target, len(outputs), num_objects, num_chunks, len(planned), num_bytes, overflows, seconds
    )


# --- What is written ------------------------------------------------------------------------------


def _outputs(
    stored: StoredCheckpoint,
    keys: str | Sequence[str] | None,
    rules: Sequence[Rule],
    rename: Mapping[str, str],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
) -> list[OutputTensor]:
    """Return the tensors of the new checkpoint; one of objects alone has none."""
    manifest = stored.manifest
    if keys is None and all(name == OBJECT for name in manifest.dtypes):
        return []
    # Rules may make different tensors of tied ones, which are written one by one then.
    tensors = select_tensors(manifest, keys, bool(rules), hidden_keys(stored))
    outputs = plan_tensors(
        tensors, rules, rename, dtype, keep_unmatched=True, tied=manifest.aliases
    )
    check_codes(stored, outputs)
    return outputs


def _aliases(
    stored: StoredCheckpoint, keys: str | Sequence[str] | None, rename: Mapping[str, str]
) -> dict[str, str]:
    """Return the tied keys of the new checkpoint, under their new names."""
    manifest, hidden = stored.manifest, hidden_keys(stored)
    chosen = select_tensors(manifest, keys, False, hidden) if manifest.aliases else {}
    names = {manifest.key_index[name]: name for name in chosen}
    return {
        renamed(alias, rename): renamed(names[manifest.key_index[alias]], rename)
        for alias in manifest.aliases
        if alias not in chosen and alias not in hidden and (keys is None or matches(alias, keys))
    }


def _read_objects(stored: StoredCheckpoint) -> list[ShardedObject]:
    """Read the encoded objects; there is common state in any case."""
    shards = []
    for key in object_keys(stored):
        shape = (1,) if key == COMMON_KEY else stored.global_shape(key)
        cells = read_encoded(stored, key)
        shards += [ShardedObject(key, data, shape, offset) for offset, data in cells.items()]
    return shards


# --- Who writes it --------------------------------------------------------------------------------


def _divide(
    outputs: Iterable[OutputTensor],
    objects: Iterable[ShardedObject],
    num_ranks: int,
    grids: Mapping[str, Sequence[int]],
) -> tuple[list[Shard], list[range]]:
    """Return the shards that the ranks would hold, without data for tensors, and for each of them
    its ranks.
    """
    shards: list[Shard] = []
    holders: list[range] = []
    used: set[str] = set()
    for output in outputs:
        shape, dtype = output.mapped.shape, FROM_NAME[output.dtype]
        pattern = next((p for p in grids if matches(output.name, p)), None)
        regions = [whole(shape)]
        if pattern is not None:
            used.add(pattern)
            regions = _grid_regions(output.name, shape, tuple(grids[pattern]))
        for index, region in enumerate(regions):
            shards.append(
                ShardedTensor(output.name, None, dtype, region.shape, shape, region.offset, None)
            )
            holders.append(range(index % num_ranks, num_ranks, min(len(regions), num_ranks)))
    unused = sorted(grids.keys() - used)
    if unused:
        raise CheckpointingException(
            f"The grids for {unused} fit no tensor: no key matches, or an earlier one does."
        )
    for index, shard in enumerate(objects):
        shards.append(shard)
        holders.append(range(index % num_ranks, index % num_ranks + 1))
    return shards, holders


def _grid_regions(key: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[Region]:
    """Divide a tensor into a grid whose parts differ by at most one index along each axis."""
    if len(grid) != len(shape) or any(
        not 1 <= n <= max(1, size) for n, size in zip(grid, shape, strict=False)
    ):
        raise CheckpointingException(
            f"Key {key!r} of shape {shape} cannot be divided into a grid of {grid}: give one "
            "number of parts for each axis, from 1 to its size."
        )
    axes = [
        [(i * size // n, (i + 1) * size // n) for i in range(n)]
        for n, size in zip(grid, shape, strict=True)
    ]
    return [
        Region(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*axes)
    ]


def _lay_out(
    shards: Sequence[Shard], holders: Sequence[range], num_ranks: int, aliases: Mapping[str, str]
) -> tuple[Manifest, list[PlannedFile], dict[str, NewFile]]:
    """Give every byte an owner; returns the manifest without chunks, the files of all ranks, and
    those of objects.
    """
    described = describe(shards)
    table = _hold(merge_tables([described]), holders)
    manifest = manifest_of_keys(table, {})
    manifest.aliases.update(aliases)
    planned: list[PlannedFile] = []
    object_files: dict[str, NewFile] = {}
    for rank, pieces in enumerate(plan_owners(table, num_ranks, {})):
        of_tensors, objects = lay_out_files(rank, described, pieces)
        planned += of_tensors
        if objects:
            of_objects, new_file = object_file_of(rank, objects, encoded_objects(objects, shards))
            planned.append(of_objects)
            object_files[of_objects.name] = new_file
    return manifest, planned, object_files


def _hold(table: GlobalTable, holders: Sequence[range]) -> GlobalTable:
    """Give the shards of one rank to the ranks that are to hold them; the first is the main
    replica.
    """
    held = [holders[shard_id] for shard_id in table.shard_ids.tolist()]
    rows = np.repeat(np.arange(len(held)), [len(ranks) for ranks in held])
    ranks = np.fromiter(itertools.chain.from_iterable(held), np.int64)
    is_main = np.diff(rows, prepend=-1) != 0
    order = np.lexsort((rows, ranks))
    columns: dict[str, Any] = {
        name: getattr(table, name)[rows[order]]
        for name in ("key_ids", "shard_ids", "tie_ids", "is_buffer", "digests", "offsets", "shapes")
    }
    return table._replace(ranks=ranks[order], is_main=is_main[order], **columns)


# --- Writing it -----------------------------------------------------------------------------------


def _files_of(
    stored: StoredCheckpoint,
    outputs: Sequence[OutputTensor],
    planned: Sequence[PlannedFile],
    object_files: Mapping[str, NewFile],
    overflows: dict[str, int],
) -> list[NewFile]:
    """Return the files to write; `overflows` gets, while they are written, the numbers of values
    that do not fit.
    """
    by_name = {output.name: output for output in outputs}
    files: list[NewFile] = []
    for file in planned:
        if file.name in object_files:
            files.append(object_files[file.name])
        else:
            tensors = [_cropped(by_name[chunk.key], chunk) for chunk in file.chunks]
            fill = filling(stored, tensors, overflows)
            files.append(NewFile(file.name, file.header, file.chunk_bytes, fill))
    return files


def _cropped(output: OutputTensor, chunk: PlannedChunk) -> OutputTensor:
    """Return the part of an output tensor that a chunk holds."""
    is_whole = chunk.region == whole(output.mapped.shape)
    mapped = output.mapped if is_whole else crop(output.mapped, chunk.region)
    return OutputTensor(
        output.name, output.dtype, chunk.region.num_elements, chunk.num_bytes, mapped
    )
