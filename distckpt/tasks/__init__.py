"""Offline work as tasks that any scheduler runs: Ray, Dask, Spark, `concurrent.futures`.

    with ProcessPoolExecutor() as pool:
        tasks = distckpt.tasks.consolidate("run/step_1000", "exports/step_1000", num_tasks=64)
        reports = list(pool.map(distckpt.tasks.Task.run, tasks))

Each task is a value that can be pickled. Its process needs nothing but the same storage: there is
no process group, and no order. Files that a task has written stay when it is killed; running it
again goes on from there. The last one lets the output appear, in one step.
"""

from distckpt._base.public import set_public_home
from distckpt.tasks._run import PartReport
from distckpt.tasks._task import (
    PartsStatus,
    Task,
    abandon,
    consolidate,
    diff,
    export_torch_dist,
    merge,
    reshard,
    status,
    verify,
)

__all__ = [
    "PartReport",
    "PartsStatus",
    "Task",
    "abandon",
    "consolidate",
    "diff",
    "export_torch_dist",
    "merge",
    "reshard",
    "status",
    "verify",
]

set_public_home(globals())
