"""Experts held in several ways, under other numbers of expert, tensor and data parallel ranks;
numpy is the oracle.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import distckpt
from distckpt import InvalidShardingError, ShardedObject, ShardedTensor
from distckpt.experts import grouped_experts, grouped_mlp_sharded_state_dict, sequential_experts
from distckpt.factories import swiglu_factory
from distckpt.megatron.validation import validate_sharding_integrity

EXPERTS, HIDDEN, FEATURES = 8, 3, 4
FC1 = np.arange(EXPERTS * 2 * FEATURES * HIDDEN, dtype=np.float32).reshape(
    EXPERTS, 2 * FEATURES, HIDDEN
)
FC2 = -np.arange(EXPERTS * HIDDEN * FEATURES, dtype=np.float32).reshape(EXPERTS, HIDDEN, FEATURES)
KEYS = ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight")


class Rank(NamedTuple):
    """Position of a rank, and the sizes, of expert, tensor and expert data parallelism."""

    ep: int
    num_ep: int
    tp: int = 0
    num_tp: int = 1
    dp: int = 0

    @property
    def num_local(self):
        return EXPERTS // self.num_ep


def ranks_of(num_ep, num_tp=1, num_dp=1):
    grid = itertools.product(range(num_ep), range(num_tp), range(num_dp))
    return [Rank(ep, num_ep, tp, num_tp, dp) for ep, tp, dp in grid]


def local_weights(rank):
    """Return the fused gate and up, and the second weights, of a rank: [experts, out, in],
    numpy.
    """
    experts = slice(rank.ep * rank.num_local, (rank.ep + 1) * rank.num_local)
    own = FEATURES // rank.num_tp
    rows = slice(rank.tp * own, (rank.tp + 1) * own)
    gate, up = FC1[experts, :FEATURES], FC1[experts, FEATURES:]
    return np.concatenate([gate[:, rows], up[:, rows]], 1), FC2[experts, :, rows]


# Each way gives the tensors in memory, as numpy arrays, and the state dict that describes given
# ones.


class Sequential:
    """A module per expert."""

    def arrays(self, rank):
        return [array for pair in zip(*local_weights(rank), strict=True) for array in pair]

    def state(self, rank, tensors):
        experts = []
        for i in range(0, len(tensors), 2):
            # What a dense layer says of itself; 9 is its data parallel rank.
            fc1, fc2 = (
                ShardedTensor.from_rank_offsets(
                    key, tensor, (axis, rank.tp, rank.num_tp), replica_id=(0, 0, 9)
                )
                for key, tensor, axis in zip(KEYS, tensors[i : i + 2], (0, 1), strict=True)
            )
            experts.append({"fc1": swiglu_factory(fc1), "fc2": fc2})
        return sequential_experts(experts, rank.ep, rank.num_ep, expert_dp_rank=rank.dp)


class Grouped:
    """One tensor for the experts of a rank."""

    def arrays(self, rank):
        return list(local_weights(rank))

    def state(self, rank, tensors):
        fc1 = ShardedTensor.from_rank_offsets(KEYS[0], tensors[0], (1, rank.tp, rank.num_tp))
        fc2 = ShardedTensor.from_rank_offsets(KEYS[1], tensors[1], (2, rank.tp, rank.num_tp))
        state = {"fc1": swiglu_factory(fc1, dim=1), "fc2": fc2}
        return [grouped_experts(state, rank.ep, rank.num_ep, expert_dp_rank=rank.dp)]


class Megatron:
    """Two matrices, like those of Megatron's GroupedMLP."""

    def arrays(self, rank):
        fc1, fc2 = local_weights(rank)
        return [
            fc1.transpose(0, 2, 1).reshape(HIDDEN, -1),
            fc2.transpose(0, 2, 1).reshape(-1, HIDDEN),
        ]

    def state(self, rank, tensors):
        ranks = {
            "ep_rank": rank.ep,
            "ep_size": rank.num_ep,
            "tp_rank": rank.tp,
            "tp_size": rank.num_tp,
        }
        return [
            grouped_mlp_sharded_state_dict(
                *tensors,
                "mlp.",
                num_local_experts=rank.num_local,
                gated=True,
                expert_dp_rank=rank.dp,
                **ranks,
            )
        ]


