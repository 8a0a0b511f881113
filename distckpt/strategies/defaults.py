"""Choose the strategy of a call: the given one, or the one registered for a backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._checkpoint.opening import (
    BACKEND,
    FOREIGN_NAMES,
    VERSION,
    identify,
)
from distckpt._storage import locations
from distckpt.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from distckpt.strategies.safetensors import SafetensorsLoadStrategy, SafetensorsSaveStrategy

__all__ = ["get_default_load_sharded_strategy", "get_default_save_sharded_strategy"]

register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SafetensorsSaveStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, SafetensorsLoadStrategy())
# Programs for Megatron Core pass the name of its format, to save as well.
register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, SafetensorsSaveStrategy())
for _name in FOREIGN_NAMES:
    # Programs may name the format of the checkpoints that they load.
    register_default_strategy(StrategyAction.LOAD_SHARDED, _name, 1, SafetensorsLoadStrategy())


def save_strategy(given: SaveShardedStrategy | tuple[str, int] | None) -> SaveShardedStrategy:
    """Return the strategy to save with: the caller's, or the one registered under the caller's or
    the default name.
    """
    chosen: SaveShardedStrategy = _chosen(
        SaveShardedStrategy, StrategyAction.SAVE_SHARDED, given or (BACKEND, VERSION)
    )
    return chosen


def load_strategy(
    given: LoadShardedStrategy | tuple[str, int] | None, marker: Mapping[str, Any], location: str
) -> LoadShardedStrategy:
    """Return the strategy to load with: the caller's, or the one registered under the caller's or
    the marker's name.
    """
    if given is None:
        given = (marker["sharded_backend"], marker.get("sharded_backend_version", 1))
    try:
        chosen: LoadShardedStrategy = _chosen(
            LoadShardedStrategy, StrategyAction.LOAD_SHARDED, given
        )
    except CheckpointingException as error:
        raise CheckpointingException(f"Cannot read {location!r}: {error}") from error
    return chosen


def _chosen(kind: type, action: StrategyAction, given: Any) -> Any:
    strategy = get_default_strategy(action, *given) if isinstance(given, tuple) else given
    if not isinstance(strategy, kind):
        raise CheckpointingException(
            f"sharded_strategy must be a {kind.__name__}, (backend, version) or None, got "
            f"{type(given).__name__}."
        )
    return strategy


def get_default_save_sharded_strategy(
    backend: str = BACKEND, version: int = VERSION
) -> SaveShardedStrategy:
    """Return the saving strategy registered for a backend."""
    return save_strategy((backend, version))


def get_default_load_sharded_strategy(
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> LoadShardedStrategy:
    """Return the strategy that reads a checkpoint, or the built-in format when none is given."""
    location = "" if checkpoint_dir is None else locations.normalize(checkpoint_dir)
    return load_strategy(
        None, identify(location) if location else {"sharded_backend": BACKEND}, location
    )
