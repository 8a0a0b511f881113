"""Megatron's preparation of state dicts; `distckpt.save` and `load` need none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distckpt._ranks.collectives import Ranks
from distckpt._state import common_state
from distckpt._state.common_differences import check_differences
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import (
    CommonStateDict,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from distckpt.megatron.dict_utils import dict_list_map_inplace, extract_matching_values
from distckpt.megatron.utils import extract_nonpersistent, extract_sharded_base
from distckpt.megatron.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)

__all__ = ["filter_out_empty_flatten_tensor", "load_preprocess", "save_preprocess"]


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its sharded part and common state.

    Factories are applied in place.

    Collective operation with `validate_access_integrity`, which checks the shards of all ranks and
    warns where their common state differs: all must call it.
    """
    apply_factories(sharded_state_dict)
    _, rest = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(rest)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        compared = common_state.comparable(common, preprocess_common_before_consistancy_check)
        check_differences(Ranks(), compared, common_state.digest(compared), warns=False)
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """Return a copy with factories applied, local non-persistent values, and the factories."""
    copied, _ = extract_matching_values(sharded_state_dict, lambda value: True)
    copied = filter_out_empty_flatten_tensor(copied)
    factories, _ = extract_matching_values(
        copied, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    local, copied = extract_nonpersistent(copied)
    dict_list_map_inplace(lambda value: value.unwrap(), local)
    return copied, local, factories


def filter_out_empty_flatten_tensor(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return a state dict without flat shards that hold no elements."""

    def holds_elements(value: Any) -> bool:
        flat = getattr(value, "flattened_range", None) if isinstance(value, ShardedTensor) else None
        return flat is None or flat.start != flat.stop

    rest: ShardedStateDict
    rest, _ = extract_matching_values(sharded_state_dict, holds_elements)
    return rest
