"""Offline work in parts beside one process that does the same: calls of the file system, requests
to an object store, memory and time.

    PYTHONPATH=. python benchmarks/parts.py [--only calls requests memory seconds]
        [--verbs NAME ...] [--gigabytes 1] [--tensor-mib 32] [--files 8] [--runs 3]
        [--dir DIR]

- calls: of the file system, for 16 files of 4 MiB. Pieces are 4 MiB here, instead of 64.
- requests: the same on an S3 server (moto) on this machine.
- memory: by how much the resident memory of a process grows at most, with two values of
  `max_inflight_bytes`, for checkpoints of --gigabytes.
- seconds: one process on one core, and two parts, each on a core of its own; they take turns.
  Processor time is that of the larger part.

Calls and requests are shown for a part that begins the work (0/4), one in the middle (1/4), the
last one, which completes it (3/4), a run when all is complete, and `--status`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from measure import peak_memory_bytes
from report import Cell, Report, median, parser_of, ratio

import distckpt
from distckpt import tasks, torch_dist
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._ranks.collectives import Ranks
from distckpt._tools.stats import compute_stats
from distckpt.tasks import _pieces as work
from tests.support.calls import Call, watched
from tests.support.s3_server import FaultyProxy, new_bucket, reached_at, running_server

NUM_FILES, FILE_BYTES = 16, 4 << 20
ALLOWED_BYTES = 64 << 20
"""That a part may take besides `max_inflight_bytes`."""


class Verb(NamedTuple):
    """What one process does with the checkpoints in a folder, and the tasks of the same.

    Attributes:
        in_one: called with the folder, the place of the output, and options.
        in_parts: likewise, with `num_tasks`.
        journal: what is beside the place: nothing, or the verb for one that has no output.
        small: options that make many small files.
        has_limit: whether it has the option `max_inflight_bytes`.
    """

    in_one: Callable[..., Any]
    in_parts: Callable[..., list[tasks.Task]]
    journal: str = ""
    small: Mapping[str, Any] = {}
    has_limit: bool = False


def sources(folder: str) -> tuple[str, str]:
    """Return the two checkpoints in a folder."""
    return f"{folder}/a", f"{folder}/b"


def measure(folder: str, place: str) -> None:
    list(compute_stats(open_undisturbed(Ranks.alone(), f"{folder}/a")))


def measure_tasks(folder: str, place: str, num_tasks: int) -> list[tasks.Task]:
    arguments = {"checkpoint_dir": f"{folder}/a", "journal": place}
    return [tasks.Task("stats", arguments, index, num_tasks) for index in range(num_tasks)]


VERBS = {
    "consolidate": Verb(
        lambda folder, place, **options: distckpt.consolidate(f"{folder}/a", place, **options),
        lambda folder, place, **options: tasks.consolidate(f"{folder}/a", place, **options),
        small={"max_file_bytes": FILE_BYTES},
        has_limit=True,
    ),
    "quantize": Verb(
        lambda folder, place, **options: distckpt.consolidate(
            f"{folder}/a", place, quantize="fp8-block", **options
        ),
        lambda folder, place, **options: tasks.consolidate(
            f"{folder}/a", place, quantize="fp8-block", **options
        ),
        small={"max_file_bytes": FILE_BYTES // 4},
        has_limit=True,
    ),
    "merge": Verb(
        lambda folder, place, **options: distckpt.merge(sources(folder), place, **options),
        lambda folder, place, **options: tasks.merge(sources(folder), place, **options),
        small={"max_file_bytes": FILE_BYTES},
        has_limit=True,
    ),
    "reshard": Verb(
        lambda folder, place, **options: distckpt.reshard(f"{folder}/a", place, **options),
        lambda folder, place, **options: tasks.reshard(f"{folder}/a", place, **options),
        small={"num_ranks": NUM_FILES},
        has_limit=True,
    ),
    "convert": Verb(
        lambda folder, place: torch_dist.export(f"{folder}/a", place),
        lambda folder, place, num_tasks: tasks.export_torch_dist(
            f"{folder}/a", place, num_tasks=num_tasks
        ),
    ),
    "verify": Verb(
        lambda folder, place: distckpt.verify(f"{folder}/a"),
        lambda folder, place, num_tasks: tasks.verify(
            f"{folder}/a", journal=place, num_tasks=num_tasks
        ),
        journal="verify",
    ),
    "stats": Verb(measure, measure_tasks, journal="stats"),
    "diff": Verb(
        lambda folder, place: distckpt.diff(*sources(folder)),
        lambda folder, place, num_tasks: tasks.diff(
            *sources(folder), journal=place, num_tasks=num_tasks
        ),
        journal="diff",
    ),
}


def main() -> None:
    """Measure, and print tables."""
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--verbs", nargs="+", choices=list(VERBS), default=list(VERBS))
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each checkpoint")
    parser.add_argument("--tensor-mib", type=int, default=32, help="size of a tensor there")
    parser.add_argument("--files", type=int, default=8, help="of an output, for seconds")
    parser.add_argument("--details", action="store_true", help="print what is counted")
    arguments = parser.parse_args()
    report = Report(arguments)
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
            TABLES[name](report, arguments, folder)
    report.finish()


def save_both(folder: str, num_tensors: int, tensor_bytes: int, num_files: int) -> None:
    """Save two checkpoints that differ a little, each in some files."""
    rows = tensor_bytes // 4096
    for number, path in enumerate(sources(folder)):
        state = {}
        for i in range(num_tensors):
            tensor = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(i))
            tensor[i % rows, 0] += number
            key = f"layers.{i}.mlp.up_proj.weight"
            state[key] = distckpt.ShardedTensor.from_rank_offsets(key, tensor)
        distckpt.save(state, f"{folder}/whole", overwrite=True)
        distckpt.reshard(f"{folder}/whole", path, num_ranks=num_files)


# --- Calls and requests ---------------------------------------------------------------------------

RUNS = ("one process", "0/4", "1/4", "3/4", "again", "--status")


def runs_of(verb: Verb, folder: str, place: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is counted, and do what is not."""
    parts = verb.in_parts(folder, place, num_tasks=4, **verb.small)
    yield RUNS[0], lambda: verb.in_one(folder, f"{place}-one", **verb.small)
    yield RUNS[1], parts[0].run
    yield RUNS[2], parts[1].run
    parts[2].run()
    yield RUNS[3], parts[3].run
    yield RUNS[4], parts[1].run
    yield RUNS[5], lambda: tasks.status("/".join(filter(None, [place, verb.journal])))


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Divide work into pieces of the size of the files here."""
    before, work._MIN_PIECE_BYTES = work._MIN_PIECE_BYTES, FILE_BYTES + (1 << 20)
    try:
        yield
    finally:
        work._MIN_PIECE_BYTES = before


def count_calls(report: Report, arguments: argparse.Namespace, folder: str) -> None:
    """Count calls on files of the sources, and on others."""
    save_both(folder, 4 * NUM_FILES, FILE_BYTES // 4, NUM_FILES)
    shutil.rmtree(f"{folder}/whole")
    kinds: dict[str, list[list[Cell]]] = {kind: [] for kind in _KINDS}
    with small_pieces():
        for name in arguments.verbs:
            rows: dict[str, list[Cell]] = {kind: [name] for kind in _KINDS}
            for run, function in runs_of(VERBS[name], folder, f"{folder}/{name}"):
                counts = calls_of(function, folder, f"{name} {run}" * arguments.details)
                for kind, form in _KINDS.items():
                    rows[kind].append(form(counts))
            for kind, row in rows.items():
                kinds[kind].append(row)
    for kind, table in kinds.items():
        report.add(["", *RUNS], table, kind)


_KINDS: dict[str, Callable[[Counter[str]], str]] = {
    "Files of the sources: opens / stats and lists": lambda c: (
        f"{c['source open']} / {c['source look']}"
    ),
    "MiB read of the sources": lambda c: f"{c['source bytes'] / 2**20:.2f}",
    "Output and journal: opens / stats and lists": lambda c: (
        f"{c['output open']} / {c['output look']}"
    ),
}


def calls_of(function: Callable[[], object], folder: str, title: str) -> Counter[str]:
    """Count calls below a folder; print them below a title if there is one."""
    counts: Counter[str] = Counter()
    details: Counter[str] = Counter()

    def note(call: Call, moment: str) -> None:
        if moment == "before":
            area = "source" if re.match(r"[ab]/|[ab]$", call.paths[0]) else "output"
            kind = _CALLS.get(call.name)
            counts[f"{area} {kind}"] += 1
            if kind == "read":
                counts[f"{area} bytes"] += call.length
            details[str(call._replace(name=f"{area} {call.name}"))] += 1

    with watched(folder, note):
        function()
    if title:
        print_details(title, details)
    return counts


_CALLS = {
    "open": "open",
    **dict.fromkeys(("stat", "lstat", "listdir", "scandir"), "look"),
    **dict.fromkeys(("read", "pread", "readv", "preadv", "sendfile"), "read"),
}


def print_details(title: str, details: Counter[str]) -> None:
    """Print what was counted, all files of a kind together."""
    print(f"\n{title}")
    merged: Counter[str] = Counter()
    for text, count in details.items():
        text = re.sub(r" \d+ bytes at \d+", "", text)
        merged[re.sub(r"\d+", "#", text)] += count
    for text, count in sorted(merged.items()):
        print(f"{count:5} {text}")


def count_requests(report: Report, arguments: argparse.Namespace, folder: str) -> None:
    """Count requests to an object store."""
    rows: list[list[Cell]] = []
    with small_pieces(), running_server() as server:
        proxy = FaultyProxy(server)
        with reached_at(server):
            bucket = new_bucket(server)
            save_both(bucket, 4 * NUM_FILES, FILE_BYTES // 4, NUM_FILES)
        with proxy.running() as url, reached_at(url):
            for name in arguments.verbs:
                row: list[Cell] = [name]
                # It writes local files only.
                place = f"{folder if name == 'convert' else bucket}/{name}"
                for run, function in runs_of(VERBS[name], bucket, place):
                    proxy.requests.clear()
                    function()
                    row.append(f"{len(proxy.requests):,}")
                    if arguments.details:
                        print_details(f"{name} {run}", Counter(map(without_names, proxy.requests)))
                rows.append(row)
    report.add(["", *RUNS], rows, "Requests to S3")


def without_names(request: str) -> str:
    """Return a request without names that differ each time."""
    text = re.sub(r"uploadId=[^&]*|continuation-token=[^&]*", "", request)
    return re.sub(r"(?<![0-9a-f])[0-9a-f]{8,}(?![0-9a-f])", "*", text)


# --- Memory and time ------------------------------------------------------------------------------


class Used(NamedTuple):
    """What a call took: when it began and ended, processor seconds, and extra memory."""

    began: float
    ended: float
    processor: float
    num_bytes: int


class Fresh:
    """A process that has imported what a verb needs, and waits for a task, or for None: all of it
    in one process.
    """

    def __init__(self, verb: str, folder: str, core: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, verb, folder, core))
        self._process.start()
        self._connection.recv()

    def begin(self, task: tasks.Task | None, place: str, options: Mapping[str, Any]) -> None:
        """Let it go."""
        self._connection.send((task, place, options))

    def used(self) -> Used:
        """Return what it has used, when it is done."""
        found: Used = self._connection.recv()
        self._process.join()
        return found


def _serve(connection: Any, name: str, folder: str, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    verb = VERBS[name]
    with tempfile.TemporaryDirectory() as made:
        save_both(made, 1, 4096, 1)
        verb.in_one(made, f"{made}/one")
        for task in verb.in_parts(made, f"{made}/parts", num_tasks=1):
            task.run()
    connection.send(None)
    task, place, options = connection.recv()
    times: list[float] = []

    def work() -> None:
        times.append(time.monotonic())
        if task is None:
            verb.in_one(folder, place, **options)
        else:
            task.run()
        times.append(time.monotonic())

    before = sum(os.times()[:2])
    peak = peak_memory_bytes(work)
    connection.send(Used(*times, sum(os.times()[:2]) - before, peak))


def remove_outputs(place: str, verb: Verb) -> None:
    """Remove what a verb has made."""
    tasks.abandon("/".join(filter(None, [place, verb.journal])))
    shutil.rmtree(place, ignore_errors=True)


def save_large(folder: str, gigabytes: float, tensor_bytes: int) -> None:
    """Save two checkpoints of one file each."""
    save_both(folder, max(1, round(gigabytes * 1e9 / tensor_bytes)), tensor_bytes, 1)
    shutil.rmtree(f"{folder}/whole")


def peaks(report: Report, arguments: argparse.Namespace, folder: str) -> None:
    """Compare the memory of one process and of parts with what they may take."""
    save_large(folder, arguments.gigabytes, arguments.tensor_mib << 20)
    rows: list[list[Cell]] = []
    for name in arguments.verbs:
        verb = VERBS[name]
        limits = (256 << 20, 32 << 20) if verb.has_limit else (256 << 20,)
        for limit in limits:
            options = {"max_inflight_bytes": limit} if verb.has_limit else {}
            place = f"{folder}/out"
            found = []
            for task in (None, *verb.in_parts(folder, place, num_tasks=4, **options)):
                process = Fresh(name, folder)
                process.begin(task, place, options)
                found.append(process.used().num_bytes / 2**20)
                if task is None:
                    remove_outputs(place, verb)
            remove_outputs(place, verb)
            limit_text = f"{limit >> 20}" if verb.has_limit else ""
            rows.append([name, limit_text, f"{found[0]:.0f}", f"{max(found[1:]):.0f}"])
    heads = ["", "max_inflight_bytes", "one process", "largest of 4 parts"]
    report.add(heads, rows, "Extra memory at most, MiB")


def seconds(report: Report, arguments: argparse.Namespace, folder: str) -> None:
    """Compare one process on one core with two parts on two cores."""
    save_large(folder, arguments.gigabytes, arguments.tensor_mib << 20)
    rows: list[list[Cell]] = []
    for name in arguments.verbs:
        alone, larger, wall, wall_of_parts = [], [], [], []
        for _ in range(arguments.runs + 1):
            one = run_on_cores(name, folder, 1, arguments)
            two = run_on_cores(name, folder, 2, arguments)
            alone.append(one[0].processor)
            larger.append(max(each.processor for each in two))
            wall.append(one[0].ended - one[0].began)
            wall_of_parts.append(max(e.ended for e in two) - min(e.began for e in two))
        rows.append(
            [
                name,
                median(alone[1:]),
                median(larger[1:]),
                ratio(larger[1:], alone[1:]),
                median(wall[1:]),
                median(wall_of_parts[1:]),
                ratio(wall_of_parts[1:], wall[1:]),
            ]
        )
    heads = ["", "one: CPU s", "larger of 2 parts: CPU s", "ratio"]
    report.add([*heads, "one: s", "2 parts: s", "ratio"], rows, "One process, and two parts")


def run_on_cores(
    name: str, folder: str, num_parts: int, arguments: argparse.Namespace
) -> list[Used]:
    """Run a verb in one process or in parts, each on a core of its own."""
    place, verb = f"{folder}/out", VERBS[name]
    sizes = {
        "max_file_bytes": round(arguments.gigabytes * 1e9 / arguments.files),
        "num_ranks": arguments.files,
    }
    options = {option: sizes[option] for option in verb.small}
    work: Sequence[tasks.Task | None] = [None]
    if num_parts > 1:
        work = verb.in_parts(folder, place, num_tasks=num_parts, **options)
    cores = sorted(os.sched_getaffinity(0))
    processes = [Fresh(name, folder, cores[i % len(cores)]) for i in range(num_parts)]
    for process, task in zip(processes, work, strict=True):
        process.begin(task, place, options)
    found = [process.used() for process in processes]
    remove_outputs(place, verb)
    return found


TABLES = {"calls": count_calls, "requests": count_requests, "memory": peaks, "seconds": seconds}


if __name__ == "__main__":
    main()
