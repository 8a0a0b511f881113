"""Moves of a state dict from one layout to another, in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import MoveOptions, MoveReport, with_changes
from distckpt._move.agreements import Agreements
from distckpt._move.host_memory import KeptMemory, bucket_bytes_of, share_memory
from distckpt._move.moving import MoveRequest, run_move
from distckpt._ranks.collectives import Ranks, collective
from distckpt.mapping._wrappers import ShardedStateDict
from distckpt.rules._rule import Rule

_agreements = Agreements()
"""Agreements of earlier calls: the plans of layouts that come again."""

_memory = KeptMemory()
"""Memory of the last successful call."""


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
        memory = _memory.take(ranks, bucket_bytes)
        vote.number = memory.number
    if ranks.size == 1 or not vote.are_equal:
        memory = share_memory(ranks, bucket_bytes)
    report = run_move(ranks, old_state, new_state, request, _agreements, memory)
    _memory.keep(ranks, memory)
    return report
