"""The state of random number generators, as an object of a state dict."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distckpt._models.per_rank import PerRank


class RngState(PerRank):
    """The state of this process's random number generators: of Python, numpy, torch, and its
    accelerator.

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
        """Set the states. An accelerator's is set only if this process uses one of the same
        kind.
        """
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for name, module in _accelerator().items():
            if name in state_dict["devices"]:
                module.set_rng_state(state_dict["devices"][name])


def _accelerator() -> dict[str, Any]:
    """Return the module of the accelerator that this process uses, by the name of its kind."""
    # Torch that is built for an accelerator raises, or names it, on a machine without one.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if device is None else torch.get_device_module(device)
    # An accelerator that has not been used yet is not started for this.
    is_used = getattr(module, "is_initialized", bool)()
    return {device.type: module} if device is not None and is_used else {}
