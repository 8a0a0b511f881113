"""Print what a reader of distckpt must hold in mind.

    python benchmarks/structure.py [CHECKOUT ...] [--list] [--json] [--check]

A checkout is a folder that contains the package, by default the one that this script belongs to;
each has a column of its own. Lines are lines of code: not blank ones, comments or docstrings; their
length is that without indentation, their width that with it. The complexity of a function is 1,
and 1 for each `if`, `elif`, `for`, `while`, `except`, `assert`, conditional expression and case of
a `match`, for each `for` and `if` of a comprehension, and for each `and` and `or`; functions within
it count for themselves.

The save whose files are counted is the second one of a process, of one tensor and without a process
group. The frames are functions of distckpt, in the thread that calls `load` and in the thread that
reads for it. Modules are those that one call imports in a fresh process.

--check looks at the source alone. The exit status is 1 if it is harder to read than it may be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from structure_source import MAX_COLUMNS, Source, read_source
from tables import markdown_table

HERE = Path(__file__).parent
ROOT = HERE.parent
VERBS = ("save", "load", "consolidate")

HIGH = 10
MAX_COMPLEXITY = 15
MAX_HIGH_FUNCTIONS = 20
NUM_WORST = 10

Figures = dict[str, Any]


def main() -> int:
    """Print the table or what is too hard to read; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    parser.add_argument(
        "--list", action="store_true", help=f"all functions over {HIGH}, not the worst {NUM_WORST}"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--check", action="store_true", help="see above")
    arguments = parser.parse_args()
    sources = {str(path): read_source(path / "distckpt") for path in arguments.checkouts}
    if arguments.check:
        return check(sources)
    figures = {
        name: {**figures_of_source(source), **figures_of_calls(name)}
        for name, source in sources.items()
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        print_tables(figures, sources, None if arguments.list else NUM_WORST)
    return 0


# --- Check ----------------------------------------------------------------------------------------


def check(sources: dict[str, Source]) -> int:
    """Print what is harder to read than it may be; return the exit status."""
    found = [problem for source in sources.values() for problem in problems_of(source)]
    for problem in found:
        print(problem)
    return 1 if found else 0


def problems_of(source: Source) -> Iterator[str]:
    """Yield a line for each thing that is harder to read than it may be."""
    for line in source.wide_lines:
        yield f"{line.place}: {len(line.text)} columns (at most {MAX_COLUMNS})"
    for function in source.functions_over(MAX_COMPLEXITY):
        yield (
            f"{function.place}: {function.name} has complexity {function.complexity} "
            f"(at most {MAX_COMPLEXITY})"
        )
    num_high = len(source.functions_over(HIGH))
    if num_high > MAX_HIGH_FUNCTIONS:
        yield f"{num_high} functions are over complexity {HIGH} (at most {MAX_HIGH_FUNCTIONS})"


# --- Figures --------------------------------------------------------------------------------------


def figures_of_source(source: Source) -> Figures:
    """Return the figures of lines and functions."""
    lengths = [len(line.text.strip()) for line in source.lines]
    num_wide = len(source.wide_lines)
    return {
        "lines": len(lengths),
        "mean_length": sum(lengths) / len(lengths),
        "wide_lines": num_wide,
        "wide_share": num_wide / len(lengths),
        "functions": len(source.functions),
        "high_functions": len(source.functions_over(HIGH)),
        "highest": max(function.complexity for function in source.functions),
    }


def figures_of_calls(checkout: str) -> Figures:
    """Return the figures of calls; none, saying so, where they fail."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            calls: Figures = run_calls(checkout, "calls", *VERBS)
            modules = {verb: run_calls(checkout, "modules", verb, folder) for verb in VERBS}
    except subprocess.CalledProcessError as error:
        print(f"{checkout}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return {}
    return {**calls, "imports": modules}


def run_calls(checkout: str, *arguments: str) -> Figures:
    """Run `structure_calls.py` with the package of a checkout; return what it printed."""
    command = [sys.executable, str(HERE / "structure_calls.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


# --- Tables ---------------------------------------------------------------------------------------


def print_tables(
    figures: dict[str, Figures], sources: dict[str, Source], num_worst: int | None
) -> None:
    """Print a column of figures and the most complex functions of each checkout."""
    columns = [rows_of(of_checkout) for of_checkout in figures.values()]
    heads = ["", *figures]
    titles = columns[0].keys()
    print(markdown_table(heads, [[title, *(one[title] for one in columns)] for title in titles]))
    for name, source in sources.items():
        print(f"\nMost complex functions of {name}:\n")
        for function in source.functions_over(HIGH)[:num_worst]:
            print(f"- {function.complexity} {function.place} {function.name}")
    for name, of_checkout in figures.items():
        for verb, imported in of_checkout.get("imports", {}).items():
            if imported["foreign"]:
                print(f"\n{verb} of {name} imports {', '.join(imported['foreign'])}.")


def rows_of(figures: Figures) -> dict[str, str]:
    """Return the figures of a checkout by their titles."""
    return {
        "lines of code": f"{figures['lines']}",
        "mean characters of a line": f"{figures['mean_length']:.1f}",
        f"lines over {MAX_COLUMNS} columns": (
            f"{figures['wide_lines']} ({figures['wide_share']:.1%})"
        ),
        "functions": f"{figures['functions']}",
        f"functions over complexity {HIGH}": f"{figures['high_functions']}",
        "highest complexity": f"{figures['highest']}",
        **_rows_of_calls(figures),
    }


def _rows_of_calls(figures: Figures) -> dict[str, str]:
    imports = figures.get("imports", {}).values()
    return {
        "save of one tensor: files": f"{figures.get('files_of_save', '-')}",
        "save of one tensor: changes of file": f"{figures.get('changes_of_file', '-')}",
        "load: frames to where it waits or reads": f"{figures.get('frames_of_load', '-')}",
        "load: frames of the thread that reads": f"{figures.get('frames_of_reader', '-')}",
        f"modules imported by {', '.join(VERBS)}": _joined(one["modules"] for one in imports),
        "of which for foreign formats": _joined(len(one["foreign"]) for one in imports),
        f"parameters of {', '.join(VERBS)}": _joined(figures.get("parameters", {}).values()),
    }


def _joined(numbers: Iterable[int]) -> str:
    return " / ".join(map(str, numbers)) or "-"


if __name__ == "__main__":
    sys.exit(main())
