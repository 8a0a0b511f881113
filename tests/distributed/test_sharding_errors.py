"""State dicts that contradict each other: the same error on every rank, nothing written, the group
as before.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

import distckpt
from distckpt import InvalidShardingError, LoadMismatchError, ShardedObject, ShardedTensor
from tests.support.harness import GROUP_TIMEOUT, error_of, launched, sum_over_ranks


def tensor(key, shape, *offsets, dtype=torch.float32, replica_id=0, value=0.0):
    data = torch.full(shape, value).to(dtype)
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica_id)


def two_main_replicas(rank):
    return {"w": tensor("w", (6, 4), replica_id=0 if rank in (1, 3) else rank + 1)}


def no_main_replica(rank):
    return {"w": tensor("w", (6, 4), replica_id=rank + 1)}


def hole(rank):
    return {} if rank == 2 else {"w": tensor("w", (6, 4), (0, rank, 4))}


def hole_of_copies(rank):
    return {"w": tensor("w", (6, 4), (0, rank, 4), replica_id=int(rank == 2))}


def overlapping_regions(rank):
    data = torch.zeros(7, 4)
    return {
        "w": ShardedTensor(
            "w", data, data.dtype, (7, 4), (27, 4), (rank * 6, 0) if rank < 3 else (20, 0), None
        )
    }


def other_dtype(rank):
    return {
        "w": tensor("w", (6, 4), (0, rank, 4), dtype=torch.bfloat16 if rank == 3 else torch.float32)
    }


def other_shape(rank):
    return {"w": tensor("w", (6, 5 if rank == 1 else 4), (0, rank, 4))}


def other_number_of_axes(rank):
    return {"w": tensor("w", (6, 4, 1) if rank == 1 else (6, 4), (0, rank, 4))}


def experts_counted_from_0_on_every_rank(rank):
    return {
        f"local.{i}": tensor(f"experts.{i}.weight", (6, 4), value=float(rank * 2 + i))
        for i in range(2)
    }


def tensor_here_object_there(rank):
    return {
        "w": ShardedObject("w", 1, (4,), (rank,))
        if rank == 2
        else tensor("w", (6, 4), (0, rank, 4))
    }


def tensor_and_object_in_one_dict(rank):
    return {
        "w": tensor("state", (6, 4), (0, rank, 4)),
        "o": ShardedObject("state", 1, (4,), (rank,)),
    }


def object_twice(rank):
    return {"rng": ShardedObject("rng", rank, (3,), (min(rank, 2),))}


def object_missing(rank):
    return {"rng": ShardedObject("rng", rank, (5,), (rank,))}


def other_object_grid(rank):
    return {"rng": ShardedObject("rng", rank, (4 if rank else 5,), (rank,))}


def reserved_key(rank):
    return {"w": ShardedObject("distckpt.common_state", rank, (4,), (rank,))}


CASES = {
    two_main_replicas: ["key 'w'", "2 main replicas", "rank 1", "rank 3", "replica_id"],
    no_main_replica: ["key 'w'", "no main replica", "rank 0", "replica_id 0"],
    hole: ["key 'w'", "no rank holds element (12, 0)"],
    hole_of_copies: ["key 'w'", "no main replica holds element (12, 0)", "rank 2"],
    overlapping_regions: [
        "key 'w'",
        "2 main replicas hold the same element (6, 0)",
        "rank 0",
        "rank 1",
    ],
    other_dtype: ["Key 'w'", "F32", "BF16", "rank 0", "rank 3"],
    other_shape: ["Key 'w'", "(24, 4)", "(24, 5)", "rank 0", "rank 1"],
    other_number_of_axes: ["Key 'w'", "(24, 4)", "(24, 4, 1)", "rank 0", "rank 1"],
    experts_counted_from_0_on_every_rank: [
        "'experts.0.weight'",
        "'experts.1.weight'",
        "rank 0",
        "rank 1",
        "experts",
    ],
    tensor_here_object_there: ["Key 'w'", "F32", "object", "rank 0", "rank 2"],
    tensor_and_object_in_one_dict: ["Key 'state'", "F32", "object"],
    object_twice: ["key 'rng'", "rank 2", "rank 3"],
    object_missing: ["key 'rng'", "no rank holds element (4,)"],
    other_object_grid: ["Key 'rng'", "(5,)", "(4,)", "rank 0", "rank 1"],
    reserved_key: ["distckpt.common_state", "reserved"],
}


def good_state(rank, *, blank=False):
    return {"good": tensor("good", (6, 4), (0, rank, 4), value=-1.0 if blank else float(rank))}


def save_wrongly_then_rightly(rank, make_state, path):
    """Return the error of the wrong save, how long it took, what it left, and whether all goes well
    after it.
    """
    started = time.monotonic()
    error = error_of(distckpt.save, make_state(rank), path)
    seconds = time.monotonic() - started
    total = sum_over_ranks(rank)
    left = os.listdir(os.path.dirname(path))
    sum_over_ranks(0)
    distckpt.save(good_state(rank), path)
    loaded = distckpt.load(good_state(rank, blank=True), path)["good"]
    return error, seconds, left, total == 6 and bool((loaded == rank).all())


@pytest.mark.parametrize("make_state", CASES, ids=lambda case: case.__name__)
def test_every_rank_raises_the_same_error_and_nothing_is_written(run, make_state, tmp_path):
    results = run(save_wrongly_then_rightly, 4, make_state, str(tmp_path / "checkpoint"))
    errors, seconds, left, fine = zip(*results, strict=True)
    assert all(isinstance(error, InvalidShardingError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    for words in CASES[make_state]:
        assert words in str(errors[0])
    assert max(seconds) < GROUP_TIMEOUT / 2
    assert left == ([], [], [], [])
    assert all(fine)


def save_with_gaps(rank, path):
    distckpt.save(hole(rank), path, validate_access_integrity=False)
    request = {"w": tensor("w", (6, 4), (0, rank, 4), value=1.0)}
    return error_of(distckpt.load, request, path), sum_over_ranks(rank)


def test_gaps_that_were_saved_on_request_are_an_error_for_who_asks_for_them(run, tmp_path):
    results = run(save_with_gaps, 4, str(tmp_path / "checkpoint"))
    for error, total in results:
        assert total == 6
        assert isinstance(error, distckpt.RankFailedError)
        assert list(error.failures) == [2]
        assert isinstance(error.failures[2], LoadMismatchError)
        assert "'w'" in str(error)
        assert "[12:18, 0:4]" in str(error)


def overlap_without_validation(rank, path):
    return error_of(distckpt.save, two_main_replicas(rank), path, validate_access_integrity=False)


def test_overlaps_are_refused_even_without_validation(run, tmp_path):
    errors = run(overlap_without_validation, 4, str(tmp_path / "checkpoint"))
    assert all(isinstance(error, InvalidShardingError) for error in errors)
    assert list(tmp_path.iterdir()) == []


def differing_replicas(rank, key="rng.state"):
    return {
        "w": tensor("w", (50, 4), (0, rank % 2, 2), replica_id=rank // 2),
        "r": tensor(key, (100,), replica_id=rank, value=7.0 if rank == 2 else 1.0),
    }


def save_differing_replicas(rank, path):
    errors = [
        error_of(distckpt.save, differing_replicas(rank), path, validate_replicas=how)
        for how in (None, True)
    ]
    total = sum_over_ranks(rank)
    left = os.listdir(os.path.dirname(path))
    sum_over_ranks(0)
    distckpt.save(differing_replicas(rank), path, validate_replicas=False)
    return errors, total, left


def test_validate_replicas_names_the_ranks_and_the_key(run, tmp_path):
    results = run(save_differing_replicas, 4, str(tmp_path / "checkpoint"))
    errors, totals, left = zip(*results, strict=True)
    errors = [error for both in errors for error in both]
    assert all(isinstance(error, InvalidShardingError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    for words in (
        "'rng.state'",
        "rank 0",
        "rank 2",
        "DistributedDataParallel",
        "validate_replicas=False",
    ):
        assert words in str(errors[0])
    assert "'w'" not in str(errors[0])
    assert "rank 1" not in str(errors[0])
    assert totals == (6, 6, 6, 6)
    assert left == ([], [], [], [])
    # Not compared, it was saved.
    assert distckpt.open(str(tmp_path / "checkpoint")).read_tensors()["w"].shape == (100, 4)


def save_equal_replicas(rank, path):
    """Equal contents count as equal whatever their strides; NaN equals itself."""
    full = torch.arange(60.0).reshape(6, 10)
    full[0, 0] = float("nan")
    data = full.clone() if rank % 2 else full.T.contiguous().T
    state = {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=rank)}
    state["flat"] = ShardedTensor.from_rank_offsets_flat(
        "flat", full.flatten()[3:57], (6, 10), flattened_range=slice(3, 57), replica_id=rank
    )
    for how in (None, True):
        distckpt.save(
            state, path, validate_replicas=how, validate_access_integrity=False, overwrite=True
        )


def drifted_state(rank, drift):
    """Norms that are replicas, and differ by `drift` on rank 1; a weight that is none of them."""
    state = {f"norms.{i}": torch.linspace(1, 2, 4096) for i in range(6)}
    if rank == 1:
        state["norms.3"] = drift(state["norms.3"])
    shards = {
        key: ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
        for key, data in state.items()
    }
    return {**shards, "w": tensor("w", (6, 4), (0, rank, 2), value=float(rank))}


def save_drifted(rank, path, drifts, unsupported=None):
    """Save the state of the same structure once for each drift; return what was refused."""
    reused = []
    errors = [
        error_of(
            distckpt.save,
            drifted_state(rank, drift),
            f"{path}_{number}",
            unsupported=unsupported,
            on_report=lambda report: reused.append(report.plan_reused),
        )
        for number, drift in enumerate(drifts)
    ]
    return errors, reused


def one_unit_apart(data):
    data[0] = torch.nextafter(data[0], torch.tensor(9.0))
    return data


def slightly_larger(data):
    return data * (1 + 1e-6)


def turned_around(data):
    return -data


def unchanged(data):
    return data


def as_bytes(path):
    return distckpt.open(path).read_tensors()["norms.3"].numpy().tobytes()


@pytest.mark.parametrize(
    ("drift", "absolute", "relative"),
    [(one_unit_apart, "1.19e-07", "5.96e-08"), (slightly_larger, "1.91e-06", "9.54e-07")],
)
def test_replicas_that_drift_are_stored_whole_and_named(tmp_path, drift, absolute, relative):
    path = str(tmp_path / "saved")
    with launched(save_drifted, 2, path, [drift, drift, unchanged]) as launch:
        first, second = launch.outcomes()
    # A plan for replicas that differ is not kept: each save is judged by what it holds.
    assert first.value == second.value == ([None] * 3, [False, False, False])
    assert second.warnings_logged == []
    assert len(first.warnings_logged) == 2
    for warning in first.warnings_logged:
        for words in ("'norms.3' on rank 1", absolute, relative, "validate_replicas=True"):
            assert words in warning
    expected = torch.linspace(1, 2, 4096).numpy().tobytes()
    assert [as_bytes(f"{path}_{number}") for number in range(3)] == [expected] * 3


def test_replicas_with_nothing_in_common_are_refused_by_any_save(tmp_path):
    path = str(tmp_path / "saved")
    with launched(save_drifted, 2, path, [turned_around, unchanged, turned_around]) as launch:
        first, second = launch.outcomes()
    errors, reused = first.value
    for refused in (errors[0], errors[2]):
        assert isinstance(refused, InvalidShardingError)
        assert "key 'norms.3': region [0:4096] differs between rank 0 and rank 1" in str(refused)
    assert errors[1] is None
    assert reused == [False]
    assert str(second.value[0][0]) == str(errors[0])
    assert all("failed during 'compare replicas'" in text for text in first.warnings_logged)


def test_replicas_with_nothing_in_common_are_stored_whole_where_that_is_allowed(tmp_path):
    path = str(tmp_path / "saved")
    drifts = [unchanged, turned_around, turned_around]
    with launched(save_drifted, 2, path, drifts, "warn") as launch:
        first, _ = launch.outcomes()
    assert first.value == ([None] * 3, [False, False, False])
    assert len(first.warnings_logged) == 2
    for warning in first.warnings_logged:
        assert "'norms.3' on rank 1 differ from their main replicas by up to 4 (2 of" in warning
    expected = torch.linspace(1, 2, 4096).numpy().tobytes()
    assert [as_bytes(f"{path}_{number}") for number in range(3)] == [expected] * 3


def save_drift_of_every_dtype(rank, path):
    """Each tensor has one element more or less on rank 2."""
    state = {}
    for number, dtype in enumerate(DTYPES):
        data = torch.arange(1, 65).remainder(2).to(dtype)
        data[7] = 0 if rank == 2 else 1
        if dtype.is_floating_point and dtype.itemsize > 1:
            data[9] = float("nan")
        key = str(dtype)
        state[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=(rank + 1) % 3)
        state[f"l{number}"] = tensor(f"l{number}", (6, 4), (0, rank, 3))
    return str(error_of(distckpt.save, state, path, validate_replicas=True)), str(
        error_of(distckpt.save, state, path)
    )


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def test_drift_in_every_dtype_is_that_of_the_main_replica(tmp_path):
    path = str(tmp_path / "saved")
    with launched(save_drift_of_every_dtype, 3, path) as launch:
        first, *_ = outcomes = launch.outcomes()
    for outcome in outcomes:
        refused, saved = outcome.value
        assert "differs between rank 2 and rank 0" in refused
        assert saved == "None"
    *_, warning = first.warnings_logged
    assert "on rank 0, 1 differ" in warning
    assert "up to 1 (1 of" in warning
    stored = distckpt.open(path).read_tensors()
    assert [float(stored[str(dtype)].to(torch.complex64)[7].real) for dtype in DTYPES] == [0.0] * 7


def test_validate_replicas_accepts_equal_ones(run, tmp_path):
    run(save_equal_replicas, 3, str(tmp_path / "checkpoint"))
    target = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 10))
    loaded = distckpt.load({"w": target}, str(tmp_path / "checkpoint"))["w"]
    assert loaded.flatten()[1:].tolist() == list(range(1, 60))


def load_wrongly(rank, path):
    distckpt.save(good_state(rank), path)
    wrong = tensor("good", (6, 4), (0, min(rank, 2), 4))
    error = error_of(distckpt.load, {"good": wrong}, path)
    total = sum_over_ranks(rank)
    unchecked = distckpt.megatron.load(
        {"good": tensor("good", (6, 4), (0, min(rank, 2), 4))}, path, None, False
    )["good"]
    return error, total, bool((unchecked == min(rank, 2)).all())


def test_a_request_with_wrong_offsets_is_refused_on_every_rank(run, tmp_path):
    results = run(load_wrongly, 4, str(tmp_path / "checkpoint"))
    errors, totals, read_unchecked = zip(*results, strict=True)
    assert all(isinstance(error, InvalidShardingError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    for words in ("'good'", "rank 2", "rank 3"):
        assert words in str(errors[0])
    assert "written" not in str(errors[0]), "a load writes nothing"
    assert totals == (6, 6, 6, 6)
    assert all(read_unchecked), "validate_access_integrity=False reads what every rank asks for"


NUM_LAYERS = 100


def many_layers(rank, make):
    return {
        f"{i}.{part}": make(rank, f"layers.{i}.{part}")
        for i in range(NUM_LAYERS)
        for part in ("attn", "mlp", "norm")
    }


def copies_of_which_one_differs(rank, key):
    """Ranks 0 and 1, and 2 and 3, hold the same half; that of rank 3 is another."""
    value = 7.0 if rank == 3 and "mlp" in key else 1.0
    return tensor(key, (2, 3), (0, rank // 2, 2), replica_id=rank % 2, value=value)


def holes_in_some(rank, key):
    """Rank 2 calls its part of some tensors a copy."""
    return tensor(key, (2, 3), (0, rank, 4), replica_id=int(rank == 2 and "attn" in key))


def dtypes_of_one_rank(rank, key):
    other = rank == 1 and "norm" in key
    return tensor(key, (2, 3), (0, rank, 4), dtype=torch.float64 if other else torch.float32)


def save_many_layers(rank, make, path):
    return str(error_of(distckpt.save, many_layers(rank, make), path, validate_replicas=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            copies_of_which_one_differs,
            [
                "'layers.{0..99}.mlp' (100 keys), such as key 'layers.0.mlp'",
                "differs between rank 2 and rank 3",
            ],
        ),
        (
            holes_in_some,
            [
                "'layers.{0..99}.attn' (100 keys), such as key 'layers.0.attn'",
                "no main replica",
                "on rank 2",
            ],
        ),
        (dtypes_of_one_rank, ["'layers.{0..99}.norm' (100 keys)", "rank 0", "rank 1"]),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_hundreds_of_keys_are_one_line_with_the_ranks_that_disagree(run, make, words, tmp_path):
    messages = run(save_many_layers, 4, make, str(tmp_path / "checkpoint"))
    assert set(messages) == {messages[0]}
    assert all(word in messages[0] for word in words), messages[0]
    assert len(messages[0]) < 700
    assert os.listdir(tmp_path) == []
