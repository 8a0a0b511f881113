"""Parts of work as values that schedulers can send to processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import check_count
from distckpt._base.options import ExportOptions, Progress, with_changes
from distckpt._commit import posix
from distckpt._storage import locations
from distckpt.tasks._run import PartReport, finish, run_part
from distckpt.tasks._status import PartsStatus, statuses
from distckpt.tasks._status import abandon as abandon_all
from distckpt.tasks._work import Part, Work

_LOCATIONS = (
    "checkpoint",
    "output_dir",
    "source_dir",
    "checkpoint_dir",
    "journal",
    "a",
    "b",
)
_LOCATIONS_OF_OPTIONS = ("family", "like", "merge_adapter", "extra_files_from")


@dataclass(frozen=True)
class Task:
    """A part of some work, which can be pickled.

    It runs in any process that sees the same storage.

    Attributes:
        verb: the verb to run, such as "consolidate".
        arguments: of the verb.
        index: number of the part, counted from 0.
        count: number of parts.
    """

    verb: str
    arguments: Mapping[str, Any]
    index: int
    count: int

    def run(self, progress: Progress | None = None) -> PartReport:
        """Do the missing pieces of this part; complete the work after the last one.

        A task may be run again, also while it is running elsewhere, or with another `count`.

        Args:
            progress: called with the bytes of the part that are done, and the bytes that this call
                does.

        Raises:
            CheckpointingException: other work for the same output is not complete, or was begun
                with other arguments. Otherwise the errors of the verb.
        """
        return run_part(
            make_work(self.verb, self.arguments), Part(self.index, self.count), progress
        )

    def finish(self) -> Any:
        """Complete the work after all parts, and return the verb's report.

        The last part does that by itself, unless it is interrupted there.

        Raises:
            CheckpointingException: something is missing.
        """
        return finish(make_work(self.verb, self.arguments))


@paused_garbage_collection()
def make_work(verb: str, arguments: Mapping[str, Any]) -> Work:
    """Plan the work of a verb with these arguments."""
    return _maker(verb)(**_with_absolute_paths(arguments))


def _maker(verb: str) -> Callable[..., Work]:
    """Return the function that plans the work of a verb; its module is imported on use."""
    if verb in ("consolidate", "merge"):
        from distckpt.tasks import _exports as exports

        return exports.consolidation if verb == "consolidate" else exports.merger
    if verb == "reshard":
        from distckpt.tasks._checkpoints import resharding

        return resharding
    if verb == "export_torch_dist":
        from distckpt.tasks._torch_dist import exporting

        return exporting
    from distckpt.tasks import _reports as reports

    checks: dict[str, Callable[..., Work]] = {
        "verify": reports.verification,
        "stats": reports.measurement,
        "diff": reports.comparison,
    }
    return checks[verb]


def make_tasks(verb: str, num_tasks: int, arguments: Mapping[str, Any]) -> list[Task]:
    """Divide the work of a verb with these arguments into tasks."""
    check_count("num_tasks", num_tasks)
    located = _with_absolute_paths(arguments)
    tasks = []
    for index in range(num_tasks):
        tasks.append(Task(verb, located, index, num_tasks))
    return tasks


def _with_absolute_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with absolute paths.

    Processes may have other working directories.
    """
    located = {}
    for name, value in arguments.items():
        located[name] = _with_location(name, value)
    return located


def _with_location(name: str, value: Any) -> Any:
    if name in _LOCATIONS:
        return locations.normalize(value)
    if name == "checkpoints":
        return [locations.normalize(item) for item in value]
    if isinstance(value, ExportOptions):
        absolute: dict[str, Any] = {}
        for item in _LOCATIONS_OF_OPTIONS:
            path = getattr(value, item)
            if path not in (None, "auto"):
                absolute[item] = locations.normalize(path)
        return replace(value, **absolute)
    return value


# --- The verbs ------------------------------------------------------------------------------------