WAYS = [Sequential(), Grouped(), Megatron()]
LAYOUTS = [(1,), (4,), (2, 2), (2, 1, 2), (8,), (1, 4), (2, 4, 2)]


def leaves(state):
    return [value for expert in state for value in expert.values()]


def tensors_of(way, rank, blank=False):
    return [torch.from_numpy(np.zeros_like(a) if blank else a.copy()) for a in way.arrays(rank)]


def is_loaded(way, rank, loaded):
    values = leaves(loaded)
    return all(np.array_equal(v.numpy(), a) for v, a in zip(values, way.arrays(rank), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: type(way).__name__)
def test_experts_load_under_other_layouts_and_in_other_ways(way, tmp_path):
    for layout in LAYOUTS:
        path = tmp_path / "-".join(map(str, layout))
        distckpt.save(
            {rank: way.state(rank, tensors_of(way, rank)) for rank in ranks_of(*layout)}, path
        )
        stored = distckpt.open(path).read_tensors()
        assert stored.keys() == set(KEYS)
        assert all(
            np.array_equal(stored[key].numpy(), whole)
            for key, whole in zip(KEYS, (FC1, FC2), strict=True)
        )
    for other in WAYS:
        for layout in LAYOUTS:
            # What was saved by EP4 is read by the others, what was saved last by EP4.
            source = tmp_path / ("2-4-2" if layout == (4,) else "4")
            asked = {
                rank: other.state(rank, tensors_of(other, rank, True)) for rank in ranks_of(*layout)
            }
            loaded = distckpt.load(asked, source)
            assert [rank for rank in asked if not is_loaded(other, rank, loaded[rank])] == [], other


@pytest.mark.parametrize("way", WAYS, ids=lambda way: type(way).__name__)
def test_flat_optimizer_states_of_experts_load_under_other_layouts(way, tmp_path):
    def state(layout, num_runs, blank):
        described, checks = {}, []
        for rank in ranks_of(*layout):
            tensors = tensors_of(way, rank)
            for number, (wrapped, tensor) in enumerate(
                zip(leaves(way.state(rank, tensors)), tensors, strict=True)
            ):
                share = -(-tensor.numel() // num_runs)
                for i in range(num_runs):
                    run = slice(
                        min(tensor.numel(), i * share), min(tensor.numel(), (i + 1) * share)
                    )
                    values = tensor.flatten()[run]
                    target = torch.zeros_like(values) if blank else values.clone()
                    flat = replace(wrapped, data=target, flattened_range=run)
                    described[str((rank, number, i))] = flat
                    checks.append((str((rank, number, i)), values))
        return described, checks

    for saved, num_saved, wanted, num_wanted in [
        ((4,), 3, (2, 2), 5),
        ((2, 2), 4, (1,), 7),
        ((1, 4), 2, (8,), 3),
    ]:
        path = tmp_path / f"{saved}"
        distckpt.save(state(saved, num_saved, False)[0], path)
        assert np.array_equal(distckpt.open(path).read_tensors()[KEYS[0]].numpy(), FC1)
        described, checks = state(wanted, num_wanted, True)
        loaded = distckpt.load(described, path)
        assert [name for name, values in checks if not torch.equal(loaded[name], values)] == []


def test_layers_in_front_and_biases_without_other_axes(tmp_path):
    def state(bias, layer, rank):
        experts = [
            {
                "bias": ShardedTensor.from_rank_offsets(
                    "bias", row, (0, layer, 3), prepend_axis_num=1
                )
            }
            for row in bias
        ]
        return sequential_experts(experts, rank.ep, rank.num_ep, expert_dp_rank=0)

    biases = torch.arange(3 * 8 * 2.0).view(3, 8, 2)
    described = {
        f"{layer} {rank.ep}": state(biases[layer].chunk(4)[rank.ep], layer, rank)
        for layer in range(3)
        for rank in ranks_of(4)
    }
    distckpt.save(described, tmp_path / "c")
    assert torch.equal(distckpt.open(tmp_path / "c").read_tensors()["bias"], biases)
    loaded = distckpt.load({"e": state(torch.zeros(4, 2), 1, Rank(1, 2))}, tmp_path / "c")["e"]
    assert torch.equal(torch.stack([expert["bias"] for expert in loaded]), biases[1, 4:])
    stacked = ShardedTensor.from_rank_offsets(
        "bias", torch.zeros(4, 2), (0, 1, 3), prepend_axis_num=1
    )
    grouped = grouped_experts({"bias": stacked}, 0, 2, expert_dp_rank=0)
    assert torch.equal(distckpt.load(grouped, tmp_path / "c")["bias"], biases[1, :4])


def test_regular_grids_stay_regular():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 6), (1, 1, 3))
    (added,) = sequential_experts([{"w": shard}], 2, 4, expert_dp_rank=0)
    reference = ShardedTensor.from_rank_offsets(
        "w", shard.data, (0, 2, 4), (2, 1, 3), prepend_axis_num=1
    )
    assert added["w"] == reference
    extended = grouped_experts({"w": shard}, 2, 4, expert_dp_rank=0)["w"]
    assert extended == ShardedTensor.from_rank_offsets("w", shard.data, (0, 2, 4), (1, 1, 3))


