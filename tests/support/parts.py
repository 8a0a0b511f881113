"""Running the parts of some work in processes that are killed at random moments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distckpt.tasks import PartReport, Task
from tests.support.disk import tree_of
from tests.support.harness import fork_context

NUM_PARTS, NUM_PROCESSES = 7, 3
_PATIENCE = 200.0


def contents_of(output: Path) -> dict[str, Any]:
    """Return the files of an output, of markers all but how long the work has taken."""
    files: dict[str, Any] = dict(tree_of(output))
    if "metadata.json" in files:
        marker = json.loads(files["metadata.json"])
        files["metadata.json"] = {**marker, "seconds": None, "checksum": None}
    return files


def run_in_process(task: Task, function: Callable[[Task], object] = Task.run) -> Any:
    """Start a process that runs a task, or does something else with it."""
    process = fork_context().Process(target=function, args=(task,))
    process.start()
    return process


def run_killed(tasks: Sequence[Task], num_kills: int, seconds: float, seed: int) -> int:
    """Run tasks until all are done, killing processes at random moments, up to `seconds` after
    their start; return how many were killed.
    """
    chance, killed = random.Random(seed), 0
    waiting, running = list(tasks), []
    while waiting or running:
        while waiting and len(running) < NUM_PROCESSES:
            task = waiting.pop(0)
            running.append((task, run_in_process(task)))
        task, process = running.pop(chance.randrange(len(running)))
        dies = killed < num_kills
        process.join(chance.uniform(0, seconds) if dies else _PATIENCE)
        if process.exitcode is None:
            assert dies, f"part {task.index} does not end"
            process.kill()
            process.join()
        killed += process.exitcode == -9
        if process.exitcode != 0:
            assert process.exitcode == -9, f"part {task.index} failed"
            waiting.append(task)
    return killed


def run_all(make: Callable[..., Sequence[Task]], num_tasks: int = 1) -> PartReport:
    """Run all parts here, one after the other; return the report of the last."""
    return [task.run() for task in make(num_tasks=num_tasks)][-1]
