"""Load a checkpoint under any layout."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._format.codec import HOLE
from distckpt._operations.consistent_read import find_checkpoint, noticing_removal, read_unchanged
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import LoadReport, PhaseTimer
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, check_common_strategy, take_common_strategy
from distckpt._state.shards import ShardTable, describe, merge_tables
from distckpt._state.strictness import StrictHandling, handle_mismatch, parse_strict_flag
from distckpt._state.validation import validate_shards
from distckpt._storage import locations
from distckpt.mapping import ShardedObject, ShardedStateDict, StateDict
from distckpt.rules import Rule
from distckpt.strategies.base import LoadShardedStrategy, Options, ParallelLoad, Verify
from distckpt.strategies.defaults import load_strategy

logger = logging.getLogger(__name__)


@take_common_strategy
@operation
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
    common_strategy: tuple[str, int] | None = None,
    verify: Verify = "read",
    allow_dtype_cast: bool = False,
    parallel_load: ParallelLoad = "auto",
    rules: Sequence[Rule] = (),
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint under the layout that a sharded state dict describes, whatever layout it was saved under.

        state = {"model": model.sharded_state_dict()}
        state = distckpt.load(state, "checkpoints/step_100")
        step = state["step"]

    Collective operation: all ranks must call it. Rank 0 reads the manifest and sends it to the others; every rank reads
    its own regions, or receives them from a rank that reads the same ones (see `parallel_load`).

    Args:
        sharded_state_dict: describes what to load: `ShardedTensor`s (filled in place, or allocated on CPU when their
            data is None), `ShardedObject`s and `ShardedTensorFactory`s. `LocalNonpersistentObject`s come back
            unwrapped; other values are ignored. The dict itself is not changed.
        checkpoint_dir: a path or fsspec URL of a checkpoint, of a Hugging Face directory, of a folder of shards that
            torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote, or of what
            `torch.distributed.checkpoint.save` or Megatron Core (`torch_dist`) wrote.
        sharded_strategy: reads the shards; a strategy, `(backend, version)` of a registered one, or None for the one
            that the checkpoint was saved with.
        validate_access_integrity: with several ranks, check first that the main replicas of all ranks cover each
            requested tensor exactly once, which finds mistakes in offsets.
        strict: what to do about keys that only the checkpoint or only the request has.
        verify_integrity: the same as `verify="full"`.
        process_group: the ranks that load together; None for the default group, or for this process alone when
            torch.distributed is not initialised.
        common_strategy: accepted for compatibility, as the fourth positional argument, too; None or `("torch", 1)`.
        verify: "read" and "full", which mean the same, compare the checksum of every block of 256 KiB of which a byte
            is loaded; "none" compares nothing.
        allow_dtype_cast: convert tensors to the requested dtype even when that loses information. Lossless
            conversions (bf16 to fp32) are always made.
        parallel_load: how to read what several ranks request (data-parallel replicas, say): on one of them, which
            sends it to the others, or on each. "auto" shares what is large where a sample shows that storage
            is slow, but not when ranks of one machine read a local path, since they share its cache. "on" always
            shares, "off" never does. Tensors are the same in each case.
        rules: how the requested tensors are made from those of the checkpoint, when it stores them under other names
            or shapes (a Hugging Face checkpoint, see `distckpt.rules`).
        max_inflight_bytes: memory for data on its way from storage, on each rank; at least one window of 8 MiB is
            used.
        progress: called with the number of bytes whenever this rank has read some, from several threads.
        on_report: called with what was loaded and how long it took, on every rank; rank 0 logs it too.

    Returns:
        The structure of `sharded_state_dict` with loaded values, together with all common state, in which
        `UnknownObject`s stand for objects of classes that are not registered here; and, when `strict` is one of the
        RETURN modes, a tuple `(state dict, missing keys, unexpected keys)`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: keys, shapes, dtypes or object grids do not match.
        UnsupportedObjectError: an object that was asked for is of a class that is not registered.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled then.
    """
    check_common_strategy(common_strategy)
    ranks, location = Ranks(process_group), locations.normalize(checkpoint_dir)
    timer = PhaseTimer("load", ranks.rank, location)
    options = Options(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        verify="full" if verify_integrity else verify,
        allow_dtype_cast=allow_dtype_cast,
        parallel_load=parallel_load,
        rules=tuple(rules),
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
    )
    read = partial(_load, ranks, timer, sharded_state_dict, location, sharded_strategy, strict, options)
    num_bytes, state_dict, missing, unexpected = read_unchanged(ranks, location, read)
    report = LoadReport(location, *timer.summarize(ranks, num_bytes, "read"))
    if ranks.is_coordinator:
        logger.info("%s", report)
    if on_report is not None:
        on_report(report)
    returns_keys = StrictHandling.requires_returning_mismatch_keys(parse_strict_flag(strict))
    return (state_dict, missing, unexpected) if returns_keys else state_dict