def test_an_object_per_expert_moves_with_it(tmp_path):
    def state(rank):
        experts = [{"o": ShardedObject("extra", None, (1,), (0,))} for _ in range(rank.num_local)]
        for number, expert in enumerate(experts):
            expert["o"].data = {"expert": rank.ep * rank.num_local + number}
        return sequential_experts(experts, rank.ep, rank.num_ep, expert_dp_rank=rank.dp)

    distckpt.save({rank: state(rank) for rank in ranks_of(4)}, tmp_path / "c")
    loaded = distckpt.load({"e": state(Rank(1, 2))}, tmp_path / "c")["e"]
    assert [expert["o"]["expert"] for expert in loaded] == [4, 5, 6, 7]


def test_replica_ids_count_ranks_with_the_same_experts_and_nothing_given_is_changed():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), replica_id=(0, 1, 9))
    state = {"w": [shard, (replace(shard, replica_id=9),)], "fc1": swiglu_factory(shard), "n": 3}
    before = str(state)
    for numbered in (
        sequential_experts([state], 1, 2, expert_dp_rank=4)[0],
        grouped_experts(state, 1, 2, expert_dp_rank=4),
    ):
        first, (second,) = numbered["w"]
        assert (first.replica_id, second.replica_id, numbered["fc1"].replica_id) == (
            (0, 1, 4),
            4,
            (0, 1, 4),
        )
        assert {built.replica_id for built in numbered["fc1"].build()} == {(0, 1, 4)}
        assert numbered["n"] == 3
    (kept,) = sequential_experts([state], 1, 2, expert_dp_rank=None)
    assert (kept["w"][0].replica_id, kept["fc1"].replica_id) == ((0, 1, 9), (0, 1, 9))
    assert str(state) == before
    assert shard.global_shape == (4, 6)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("offsets", [(), ((0, 2, 5),)], ids=["one layer", "layers"])
