"""Asynchronous saves and the process: its end, its children, its memory."""

from __future__ import annotations

import gc
import inspect
import os
import threading

import psutil
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from tests.support.harness import run
from tests.support.programs import run_program

PATIENCE = 200.0

SCRIPT = """
import os, sys, threading, torch, distckpt
from distckpt import ShardedTensor
gate = threading.Event()
state = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(12 << 20))}
def progress(num_bytes, total_bytes):
    gate.wait(0.3)
"""


def run_script(body, tmp_path):
    return run_program(["-c", SCRIPT + body], os.environ, tmp_path)


def test_the_process_ends_when_the_save_is_done(tmp_path):
    done = run_script("distckpt.async_save(state, 'c', progress=progress)\nsys.exit(3)", tmp_path)
    assert done.returncode == 3, done.stderr
    assert distckpt.open(tmp_path / "c").read_tensors()["v"].unique().tolist() == [1]
    assert os.listdir(tmp_path) == ["c"]


def test_the_process_ends_without_the_save(tmp_path):
    # A thread that writes is waited for: long enough for the program to end first, on a busy
    # machine too.
    body = (
        "distckpt.async_save(state, 'c', progress=lambda done, total: gate.wait(1), exit_timeout=0)"
    )
    done = run_script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is abandoned, nothing of it is committed" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_forked_process_has_no_part_in_saves(tmp_path):
    body = """
handle = distckpt.async_save(state, 'c', progress=progress)
child = os.fork()
if child == 0:
    distckpt.async_save({"x": 1}, 'of_the_child').result(200)
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
handle.result(200)
"""
    done = run_script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c", "of_the_child"]


def fork_while_saving(rank, folder):
    """Return what came of the forked process, of the saves, and the errors that it had from waiting
    for them.
    """
    del rank
    gate, state = threading.Event(), {"v": ShardedTensor.from_rank_offsets("v", torch.ones(1000))}
    manager = CheckpointManager(f"{folder}/run")
    first = distckpt.async_save(
        state, f"{folder}/first", progress=lambda done, total: gate.wait() and 1 / 0
    )
    second = manager.save(1, state)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for handle in (first, second):
                assert "goes on in the process that forked this one" in str(handle.exception(0))
            manager.close()
            distckpt.async_save(state, f"{folder}/of_the_child").result(PATIENCE)
            distckpt.save(state, f"{folder}/another")
            code = 5
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gate.set()
    return code, first.exception(), second.exception()


def test_a_forked_process_neither_waits_nor_reports_for_its_parent(tmp_path):
    [(code, first, second)] = run(fork_while_saving, 1, str(tmp_path), backend=None)
    assert code == 5
    assert isinstance(first, ZeroDivisionError)
    assert second is None
    assert sorted(os.listdir(tmp_path)) == ["another", "of_the_child", "run"]


def start_no_more_threads():
    """From now on this process is at its limit of threads; those that run already go on."""

    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    threading._start_new_thread = threading._start_joinable_thread = refuse


def work_without_threads(rank, folder):
    del rank
    start_no_more_threads()
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(5 << 20)) for key in "ab"}
    for attempt in range(2):
        assert distckpt.async_save(state, f"{folder}/{attempt}").done()
    distckpt.save(state, "memory://without/threads")
    assert distckpt.verify(f"{folder}/0").is_whole
    distckpt.consolidate(f"{folder}/0", f"{folder}/export")
    paths = ["memory://without/threads", *(f"{folder}/{name}" for name in (0, 1, "export"))]
    return [distckpt.open(path).read_tensors()["b"].unique().tolist() for path in paths]


def test_where_no_thread_can_be_started_the_calling_one_does_the_work(tmp_path):
    assert run(work_without_threads, 1, str(tmp_path), backend=None) == [[[1]] * 4]


def test_a_save_at_the_end_of_the_process_finds_no_new_thread(tmp_path):
    """As in Python 3.12.0 to 3.12.2, which start no thread while the interpreter shuts down."""
    body = f"""
{inspect.getsource(start_no_more_threads)}
state = {{key: ShardedTensor.from_rank_offsets(key, torch.ones(5 << 20)) for key in 'vw'}}
distckpt.async_save(state, 'c', progress=lambda done, total: gate.wait(), durable=False)
distckpt.async_save(state, 'd')
threading._register_atexit(lambda: (start_no_more_threads(), gate.set()))
"""
    done = run_script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("c", "d"):
        loaded = distckpt.open(tmp_path / name).read_tensors()
        assert {key: tensor.unique().tolist() for key, tensor in loaded.items()} == {
            "v": [1],
            "w": [1],
        }


