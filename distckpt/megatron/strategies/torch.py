"""Megatron's strategies of the format `torch_dist`.

Here they save in distckpt's format and load all formats.
"""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.forwarding import forward
from distckpt.megatron._impl.torch_dist import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)

__all__ = ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy", "get_async_strategy"]

set_public_home(globals())

__getattr__ = forward(
    "strategies.torch",
    "MCoreLoadPlanner",
    "MCoreMetadata",
    "MCoreSavePlan",
    "MCoreSavePlanner",
    "_get_filesystem_reader",
    "flatten_state_dict",
    "mcore_to_pyt_state_dict",
    "sharded_tensor_to_torch_sharded_tensor",
)
