"""Disks, peers, stores and files of fast tiers that fail, and programs that end badly.

Nothing wrong is loaded, training goes on, and messages name the host, the file and the way out.

Hosts are imitated: ranks with different local directories are on different hosts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from distckpt import CheckpointManager, CheckpointNotFoundError, PreemptionGuard, ShardedObject
from distckpt.manager._tiers import _copies, _meeting, _survey, _tier_files
from tests.support.disk import flip
from tests.support.disks import mounted_read_only, small_disk
from tests.support.flaky_store import FlakyFileSystem, failing
from tests.support.harness import ask_parent, error_of, launched, run, signal_parent, sum_over_ranks
from tests.support.s3_server import Fault, FaultyProxy, reached_at
from tests.support.tiers import (
    directories,
    files_of_step,
    load_newest,
    loaded,
    manager_of,
    saved,
    state_of,
)


def run_logged(function: Callable[..., Any], *args: Any, **settings: Any) -> tuple[list, str]:
    """Return what two ranks returned, and all that they logged."""
    with launched(function, 2, *args, **settings) as launch:
        values = launch.values()
        lines: list[str] = []
        for outcome in launch.outcomes():
            lines += outcome.warnings_logged
        return values, "\n".join(lines)


def states_of(manager: CheckpointManager) -> dict[int, dict[str, Any]]:
    return {step: dict(vars(state)) for step, state in manager.states.items()}


def has_uploaded(states: dict[int, dict[str, Any]]) -> list[int]:
    return [step for step, state in states.items() if state["is_uploaded"]]


def flip_file(host: int, base: Path, step: int, name: str) -> Path:
    (path,) = [path for path in files_of_step(base, host, step) if name in path.name]
    flip(path, path.stat().st_size - 100)
    return path


# --- Damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize(("damaged", "expected"), [((0,), 20), ((1,), 20), ((0, 1), 10)])
def test_a_flipped_bit_on_some_hosts(tmp_path, damaged, expected):
    saved(tmp_path, 2, 1, [10, 20], peers=1, upload_every=10)
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    paths = [flip_file(host, tmp_path, 20, "shard-00001") for host in damaged]
    values, logged = run_logged(load_newest, 2, str(tmp_path), 1, {"peers": 1})
    assert [step for step, *_ in values] == [expected] * 2
    for path in paths:
        assert f"{path} is damaged, and removed" in logged
    # A copy that is whole is uploaded.
    assert (tmp_path / "root" / "step_00000020").exists() == (expected == 20)


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        flip(path, path.stat().st_size // 2)
    else:
        shutil.copyfile(path.parent.parent / "step_00000010" / path.name, path)


DAMAGES = ("missing", "empty", "flipped", "of another step")


@pytest.mark.parametrize(
    ("name", "kind", "host"),
    [
        ("manifest.safetensors", "flipped", 0),
        ("metadata.json", "empty", 1),
        *(
            pytest.param(name, kind, host, marks=pytest.mark.slow)
            for name in ("manifest.safetensors", "metadata.json")
            for kind in DAMAGES
            for host in (0, 1)
        ),
    ],
)
def test_a_damaged_marker_or_manifest_of_one_host(tmp_path, name, kind, host):
    saved(tmp_path, 2, 1, [10, 20], peers=1, upload_every=10)
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    (path,) = (tmp_path / f"host{host}").glob(f"run-*/step_00000020/{name}")
    content = path.read_bytes()
    damage(path, kind)
    assert loaded(tmp_path, 2, 1, peers=1) == 20
    # It is whole again, and the step is uploaded.
    assert path.read_bytes() == content
    shutil.rmtree(tmp_path / f"host{1 - host}")
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    assert loaded(tmp_path, 2, 1, peers=1) == 20


def test_damaged_manifests_of_all_hosts(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], peers=1)
    for path in tmp_path.glob("host*/run-*/step_*/manifest.safetensors"):
        flip(path, path.stat().st_size // 2)
    assert loaded(tmp_path, 2, 1, peers=1) == 20


def load_or_error(rank: int, base: str) -> Any:
    try:
        return load_newest(rank, 2, base, 1, {})[0]
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}"])
def test_a_damaged_identity_of_the_run_is_an_error_that_says_how_to_go_on(tmp_path, content):
    saved(tmp_path, 2, 1, [10])
    path = tmp_path / "root" / "run.json"
    path.write_bytes(content)
    shutil.rmtree(tmp_path / "root" / "step_00000010")
    for text in run(load_or_error, 2, str(tmp_path)):
        assert f"{str(path)!r} is damaged" in text
        assert "is named run-ID" in text
    (local,) = (tmp_path / "host0").glob("run-*")
    path.write_text(f'{{"run": "{local.name.removeprefix("run-")}"}}')
    assert loaded(tmp_path, 2, 1) == 10


def test_steps_of_a_run_that_the_root_has_forgotten_are_ignored_with_a_warning(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], upload_every=10)
    (local,) = (tmp_path / "host0").glob("run-*")
    (tmp_path / "root" / "run.json").unlink()
    shutil.rmtree(tmp_path / "root" / "step_00000020")
    values, logged = run_logged(load_newest, 2, str(tmp_path), 1, {})
    assert values[0][0] == 10
    assert f"steps of run {local.name.removeprefix('run-')} on hosts are ignored" in logged


@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"20": 3, "x": {}}'])
def test_damaged_states_are_no_obstacle(tmp_path, content):
    saved(tmp_path, 1, 1, [10])
    (path,) = (tmp_path / "host0").glob("run-*/states.json")
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    saved(tmp_path, 1, 1, [20])
    assert loaded(tmp_path, 1, 1) == 20


# --- Disks ----------------------------------------------------------------------------------------


def fill(path: str) -> None:
    """Write a file until the disk is full."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while os.write(descriptor, bytes(4096)):
            pass
    os.close(descriptor)


