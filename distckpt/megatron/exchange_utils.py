"""Megatron's exchange of loaded shards between ranks.

`distckpt.load(share_reads=...)` needs none of it.
"""

from distckpt.megatron._forwarding import forward

__getattr__ = forward(
    "exchange_utils",
    "ShardDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
    "logger",
)
