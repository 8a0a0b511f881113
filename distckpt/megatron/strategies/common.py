"""Megatron's names for common state, which distckpt keeps with the sharded objects."""

from distckpt._base.public import set_public_home
from distckpt._megatron.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
    load_common,
    save_common,
)

__all__ = ["TorchCommonLoadStrategy", "TorchCommonSaveStrategy", "load_common", "save_common"]

set_public_home(globals())
