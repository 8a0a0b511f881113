"""Every complex dtype that this torch has is stored, or refused by name."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor

DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype) and v.is_complex}, key=str
)
pytestmark = pytest.mark.filterwarnings("ignore:.*omplex.* support is experimental")


def bits(tensor):
    return torch.view_as_real(tensor.detach()).contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_complex_numbers_of_any_dtype_come_back(tmp_path, dtype):
    numbers = torch.tensor([[1 + 2j, -3 + 0.5j], [0.25j, 4]]).to(dtype)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(numbers.clone())
    model.register_buffer("phase", numbers.clone())
    distckpt.save(
        {"model": model, "plain": numbers, "s": ShardedTensor.from_rank_offsets("s", numbers)},
        tmp_path / "saved",
    )
    fresh = torch.nn.Module()
    fresh.weight = torch.nn.Parameter(torch.zeros_like(numbers))
    fresh.register_buffer("phase", torch.zeros_like(numbers))
    plain = torch.zeros_like(numbers)
    empty = ShardedTensor.from_rank_offsets("s", torch.zeros_like(numbers)).without_data()
    loaded = distckpt.load({"model": fresh, "plain": plain, "s": empty}, tmp_path / "saved")
    assert loaded["s"].dtype == dtype
    for found in (fresh.weight, fresh.phase, plain, loaded["s"]):
        assert bits(found) == bits(numbers)
    assert distckpt.verify(tmp_path / "saved") is not None
