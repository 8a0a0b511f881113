"""What each rank has of its own: restored under the same layout, skipped by name under another
one.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distckpt
from distckpt import PerRank, RngState
from tests.support.harness import launched, run


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


# --- Another number of ranks ----------------------------------------------------------------------


class Stream(Loader):
    """Counts what it has given to this rank."""

    def __iter__(self):
        return iter(())


def own_states(seed, position, place):
    """States of a rank by name: a generator, streams, and plain values, some for all ranks."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return {
        "rng": RngState(),
        "stream": Stream(position),
        "place": PerRank(Stream(place), {"dp": (place, 3)} if place >= 0 else None),
        "value": PerRank(torch.tensor([position, 7])),
        "declared": PerRank(Stream(place), {"all": (0, 1)}),
    }


def save_own_states(rank, path, is_shared):
    """Save states that ranks share, or that each has of its own."""
    own = 0 if is_shared else rank
    state = own_states(5 + own, 40 + own, own)
    state["place"] = PerRank(Stream(own))
    distckpt.save(state, path)
    return torch.rand(1).item()


def load_own_states(rank, path):
    """Load them on this number of ranks; return what came back, and a number that is drawn."""
    state = own_states(99, -1, -1)
    distckpt.load(state, path, strict="raise")
    names = ("stream", "place", "declared")
    seen = [getattr(state[name], "value", state[name]).seen for name in names]
    return seen, state["value"].value[0].item(), torch.rand(1).item()


def loaded_by(num_ranks, path):
    with launched(load_own_states, num_ranks, path) as launch:
        return launch.outcomes()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_was_equal_on_all_ranks_is_restored_on_any_number_of_ranks(tmp_path, num_ranks):
    path = str(tmp_path / "c")
    drawn = run(save_own_states, 2, path, True)
    first, *others = loaded_by(num_ranks, path)
    for outcome in (first, *others):
        assert outcome.value == ([40, 0, 0], 40, drawn[0])
    # Streams may divide their data among the ranks, whose counts are equal then.
    named = ["stream", "place"] if num_ranks != 2 else []
    assert sorted(text.split("'")[1] for text in first.warnings_logged) == sorted(named)
    assert all("some are repeated or skipped" in text for text in first.warnings_logged)
    assert [outcome.warnings_logged for outcome in others] == [[]] * len(others)


def test_what_differed_between_ranks_is_named_by_its_kind(tmp_path):
    path = str(tmp_path / "c")
    drawn = run(save_own_states, 2, path, False)
    for rank, outcome in enumerate(loaded_by(2, path)):
        assert outcome.value == ([40 + rank, rank, 0], 40 + rank, drawn[rank])
    first, *others = loaded_by(3, path)
    for outcome in (first, *others):
        assert outcome.value[:2] == ([-1, -1, 0], -1)
    kinds = {text.split("'")[1]: text for text in first.warnings_logged}
    assert kinds.keys() == {"rng", "stream", "place", "value"}
    assert "random number generators go on from where they are" in kinds["rng"]
    assert "The Stream begins with its first element" in kinds["stream"]
    assert "The Stream begins with its first element" in kinds["place"]
    assert "It keeps its value." in kinds["value"]
    assert [outcome.warnings_logged for outcome in others] == [[], []]


def test_the_state_of_one_rank_is_loaded_by_several_that_declare_it_the_same(tmp_path):
    path = str(tmp_path / "c")
    distckpt.save({"stream": Stream(8), "other": Stream(9)}, path)
    for outcome in run(load_one_state, 2, path):
        assert outcome == (8, -1)


def load_one_state(rank, path):
    stream, other = Stream(), Stream()
    distckpt.load({"stream": PerRank(stream, {"all": (0, 1)}), "other": other}, path)
    return stream.seen, other.seen
