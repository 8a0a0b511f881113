"""Fused layers, experts and padded vocabularies on real ranks: saved under one layout, loaded under
others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt.experts import grouped_experts, grouped_mlp_sharded_state_dict, sequential_experts
from distckpt.factories import qkv_factory, swiglu_factory
from distckpt.modules import sharded_state_dict
from distckpt.optimizer import load_sharded_optimizer_state_dict, sharded_optimizer_state_dict
from tests.support.harness import error_of
from tests.support.layouts import Layout, even_part, flat_part
from tests.support.states import numbered

WIDTH, FEATURES, GROUPS, QUERIES, HEAD = 5, 12, 4, 2, 3


# ---- fused dense layers

GATE, UP = numbered(FEATURES, WIDTH).numpy(), -numbered(FEATURES, WIDTH).numpy()
QUERY, KEY, VALUE = (
    numbered(GROUPS, QUERIES * HEAD, WIDTH).numpy(),
    -numbered(GROUPS, HEAD, WIDTH).numpy(),
    numbered(GROUPS, HEAD, WIDTH).numpy(),
)
STORED = {
    "fc1.weight": np.concatenate([GATE, UP]),
    "fc1.bias": np.concatenate([GATE[:, 0], UP[:, 0]]),
    "qkv": np.concatenate([QUERY, KEY, VALUE], 1).reshape(-1, WIDTH),
}


def fused_locals(layout, rank):
    """Return, by key, what a tensor parallel rank holds."""
    tp = layout.position(rank)[0]
    rows, groups = even_part(FEATURES, layout.tp, tp), even_part(GROUPS, layout.tp, tp)
    weight = np.concatenate([GATE[rows], UP[rows]])
    qkv = np.concatenate([part[groups].reshape(-1, WIDTH) for part in (QUERY, KEY, VALUE)])
    return {"fc1.weight": weight, "fc1.bias": weight[:, 0], "qkv": qkv}


def factory(key, tensor, layout, rank):
    tp, _, dp = layout.position(rank)
    shard = ShardedTensor.from_rank_offsets(key, tensor, (0, tp, layout.tp), replica_id=(0, dp))
    if key == "qkv":
        return qkv_factory(shard, GROUPS * QUERIES, GROUPS, layout="concatenated")
    return swiglu_factory(shard)


def fused_state(layout, rank, blank):
    """Describe parameters, which all data parallel ranks hold, and moments, which they share out;
    and what both are.
    """
    state, expected = {}, {}
    for key, local in fused_locals(layout, rank).items():
        make = torch.zeros_like if blank else torch.clone
        parameter = factory(key, make(torch.from_numpy(local)), layout, rank)
        run_of_rank = flat_part(local.size, layout.dp, layout.position(rank)[2])
        values = torch.from_numpy(local).flatten()[run_of_rank].double() / 7
        flat = {"data": make(values), "flattened_range": run_of_rank, "replica_id": 0}
        state[key] = {
            "parameter": parameter,
            "moment": replace(parameter, key=f"moment.{key}", **flat),
        }
        expected[key] = {"parameter": torch.from_numpy(local), "moment": values}
    return state, expected


def save_fused(rank, layout, path):
    distckpt.save(fused_state(layout, rank, blank=False)[0], path)


def load_fused(rank, layout, path):
    state, expected = fused_state(layout, rank, blank=True)
    loaded = distckpt.load(state, path)
    return [
        (key, name)
        for key, tensors in expected.items()
        for name, tensor in tensors.items()
        if not torch.equal(loaded[key][name], tensor)
        or loaded[key][name].data_ptr() != state[key][name].data.data_ptr()
    ]


@pytest.mark.parametrize("saved", [Layout(tp=2, dp=2), Layout(tp=4), Layout(dp=3)], ids=str)
def test_fused_layers_and_their_flat_moments_load_under_every_other_layout(run, saved, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_fused, saved.num_ranks, saved, path)
    stored = distckpt.open(path).read_tensors()
    assert {key for key in stored if not key.startswith("moment.")} == set(STORED)
    for key, whole in STORED.items():
        assert np.array_equal(stored[key].numpy(), whole), key
        assert torch.equal(stored[f"moment.{key}"], torch.from_numpy(whole).double() / 7), key
    for wanted in (Layout(tp=2, dp=2), Layout(tp=4), Layout(dp=4), Layout(tp=2)):
        assert run(load_fused, wanted.num_ranks, wanted, path) == [[]] * wanted.num_ranks, str(
            wanted
        )
    assert run(load_fused, 1, Layout(), path, backend=None) == [[]], (
        "a process without a process group"
    )


# ---- experts

EXPERTS = 8
FC1, FC2 = (
    numbered(EXPERTS, 2 * FEATURES, WIDTH).numpy(),
    -numbered(EXPERTS, WIDTH, FEATURES).numpy(),
)


class ExpertLayout(NamedTuple):
    """Sizes of expert, tensor and expert data parallelism."""

    ep: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def num_ranks(self):
        return self.ep * self.tp * self.dp

    def position(self, rank):
        return rank // (self.tp * self.dp), rank // self.dp % self.tp, rank % self.dp


def expert_state(way, layout, rank, blank):
    """Describe the experts of a rank; returns its tensors, too, and what they have to be."""
    ep, tp, dp = layout.position(rank)
    experts, rows = even_part(EXPERTS, layout.ep, ep), even_part(FEATURES, layout.tp, tp)
    fc1 = np.concatenate([FC1[experts, :FEATURES][:, rows], FC1[experts, FEATURES:][:, rows]], 1)
    expected = [torch.from_numpy(array.copy()) for array in (fc1, FC2[experts, :, rows])]
    if way == "matrices":
        expected = [expected[0].mT.reshape(WIDTH, -1), expected[1].mT.reshape(-1, WIDTH)]
    tensors = [torch.zeros_like(t) if blank else t.clone() for t in expected]
    if way == "matrices":
        ranks = {
            "ep_rank": ep,
            "ep_size": layout.ep,
            "tp_rank": tp,
            "tp_size": layout.tp,
            "expert_dp_rank": dp,
        }
        num_local = EXPERTS // layout.ep
        return (
            grouped_mlp_sharded_state_dict(
                *tensors, num_local_experts=num_local, gated=True, **ranks
            ),
            tensors,
            expected,
        )

    def describe(fc1, fc2, first_axis):
        # The replica ids are those of a layer that knows nothing of experts: its data parallel
        # ranks are all ranks.
        first = ShardedTensor.from_rank_offsets(
            "experts.linear_fc1.weight", fc1, (first_axis, tp, layout.tp), replica_id=(0, rank)
        )
        second = ShardedTensor.from_rank_offsets(
            "experts.linear_fc2.weight", fc2, (first_axis + 1, tp, layout.tp), replica_id=(0, rank)
        )
        return {"fc1": swiglu_factory(first, dim=first_axis), "fc2": second}

    if way == "grouped":
        return (
            grouped_experts(describe(*tensors, 1), ep, layout.ep, expert_dp_rank=dp),
            tensors,
            expected,
        )
    modules = [describe(*pair, 0) for pair in zip(*tensors, strict=True)]
    return (
        {"experts": sequential_experts(modules, ep, layout.ep, expert_dp_rank=dp)},
        tensors,
        expected,
    )


def save_experts(rank, way, layout, path):
    distckpt.save(expert_state(way, layout, rank, blank=False)[0], path, validate_replicas=True)


def load_experts(rank, way, layout, path):
    state, tensors, expected = expert_state(way, layout, rank, blank=True)
    distckpt.load(state, path)
    return all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize(
    ("way", "saved"),
    [
        ("sequential", ExpertLayout(ep=4)),
        ("grouped", ExpertLayout(ep=2, tp=2)),
        ("matrices", ExpertLayout(ep=2, dp=2)),
    ],
    ids=str,
)
def test_experts_load_under_every_other_layout_and_held_in_other_ways(run, way, saved, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_experts, saved.num_ranks, way, saved, path)
    stored = distckpt.open(path).read_tensors()
    assert np.array_equal(stored.pop("experts.linear_fc1.weight").numpy(), FC1)
    assert np.array_equal(stored.pop("experts.linear_fc2.weight").numpy(), FC2)
    assert stored == {}
    for other, wanted in [
        ("sequential", ExpertLayout(ep=2, tp=2)),
        ("grouped", ExpertLayout(ep=4)),
        ("grouped", ExpertLayout(ep=2, dp=2)),
        ("matrices", ExpertLayout(tp=4)),
    ]:
        assert (
            run(load_experts, wanted.num_ranks, other, wanted, path) == [True] * wanted.num_ranks
        ), (other, wanted)
    assert run(load_experts, 1, "sequential", ExpertLayout(), path, backend=None) == [True]


def modules_and_optimizer(rank, ep_size, num_steps):
    """Make the experts of a rank as modules, and an optimizer; expert 1 gets no tokens, so Adam has
    no state for it.
    """
    numbers = range(EXPERTS)[even_part(EXPERTS, ep_size, rank)]
    experts = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in numbers)
    optimizer = torch.optim.Adam(experts.parameters(), lr=0.1)
    for _ in range(num_steps):
        for number, expert in zip(numbers, experts, strict=True):
            torch.nn.init.constant_(expert.weight, float(number))
            for p in expert.parameters() if number != 1 else ():
                p.grad = torch.full_like(p, 1.0 + number)
        optimizer.step()
    # Every expert is described as what it is, a module that is the same on all ranks.
    described = [sharded_state_dict(expert, "experts.") for expert in experts]
    model = sequential_experts(described, rank, ep_size, expert_dp_rank=0)
    state = {
        "model": model,
        "optimizer": sharded_optimizer_state_dict(optimizer, {"experts": model}),
    }
    return experts, optimizer, state


def save_modules(rank, ep_size, path):
    distckpt.save(modules_and_optimizer(rank, ep_size, 1)[2], path)


def load_modules(rank, ep_size, path):
    experts, optimizer, state = modules_and_optimizer(rank, ep_size, 0)
    load_sharded_optimizer_state_dict(optimizer, distckpt.load(state, path)["optimizer"])
    moments = [optimizer.state.get(expert.weight, {}) for expert in experts]
    return [
        (
            expert.weight.detach().unique().tolist(),
            [m["exp_avg"].unique().tolist(), float(m["step"])] if m else None,
        )
        for expert, m in zip(experts, moments, strict=True)
    ]


def test_experts_that_are_plain_modules_and_their_optimizer(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_modules, 4, 4, path)
    loaded = run(load_modules, 2, 2, path)
    assert run(load_modules, 1, 1, path, backend=None) == [[*loaded[0], *loaded[1]]]
    for number, (weights, moments) in enumerate([*loaded[0], *loaded[1]]):
        # Adam's first step is the learning rate; its mean is a tenth of the gradient.
        assert weights == pytest.approx([number if number == 1 else number - 0.1], abs=1e-6)
        assert moments == (None if number == 1 else [pytest.approx([0.1 * (1 + number)]), 1.0])


def save_wrongly(rank, path, as_replicas, validate_replicas):
    """Number two experts per rank from 0."""
    replica_id = rank if as_replicas else 0
    experts = {
        str(i): ShardedTensor.from_rank_offsets(
            "experts.fc2",
            torch.full((2, 3), float(10 * rank + i)),
            (0, i, 2),
            replica_id=replica_id,
            prepend_axis_num=1,
        )
        for i in range(2)
    }
    return str(error_of(distckpt.save, experts, path, validate_replicas=validate_replicas))


def test_experts_counted_from_0_on_every_rank_are_refused_on_all_ranks(run, tmp_path):
    messages = run(save_wrongly, 2, str(tmp_path / "checkpoint"), False, False)
    for message in messages:
        assert "'experts.fc2'" in message
        assert "on rank 0" in message
        assert "on rank 1" in message
        assert "experts counted from 0 on every rank" in message
    assert list(tmp_path.iterdir()) == []


def test_experts_that_also_pass_for_copies_are_found_by_comparing_them(run, tmp_path):
    messages = run(save_wrongly, 2, str(tmp_path / "checkpoint"), True, True)
    assert all("'experts.fc2'" in message for message in messages), messages
    assert list(tmp_path.iterdir()) == []


# ---- padded vocabularies

VOCAB = 50_257
WORDS = numbered(VOCAB, 2).numpy()


def padded_size(tp):
    """Round up so that each rank has a multiple of 128 rows, as Megatron does."""
    return -(-VOCAB // (128 * tp)) * 128 * tp


def vocabulary_state(layout, rank, table):
    """Describe the rows of an embedding, and flat runs of its moments."""
    tp, _, dp = layout.position(rank)
    local = torch.from_numpy(table).chunk(layout.tp)[tp].clone()
    rows = (0, tp, layout.tp)
    weight = ShardedTensor.from_rank_offsets(
        "words", local, rows, replica_id=(0, dp), allow_shape_mismatch=True
    )
    run_of_rank = flat_part(local.numel(), layout.dp, dp)
    flat = {
        "key": "moment.words",
        "data": local.flatten()[run_of_rank].clone(),
        "flattened_range": run_of_rank,
    }
    return {"weight": weight, "moment": replace(weight, replica_id=0, **flat)}


def save_vocabulary(rank, layout, path):
    # What training left in the padding is not zero.
    table = np.concatenate([WORDS, np.full((padded_size(layout.tp) - VOCAB, 2), -3, np.float32)])
    distckpt.save(vocabulary_state(layout, rank, table), path)


def load_vocabulary(rank, layout, path, num_stored):
    size = padded_size(layout.tp)
    state = vocabulary_state(layout, rank, np.full((size, 2), 9, np.float32))
    kept = np.concatenate([WORDS, np.full((num_stored - VOCAB, 2), -3, np.float32)])[:size]
    expected = vocabulary_state(
        layout, rank, np.concatenate([kept, np.zeros((size - len(kept), 2), np.float32)])
    )
    loaded = distckpt.load(state, path)
    return [name for name in state if not torch.equal(loaded[name], expected[name].data)]


@pytest.mark.parametrize("saved", [Layout(dp=2), Layout(tp=2, dp=2), Layout(tp=4)], ids=str)
def test_a_padded_vocabulary_loads_with_more_and_with_less_padding(run, saved, tmp_path):
    assert [padded_size(tp) for tp in (1, 2, 4)] == [50_304, 50_432, 50_688]
    path = str(tmp_path / "checkpoint")
    run(save_vocabulary, saved.num_ranks, saved, path)
    for wanted in (Layout(tp=4), Layout(tp=2, dp=2), Layout(dp=3)):
        found = run(load_vocabulary, wanted.num_ranks, wanted, path, padded_size(saved.tp))
        assert found == [[]] * wanted.num_ranks, str(wanted)