def save_on_a_full_disk(rank: int, base: str, settings: dict, full_from: int) -> dict:
    """Save some steps; the disk of host 0 is full from one of them on."""
    with manager_of(rank, base, 1, **settings) as manager:
        for step in (10, 20, 30):
            if step == full_from and rank == 0:
                fill(f"{base}/host0/fill")
            sum_over_ranks(1)
            manager.save(step, state_of(rank, 2, step)).result()
            manager.wait(uploaded=True)
        return states_of(manager)


@pytest.mark.parametrize(
    ("full_from", "is_async"),
    [
        (10, True),
        (20, False),
        pytest.param(10, False, marks=pytest.mark.slow),
        pytest.param(20, True, marks=pytest.mark.slow),
    ],
)
def test_steps_go_to_the_root_while_a_local_disk_is_full(tmp_path, full_from, is_async):
    (tmp_path / "host0").mkdir()
    with small_disk(tmp_path / "host0", 16 << 20):
        settings = {"async_save": is_async, "peers": 1, "upload_every": 10}
        values, logged = run_logged(save_on_a_full_disk, str(tmp_path), settings, full_from)
        for step, state in values[0].items():
            assert state["is_local"] == (step < full_from)
            if step >= full_from:
                assert state["is_uploaded"]
                assert f"step {step} is not saved to the hosts" in logged
        assert f"it goes to {tmp_path / 'root'} at once" in logged
        assert loaded(tmp_path, 2, 1) == 30


def test_a_disk_that_is_too_small_for_the_copies(tmp_path):
    (tmp_path / "host0").mkdir()
    # A share is half of 800 KB.
    with small_disk(tmp_path / "host0", 700 << 10):
        settings = {"peers": 1, "upload_every": 10}
        values, logged = run_logged(save_on_a_full_disk, str(tmp_path), settings, 0)
        assert has_uploaded(values[0]) == [10, 20, 30]
        assert not any(state["is_replicated"] for state in values[0].values())
        assert "files of step 10 have no copy" in logged
        assert "No space left on device" in logged
        assert loaded(tmp_path, 2, 1) == 30


