"""Saving the same structure again: nothing of it is exchanged, and what is written is what the
tensors hold now.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import InvalidShardingError, ShardedObject, ShardedTensor
from tests.support.harness import error_of, run

NUM_RANKS = 3
ROWS = 4


class Traffic:
    """Counts the bytes of tensors that this rank hands to torch.distributed."""

    def __init__(self, monkeypatch):
        self.num_bytes = 0
        for name in ("send", "recv", "broadcast", "all_reduce", "all_gather"):
            monkeypatch.setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, function):
        def call(*args, **kwargs):
            for argument in args:
                tensors = argument if isinstance(argument, list) else [argument]
                self.num_bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            return function(*args, **kwargs)

        return call

    def of(self, function, *args, **kwargs):
        before = self.num_bytes
        return function(*args, **kwargs), self.num_bytes - before


def saved(state, path, **options):
    """Save, and return the report."""
    reports = []
    returned = distckpt.save(state, path, on_report=reports.append, **options)
    assert reports == [returned]
    return returned


def state_with_copies(rank, num_tensors, value, rows=ROWS):
    state = {"step": value, "rng": ShardedObject("rng", "x" * value, (NUM_RANKS,), (rank,))}
    for i in range(num_tensors):
        data = torch.full((rows, 8), float(100 * value + i))
        state[f"t{i}"] = ShardedTensor.from_rank_offsets(f"t{i}", data, (0, rank, NUM_RANKS))
        copied = torch.full((rows, 3), float(value))
        state[f"c{i}"] = ShardedTensor.from_rank_offsets(f"c{i}", copied, replica_id=rank)
    return state


def check(path, num_tensors, value, rows=ROWS):
    """Compare a whole checkpoint, read by one process, with what was to be saved."""
    loaded = distckpt.open(path).read_tensors()
    assert len(loaded) == 2 * num_tensors
    for i in range(num_tensors):
        np.testing.assert_array_equal(
            loaded[f"t{i}"].numpy(), np.full((rows * NUM_RANKS, 8), 100.0 * value + i)
        )
        np.testing.assert_array_equal(loaded[f"c{i}"].numpy(), np.full((rows, 3), float(value)))
    assert distckpt.open(path).common_state["step"] == value


def save_again_and_again(rank, folder):
    """Return for each number of tensors the traffic of a first and of later saves."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        traffic = Traffic(monkeypatch)
        seen = {}
        for num_tensors in (5, 200):
            seen[num_tensors] = []
            for value in (1, 2, 30):
                state = state_with_copies(rank, num_tensors, value)
                path = f"{folder}/{num_tensors}_{value}"
                report, num_bytes = traffic.of(saved, state, path)
                assert report.plan_reused == (value > 1)
                seen[num_tensors].append(num_bytes)
    return seen


def test_a_known_structure_is_not_exchanged_again(tmp_path):
    for seen in run(save_again_and_again, NUM_RANKS, str(tmp_path)):
        first, *later = seen[200]
        # One checksum of 8 bytes for each chunk goes to rank 0, and what every save exchanges
        # whatever it holds.
        per_tensor = [
            (many - few) / (2 * 195) for few, many in zip(seen[5][1:], later, strict=True)
        ]
        assert max(per_tensor) <= 8 * NUM_RANKS
        assert max(later) < first / 3
    for num_tensors in (5, 200):
        for value in (1, 2, 30):
            check(f"{tmp_path}/{num_tensors}_{value}", num_tensors, value)


def one_rank_changes(rank, folder):
    """A structure that changes on the last rank only is planned again by all; values are never
    kept.
    """
    reports = [saved(state_with_copies(rank, 3, 1), f"{folder}/1")]
    changed = state_with_copies(rank, 3, 2)
    if rank == NUM_RANKS - 1:
        changed["extra"] = ShardedTensor.from_rank_offsets("extra", torch.arange(5.0))
    reports.append(saved(changed, f"{folder}/2"))
    for value in (3, 4):
        reports.append(saved(state_with_copies(rank, 3, value), f"{folder}/{value}"))
    reports.append(saved(state_with_copies(rank, 3, 5, rows=7), f"{folder}/5"))
    moved = state_with_copies(rank, 3, 6)
    for shard in moved.values():
        if isinstance(shard, ShardedTensor):
            # The same values in other memory, with other strides.
            shard.data = shard.data.t().contiguous().t()
    reports.append(saved(moved, f"{folder}/6"))
    wrong = state_with_copies(rank, 3, 7)
    if rank == 1:
        wrong["t0"] = ShardedTensor.from_rank_offsets("t0", torch.zeros(ROWS, 8), (0, 0, NUM_RANKS))
    error = error_of(distckpt.save, wrong, f"{folder}/7")
    reports.append(saved(state_with_copies(rank, 3, 8), f"{folder}/8"))
    return [report.plan_reused for report in reports], error


