"""The verbs: save, load, and what can be asked of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from distckpt._base.errors import CheckpointingException
from distckpt._base.public import set_public_home
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES, paused_garbage_collection
from distckpt._commit import posix
from distckpt._format.codec import HOLE
from distckpt._io import background
from distckpt._operations.async_save import SaveHandle, async_save, release_staging_memory, request_save, settle
from distckpt._operations.loading import (
    compare_keys,
    compare_requests,
    find_checkpoint,
    noticing_removal,
    read_unchanged,
)
from distckpt._operations.queries import (
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from distckpt._operations.saving import SaveRequest, begin_save, finish_save
from distckpt._plan.export import DEFAULT_MAX_FILE_BYTES
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import Clock, LoadReport, SaveReport
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import describe
from distckpt.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from distckpt.rules import Rule
from distckpt.strategies.base import LoadShardedStrategy, Options, SaveShardedStrategy
from distckpt.strategies.defaults import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_strategy,
)
from distckpt.strategies.huggingface import ExportReport, HuggingFaceConsolidationStrategy
from distckpt.validation import StrictHandling, parse_strict_flag

__all__ = [
    "ExportReport",
    "LoadReport",
    "SaveHandle",
    "SaveReport",
    "async_save",
    "consolidate",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "release_staging_memory",
    "remove_sharded_tensors",
    "save",
]

set_public_home(globals())

logger = logging.getLogger(__name__)

Verify = Literal["none", "read", "full"]
ParallelLoad = Literal["auto", "on", "off"]


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
    durable: bool = True,
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
    progress: Callable[[int], None] | None = None,
) -> SaveReport:
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
            unfinished save left there is moved aside, or removed from an object store when this one is complete.
        sharded_strategy: writes the shards; a strategy, `(backend, version)` of a registered one, or None for the
            built-in safetensors format.
        validate_access_integrity: refuse state dicts in which an element of a global tensor is held by no rank, and
            warn when common state differs between ranks. With False, gaps are not saved and cannot be loaded.
            Overlaps and contradictions are always refused.
        async_sharded_save: return an `AsyncRequest` for an `AsyncCallsQueue` (`distckpt.strategies.async_utils`), as
            Megatron does: the request copies the tensors when it is scheduled, and writes them in the background.
            `async_save` is simpler to use.
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
        durable: whether everything must be on disk when this returns. With False the checkpoint appears in one step
            too, but a power failure shortly afterwards may leave it damaged; checksums tell.
        max_inflight_bytes: memory for data on its way to storage, on each rank; at least one window of 8 MiB is used.
        progress: told the number of bytes whenever this rank has written some, from several threads.

    Returns:
        What was saved and how long it took, the same on every rank; rank 0 logs it too.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other. Nothing is written.
        CheckpointExistsError: a whole checkpoint is there and `overwrite` is False.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed. Also when an earlier background
            save failed and nobody has asked for its result.
    """
    _refuse_common_strategy(common_strategy)
    ranks = Ranks(process_group)
    options = Options(
        process_group=process_group,
        validate_access_integrity=validate_access_integrity,
        validate_replicas=validate_replicas,
        durable=durable,
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
    )

    request = SaveRequest(
        sharded_state_dict,
        os.fspath(checkpoint_dir),
        sharded_strategy,
        overwrite,
        content_metadata,
        preprocess_common_before_consistancy_check,
    )
    if async_sharded_save:
        # Not in the annotation: it would burden everybody else with a case that programs for Megatron alone know.
        return request_save(ranks, options, request)  # type: ignore[return-value]
    settle(ranks, process_group)
    clock = Clock()
    # 1. Take the state dict apart; decide who writes what.
    target, prepared = begin_save(ranks, request, clock, options)
    # 2. Write everything beside the target. 3. Commit.
    return finish_save(ranks, clock, target, prepared)