@pytest.mark.parametrize("problem", ["gate.wait()", "gate.wait(0.3) or 1 / 0"])
def test_a_save_that_is_lost_at_the_end_of_the_process_shows_in_its_exit_code(problem, tmp_path):
    body = f"""
import atexit
atexit.register(lambda: print('other exit functions run'))
distckpt.async_save(
    state,
    'c',
    progress=lambda done, total: {problem},
    exit_timeout=0.1,
    durable=False,
)
threading._register_atexit(lambda: threading.Timer(0.5, gate.set).start())
"""
    done = run_script(body, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "other exit functions run\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_by_an_exit_function_is_not_lost(fails, tmp_path):
    body = f"""
import atexit
atexit.register(
    lambda: distckpt.async_save(
        state,
        'c',
        progress=lambda done, total: 1 / (not {fails}),
        durable=False,
    )
)
if {fails}:
    distckpt.save(state, 'earlier', durable=False)
"""
    done = run_script(body, tmp_path)
    assert done.returncode == fails, done.stderr
    assert os.listdir(tmp_path) == ["earlier" if fails else "c"]
    assert ("ZeroDivisionError" in done.stderr) == fails


MANY_BYTES = 40 << 20
"""More than malloc keeps for itself when it is freed."""


def save_often(rank, folder):
    """Return how much memory is kept after saving again and again, and how much when it has been
    released.
    """
    process = psutil.Process()
    state = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(MANY_BYTES // 4))}
    with_tensor = process.memory_info().rss
    for _ in range(3):
        distckpt.async_save(state, f"{folder}/c", overwrite=True, durable=False).result(PATIENCE)
    kept = process.memory_info().rss - with_tensor
    distckpt.release_staging_memory()
    gc.collect()
    return kept, process.memory_info().rss - with_tensor


def test_memory_is_used_again_and_freed(tmp_path):
    # In a process of its own, which holds no free memory of other tests.
    [(kept, rest)] = run(save_often, 1, str(tmp_path))
    assert kept > MANY_BYTES * 0.9, "the copy is kept for the next save"
    assert rest < kept - MANY_BYTES * 0.9


def reserve_and_save(rank, folder):
    """Return how much memory is kept when it is reserved, twice, when a save has used it, and when
    it is freed.
    """
    del rank
    process, kept = psutil.Process(), []
    state = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(MANY_BYTES // 4))}
    # What planning needs itself.
    distckpt.async_save(
        {"v": ShardedTensor.from_rank_offsets("v", torch.ones(4))}, f"{folder}/small"
    ).result(PATIENCE)
    with_tensor = process.memory_info().rss

    def note():
        gc.collect()
        kept.append(process.memory_info().rss - with_tensor)

    for _ in range(2):
        assert distckpt.reserve_staging_memory(state).result(PATIENCE) == MANY_BYTES
        note()
    distckpt.async_save(state, f"{folder}/c").result(PATIENCE)
    note()
    other = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(4))}
    assert distckpt.reserve_staging_memory(other).result(PATIENCE) == 16
    note()
    assert distckpt.reserve_staging_memory(state, max_inflight_bytes=16 << 20).result(PATIENCE) == 0
    with CheckpointManager(f"{folder}/run") as manager:
        assert manager.reserve_staging_memory(state).result(PATIENCE) == MANY_BYTES
        note()
    note()
    return kept


def test_memory_is_reserved_once_and_freed_when_it_does_not_fit(tmp_path):
    [kept] = run(reserve_and_save, 1, str(tmp_path), backend=None)
    reserved, again, saved, replaced, reserved_by_manager, freed = kept
    slack = MANY_BYTES // 4
    assert MANY_BYTES - slack < reserved < MANY_BYTES + slack, (
        "the pages are there before anything is saved"
    )
    assert abs(again - reserved) < slack
    # Besides, a thread has a window for what it writes.
    assert saved < reserved + 2 * slack, "the save has used it"
    for rest in (replaced, freed):
        assert rest < saved - MANY_BYTES + slack
    assert reserved_by_manager > freed + MANY_BYTES - slack


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_ends_or_forks_while_memory_is_reserved(forks, tmp_path):
    fork = """
child = os.fork()
if child == 0:
    distckpt.async_save({"x": 1}, "c").result(200)
    assert distckpt.reserve_staging_memory(state).result(200) == 48 << 20
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
"""
    done = run_script(
        f"distckpt.reserve_staging_memory(state)\n{fork if forks else ''}\nsys.exit(3)", tmp_path
    )
    assert (done.returncode, done.stderr) == (3, "")
