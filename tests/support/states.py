"""States all of whose parts hold one value, so that a mixture of two saves is seen, and tensors of
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from tests.support.hf_folders import parts_along


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of the numbers 1, 2, 3, ..., none of which is what an empty target holds."""
    return torch.arange(1, torch.Size(shape).numel() + 1).view(shape).to(dtype)


def state_of(value: int, rank: int = 0, num_ranks: int = 1, num_rows: int = 100) -> dict[str, Any]:
    """Return a rank's part of a state: rows of its own, a tensor and a number that all ranks hold,
    an object.
    """
    rows, shared = torch.full((num_rows, 256), float(value)), torch.full((64, 256), float(value))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)),
        "shared": ShardedTensor.from_rank_offsets("shared", shared, replica_id=rank),
        "rng": ShardedObject("rng", {"value": value}, (num_ranks,), (rank,)),
        "value": value,
    }


def value_of(loaded: Mapping[str, Any]) -> int:
    """Return the value that all parts of a loaded state hold."""
    found = {loaded["value"], loaded["rng"]["value"]}
    found |= {value for key in ("rows", "shared") for value in loaded[key].unique().tolist()}
    (value,) = found
    return int(value)


def value_in(path) -> int:
    """Return the value that all parts of a checkpoint of `state_of` hold."""
    return value_of(distckpt.load(state_of(-1), path))


def small_state() -> dict[str, Any]:
    return {"w": whole("w", torch.arange(3.0)), "step": 4}


def small_request() -> dict[str, Any]:
    return {"w": whole("w", torch.zeros(3))}


def whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return all that tells a tensor from another one, NaN and negative zeros included."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return tensor.dtype, tensor.shape, data.numpy().tobytes()


def shard_files(path) -> list[Path]:
    return sorted(Path(path, "tensors").iterdir())


def save_checkpoint(path, tensors, axis=0, num_parts=2, **others):
    """Save a distckpt checkpoint in which every tensor is cut along an axis, where it has it."""
    state = dict(others)
    for key, tensor in tensors.items():
        parts = (
            parts_along(tensor, axis, num_parts)
            if tensor.ndim > axis
            else [((0,) * tensor.ndim, tensor)]
        )
        for number, (offset, part) in enumerate(parts):
            local_shape = tuple(part.shape)
            shard = ShardedTensor(
                key, part, part.dtype, local_shape, tuple(tensor.shape), offset, None
            )
            state[f"{key}.{number}"] = shard
    distckpt.save(state, path)
    return path


def state_of_step(step: int) -> dict[str, Any]:
    """A tensor of eight elements, each the number of the step, and that number."""
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), float(step))), "step": step}


def step_in(location: Any) -> Any:
    """The step of a checkpoint of `state_of_step`, loaded."""
    request = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8)), "step": 0}
    loaded = distckpt.load(request, location)
    assert loaded["w"].tolist() == [float(loaded["step"])] * 8
    return loaded["step"]
