"""Optimizer state that ZeRO-1 cuts into runs of the flattened local tensor, loaded under other
layouts, flat or not.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.layouts import Layout, bytes_of, even_part, flat_part, global_bytes, tensor_from
from tests.support.sampling import one_in

# key -> global shape, axis that tensor parallel ranks divide
MOMENTS = {
    "optimizer.exp_avg.rows": ((24, 7), 0),
    "optimizer.exp_avg.columns": ((5, 16), 1),
    "optimizer.exp_avg.cube": ((3, 8, 5), 1),
    "optimizer.exp_avg.tiny": ((4,), 0),
}
LAYERS = 4
STACKED_SHAPE = (LAYERS, 8, 6)


def local_part(key, layout, rank):
    """Return the part of a tensor parallel rank, and the offsets that describe it."""
    shape, axis = MOMENTS[key]
    tp = layout.position(rank)[0]
    part = even_part(shape[axis], layout.tp, tp)
    slices = tuple(part if i == axis else slice(None) for i in range(len(shape)))
    return global_bytes(key, shape, torch.float32)[slices], (axis, tp, layout.tp)


def flat_shard(key, layout, rank, *, blank):
    """The run of this data parallel rank; ranks for which nothing is left hold an empty one. Stages
    hold copies.
    """
    _, pp, dp = layout.position(rank)
    local, offsets = local_part(key, layout, rank)
    elements = local.reshape(-1, 4)
    run_of_rank = flat_part(len(elements), layout.dp, dp)
    expected = elements[run_of_rank]
    tensor = tensor_from(np.zeros_like(expected) if blank else expected, torch.float32)
    shard = ShardedTensor.from_rank_offsets_flat(
        key, tensor, local.shape[:-1], offsets, flattened_range=run_of_rank, replica_id=pp
    )
    return shard, expected


def whole_shard(key, layout, rank):
    local, offsets = local_part(key, layout, rank)
    tensor = tensor_from(np.zeros_like(local), torch.float32)
    return ShardedTensor.from_rank_offsets(
        key, tensor, offsets, replica_id=layout.position(rank)[2]
    ), local


def stacked_flat_shards(layout, rank, *, blank):
    """Flat runs of layers that have a layer axis in front."""
    tp, pp, dp = layout.position(rank)
    content = global_bytes("optimizer.exp_avg.layers", STACKED_SHAPE, torch.float32)
    shards, expected = [], []
    for layer in range(LAYERS)[even_part(LAYERS, layout.pp, pp)]:
        local = content[layer][even_part(STACKED_SHAPE[1], layout.tp, tp)]
        elements = local.reshape(-1, 4)
        mine = flat_part(len(elements), layout.dp, dp)
        tensor = tensor_from(
            np.zeros_like(elements[mine]) if blank else elements[mine], torch.float32
        )
        shard = ShardedTensor.from_rank_offsets_flat(
            "optimizer.exp_avg.layers",
            tensor,
            local.shape[:-1],
            (0, layer, LAYERS),
            (1, tp, layout.tp),
            flattened_range=mine,
            prepend_axis_num=1,
        )
        shards.append(shard)
        expected.append(elements[mine])
    return shards, expected


def save_flat(rank, layout, path):
    moments = {key: flat_shard(key, layout, rank, blank=False)[0] for key in MOMENTS}
    distckpt.save(
        {"moments": moments, "layers": stacked_flat_shards(layout, rank, blank=False)[0]}, path
    )


def wrong_ones(loaded, expected):
    return [
        key
        for key, content in expected.items()
        if not np.array_equal(bytes_of(loaded[key]), content)
    ]


def load_flat(rank, layout, path):
    pairs = {key: flat_shard(key, layout, rank, blank=True) for key in MOMENTS}
    layers, layers_expected = stacked_flat_shards(layout, rank, blank=True)
    loaded = distckpt.load(
        {"moments": {k: shard for k, (shard, _) in pairs.items()}, "layers": layers}, path
    )
    wrong = wrong_ones(loaded["moments"], {key: expected for key, (_, expected) in pairs.items()})
    return wrong + wrong_ones(dict(enumerate(loaded["layers"])), dict(enumerate(layers_expected)))


def load_whole(rank, layout, path):
    pairs = {key: whole_shard(key, layout, rank) for key in MOMENTS}
    loaded = distckpt.load({key: shard for key, (shard, _) in pairs.items()}, path)
    return wrong_ones(loaded, {key: expected for key, (_, expected) in pairs.items()})


def save_whole(rank, layout, path):
    shards = {}
    for key in MOMENTS:
        shards[key], local = whole_shard(key, layout, rank)
        shards[key].data.copy_(tensor_from(local, torch.float32))
    layers = stacked_flat_shards(layout, rank, blank=False)[0]
    distckpt.save({"moments": shards, "layers": layers}, path)


LAYOUTS = [
    Layout(tp=1, dp=4),
    Layout(tp=4, dp=1),
    Layout(tp=2, dp=4),
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=1, dp=3),
]


@pytest.mark.parametrize(
    "saved",
    one_in(2, [Layout(tp=2, dp=2), Layout(tp=1, dp=8), Layout(tp=2, dp=3), Layout(tp=4, dp=2)]),
    ids=str,
)
def test_flat_shards_load_under_every_other_layout(run, saved, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_flat, saved.num_ranks, saved, path)
    for wanted in [*LAYOUTS, saved]:
        assert run(load_flat, wanted.num_ranks, wanted, path) == [[]] * wanted.num_ranks, (
            f"flat, {wanted}"
        )
    for wanted in LAYOUTS[:3]:
        whole = wanted._replace(pp=1)
        assert run(load_whole, whole.num_ranks, whole, path) == [[]] * whole.num_ranks, (
            f"not flat, {whole}"
        )
    for function in (load_flat, load_whole):
        assert run(function, 1, Layout(), path, backend=None) == [[]], (
            "a process without a process group"
        )
    everything = distckpt.open(path).read_tensors()
    for key, (shape, _) in MOMENTS.items():
        assert np.array_equal(bytes_of(everything[key]), global_bytes(key, shape, torch.float32)), (
            key
        )
    stacked = everything["optimizer.exp_avg.layers"]
    assert np.array_equal(
        bytes_of(stacked), global_bytes("optimizer.exp_avg.layers", STACKED_SHAPE, torch.float32)
    )


def test_whole_shards_load_as_flat_ones(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = Layout(tp=2, dp=2)
    run(save_whole, saved.num_ranks, saved, path)
    for wanted in LAYOUTS:
        assert run(load_flat, wanted.num_ranks, wanted, path) == [[]] * wanted.num_ranks, str(
            wanted
        )


def save_invalid_runs(rank, path, runs):
    content = global_bytes("runs", (6, 5), torch.float32).reshape(-1, 4)
    shard = ShardedTensor.from_rank_offsets_flat(
        "runs", tensor_from(content[runs[rank]], torch.float32), (6, 5), flattened_range=runs[rank]
    )
    with pytest.raises(distckpt.InvalidShardingError, match="'runs'") as caught:
        distckpt.save({"runs": shard}, path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([slice(0, 12), slice(14, 30)], r"no rank holds element \(2, 2\)"),
        ([slice(0, 16), slice(14, 30)], "2 main replicas hold the same element"),
    ],
    ids=["gap", "overlap"],
)
def test_runs_must_cover_a_flat_tensor_exactly_once(run, runs, problem, tmp_path):
    messages = run(save_invalid_runs, 2, str(tmp_path / "checkpoint"), runs)
    assert messages[0] == messages[1]
    assert re.search(problem, messages[0]), messages[0]
    assert list(tmp_path.iterdir()) == []
