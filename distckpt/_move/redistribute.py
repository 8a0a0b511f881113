"""Moves of a state dict from one layout to another, in memory."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import check_num_bytes, check_path
from distckpt._base.options import (
    LoadOptions,
    MoveOptions,
    MoveReport,
    check_options,
    publish,
    with_changes,
)
from distckpt._checkpoint.opening import find_checkpoint
from distckpt._move.agreements import Agreements
from distckpt._move.host_memory import HostMemory, bucket_bytes_of, share_memory
from distckpt._move.live_source import LiveSource, describe_given, with_shards
from distckpt._operations.load import read_targets, restore
from distckpt._operations.load_request import LoadRequest, check_targets, describe_targets
from distckpt._operations.shard_source import source_of
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._storage import locations
from distckpt.mapping._wrappers import ShardedStateDict
from distckpt.rules._rule import Rule
from distckpt.rules._rules import check_rules

_agreements: Agreements = {}
"""Agreements of earlier calls: the plans of layouts that come again."""

_memory: MutableMapping[Any, HostMemory] = WeakKeyDictionary()
"""Memory of the last successful call, for its group's next one.

Making it, and writing to each of its pages for the first time, takes as long as the copies.
"""


@collective()
@paused_garbage_collection()
def redistribute(
    old_state: ShardedStateDict,
    new_state: ShardedStateDict,
    *,
    rules: Sequence[Rule] = (),
    family: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    fallback: str | os.PathLike[str] | None = None,
    options: MoveOptions | None = None,
    **changes: Any,
) -> MoveReport:
    """Fill a state dict from another layout, without a checkpoint.

    Both state dicts have the same tensors.

        distckpt.redistribute({"model": old_model}, {"model": new_model})

    Every element comes from a rank that has it: from the same rank if possible, else through memory
    that the ranks of a machine share, else through the process group, once for each machine. Bytes
    that one machine would send to many are passed on between these. A call with the same
    descriptions as one before uses its plan, and sends no descriptions.

    Collective operation: all ranks must call it; ranks that only give or only take pass `{}` for
    the other state dict.

    Args:
        old_state: the state to move: a state dict as for `save`. Plain tensors, not in modules, are
            taken to be equal on all ranks that have them. It is not changed.
        new_state: the state to fill: a state dict as for `load`; all tensors must have memory. The
            two may share memory. Targets may overlap, and need not cover a tensor.
        rules: how the tensors of `new_state` are made from `old_state`, if names or shapes differ,
            see `distckpt.rules`: from the names of `old_state` to the names of `new_state`.
        family: instead, the rules of the model's family: the path of its `config.json`, or "auto"
            for the one in `fallback`. Either state dict may have the names of Megatron Core, of
            transformers in memory, or of the Hugging Face directory.
        process_group: the ranks that call; None for the default group, or for this process alone
            when torch.distributed is not initialized.
        fallback: a path or URL of a checkpoint, from which regions are loaded that no rank gives,
            and only these. It has the names that `rules` or `family` make from the names of
            `old_state`.
        options: further options.
        changes: options by keyword, such as `atomic=True`; see `MoveOptions` for all of them.

    Returns:
        The figures of the move, on every rank.

    Raises:
        InvalidShardingError: ranks give different shards for the same elements, or describe one
            tensor differently. Nothing is changed.
        LoadMismatchError: no rank holds a requested tensor, or a shape or dtype does not fit.
            Nothing is changed.
        RankFailedError: raised on all ranks when any rank failed or was lost. Tensors may be partly
            filled then, unless `atomic` is set.
    """
    request = MoveRequest(
        rules=rules,
        family=family,
        process_group=process_group,
        fallback=fallback,
        options=with_changes(redistribute, MoveOptions, options, changes),
    )
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments", same=request.of_all_ranks()) as vote:
        request.check()
        bucket_bytes = bucket_bytes_of(request.options)
        memory = None if ranks.size == 1 else _memory.pop(ranks.group, None)
        # A rank without suitable memory votes alone.
        vote.number = -1 - ranks.rank
        if memory is not None and memory.bucket_bytes == bucket_bytes:
            vote.number = memory.number
    if memory is None or not vote.are_equal:
        # The old one goes before there is a new one.
        memory = None
        memory = share_memory(ranks, bucket_bytes)
    report = run_move(ranks, old_state, new_state, request, _agreements, memory)
    # Nothing more arrives in it.
    _memory.clear()
    if ranks.size > 1:
        _memory[ranks.group] = memory
    return report


# --- Moves, of a call or of a route ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """The request to move a state dict.

    Attributes:
        rules: rules from the names of this rank's state to the names of the move.
        target_rules: rules from the names of this rank's targets to the names of the move.
        family: afterwards, the rules of the model's family, for both.
        process_group: the ranks that move together.
        fallback: location of a checkpoint with the tensors that no rank gives.
        options: options of the caller.
        place: name of the route, for reports.
        version: version of the state.
        compares: whether values that arrive are compared with the values that were sent.
        verb: name of the call in the journal.
    """

    rules: Sequence[Rule] = ()
    target_rules: Sequence[Rule] = ()
    family: str | os.PathLike[str] | None = None
    process_group: Any = None
    fallback: str | os.PathLike[str] | None = None
    options: MoveOptions = field(default_factory=MoveOptions)
    place: str = "in memory"
    version: int | None = None
    compares: bool = False
    verb: str = "redistribute"

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: a value is of a wrong type.
            ValueError: an option is not one of its values.
        """
        check_options(self.options)
        check_rules(self.rules)
        check_rules(self.target_rules)
        check_path("family", self.family)
        check_path("fallback", self.fallback)
        check_num_bytes("max_inflight_bytes", self.options.max_inflight_bytes)
        if self.family == "auto" and self.fallback is None:
            # A Route has no fallback.
            auto = " reads the config.json of `fallback`: give it, or"
            if self.verb != "redistribute":
                auto = " has no directory to read here: give"
            raise ValueError(f"family='auto'{auto} the path of a config.json as family.")

    def of_all_ranks(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        options = asdict(replace(self.options, on_report=None))
        has_fallback = self.fallback is not None
        return {"has_fallback": has_fallback, "verify": self.compares, **options}

    @property
    def as_load(self) -> LoadRequest:
        """The request for this rank's targets."""
        options = LoadOptions(
            validate_access_integrity=False,
            allow_dtype_cast=self.options.allow_dtype_cast,
            max_inflight_bytes=self.options.max_inflight_bytes,
        )
        return LoadRequest(
            path=self.place,
            rules=self.target_rules,
            family=self.family,
            process_group=self.process_group,
            fills_values=True,
            options=options,
        )


def run_move(
    ranks: Ranks,
    old_state: ShardedStateDict,
    new_state: ShardedStateDict,
    request: MoveRequest,
    agreements: Agreements,
    memory: HostMemory,
) -> MoveReport:
    """Fill a state dict from the states of all ranks.

    See `redistribute`. Collective operation: all ranks must call it.
    """
    timer = PhaseTimer(request.verb, ranks.rank, request.place)
    load = request.as_load
    directory = ""
    if request.fallback is not None:
        directory = locations.normalize(request.fallback)
    with timer.phase("plan"):
        given = describe_given(ranks, old_state, request.rules, request.family, directory)
        fallback = None
        if directory:
            checkpoint = find_checkpoint(ranks, directory)
            with ranks.phase("open the fallback"):
                fallback = source_of(ranks, checkpoint, load.options, load.process_group)
        source = LiveSource(
            ranks,
            request.place,
            given,
            fallback,
            request.options,
            agreements,
            memory,
            request.compares,
            directory,
        )
        targets_state = with_shards(new_state, ranks.rank)
        targets = describe_targets(ranks, targets_state, load, lambda: source)
        differences = check_targets(ranks, targets)
    with timer.phase("move"):
        read = read_targets(ranks, targets, differences)
    assert source.plan is not None
    moved = replace(read, num_bytes=source.plan.num_bytes)
    _, _, figures = restore(ranks, new_state, moved, timer, "move")
    report = MoveReport(
        request.place, *figures, sent_bytes=source.plan.sent_bytes, version=request.version
    )
    publish(report, request.options.on_report, ranks.is_coordinator)
    return report