def test_a_change_on_one_rank_makes_all_plan_again(tmp_path):
    for reused, error in run(one_rank_changes, NUM_RANKS, str(tmp_path)):
        assert reused == [False, False, False, True, False, True, True]
        assert isinstance(error, InvalidShardingError)
        assert "t0" in str(error)
    for value, rows in ((1, ROWS), (3, ROWS), (4, ROWS), (5, 7), (6, ROWS), (8, ROWS)):
        check(f"{tmp_path}/{value}", 3, value, rows)
    extra = distckpt.open(f"{tmp_path}/2").read_tensors()["extra"]
    np.testing.assert_array_equal(extra.numpy(), np.arange(5.0))


def stages_and_one_model(rank, folder):
    """Save pipeline stages, which ranks describe together, and a model that all have, by turns."""
    stage = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(4, 2)})
    whole = torch.nn.Linear(4, 2)
    reused = []
    for value in range(1, 7):
        model = stage if value % 3 else whole
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        reused.append(saved({"model": model}, f"{folder}/{value}").plan_reused)
    return reused


def test_stages_of_several_ranks_keep_their_plan_beside_another_model(tmp_path):
    for reused in run(stages_and_one_model, NUM_RANKS, str(tmp_path)):
        assert reused == [False, True, False, True, True, True]
    stages = {f"stage{rank}.{name}" for rank in range(NUM_RANKS) for name in ("weight", "bias")}
    for value in range(1, 7):
        tensors = distckpt.open(tmp_path / str(value)).read_tensors()
        assert tensors.keys() == (stages if value % 3 else {"weight", "bias"})
        assert all((tensor == value).all() for tensor in tensors.values())


def test_one_process_saves_what_tensors_hold_at_the_time(tmp_path):
    tensor = torch.zeros(6, 4)
    shard = ShardedTensor.from_rank_offsets("w", tensor)
    for step in range(3):
        tensor.fill_(step)
        assert saved({"w": shard, "step": step}, tmp_path / str(step)).plan_reused == (step > 0)
    shard.data = torch.full((6, 4), 9.0)
    distckpt.save({"w": shard}, tmp_path / "swapped")
    for name, value in (("0", 0), ("1", 1), ("2", 2), ("swapped", 9)):
        np.testing.assert_array_equal(
            distckpt.open(tmp_path / name).read_tensors()["w"].numpy(), np.full((6, 4), value)
        )


def test_tensors_that_become_tied_or_part_are_planned_again(tmp_path):
    first, second = torch.ones(4), torch.full((4,), 2.0)

    def save(name, one, other):
        state = {
            key: ShardedTensor.from_rank_offsets(key, data)
            for key, data in (("a", one), ("b", other))
        }
        return saved(state, tmp_path / name).plan_reused

    assert [
        save("apart", first, second),
        save("tied", first, first),
        save("parted", second, first),
    ] == [False] * 2 + [True]
    for name, values in (("apart", (1, 2)), ("tied", (1, 1)), ("parted", (2, 1))):
        loaded = distckpt.open(tmp_path / name).read_tensors()
        assert [loaded[key].tolist() for key in ("a", "b")] == [
            [float(value)] * 4 for value in values
        ]


def test_a_tensor_that_no_longer_fits_its_description_is_refused(tmp_path):
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 3))
    distckpt.save({"w": shard}, tmp_path / "good")
    for data in (torch.zeros(5, 4), torch.zeros(6, 4, dtype=torch.float64)):
        shard.data = data
        with pytest.raises(InvalidShardingError, match="'w'"):
            distckpt.save({"w": shard}, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_not_durable_and_with_progress(tmp_path):
    seen = []
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3_000_000.0)), "step": 3}
    report = saved(
        state,
        tmp_path / "c",
        durable=False,
        progress=lambda done, total: seen.append((done, total)),
        max_inflight_bytes=1,
    )
    assert seen == sorted(seen)
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert report.num_bytes > 12_000_000
    assert set(report.phases) == {"describe", "plan", "write", "commit"}
    assert f"{tmp_path}/c" in str(report)
    assert distckpt.load(state, tmp_path / "c")["step"] == 3
