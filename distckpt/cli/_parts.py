"""Work in parts: `--part`, `--status`, `--finish` and `--abandon` of several verbs."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distckpt._base.errors import CheckpointNotFoundError
from distckpt._commit import posix
from distckpt.cli._output import MAX_LISTED, Output, count_text, size_text
from distckpt.tasks._environment import part_of_environment
from distckpt.tasks._pieces import Part
from distckpt.tasks._run import PartReport, finish, run_part
from distckpt.tasks._task import PartsStatus, abandon, make_work
from distckpt.tasks._task import status as statuses

_SECONDS_BETWEEN = 2.0


def run(
    arguments: Namespace,
    output: Output,
    verb: str,
    values: Mapping[str, Any],
    place: str,
    show: Callable[[Any, Output], int],
) -> int:
    """Carry out the option for work in parts.

    Args:
        arguments: of the command line.
        output: prints.
        verb: the verb that is run in parts.
        values: its arguments.
        place: the path of the output, or the verb in the directory of its journal.
        show: prints the report of the verb, and returns the exit code.
    """
    place = posix.resolve(place)
    if arguments.status:
        return _show_status(place, arguments.watch, output)
    if arguments.abandon:
        return _abandon(place, output)
    if arguments.finish:
        return show(finish(make_work(verb, values)), output)
    index, count = arguments.part
    part = part_of_environment(os.environ, count) if index is None else Part(index, count)
    with output.progress(f"part {part}") as progress:
        report = run_part(make_work(verb, values), part, progress)
    _show_part(report, output)
    if report.is_complete:
        return show(report.report, output)
    return 0


def _show_part(report: PartReport, output: Output) -> None:
    if not report.is_complete:
        output.json(asdict(report))
    output.line(
        f"part {report.part}: {count_text(report.num_pieces, 'piece')}, "
        f"{size_text(report.num_bytes)} in {report.seconds:.2f} s; {report.num_whole:,} of "
        f"{count_text(report.num_total, 'piece')} whole"
    )
    if report.is_complete and not report.num_pieces:
        output.line("all was done before; to do it again: --abandon")


def _abandon(place: str, output: Output) -> int:
    removed = abandon(place)
    output.json({"removed": removed})
    for location in removed:
        output.line(f"removed {location}")
    output.line(f"{count_text(len(removed), 'attempt')} removed")
    return 0


# --- Status ---------------------------------------------------------------------------------------


def _show_status(place: str, watch: bool, output: Output) -> int:
    all_statuses: Sequence[PartsStatus] = statuses(place)
    if not all_statuses and not watch:
        raise CheckpointNotFoundError(f"No work in parts was begun for {place!r}.")
    if watch:
        all_statuses = all_statuses or _wait_for_begin(place, output)
        all_statuses = _watch(place, all_statuses, output)
    output.json(list(map(_as_json, all_statuses)))
    for status in all_statuses:
        _print_status(status, output)
    return 0


def _wait_for_begin(place: str, output: Output) -> Sequence[PartsStatus]:
    """Wait for the first part, which may still be in a queue."""
    output.message(f"No work in parts was begun for {place!r} yet: waiting for the first part.")
    while not (all_statuses := statuses(place)):
        time.sleep(_SECONDS_BETWEEN)
    return all_statuses


def _watch(
    place: str, all_statuses: Sequence[PartsStatus], output: Output
) -> Sequence[PartsStatus]:
    """Show the progress of all parts until the work ends."""
    with output.progress("all parts") as progress:
        while any(not status.is_complete for status in all_statuses):
            done = sum(status.bytes_whole + status.bytes_running for status in all_statuses)
            progress(done, sum(status.bytes_total for status in all_statuses))
            time.sleep(_SECONDS_BETWEEN)
            all_statuses = statuses(place)
    return all_statuses


def _as_json(status: PartsStatus) -> dict[str, Any]:
    workers = []
    for worker in status.workers:
        workers.append({**asdict(worker), "is_running": worker.is_running})
    return {**asdict(status), "workers": workers}


def _print_status(status: PartsStatus, output: Output) -> None:
    state = "not complete"
    if status.is_complete:
        state = "complete"
    output.line(f"{status.verb} of {', '.join(status.sources)}: {state} ({status.journal})")
    output.line(
        f"  {status.num_whole:,} of {count_text(status.num_total, 'piece')} whole, "
        f"{size_text(status.bytes_whole)} of {size_text(status.bytes_total)}"
    )
    for worker in status.workers:
        state = "running"
        if not worker.is_running:
            state = f"silent for {worker.seconds:.0f} s"
        output.line(
            f"  part {worker.part} on {worker.host} (process {worker.pid}), at {worker.piece}: "
            f"{state}"
        )
    for name in status.missing[:MAX_LISTED]:
        output.line(f"  missing: {name}")
    if len(status.missing) > MAX_LISTED:
        output.line(f"  ... and {len(status.missing) - MAX_LISTED} more")
