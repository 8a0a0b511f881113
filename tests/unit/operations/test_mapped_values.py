"""Rules under which elements lie apart, or get a number added: saved, exported, and loaded again in
parts.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import LoadMismatchError, ShardedTensor
from distckpt.rules import Add, Concat, Interleave, Split, Transpose

RULES = [
    Transpose("fc1", "columns", (0, 2, 1)),
    Interleave("columns", "gate_up", axis=2),
    Add("norm", 1.0),
    Split("qkv", ("q", "k", "v"), sizes=(4, 2, 2), groups=3),
    Concat(("q", "v"), "q_and_v", groups=6),
]


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc1": (3, 10, 7), "norm": (6,), "qkv": (24, 5)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


@pytest.fixture
def exported(tensors, tmp_path):
    whole = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    distckpt.save(whole, tmp_path / "checkpoint")
    for dtype in (None, torch.float64, torch.bfloat16):
        distckpt.consolidate(
            tmp_path / "checkpoint", tmp_path / str(dtype), rules=RULES, dtype=dtype
        )
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exports_compute_before_they_convert(exported, tensors, dtype):
    gate, up = tensors["fc1"].chunk(2, 1)
    q, k, v = tensors["qkv"].view(3, 8, 5).split((4, 2, 2), 1)
    in_turns = torch.cat([q.reshape(6, 2, 5), v.reshape(6, 1, 5)], 1).reshape(18, 5)
    expected = {
        "gate_up": torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2),
        # The sum is rounded as the checkpoint's dtype is, or exact in a wider one.
        "norm": tensors["norm"].to(torch.promote_types(dtype, torch.float32)) + 1.0,
        "k": k.reshape(6, 5),
        "q_and_v": in_turns,
    }
    found = load_file(
        exported / (str(dtype) if dtype != torch.float32 else "None") / "model.safetensors"
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_rank_loads_its_part_and_gets_what_was_saved(exported, tensors, parts):
    for rank in range(parts):
        slices = {
            key: torch.zeros_like(tensor).tensor_split(parts, -1)[rank]
            for key, tensor in tensors.items()
        }
        asked = {}
        for key, data in slices.items():
            width = sum(t.shape[-1] for t in tensors[key].tensor_split(parts, -1)[:rank])
            offset = (0,) * (data.ndim - 1) + (width,)
            asked[key] = distckpt.ShardedTensor(
                key, data, data.dtype, tuple(data.shape), tuple(tensors[key].shape), offset, None
            )
        rows = tensors["fc1"].tensor_split(parts, 1)
        first = sum(row.shape[1] for row in rows[:rank])
        part = torch.zeros_like(rows[rank])
        asked["rows"] = distckpt.ShardedTensor(
            "fc1", part, part.dtype, tuple(part.shape), (3, 10, 7), (0, first, 0), None
        )
        distckpt.load(asked, exported / "None", rules=RULES, validate_access_integrity=False)
        assert torch.equal(part, rows[rank])
        for key, data in slices.items():
            torch.testing.assert_close(
                data, tensors[key].tensor_split(parts, -1)[rank], rtol=0, atol=1e-6
            )


def test_a_number_is_added_once_to_memory_that_two_names_share(exported, tensors):
    data = torch.zeros(6)
    asked = {name: ShardedTensor.from_rank_offsets("norm", data) for name in ("one", "two")}
    distckpt.load(asked, exported / "None", rules=RULES, validate_access_integrity=False)
    torch.testing.assert_close(data, tensors["norm"], rtol=0, atol=1e-6)


def test_a_module_that_is_trained_gets_its_number_added(exported, tensors):
    module = torch.nn.Module()
    module.norm = torch.nn.Parameter(torch.zeros(6))
    state = {"norm": ShardedTensor.from_rank_offsets("norm", module.norm)}
    distckpt.load(state, exported / "None", rules=RULES)
    torch.testing.assert_close(module.norm.detach(), tensors["norm"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [6, 8])
def test_elements_that_lie_apart_fill_a_shape_that_may_differ(size, tmp_path):
    distckpt.save({"p": ShardedTensor.from_rank_offsets("p", torch.arange(8.0))}, tmp_path / "c")
    data = torch.full((size,), -7.0)
    asked = ShardedTensor.from_rank_offsets("w", data, allow_shape_mismatch=True)
    distckpt.load({"w": asked}, tmp_path / "c", rules=[Interleave("w", "p")])
    assert torch.equal(data, torch.arange(float(size)).view(-1, 2).T.flatten())


def test_elements_of_a_gap_are_not_filled(tmp_path):
    part = ShardedTensor("p", torch.arange(1.0, 5.0), torch.float32, (4,), (8,), (0,), None)
    distckpt.save({"p": part}, tmp_path / "c", validate_access_integrity=False)
    data = torch.full((4,), -7.0)
    asked = ShardedTensor(
        "w", data, torch.float32, (4,), (10,), (0,), None, allow_shape_mismatch=True
    )
    with pytest.raises(LoadMismatchError, match="saved with gaps"):
        distckpt.load(
            {"w": asked},
            tmp_path / "c",
            rules=[Interleave("w", "p")],
            validate_access_integrity=False,
        )
    assert (data == -7).all()
