"""Common state of Megatron Core for Megatron-FSDP, and the way back.

Megatron Core has a list of groups, and does not say which parameters are in each. Megatron-FSDP has
the options of its group for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException

_GROUPS = "param_to_group_meta"
_LEFT_OUT = ("rng_state", "rerun_state_machine", "content_metadata")
"""Entries for one layout only: random states of ranks, and the version of the layout."""


def gated_of(common: Mapping[Any, Any]) -> bool:
    """Return whether MLPs are gated, as the arguments of the run say."""
    args = common.get("args")
    is_gated = getattr(args, "swiglu", None)
    if is_gated is None:
        raise CheckpointingException(
            "The checkpoint does not tell whether MLPs are gated (SwiGLU): names and shapes are "
            "the same, and it has no arguments of a run. Pass gated=True or False, or the names of "
            "the modules with such MLPs (--gated, --no-gated)."
        )
    return bool(is_gated)


def fsdp_common(
    common: Mapping[Any, Any], num_axes: Mapping[str, int], prefix: str
) -> dict[Any, Any]:
    """Return common state with the options of each trained parameter.

    Args:
        common: of Megatron Core.
        num_axes: of the trained parameters, by name.
        prefix: the beginning of names in Megatron-FSDP's optimizer.

    Raises:
        CheckpointingException: the group of a parameter cannot be told.
    """
    result = {key: value for key, value in common.items() if key not in _LEFT_OUT}
    stored = result.pop("optimizer", None)
    if stored is None:
        return result
    groups = list(_groups_of(stored))
    options = {}
    for name, ndim in num_axes.items():
        group = _group_of(name, ndim, groups)
        kept = {option: value for option, value in group.items() if option != "params"}
        if "is_expert_parallel" in kept:
            # Its parameters forget it, and a load refuses groups in which it differs.
            kept["is_expert_parallel"] = False
        options[prefix + name] = kept
    result["optimizer"] = {_GROUPS: options}
    return result


def _groups_of(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of an optimizer, or of several that work together."""
    if not isinstance(state, Mapping):
        return
    if "common_step" in (state.get("state") or {}):
        raise CheckpointingException(
            "The optimizer has its step beside its states, not in its groups, where that of "
            "Megatron-FSDP looks for it: convert without the optimizer."
        )
    if "param_groups" in state:
        yield from state["param_groups"]
        return
    for key, value in state.items():
        if key == "optimizer" or isinstance(key, int):
            yield from _groups_of(value)


def _group_of(name: str, num_axes: int, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the group of a parameter, as Megatron Core divides them.

    Biases and vectors have no weight decay; experts of expert parallelism have groups of their own.
    """
    is_expert = ".experts." in name
    found = [group for group in groups if bool(group.get("is_expert_parallel")) == is_expert]
    found = found or list(groups)
    decays = num_axes != 1 and not name.endswith(".bias")
    matching = [group for group in found if (group.get("wd_mult", 1.0) != 0) == decays]
    matching = matching or found
    if not matching or matching.count(matching[0]) < len(matching):
        raise CheckpointingException(
            f"Which of {len(groups)} groups of the optimizer {name!r} is in cannot be told: "
            "Megatron Core does not store it, and weight decay and experts do not decide it. "
            "Convert without the optimizer."
        )
    return matching[0]


def core_common(
    common: Mapping[Any, Any], has_state: bool, expert_parallel: bool
) -> dict[Any, Any]:
    """Return common state with the groups of Megatron Core's optimizers.

    Args:
        common: of Megatron-FSDP.
        has_state: whether there are states of parameters.
        expert_parallel: whether experts have an optimizer of their own.
    """
    result = {key: value for key, value in common.items() if key not in _LEFT_OUT}
    options = (result.pop("optimizer", None) or {}).get(_GROUPS, {})
    states = []
    for groups in _groups_of_kinds(options, expert_parallel):
        if groups and has_state:
            states.append(
                {
                    "optimizer": {"param_groups": groups},
                    "param_state_sharding_type": "fully_reshardable",
                }
            )
    if states:
        result["optimizer"] = states[0] if len(states) == 1 else dict(enumerate(states))
    return result


def _groups_of_kinds(
    options: Mapping[str, Mapping[str, Any]], expert_parallel: bool
) -> Iterable[list[dict[str, Any]]]:
    """Return the different groups of parameters, and those of experts."""
    kinds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, stored in options.items():
        group = dict(stored)
        is_expert = expert_parallel and ".experts." in name
        if is_expert:
            group["is_expert_parallel"] = True
        if group not in kinds[is_expert]:
            kinds[is_expert].append(group)
    for groups in kinds.values():
        # The order of Megatron Core: without weight decay comes last.
        groups.sort(key=lambda group: group.get("wd_mult", 1.0) == 0)
    return kinds.values()
