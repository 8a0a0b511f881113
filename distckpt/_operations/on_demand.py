"""Modules that few calls need, imported when a call asks for one."""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias

_Name: TypeAlias = Literal[
    "arrival",
    "background",
    "common_differences",
    "families",
    "fingerprint",
    "merge_adapter",
    "model_keys",
    "peft_names",
    "quantize",
    "state_dict_names",
    "strategies",
    "verify_live",
]

_MODULES: dict[_Name, str] = {
    "arrival": "distckpt._move.arrival",
    "background": "distckpt._io.background",
    "common_differences": "distckpt._state.common_differences",
    "families": "distckpt._rules.families",
    "fingerprint": "distckpt._operations.fingerprint",
    "merge_adapter": "distckpt._operations.merge_adapter",
    "model_keys": "distckpt._checkpoint.model_keys",
    "peft_names": "distckpt._plan.peft_names",
    "quantize": "distckpt._operations.quantize",
    "state_dict_names": "distckpt._operations.state_dict_names",
    "strategies": "distckpt.strategies.base",
    "verify_live": "distckpt._operations.verify_live",
}


def on_demand(name: _Name) -> Any:
    """Return a module that few calls need."""
    return importlib.import_module(_MODULES[name])
