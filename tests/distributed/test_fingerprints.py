"""Fingerprints of a state under several layouts, and of its checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distckpt
from distckpt import ShardedTensor
from tests.support.layouts import (
    Layout,
    even_part,
    flat_part,
    global_bytes,
    irregular_shard,
    tensor_from,
    uneven_part,
)

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
]
TENSORS = {
    "first.rows": ((48, 700), torch.bfloat16, 0),
    "first.columns": ((9, 1400), torch.float32, 1),
    "first.uneven": ((29, 7), torch.int16, 0),
    "last.uneven": ((6, 700), torch.float32, 1),
    "last.norm": ((300,), torch.bfloat16, None),
    "last.step": ((), torch.int64, None),
    "last.codes": ((16, 300), torch.float8_e4m3fn, 0),
}
"""By key, whose first word is the pipeline stage: shape, dtype and the axis that is divided."""


def content(key):
    shape, dtype, _ = TENSORS[key]
    return global_bytes(key, shape, dtype)


def whole_state():
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor_from(content(key), dtype))
        for key, (_, dtype, _) in TENSORS.items()
    }


def state_of(layout, rank):
    tp, stage, dp = layout.position(rank)
    state = {}
    for key, (shape, dtype, axis) in TENSORS.items():
        if stage != (0 if key.startswith("first") else layout.pp - 1):
            continue
        slices = [slice(0, size) for size in shape]
        replica_id = dp
        if axis is None:
            replica_id = tp + layout.tp * dp
        else:
            cut = uneven_part if "uneven" in key else even_part
            slices[axis] = cut(shape[axis], layout.tp, tp)
        state[key] = irregular_shard(key, content(key), dtype, tuple(slices), replica_id)
    return state


def fingerprints_of_layout(rank, layout, path):
    state = state_of(layout, rank)
    found = distckpt.fingerprint(state)
    distckpt.save(state, path)
    # The plan of the save serves the next call as well.
    return found, distckpt.fingerprint(state)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fingerprints_are_equal_under_all_layouts(tmp_path, run, layout):
    expected = distckpt.fingerprint(whole_state())

    found = run(fingerprints_of_layout, layout.num_ranks, layout, str(tmp_path / "step"))

    assert found == [(expected, expected)] * layout.num_ranks
    assert distckpt.open(tmp_path / "step").fingerprints() == expected


def fingerprints_of_flat_shards(rank, num_ranks):
    tensor = tensor_from(content("first.rows"), torch.bfloat16)
    part = flat_part(tensor.numel(), num_ranks, rank)
    shard = ShardedTensor.from_rank_offsets_flat(
        "first.rows", tensor.view(-1)[part].clone(), tuple(tensor.shape), flattened_range=part
    )
    return distckpt.fingerprint({"weight": shard})


def test_flat_shards_have_the_fingerprint_of_their_tensor(run):
    expected = distckpt.fingerprint(whole_state())["first.rows"]

    assert run(fingerprints_of_flat_shards, 3, 3) == [{"first.rows": expected}] * 3


def fingerprints_of_tied_weights(rank):
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model.head.weight = model.embedding.weight
    with torch.no_grad():
        model.head.weight.copy_(torch.arange(40).view(10, 4))
    return distckpt.fingerprint({"model": model})


def test_tied_weights_have_one_fingerprint(run):
    weight = torch.arange(40, dtype=torch.float32).view(10, 4)
    shard = ShardedTensor.from_rank_offsets("weight", weight)
    expected = distckpt.fingerprint({"weight": shard})["weight"]

    (found, _) = run(fingerprints_of_tied_weights, 2)

    assert found == {"embedding.weight": expected, "head.weight": expected}


def fingerprint_with_a_gap(rank):
    shard = state_of(Layout(tp=2), 0)["first.rows"]
    return type(_error_of({"weight": shard})).__name__


def _error_of(state):
    with pytest.raises(distckpt.CheckpointingException) as caught:
        distckpt.fingerprint(state)
    return caught.value


def test_a_tensor_that_is_not_complete_has_none(run):
    assert run(fingerprint_with_a_gap, 2) == ["InvalidShardingError"] * 2
