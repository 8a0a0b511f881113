"""Managers with local directories of hosts: saves, losses of hosts, and restarts from what is left.

Hosts are imitated: ranks with different local directories are on different hosts.
"""

from __future__ import annotations

import json
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    LoadMismatchError,
    ShardedTensor,
)
from distckpt.manager._tiers import _survey
from distckpt.manager._tiers._survey import SpreadStep
from tests.support.disk import flip
from tests.support.harness import error_of, run
from tests.support.s3_server import keys_in, reached_at
from tests.support.tiers import (
    at_store,
    directories,
    files_of_step,
    load_newest,
    loaded,
    manager_of,
    saved,
    state_of,
    table,
)


@pytest.mark.parametrize(("num_ranks", "per_host"), [(4, 2), (2, 1), (1, 1)])
def test_the_newest_step_survives_the_loss_of_any_host(tmp_path, num_ranks, per_host):
    states = saved(tmp_path, 4, 2, [10, 20, 30], peers=1, upload_every=10)
    for state in states:
        assert [step["is_replicated"] for step in state.values()] == [True] * 3
        assert [step["is_uploaded"] for step in state.values()] == [True, False, False]
        assert {step["problem"] for step in state.values()} == {None}
    shutil.rmtree(tmp_path / "root" / "step_00000030")
    shutil.rmtree(tmp_path / f"host{num_ranks % 2}")
    assert loaded(tmp_path, num_ranks, per_host, peers=1) == 30


def test_files_of_a_lost_host_come_from_the_root(tmp_path):
    saved(tmp_path, 4, 2, [10])
    shutil.rmtree(tmp_path / "host0")
    assert loaded(tmp_path, 4, 2) == 10
    shutil.rmtree(tmp_path / "host1")
    assert loaded(tmp_path, 2, 1) == 10


def test_without_copies_a_lost_host_takes_its_steps_that_are_not_in_the_root(tmp_path):
    saved(tmp_path, 4, 2, [10, 20], upload_every=2)
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    shutil.rmtree(tmp_path / "host1")
    (result, *_) = run(load_newest, 2, 2, str(tmp_path), 2, {})
    step, _, skipped = result
    assert step == 10
    assert "the hosts that are left have" in skipped[20]


def test_steps_on_an_object_store_are_equal_to_saved_ones(tmp_path, server, bucket):
    root = f"{bucket}/run"
    with reached_at(server):
        states = saved(tmp_path, 4, 2, [10, 20], root=root, server=server, peers=1, keep_last=1)
        assert {state[20]["problem"] for state in states} == {None}
        assert distckpt.verify(f"{root}/step_00000020").is_whole
        assert not any(name.startswith("step_00000010") for name in keys_in(server, root))
        # Some files are on a host, the others in the store.
        for path in files_of_step(tmp_path, 0, 20)[::2]:
            path.unlink()
        shutil.rmtree(tmp_path / "host1")
        assert loaded(tmp_path, 2, 1, root=root, server=server) == 20
        shutil.rmtree(tmp_path / "host0")
        assert loaded(tmp_path, 3, 1, root=root, server=server) == 20


def save_with_optimizer(rank, num_ranks, base, settings):
    settings = {"keep_optimizer": 1, "keep_local": 3, **settings}
    with at_store(settings), manager_of(rank, base, 1, **settings) as manager:
        for step in (10, 20, 30):
            manager.save(step, with_optimizer(rank, num_ranks, step)).result()
            manager.wait(uploaded=True)
        dist.barrier()  # rank 0 removes what is surplus before it comes here
        manager.reject(30, "spike")
        problems = [state.problem for state in manager.states.values()]
        return problems, dict(manager.not_removed)


def with_optimizer(rank, num_ranks, step):
    state = state_of(rank, num_ranks, step)
    rows = state["rows"].data.clone().neg_()
    key = "optimizer.state.exp_avg.rows"
    state["average"] = ShardedTensor.from_rank_offsets(key, rows, (0, rank, num_ranks))
    return state


