"""Megatron's state dicts for local checkpoints, which stay in memory or on the disk of a node."""

from distckpt._megatron.forwarding import forward

__getattr__ = forward("tensor_aware_state_dict", "MCoreTensorAwareStateDict")
