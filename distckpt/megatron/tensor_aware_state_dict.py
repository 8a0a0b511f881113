"""Megatron's state dicts for local checkpoints, which stay in memory or on the disk of a node."""

from distckpt._megatron.tensor_aware import __getattr__ as __getattr__
