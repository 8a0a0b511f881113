"""The verbs: save, load, and what can be asked of a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from distckpt import _commit, _sources, _state_dict, _storage, core, validation
from distckpt._codec import HOLE
from distckpt._collectives import Ranks
from distckpt._common_state import COMMON_KEY, CONTENT_METADATA, comparable, warn_about_differences
from distckpt._io import paused_garbage_collection
from distckpt._plan_export import DEFAULT_MAX_FILE_BYTES
from distckpt._queries import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from distckpt._shards import Shard, ShardTable, describe, merge_tables
from distckpt.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from distckpt.rules import Rule
from distckpt.strategies.base import LoadShardedStrategy, Options, SaveShardedStrategy
from distckpt.strategies.defaults import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_strategy,
    save_strategy,
)
from distckpt.strategies.huggingface import ExportReport, HuggingFaceConsolidationStrategy
from distckpt.utils import _clean_metadata_for_serialization
from distckpt.validation import StrictHandling, handle_mismatch, parse_strict_flag

__all__ = [
    "ExportReport",
    "consolidate",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

logger = logging.getLogger(__name__)

Verify = Literal["none", "read", "full"]


@paused_garbage_collection()
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    *,
    common_strategy: None = None,
    overwrite: bool = False,
    process_group: Any = None,
    validate_replicas: bool = False,
) -> None:
    """Save a state dict whose tensors are spread over the ranks.

    Every byte is written once, by one of the ranks that hold it. The checkpoint appears under its name in one step
    when all of it is on disk; until then an earlier one there stays whole.

        state = {"model": model.sharded_state_dict(), "step": 100}
        distckpt.save(state, "checkpoints/step_100")

    Collective: every rank of the process group calls. Ranks exchange descriptions of shards and outcomes, no data.

    Args:
        sharded_state_dict: nested dicts, lists and tuples. `ShardedTensor`, `ShardedObject` and
            `ShardedTensorFactory` leaves are the sharded part, `LocalNonpersistentObject` leaves are not saved, all
            else is common state, saved once. It is not changed.
        checkpoint_dir: a path or fsspec URL. It must not hold a whole checkpoint (see `overwrite`); what an
            unfinished save left there is moved aside.
        sharded_strategy: writes the shards; a strategy, `(backend, version)` of a registered one, or None for the
            built-in safetensors format.
        validate_access_integrity: refuse state dicts in which an element of a global tensor is held by no rank, and
            warn when common state differs between ranks. With False, gaps are not saved and cannot be loaded.
            Overlaps and contradictions are always refused.
        async_sharded_save: not available in this version.
        preprocess_common_before_consistancy_check: returns what to compare of (a copy of) the common state.
        content_metadata: describes the content, see `load_content_metadata`.
        async_strategy: accepted for compatibility.
        verify_integrity: accepted for compatibility: checksums are always written.
        common_strategy: accepted for compatibility; must be None.
        overwrite: replace a whole checkpoint that is there. The earlier one stays until the new one is complete.
        process_group: the ranks that save together; None for the default group, or for this process alone when
            torch.distributed is not initialised.
        validate_replicas: also compare the content of replicas, and refuse to save when they differ. Reads all
            tensors once more.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other. Nothing is written.
        CheckpointExistsError: a whole checkpoint is there and `overwrite` is False.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    _refuse_unavailable(common_strategy, async_sharded_save)
    started = time.perf_counter()
    ranks = Ranks(process_group)
    options = Options(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
    )

    # 1. Take the state dict apart.
    with ranks.phase("take their state dicts apart"):
        location = _commit.resolve(os.fspath(checkpoint_dir))
        strategy = save_strategy(sharded_strategy).configure(options)
        shards, common = _split_for_saving(sharded_state_dict, content_metadata)
        compared = comparable(common, preprocess_common_before_consistancy_check)
    if validate_access_integrity:
        warn_about_differences(ranks, compared)

    # 2. Write everything beside the target.
    with ranks.phase("check the target", decision=True):
        if ranks.is_coordinator:
            _commit.check_target(location, overwrite)
    staging = _commit.staging_location(location, ranks.broadcast(secrets.token_hex(8).encode()).decode())
    try:
        with ranks.phase("create directories"):
            _commit.prepare(staging)
        with ranks.phase("save"):
            sharded = {str(index): shard for index, shard in enumerate(shards)}
            if ranks.is_coordinator:
                sharded["common"] = ShardedObject(COMMON_KEY, common, (1,), (0,))
            marker_fields = strategy.save(sharded, staging)
            _commit.sync(staging)

        # 3. Commit.
        with ranks.phase("commit", decision=True):
            if ranks.is_coordinator:
                config = core.CheckpointingConfig(strategy.backend, strategy.version)
                core.save_config(config, staging, extra=marker_fields)
                _commit.commit(staging, location, overwrite)
    except BaseException:
        if ranks.is_coordinator:
            _commit.abandon(staging)
        raise
    if ranks.is_coordinator:
        logger.info("saved %s in %.2f s", location, time.perf_counter() - started)


