"""Asynchronous saves and the process: its end, its children, its memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.harness import run

PATIENCE = 200.0

SCRIPT = """
import os, sys, threading, torch, distckpt
from distckpt import ShardedTensor
gate = threading.Event()
state = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(12 << 20))}
def progress(num_bytes):
    gate.wait(0.3)
"""


def run_script(body, tmp_path):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT + body]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_the_process_ends_when_the_save_is_done(tmp_path):
    done = run_script("distckpt.async_save(state, 'c', progress=progress)\nsys.exit(3)", tmp_path)
    assert done.returncode == 3, done.stderr
    assert distckpt.load_plain_tensors(tmp_path / "c")["v"].unique().tolist() == [1]
    assert os.listdir(tmp_path) == ["c"]


def test_the_process_ends_without_the_save(tmp_path):
    # A thread that writes is waited for: long enough for the program to end first, on a busy machine too.
    body = "distckpt.async_save(state, 'c', progress=lambda num_bytes: gate.wait(1), exit_timeout=0)"
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


MANY_BYTES = 40 << 20
"""More than malloc keeps for itself when it is freed."""


def save_often(rank, folder):
    """Return how much memory is kept after saving again and again, and how much when it has been released."""
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