def load_with_optimizer(rank, num_ranks, base, settings):
    with at_store(settings), manager_of(rank, base, 1, **settings) as manager:
        loaded = manager.load(with_optimizer(rank, num_ranks, None))
        assert torch.equal(loaded["average"], -loaded["rows"])
        assert torch.equal(loaded["rows"], table(loaded["step"]).chunk(num_ranks)[rank])
        return loaded["step"]


def refused_load(rank, num_ranks, base, settings):
    error = error_of(load_with_optimizer, rank, num_ranks, base, settings)
    assert isinstance(error, LoadMismatchError), error
    return str(error)


@pytest.mark.parametrize("place", ["directory", "store"])
def test_optimizer_state_is_removed_in_the_root_alone(tmp_path, server, bucket, place):
    settings = {}
    root = str(tmp_path / "root")
    if place == "store":
        root = f"{bucket}/run"
        settings = {"root": root, "server": server}
    with reached_at(server):
        results = run(save_with_optimizer, 2, 2, str(tmp_path), settings)
        assert results == [([None] * 3, {})] * 2
        keys = []
        for step in (10, 20, 30):
            location = f"{root}/step_{step:08d}"
            report = distckpt.verify(location)
            assert report.is_whole
            assert not report.strays
            keys.append(sorted(distckpt.open(location).tensors))
        assert keys[:2] == [["copied", "rows"]] * 2
        assert len(keys[2]) == 3
        # Of step 20 the hosts have all, and the root has the weights.
        shutil.move(tmp_path / "host1", tmp_path / "lost")
        errors = run(refused_load, 2, 2, str(tmp_path), settings)
        assert all("optimizer.state" in error for error in errors)
        shutil.rmtree(tmp_path / "host1")
        shutil.move(tmp_path / "lost", tmp_path / "host1")
        assert run(load_with_optimizer, 3, 3, str(tmp_path), settings) == [20] * 3
        # The job goes on from there, so that the root has all of it again.
        assert len(distckpt.open(f"{root}/step_00000020").tensors) == 3
        for host in range(3):
            shutil.rmtree(tmp_path / f"host{host}")
        assert loaded(tmp_path, 2, 1, **settings) == 20


def test_damage_of_a_step_is_none_of_the_step_of_an_earlier_attempt(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(20, state_of(0, 1, 20))
    again = SpreadStep(20, "0123456789abcdef", 5, 1, 8, {"file": [0]}, {"file": 8})
    root = _survey.Root(str(tmp_path))
    known, _ = _survey.choose([again], root, _survey.Passed())
    assert known == again
    damaged = _survey.Passed(reasons={again.save: "checksum mismatch"})
    known, problems = _survey.choose([again], root, damaged)
    assert known.attempt == 0
    assert problems == {20: "checksum mismatch"}


def test_a_plain_manager_loads_what_was_uploaded(tmp_path):
    saved(tmp_path, 2, 1, [10])
    manager = CheckpointManager(tmp_path / "root")
    assert manager.steps() == [10]
    state = state_of(0, 1, None)
    assert manager.load(state)["step"] == 10
    assert torch.equal(state["rows"].data, table(10))


def test_a_damaged_file_is_read_from_another_host(tmp_path, caplog):
    saved(tmp_path, 4, 2, [10, 20], peers=1, upload_every=10)
    (path,) = [path for path in files_of_step(tmp_path, 0, 20) if "shard-00001" in path.name]
    flip(path, path.stat().st_size - 100)
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    assert loaded(tmp_path, 4, 2, peers=1) == 20


def test_a_cut_file_is_read_from_another_host(tmp_path):
    saved(tmp_path, 4, 2, [10], peers=1)
    shutil.rmtree(tmp_path / "root" / "step_00000010")
    for path in files_of_step(tmp_path, 1, 10):
        path.write_bytes(path.read_bytes()[:-5])
    assert loaded(tmp_path, 4, 2, peers=1) == 10


def test_an_extended_file_is_read_from_another_host(tmp_path):
    saved(tmp_path, 4, 2, [10], peers=1)
    shutil.rmtree(tmp_path / "root" / "step_00000010")
    for path in files_of_step(tmp_path, 1, 10):
        path.write_bytes(path.read_bytes() + b"more")
    assert loaded(tmp_path, 4, 2, peers=1) == 10


def test_damage_on_all_hosts_and_in_the_root_is_passed_over(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], peers=1)
    for path in tmp_path.glob("*/**/step_00000020/tensors/shard-00002*"):
        flip(path, path.stat().st_size - 100)
    assert loaded(tmp_path, 2, 1) == 10


