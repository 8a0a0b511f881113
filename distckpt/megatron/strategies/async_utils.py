"""Megatron's interface to background saves: requests, and a queue that programs poll.

`distckpt.async_save` is simpler to use. These classes are for programs that were written for
Megatron Core; requests run in distckpt's background thread, not in processes of their own.
"""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.async_requests import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)
from distckpt.megatron._impl.async_requests import _disable_gc as _disable_gc
from distckpt.megatron._impl.async_requests import _set_process_qos as _set_process_qos

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
]

set_public_home(globals())
