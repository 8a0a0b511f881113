"""Megatron's wrappers that parallelize saving and loading within a group."""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.forwarding import forward
from distckpt.megatron._impl.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]

set_public_home(globals())

__getattr__ = forward(
    "strategies.fully_parallel", "distribute_main_replicas_with_precomputed_distribution"
)
