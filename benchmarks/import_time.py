"""What `import distckpt` adds to `import torch`, and what its names add when they are first used.

    python benchmarks/import_time.py [--runs 11]

Every import happens in a fresh process; statements take turns. What is added is measured in the
process that has just imported torch. A round before the first is not counted: it compiles all
modules to byte code, in a folder of its own, and puts files into the page cache. Medians over the
runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from report import Cell, Report, median, parser_of

Times = tuple[float, float]
"""Seconds that passed, and seconds of processor time."""

STATEMENTS = (
    "import distckpt",
    "from distckpt import ShardedTensor, load, save",
    "from distckpt import *",
)
PROGRAM = """
import time
clocks = [(time.perf_counter(), time.process_time())]
import torch
clocks.append((time.perf_counter(), time.process_time()))
{statement}
clocks.append((time.perf_counter(), time.process_time()))
print(*[late - early for a, b in zip(clocks, clocks[1:]) for early, late in zip(a, b)])
"""


def main() -> None:
    """Print the table."""
    arguments = parser_of(__doc__, runs=11, has_files=False).parse_args()
    report = Report(arguments)
    torch_times: list[Times] = []
    added: dict[str, list[Times]] = {statement: [] for statement in STATEMENTS}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(arguments.runs + 1):
            for statement in STATEMENTS:
                of_torch, of_statement = import_times(statement, folder)
                if run:
                    torch_times.append(of_torch)
                    added[statement].append(of_statement)
    rows = [
        row("`import torch`", torch_times),
        *(row(f"then `{name}`", times) for name, times in added.items()),
    ]
    report.add(["statement", "ms", "processor time, ms"], rows)
    report.finish()


def row(name: str, times: list[Times]) -> list[Cell]:
    """Give the medians of one statement."""
    return [
        name,
        *(median([1e3 * one for one in seconds], "{:.1f}") for seconds in zip(*times, strict=True)),
    ]


def import_times(statement: str, bytecode_folder: str) -> tuple[Times, Times]:
    """Return what `import torch`, and after it the statement, take in a new process."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment["PYTHONPYCACHEPREFIX"] = bytecode_folder
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    torch_seconds, torch_processor, seconds, processor = map(float, done.stdout.split())
    return (torch_seconds, torch_processor), (seconds, processor)


if __name__ == "__main__":
    main()
