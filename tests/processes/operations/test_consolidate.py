"""Consolidation in a process of its own, which has limits or is killed."""

from __future__ import annotations

import functools
import itertools
import os
import resource
import sys

import pytest
import torch

import distckpt
from benchmarks.measure import peak_memory_bytes
from distckpt import ShardedTensor
from distckpt.rules import Transpose
from tests.support.disk import tree_of
from tests.support.harness import ask_parent, launched, run
from tests.support.hf_folders import read_export, same_bytes, write_folder
from tests.support.hooked_store import hooked_reads


def export_with_few_files(rank, folder):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit))
    distckpt.consolidate(f"{folder}/in", f"{folder}/out")
    return same_bytes(distckpt.open(f"{folder}/in").read_tensors(), read_export(f"{folder}/out"))


def test_more_shard_files_than_may_be_open(tmp_path):
    tensor = torch.arange(1100 * 3, dtype=torch.float32).view(1100, 3)
    write_folder(tmp_path / "in", {"w": tensor}, 0, 1100)
    assert len(os.listdir(tmp_path / "in")) == 1100
    assert run(export_with_few_files, 1, str(tmp_path), backend=None) == [True]
    assert same_bytes(read_export(tmp_path / "out"), {"w": tensor})


def opens_of_an_export(rank, folder):
    opened = []

    def note(event, arguments):
        # Headers are read through `open`, which has a mode.
        if (
            event == "open"
            and str(arguments[0]).startswith(f"{folder}/in")
            and arguments[1] is None
        ):
            opened.append(arguments[0])

    sys.addaudithook(note)
    distckpt.consolidate(f"{folder}/in", f"{folder}/out", max_file_bytes=1)
    return len(opened), len(set(opened))


def test_shards_stay_open_from_one_output_to_the_next(tmp_path):
    tensors = {
        key: torch.arange(40 * 3, dtype=torch.float32).view(40, 3) + i
        for i, key in enumerate("abc")
    }
    write_folder(tmp_path / "in", tensors, 0, 40)
    assert run(opens_of_an_export, 1, str(tmp_path), backend=None) == [(40, 40)]
    assert same_bytes(read_export(tmp_path / "out"), tensors)


BUDGETS = [32 << 20, 80 << 20, 128 << 20]


EXPORTS = {
    "folder": {},
    "folder to bfloat16": {"dtype": torch.bfloat16},
    "checkpoint": {},
    "checkpoint to 8 bits": {"dtype": torch.float8_e4m3fn},
    "checkpoint transposed": {"rules": [Transpose("w", "w")]},
}


def memory_of_exports(rank, folder):
    torch.set_num_threads(1)
    peaks = {}
    for budget, (name, options) in itertools.product(BUDGETS, EXPORTS.items()):
        source, target = f"{folder}/{name.split()[0]}", f"{folder}/out"
        settings = {"max_inflight_bytes": budget, "overwrite": True, **options}
        peaks[budget, name] = peak_memory_bytes(
            functools.partial(distckpt.consolidate, source, target, **settings)
        )
    return peaks


def test_memory_is_bounded_however_large_a_tensor_is(tmp_path):
    tensor = torch.zeros(7200, 7200)
    tensor[::1000] = 1
    assert tensor.nbytes > 200e6
    write_folder(tmp_path / "folder", {"w": tensor}, 1, 2)
    columns = enumerate(tensor.chunk(2, 1))
    state = {f"w{i}": ShardedTensor.from_rank_offsets("w", part, (1, i, 2)) for i, part in columns}
    distckpt.save(state, tmp_path / "checkpoint")
    (peaks,) = run(memory_of_exports, 1, str(tmp_path), backend=None)
    assert len(peaks) == len(BUDGETS) * len(EXPORTS)
    for (budget, name), peak in peaks.items():
        assert peak < budget + (64 << 20), f"{name}: {peak / 2**20:.0f} MiB of {budget >> 20} MiB"


def export_until_killed(rank, folder, num_reads):
    reads = itertools.count(1)

    def stop(path, first, last):
        if first and next(reads) == num_reads:
            ask_parent()

    with hooked_reads(stop):
        distckpt.consolidate(
            f"hooked://{folder}/in",
            f"{folder}/out",
            overwrite=True,
            max_file_bytes=1200,
            max_inflight_bytes=1,
        )


@pytest.mark.parametrize("num_reads", [1, 3, 5])
def test_a_process_killed_in_the_middle_leaves_the_earlier_export(tmp_path, num_reads):
    earlier, later = (
        {f"w{i}": torch.full((4, 60), float(i + start)) for i in range(3)} for start in (0, 100)
    )
    write_folder(tmp_path / "old", earlier, 0, 2)
    distckpt.consolidate(tmp_path / "old", tmp_path / "out", max_file_bytes=2000)
    (tmp_path / "out" / "config.json").write_text("{}")
    before = tree_of(tmp_path / "out")
    write_folder(tmp_path / "in", later, 1, 2)
    with launched(export_until_killed, 1, str(tmp_path), num_reads, backend=None) as launch:
        launch.wait_for_signal(0)
        assert any(name.startswith(".out.") for name in os.listdir(tmp_path)), (
            "it was in the middle"
        )
        launch.kill(0)
    assert tree_of(tmp_path / "out") == before
    assert same_bytes(read_export(tmp_path / "out"), earlier)
    distckpt.consolidate(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert same_bytes(read_export(tmp_path / "out"), later)