def _refuse_common_strategy(common_strategy: object) -> None:
    if common_strategy is not None:
        raise CheckpointingException(
            "common_strategy must be None: common state is stored with the sharded objects by the sharded strategy."
        )


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

    Collective: every rank of the process group calls. Rank 0 reads the manifest and sends it to the others; every
    rank reads its own regions, or gets them from a rank that asked for the same (see `parallel_load`).

    Args:
        sharded_state_dict: says what to load: `ShardedTensor`s (filled in place, or allocated on CPU when their data
            is None), `ShardedObject`s and `ShardedTensorFactory`s. `LocalNonpersistentObject`s come back unwrapped;
            other values are ignored. The dict itself is not changed.
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
        common_strategy: accepted for compatibility; must be None.
        verify: "read" checks the checksum of every block that is read whole, "full" reads whole blocks so that each
            byte is checked, "none" checks nothing.
        allow_dtype_cast: convert tensors to the requested dtype even when that loses information. Lossless
            conversions (bf16 to fp32) are always made.
        parallel_load: whether what several ranks ask for (data-parallel replicas, say) is read by one of them, which
            sends it to the others. "auto" does so where a small part shows that it saves time: not when ranks of one
            machine read a local path, since they share its cache. "on" does so always, and "off" never. Tensors are
            the same in each case.
        rules: how the tensors of the checkpoint come about from those asked for, when it stores them under other
            names or shapes (a Hugging Face checkpoint, see `distckpt.rules`).
        max_inflight_bytes: memory for data on its way from storage, on each rank; at least one window of 8 MiB is
            used.
        progress: told the number of bytes whenever this rank has read some, from several threads.
        on_report: given what was loaded and how long it took, on every rank; rank 0 logs it too.

    Returns:
        The structure of `sharded_state_dict` with loaded values, together with all common state; and, when `strict`
        is one of the RETURN modes, a tuple `(state dict, missing keys, unexpected keys)`.

    Raises:
        CheckpointNotFoundError: no whole checkpoint is there.
        LoadMismatchError: keys, shapes, dtypes or object grids do not match.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled then.
    """
    _refuse_common_strategy(common_strategy)
    ranks, clock = Ranks(process_group), Clock()

    def read(
        known: dict[str, Any] | None,
    ) -> tuple[StateDict | tuple[StateDict, set[str], set[str]], int, str]:
        # 1. Find the checkpoint and who reads it.
        with clock.phase("plan"):
            location, marker = find_checkpoint(ranks, checkpoint_dir, known)
            with ranks.phase("prepare to load"):
                mode = parse_strict_flag(strict)
                if rules and mode is not StrictHandling.ASSUME_OK_UNEXPECTED:
                    raise ValueError("With rules, keys are not compared by name: leave strict at its default.")
                strategy = load_strategy(sharded_strategy, marker, location).configure(
                    Options(
                        process_group=process_group,
                        verify="full" if verify_integrity else _parse("verify", verify, get_args(Verify)),
                        allow_dtype_cast=allow_dtype_cast,
                        parallel_load=_parse("parallel_load", parallel_load, get_args(ParallelLoad)),
                        rules=tuple(rules),
                        max_inflight_bytes=max_inflight_bytes,
                        progress=progress,
                        marker=marker,
                    )
                )
                shards, _, skeleton = flatten.split(sharded_state_dict)
                table = describe(shards)

            # 2. Compare what the ranks ask for with each other and with the checkpoint.
            if validate_access_integrity:
                compare_requests(ranks, table)
            missing, unexpected = compare_keys(ranks, mode, {shard.key for shard in shards}, strategy, location)

        # 3. Read.
        with clock.phase("read"), ranks.phase("load"), noticing_removal(ranks, location):
            wanted = {str(i): shard for i, shard in enumerate(shards) if shard.key not in unexpected}
            wanted["common"] = ShardedObject(COMMON_KEY, None, (1,), (0,))
            values = strategy.load(wanted, location)
            loaded = [values.get(str(i), HOLE) for i in range(len(shards))]
            num_bytes = sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor))
            result = flatten.put_together(skeleton, loaded, values["common"])
        returns_keys = StrictHandling.requires_returning_mismatch_keys(mode)
        return (result, missing, unexpected) if returns_keys else result, num_bytes, location

    result, num_bytes, location = read_unchanged(ranks, checkpoint_dir, read)
    report = LoadReport(location, *clock.summarize(ranks, num_bytes, "read"))
    if ranks.is_coordinator:
        logger.info("%s", report)
    if on_report is not None:
        on_report(report)
    return result


def _parse(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {value!r}")
    return value


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

    Everything is checked before a byte is written: shards must tile every tensor. The export is written beside its
    place and appears there in one step; an earlier one stays whole until then. Memory is bounded whatever the size of
    a tensor.

        distckpt.consolidate("checkpoints/step_100", "exports/step_100", keys="model.", dtype=torch.bfloat16)

    Collective: every rank of the process group calls; each writes whole files. Works in one process as well.

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
        What was written, as read back from the files.

    Raises:
        CheckpointNotFoundError: there is nothing to consolidate.
        CheckpointExistsError: `output_dir` holds an export and `overwrite` is False.
        CorruptCheckpointError: shards are missing, overlap, contradict each other or are damaged.
        LoadMismatchError: `keys` or a rule matches nothing, or no rule matches some tensor.
        RankFailedError: raised on all ranks when any rank failed; nothing is committed.
    """
    background.wait_for_location(posix.resolve(os.fspath(checkpoint)))
    strategy = HuggingFaceConsolidationStrategy(
        keys=keys,
        rules=rules,
        rename=rename or {},
        dtype=dtype,
        tied=tied,
        unmatched=unmatched,
        max_file_bytes=max_file_bytes,
        fqn_to_index_mapping=fqn_to_index_mapping,
        like=None if like is None else os.fspath(like),
        extra_files_from=None if extra_files_from is None else os.fspath(extra_files_from),
        overwrite=overwrite,
        verify=_parse("verify", verify, get_args(Verify)),
        max_inflight_bytes=max_inflight_bytes,
        progress=progress,
        process_group=process_group,
    )
    return strategy.consolidate(os.fspath(checkpoint), os.fspath(output_dir))
