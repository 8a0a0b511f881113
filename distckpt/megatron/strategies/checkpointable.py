"""Megatron's tensors for its own format, for programs that write it; distckpt does not use them."""

from distckpt._megatron.checkpointable import __getattr__ as __getattr__
