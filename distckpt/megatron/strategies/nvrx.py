"""Megatron's helpers for background saves by nvidia-resiliency-ext.

distckpt does not need them.
"""

from distckpt.megatron._forwarding import forward

__getattr__ = forward(
    "strategies.nvrx", "has_nvrx_async_support", "is_nvrx_min_version", "make_nvrx_async_request"
)
