"""Saves and loads, watched by an audit hook in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor

NO_PICKLE = """
import pickle
import sys
import threading

import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor

events = []

def note(event, args):
    if event.startswith(("pickle.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn")):
        events.append(event)

sys.addaudithook(note)
def load(path):
    loaded = distckpt.load(
        {
            "w": ShardedTensor.from_rank_offsets("w", torch.zeros(4)),
            "o": ShardedObject("o", None, (1,), (0,)),
        },
        path,
        verify=True,
    )
    assert (
        loaded["w"].tolist() == [1, 1, 1, 1]
        and loaded["o"] == {"a": (1, 2.5)}
        and loaded["args"]["lr"] == 0.1
    )
    distckpt.megatron.load_common_state_dict(path), distckpt.megatron.load_plain_tensors(path)
    distckpt.megatron.serialization.load_sharded_metadata(path)

# First in a process that has saved nothing.
load(sys.argv[1])
tensor, value = torch.ones(4), {"a": (1, 2.5)}
state = {
    "w": ShardedTensor.from_rank_offsets("w", tensor),
    "o": ShardedObject("o", value, (1,), (0,)),
}
distckpt.save({**state, "args": {"lr": 0.1, "rng": torch.get_rng_state()}}, sys.argv[2])
load(sys.argv[2])
assert events == [], events
assert "psutil" not in sys.modules
assert threading.active_count() == 1, threading.enumerate()
pickle.loads(b"cos\\ngetcwd\\n.")
assert events == ["pickle.find_class"], events
print("fine")
"""


def test_nothing_is_unpickled_and_no_process_started(tmp_path):
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(4)),
        "o": ShardedObject("o", {"a": (1, 2.5)}, (1,), (0,)),
        "args": {"lr": 0.1, "rng": torch.get_rng_state()},
    }
    distckpt.save(state, tmp_path / "c")
    done = subprocess.run(
        [sys.executable, "-c", NO_PICKLE, str(tmp_path / "c"), str(tmp_path / "d")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


SAVES_TWICE = """
import sys
import torch
import distckpt

for name in ("a", "b"):
    distckpt.save({"w": torch.ones(4)}, f"{sys.argv[1]}/{name}")
"""


@pytest.mark.parametrize(("rank", "size", "times"), [("1", "2", 1), ("0", "1", 0), ("", "", 0)])
def test_a_process_that_its_launcher_takes_for_one_of_several_is_warned_once(
    tmp_path, rank, size, times
):
    """`init_process_group` was forgotten: each process would save alone, to the same place."""
    done = subprocess.run(
        [sys.executable, "-c", SAVES_TWICE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RANK": rank,
            "WORLD_SIZE": size,
        },
        timeout=200,
    )
    assert done.stderr.count(f"rank {rank} of {size} to its launcher") == times
