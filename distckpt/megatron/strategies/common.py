"""Megatron's names for common state, which distckpt keeps with the sharded objects."""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.common import (
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
    load_common,
    save_common,
)

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "load_common",
    "save_common",
]

set_public_home(globals())
