"""Keys that only the checkpoint or only some ranks' requests have, and objects whose number has
changed.
"""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import (
    CheckpointingException,
    LoadMismatchError,
    RankFailedError,
    ShardedObject,
    ShardedTensor,
)
from distckpt.rules import Rename
from tests.support.harness import error_of, launched, run, sum_over_ranks


def whole(key, rank, value=0.0):
    return ShardedTensor.from_rank_offsets(key, torch.full((4,), value), replica_id=rank)


def save_keys(rank, path):
    distckpt.save(
        {key: whole(key, rank, 7.0) for key in ("a", "b", "layers.0.w", "layers.1.w")}, path
    )


def request_of(rank):
    """Rank 1 alone asks for keys that are not stored; no rank asks for `layers.1.w`; rank 2 alone
    for `b`.
    """
    asked = {"a": whole("a", rank), "layers.0.w": whole("layers.0.w", rank)}
    if rank == 1:
        asked |= {name: whole(name, 0) for name in ("layers.7.w", "aa")}
    if rank == 2:
        asked["b"] = whole("b", 0)
    return asked


def load_strictly(rank, path, strict):
    error = None
    result = None
    try:
        result = distckpt.megatron.load(request_of(rank), path, strict=strict)
    except CheckpointingException as caught:
        error = caught
    total = sum_over_ranks(rank)
    again = distckpt.load({"a": whole("a", rank)}, path)
    return result, error, total == 3 and bool((again["a"] == 7.0).all())


@pytest.fixture(scope="module")
def stored(run, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("strict") / "checkpoint")
    run(save_keys, 3, path)
    return path


STORED_KEYS = [{"a", "layers.0.w"}, {"a", "layers.0.w"}, {"a", "b", "layers.0.w"}]


@pytest.mark.parametrize("strict", ["raise_unexpected", "raise_all"])
def test_raising_modes_raise_the_same_error_on_every_rank(run, strict, stored):
    results = run(load_strictly, 3, stored, strict)
    _, errors, fine = zip(*results, strict=True)
    assert all(isinstance(error, LoadMismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert error.unexpected == {"layers.7.w", "aa"}
        assert error.missing == ({"layers.1.w"} if strict == "raise_all" else set())
        assert "layers.7.w" in str(error)
        assert ("layers.1.w" in str(error)) == (strict == "raise_all")
    assert all(fine)


@pytest.mark.parametrize("strict", ["return_all", "return_unexpected"])
def test_returning_modes(run, strict, stored):
    results = run(load_strictly, 3, stored, strict)
    for rank, (result, error, fine) in enumerate(results):
        assert error is None
        assert fine
        loaded, missing, unexpected = result
        assert set(loaded) == STORED_KEYS[rank]
        assert all(bool((tensor == 7.0).all()) for tensor in loaded.values())
        assert missing == ({"layers.1.w"} if strict == "return_all" else set()), (
            "the same on all ranks"
        )
        assert unexpected == ({"layers.7.w", "aa"} if rank == 1 else set()), "those of this rank"


@pytest.mark.parametrize("strict", ["log_all", "log_unexpected", "ignore_all"])
def test_quiet_modes(strict, stored):
    with launched(load_strictly, 3, stored, strict) as launch:
        outcomes = launch.outcomes()
    for rank, outcome in enumerate(outcomes):
        loaded, error, fine = outcome.value
        assert error is None
        assert fine
        assert set(loaded) == STORED_KEYS[rank]
        said = " ".join(outcome.warnings_logged)
        assert ("layers.7.w" in said) == (strict != "ignore_all"), "on every rank, as in Megatron"
        assert ("layers.1.w" in said) == (strict == "log_all")


def test_the_default_mode_fails_on_every_rank(run, stored):
    results = run(load_strictly, 3, stored, "assume_ok_unexpected")
    for _, error, fine in results:
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert isinstance(error.failures[1], LoadMismatchError)
        assert error.failures[1].unexpected == {"layers.7.w", "aa"}
        assert "layers.7.w" in str(error)
        assert fine


def save_objects(rank, path, num_ranks):
    distckpt.save(
        {
            "rng": ShardedObject("rng_state", {"seed": rank}, (num_ranks,), (rank,)),
            "w": whole("w", rank),
        },
        path,
    )


def load_objects(rank, path, num_ranks, strict):
    request = {
        "rng": ShardedObject("rng_state", None, (num_ranks,), (rank,)),
        "w": whole("w", rank),
    }
    error = error_of(distckpt.megatron.load, request, path, strict=strict)
    total = sum_over_ranks(1)
    del request["rng"]
    return error, total, bool((distckpt.load(request, path)["w"] == 0).all())


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "return_all", "ignore_all"])
@pytest.mark.parametrize(("saved", "wanted"), [(4, 2), (2, 4), (1, 3)])
def test_per_rank_objects_whose_number_changed_are_an_error_that_says_so(
    run, saved, wanted, strict, tmp_path
):
    path = str(tmp_path / "checkpoint")
    run(save_objects, saved, path, saved)
    results = run(load_objects, wanted, path, wanted, strict)
    for error, total, rest_loads in results:
        assert isinstance(error, CheckpointingException)
        for words in ("'rng_state'", f"({saved},)", f"({wanted},)", "objects cannot be resharded"):
            assert words in str(error)
        assert total == wanted
        assert rest_loads


