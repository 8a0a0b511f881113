"""Calls in the middle of another call, by signal handlers and callbacks: refused, and harmless."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, CheckpointManager, PreemptionGuard, ShardedTensor
from distckpt._base import interrupts
from distckpt.hf import HuggingFaceConsolidationStrategy
from tests.support.states import numbered

NUMBERS = numbered(3 << 20).view(3, -1)


def state(value=None):
    # Strided, so that it goes through the scratch memory of a thread.
    data = NUMBERS.t() if value is None else torch.full_like(NUMBERS, value).t()
    return {"numbers": ShardedTensor.from_rank_offsets("numbers", data), "step": 1}


@contextlib.contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


CALLS = {
    "save": lambda folder: distckpt.save(state(7), f"{folder}/other"),
    "async_save": lambda folder: distckpt.async_save(state(7), f"{folder}/other"),
    "load": lambda folder: distckpt.load(state(0), f"{folder}/there"),
    "open": lambda folder: distckpt.open(f"{folder}/there").read_tensors(),
    "verify": lambda folder: distckpt.verify(f"{folder}/there"),
    # Through a function of this package.
    "consolidate": lambda folder: HuggingFaceConsolidationStrategy().consolidate(
        f"{folder}/there", f"{folder}/other"
    ),
    "CheckpointManager.save": lambda folder: CheckpointManager(f"{folder}/other").save(1, state(7)),
}


@pytest.fixture
def folder(tmp_path):
    distckpt.save(state(), tmp_path / "there")
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_a_call_by_a_signal_handler_is_refused(name, folder):
    errors = []

    def handle(number, frame):
        with pytest.raises(
            CheckpointingException, match=f"{name} was called in the middle of save, in the same"
        ) as e:
            CALLS[name](folder)
        errors.append(e.value)

    def preprocess(common):
        signal.raise_signal(signal.SIGUSR1)
        return common

    with handling(signal.SIGUSR1, handle):
        distckpt.megatron.save(
            state(), folder / "c", preprocess_common_before_consistancy_check=preprocess
        )
        distckpt.save(
            state(), folder / "d", progress=lambda done, total: signal.raise_signal(signal.SIGUSR1)
        )
    assert len(errors) >= 2
    assert sorted(os.listdir(folder)) == ["c", "d", "there"]
    assert torch.equal(distckpt.open(folder / "d").read_tensors()["numbers"], NUMBERS.t())


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_callback_in_another_thread_is_refused(name, folder):
    large = {"large": ShardedTensor.from_rank_offsets("large", torch.ones(12 << 20))}
    with pytest.raises(CheckpointingException, match=f"^{name} was called in the middle of save"):
        distckpt.save(
            large, folder / "c", progress=lambda done, total: CALLS[name](folder), durable=False
        )
    handle = distckpt.async_save(
        large, folder / "c", progress=lambda done, total: CALLS[name](folder)
    )
    with pytest.raises(
        CheckpointingException, match=f"{name} was called in the middle of the background save to"
    ):
        handle.result()
    with pytest.raises(CheckpointingException, match=f"^{name} was called in the middle of load"):
        distckpt.load(state(0), folder / "there", progress=lambda done, total: CALLS[name](folder))
    assert os.listdir(folder) == ["there"]


def test_what_a_handler_raises_ends_the_save_cleanly(folder):
    def handle(number, frame):
        distckpt.save(state(7), folder / "other")

    with (
        handling(signal.SIGUSR1, handle),
        pytest.raises(CheckpointingException, match="Let it set a flag"),
    ):
        distckpt.save(
            state(), folder / "c", progress=lambda done, total: signal.raise_signal(signal.SIGUSR1)
        )
    assert os.listdir(folder) == ["there"]


def test_handlers_that_try_to_save_all_the_time(tmp_path):
    """They interrupt between any two instructions."""
    num_refused = 0
    other = {"x": ShardedTensor.from_rank_offsets("x", torch.full((3000, 3), 7.0).t())}

    def handle(number, frame):
        nonlocal num_refused
        try:
            distckpt.save(other, f"{tmp_path}/by_handler", overwrite=True, durable=False)
        except CheckpointingException:
            num_refused += 1
        signal.setitimer(signal.ITIMER_REAL, 0.003)

    with handling(signal.SIGALRM, handle):
        for attempt in range(4):
            signal.setitimer(signal.ITIMER_REAL, 0.003)
            distckpt.save(state(), tmp_path / str(attempt), durable=False)
            loaded = distckpt.load(state(0), tmp_path / str(attempt))
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch.equal(loaded["numbers"], NUMBERS.t())
            assert torch.equal(
                distckpt.open(tmp_path / str(attempt)).read_tensors()["numbers"], NUMBERS.t()
            )
    assert num_refused


def test_a_handler_may_come_just_before_and_just_after_a_call(tmp_path):
    """Wherever it interrupts what surrounds a call, its own call is refused or made, and the other
    one goes on.
    """
    distckpt.save({"x": ShardedTensor.from_rank_offsets("x", torch.ones(3))}, tmp_path / "there")
    came = {"made": 0, "refused": 0}
    line = 0

    def handle(number, frame):
        try:
            distckpt.open(tmp_path / "there").read_tensors()
            came["made"] += 1
        except CheckpointingException:
            came["refused"] += 1

    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        line += event == "line"
        if event == "line" and line == chosen:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    with handling(signal.SIGUSR1, handle):
        for chosen in itertools.count(1):
            line = 0
            sys.settrace(trace)
            try:
                loaded = distckpt.open(tmp_path / "there").read_tensors()
            finally:
                sys.settrace(before)
            assert torch.equal(loaded["x"], torch.ones(3))
            if line < chosen:
                break
    assert min(came.values()) > 3


def test_a_preemption_guard_notes_a_signal_during_a_save(folder):
    with PreemptionGuard([signal.SIGUSR1]) as guard:
        distckpt.save(
            state(), folder / "c", progress=lambda done, total: signal.raise_signal(signal.SIGUSR1)
        )
        assert guard.should_stop()
