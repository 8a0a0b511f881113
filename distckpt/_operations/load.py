"""Load a checkpoint under any layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, overload

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_choice, check_num_bytes
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES
from distckpt._format.codec import HOLE
from distckpt._mapping.wrappers import ShardedObject, ShardedStateDict, StateDict
from distckpt._models import objects
from distckpt._operations.absent_values import refuse_absent_values, tensor_paths
from distckpt._operations.consistent_read import find_checkpoint, noticing_removal, read_unchanged
from distckpt._operations.load_request import check_request, describe_request
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import LoadReport, PhaseTimer
from distckpt._rules.rules import Rule
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, check_common_strategy, take_common_strategy
from distckpt._state.strictness import StrictHandling, parse_strict_flag
from distckpt._storage import locations
from distckpt.strategies.base import LoadShardedStrategy, Options, ParallelLoad, Verify

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
    strict: Literal[
        "return_unexpected",
        "return_all",
        StrictHandling.RETURN_UNEXPECTED,
        StrictHandling.RETURN_ALL,
    ],
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
    """Load a checkpoint under the layout that a sharded state dict describes, whatever layout it
    was saved under.

        state = distckpt.load({"model": model, "optimizer": optimizer}, "checkpoints/step_100")
        step = state["step"]

    Collective operation: all ranks must call it. Rank 0 reads the manifest and sends it to the
    others; every rank reads its own regions, or receives them from a rank that reads the same ones
    (see `parallel_load`).

    Args:
        sharded_state_dict: describes what to load: objects as in `save`, which are filled and
            returned; `ShardedTensor`s (filled in place, or allocated on CPU when their data is
            None), `ShardedObject`s and `ShardedTensorFactory`s. `LocalNonpersistentObject`s come
            back unwrapped; for other values the stored ones are returned, and an entry for which
            nothing is stored is an error, unless it is None. The dict itself is not changed.
        checkpoint_dir: a path or fsspec URL of a checkpoint, of a Hugging Face directory, of a
            folder of shards that torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo
            Automodel wrote, or of what `torch.distributed.checkpoint.save`, Megatron Core
            (`torch_dist`) or DeepSpeed wrote.
        sharded_strategy: reads the shards; a strategy, `(backend, version)` of a registered one, or
            None for the one that the checkpoint was saved with.
        validate_access_integrity: with several ranks, check first that the main replicas of all
            ranks cover each requested tensor exactly once, which finds mistakes in offsets.
        strict: how to handle keys that only the checkpoint or only the request has. By default,
            modules are loaded whole: one that lacks a part of what was saved for it is an error;
            "raise_unexpected" loads what it has. With rules or a family there are only these two.
        verify_integrity: the same as `verify="full"`.
        process_group: the ranks that load together; None for the default group, or for this process
            alone when torch.distributed is not initialized.
        common_strategy: accepted for compatibility, as the fourth positional argument, too; None or
            `("torch", 1)`.
        verify: "read" and "full", which mean the same, compare the checksum of every block of 256
            KiB of which a byte is loaded; "none" compares nothing.
        allow_dtype_cast: convert tensors to the requested dtype even when that loses information.
            Lossless conversions (bf16 to fp32) are always made. Where values are infinite or NaN
            afterwards, in a floating point dtype of a smaller range (fp32 to fp16), a warning names
            the tensors.
        parallel_load: how to read what several ranks request (data-parallel replicas, say): on one
            of them, which sends it to the others, or on each. "auto" shares what is large where a
            sample shows that storage is slow, but not when ranks of one machine read a local path,
            since they share its cache. "on" always shares, "off" never does. Tensors are the same
            in each case.
        rules: how the requested tensors are made from those of the checkpoint, when it stores them
            under other names or shapes (a Hugging Face checkpoint, see `distckpt.rules`).
        materialize: a device; modules of the state dict that are on the meta device get memory
            there, tied parameters stay tied, and buffers that no checkpoint holds are computed by
            the `reset_parameters` of their modules. Create the optimizer after that.
        family: afterwards, the rules of the model's family, for names of Megatron Core or of
            transformers in memory: "auto" reads the `config.json` of the checkpoint, a path another
            one, see `distckpt.families`.
        max_inflight_bytes: memory for data on its way from storage, on each rank; at least one
            window of 8 MiB is used.
        progress: called with the number of bytes whenever this rank has read some, from several
            threads.
        on_report: called with what was loaded and how long it took, on every rank; rank 0 logs it
            too.

    Returns:
        The structure of `sharded_state_dict` with loaded values, together with all common state, in
        which `UnknownObject`s stand for objects of classes that are not registered here; and, when
        `strict` is one of the RETURN modes, a tuple `(state dict, missing keys, unexpected keys)`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: keys, shapes, dtypes or object grids do not match.
        UnsupportedObjectError: an object that was asked for is of a class that is not registered.
        CorruptCheckpointError: files are missing, cut off or changed.
        RankFailedError: raised on all ranks when any rank failed. Tensors may be partly filled
            then.
    """
    ranks = Ranks(process_group)
    same: dict[str, object] = {
        "sharded_strategy": sharded_strategy,
        "strict": strict,
        "verify": verify,
    }
    same |= {"parallel_load": parallel_load, "validate_access_integrity": validate_access_integrity}
    with ranks.phase("check the arguments", same=same):
        check_common_strategy(common_strategy)
        location = locations.normalize(checkpoint_dir)
        check_choice("verify", verify, get_args(Verify))
        check_num_bytes("max_inflight_bytes", max_inflight_bytes)
        check_choice("parallel_load", parallel_load, get_args(ParallelLoad))
        mode = parse_strict_flag(strict)
        by_rules = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED)
        if (rules or family is not None) and mode not in by_rules:
            raise ValueError(
                "With rules, strict can be 'assume_ok_unexpected' or 'raise_unexpected' only."
            )
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
        _load,
        ranks,
        timer,
        sharded_state_dict,
        location,
        sharded_strategy,
        mode,
        materialize,
        options,
        family,
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
    with timer.phase("plan"):
        # 1. Find the checkpoint and the strategy that reads it.
        marker, opened = find_checkpoint(ranks, location, found, options.verify)
        request = describe_request(
            ranks, sharded_state_dict, location, marker, sharded_strategy, mode, materialize,
            replace(options, stored=opened), family,
        )  # fmt: skip

        # 2. Compare the requests of the ranks with each other and with the checkpoint.
        missing, unexpected = check_request(
            ranks, request, mode, options.validate_access_integrity, marker, location
        )

    # 3. Read.
    shards, values, skeleton = request.split
    with timer.phase("read") as details, ranks.phase("load"), noticing_removal(ranks, location):
        # Objects of Transformer Engine, which no Hugging Face directory holds; modules accept None
        # for them.
        extra_states = {
            s.key for s in shards if isinstance(s, ShardedObject) and s.key.endswith("_extra_state")
        }
        left_out = unexpected | extra_states if family is not None else unexpected
        sharded = {
            str(i): s
            for i, s in enumerate(shards)
            if s.key not in left_out and i not in request.ties
        }
        sharded["common"] = ShardedObject(COMMON_KEY, None, (1,), (0,))
        found_values = _read(ranks, request.strategy, sharded, location)
        absent = [None if shard.key in left_out - unexpected else HOLE for shard in shards]
        loaded = [
            found_values.get(str(request.ties.get(i, i)), absent[i]) for i in range(len(shards))
        ]
        num_bytes = sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor))
        details["bytes"] = num_bytes
        state_dict = flatten.put_together(skeleton, loaded, found_values["common"])
        if mode in _STRICT_MODES:
            objects_at = {place.path for place in request.described.places}
            refuse_absent_values(values, objects_at, state_dict, location)
    return num_bytes, request.resolved, state_dict, missing, unexpected


def _read(
    ranks: Ranks, strategy: LoadShardedStrategy, wanted: ShardedStateDict, location: str
) -> StateDict:
    """Read shards; where keys are absent and the common state has tensors of their names, the error
    says so.
    """
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
            f"{error} The common state has plain tensors of these names at {place!r}, which each "
            "rank gets whole: "
            f"module.load_state_dict(distckpt.load_common_state_dict(path)[{place!r}]) loads them.",
            error.missing,
            error.unexpected,
        ) from error
