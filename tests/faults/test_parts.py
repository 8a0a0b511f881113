"""Work in parts, whose processes are killed: what comes out is what one process makes, byte for
byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import distckpt
from distckpt import tasks
from tests.support.disk import tree_of
from tests.support.parts import NUM_PARTS, run_killed
from tests.support.states import numbered, save_checkpoint


class Case(NamedTuple):
    """A verb: what one process does with a folder, and the tasks of the same."""

    in_one: Callable[[Path, Path], Any]
    in_parts: Callable[..., list[tasks.Task]]


def consolidate_in_one(folder: Path, output: Path) -> Any:
    return distckpt.consolidate(folder / "a", output, **EXPORT)


def consolidate_in_parts(folder: Path, output: Path, num_tasks: int) -> list[tasks.Task]:
    return tasks.consolidate(folder / "a", output, num_tasks=num_tasks, **EXPORT)


def merge_in_one(folder: Path, output: Path) -> Any:
    return distckpt.merge([folder / "a", folder / "b"], output, **EXPORT)


def merge_in_parts(folder: Path, output: Path, num_tasks: int) -> list[tasks.Task]:
    return tasks.merge([folder / "a", folder / "b"], output, num_tasks=num_tasks, **EXPORT)


def reshard_in_one(folder: Path, output: Path) -> Any:
    return distckpt.reshard(folder / "a", output, **RESHARD)


def reshard_in_parts(folder: Path, output: Path, num_tasks: int) -> list[tasks.Task]:
    return tasks.reshard(folder / "a", output, num_tasks=num_tasks, **RESHARD)


RESHARD = {"num_ranks": 30, "grids": {"layers.*": (3, 2)}}
EXPORT = {"max_file_bytes": 100_000, "dtype": torch.bfloat16}
CASES = {
    "consolidate": Case(consolidate_in_one, consolidate_in_parts),
    "merge": Case(merge_in_one, merge_in_parts),
    "reshard": Case(reshard_in_one, reshard_in_parts),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two checkpoints of the same tensors."""
    made = tmp_path_factory.mktemp("checkpoints")
    for factor, name in ((1.0, "a"), (3.0, "b")):
        tensors = {f"layers.{i}.w": factor * (numbered(60, 500) - i) for i in range(40)}
        save_checkpoint(made / name, tensors, args={"lr": factor})
    return made


def check_killed(case: Case, folder: Path, place: Path, num_kills: int) -> None:
    expected = case.in_one(folder, place / "one")
    killed, seed = 0, 0
    while killed < num_kills:
        output = place / "out"
        shutil.rmtree(output, ignore_errors=True)
        tasks.abandon(output)
        work = case.in_parts(folder, output, num_tasks=NUM_PARTS)
        killed += run_killed(work, num_kills - killed, 0.3, seed)
        seed += 1
        assert tree_of(output) == tree_of(place / "one")
        (again,) = case.in_parts(folder, output, num_tasks=1)
        report = again.run()
        assert report.num_pieces == 0
        assert type(report.report) is type(expected)


@pytest.mark.parametrize("name", CASES)
def test_killed_parts(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_parts_sweep(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=100)
