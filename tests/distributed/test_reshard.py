"""State saved under one parallel layout and loaded under others, and in a process without a process
group.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from distckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.support.layouts import (
    Layout,
    bytes_of,
    even_part,
    global_bytes,
    irregular_shard,
    tensor_from,
    uneven_part,
)
from tests.support.sampling import one_in

GRIDS = [
    Layout(tp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=4),
    Layout(tp=2, dp=4),
    Layout(tp=8),
]

# key -> global shape, dtype, axis that tensor parallel ranks divide (None: each has all)
DENSE = {
    "embedding.weight": ((48, 10), torch.float32, 0),
    "attention.qkv": ((24, 10), torch.bfloat16, 0),
    "attention.out": ((10, 16), torch.bfloat16, 1),
    "mlp.cube": ((3, 16, 5), torch.float64, 1),
    "norm.weight": ((10,), torch.float32, None),
    "steps": ((), torch.int64, None),
    "quantised": ((16, 3), torch.float8_e4m3fn, 0),
}
UNEVEN = {"uneven.rows": ((29, 7), torch.float32, 0), "uneven.columns": ((6, 31), torch.int16, 1)}
FUSED_SHAPE = (32, 6)
"""Global shape of a fused gate and up projection: the first half of its rows is the gate."""


def slices_of(shape, axis, part):
    return tuple(part if i == axis else slice(0, size) for i, size in enumerate(shape))


def dense_shard(key, layout, rank, *, blank):
    shape, dtype, axis = DENSE[key]
    tp, _, dp = layout.position(rank)
    content = global_bytes(key, shape, dtype)
    part = (
        content
        if axis is None
        else content[slices_of(shape, axis, even_part(shape[axis], layout.tp, tp))]
    )
    tensor = tensor_from(np.zeros_like(part) if blank else part, dtype)
    if axis is None:
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=(tp, dp)), part
    return ShardedTensor.from_rank_offsets(
        key, tensor, (axis, tp, layout.tp), replica_id=(0, dp)
    ), part


def uneven_shard(key, layout, rank, *, blank):
    shape, dtype, axis = UNEVEN[key]
    tp, _, dp = layout.position(rank)
    content = global_bytes(key, shape, dtype)
    slices = slices_of(shape, axis, uneven_part(shape[axis], layout.tp, tp))
    shown = np.zeros_like(content) if blank else content
    return irregular_shard(key, shown, dtype, slices, replica_id=dp), content[slices]


def fused_factory(layout, rank, *, blank):
    """A rank has its part of the gate above its part of the up projection: two shards of one
    key.
    """
    tp, _, dp = layout.position(rank)
    content = global_bytes("mlp.fused", FUSED_SHAPE, torch.float32)
    half = FUSED_SHAPE[0] // 2
    gate, up = (part[even_part(half, layout.tp, tp)] for part in (content[:half], content[half:]))
    expected = np.concatenate([gate, up])
    tensor = tensor_from(np.zeros_like(expected) if blank else expected, torch.float32)

    def build(key, data, replica_id, flattened_range):
        del flattened_range
        parts = data.chunk(2)
        return {
            name: ShardedTensor.from_rank_offsets(
                key, part, (0, tp + index * layout.tp, 2 * layout.tp), replica_id=replica_id
            )
            for index, (name, part) in enumerate(zip(("gate", "up"), parts, strict=True))
        }

    return ShardedTensorFactory(
        "mlp.fused", tensor, build, lambda built: torch.cat([built["gate"], built["up"]]), dp
    )


def fused_expected(layout, rank):
    tp = layout.position(rank)[0]
    content = global_bytes("mlp.fused", FUSED_SHAPE, torch.float32)
    half = FUSED_SHAPE[0] // 2
    return np.concatenate(
        [
            content[:half][even_part(half, layout.tp, tp)],
            content[half:][even_part(half, layout.tp, tp)],
        ]
    )


def model_state(layout, rank, *, blank=False):
    """Return the state dict of a rank (filled with zeros to load into it), and the bytes each
    tensor should have.
    """
    shards = {key: dense_shard(key, layout, rank, blank=blank) for key in DENSE}
    shards |= {key: uneven_shard(key, layout, rank, blank=blank) for key in UNEVEN}
    state = {
        "model": {key: shard for key, (shard, _) in shards.items()},
        "fused": [fused_factory(layout, rank, blank=blank)],
        "tokenizer": ShardedObject(
            "tokenizer", None if blank else {"merges": ("a", "b")}, (1,), (0,), replica_id=rank
        ),
        "rank": LocalNonpersistentObject(f"rank {rank}"),
        "args": {"lr": -1.0}
        if blank
        else {"lr": 3e-4, "betas": (0.9, 0.95), "names": [f"layer {i}" for i in range(3)]},
    }
    return state, {key: expected for key, (_, expected) in shards.items()}


def save_state(rank, layout, path):
    distckpt.save(model_state(layout, rank)[0], path)


def load_state(rank, layout, path):
    """Load on one rank and return what is not as it should be."""
    state, expected = model_state(layout, rank, blank=True)
    targets = {key: shard.data for key, shard in state["model"].items()}
    loaded = distckpt.load(state, path, strict="raise")
    wrong = [
        key
        for key, content in expected.items()
        if not np.array_equal(bytes_of(loaded["model"][key]), content)
    ]
    wrong += [
        f"{key} is another tensor"
        for key, target in targets.items()
        if loaded["model"][key] is not target
    ]
    if not np.array_equal(bytes_of(loaded["fused"][0]), fused_expected(layout, rank)):
        wrong.append("mlp.fused")
    rest = {name: loaded[name] for name in ("tokenizer", "rank", "args")}
    if rest != {
        "tokenizer": {"merges": ("a", "b")},
        "rank": f"rank {rank}",
        "args": {"lr": 3e-4, "betas": (0.9, 0.95), "names": ["layer 0", "layer 1", "layer 2"]},
    }:
        wrong.append(rest)
    return wrong


@pytest.mark.parametrize("saved", one_in(2, GRIDS), ids=str)
def test_tensor_parallel_state_loads_under_every_other_layout(run, saved, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_state, saved.num_ranks, saved, path)
    for wanted in GRIDS:
        assert run(load_state, wanted.num_ranks, wanted, path) == [[]] * wanted.num_ranks, str(
            wanted
        )
    assert run(load_state, 1, Layout(), path, backend=None) == [[]], (
        "a process without a process group"
    )
    everything = distckpt.open(path).read_tensors()
    for key, (shape, dtype, _) in {**DENSE, **UNEVEN}.items():
        assert np.array_equal(bytes_of(everything[key]), global_bytes(key, shape, dtype)), key


def test_a_checkpoint_of_one_process_loads_on_many_ranks(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_state, 1, Layout(), path, backend=None)
    wanted = Layout(tp=4, dp=2)
    assert run(load_state, 8, wanted, path) == [[]] * 8


LAYERS, LAYER_SHAPE = 8, (12, 6)


def layer_shards(layout, rank, *, blank):
    """The layers of a pipeline stage: slices of one global tensor with a layer axis in front."""
    tp, pp, dp = layout.position(rank)
    content = global_bytes("layers.weight", (LAYERS, *LAYER_SHAPE), torch.float32)
    shards, expected = [], []
    for layer in range(LAYERS)[even_part(LAYERS, layout.pp, pp)]:
        part = content[layer][even_part(LAYER_SHAPE[0], layout.tp, tp)]
        tensor = tensor_from(np.zeros_like(part) if blank else part, torch.float32)
        offsets = ((0, layer, LAYERS), (1, tp, layout.tp))
        shard = ShardedTensor.from_rank_offsets(
            "layers.weight", tensor, *offsets, replica_id=dp, prepend_axis_num=1
        )
        shards.append(shard)
        expected.append(part)
    return shards, expected


def save_layers(rank, layout, path):
    distckpt.save({"layers": layer_shards(layout, rank, blank=False)[0]}, path)


def load_layers(rank, layout, path):
    shards, expected = layer_shards(layout, rank, blank=True)
    loaded = distckpt.load({"layers": shards}, path)["layers"]
    return [
        np.array_equal(bytes_of(tensor), content)
        for tensor, content in zip(loaded, expected, strict=True)
    ]


@pytest.mark.parametrize(
    "saved", [Layout(tp=2, pp=2), Layout(pp=4, dp=2), Layout(tp=4, pp=1)], ids=str
)
def test_layers_move_between_pipeline_stages(run, saved, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_layers, saved.num_ranks, saved, path)
    for wanted in (Layout(tp=1, pp=2), Layout(tp=3, pp=1), Layout(pp=8), Layout(tp=2, pp=2, dp=2)):
        results = run(load_layers, wanted.num_ranks, wanted, path)
        assert results == [[True] * (LAYERS // wanted.pp)] * wanted.num_ranks, str(wanted)
    whole = distckpt.open(path).read_tensors()["layers.weight"]
    assert np.array_equal(
        bytes_of(whole), global_bytes("layers.weight", (LAYERS, *LAYER_SHAPE), torch.float32)
    )


def random_cuts(seed, shape, num_ranks):
    """Cut a tensor into one region per rank, by halving the largest region along a random axis at a
    random place.
    """
    random = np.random.default_rng(seed)
    regions = [tuple(slice(0, size) for size in shape)]
    while len(regions) < num_ranks:
        regions.sort(key=lambda region: np.prod([s.stop - s.start for s in region]))
        region = regions.pop()
        axis = int(random.integers(len(shape)))
        place = int(random.integers(region[axis].start, region[axis].stop + 1))
        regions.append((*region[:axis], slice(region[axis].start, place), *region[axis + 1 :]))
        regions.append((*region[:axis], slice(place, region[axis].stop), *region[axis + 1 :]))
    return regions


def save_and_load_regions(rank, num_ranks, seeds, folder):
    """Save one random division of tensors into regions and load another one; return the seeds that
    went wrong.
    """
    wrong = []
    for seed in seeds:
        shape = [(40,), (9, 14), (5, 6, 7), (3, 4, 5, 6)][seed % 4]
        content = global_bytes(f"regions {seed}", shape, torch.int32)
        mine = random_cuts(seed, shape, num_ranks)[rank]
        path = f"{folder}/seed_{seed}"
        distckpt.save({"regions": irregular_shard("regions", content, torch.int32, mine)}, path)
        wanted = random_cuts(seed + 1000, shape, num_ranks)[rank]
        target = irregular_shard("regions", np.zeros_like(content), torch.int32, wanted)
        loaded = distckpt.load({"regions": target}, path)["regions"]
        if not np.array_equal(bytes_of(loaded), content[wanted]):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    [
        (3, range(8)),
        pytest.param(4, range(200), marks=pytest.mark.slow),
        pytest.param(8, range(100), marks=pytest.mark.slow),
    ],
)
def test_any_division_into_regions_loads_under_any_other(run, num_ranks, seeds, tmp_path):
    assert (
        run(save_and_load_regions, num_ranks, num_ranks, seeds, str(tmp_path)) == [[]] * num_ranks
    )