def copy_when_there_is_room(rank: int, base: str) -> dict:
    """Save a step that fills a disk, and one when there is room again."""
    with manager_of(rank, base, 1, peers=1, keep_local=1) as manager:
        if rank == 0:
            fill(f"{base}/host0/fill")
            os.truncate(f"{base}/host0/fill", os.stat(f"{base}/host0/fill").st_size - (600 << 10))
        sum_over_ranks(1)
        manager.save(10, state_of(rank, 2, 10)).result()
        manager.wait(uploaded=True)
        if rank == 0:
            os.unlink(f"{base}/host0/fill")
        sum_over_ranks(1)
        manager.save(20, state_of(rank, 2, 20)).result()
        manager.wait(uploaded=True)
        return states_of(manager)


def test_copies_go_on_after_some_have_failed(tmp_path):
    (tmp_path / "host0").mkdir()
    with small_disk(tmp_path / "host0", 16 << 20):
        for states in run(copy_when_there_is_room, 2, str(tmp_path)):
            assert states[10]["is_local"]
            assert not states[10]["is_replicated"]
            assert states[20]["is_replicated"]


def save_beside_a_full_root(rank: int, base: str) -> dict:
    with manager_of(rank, base, 1, peers=1) as manager:
        for step in (10, 20):
            manager.save(step, state_of(rank, 2, step)).result()
            manager.wait(uploaded=True)
        return states_of(manager)


def test_training_goes_on_while_the_root_is_full(tmp_path):
    (tmp_path / "root").mkdir()
    # A step has 800 KB.
    with small_disk(tmp_path / "root", 1000 << 10):
        for states in run(save_beside_a_full_root, 2, str(tmp_path)):
            assert has_uploaded(states) == [10]
            assert "No space left on device" in states[20]["problem"]
            assert "step_00000020" in states[20]["problem"]
            assert states[20]["is_replicated"]
        shutil.rmtree(tmp_path / "host0")
        assert loaded(tmp_path, 2, 1, peers=1) == 20
        # There is room again: the next start uploads it.
        shutil.rmtree(tmp_path / "root" / "step_00000010")
        assert loaded(tmp_path, 2, 1, peers=1) == 20
        assert CheckpointManager(tmp_path / "root").latest() == 20


def save_on_a_broken_disk(rank: int, base: str) -> dict:
    with manager_of(rank, base, 1, peers=1, timeout=15.0) as manager:
        ask_parent()
        for step in (10, 20):
            manager.save(step, state_of(rank, 2, step)).result()
        return states_of(manager)


def test_a_local_disk_on_which_nothing_can_be_made(tmp_path):
    (tmp_path / "host0").mkdir()
    with launched(save_on_a_broken_disk, 2, str(tmp_path)) as launch:
        for rank in range(2):
            launch.wait_for_signal(rank)
        with mounted_read_only(tmp_path / "host0"):
            for rank in range(2):
                launch.answer(rank)
            assert [has_uploaded(states) for states in launch.values()] == [[10, 20]] * 2
            assert loaded(tmp_path, 2, 1) == 20


# --- Copies and uploads that are slow -------------------------------------------------------------


def save_faster_than_uploads(rank: int, base: str, settings: dict) -> dict:
    _copies.PIECE_BYTES = 16 << 10
    with manager_of(rank, base, 1, peers=1, **settings) as manager:
        for step in range(10, 70, 10):
            manager.save(step, state_of(rank, 2, step)).result()
        manager.wait(uploaded=True)
        return states_of(manager)


@pytest.mark.parametrize("name", ["upload_bandwidth", "peer_bandwidth"])
def test_steps_that_are_passed_over_are_named_and_the_last_one_is_not(tmp_path, name):
    values, logged = run_logged(save_faster_than_uploads, str(tmp_path), {name: 400_000})
    state = {"upload_bandwidth": "is_uploaded", "peer_bandwidth": "is_replicated"}[name]
    for states in values:
        done = [step for step in states if states[step][state]]
        assert done[-1] == 60
        passed = [step for step in states if step not in done]
        assert passed
        for step in passed:
            assert "given up, since step" in states[step]["problem"]
            assert f"of step {step}: given up" in logged
    assert "a rank was lost" not in logged


