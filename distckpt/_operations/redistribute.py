"""Move a state dict from one layout to another, from memory to memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from distckpt._base.memory import paused_garbage_collection
from distckpt._base.messages import check_num_bytes, check_path
from distckpt._base.options import LoadOptions, MoveOptions, check_options, with_changes
from distckpt._base.reports import MoveReport, publish
from distckpt._checkpoint.opening import find_checkpoint
from distckpt._mapping.wrappers import ShardedStateDict
from distckpt._move.agreements import Agreements
from distckpt._operations.live_source import LiveSource, describe_given, with_shards
from distckpt._operations.load import read_targets, restore
from distckpt._operations.load_request import LoadRequest, check_targets, describe_targets
from distckpt._operations.shard_source import ShardSource, source_of
from distckpt._ranks.collectives import PhaseTimer, Ranks, collective
from distckpt._rules.rule import Rule
from distckpt._rules.rules import check_rules
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_IN_MEMORY = "in memory"

_agreements = Agreements()
"""Of earlier calls: the plans of layouts that come again."""


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
    """Fill a state dict from another one that has the same tensors under another layout, without a
    checkpoint.

        distckpt.redistribute({"model": old_model}, {"model": new_model})

    Every element comes from a rank that has it: from the same one if it can, else through memory
    that the ranks of a machine share, else through the process group, once for each machine. A call
    with the same descriptions as one before uses its plan, and sends no descriptions.

    Collective operation: all ranks must call it; those that only give or only take pass `{}` for
    the other state dict.

    Args:
        old_state: what is there: a state dict as for `save`. Plain tensors, not in modules, are
            taken to be equal on all ranks that have them. It is not changed.
        new_state: what to fill: a state dict as for `load`; all tensors must have memory. The two
            may share memory. Targets may overlap, and need not cover a tensor.
        rules: how the tensors of `new_state` are made from those of `old_state`, if names or shapes
            differ, see `distckpt.rules`: from the names of `old_state` to those of `new_state`.
        family: instead, the rules of the model's family: the path of its `config.json`, or "auto"
            for the one in `fallback`. Either state dict may have the names of Megatron Core, of
            transformers in memory, or of the Hugging Face directory.
        process_group: the ranks that call; None for the default group, or for this process alone
            when torch.distributed is not initialized.
        fallback: a path or URL of a checkpoint, from which regions are loaded that no rank gives,
            and only these. It has the names that `rules` or `family` make of those of `old_state`.
        options: further options.
        changes: options by keyword, such as `atomic=True`; see `MoveOptions` for all of them.

    Returns:
        How much was moved and how long it took, on every rank.

    Raises:
        InvalidShardingError: ranks give different shards for the same elements, or describe one
            tensor differently. Nothing is changed.
        LoadMismatchError: no rank holds what is taken, or a shape or dtype does not fit. Nothing is
            changed.
        RankFailedError: raised on all ranks when any rank failed or was lost. Tensors may be partly
            filled then, unless `atomic` is set.
    """
    ranks = Ranks(process_group)
    chosen = with_changes(redistribute, MoveOptions, options, changes)
    same = asdict(replace(chosen, on_report=None))
    with ranks.phase("check the arguments", same={"has_fallback": fallback is not None, **same}):
        _check(chosen, rules, family, fallback)
        location = locations.normalize(fallback) if fallback is not None else ""
    timer = PhaseTimer("redistribute", ranks.rank, _IN_MEMORY)
    request = LoadRequest(
        path=_IN_MEMORY,
        family=family,
        process_group=process_group,
        fills_values=True,
        options=LoadOptions(
            validate_access_integrity=False,
            allow_dtype_cast=chosen.allow_dtype_cast,
            max_inflight_bytes=chosen.max_inflight_bytes,
        ),
    )
    with timer.phase("plan"):
        given = describe_given(ranks, old_state, rules, family, location)
        source = LiveSource(ranks, given, _fallback(ranks, request, location), chosen, _agreements)
        wanted = with_shards(new_state, ranks.rank)
        _, targets = describe_targets(ranks, wanted, request, location, lambda: source)
        differences = check_targets(ranks, request, _IN_MEMORY, source, targets)
    with timer.phase("move"):
        read = read_targets(ranks, request, _IN_MEMORY, source, targets, differences)
    restore(ranks, new_state, request, read)
    assert source.plan is not None
    figures = timer.summarize(ranks, source.plan.num_bytes, "move")
    report = MoveReport(_IN_MEMORY, *figures, sent_bytes=source.plan.sent_bytes)
    if ranks.is_coordinator:
        logger.info("%s", report)
    if chosen.on_report is not None:
        publish(report, chosen.on_report)
    return report


def _check(
    options: MoveOptions,
    rules: Sequence[Rule],
    family: str | os.PathLike[str] | None,
    fallback: str | os.PathLike[str] | None,
) -> None:
    check_options(options)
    check_rules(rules)
    check_path("family", family)
    check_path("fallback", fallback)
    check_num_bytes("max_inflight_bytes", options.max_inflight_bytes)
    if family == "auto" and fallback is None:
        raise ValueError(
            "family='auto' reads the config.json of `fallback`: give it, or the path of a "
            "config.json as family."
        )


def _fallback(ranks: Ranks, request: LoadRequest, location: str) -> ShardSource | None:
    """Return the checkpoint that has what no rank holds.

    Collective operation: all ranks must call it.
    """
    if not location:
        return None
    found = find_checkpoint(ranks, location)
    with ranks.phase("open the fallback"):
        return source_of(ranks, location, found, request.options, request.process_group)
