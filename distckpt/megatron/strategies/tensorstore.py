"""Megatron's reader of `zarr` checkpoints, in versions before 0.16; distckpt does not read them."""

from distckpt.megatron._forwarding import forward

__getattr__ = forward("strategies.tensorstore", "TensorStoreLoadShardedStrategy")