def test_fused_matrices_are_stored_as_megatron_stores_them(gated, offsets):
    theirs = pytest.importorskip("megatron.core.transformer.moe.experts")
    rank = Rank(1, 4, 1, 2, 3)
    width = (2 if gated else 1) * 2
    weight1 = torch.randn(HIDDEN, rank.num_local * width)
    weight2 = torch.randn(rank.num_local * 2, HIDDEN)
    group = lambda rank, size: SimpleNamespace(rank=lambda: rank, size=lambda: size)  # noqa: E731
    layer = SimpleNamespace(
        ep_group=group(rank.ep, rank.num_ep),
        tp_group=group(rank.tp, rank.num_tp),
        dp_group=group(rank.dp, 4),
        num_local_experts=rank.num_local,
        weight2=weight2,
        config=SimpleNamespace(hidden_size=HIDDEN, gated_linear_unit=gated),
        state_dict=lambda prefix, keep_vars: {"weight1": weight1, "weight2": weight2},
    )
    reference = theirs.GroupedMLP.sharded_state_dict(layer, "mlp.", offsets)
    ours = grouped_mlp_sharded_state_dict(
        weight1,
        weight2,
        "mlp.",
        offsets,
        num_local_experts=rank.num_local,
        gated=gated,
        ep_rank=rank.ep,
        ep_size=rank.num_ep,
        tp_rank=rank.tp,
        tp_size=rank.num_tp,
        expert_dp_rank=rank.dp,
    )
    assert list(ours) == ["mlp.weight1", "mlp.weight2"]
    for name, factory in ours.items():
        expected = reference[name].build()
        expected = expected if isinstance(expected, list) else [expected]
        built = factory.build()
        assert len(built) == len(expected)
        for mine, other in zip(built, expected, strict=True):
            for attribute in (
                "key",
                "local_shape",
                "global_shape",
                "global_offset",
                "prepend_axis_num",
                "replica_id",
            ):
                assert getattr(mine, attribute) == getattr(other, attribute), attribute
            assert torch.equal(mine.data, other.data)


def test_experts_counted_from_0_on_every_rank_are_refused_with_a_hint():
    def forgetful(rank):
        fc1, fc2 = (torch.from_numpy(array.copy()) for array in local_weights(rank))
        return {
            "fc1": ShardedTensor.from_rank_offsets(KEYS[0], fc1, replica_id=(0, rank.dp)),
            "fc2": ShardedTensor.from_rank_offsets(KEYS[1], fc2, replica_id=(0, rank.dp)),
        }

    with pytest.raises(InvalidShardingError, match="experts counted from 0 on every rank"):
        validate_sharding_integrity([forgetful(rank).values() for rank in ranks_of(4)])


def weights_of(num_experts=2, width=8):
    return torch.zeros(HIDDEN, num_experts * width), torch.zeros(num_experts * width // 2, HIDDEN)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: sequential_experts([], 2, 2, expert_dp_rank=0), "no rank 2 among 2"),
        (lambda: grouped_experts({}, -1, 2, expert_dp_rank=0), "no rank -1 among 2"),
        (
            lambda: grouped_experts(
                {"o": ShardedObject("extra", 1, (1,), (0,))}, 0, 2, expert_dp_rank=0
            ),
            "'extra'.*cannot be divided.*sequential_experts",
        ),
        (
            lambda: grouped_experts(
                {"s": ShardedTensor.from_rank_offsets("s", torch.zeros(()))}, 0, 2, expert_dp_rank=0
            ),
            "'s'.*no axis for the experts.*sequential_experts",
        ),
        (
            lambda: grouped_mlp_sharded_state_dict(
                *weights_of(), "mlp.", num_local_experts=2, gated=False, ep_rank=0, ep_size=1
            ),
            r"'mlp.experts'.*\(3, 16\).*\(8, 3\) do not hold 2 experts without gate",
        ),
        (
            lambda: grouped_mlp_sharded_state_dict(
                *weights_of(), num_local_experts=3, gated=True, ep_rank=0, ep_size=1
            ),
            "do not hold 3 experts with gate",
        ),
        (
            lambda: grouped_mlp_sharded_state_dict(
                *weights_of(),
                sharded_offsets=[(1, 0, 2)],
                num_local_experts=2,
                gated=True,
                ep_rank=0,
                ep_size=1,
            ),
            r"sharded_offsets \[\(1, 0, 2\)\] must give .* for the axes 0 to 0",
        ),
    ],
)
def test_errors_say_what_does_not_fit(make, problem):
    with pytest.raises(InvalidShardingError, match=problem):
        make()
