"""Megatron's writer of its own files, for programs that write them; distckpt does not use it."""

from distckpt._base.public import set_public_home
from distckpt.megatron._forwarding import forward
from distckpt.megatron.strategies.torch import get_write_results_queue

__all__ = ["get_write_results_queue"]

set_public_home(globals())

_results_queue = None
"""Always None: no other process reports results. Programs look whether there is a queue to
close.
"""

__getattr__ = forward("strategies.filesystem_async", "FileSystemWriterAsync")
