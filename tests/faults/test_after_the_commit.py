"""What fails after an output has appeared is a warning: the call has done what it promised."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor, streaming, tasks
from tests.support.calls import watched

NAME = "target"


def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((64,), float(value))), "step": 1}


def source_in(folder):
    source = folder.parent / "source"
    if not source.exists():
        distckpt.save(state(2), source)
    return source


def save(folder):
    distckpt.save(state(2), folder / NAME)


def save_in_background(folder):
    distckpt.async_save(state(2), folder / NAME).result()


def overwrite(folder):
    distckpt.save(state(2), folder / NAME, overwrite=True)


def save_step(folder):
    with CheckpointManager(folder / NAME, keep_last=1, async_save=False) as manager:
        manager.save(2, state(2))


def reshard(folder):
    distckpt.reshard(source_in(folder), folder / NAME)


def reshard_in_parts(folder):
    for task in tasks.reshard(source_in(folder), folder / NAME, num_tasks=1):
        task.run()


def consolidate(folder):
    distckpt.consolidate(source_in(folder), folder / NAME)


def consolidate_over(folder):
    distckpt.consolidate(source_in(folder), folder / NAME, overwrite=True)


def consolidate_in_parts(folder):
    for task in tasks.consolidate(source_in(folder), folder / NAME, num_tasks=1):
        task.run()


def stream(folder):
    pieces = [("w", torch.full((64,), 2.0))]
    streaming.save_safetensors_streaming_sharded(
        iter(pieces), folder / NAME, [("w", torch.float32, (64,))]
    )


def old_checkpoint(folder):
    distckpt.save(state(1), folder / NAME)


def old_step(folder):
    with CheckpointManager(folder / NAME, async_save=False) as manager:
        manager.save(1, state(1))


def old_export(folder):
    distckpt.save(state(1), folder / "old")
    distckpt.consolidate(folder / "old", folder / NAME)
    (folder / NAME / "notes.txt").write_text("of the user")


def nothing(folder):
    pass


VERBS = {
    save: nothing,
    save_in_background: nothing,
    overwrite: old_checkpoint,
    save_step: old_step,
    reshard: nothing,
    reshard_in_parts: nothing,
    consolidate: nothing,
    consolidate_over: old_export,
    consolidate_in_parts: nothing,
    stream: nothing,
}


def has_appeared(folder):
    """Look without distckpt: the new files are in place, and hold the new value."""
    places = [folder / NAME, folder / NAME / "step_00000002"]
    found = [path for place in places for path in place.glob("**/*.safetensors")]
    return any(torch.full((64,), 2.0).numpy().tobytes() in path.read_bytes() for path in found)


def run_with_failure(verb, folder, number):
    """Let a call fail that the verb makes after its output has appeared; return how many such calls
    it has made, and its error.
    """
    numbers = []

    def on_call(call, moment):
        if moment == "before" and (numbers or has_appeared(folder)):
            numbers.append(call.number)
            if len(numbers) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    try:
        with watched(folder, on_call):
            verb(folder)
    except (OSError, distckpt.CheckpointingException) as error:
        return len(numbers), error
    return len(numbers), None


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_call_that_fails_fails_nothing(verb, tmp_path):
    source_in(tmp_path / "any")
    number, last = 1, 1
    while number <= last:
        folder = tmp_path / str(number)
        folder.mkdir()
        VERBS[verb](folder)
        last, error = run_with_failure(verb, folder, number)
        # If the name of the output cannot be made durable, it is taken back.
        assert error is None or not has_appeared(folder), (number, error)
        number += 1
    assert last > 1


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_lock_that_cannot_be_released_is_a_warning(verb, tmp_path, monkeypatch, caplog):
    source_in(tmp_path / "any")
    folder, flock = tmp_path / "run", fcntl.flock
    folder.mkdir()
    VERBS[verb](folder)

    def lacking(fd, operation):
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lacking)
    verb(folder)
    assert has_appeared(folder)
    assert "could not release the lock" in caplog.text
