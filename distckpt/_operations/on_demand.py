"""What few exports need is imported when one asks for it."""

from __future__ import annotations

import importlib
from typing import Any, Literal

_MODULES = {
    "merge_adapter": "distckpt._operations.merge_adapter",
    "peft_names": "distckpt._plan.peft_names",
    "quantize": "distckpt._operations.quantize",
}


def on_demand(name: Literal["merge_adapter", "peft_names", "quantize"]) -> Any:
    """Return the module for something that few exports need."""
    return importlib.import_module(_MODULES[name])
