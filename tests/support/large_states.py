"""A state of one tensor that is larger than a part of an upload, and windows smaller than small
tensors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt._io import block_stats, figures
from distckpt._operations import windows

LARGE = 4 * (1 << 20) + 77
"""Elements: a little more than 16 MiB, which go in several parts, and come in several answers."""


def numbers(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(LARGE, np.float32))


def large_state(seed: int) -> dict:
    return {"w": ShardedTensor.from_rank_offsets("w", numbers(seed)), "step": seed}


def large_request() -> dict:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(LARGE))}


def holds(location: str, seed: int) -> bool:
    loaded = distckpt.load(large_request(), location)
    return torch.equal(loaded["w"], numbers(seed)) and loaded["step"] == seed


def look_in_windows(
    monkeypatch: pytest.MonkeyPatch, num_elements: int, block_elements: int = 1 << 18
) -> None:
    """Look at so few elements of a tensor at a time, and compute statistics of so few at once."""
    for module in (windows, figures):
        monkeypatch.setattr(module, "WINDOW_ELEMENTS", num_elements)
    monkeypatch.setattr(block_stats, "BLOCK_ELEMENTS", block_elements)
