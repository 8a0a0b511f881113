"""The states of steps as programs outside a job see them, in the directory of a host."""

from __future__ import annotations

import ctypes
import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from distckpt import CheckpointingException, CheckpointManager, ShardedTensor, list_checkpoints
from distckpt.manager._tiers._uploads import Progress
from tests.support.cli_command import call, call_json
from tests.support.disk import flip
from tests.support.harness import run, sum_over_ranks


def rows_of(rank, num_ranks, step):
    rows = torch.full((100, 16), float(step))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)),
        "step": step,
    }


def directory_of_host(base, host):
    """Return the directory of the only run."""
    (directory,) = (base / f"host{host}").glob("run-*")
    return directory


def save_on_hosts(rank, base, num_hosts, peers):
    local = base / f"host{rank}"
    with CheckpointManager(base / "root", local=local, peers=peers, upload_every=2) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, rows_of(rank, num_hosts, step))
            manager.wait(uploaded=True)
        before = list_checkpoints(directory_of_host(base, rank))
    return before


@pytest.mark.parametrize(("peers", "last"), [(0, "local only"), (1, "replicated")])
def test_a_host_lists_the_parts_of_steps_that_it_has(tmp_path, capsys, peers, last):
    for infos in run(save_on_hosts, 3, tmp_path, 3, peers):
        found = [(info.step, info.tier, info.tier_problem, info.problem) for info in infos]
        assert found == [(30, "uploaded", None, None), (40, last, None, None)]
        assert [info.is_newest for info in infos] == [False, True]
    directory = directory_of_host(tmp_path, 1)
    infos = list_checkpoints(directory)
    assert [info.tier for info in infos] == ["uploaded", "uploaded"], "the last one of the job"
    for info in infos:
        files = list(Path(info.location).glob("*/*"))
        assert info.num_bytes == sum(file.stat().st_size for file in files)
        num_whole = len(list((tmp_path / "root" / info.name).glob("*/*")))
        assert 0 < len(files) < num_whole
    assert call_json(capsys, "ls", directory) == [vars(info) for info in infos]
    assert "uploaded, newest" in call(capsys, "ls", directory)
    # The root is no directory of a host, and says nothing of tiers.
    assert [info.tier for info in list_checkpoints(tmp_path / "root")] == [None] * 3


def load_on_hosts(rank, base):
    with CheckpointManager(base / "root", local=base / f"host{rank}", peers=1) as manager:
        step = manager.load({"step": -1})["step"]
        manager.wait(uploaded=True)
        return step, manager.states[step]


def test_a_step_that_hosts_have_in_part_is_not_replicated(tmp_path):
    run(save_on_hosts, 3, tmp_path, 3, 0)
    shutil.rmtree(tmp_path / "host2")
    for step, state in run(load_on_hosts, 2, tmp_path):
        assert (step, state.is_replicated, state.is_uploaded) == (40, False, True)


def test_damage_of_the_files_that_a_host_has_is_shown(tmp_path):
    run(save_on_hosts, 2, tmp_path, 2, 0)
    directory = directory_of_host(tmp_path, 1)
    (file,) = (directory / "step_00000040").glob("tensors/*")
    flip(file, 9)
    (directory / "step_00000030/manifest.safetensors").unlink()
    older, newer = list_checkpoints(directory)
    assert "is missing" in older.problem
    assert str(file) in newer.problem


def test_a_failed_upload_is_listed_with_its_reason(tmp_path, capsys):
    root = tmp_path / "root"
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))}
    with CheckpointManager(root, local=tmp_path / "host0") as manager:
        manager.save(1, state).result()
        manager.wait(uploaded=True)
        (root / "step_00000002").write_text("in the way")
        manager.save(2, state).result()
        manager.wait(uploaded=True)
        directory = directory_of_host(tmp_path, 0)
        first, second = list_checkpoints(directory)
        assert (first.tier, first.tier_problem) == ("uploaded", None)
        assert (second.tier, second.problem) == ("local only", None)
        assert second.tier_problem == manager.states[2].problem is not None
        text = call(capsys, "ls", directory)
        assert "local only, newest" in text
        assert f"step_00000002: {second.tier_problem}" in text
    # A damaged file of states says nothing; the steps are what they are.
    (directory / "states.json").write_text("[")
    assert [info.tier for info in list_checkpoints(directory)] == ["local only", "local only"]


def test_the_states_of_removed_steps_are_forgotten(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))}
    for first in (1, 5):
        with CheckpointManager(tmp_path / "root", local=tmp_path / "host0") as manager:
            for step in range(first, first + 4):
                manager.save(step, state).result()
                manager.wait(uploaded=True)
    states = json.loads((directory_of_host(tmp_path, 0) / "states.json").read_text())
    assert list(states) == ["7", "8"]


def test_an_uploaded_step_makes_room(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))}
    kept = {"local": tmp_path / "host0", "keep_local": 2, "upload_every": 3}
    with CheckpointManager(tmp_path / "root", **kept) as manager:
        for step in range(1, 7):
            manager.save(step, state).result()
            manager.wait(uploaded=True)
        directory = directory_of_host(tmp_path, 0)
        names = [info.name for info in list_checkpoints(directory)]
    # Step 4 is in the root.
    assert names == ["step_00000005", "step_00000006"]


