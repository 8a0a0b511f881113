"""Weights of a small model, and the two kinds of sources that they are exported from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.hf_folders import write_folder
from tests.support.states import save_checkpoint


def random_tensor(shape, dtype, seed=0):
    """Make a tensor of random bytes."""
    high = 2 if dtype == torch.bool else 256
    content = np.random.default_rng(seed).integers(0, high, (*shape, dtype.itemsize), np.uint8)
    return (
        torch.from_numpy(content).view(dtype).reshape(shape)
        if content.size
        else torch.empty(shape, dtype=dtype)
    )


def model(num_layers=3):
    """Make the weights of a small model."""
    tensors = {"model.embed.weight": random_tensor((10, 6), torch.float32)}
    for layer in range(num_layers):
        tensors[f"model.layers.{layer}.w"] = torch.randn(
            8, 6, generator=torch.Generator().manual_seed(layer)
        )
        tensors[f"model.layers.{layer}.norm"] = torch.arange(6.0) + layer
    return tensors


def save_folder(path, tensors, axis=0, num_parts=2):
    write_folder(path, tensors, axis, num_parts)
    return path


SOURCES = pytest.mark.parametrize(
    "save", [save_checkpoint, save_folder], ids=["checkpoint", "folder"]
)
