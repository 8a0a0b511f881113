"""State of random number generators, as an object of a state dict."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distckpt._models.per_rank import PerRank


class RngState(PerRank):
    """State of the random number generators of this process.

    They are those of Python, numpy, torch, and its accelerator.

        state = {"model": model, "rng": distckpt.RngState()}

    A checkpoint has one state for each rank. A load under another layout leaves the generators as
    they are, with a warning, unless those of several ranks were all the same: see `PerRank`, also
    for `grid`.
    """

    _if_skipped = (
        "The random number generators go on from where they are: seed them with other numbers than "
        "at the start, or they repeat what was drawn then."
    )

    def __init__(self, grid: Mapping[str, tuple[int, int]] | None = None) -> None:
        super().__init__(None, grid)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, by library."""
        devices = {name: module.get_rng_state() for name, module in _accelerator().items()}
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "devices": devices,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states.

        An accelerator's is set only if this process uses one of the same kind.
        """
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for name, module in _accelerator().items():
            if name in state_dict["devices"]:
                module.set_rng_state(state_dict["devices"][name])


def _accelerator() -> dict[str, Any]:
    """Return the module of the accelerator in use, by kind."""
    # Torch that is built for an accelerator raises, or names it, on a machine without one.
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    if device is None:
        return {}
    module = torch.get_device_module(device)
    # An accelerator that has not been used yet is not started for this.
    is_used = getattr(module, "is_initialized", bool)()
    return {device.type: module} if is_used else {}