def _load(
    ranks: Ranks,
    timer: PhaseTimer,
    sharded_state_dict: ShardedStateDict,
    location: str,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None,
    strict: str | StrictHandling,
    options: Options,
    found: dict[str, Any] | None,
) -> tuple[int, StateDict, set[str], set[str]]:
    """Return the number of bytes read, the state dict, missing and unexpected keys; `found` is the marker on rank 0."""
    # 1. Find the checkpoint and the strategy that reads it.
    with timer.phase("plan"):
        marker = find_checkpoint(ranks, location, found)
        with ranks.phase("prepare to load"):
            check_choice("verify", options.verify, get_args(Verify))
            check_choice("parallel_load", options.parallel_load, get_args(ParallelLoad))
            mode = parse_strict_flag(strict)
            if options.rules and mode is not StrictHandling.ASSUME_OK_UNEXPECTED:
                raise ValueError("With rules, keys are not compared by name: leave strict at its default.")
            strategy = load_strategy(sharded_strategy, marker, location).configure(replace(options, marker=marker))
            shards, _, skeleton = flatten.split(sharded_state_dict)
            table = describe(shards)

        # 2. Compare the requests of the ranks with each other and with the checkpoint.
        if options.validate_access_integrity:
            _compare_requests(ranks, table)
        missing, unexpected = _compare_keys(ranks, mode, {shard.key for shard in shards}, strategy, location)

    # 3. Read.
    with timer.phase("read") as details, ranks.phase("load"), noticing_removal(ranks, location):
        wanted = {str(i): shard for i, shard in enumerate(shards) if shard.key not in unexpected}
        wanted["common"] = ShardedObject(COMMON_KEY, None, (1,), (0,))
        values = strategy.load(wanted, location)
        loaded = [values.get(str(i), HOLE) for i in range(len(shards))]
        num_bytes = sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor))
        details["bytes"] = num_bytes
        state_dict = flatten.put_together(skeleton, loaded, values["common"])
    return num_bytes, state_dict, missing, unexpected


def _compare_requests(ranks: Ranks, table: ShardTable) -> None:
    """Check that the main replicas of all ranks cover each requested tensor exactly once.

    Collective operation: all ranks must call it. One process alone may request any part.
    """
    if ranks.size == 1:
        return
    tables = ranks.gather(table.to_bytes())
    with ranks.phase("check the requested shards", decision=True):
        if ranks.is_coordinator:
            validate_shards(merge_tables(ShardTable.all_from_bytes(tables)))


def _compare_keys(
    ranks: Ranks, mode: StrictHandling, requested: set[str], strategy: LoadShardedStrategy, location: str
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the mode says."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    stored = stored_keys(ranks, strategy, location)
    requested_by_all = [set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(requested)).encode())]
    unexpected = requested - stored
    missing = stored.difference(*requested_by_all) if StrictHandling.requires_global_app_metadata(mode) else set()
    # Every rank compares the keys of all, so that all raise the same error.
    unexpected_of_all = set().union(*requested_by_all) - stored
    handle_mismatch(mode, missing, unexpected_of_all, stored, location)
    return missing, unexpected


def stored_keys(ranks: Ranks, strategy: LoadShardedStrategy, location: str) -> set[str]:
    """Return the keys of the tensors and objects in a checkpoint, without common state.

    Collective operation: all ranks must call it; rank 0 reads.
    """

    def read_keys() -> list[str]:
        return sorted({shard.key for shard in strategy.load_sharded_metadata(location).values()} - {COMMON_KEY})

    return set(ranks.decide_json("read the keys of the checkpoint", read_keys))
