"""What saving and loading leave behind in the processes that do it, and beside the checkpoint:
nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.harness import error_of, launched, sum_over_ranks
from tests.support.states import state_of

SHARED_MEMORY = Path("/dev/shm")


def save_and_load(rank, path):
    distckpt.save(state_of(1, rank, 2, 3000), path, overwrite=True)
    distckpt.load(state_of(0, rank, 2, 3000), path)
    error_of(
        distckpt.save, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, f"{path}_invalid"
    )
    error_of(distckpt.load, state_of(0, rank, 2, 3000), f"{path}_absent")


def open_things():
    """Return the open files, threads and children of this process."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    # The descriptor through which they were listed is closed already.
    files = sorted(os.readlink(link) for link in links if os.path.lexists(link))
    return files, sorted(thread.name for thread in threading.enumerate()), children_of(os.getpid())


def children_of(pid):
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since it was listed
            # "pid (name) state parent ...", and a name may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                children.append(stat.parent.name)
    return children


def mapped_shared_memory():
    return [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(SHARED_MEMORY) in line
    ]


def watch_saving_and_loading(rank, path):
    """The first round may start what stays (a gloo worker, say); the later ones must not add to
    it.
    """
    save_and_load(rank, path)
    sum_over_ranks(0)
    before = open_things()
    for _ in range(3):
        save_and_load(rank, path)
    sum_over_ranks(0)
    return before, open_things(), mapped_shared_memory(), os.getpid()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leftovers")
    before = set(os.listdir(SHARED_MEMORY))
    with launched(watch_saving_and_loading, 2, str(folder / "checkpoint")) as launch:
        values = launch.values()
    return folder, values, set(os.listdir(SHARED_MEMORY)) - before


def test_no_open_files_threads_or_children(watched):
    _, values, _ = watched
    for (files, threads, children), after, _, _ in values:
        assert children == []
        assert threads == ["MainThread"]
        assert after == (files, threads, children)


def test_no_shared_memory(watched):
    _, values, appeared = watched
    for _, _, mapped, pid in values:
        assert mapped == []
        assert [name for name in appeared if str(pid) in name] == []


def test_no_processes(watched):
    _, values, _ = watched
    for *_, pid in values:
        assert not Path(f"/proc/{pid}").exists()


def test_no_files_beside_the_checkpoint(watched):
    folder, _, _ = watched
    assert os.listdir(folder) == ["checkpoint"]
    assert sorted(os.listdir(folder / "checkpoint")) == [
        "manifest.safetensors",
        "metadata.json",
        "objects",
        "tensors",
    ]
    # Four saves, but only the files of the last one: one per rank.
    assert len(os.listdir(folder / "checkpoint" / "tensors")) == 2
    assert len(os.listdir(folder / "checkpoint" / "objects")) == 2
