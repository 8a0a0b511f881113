"""Megatron Core's `dist_checkpointing.strategies.base`.

Its classes come from `distckpt.strategies.base`; some serve only programs for Megatron.
"""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.strategy_classes import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    SaveCommonStrategy,
)
from distckpt.strategies.base import (
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "get_default_strategy",
    "register_default_strategy",
]

set_public_home(globals())
