"""A rank that is killed or stopped before any exchange of a save, load or export: the others raise
and name it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import RankFailedError
from tests.support.exchanges import watching_exchanges
from tests.support.harness import ask_parent, error_of, launched, run
from tests.support.rank_calls import NUM_RANKS, load, load_sharing_reads, overwrite
from tests.support.states import state_of

TIMEOUT = 12.0
"""Of the process group, in seconds: survivors of a stopped rank wait it out; on a busy machine
others are late too.
"""
AT_ONCE = 5
"""So many launches at the same time: they do little but wait."""


def consolidate(rank, folder):
    del rank
    distckpt.consolidate(f"{folder}/checkpoint", f"{folder}/export")


VERBS = [overwrite, load, load_sharing_reads, consolidate]


def list_exchanges(rank, verb, folder):
    names = []
    with watching_exchanges(names.append):
        verb(rank, folder)
    return names


def stop_before_exchange(rank, verb, folder, victim, name, occurrence):
    """The victim waits for the test when it is about to begin an exchange; the others just call."""
    names = []

    def arrive(begun):
        names.append(begun)
        if rank == victim and begun == name and names.count(name) == occurrence:
            ask_parent()

    with watching_exchanges(arrive):
        return error_of(verb, rank, folder)


def save_first(rank, folder):
    distckpt.save(state_of(1, rank, NUM_RANKS), f"{folder}/checkpoint")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A directory with an earlier checkpoint."""
    folder = tmp_path_factory.mktemp("template")
    run(save_first, NUM_RANKS, str(folder))
    return folder


class Loss(NamedTuple):
    """A rank that is killed, or else stopped, when it is about to begin the given occurrence of an
    exchange.
    """

    verb: Callable[[int, str], None]
    victim: int
    is_killed: bool
    name: str
    occurrence: int = 1


def lose_a_rank(loss, folder):
    """Return the errors of the survivors."""
    survivors = [rank for rank in range(NUM_RANKS) if rank != loss.victim]
    arguments = (
        stop_before_exchange,
        NUM_RANKS,
        loss.verb,
        str(folder),
        loss.victim,
        loss.name,
        loss.occurrence,
    )
    with launched(*arguments, group_timeout=TIMEOUT) as launch:
        launch.wait_for_signal(loss.victim)
        if loss.is_killed:
            launch.kill(loss.victim)
        else:
            os.kill(launch.processes[loss.victim].pid, signal.SIGSTOP)
        launch.wait_for_end(*survivors)
        if not loss.is_killed:
            launch.kill(loss.victim)
        outcomes = launch.values()
    return [outcomes[rank] for rank in survivors]


def check_losses(losses, template, folder):
    """Lose ranks in launches of their own, some at a time; in each the others raise, and what is on
    disk is whole.
    """
    folders = [folder / str(number) for number in range(len(losses))]
    for copy in folders:
        shutil.copytree(template, copy)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lose_a_rank, losses, folders))
    for loss, copy, errors in zip(losses, folders, outcomes, strict=True):
        for error in errors:
            assert isinstance(error, RankFailedError), (loss, error)
            assert list(error.failures) == [loss.victim], (loss, error)
            assert f"Lost contact with rank {loss.victim} " in str(error)
        # A rank that is lost when the coordinator may have committed already finds it done,
        # perhaps.
        may_be_new = loss.verb is overwrite and loss.name == "commit"
        assert value_in(copy / "checkpoint") in ((1, 2) if may_be_new else (1,)), loss
        if (copy / "export").exists():
            exported = load_file(copy / "export" / "model.safetensors").values()
            assert set(torch.cat([tensor.flatten() for tensor in exported]).tolist()) == {1}, loss
        if loss.victim != 0:
            assert set(os.listdir(copy)) <= {"checkpoint", "export"}, loss


def value_in(path):
    """Return the value that all of a checkpoint holds."""
    assert distckpt.verify(path).is_whole
    tensors = distckpt.open(path).read_tensors().values()
    values = torch.cat([tensor.flatten() for tensor in tensors]).tolist()
    (value,) = {distckpt.open(path).common_state["value"], *values}
    return value


def test_the_others_name_a_killed_rank(template, tmp_path):
    losses = [
        Loss(overwrite, 2, True, "describe the state dict"),
        Loss(overwrite, 0, True, "create directories"),
        Loss(overwrite, 2, True, "save"),
        Loss(overwrite, 0, True, "commit"),
        Loss(load, 2, True, "plan the reads"),
        Loss(load_sharing_reads, 2, True, "read for other ranks"),
        Loss(load, 0, True, "load"),
        Loss(consolidate, 2, True, "write output files"),
    ]
    check_losses(losses, template, tmp_path)


def test_the_others_name_a_stopped_rank(template, tmp_path):
    losses = [
        Loss(overwrite, 0, False, "describe the state dict"),
        Loss(overwrite, 2, False, "save"),
        Loss(load, 0, False, "find the checkpoint"),
        Loss(load_sharing_reads, 2, False, "exchange of tensors"),
        Loss(consolidate, 2, False, "open the checkpoint"),
    ]
    check_losses(losses, template, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 2], ids=["coordinator", "other"])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_the_others_name_a_rank_lost_at_any_exchange(verb, victim, is_killed, template, tmp_path):
    shutil.copytree(template, tmp_path / "whole")
    names = run(list_exchanges, NUM_RANKS, verb, str(tmp_path / "whole"))[victim]
    losses = [
        Loss(verb, victim, is_killed, name, names[: i + 1].count(name))
        for i, name in enumerate(names)
    ]
    check_losses(losses, template, tmp_path)
