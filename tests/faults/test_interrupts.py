"""Signals in the middle of an operation: KeyboardInterrupt on one rank ends it on all, and all may
go on together.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import distckpt
from distckpt import CheckpointManager, RankFailedError
from distckpt._base import interrupts
from distckpt._ranks import exchanges
from tests.support.exchanges import watching_exchanges
from tests.support.harness import ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.rank_calls import NUM_RANKS, load, load_sharing_reads, overwrite
from tests.support.sampling import one_in
from tests.support.states import state_of, value_of

SECONDS_LEFT = 30.0
"""All ranks have the error long before: nobody waits for the process group's timeout."""


def save(rank, folder):
    distckpt.save(state_of(2, rank, NUM_RANKS), f"{folder}/saved")


def async_save(rank, folder):
    distckpt.async_save(state_of(2, rank, NUM_RANKS), f"{folder}/saved").result(SECONDS_LEFT)


def consolidate(rank, folder):
    distckpt.consolidate(f"{folder}/checkpoint", f"{folder}/saved")


def save_step(rank, folder):
    manager = CheckpointManager(f"{folder}/saved", async_save=False)
    manager.save(1, state_of(2, rank, NUM_RANKS))


def load_step(rank, folder):
    CheckpointManager(f"{folder}/run").load(state_of(-1, rank, NUM_RANKS))


VERBS = [save, overwrite, async_save, load, load_sharing_reads, consolidate, save_step, load_step]


class Round(NamedTuple):
    """What came of an interrupted call, and of the first one afterwards."""

    victim: int
    error: BaseException | None
    seconds: float
    total: int
    next_error: BaseException | None
    left: list[Path]