def save_where_priorities_are_forbidden(rank: int, base: str) -> dict:
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    forbidden = mock.patch.object(os, "setpriority", side_effect=error)
    with forbidden, manager_of(rank, base, 1, peers=1) as manager:
        manager.save(10, state_of(rank, 2, 10)).result()
        manager.wait(uploaded=True)
        return states_of(manager)


def test_priorities_of_threads_may_be_forbidden(tmp_path):
    for states in run(save_where_priorities_are_forbidden, 2, str(tmp_path)):
        assert states[10]["is_uploaded"]
        assert states[10]["is_replicated"]


def wait_for_a_stopped_peer(rank: int, base: str) -> dict:
    _copies.PIECE_BYTES = 16 << 10
    settings = {"peer_bandwidth": 100_000, "upload_every": 10, "timeout": 4.0}
    manager = manager_of(rank, base, 1, peers=1, exit_timeout=5.0, **settings)
    manager.save(10, state_of(rank, 2, 10)).result()
    ask_parent()
    manager.wait(uploaded=True)
    ask_parent()
    manager.save(20, state_of(rank, 2, 20)).result()
    manager.close()
    return states_of(manager)


@pytest.mark.slow
def test_a_peer_that_stops_while_copies_are_sent(tmp_path):
    with launched(wait_for_a_stopped_peer, 2, str(tmp_path)) as launch:
        for rank in range(2):
            launch.wait_for_signal(rank)
        os.kill(launch.processes[1].pid, signal.SIGSTOP)
        launch.answer(0)
        # Rank 0 gives up.
        launch.wait_for_signal(0)
        os.kill(launch.processes[1].pid, signal.SIGCONT)
        launch.answer(1)
        launch.wait_for_signal(1)
        for rank in range(2):
            launch.answer(rank)
        for states in launch.values():
            assert "Lost contact" in states[10]["problem"]
            assert "restart the job" in states[20]["problem"]
            assert states[20]["is_local"]
    assert loaded(tmp_path, 2, 1) == 20


def load_beside_a_stopped_host(rank: int, base: str) -> int:
    """Load files of host 1, which stops before the first byte is read from it."""
    fill_from = _tier_files._fill

    def fill_later(source: Any, *args: Any) -> None:
        if source.tier == "peer" and not asked:
            asked.append(ask_parent())
        fill_from(source, *args)

    def stop(num_bytes: int, total_bytes: int) -> None:
        if rank == 1 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGSTOP))
        elif rank == 0 and num_bytes == total_bytes:
            signal_parent()

    asked: list[object] = []
    with (
        mock.patch.object(_tier_files, "_ANSWER_SECONDS", 0.5),
        mock.patch.object(_tier_files, "_fill", fill_later),
        manager_of(rank, base, 1) as manager,
    ):
        state = state_of(rank, 2, None)
        return manager.load(state, progress=stop)["step"]


def test_a_host_that_stops_while_others_read_from_it(tmp_path):
    saved(tmp_path, 2, 1, [10])
    for path in files_of_step(tmp_path, 0, 10):
        path.unlink()
    with launched(load_beside_a_stopped_host, 2, str(tmp_path)) as launch:
        launch.wait_for_signal(0)
        stopped = psutil.Process(launch.processes[1].pid)
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        launch.answer(0)
        # Rank 0 has all of its values from the root.
        launch.wait_for_signal(0)
        stopped.resume()
        assert launch.values() == [10, 10]
        logged = launch.outcomes()[0].warnings_logged
    assert any(
        "no bytes came for 0.5 s" in line and "but from the store" in line for line in logged
    ), logged


# --- Stores ---------------------------------------------------------------------------------------