def test_a_directory_of_another_run_is_not_believed(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], peers=1)
    shutil.rmtree(tmp_path / "root")
    (error, other) = run(error_of_load, 2, str(tmp_path))
    assert isinstance(error, CheckpointNotFoundError)
    assert isinstance(other, CheckpointNotFoundError)
    saved(tmp_path, 2, 1, [5], peers=1)
    assert loaded(tmp_path, 2, 1) == 5


def error_of_load(rank, base):
    with manager_of(rank, base, 1) as manager:
        assert manager.steps() == []
        return error_of(manager.load, state_of(rank, 2, None))


def test_an_older_copy_of_a_step_is_not_mixed_with_a_newer_one(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], upload_every=10)
    shutil.move(tmp_path / "host1", tmp_path / "away")
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    assert loaded(tmp_path, 2, 1) == 10
    saved(tmp_path, 2, 1, [20], upload_every=10)
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    # Host 1 returns with what it had before.
    shutil.rmtree(tmp_path / "host1")
    shutil.move(tmp_path / "away", tmp_path / "host1")
    assert loaded(tmp_path, 2, 1) == 10


def test_only_the_newest_local_steps_are_kept(tmp_path):
    saved(tmp_path, 2, 1, range(10, 70, 10), keep_local=2, keep_last=3, upload_every=2)
    assert directories(tmp_path, 0) == ["step_00000050", "step_00000060"]
    assert directories(tmp_path, 1) == ["step_00000050", "step_00000060"]
    uploaded = sorted(path.name for path in (tmp_path / "root").glob("step_*"))
    assert uploaded == ["step_00000030", "step_00000050", "step_00000060"]


def test_a_step_that_hosts_have_is_not_replaced_by_accident(tmp_path):
    saved(tmp_path, 2, 1, [10])
    (error, _) = run(error_of_second_save, 2, str(tmp_path))
    assert isinstance(error, distckpt.CheckpointExistsError)


def error_of_second_save(rank, base):
    with manager_of(rank, base, 1) as manager:
        error = error_of(manager.save, 10, state_of(rank, 2, 11))
        manager.save(10, state_of(rank, 2, 12), overwrite=True).result()
        return error


def test_a_root_that_does_not_answer_holds_up_nothing(tmp_path):
    saved(tmp_path, 2, 1, [10], root=f"{tmp_path}/root")
    run(go_on_without_root, 2, str(tmp_path))


def go_on_without_root(rank, base):
    with mock.patch.object(_survey, "ROOT_SECONDS", 0.5), reached_at("http://127.0.0.1:9"):
        # No server listens there, and requests are repeated for minutes.
        manager = CheckpointManager("s3://bucket/run", local=f"{base}/host{rank}", durable=False)
        manager.save(10, state_of(rank, 2, 10)).result()
        state = state_of(rank, 2, None)
        assert manager.load(state)["step"] == 10
        assert torch.equal(state["rows"].data, table(10).chunk(2)[rank])
        manager._close(has_failed=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peers": 1}, "local"),
        ({"local": "l", "peers": 2}, "peers"),
        ({"local": "l", "keep_local": 0}, "keep_local"),
        ({"local": "l", "upload_every": 0}, "upload_every"),
        ({"local": "l", "upload_bandwidth": -1}, "upload_bandwidth"),
        ({"local": "l", "stall_timeout": 0}, "stall_timeout"),
    ],
)
def test_settings_are_checked(tmp_path, settings, named):
    with pytest.raises((ValueError, TypeError), match=named):
        CheckpointManager(tmp_path, **settings)


def test_the_local_directory_of_one_host_is_a_checkpoint(tmp_path):
    saved(tmp_path, 1, 1, [10])
    (step,) = (tmp_path / "host0").glob("run-*/step_*")
    state = state_of(0, 1, None)
    distckpt.load(state, step)
    assert torch.equal(state["rows"].data, table(10))
    note = json.loads((step / "metadata.json").read_text())["manager"]
    assert note["step"] == 10
