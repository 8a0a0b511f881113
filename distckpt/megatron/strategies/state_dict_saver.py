"""Megatron's planning of saves in its own format.

It is for programs that write it; distckpt does not use it.
"""

from distckpt.megatron._forwarding import forward

__getattr__ = forward(
    "strategies.state_dict_saver", "save_state_dict_async_finalize", "save_state_dict_async_plan",
    "verify_global_md_reuse",
)  # fmt: skip
