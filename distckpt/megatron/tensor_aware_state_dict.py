"""Megatron's state dicts for checkpoints in memory or on local disks."""

from distckpt.megatron._impl.tensor_aware import __getattr__ as __getattr__
