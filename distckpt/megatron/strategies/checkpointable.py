"""Megatron's tensors for its own format, for programs that write it; distckpt does not use them."""

from distckpt.megatron._impl.checkpointable import __getattr__ as __getattr__