class StatusError(Exception):
    """As gcsfs raises: it knows the answer of the store."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the store answered {code}")
        self.code = code


def large_state(step: int) -> dict[str, Any]:
    # Five parts of an upload.
    return {"values": torch.full((6 << 20,), float(step)), "step": step}


@contextlib.contextmanager
def store_manager(base: str) -> Iterator[CheckpointManager]:
    with CheckpointManager(
        "flaky://bucket/run", local=f"{base}/host0", durable=False, stall_timeout=0.2
    ) as manager:
        yield manager


def newest_in_tiers(manager: CheckpointManager) -> int:
    state = manager.load(large_state(0))
    assert (state["values"] == state["step"]).all()
    return state["step"]


def train_while_parts_stand_still(rank: int, base: str) -> tuple[str, dict, dict]:
    released = threading.Event()
    stalled = threading.Event()

    def stop_after_three(kind: str, path: str, number: int) -> None:
        if kind == "block" and number >= 3:
            stalled.set()
            released.wait(60)

    with failing(stop_after_three), store_manager(base) as manager:
        for step in (10, 20):
            manager.save(step, large_state(step)).result()
        assert newest_in_tiers(manager) == 20
        assert stalled.wait(60)
        while manager.states[10].problem is None:
            time.sleep(0.01)
        problem = manager.states[10].problem
        before = states_of(manager)
        released.set()
        manager.wait(uploaded=True)
        return problem, before, states_of(manager)


def test_a_store_that_stops_after_three_parts(tmp_path):
    ((problem, before, after),) = run(train_while_parts_stand_still, 1, str(tmp_path))
    assert os.uname().nodename in problem
    assert "flaky://bucket/run/step_00000010/" in problem
    assert has_uploaded(before) == []
    assert 20 in has_uploaded(after)


def start_without_answers(rank: int, base: str, code: int) -> tuple[str, dict, int]:
    """Start while the store answers nothing but errors, and again when it does not."""
    FlakyFileSystem.objects.clear()
    with (
        mock.patch.object(_survey, "ROOT_SECONDS", 0.5),
        failing(lambda *request: StatusError(code)),
    ):
        manager = CheckpointManager("flaky://bucket/run", local=f"{base}/host0", durable=False)
        error = str(error_of(manager.steps))
        manager.save(10, large_state(10)).result()
        assert newest_in_tiers(manager) == 10
        manager.wait(uploaded=True)
        manager._close(has_failed=True)
    with store_manager(base) as manager:
        newest = newest_in_tiers(manager)
        manager.wait(uploaded=True)
        return error, states_of(manager), newest


def test_a_run_that_begins_while_the_store_is_down_is_known_afterwards(tmp_path):
    # Without a request that is made again after the store has come back.
    ((error, states, newest),) = run(start_without_answers, 1, str(tmp_path), 403)
    assert "does not answer" in error
    assert "start the job again" in error
    assert newest == 10
    assert has_uploaded(states) == [10], states


def begin_beside_a_root(rank: int, base: str) -> None:
    """Begin while the root cannot be read."""
    fault = OSError(errno.EIO, "Input/output error")
    with mock.patch.object(_meeting, "run_of_root", side_effect=fault):
        manager = manager_of(rank, base, 1)
        manager.save(10, state_of(rank, 2, 10)).result()
        manager._close(has_failed=True)


def test_a_run_that_began_beside_another_one_is_named(tmp_path):
    saved(tmp_path, 2, 1, [5])
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    run(begin_beside_a_root, 2, str(tmp_path))
    values, logged = run_logged(load_newest, 2, str(tmp_path), 1, {})
    assert values[0][0] == 5
    assert "on hosts are ignored" in logged


def train_beside_a_silent_store(rank: int, base: str, url: str) -> dict:
    with mock.patch.object(_survey, "ROOT_SECONDS", 0.5), reached_at(url):
        settings = {"root": "s3://bucket/run", "peers": 1, "stall_timeout": 0.5}
        manager = manager_of(rank, base, 1, exit_timeout=0.5, **settings)
        for step in (10, 20):
            manager.save(step, state_of(rank, 2, step)).result()
        while manager.states[10].problem is None:
            time.sleep(0.01)
        assert manager.load(state_of(rank, 2, None))["step"] == 20
        manager.close()
        return states_of(manager)


@contextlib.contextmanager
def silent_store() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def busy_store() -> Iterator[str]:
    # No request reaches a server.
    faults = []
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        faults.append(Fault(method, "", "503", 1, 1 << 30))
    with FaultyProxy("http://127.0.0.1:9", *faults).running() as url:
        yield url


@pytest.mark.parametrize("store", [silent_store, pytest.param(busy_store, marks=pytest.mark.slow)])
def test_a_store_that_never_answers_or_is_always_busy(tmp_path, store):
    with store() as url:
        values, logged = run_logged(train_beside_a_silent_store, str(tmp_path), url)
        for states in values:
            assert has_uploaded(states) == []
            assert states[20]["is_local"]
            assert "has uploaded nothing of 's3://bucket/run/step_" in states[10]["problem"]
        assert "s3://bucket/run does not answer" in logged
        assert "step 20 is uploaded to s3://bucket/run: it stays on the hosts" in logged


# --- Clocks, hosts and directories ----------------------------------------------------------------


def save_at(rank: int, base: str, seconds: float, steps: list[int]) -> int:
    real = time.time
    with (
        mock.patch.object(time, "time", side_effect=lambda: real() + seconds),
        manager_of(rank, base, 1, peers=1, upload_every=10) as manager,
    ):
        newest = -1
        if manager.steps():
            newest = manager.load(state_of(rank, 2, None))["step"]
        for step in steps:
            manager.save(step, state_of(rank, 2, step)).result()
        manager.wait(uploaded=True)
        return newest


def test_the_last_start_is_the_newest_although_clocks_go_back(tmp_path):
    assert run(save_at, 2, str(tmp_path), 3600, [100, 200]) == [-1, -1]
    assert run(save_at, 2, str(tmp_path), -3600, [110]) == [200, 200]
    assert run(save_at, 2, str(tmp_path), -7200, [105]) == [110, 110]
    shutil.rmtree(tmp_path / "host0")
    assert loaded(tmp_path, 2, 1) == 105


def test_a_host_that_returns_with_older_steps(tmp_path):
    saved(tmp_path, 2, 1, [10, 20], peers=1, upload_every=5)
    shutil.copytree(tmp_path / "host1", tmp_path / "old")
    saved(tmp_path, 2, 1, [30, 40], peers=1, upload_every=5)
    shutil.rmtree(tmp_path / "root" / "step_00000040")
    shutil.rmtree(tmp_path / "host1")
    shutil.move(tmp_path / "old", tmp_path / "host1")
    assert loaded(tmp_path, 2, 1) == 40


def save_with_directories(rank: int, base: str, names: list[str], step: int) -> tuple[dict, int]:
    num_ranks = len(names)
    manager = CheckpointManager(
        f"{base}/root", local=f"{base}/{names[rank]}", peers=1, durable=False
    )
    with manager:
        manager.save(step, state_of(rank, num_ranks, step)).result()
        manager.wait(uploaded=True)
        loaded = manager.load(state_of(rank, num_ranks, None))
        return vars(manager.states[step]), loaded["step"]


def test_some_ranks_share_a_directory_under_other_names(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for step, names in ((10, ["a", "b", "a", "c"]), (20, ["a", "link", "c", "c"])):
        for state, newest in run(save_with_directories, 4, str(tmp_path), names, step):
            assert state["is_replicated"]
            assert state["is_uploaded"]
            assert newest == step


def use_three_managers(rank: int, base: str) -> list[int]:
    with contextlib.ExitStack() as stack:
        managers = []
        for number, local in enumerate(("one", "two", "two")):
            location = f"{base}/host{rank}/{local}"
            manager = CheckpointManager(f"{base}/root{number}", local=location, durable=False)
            managers.append(stack.enter_context(manager))
        for step in (10, 20):
            for number, manager in enumerate(managers):
                manager.save(step, state_of(rank, 2, step + number))
        return [manager.load(state_of(rank, 2, None))["step"] for manager in managers]


def test_managers_of_one_job_do_not_mix_their_steps(tmp_path):
    assert run(use_three_managers, 2, str(tmp_path)) == [[20, 21, 22]] * 2


# --- The end of a program -------------------------------------------------------------------------


def raise_in_the_block(rank: int, base: str, failing_ranks: tuple[int, ...]) -> tuple:
    error = None
    with contextlib.suppress(KeyError), manager_of(rank, base, 1, timeout=5.0) as manager:
        manager.save(10, state_of(rank, 2, 10)).result()
        manager.wait(uploaded=True)
        manager.save(20, state_of(rank, 2, 20))
        if rank in failing_ranks:
            error = "raised"
            raise KeyError
    return error, has_uploaded(states_of(manager))


@pytest.mark.parametrize("failing_ranks", [(0, 1), pytest.param((1,), marks=pytest.mark.slow)])
def test_an_exception_in_the_block(tmp_path, failing_ranks):
    for rank, (error, uploaded) in enumerate(
        run(raise_in_the_block, 2, str(tmp_path), failing_ranks)
    ):
        assert (error == "raised") == (rank in failing_ranks)
        assert uploaded[0] == 10
    assert loaded(tmp_path, 2, 1) == 20


def save_until_stopped(rank: int, base: str) -> tuple[int, dict]:
    settings = {"peers": 1, "upload_every": 100, "exit_timeout": 30}
    with PreemptionGuard() as guard, manager_of(rank, base, 1, **settings) as manager:
        step = 0
        while not guard.should_stop():
            step += 1
            manager.save(step, state_of(rank, 2, step))
            if step == 2:
                ask_parent()
        manager.save(step + 1, state_of(rank, 2, step + 1)).result()
    return step + 1, vars(manager.states[step + 1])


def test_a_signal_before_the_end_of_a_job(tmp_path):
    with launched(save_until_stopped, 2, str(tmp_path)) as launch:
        for rank in range(2):
            launch.wait_for_signal(rank)
        os.kill(launch.processes[1].pid, signal.SIGTERM)
        for rank in range(2):
            launch.answer(rank)
        (last, state), _ = launch.values()
    assert state["is_uploaded"]
    assert state["is_replicated"]
    assert CheckpointManager(tmp_path / "root").latest() == last


PROGRAM = """
import sys
import torch.distributed as dist
from tests.support.tiers import manager_of, state_of

