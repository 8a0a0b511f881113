"""Work in parts, whose processes are killed: what comes out is what one process makes, byte for
byte.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import distckpt
from distckpt import tasks, torch_dist
from tests.faults.test_crash_points import Point, dying_at, in_child, points_of
from tests.support.calls import recorded
from tests.support.harness import run
from tests.support.parts import NUM_PARTS, contents_of, run_killed
from tests.support.states import numbered, save_checkpoint

RESHARD = {"num_ranks": 20, "grids": {"layers.*": (3, 2)}}
EXPORT = {"max_file_bytes": 100_000, "dtype": torch.bfloat16}


class Case(NamedTuple):
    """A verb: what one process does, and the tasks of the same.

    Both get a folder with checkpoints `a` and `b`, and a place for the output, or for the journal
    of a verb that has no output.
    """

    in_one: Callable[[Path, Path], Any]
    in_parts: Callable[..., list[tasks.Task]]
    has_output: bool = True


def merge(folder: Path, output: Path) -> Any:
    return distckpt.merge([folder / "a", folder / "b"], output, **EXPORT)


def merge_tasks(folder: Path, output: Path, num_tasks: int) -> list[tasks.Task]:
    return tasks.merge([folder / "a", folder / "b"], output, num_tasks=num_tasks, **EXPORT)


def of_a(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    """Return a function of a folder and a place, which reads the checkpoint `a`."""
    return lambda folder, place, **more: function(folder / "a", place, **arguments, **more)


CASES = {
    "consolidate": Case(of_a(distckpt.consolidate, **EXPORT), of_a(tasks.consolidate, **EXPORT)),
    "merge": Case(merge, merge_tasks),
    "reshard": Case(of_a(distckpt.reshard, **RESHARD), of_a(tasks.reshard, **RESHARD)),
    "export_torch_dist": Case(of_a(torch_dist.export), of_a(tasks.export_torch_dist)),
    "verify": Case(
        lambda folder, place: distckpt.verify(folder / "a"),
        lambda folder, place, num_tasks: tasks.verify(
            folder / "a", journal=place, num_tasks=num_tasks
        ),
        has_output=False,
    ),
    "diff": Case(
        lambda folder, place: distckpt.diff(folder / "a", folder / "b"),
        lambda folder, place, num_tasks: tasks.diff(
            folder / "a", folder / "b", journal=place, num_tasks=num_tasks
        ),
        has_output=False,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two checkpoints of the same tensors."""
    made = tmp_path_factory.mktemp("checkpoints")
    for factor, name in ((1.0, "a"), (3.0, "b")):
        tensors = {f"layers.{i}.w": factor * (numbered(60, 500) - i) for i in range(20)}
        save_checkpoint(made / name, tensors, args={"lr": factor})
    return made


def without_seconds(report: Any) -> Any:
    """Return a report without what differs from one run to the next."""
    changes = {"seconds": 0.0} | ({"location": ""} if hasattr(report, "num_files") else {})
    return None if report is None else dataclasses.replace(report, **changes)


def check_whole(case: Case, folder: Path, place: Path, expected: Any) -> None:
    """The output is that of one process, and running the work again does nothing."""
    output = place / "out"
    (again,) = case.in_parts(folder, output, num_tasks=1)
    report = again.run()
    assert (report.num_pieces, report.is_complete) == (0, True)
    assert without_seconds(report.report) == without_seconds(expected)
    if case.has_output:
        assert contents_of(output) == contents_of(place / "one")


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
        check_whole(case, folder, place, expected)


@pytest.mark.parametrize("name", CASES)
def test_killed_parts(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_parts_sweep(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=100)


# --- At every call --------------------------------------------------------------------------------


def run_and_die(task: tasks.Task, place: Path, point: Point) -> None:
    with dying_at(point, place):
        task.run()


def record(task: tasks.Task, place: Path) -> list[Any]:
    with recorded(place) as calls:
        task.run()
    return [call._replace(buffers=(), outcome=None) for call in calls]


def sweep(rank: int, name: str, folder: Path, place: Path, first: int, step: int) -> int:
    """Kill one process at a time at a call that changes something; another one goes on."""
    case = CASES[name]
    expected = case.in_one(folder, place / "one")
    work = place / "work"
    work.mkdir()
    output = work / "out"
    (task,) = case.in_parts(folder, output, num_tasks=1)
    num_killed, points = 0, points_of(record(task, work), exhaustive=False)[first::step]
    for point in points:
        shutil.rmtree(work)
        work.mkdir()
        # A note of how long something took is longer, or shorter, the next time.
        num_killed += in_child(run_and_die, task, work, point) == -signal.SIGKILL
        report = task.run()
        assert report.is_complete, point
        assert without_seconds(report.report) == without_seconds(expected), point
        if case.has_output:
            assert contents_of(output) == contents_of(place / "one"), point
            left = {name for name in os.listdir(work) if not name.startswith(".out.parts-")}
            assert left == {"out"}, point
    assert num_killed > 0.5 * len(points)
    return num_killed


@pytest.mark.parametrize("name", ["consolidate", "reshard"])
def test_killed_at_some_calls(name, folder, tmp_path):
    assert run(sweep, 1, name, folder, tmp_path, 0, 40, backend=None)[0] > 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_call(name, first, folder, tmp_path):
    assert run(sweep, 1, name, folder, tmp_path, first, 8, backend=None)[0] > 2
