"""Parts of work as values that schedulers can send to processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import check_count
from distckpt._base.options import ExportOptions, Progress, with_changes
from distckpt._commit import posix
from distckpt._commit.conditional_put import SAVE
from distckpt._format.hf_names import INDEX_NAME
from distckpt._format.marker import marker_of
from distckpt._storage import locations, object_store
from distckpt.tasks._journal import Journal, Worker, journals_beside, other_owner
from distckpt.tasks._pieces import Part
from distckpt.tasks._run import PartReport, abort_uploads, finish, run_part

if TYPE_CHECKING:
    from distckpt.tasks._work import Work

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
        from distckpt.tasks._checkpoints import ReshardWork

        return ReshardWork
    if verb == "export_torch_dist":
        from distckpt.tasks._torch_dist import TorchDistWork

        return TorchDistWork
    from distckpt.tasks import _reports as reports

    checks: dict[str, Callable[..., Work]] = {
        "verify": reports.verification,
        "stats": reports.StatsWork,
        "diff": reports.DiffWork,
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


@dataclass(frozen=True)
class PartsStatus:
    """The progress of work in parts.

    Attributes:
        journal: the directory with the notes of whole pieces.
        verb: the verb that is run.
        sources: the locations it reads.
        num_whole: pieces that are whole.
        num_total: all pieces.
        bytes_whole: size of the pieces that are whole.
        bytes_running: bytes that processes at work have done of pieces that are not whole.
        bytes_total: size of all pieces.
        missing: names of files or tensors that have pieces that are not whole.
        workers: processes that are at work, or were killed.
        is_complete: whether the output has appeared.
    """

    journal: str
    verb: str
    sources: tuple[str, ...]
    num_whole: int
    num_total: int
    bytes_whole: int
    bytes_running: int
    bytes_total: int
    missing: tuple[str, ...]
    workers: tuple[Worker, ...]
    is_complete: bool


def status(output_dir: str | os.PathLike[str]) -> list[PartsStatus]:
    """Return the progress of work in parts for an output, by attempt.

    Only journals are read.

    Args:
        output_dir: of the work; for `verify` and `diff`, `journal/verify` and `journal/diff`.
    """
    status_list = []
    for journal in journals_beside(posix.resolve(output_dir)):
        header = journal.header()
        if header is not None:
            status_list.append(_status(journal, header))
    return status_list


def abandon(output_dir: str | os.PathLike[str]) -> list[str]:
    """Remove work in parts for an output that has not appeared.

    The journals of all work there are removed, too; a complete output stays.

    No task of it may be running.

    Returns:
        The locations of the journals that were removed.

    Raises:
        OSError: a journal could not be removed; the rest was.
    """
    place = posix.resolve(output_dir)
    removed: list[str] = []
    left: list[str] = []
    for journal in journals_beside(place):
        if not locations.is_local(place):
            _abandon_uploaded(journal, place)
        locations.remove_tree(journal.location)
        is_left = locations.is_local(place) and os.path.lexists(journal.location)
        (left if is_left else removed).append(journal.location)
    if left:
        _refuse_left(left[0])
    return removed


def _abandon_uploaded(journal: Journal, place: str) -> None:
    """Remove incomplete files from their place on an object store, and uploads."""
    header = journal.header()
    if header is None:
        return
    files = header["files"]
    if not journal.is_done():
        is_there = locations.exists(locations.join(place, INDEX_NAME))
        if is_there or (marker_of(place) or {}).get(SAVE) == journal.nonce:
            return  # complete, by a process that was killed before it could note that
        object_store.remove_all([locations.join(place, name) for name in files])
    abort_uploads(place, files)


def _refuse_left(location: str) -> None:
    owner = other_owner(location)
    if owner is not None:
        text = f"the journal cannot be removed, it belongs to user {owner}"
        raise PermissionError(errno.EACCES, text, location)
    text = "some of the journal cannot be removed: a part is writing into it, or another user did"
    raise OSError(errno.EBUSY, text, location)


def _status(journal: Journal, header: dict[str, Any]) -> PartsStatus:
    recorded = journal.recorded()
    pieces = header["pieces"]
    sizes = [stop - start for _, start, stop in pieces]
    missing = []
    for i, (name, _, _) in enumerate(pieces):
        if i not in recorded:
            missing.append(name)
    workers = journal.workers()
    # Several processes may do the same piece.
    running = {}
    for worker in sorted(workers, key=attrgetter("piece_bytes")):
        if worker.is_running and worker.number not in recorded:
            running[worker.number] = worker.piece_bytes
    return PartsStatus(
        journal.location,
        header["verb"],
        tuple(header["sources"]),
        num_whole=len(recorded),
        num_total=len(pieces),
        bytes_whole=sum(size for i, size in enumerate(sizes) if i in recorded),
        bytes_running=sum(running.values()),
        bytes_total=sum(sizes),
        missing=tuple(dict.fromkeys(missing)),
        workers=tuple(workers),
        is_complete=journal.has_appeared(),
    )
