"""The module paths of Megatron Core's `dist_checkpointing.strategies`."""

from typing import TYPE_CHECKING

from distckpt.megatron._forwarding import import_submodules

if not TYPE_CHECKING:  # else a type checker believes that the package has every name
    __getattr__ = import_submodules(__name__)