def _refuse_unavailable(common_strategy: object, async_sharded_save: bool) -> None:
    if common_strategy is not None:
        raise core.CheckpointingException(
            "common_strategy must be None: common state is stored with the sharded objects by the sharded strategy."
        )
    if async_sharded_save:
        raise core.CheckpointingException(
            "async_sharded_save=True is not available in this version of distckpt: save synchronously."
        )


def _split_for_saving(
    sharded_state_dict: ShardedStateDict, content_metadata: dict[str, Any] | None
) -> tuple[list[Shard], CommonStateDict]:
    shards, common, _ = _state_dict.split(sharded_state_dict)
    for shard in shards:
        if shard.key == COMMON_KEY:
            raise core.InvalidShardingError(f"The key {COMMON_KEY!r} is reserved: rename yours.")
    if content_metadata is not None:
        if CONTENT_METADATA in sharded_state_dict:
            raise core.CheckpointingException(
                f"The state dict has an entry {CONTENT_METADATA!r} and content_metadata was given: both would be "
                "stored under this name. Rename the entry, or leave content_metadata out."
            )
        common = {**common, CONTENT_METADATA: _clean_metadata_for_serialization(content_metadata)}
    return shards, common


@paused_garbage_collection()
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
    *,
    common_strategy: None = None,
    verify: Verify = "read",
    allow_dtype_cast: bool = False,
    rules: Sequence[Rule] = (),
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint under the layout that a sharded state dict describes, whatever layout it was saved under.

        state = {"model": model.sharded_state_dict()}
        state = distckpt.load(state, "checkpoints/step_100")
        step = state["step"]

    Collective: every rank of the process group calls. Rank 0 reads the manifest and sends it to the others; every
    rank reads its own regions.

    Args:
        sharded_state_dict: says what to load: `ShardedTensor`s (filled in place, or allocated on CPU when their data
            is None), `ShardedObject`s and `ShardedTensorFactory`s. `LocalNonpersistentObject`s come back unwrapped;
            other values are ignored. The dict itself is not changed.
        checkpoint_dir: a path or fsspec URL of a checkpoint, of a Hugging Face directory, or of a folder of shards that
            torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote.
        sharded_strategy: reads the shards; a strategy, `(backend, version)` of a registered one, or None for the one
            that the checkpoint was saved with.
        validate_access_integrity: with several ranks, check first that the main replicas of all ranks cover each
            requested tensor exactly once, which finds mistakes in offsets.
        strict: what to do about keys that only the checkpoint or only the request has.
        verify_integrity: the same as `verify="full"`.
        process_group: the ranks that load together; None for the default group, or for this process alone when
            torch.distributed is not initialised.
        common_strategy: accepted for compatibility; must be None.
        verify: "read" checks the checksum of every block that is read whole, "full" reads whole blocks so that each
            byte is checked, "none" checks nothing.
        allow_dtype_cast: convert tensors to the requested dtype even when that loses information. Lossless
            conversions (bf16 to fp32) are always made.
        rules: how the tensors of the checkpoint come about from those asked for, when it stores them under other
            names or shapes (a Hugging Face checkpoint, see `distckpt.rules`).

    Returns:
        The structure of `sharded_state_dict` with loaded values, together with all common state; and, when `strict`
        is one of the RETURN modes, a tuple `(state dict, missing keys, unexpected keys)`.

    Raises:
        CheckpointNotFoundError: no whole checkpoint is there.
        LoadMismatchError: keys, shapes, dtypes or object grids do not match.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled then.
    """
    _refuse_unavailable(common_strategy, async_sharded_save=False)
    ranks = Ranks(process_group)

    # 1. Find the checkpoint and who reads it.
    location = _storage.normalize(checkpoint_dir)
    marker: dict[str, Any] = {}
    with ranks.phase("find the checkpoint", decision=True):
        if ranks.is_coordinator:
            marker = _sources.identify(location)
    marker = json.loads(ranks.broadcast(json.dumps(marker).encode()))
    with ranks.phase("prepare to load"):
        mode = parse_strict_flag(strict)
        if rules and mode is not StrictHandling.ASSUME_OK_UNEXPECTED:
            raise ValueError("With rules, keys are not compared by name: leave strict at its default.")
        strategy = load_strategy(sharded_strategy, marker, location).configure(
            Options(
                process_group=process_group,
                verify="full" if verify_integrity else _parse_verify(verify),
                allow_dtype_cast=allow_dtype_cast,
                rules=tuple(rules),
            )
        )
        shards, _, skeleton = _state_dict.split(sharded_state_dict)
        table = describe(shards)

    # 2. Compare what the ranks ask for with each other and with the checkpoint.
    if validate_access_integrity and ranks.size > 1:
        tables = ranks.gather(table.to_bytes())
        with ranks.phase("check the requested shards", decision=True):
            if ranks.is_coordinator:
                validation.validate_shards(merge_tables([ShardTable.from_bytes(data) for data in tables]))
    missing, unexpected = _compare_keys(ranks, mode, {shard.key for shard in shards}, strategy, location)

    # 3. Read.
    with ranks.phase("load"):
        wanted = {str(i): shard for i, shard in enumerate(shards) if shard.key not in unexpected}
        wanted["common"] = ShardedObject(COMMON_KEY, None, (1,), (0,))
        values = strategy.load(wanted, location)
        loaded = [values.get(str(i), HOLE) for i in range(len(shards))]
        result = _state_dict.put_together(skeleton, loaded, values["common"])
    return (result, missing, unexpected) if StrictHandling.requires_returning_mismatch_keys(mode) else result


def _parse_verify(verify: str) -> str:
    if verify not in ("none", "read", "full"):
        raise ValueError(f"verify must be 'none', 'read' or 'full', got {verify!r}")
    return verify


def _compare_keys(
    ranks: Ranks, mode: StrictHandling, asked: set[str], strategy: LoadShardedStrategy, location: str
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the mode says."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    names = b""
    with ranks.phase("read the keys of the checkpoint", decision=True):
        if ranks.is_coordinator:
            stored = {shard.key for shard in strategy.load_sharded_metadata(location).values()} - {COMMON_KEY}
            names = json.dumps(sorted(stored)).encode()
    known = set(json.loads(ranks.broadcast(names)))
    asked_by_all = [set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(asked)).encode())]
    unexpected = asked - known
    missing = known.difference(*asked_by_all) if StrictHandling.requires_global_app_metadata(mode) else set()
    # Every rank judges the keys of all, so that all raise the same error.
    unexpected_of_all = set().union(*asked_by_all) - known
    handle_mismatch(mode, missing, unexpected_of_all, known, location, is_speaker=ranks.is_coordinator)
    return missing, unexpected


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
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    like: str | os.PathLike[str] | None = None,
    extra_files_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verify: Verify = "full",
    max_inflight_bytes: int = 256 << 20,
    process_group: Any = None,
) -> ExportReport:
    """Merge the shards of a checkpoint into a Hugging Face checkpoint, without building the model.

    Everything is checked before a byte is written: shards must tile every tensor. The export is written beside its
    place and appears there in one step; an earlier one stays whole until then. Memory is bounded whatever the size of
    a tensor.

        distckpt.consolidate("checkpoints/step_100", "exports/step_100", keys="model.", dtype=torch.bfloat16)

    Collective: every rank of the process group calls; each writes whole files. Works in one process as well.

    Args:
        checkpoint: a distckpt checkpoint, or a folder of shards that torch's
            `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote.
        output_dir: gets `model.safetensors`, or several files and their index. Other files that are there stay.
        keys: which tensors: a beginning of their keys, a pattern with `*`, or a list of such; None for all.
        rules: changes of names and shapes, see `distckpt.rules`.
        rename: afterwards, old beginnings of names -> new ones.
        dtype: convert floating point tensors of 16 bits and more; or a dict of patterns of new names. Integers and
            8-bit floats are converted only by a pattern that is exactly their name.
        tied: of tied tensors, write the first only ("drop", as Hugging Face does) or each ("write").
        max_file_bytes: how much data goes into one file.
        fqn_to_index_mapping: new name -> number of its file, from 1, instead.
        like: divide the tensors among files as this Hugging Face directory does, and compare shapes with it.
        extra_files_from: a directory whose other files (config, tokenizer, code) are copied.
        overwrite: replace an export that is there.
        verify: as in `load`; checksums of a distckpt checkpoint are verified by default.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
        process_group: the ranks that work together; None for the default group, or for this process alone when
            torch.distributed is not initialised.

    Returns:
        What was written, as read back from the files.

    Raises:
        CheckpointNotFoundError: there is nothing to consolidate.
        CheckpointExistsError: `output_dir` holds an export and `overwrite` is False.
        CorruptCheckpointError: shards are missing, overlap, contradict each other or are damaged.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    strategy = HuggingFaceConsolidationStrategy(
        keys=keys,
        rules=rules,
        rename=rename or {},
        dtype=dtype,
        tied=tied,
        max_file_bytes=max_file_bytes,
        fqn_to_index_mapping=fqn_to_index_mapping,
        like=None if like is None else os.fspath(like),
        extra_files_from=None if extra_files_from is None else os.fspath(extra_files_from),
        overwrite=overwrite,
        verify=_parse_verify(verify),
        max_inflight_bytes=max_inflight_bytes,
        process_group=process_group,
    )
    return strategy.consolidate(os.fspath(checkpoint), os.fspath(output_dir))