rank, base = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=2)
manager = manager_of(rank, base, 1, peers=1)
for step in (10, 20):
    manager.save(step, state_of(rank, 2, step))
"""


def test_a_program_that_ends_without_closing(tmp_path):
    programs = []
    for rank in range(2):
        command = [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)]
        programs.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))
    assert [program.wait(120) for program in programs] == [0, 0]
    for host in range(2):
        assert directories(tmp_path, host)[-1] == "step_00000020"
    assert loaded(tmp_path, 2, 1) == 20


# --- Retention, failures and rejections -----------------------------------------------------------


def keep_some(rank: int, base: str) -> tuple[list[int], list[Any]]:
    settings = {"keep_last": 1, "best_metric": "loss", "keep_every": 50, "peers": 1}
    with manager_of(rank, base, 1, **settings) as manager:
        for step, loss in zip(range(10, 80, 10), (3, 0.5, 2, 1, 4, 5, 6), strict=True):
            metrics = {"loss": loss}
            manager.save(step, state_of(rank, 2, step), metrics=metrics, pinned=step == 30)
            manager.wait(uploaded=True)
        manager.save(70, state_of(rank, 2, 71), metrics={"loss": 7}, overwrite=True).result()
        manager.wait(uploaded=True)
        found: list[Any] = [manager.load(state_of(rank, 2, None))["step"]]
        for step in (20, 30, 50):
            found.append(manager.load(state_of(rank, 2, None), step=step)["step"])
        error = error_of(manager.load, state_of(rank, 2, None), step=10)
        assert isinstance(error, CheckpointNotFoundError)
        return manager.steps(), found


def test_retention_in_the_root(tmp_path):
    kept = [20, 30, 50, 60, 70]
    for steps, found in run(keep_some, 2, str(tmp_path)):
        # The hosts still have step 60.
        assert steps == kept
        assert found == [71, 20, 30, 50]
    assert CheckpointManager(tmp_path / "root").steps() == [20, 30, 50, 70]


def fail_and_go_on(rank: int, base: str) -> tuple[dict, dict]:
    with manager_of(rank, base, 1, peers=1, on_failure="log") as manager:
        manager.save(10, state_of(rank, 2, 10)).result()
        manager.wait(uploaded=True)
        sum_over_ranks(1)
        if rank == 0:
            for name in ("host0", "root"):
                os.rename(f"{base}/{name}", f"{base}/away-{name}")
                Path(base, name).touch()
        sum_over_ranks(1)
        assert manager.save(20, state_of(rank, 2, 20)).error() is not None
        if rank == 0:
            for name in ("host0", "root"):
                os.unlink(f"{base}/{name}")
                os.rename(f"{base}/away-{name}", f"{base}/{name}")
        sum_over_ranks(1)
        manager.save(30, state_of(rank, 2, 30)).result()
        manager.wait(uploaded=True)
        return dict(manager.failures), states_of(manager)


def test_a_save_that_fails_in_all_tiers_is_logged_and_training_goes_on(tmp_path):
    for failures, states in run(fail_and_go_on, 2, str(tmp_path)):
        assert list(failures) == [20]
        assert states[30]["is_replicated"]
        assert states[30]["is_uploaded"]
    assert loaded(tmp_path, 2, 1) == 30


def reject_some(rank: int, base: str) -> list[Any]:
    found: list[Any] = []
    with manager_of(rank, base, 1, peers=1, upload_every=2, keep_local=4) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, state_of(rank, 2, step)).result()
            manager.wait(uploaded=True)
        for step in (40, 30):
            # One is on the hosts only, the other in the root, too.
            manager.reject(step, "bad")
            sum_over_ranks(1)
            found.append(manager.latest())
            found.append(manager.load(state_of(rank, 2, None))["step"])
        found.append(manager.load(state_of(rank, 2, None), step=40)["step"])
        manager.save(40, state_of(rank, 2, 41)).result()
        found.append(manager.load(state_of(rank, 2, None))["step"])
        manager.wait(uploaded=True)
    return found


def test_rejected_steps_on_hosts_and_in_the_root(tmp_path):
    assert run(reject_some, 2, str(tmp_path)) == [[30, 30, 20, 20, 40, 41]] * 2


# --- Other values ---------------------------------------------------------------------------------


class Loader:
    """A data loader that knows its position."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def training_state(rank: int, step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (step + 1))
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    own = {"rank": rank, "step": step, "rng": torch.get_rng_state()}
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": Loader(step),
        "own": ShardedObject("own", own, (2,), (rank,)),
        "arguments": {"lr": 0.1, "list": [1, (2, step)]},
        "step": step,
    }


def save_training(rank: int, base: str) -> None:
    with manager_of(rank, base, 1, peers=1, upload_every=10) as manager:
        for step in (1, 2):
            manager.save(step, training_state(rank, step))
        manager.wait(uploaded=True)


def load_training(rank: int, base: str) -> int:
    with manager_of(rank, base, 1, peers=1) as manager:
        state = training_state(rank, 7)
        result = manager.load(state)
        right = training_state(rank, result["step"])
        for name in ("model", "optimizer"):
            actual = state[name].state_dict()
            torch.testing.assert_close(actual, right[name].state_dict(), rtol=0, atol=0)
        assert state["loader"].position == result["step"]
        assert result["arguments"] == right["arguments"]
        assert result["own"]["rank"] == rank
        assert torch.equal(result["own"]["rng"], right["own"].data["rng"])
        return result["step"]


def test_objects_and_optimizers_of_a_lost_host(tmp_path):
    run(save_training, 2, str(tmp_path))
    shutil.rmtree(tmp_path / "root" / "step_00000002")
    shutil.rmtree(tmp_path / "host1")
    assert run(load_training, 2, str(tmp_path)) == [2, 2]
