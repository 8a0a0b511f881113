"""What each rank has of its own: restored under the same layout, skipped by name under another
one.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distckpt
from distckpt import PerRank, RngState
from tests.support.harness import launched


class Loader:
    """Counts what it has given."""

    def __init__(self, seen=-1):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def state(rank, axes, own):
    """What depends on both axes, on the data parallel one, and on the number of ranks."""
    loader = Loader(own) if own is not None else Loader()
    value = PerRank(torch.tensor(-1 if own is None else own), axes)
    return {"value": value, "loader": PerRank(loader, {"dp": axes["dp"]}), "rng": RngState()}


def save_and_load(rank, path):
    """Save under TP2 x DP1, and load under this, under PP2 x DP1, and under TP1 x DP2."""
    tp = {"tp": (rank, 2), "dp": (0, 1)}
    torch.manual_seed(rank)
    distckpt.save(state(rank, tp, rank), path)
    drawn, found = torch.rand(1), []
    for axes in (tp, {"pp": (rank, 2), "dp": (0, 1)}, {"tp": (0, 1), "dp": (rank, 2)}):
        given = state(rank, axes, None)
        loaded = distckpt.load(given, path)
        assert loaded["loader"] is given["loader"]
        found.append(
            (
                int(loaded["value"].value),
                loaded["loader"].value.seen,
                torch.equal(torch.rand(1), drawn),
            )
        )
    return found


def test_values_of_ranks_return_to_the_same_places_of_the_grid(tmp_path):
    with launched(save_and_load, 2, str(tmp_path / "c")) as launch:
        outcomes = launch.outcomes()
    for rank, outcome in enumerate(outcomes):
        # Both ranks are at one place of the data parallel axis, where rank 0 has the main replica.
        assert outcome.value == [(rank, 0, True), (-1, 0, True), (-1, -1, True)]
    assert outcomes[1].warnings_logged == []
    named = [text.split()[1] for text in outcomes[0].warnings_logged]
    assert named == ["'value'", "'value'", "'loader'"]


def load_on_mesh(rank, path):
    """Save on a mesh of one axis, and load on one of two: the number of ranks is the same."""
    for shape in ((2,), (1, 2)):
        mesh = init_device_mesh("cpu", shape)
        model = torch.nn.Linear(4, 4, bias=False)
        placements = [Shard(axis) for axis in range(len(shape))]
        model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
        if shape == (2,):
            distckpt.save({"model": model, "rng": RngState()}, path)
            torch.manual_seed(7)
    before = torch.get_rng_state()
    distckpt.load({"model": model, "rng": RngState()}, path)
    return torch.equal(before, torch.get_rng_state())


def test_random_numbers_of_another_mesh_are_not_restored(tmp_path):
    with launched(load_on_mesh, 2, str(tmp_path / "c")) as launch:
        outcomes = launch.outcomes()
    assert [outcome.value for outcome in outcomes] == [True, True]
    (warning,) = outcomes[0].warnings_logged
    assert "'rng' is not restored" in warning
