"""`distckpt bench`: compare saves and loads with the raw speed of a storage."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._storage import locations
from distckpt.cli._output import Output, count_text, size_text
from distckpt.cli._processes import run_ranks
from distckpt.cli._storage_speed import TENSOR_BYTES, Task, measure
from distckpt.cli._store_trial import try_requests
from distckpt.streaming._tensors import estimate_available_memory

logger = logging.getLogger(__name__)

TITLES = {
    "save": "durable save",
    "save_unsynced": "save without fsync",
    "warm_load": "warm load",
    "cold_load": "cold load",
}
STORE_TITLES = {"save": "save", "warm_load": "load"}
"""Titles of the cases on an object store.

A put is always durable there, and nothing is in the page cache.
"""
RANK_BYTES = 500_000_000
"""Memory of a process that has imported torch."""


def run(arguments: Namespace, output: Output) -> int:
    """Measure, and print a table."""
    folder = locations.normalize(arguments.dir)
    num_tensors = max(1, round(arguments.gb * 1e9 / arguments.ranks / TENSOR_BYTES))
    task = Task(folder, arguments.ranks, num_tensors, arguments.runs)
    _check_resources(task)
    if arguments.gb == 0:
        return _only_try(folder, output)
    with scratch_folder(folder) as scratch:
        seconds = run_ranks(measure, task.num_ranks, task._replace(folder=scratch))
    titles = TITLES if locations.is_local(folder) else STORE_TITLES
    figures = []
    for case in titles:
        if case in seconds:
            figures.append(_figure(case, titles[case], task.num_bytes, seconds[case]))
    output.json(
        {
            "location": folder,
            "num_bytes": task.num_bytes,
            "num_ranks": task.num_ranks,
            "figures": figures,
        }
    )
    ranks = count_text(task.num_ranks, "rank")
    rounds = count_text(task.num_runs, "round")
    output.line(f"{size_text(task.num_bytes)} in tensors of 16 MiB on {ranks}, median of {rounds}")
    output.line()
    columns = ("median_seconds", "gb_per_second", "raw_gb_per_second", "of_raw")
    rows = []
    for figure in figures:
        rows.append([figure["title"], *(f"{figure[column]:.3f}" for column in columns)])
    output.table(["", "seconds", "GB/s", "raw GB/s", "of raw"], rows)
    if len(figures) < len(titles):
        output.line(
            "cold load was not measured: the files cannot be dropped from the page cache here"
        )
    return 0


def _only_try(folder: str, output: Output) -> int:
    with scratch_folder(folder):
        pass
    output.json({"location": folder, "num_bytes": 0, "num_ranks": 0, "figures": []})
    output.line(f"{folder} can be written to, read, listed and cleared up")
    return 0


def _figure(
    case: str, title: str, num_bytes: int, seconds: Mapping[str, list[float]]
) -> dict[str, Any]:
    own, raw = (statistics.median(seconds[name]) for name in ("distckpt", "raw"))
    return {
        "case": case,
        "title": title,
        "seconds": seconds["distckpt"],
        "raw_seconds": seconds["raw"],
        "median_seconds": own,
        "gb_per_second": num_bytes / own / 1e9,
        "raw_gb_per_second": num_bytes / raw / 1e9,
        "of_raw": raw / own,
    }


def _check_resources(task: Task) -> None:
    needs = [
        ("memory", estimate_available_memory(), 2 * task.num_bytes + task.num_ranks * RANK_BYTES)
    ]
    if locations.is_local(task.folder):
        if not os.path.isdir(task.folder):
            raise CheckpointingException(
                f"{task.folder!r} is not a directory: name one on the storage to measure"
            )
        needs.append(
            ("disk space", shutil.disk_usage(task.folder).free, round(1.1 * task.num_bytes))
        )
    for resource, available, needed in needs:
        if available < needed:
            raise CheckpointingException(
                f"{size_text(needed)} of {resource} are needed, {size_text(available)} are "
                "available: use a smaller --gb"
            )


def _warn_of_races(folder: str, reason: str) -> None:
    if reason:
        logger.warning(
            "%s has %s: nothing keeps two programs that save there at the same time apart",
            folder,
            reason,
        )


def _remove(scratch: str) -> None:
    try:
        locations.remove_tree(scratch)
    except OSError as error:
        logger.warning("%s could not be removed: %s", scratch, error)


@contextlib.contextmanager
def scratch_folder(folder: str) -> Iterator[str]:
    """Make a temporary folder below a directory or URL.

    It is removed afterwards, even if Ctrl-C is pressed again.
    """
    scratch = locations.join(folder, f"distckpt-bench-{secrets.token_hex(8)}")
    try:
        if locations.is_local(folder):
            os.mkdir(scratch)
        else:
            # Before the ranks start, rather than after a job has uploaded all its bytes.
            _warn_of_races(folder, try_requests(scratch))
        yield scratch
    finally:
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            locations.remove_tree(scratch)
        # A store may still carry out a request of a rank that was killed: look again.
        _remove(scratch)
        for number, handler in before.items():
            signal.signal(number, handler)
