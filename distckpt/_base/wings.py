"""The wings that the kernel calls, by name: it imports none of them, and works without them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal, TypeAlias

Wing: TypeAlias = Literal[
    "computed",
    "deepspeed",
    "huggingface",
    "jax",
    "memory",
    "orbax",
    "seals",
    "state_dicts",
    "torch_dist",
]

_WINGS: dict[Wing, str] = {
    "computed": "distckpt._compute.export_options",
    "deepspeed": "distckpt._foreign.deepspeed.reader",
    "huggingface": "distckpt._foreign.hugging_face",
    "jax": "distckpt.jax._rules",
    "memory": "distckpt._move.verify_live",
    "orbax": "distckpt._foreign.orbax.reader",
    "seals": "distckpt._foreign.seals",
    "state_dicts": "distckpt._foreign.state_dicts.names",
    "torch_dist": "distckpt._foreign.torch_dist.reader",
}
"""Readers of formats, by the names of these, and modules behind an option of a verb."""


def wing(name: Wing) -> ModuleType:
    """Import a wing."""
    return importlib.import_module(_WINGS[name])
