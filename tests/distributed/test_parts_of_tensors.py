"""Plain tensors that say which parts of a global tensor they have, as torch's
`CheckpointableTensor` does. The oracle is the global tensor, and torch where it has the class.
"""

from __future__ import annotations

import itertools
import random
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp

import distckpt
import distckpt.dcp
from distckpt import InvalidShardingError
from tests.support.harness import run

GLOBAL = torch.arange(48.0).view(8, 6)
PADDING = -9.0


def cut(rng, num_ranks):
    """Cut the global tensor into parts along both axes; return those of each rank."""
    rows = sorted({0, 8, *rng.sample(range(1, 8), rng.randint(0, 3))})
    columns = sorted({0, 6, *rng.sample(range(1, 6), rng.randint(0, 2))})
    parts = [
        ((top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    rng.shuffle(parts)
    owners = [rng.randrange(num_ranks) for _ in parts]
    if num_ranks > 1 and rng.random() < 0.5:
        # A part that two ranks have is stored once.
        parts, owners = [*parts, parts[0]], [*owners, (owners[0] + 1) % num_ranks]
    return [
        [part for part, owner in zip(parts, owners, strict=True) if owner == rank]
        for rank in range(num_ranks)
    ]


def held(rng, parts):
    """Put parts of the global tensor below each other into a tensor, with elements between."""
    height = sum(shape[0] + rng.randint(0, 1) for _, shape in parts) + 1
    tensor = torch.full((height + 2, 7), PADDING)
    starts, row = [], 0
    for offset, shape in parts:
        starts.append((row, rng.randint(0, 7 - shape[1])))
        row += shape[0]
        view_of(tensor, starts[-1], shape).copy_(view_of(GLOBAL, offset, shape))
    return with_parts(
        tensor, [offset for offset, _ in parts], starts, [shape for _, shape in parts]
    )


def with_parts(tensor, offsets, starts, shapes):
    tensor.global_shape = tuple(GLOBAL.shape)
    tensor.global_offsets, tensor.local_offsets = tuple(offsets), tuple(starts)
    tensor.local_sizes = tuple(shapes)
    return tensor


def view_of(tensor, offset, shape):
    return tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]


def blank(tensor):
    places = tensor.global_offsets, tensor.local_offsets, tensor.local_sizes
    return with_parts(torch.full_like(tensor, PADDING), *places)


def model_with(tensor):
    model = torch.nn.Module()
    places = tensor.global_offsets, tensor.local_offsets, tensor.local_sizes
    model.w = with_parts(torch.nn.Parameter(tensor.clone()), *places)
    return model


def is_loaded_by_all_doors(rank, num_ranks, seed, folder):
    """Save under one division, load under another one."""
    both = random.Random(seed)
    saved, other = cut(both, num_ranks)[rank], cut(both, num_ranks)[rank]
    rng = random.Random(f"{seed} {rank}")
    mine, wanted = held(rng, saved), held(rng, other)
    found = {}

    distckpt.save({"deep": {"w": mine}, "step": 3}, f"{folder}/values")
    state = {"deep": {"w": blank(wanted)}, "step": 0}
    distckpt.load(state, f"{folder}/values")
    found["values"] = state["deep"]["w"]

    distckpt.save({"model": model_with(mine)}, f"{folder}/model")
    model = model_with(blank(wanted))
    distckpt.load({"model": model}, f"{folder}/model")
    found["model"] = model.w.detach()

    distckpt.dcp.save({"w": mine}, checkpoint_id=f"{folder}/dcp")
    found["dcp"] = blank(wanted)
    distckpt.dcp.load({"w": found["dcp"]}, checkpoint_id=f"{folder}/dcp")

    found["redistribute"] = blank(wanted)
    distckpt.redistribute({"w": mine}, {"w": found["redistribute"]})

    if hasattr(torch_dcp, "CheckpointableTensor"):
        torch_dcp.save({"w": mine}, checkpoint_id=f"{folder}/torch")
        found["torch"] = blank(wanted)
        distckpt.load({"w": found["torch"]}, f"{folder}/torch")
    dist.barrier()
    shapes = {
        name: distckpt.open(f"{folder}/{name}").read_tensors()
        for name in ("values", "model", "dcp")
    }
    whole = [tensor for tensors in shapes.values() for tensor in tensors.values()]
    return {
        "whole": all(torch.equal(tensor, GLOBAL) for tensor in whole) and len(whole) == 3,
        **{name: torch.equal(tensor, wanted) for name, tensor in found.items()},
    }


def all_seeds(rank, num_ranks, seeds, folder):
    return [is_loaded_by_all_doors(rank, num_ranks, seed, f"{folder}/{seed}") for seed in seeds]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parts_of_any_division_are_stored_and_loaded_under_any_other(num_ranks):
    with tempfile.TemporaryDirectory() as folder:
        for found in run(all_seeds, num_ranks, num_ranks, range(6), folder):
            for seed, doors in enumerate(found):
                assert all(doors.values()), (seed, doors)


def test_the_optimizer_of_such_a_parameter_resumes(tmp_path):
    rng = random.Random(1)
    tensor = held(rng, cut(rng, 1)[0])

    def trained(steps):
        model = model_with(tensor)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            (model.w**2).sum().backward()
            adam.step()
            adam.zero_grad()
        return model, adam

    model, adam = trained(2)
    distckpt.save({"model": model, "optimizer": adam}, tmp_path / "saved")
    fresh, other = trained(0)
    distckpt.load({"model": fresh, "optimizer": other}, tmp_path / "saved")
    moments, expected = other.state[fresh.w]["exp_avg"], adam.state[model.w]["exp_avg"]
    beside = torch.ones(moments.shape, dtype=torch.bool)
    for start, shape in zip(tensor.local_offsets, tensor.local_sizes, strict=True):
        view_of(beside, start, shape).fill_(False)
        assert torch.equal(view_of(moments, start, shape), view_of(expected, start, shape))
        assert torch.equal(view_of(fresh.w, start, shape), view_of(model.w, start, shape))
    assert not moments[beside].any(), "what is not loaded is not left to chance"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_offsets", ((0, 0), (4, 0))),
        ("global_offsets", ((0,),)),
        ("global_offsets", ((6, 0),)),
        ("local_sizes", ((5, 6),)),
        ("local_offsets", ((-1, 0),)),
        ("global_shape", (8,)),
    ],
)
def test_attributes_that_contradict_one_another_are_refused_by_name(tmp_path, name, value):
    tensor = with_parts(torch.zeros(4, 6), [(0, 0)], [(0, 0)], [(4, 6)])
    setattr(tensor, name, value)
    with pytest.raises(InvalidShardingError, match=r"'part\.w'.*contradict"):
        distckpt.save({"part": {"w": tensor}}, tmp_path / "saved")
