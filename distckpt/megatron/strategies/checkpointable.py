"""Megatron's tensors for its own format, for programs that write it; distckpt does not use them."""

from distckpt._megatron.forwarding import forward

__getattr__ = forward(
    "strategies.checkpointable", "CheckpointableShardedTensor", "LocalShardsContainer"
)