def load_objects_alone(rank, path):
    return error_of(distckpt.load, {"rng": ShardedObject("rng_state", None, (1,), (rank,))}, path)


def load_every_part(rank, path):
    """What the error advises: load all stored parts, on a rank that has another place in the
    world.
    """
    del rank
    parts = {
        name: shard
        for name, shard in distckpt.megatron.serialization.load_sharded_metadata(path).items()
        if isinstance(shard, ShardedObject)
    }
    return distckpt.load(parts, path)


def test_all_parts_of_an_object_can_be_loaded_elsewhere(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_objects, 4, path, 4)
    (error,) = run(load_objects_alone, 1, path, backend=None)
    assert isinstance(error, LoadMismatchError)
    assert "(4,)" in str(error)
    assert "(1,)" in str(error)
    (parts,) = run(load_every_part, 1, path, backend=None)
    assert parts == {f"rng_state/shard_{i}_4": {"seed": i} for i in range(4)}


def load_objects_rotated(rank, path):
    """The grid is the same, but each rank asks for another rank's object, and for a second one."""
    cells = [(rank + 1) % 4, (rank + 2) % 4]
    request = {
        str(cell): ShardedObject("rng_state", None, (4,), (cell,), replica_id=i)
        for i, cell in enumerate(cells)
    }
    return distckpt.load(request, path)


def test_objects_go_to_whom_asks_for_them(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_objects, 4, path, 4)
    results = run(load_objects_rotated, 4, path)
    assert results == [
        {str(cell): {"seed": cell} for cell in ((r + 1) % 4, (r + 2) % 4)} for r in range(4)
    ]


def load_other_shape(rank, path):
    request = ShardedTensor.from_rank_offsets("a", torch.zeros(3), (0, rank, 3))
    other_dtype = ShardedTensor.from_rank_offsets(
        "a", torch.zeros(4, dtype=torch.bfloat16), replica_id=rank
    )
    return error_of(distckpt.load, {"a": request}, path), error_of(
        distckpt.load, {"a": other_dtype}, path
    )


def test_a_mismatch_that_all_ranks_see_alike_is_raised_as_it_is(run, stored):
    results = run(load_other_shape, 3, stored)
    for shape_error, dtype_error in results:
        assert isinstance(shape_error, LoadMismatchError)
        assert "'a'" in str(shape_error)
        assert "(4,)" in str(shape_error)
        assert "(9,)" in str(shape_error)
        assert isinstance(dtype_error, LoadMismatchError)
        assert "torch.float32" in str(dtype_error)
        assert "torch.bfloat16" in str(dtype_error)


def load_nothing_there(rank, folder):
    return error_of(distckpt.load, {"a": whole("a", rank)}, f"{folder}/absent"), sum_over_ranks(
        rank
    )


def test_a_checkpoint_that_is_not_there(run, tmp_path):
    for error, total in run(load_nothing_there, 3, str(tmp_path)):
        assert isinstance(error, distckpt.CheckpointNotFoundError)
        assert str(tmp_path / "absent") in str(error)
        assert total == 3


def load_through_rules(rank, path):
    """Each rank asks for another tensor, as the stages of a pipeline do."""
    name = ["first", "second"][rank]
    rules = [
        Rename("first", "a"),
        Rename("second", "b"),
        Rename("third.*", "layers.{0}.w"),
        Rename("fourth", "layers.1.w", optional=True),
    ]
    state = {name: whole(name, 0)}
    distckpt.load(state, path, rules=rules)
    return state[name].data.tolist()


def test_a_rule_without_a_tensor_on_any_rank_is_named(tmp_path):
    path = str(tmp_path / "checkpoint")
    run(save_keys, 3, path)
    with launched(load_through_rules, 2, path) as launch:
        first, second = launch.outcomes()
    assert (first.value, second.value) == ([7.0] * 4, [7.0] * 4)
    (warning,) = first.warnings_logged
    assert "Rename(pattern='third.*', to='layers.{0}.w') matches no tensor" in warning
    assert second.warnings_logged == []


def load_on_meta(rank, path, rules):
    """Only rank 1 has a part of which nothing is stored, as the last stage of a pipeline may."""
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False)})
        if rank == 1:
            model["head"] = torch.nn.Linear(2, 2, bias=False)
    strict = "complete" if rules else "report"
    error = error_of(
        distckpt.load, {"model": model}, path, rules=rules, strict=strict, materialize="cpu"
    )
    return error, all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("rules", [(), (Rename("a.weight", "a"),)], ids=["", "rules"])
def test_no_rank_is_left_with_memory_without_values(rules, tmp_path):
    path = str(tmp_path / "checkpoint")
    name = "a" if rules else "a.weight"
    distckpt.save({"w": ShardedTensor.from_rank_offsets(name, torch.ones(2, 2))}, path)
    for error, is_left in run(load_on_meta, 2, path, rules):
        assert isinstance(error, LoadMismatchError if not rules else CheckpointingException)
        assert "'head.weight'" in str(error)
        assert is_left
