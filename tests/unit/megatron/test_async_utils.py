"""Megatron's queue of asynchronous requests, as programs written for it use it."""

from __future__ import annotations

import inspect
import threading

import pytest

import distckpt
from distckpt import CheckpointExistsError, CheckpointingException
from distckpt.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from tests.support.states import state_of

pytestmark = pytest.mark.usefixtures("no_saves_left")

PATIENCE = 200.0


def loaded(path):
    result = distckpt.load(state_of(-1), path)
    return result["rows"].unique().tolist(), result["value"]


def test_fields_and_methods_are_megatrons():
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.strategies.async_utils")
    assert AsyncRequest._fields == theirs.AsyncRequest._fields
    assert AsyncRequest._field_defaults == theirs.AsyncRequest._field_defaults
    for ours, other in (
        (AsyncRequest, theirs.AsyncRequest),
        (AsyncCallsQueue, theirs.AsyncCallsQueue),
    ):
        for name, function in inspect.getmembers(other, inspect.isfunction):
            if name == "__init__" or not name.startswith("_"):
                parameters = inspect.signature(getattr(ours, name)).parameters.values()
                expected = inspect.signature(function).parameters.values()
                own = [(p.name, p.default) for p in parameters]
                if "cpu_shm_mode" not in {p.name for p in expected}:
                    # An argument of newer versions.
                    own = [pair for pair in own if pair[0] != "cpu_shm_mode"]
                assert own == [(p.name, p.default) for p in expected], name


def test_a_save_through_the_queue(tmp_path):
    queue, path, seen, reports = AsyncCallsQueue(persistent=True), tmp_path / "c", [], []
    state = state_of(1)
    request = distckpt.megatron.save(state, path, async_sharded_save=True, on_report=reports.append)
    request.add_finalize_fn(
        lambda: seen.append(distckpt.megatron.check_is_distributed_checkpoint(path))
    )
    assert not path.exists()
    assert queue.schedule_async_request(request) == 0
    state["rows"].data.zero_()
    state["value"] = 0
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert (queue.get_num_unfinalized_calls(), seen) == (0, [True])
    assert loaded(path) == ([1], 1)
    assert [report.location for report in reports] == [str(path)]
    queue.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_request_that_is_scheduled_twice(is_written, tmp_path):
    queue = AsyncCallsQueue()
    request = distckpt.megatron.save(state_of(3), tmp_path / "c", async_sharded_save=True)
    assert queue.schedule_async_request(request) == 0
    if is_written:
        queue.maybe_finalize_async_calls(blocking=True)
    with pytest.raises(CheckpointingException, match="was scheduled before: each request is"):
        queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match="was scheduled before"):
        request.execute_sync()
    other = distckpt.megatron.save(state_of(4), tmp_path / "d", async_sharded_save=True)
    assert queue.schedule_async_request(other) == 1
    queue.close()
    assert loaded(tmp_path / "c") == ([3], 3)
    assert loaded(tmp_path / "d") == ([4], 4)


def test_execute_sync(tmp_path):
    seen = []
    request = distckpt.megatron.save(state_of(2), tmp_path / "c", async_sharded_save=True)
    request.add_finalize_fn(lambda: seen.append(1))
    request.execute_sync()
    assert seen == [1]
    assert loaded(tmp_path / "c") == ([2], 2)


def test_any_function_can_be_requested():
    order, may_end = [], threading.Event()

    def work(first, staged, *, last):
        assert may_end.wait(PATIENCE)
        order.append((first, staged, last))

    queue = AsyncCallsQueue()
    preload = lambda: order.append("preloaded") or "staged"  # noqa: E731
    finalize = [lambda: order.append("first"), lambda: order.append("second")]
    assert (
        queue.schedule_async_request(AsyncRequest(work, (1, None), finalize, {"last": 3}, preload))
        == 0
    )
    assert (
        queue.schedule_async_request(
            AsyncRequest(None, (), [lambda: order.append("nothing to do")])
        )
        == 1
    )
    assert order == ["preloaded"]
    assert queue.maybe_finalize_async_calls() == []
    may_end.set()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]
    assert order == ["preloaded", (1, "staged", 3), "first", "second", "nothing to do"]


def test_requests_are_frozen_when_scheduled():
    request = AsyncRequest(None, (), [])
    request.add_finalize_fn(lambda: None)
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)
    assert not request.is_frozen


def test_a_request_that_fails_is_raised_when_it_is_finalized(tmp_path):
    queue, seen = AsyncCallsQueue(), []
    request = distckpt.megatron.save(state_of(1), tmp_path / "c", async_sharded_save=True)
    request.add_finalize_fn(lambda: seen.append(1))
    distckpt.save(state_of(2), tmp_path / "c")
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointExistsError):
        queue.maybe_finalize_async_calls(blocking=True)
    assert (seen, queue.get_num_unfinalized_calls()) == ([], 0)
    distckpt.megatron.save(state_of(3), tmp_path / "d", async_sharded_save=True).execute_sync()
    assert loaded(tmp_path / "d") == ([3], 3)


def test_aborting_forgets_what_has_not_begun(tmp_path):
    may_end, ran = threading.Event(), []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(may_end.wait, (PATIENCE,), []))
    queue.schedule_async_request(AsyncRequest(ran.append, (1,), []))
    for number in range(2):
        queue.schedule_async_request(
            distckpt.megatron.save(state_of(1), tmp_path / str(number), async_sharded_save=True)
        )
    queue.close(abort=True)
    may_end.set()
    distckpt._io.background.wait_for_all()
    assert (ran, queue.get_num_unfinalized_calls()) == ([], 0)
    # The memory of those that were given up is there for others.
    distckpt.async_save(state_of(2), tmp_path / "c", timeout=30).result(PATIENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_preloading_needs_a_second_argument():
    with pytest.raises(CheckpointingException, match="second argument"):
        AsyncCallsQueue().schedule_async_request(AsyncRequest(print, (1,), [], {}, lambda: 2))
