"""Load a checkpoint under any layout."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, overload

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._base.errors import LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._format.codec import HOLE
from distckpt._format.marker import names_of_module
from distckpt._models.optimizer_shards import StoredEntry
from distckpt._objects import objects
from distckpt._objects.whole import parts_of, refuse_parts
from distckpt._operations.absent_values import refuse_absent_values, tensor_paths
from distckpt._operations.consistent_read import find_checkpoint, noticing_removal, read_unchanged
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import LoadReport, PhaseTimer
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, check_common_strategy, take_common_strategy
from distckpt._state.shards import Shard, ShardTable, describe, find_ties, merge_tables
from distckpt._state.strictness import StrictHandling, handle_mismatch, parse_strict_flag
from distckpt._state.validation import validate_shards
from distckpt._storage import locations
from distckpt.families import rules_for
from distckpt.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from distckpt.rules import Rule
from distckpt.strategies.base import LoadShardedStrategy, Options, ParallelLoad, Verify
from distckpt.strategies.defaults import load_strategy
from distckpt.strategies.safetensors import SafetensorsLoadStrategy

logger = logging.getLogger(__name__)

_STRICT_MODES = (
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
)
"""Those in which nothing that is requested may be left out."""


@overload
def load(  # type: ignore[overload-overlap]
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    *,
    strict: Literal["return_unexpected", "return_all", StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL],
    **options: Any,
) -> tuple[StateDict, set[str], set[str]]: ...


@overload
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
    materialize: str | torch.device | None = None,
    family: str | os.PathLike[str] | None = None,
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> StateDict: ...


@operation  # type: ignore[misc]
@take_common_strategy
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
    materialize: str | torch.device | None = None,
    family: str | os.PathLike[str] | None = None,
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint under the layout that a sharded state dict describes, whatever layout it was saved under.

        state = distckpt.load({"model": model, "optimizer": optimizer}, "checkpoints/step_100")
        step = state["step"]

    Collective operation: all ranks must call it. Rank 0 reads the manifest and sends it to the others; every rank reads
    its own regions, or receives them from a rank that reads the same ones (see `parallel_load`).

    Args:
        sharded_state_dict: describes what to load: objects as in `save`, which are filled and returned;
            `ShardedTensor`s (filled in place, or allocated on CPU when their data is None), `ShardedObject`s and
            `ShardedTensorFactory`s. `LocalNonpersistentObject`s come back unwrapped; for other values the stored ones
            are returned, and an entry for which nothing is stored is an error, unless it is None.
            The dict itself is not changed.
        checkpoint_dir: a path or fsspec URL of a checkpoint, of a Hugging Face directory, of a folder of shards that
            torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel wrote, or of what
            `torch.distributed.checkpoint.save`, Megatron Core (`torch_dist`) or DeepSpeed wrote.
        sharded_strategy: reads the shards; a strategy, `(backend, version)` of a registered one, or None for the one
            that the checkpoint was saved with.
        validate_access_integrity: with several ranks, check first that the main replicas of all ranks cover each
            requested tensor exactly once, which finds mistakes in offsets.
        strict: how to handle keys that only the checkpoint or only the request has. By default, modules are loaded
            whole: one that lacks a part of what was saved for it is an error; "raise_unexpected" loads what it has.
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
        materialize: a device; modules of the state dict that are on the meta device get memory there, tied parameters
            stay tied, and buffers that no checkpoint holds are computed by the `reset_parameters` of their modules.
            Make the optimizer after that.
        family: afterwards, the rules of the model's family, for names of Megatron Core or of transformers in memory:
            "auto" reads the `config.json` of the checkpoint, a path another one, see `distckpt.families`.
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
    ranks = Ranks(process_group)
    same: dict[str, object] = {"sharded_strategy": sharded_strategy, "strict": strict, "verify": verify}
    same |= {"parallel_load": parallel_load, "validate_access_integrity": validate_access_integrity}
    with ranks.phase("check the arguments", same=same):
        check_common_strategy(common_strategy)
        location = locations.normalize(checkpoint_dir)
        check_choice("verify", verify, get_args(Verify))
        check_choice("parallel_load", parallel_load, get_args(ParallelLoad))
        mode = parse_strict_flag(strict)
        if (rules or family is not None) and mode is not StrictHandling.ASSUME_OK_UNEXPECTED:
            raise ValueError("With rules, keys are not compared by name: leave strict at its default.")
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
    read = partial(
        _load, ranks, timer, sharded_state_dict, location, sharded_strategy, mode, materialize, options, family
    )
    num_bytes, described, state_dict, missing, unexpected = read_unchanged(ranks, location, read)
    with ranks.phase("restore the objects of the state dict"):
        state_dict = objects.restore(described, state_dict, mode in _STRICT_MODES)
    report = LoadReport(location, *timer.summarize(ranks, num_bytes, "read"))
    if ranks.is_coordinator:
        logger.info("%s", report)
    if on_report is not None:
        on_report(report)
    returns_keys = StrictHandling.requires_returning_mismatch_keys(mode)
    return (state_dict, missing, unexpected) if returns_keys else state_dict


def _load(
    ranks: Ranks,
    timer: PhaseTimer,
    sharded_state_dict: ShardedStateDict,
    location: str,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None,
    mode: StrictHandling,
    materialize: Any,
    options: Options,
    family: str | os.PathLike[str] | None,
    found: dict[str, Any] | None,
) -> tuple[int, objects.Described, StateDict, set[str], set[str]]:
    """Return the number of bytes read, the request, what was loaded, missing and unexpected keys.

    `found` is the marker on rank 0.
    """
    # 1. Find the checkpoint and the strategy that reads it.
    with timer.phase("plan"):
        marker, opened = find_checkpoint(ranks, location, found, options.verify)
        with ranks.phase("flatten the state dict") as vote:
            described = objects.describe(ranks, sharded_state_dict, loads=True, materialize=materialize)
            request = flatten.split(described.state_dict)
            if family is not None:
                keys = [shard.key for shard in request.shards if isinstance(shard, ShardedTensor)]
                on_disk = opened and opened.manifest
                options = replace(options, rules=(*options.rules, *rules_for(family, location, keys, on_disk)))
            strategy = load_strategy(sharded_strategy, marker, location).configure(replace(options, stored=opened))
            compares = StrictHandling.requires_explicit_ckpt_mismatch_check(mode)
            has_ties = not options.rules and _has_ties(request.shards)
            vote.number = objects.needs_stored(described) or compares or has_ties
        needed = vote.largest
        entries = stored_entries(ranks, strategy, location) if needed else {}
        settings: StateDict = {}
        if needed > 1:
            with ranks.phase("read the settings of optimizers"):
                settings = strategy.load(objects.settings_of(described, entries), location)
        with ranks.phase("describe the targets"):
            resolved = objects.resolve(ranks.rank, described, entries, settings)
            # A state of another number of ranks is neither loaded nor missing.
            skipped = {p.name for p in described.places} - {p.name for p in resolved.places}
            stored = {key: entry for key, entry in entries.items() if key not in skipped}
            if resolved.state_dict is not described.state_dict:
                request = flatten.split(resolved.state_dict)
            shards, values, skeleton = request
            table = describe(shards)
            ties = _absent_ties(shards, stored) if not options.rules else {}
            requested = {shard.key for i, shard in enumerate(shards) if i not in ties}

        # 2. Compare the requests of the ranks with each other and with the checkpoint.
        validates = options.validate_access_integrity and ranks.size > 1
        tables = ranks.gather(table.to_bytes()) if validates else []
        with ranks.phase("check the requested shards", decision=True) as vote:
            if tables:
                validate_shards(merge_tables(ShardTable.all_from_bytes(tables)))
            refuses = mode is StrictHandling.ASSUME_OK_UNEXPECTED and needed and not options.rules
            parts = parts_of(resolved, requested, entries, stored if refuses else (), names_of_module(marker))
            vote.number = len(parts.of_modules | parts.of_optimizers | parts.of_nobody)
        missing, unexpected = _compare_keys(ranks, mode, requested, stored, location)
        if vote.largest:
            refuse_parts(ranks, parts, entries, location)

    # 3. Read.
    with timer.phase("read") as details, ranks.phase("load"), noticing_removal(ranks, location):
        left_out = unexpected | _extra_states(shards) if family is not None else unexpected
        wanted = {str(i): s for i, s in enumerate(shards) if s.key not in left_out and i not in ties}
        wanted["common"] = ShardedObject(COMMON_KEY, None, (1,), (0,))
        found_values = _read(ranks, strategy, wanted, location)
        absent = [None if shard.key in left_out - unexpected else HOLE for shard in shards]
        loaded = [found_values.get(str(ties.get(i, i)), absent[i]) for i in range(len(shards))]
        num_bytes = sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor))
        details["bytes"] = num_bytes
        state_dict = flatten.put_together(skeleton, loaded, found_values["common"])
        if mode in _STRICT_MODES:
            refuse_absent_values(values, {place.path[0] for place in described.places}, state_dict, location)
    return num_bytes, resolved, state_dict, missing, unexpected


def _read(ranks: Ranks, strategy: LoadShardedStrategy, wanted: ShardedStateDict, location: str) -> StateDict:
    """Read shards; where keys are absent and the common state has tensors of their names, the error says so."""
    try:
        return strategy.load(wanted, location)
    except LoadMismatchError as error:
        if ranks.size > 1 and not ranks.is_known_to_all(error):
            raise
        common = strategy.load({"common": wanted["common"]}, location)["common"]
        names = {".".join(map(str, path[1:])): str(path[0]) for path in tensor_paths(common)}
        place = next((names[key] for key in sorted(error.unexpected) if key in names), None)
        if place is None:
            raise
        raise LoadMismatchError(
            f"{error} The common state has plain tensors of these names at {place!r}, which each rank gets whole: "
            f"module.load_state_dict(distckpt.load_common_state_dict(path)[{place!r}]) loads them.",
            error.missing,
            error.unexpected,
        ) from error


def _has_ties(shards: Sequence[Shard]) -> bool:
    return any(shards[tie].key != shards[first].key for tie, first in find_ties(shards).items())


def _absent_ties(shards: Sequence[Shard], stored: Mapping[str, StoredEntry]) -> dict[int, int]:
    """Return the shards that are not stored but tied to one that is, whose number is the value: export stores one."""
    by_first: dict[int, list[int]] = {}
    for tie, first in (find_ties(shards) if stored else {}).items():
        by_first.setdefault(first, [first]).append(tie)
    absent: dict[int, int] = {}
    for group in by_first.values():
        there = [i for i in group if shards[i].key in stored]
        absent |= {i: there[0] for i in group if there and shards[i].key not in stored}
    return absent


def _extra_states(shards: Sequence[ShardedTensor | ShardedObject]) -> set[str]:
    """Find the objects of Transformer Engine that no Hugging Face directory holds; modules accept None for them."""
    return {s.key for s in shards if isinstance(s, ShardedObject) and s.key.endswith("_extra_state")}


def _compare_keys(
    ranks: Ranks, mode: StrictHandling, requested: set[str], entries: Mapping[str, StoredEntry], location: str
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the mode says."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    stored = set(entries)
    requested_by_all = [set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(requested)).encode())]
    unexpected = requested - stored
    # Every rank compares the keys of all, so that all raise the same error.
    of_all = set().union(*requested_by_all)
    unexpected_of_all = of_all - stored
    missing: set[str] = set()
    if StrictHandling.requires_global_app_metadata(mode):
        missing = stored - of_all - {part for key in of_all & stored for part in entries[key].parts}
        # What is only computed is not missing: its parts are.
        missing -= {key for key, entry in entries.items() if entry.parts and key not in entry.parts}
    handle_mismatch(mode, missing, unexpected_of_all, stored, location)
    return missing, unexpected


def stored_entries(ranks: Ranks, strategy: LoadShardedStrategy, location: str) -> dict[str, StoredEntry]:
    """Return dtypes and shapes of the tensors and objects in a checkpoint, without common state, by key.

    Collective operation: all ranks must call it; rank 0 reads.
    """

    def read() -> list[tuple[str, str | None, tuple[int, ...], tuple[str, ...]]]:
        shards = {shard.key: shard for shard in strategy.load_sharded_metadata(location).values()}
        parts = strategy.load_quantized_metadata(location)
        shards.update((key, shard) for key, (shard, _) in parts.items())
        return [
            (
                key,
                TO_NAME[shard.dtype] if isinstance(shard, ShardedTensor) else None,
                tuple(shard.global_shape),
                parts[key][1] if key in parts else (),
            )
            for key, shard in shards.items()
            if key != COMMON_KEY
        ]

    if isinstance(strategy, SafetensorsLoadStrategy) and strategy.options.stored is not None:
        with ranks.phase("read the keys of the checkpoint"):
            found = read()
    else:
        found = ranks.decide_json("read the keys of the checkpoint", read)
    return {
        key: StoredEntry(None if dtype is None else FROM_NAME[dtype], tuple(shape), tuple(parts))
        for key, dtype, shape, parts in found
    }