def consolidate(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    num_tasks: int,
    overwrite: bool = False,
    options: ExportOptions | None = None,
    **changes: Any,
) -> list[Task]:
    """Divide a call of `distckpt.consolidate` into tasks of about equal bytes.

        for task in distckpt.tasks.consolidate("run/step_1000", "exports/step_1000", num_tasks=64):
            pool.submit(task.run)

    Nothing is read yet. All other arguments go to `consolidate`; `progress` is an argument of
    `Task.run`.

    Args:
        num_tasks: number of tasks. It may change when incomplete work is resumed.
    """
    all_options = with_changes(consolidate, ExportOptions, options, changes)
    arguments = {"checkpoint": checkpoint, "output_dir": output_dir, "overwrite": overwrite}
    return make_tasks("consolidate", num_tasks, {**arguments, "options": all_options})


def merge(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    num_tasks: int,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    overwrite: bool = False,
    options: ExportOptions | None = None,
    **changes: Any,
) -> list[Task]:
    """Divide a call of `distckpt.merge` into tasks, see `consolidate`."""
    all_options = with_changes(merge, ExportOptions, options, changes)
    how = {"weights": weights, "ema": ema, "overwrite": overwrite, "options": all_options}
    arguments = {"checkpoints": list(checkpoints), "output_dir": output_dir, **how}
    return make_tasks("merge", num_tasks, arguments)


def reshard(
    source_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    num_tasks: int,
    **arguments: Any,
) -> list[Task]:
    """Divide a call of `distckpt.reshard` into tasks, see `consolidate`.

    The new checkpoint cannot replace the old one.

    Args:
        source_dir: see `distckpt.reshard`.
        checkpoint_dir: likewise.
        num_tasks: number of tasks.
        arguments: of `distckpt.reshard`; `num_ranks` is 1 unless it is given.
    """
    where = {"source_dir": source_dir, "checkpoint_dir": checkpoint_dir}
    return make_tasks("reshard", num_tasks, {**where, **arguments})


def export_torch_dist(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    num_tasks: int,
    overwrite: bool = False,
) -> list[Task]:
    """Divide a call of `distckpt.torch_dist.export` into tasks, see `consolidate`.

    Chunks go to files of about a gigabyte, whatever the number of tasks, instead of one for each
    rank.
    """
    arguments = {"checkpoint_dir": checkpoint_dir, "output_dir": output_dir}
    return make_tasks("export_torch_dist", num_tasks, {**arguments, "overwrite": overwrite})


def verify(
    checkpoint_dir: str | os.PathLike[str],
    mode: Literal["fast", "full"] = "full",
    *,
    journal: str | os.PathLike[str],
    num_tasks: int,
    num_threads: int | None = None,
) -> list[Task]:
    """Divide a call of `distckpt.verify` into tasks, see `consolidate`.

    Args:
        checkpoint_dir: see `distckpt.verify`.
        mode: likewise.
        journal: a directory, which is made, for the findings of the tasks; not in the checkpoint.
        num_tasks: number of tasks.
        num_threads: threads of each task, see `distckpt.verify`.
    """
    arguments = {"checkpoint_dir": checkpoint_dir, "mode": mode, "journal": journal}
    return make_tasks("verify", num_tasks, {**arguments, "num_threads": num_threads})


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    journal: str | os.PathLike[str],
    num_tasks: int,
    **arguments: Any,
) -> list[Task]:
    """Divide a call of `distckpt.diff` into tasks, see `verify`.

    `arguments` are further arguments of `distckpt.diff`.

    The task that completes the report computes norms of tensors of which only some windows differ,
    and compares objects.
    """
    return make_tasks("diff", num_tasks, {"a": a, "b": b, "journal": journal, **arguments})


# --- Looking after them ---------------------------------------------------------------------------


def status(output_dir: str | os.PathLike[str]) -> list[PartsStatus]:
    """Return the progress of work in parts for an output, by attempt.

    Only journals are read.

    Args:
        output_dir: of the work; for `verify` and `diff`, `journal/verify` and `journal/diff`.
    """
    return statuses(posix.resolve(output_dir))


def abandon(output_dir: str | os.PathLike[str]) -> list[str]:
    """Remove work in parts for an output that has not appeared.

    The journals of all work there are removed, too; a complete output stays.

    No task of it may be running.

    Returns:
        The locations of the journals that were removed.
    """
    return abandon_all(posix.resolve(output_dir))