def test_a_rank_that_waits_for_others_does_not_stand_still():
    noted = []
    progress = Progress(7, 120.0, noted.append)
    progress.location = "tensors/a"
    assert progress.stall(0.0) is None
    assert progress.stall(100.0) is None
    progress.add(8)
    assert progress.stall(200.0) is None
    assert "'tensors/a' for 120 s, after 8 bytes" in progress.stall(320.0)
    # Named again after the same time.
    assert progress.stall(330.0) is None
    assert progress.stall(440.0) is not None
    progress.location = ""  # all is handed over
    assert progress.stall(1000.0) is None
    progress.location = "manifest.safetensors"
    assert progress.stall(1100.0) is None
    assert progress.stall(1120.0) is not None


def test_a_step_that_was_resumed_makes_room(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))}
    for numbers in ((1, 2), (5, 6, 7)):
        with CheckpointManager(tmp_path / "root", local=tmp_path / "host0") as manager:
            if manager.steps():
                manager.load(state)
            for step in numbers:
                manager.save(step, state).result()
                manager.wait(uploaded=True)
    found = [info.step for info in list_checkpoints(directory_of_host(tmp_path, 0))]
    assert found == [6, 7]


def test_a_manager_that_has_loaded_two_steps_is_closed(tmp_path):
    root = tmp_path / "root"
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "step": 0}
    for name in ("step_00000001", "step_00000002"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("in the way")
    with CheckpointManager(root, local=tmp_path / "host0") as manager:
        for step in (1, 2):
            manager.save(step, {**state, "step": step}).result()
    with CheckpointManager(root, local=tmp_path / "host0") as manager:
        assert manager.load(state)["step"] == 2
        manager.wait(uploaded=True)
        assert manager.load(state, 1)["step"] == 1


def test_a_run_does_not_begin_anew_while_its_root_does_not_answer(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "step": 7}
    (tmp_path / "mount").mkdir()
    with CheckpointManager(tmp_path / "mount/run", local=tmp_path / "host0") as manager:
        manager.save(7, state)
    (tmp_path / "mount").rename(tmp_path / "away")
    (tmp_path / "mount").write_text("not mounted")
    with CheckpointManager(tmp_path / "mount/run", local=tmp_path / "host0") as manager:
        assert manager.steps() == [7]
        assert manager.load({**state, "step": 0})["step"] == 7
    # On a new host nothing is left: whether the run has begun cannot be known.
    manager = CheckpointManager(tmp_path / "mount/run", local=tmp_path / "new")
    for look in (manager.steps, manager.latest, lambda: manager.load(state)):
        with pytest.raises(CheckpointingException, match=r"mount/run' does not answer"):
            look()


def reject_on_a_host(rank, base, rejecting):
    manager = CheckpointManager(base / "root", local=base / f"host{rank}", upload_every=9)
    for step in (10, 20):
        manager.save(step, rows_of(rank, 2, step))
        manager.wait(uploaded=True)
    sum_over_ranks(0)
    if rank == rejecting:
        manager.reject(20, "the loss of a replay differs")
    sum_over_ranks(0)
    loaded = manager.load({"step": -1})["step"]
    skipped = manager.skipped
    if rejecting == 0:
        manager.save(20, rows_of(rank, 2, 21)).result()
    manager.close()
    return loaded, skipped


@pytest.mark.parametrize("rejecting", [0, 1])
def test_a_step_that_one_host_rejects_is_neither_loaded_nor_uploaded(tmp_path, rejecting):
    for loaded, skipped in run(reject_on_a_host, 2, tmp_path, rejecting):
        assert (loaded, skipped) == (10, {20: "rejected: the loss of a replay differs"})
    manager = CheckpointManager(tmp_path / "root")
    # Once it is saved again, it is good.
    assert manager.steps() == ([10, 20] if rejecting == 0 else [10])


def save_in_container(rank, base):
    libc = ctypes.CDLL(None, use_errno=True)
    new_name = 0x04000000  # CLONE_NEWUTS
    if libc.unshare(new_name):
        return None
    socket.sethostname(f"container-{rank}")
    local = base / "of the machine"
    with CheckpointManager(base / "root", local=local, durable=False) as manager:
        manager.save(1, rows_of(rank, 2, 1)).result()
    # The other rank may be writing a file under a hidden name.
    return sorted(path.name for path in local.glob("run-*/[!.]*"))


def test_containers_that_share_a_directory_are_one_host(tmp_path):
    results = run(save_in_container, 2, tmp_path)
    if None in results:
        pytest.skip("a host name of its own takes root")
    assert results == [["run.json", "states.json", "step_00000001"]] * 2


def test_a_step_that_no_host_could_keep_is_the_newest(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))}
    with CheckpointManager(tmp_path / "root", local=tmp_path / "host0") as manager:
        manager.save(1, state).result()
        manager.wait(uploaded=True)
        directory = directory_of_host(tmp_path, 0)
        directory.rename(tmp_path / "away")
        directory.write_text("a broken disk")
        manager.save(2, state).result()
        directory.unlink()
        (tmp_path / "away").rename(directory)
        assert not manager.states[2].is_local
        assert manager.states[2].is_uploaded
        assert manager.latest() == 2
    assert CheckpointManager(tmp_path / "root", local=tmp_path / "host0").latest() == 2
