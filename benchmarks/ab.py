"""Compare the speed of two commits of distckpt.

    python benchmarks/ab.py OLD NEW [--quick] [--rounds N] [--only NAME,...] [--dir DIR]

Both are checked out into a temporary folder, which is removed at the end. They take turns (old,
new, new, old, ...), each run in fresh processes, so that what else the machine does hits both
alike. Ranks are processes of a gloo group; loads are warm, saves on disk when they return; "(CPU)"
is processor time. Medians over the rounds. Each row also goes to stderr as soon as it is measured,
so that a run that is interrupted leaves something.

The verdict is that of a sign test over the pairs of runs: "faster" or "slower" where chance alone
would make as many rounds agree in fewer than 1 of 20 comparisons. Fewer than 6 rounds are too few.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ab_workloads import BY_NAME, Workload
from tables import markdown_table

HERE = Path(__file__).parent
ROOT = HERE.parent
MAX_CHANCE = 0.05
POLL_SECONDS = 0.02

TIME_IMPORT = """
import time
import torch
start = time.process_time()
{statement}
print(time.process_time() - start)
"""


class Side(NamedTuple):
    """A commit: where it is checked out, and where the checkpoints are that its runs read."""

    source: Path
    data: Path


class Result(NamedTuple):
    """Seconds of a workload, one number per round."""

    title: str
    old: list[float]
    new: list[float]


def main() -> None:
    """Measure all workloads, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--quick", action="store_true", help="smaller states")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    names = ", ".join(BY_NAME)
    parser.add_argument("--only", type=workloads_of, help=f"of {names}", metavar="NAME,...")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where files go")
    arguments = parser.parse_args()
    print(f"{arguments.old} and {arguments.new}, {arguments.rounds} rounds; {machine()}.\n")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-ab-") as folder:
        old, new = f"{folder}/old", f"{folder}/new"
        with checkout(arguments.old, old) as old_side, checkout(arguments.new, new) as new_side:
            rows = measure_all((old_side, new_side), arguments)
    print(markdown_table(["", "old s", "new s", "new / old", "verdict"], rows))
    print(f"\nAt the end: {machine()}.")


def workloads_of(names: str) -> list[Workload]:
    """Return the workloads of some names that commas separate."""
    try:
        return [BY_NAME[name] for name in names.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"there is no workload {error}") from None


def machine() -> str:
    """Describe the machine and how busy it is."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}"


@contextmanager
def checkout(commit: str, folder: str) -> Iterator[Side]:
    """Check a commit out for as long as the context lasts, compiled to byte code."""
    side = Side(Path(folder, "source"), Path(folder, "data"))
    side.data.mkdir(parents=True)
    git = ["git", "-C", str(ROOT), "worktree"]
    try:
        # Else what a commit imports first would be compiled in the time measured.
        run_quietly([*git, "add", "--detach", str(side.source), commit])
        run_quietly([sys.executable, "-m", "compileall", "-q", str(side.source / "distckpt")])
        yield side
    finally:
        shutil.rmtree(side.source, ignore_errors=True)
        run_quietly([*git, "prune"])


def run_quietly(command: Sequence[str]) -> None:
    """Run a command; when it fails, end with what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}")


# --- Runs -----------------------------------------------------------------------------------------


def measure_all(sides: tuple[Side, Side], arguments: argparse.Namespace) -> list[list[str]]:
    """Measure the chosen workloads, one after another; return the rows of the table."""
    rows = []
    for workload in arguments.only or BY_NAME.values():
        rows.append(row_of(measure(workload, sides, arguments.rounds, arguments.quick)))
        print(f"{workload.name}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def measure(
    workload: Workload, sides: tuple[Side, Side], num_rounds: int, is_quick: bool
) -> Result:
    """Measure a workload on both sides in turn."""
    size = workload.size_of(is_quick)
    seconds: tuple[list[float], list[float]] = ([], [])
    for side in sides:
        prepare(workload, size, side)
    for index in range(num_rounds):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            seconds[which].append(seconds_of(workload, size, sides[which]))
    return Result(workload.title.format(size=f"{size:,}"), *seconds)


def prepare(workload: Workload, size: float, side: Side) -> None:
    """Write what a workload reads, unless another one has read the same before."""
    if workload.reads:
        checkpoint = checkpoint_of(workload, size, side)
        if not checkpoint.exists():
            run_ranks(side, workload.writers, ["prepare", workload.name, size, checkpoint])


def seconds_of(workload: Workload, size: float, side: Side) -> float:
    """Return the seconds of one run."""
    os.sync()  # nobody pays for what others have written
    if workload.statement:
        program = TIME_IMPORT.format(statement=workload.statement)
        output = output_of_first(side, [["-c", program]])
    else:
        words = ["measure", workload.name, size, checkpoint_of(workload, size, side)]
        output = run_ranks(side, workload.ranks, words)
    return float(output.split()[-1])


def checkpoint_of(workload: Workload, size: float, side: Side) -> Path:
    """Return where the checkpoint is that a workload reads."""
    return side.data / f"{workload.state}-{size}-{workload.writers}"


def run_ranks(side: Side, num_ranks: int, words: Sequence[object]) -> str:
    """Run `ab_run.py` in some ranks; return what the first one printed."""
    with tempfile.TemporaryDirectory(dir=side.data) as scratch:
        script = [str(HERE / "ab_run.py"), *map(str, words), scratch]
        return output_of_first(side, [[*script, str(rank)] for rank in range(num_ranks)])


def output_of_first(side: Side, programs: Sequence[Sequence[str]]) -> str:
    """Run Python programs at once with a side's distckpt; return what the first one printed.

    When one fails, all are ended, and so is this script.
    """
    environment = {**os.environ, "PYTHONPATH": str(side.source), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *program],
                cwd=side.source,  # it comes before PYTHONPATH
                env=environment,
                stdout=subprocess.DEVNULL if index else output,
            )
            for index, program in enumerate(programs)
        ]
        try:
            wait_for(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        return output.read()


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; end this script when one fails."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            break
        time.sleep(POLL_SECONDS)
    if any(codes):
        raise SystemExit("a run has failed")


# --- Table ----------------------------------------------------------------------------------------


def row_of(result: Result) -> list[str]:
    """Lay out the result of a workload."""
    old, new = statistics.median(result.old), statistics.median(result.new)
    return [
        result.title,
        f"{old:.4g}",
        f"{new:.4g}",
        f"{new / old:.3f}",
        verdict(result.old, result.new),
    ]


def verdict(old: Sequence[float], new: Sequence[float]) -> str:
    """Say what a sign test says about the pairs of runs."""
    if chance_of(len(old), len(old)) > MAX_CHANCE:
        return "too few rounds"
    num_faster = sum(b < a for a, b in zip(old, new, strict=True))
    num_slower = sum(b > a for a, b in zip(old, new, strict=True))
    if chance_of(max(num_faster, num_slower), num_faster + num_slower) > MAX_CHANCE:
        return "no difference seen"
    return "faster" if num_faster > num_slower else "slower"


def chance_of(num_agreeing: int, num_pairs: int) -> float:
    """Return the chance that as many of some coins, or more, show the same side."""
    more = range(num_agreeing, num_pairs + 1)
    return min(1.0, 2 * sum(math.comb(num_pairs, n) for n in more) / 2.0**num_pairs)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is removed
    main()
