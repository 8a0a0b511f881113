"""What `import distckpt` adds to `import torch`, and what its names add when they are first used.

    python tests/benchmarks/import_time.py [--runs 11]

Every import happens in a fresh process; statements take turns. What is added is measured in the process that has just
imported torch. A round before the first is not counted: it compiles all modules to byte code, in a folder of its own,
and puts files into the page cache. Medians over the runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from measure import machine_facts, markdown_table

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    torch_times: list[Times] = []
    added: dict[str, list[Times]] = {statement: [] for statement in STATEMENTS}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(arguments.runs + 1):
            for statement in STATEMENTS:
                of_torch, of_statement = import_times(statement, folder)
                if run:
                    torch_times.append(of_torch)
                    added[statement].append(of_statement)
    rows = [row("`import torch`", torch_times), *(row(f"then `{name}`", times) for name, times in added.items())]
    print(f"`{' '.join(['python', *sys.argv])}`: {machine_facts(None)}.\n")
    print(markdown_table(["statement", "ms", "processor time, ms"], rows))


def row(name: str, times: list[Times]) -> list[str]:
    """Give the medians of one statement."""
    return [name, *(f"{1e3 * statistics.median(seconds):.1f}" for seconds in zip(*times, strict=True))]


def import_times(statement: str, bytecode_folder: str) -> tuple[Times, Times]:
    """Return what `import torch`, and after it the statement, take in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode_folder
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    torch_seconds, torch_processor, seconds, processor = map(float, done.stdout.split())
    return (torch_seconds, torch_processor), (seconds, processor)


if __name__ == "__main__":
    main()