def let_interrupts_through():
    """Undo what shells do to programs in the background, whose children inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def prepare(rank, folder):
    distckpt.save(state_of(1, rank, NUM_RANKS), f"{folder}/checkpoint")
    CheckpointManager(f"{folder}/run", async_save=False).save(1, state_of(1, rank, NUM_RANKS))


def rounds_of(rank, verb, folder, seeds):
    """Call again and again; each time one rank gets SIGINT: at the first exchange in the first
    round, a moment after some exchange in the others.
    """
    let_interrupts_through()
    prepare(rank, folder)
    names: list[str] = []
    with watching_exchanges(names.append):
        verb(rank, folder)
    rounds = []
    for seed in seeds:
        chance = random.Random(f"{verb.__name__} {seed}")
        victim, number, delay = chance.randrange(NUM_RANKS), 0, 0.0
        if rounds:
            number, delay = chance.randrange(len(names)), chance.expovariate(500)
        sum_over_ranks(0)
        if rank == 0:
            shutil.rmtree(f"{folder}/saved", ignore_errors=True)
        sum_over_ranks(0)
        rounds.append(interrupted(verb, rank, folder, victim, number, delay))
    return rounds


def interrupted(verb, rank, folder, victim, number, delay):
    sender = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    names, error = [], None

    def arrive(name):
        names.append(name)
        if rank == victim and len(names) == number + 1:
            if delay:
                sender.start()
            else:
                signal.raise_signal(signal.SIGINT)

    started = time.monotonic()
    try:
        with watching_exchanges(arrive):
            verb(rank, folder)
        if rank == victim and sender.ident is not None:
            # The signal may come when all is over.
            sender.join()
            signal.sigtimedwait([], 0)
    except BaseException as caught:
        error = caught
    seconds = time.monotonic() - started
    distckpt._io.background.wait_for_all()
    total = sum_over_ranks(1)
    left = [
        path
        for path in Path(folder).rglob("*")
        if path.name.startswith(".") or "saved" in path.parts
    ]
    return Round(victim, error, seconds, total, error_of(save_and_load, rank, folder), left)


def save_and_load(rank, folder):
    distckpt.save(state_of(3, rank, NUM_RANKS), f"{folder}/next", overwrite=True)
    loaded = distckpt.load(state_of(-1, rank, NUM_RANKS), f"{folder}/next")
    assert value_of(loaded) == 3


def check_round(results: Sequence[Round]) -> str:
    """Check what came of a round on all ranks, and return in a word what it was."""
    for result in results:
        assert result.seconds < SECONDS_LEFT
        assert (result.total, result.next_error) == (NUM_RANKS, None)
        assert not [path for path in result.left if path.name.startswith(".")], (
            "nothing is left behind"
        )
    victim = results[0].victim
    own = results[victim].error
    others = [result.error for rank, result in enumerate(results) if rank != victim]
    assert own is None or isinstance(own, KeyboardInterrupt), own
    if not any(others):
        return "went well" if own is None else "came too late"
    assert isinstance(own, KeyboardInterrupt)
    for error in others:
        assert isinstance(error, RankFailedError), error
        assert list(error.failures) == [victim]
        assert "KeyboardInterrupt" in str(error)
    assert not [path for path in results[0].left if path.suffix]
    return "interrupted"


@pytest.mark.parametrize("num_rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_an_interrupt_on_one_rank_ends_a_call_on_all(verb, num_rounds, tmp_path):
    results = run(rounds_of, NUM_RANKS, verb, str(tmp_path), range(num_rounds))
    kinds = Counter(map(check_round, zip(*results, strict=True)))
    print(verb.__name__, dict(kinds))
    assert kinds["interrupted"]
    assert distckpt.verify(tmp_path / "checkpoint").is_whole


# --- Around the first exchange --------------------------------------------------------------------


def interrupted_at(function, place):
    """Call a function, with SIGINT at an event of the interpreter in it, of those that concern
    distckpt; return how many there were, and the error.

    Events are counted from the beginning of the outermost call of distckpt that all ranks make.
    """
    seen = []

    def watch(frame, event, argument):
        # Not at calls of C functions, such as the release of a lock: Python runs no handler
        # there.
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if "/distckpt/" in code.co_filename and (seen or code.co_name == "num_exchanges"):
            seen.append(event)
            if len(seen) == place:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        error = error_of(function)
    finally:
        sys.setprofile(None)
    return len(seen), error


def interrupt_the_beginning(rank, verb, folder, places):
    """Interrupt rank 1 at each place; return the errors of this rank."""
    let_interrupts_through()
    prepare(rank, folder)
    errors = []
    for place in places:
        sum_over_ranks(0)
        if rank == 0:
            shutil.rmtree(f"{folder}/saved", ignore_errors=True)
        sum_over_ranks(0)
        _, error = interrupted_at(partial(verb, rank, folder), place if rank == 1 else 0)
        errors.append(error)
        assert sum_over_ranks(1) == NUM_RANKS, f"at {place} they are out of step: {error!r}"
    return errors


@pytest.mark.parametrize("verb", one_in(2, VERBS, 1), ids=lambda verb: verb.__name__)
def test_an_interrupt_around_the_first_exchange(verb, tmp_path):
    places = [*range(6, 36, 2), *range(36, 200, 16)]
    results = run(interrupt_the_beginning, NUM_RANKS, verb, str(tmp_path), places)
    for place, *errors in zip(places, *results, strict=True):
        assert isinstance(errors[1], KeyboardInterrupt), (place, errors)
        for error in (errors[0], errors[2]):
            assert isinstance(error, RankFailedError), (place, errors)
            assert list(error.failures) == [1]
            assert "KeyboardInterrupt" in str(error)


# --- A rank that does not come --------------------------------------------------------------------


def wait_for_the_others(rank, folder):
    """Rank 0 saves, the others do not come; return what it says, and what two interrupts do."""
    if rank > 0:
        ask_parent()
        return None
    let_interrupts_through()
    log = NoteOf("still waiting")
    logging.getLogger("distckpt").addHandler(log)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(exchanges, "WAITING_LOG_SECONDS", 0.1)
        monkeypatch.setattr(interrupts, "INSISTING_SECONDS", 0.0)

        def interrupt_twice():
            log.is_noted.wait()
            os.kill(os.getpid(), signal.SIGINT)
            # Two signals at the same time would be one.
            while not interrupts._arrived:
                threading.Event().wait(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=interrupt_twice)
        sender.start()
        error = error_of(save, rank, folder)
        sender.join()
    return error, log.texts, signal.getsignal(signal.SIGINT) is signal.default_int_handler


class NoteOf(logging.Handler):
    """Keeps the messages that hold a text."""

    def __init__(self, text):
        super().__init__()
        self.text, self.texts, self.is_noted = text, [], threading.Event()

    def emit(self, record):
        if self.text in record.getMessage():
            self.texts.append(record.getMessage())
            self.is_noted.set()


def test_a_rank_that_waits_says_for_whom_and_a_second_interrupt_ends_the_wait(tmp_path):
    with launched(wait_for_the_others, NUM_RANKS, str(tmp_path)) as launch:
        launch.wait_for_end(0)
        launch.answer(1)
        launch.answer(2)
        (error, texts, is_restored), _, _ = launch.values()
    assert isinstance(error, KeyboardInterrupt)
    assert texts == ["rank 0: still waiting for ranks 1, 2 in 'describe the state dict'"]
    assert is_restored
    assert list(tmp_path.iterdir()) == []
