"""Print what a reader of distckpt must hold in mind, and hold the budget for it.

    python benchmarks/structure.py [CHECKOUT ...] [--list [KIND]] [--json] [--check]

A checkout is a folder that contains the package, by default the one that this script belongs to;
each has a column of its own. How each figure is counted:

- Tokens: names, numbers and operators, and no strings (nor the parts of f-strings), comments, line
  breaks or indentation. Functions: methods and nested ones, too, but not lambdas.
- Lines of code are not blank ones, comments or docstrings. Files over {max_lines} lines
  are measured with those.
- "Per 1,000 lines" are lines as if each statement, or the head of one, stood on one line, so that
  the formatter has no part in them. Parallel assignments: of as many values, written out, to
  several names.
- The complexity of a function is 1, and 1 for each `if`, `elif`, `for`, `while`, `except`,
  `assert`, conditional expression and case of a `match`, for each `for` and `if` of a
  comprehension, and for each `and` and `or`; functions within it count for themselves.
- The kernel is all that is imported with the modules that define `save`, `load`, `consolidate` and
  `verify`: by `import` statements outside of functions and not for type checkers alone. "On
  demand" follows those within functions, too; "by a string" also the modules that a string names.
  The package itself is not in it, nor packages that import nothing. Lines are all lines.
- Imports by a string: calls of `import_module` with a module of distckpt, and of functions that
  look one up in a table. Tables: strings that name such a module elsewhere; the package's own
  `__init__`, which finds all public names, is left out.
- A free "what" stands for a thing ("return what is left"); questions do not count, those after a
  verb such as "say" neither, nor "what to do". Words are those between blanks, of docstrings
  and comments, or of README.md and docs/*.md without their blocks of code.
- Files and changes of file: of the functions of distckpt that are called, in order, by the second
  save of a process, and by a load: of one small tensor, plain or in a `ShardedTensor`, without a
  process group. Frames are functions of distckpt that are under way where the load reads, in the
  thread that calls `load` and in the one that reads for it. Modules are those that one call
  imports in a fresh process.

--check prints only what exceeds a budget, of `BUDGETS` below; the exit status is then 1. --list
names the places of one kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from structure_imports import Imports
from structure_source import (
    HIGH_COMPLEXITY,
    MAX_COLUMNS,
    MAX_LINES,
    Finding,
    Function,
    Line,
    Module,
    code_lines,
    find,
    functions_of,
    is_class,
    is_class_of_plans,
    is_comprehension,
    is_conditional,
    is_parallel,
    num_lines,
    num_statements,
    num_tokens,
    read_package,
)
from structure_words import (
    MAX_WORDS,
    Text,
    free_whats,
    long_beginnings,
    pages_of,
    texts_of,
    weak_beginnings,
)
from tables import markdown_table

HERE = Path(__file__).parent
ROOT = HERE.parent
VERBS = ("save", "load", "consolidate", "verify")

BUDGETS = {
    "tokens": 459_979,
    "classes": 500,
    "functions": 4_604,
    "kernel: modules": 116,
    "kernel: lines": 34_871,
    "kernel: tokens": 189_977,
    "kernel, on demand: modules": 144,
    "kernel, on demand: lines": 42_297,
    "modules imported by save": 78,
    "save of a plain tensor: files": 40,
    "save of a plain tensor: changes of file": 218,
    "save of a ShardedTensor: files": 40,
    "save of a ShardedTensor: changes of file": 234,
    "load of a plain tensor: files": 54,
    "load of a plain tensor: changes of file": 299,
    "load of a ShardedTensor: files": 55,
    "load of a ShardedTensor: changes of file": 335,
    "load: frames to where it waits or reads": 13,
    "classes named ...Plan...": 14,
    'free "what" per 1,000 words': 0.1,
    'free "what" per 1,000 words of pages': 0.6,
    "docstrings that begin with What, How, Of, That, Whose, Where": 0,
    f"docstrings whose first sentence has over {MAX_WORDS} words": 29,
    "comprehensions per 1,000 lines": 36.5,
    "conditional expressions per 1,000 lines": 8.9,
    "parallel assignments per 1,000 lines": 0.1,
    "imports of own modules by a string": 12,
    "own modules named in tables": 10,
    f"files over {MAX_LINES} lines": 0,
    f"lines over {MAX_COLUMNS} columns": 0,
    f"functions over complexity {HIGH_COMPLEXITY}": 7,
    "highest complexity": 12,
}
"""Figures and how high each may be; raising one needs a reason in the commit."""

NUM_WORST = 10

Figures = dict[str, float]
Findings = dict[str, list[Finding]]
"""By kind, one of those that `--list` takes."""


class Source(NamedTuple):
    """The package of a checkout, and the pages about it."""

    modules: list[Module]
    texts: list[Text]
    pages: list[Text]
    lines: list[Line]
    functions: list[Function]
    imports: Imports
    findings: Findings
    """The places that are counted, by their kind."""


def main() -> int:
    """Print the table or what exceeds the budget; return the exit status."""
    # The syntax trees of a package are millions of objects without a cycle.
    gc.disable()
    arguments = parse_arguments()
    if arguments.check:
        return check(arguments.checkouts)
    sources = {str(path): read_source(path) for path in arguments.checkouts}
    if arguments.list:
        for source in sources.values():
            print_findings(source.findings[arguments.list])
        return 0
    figures = {
        name: {**figures_of_source(source), **figures_of_calls(name), **figures_of_verbs(name)}
        for name, source in sources.items()
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        print_tables(figures, sources)
    return 0


KINDS = (
    "complex",
    "wide",
    "file",
    "what",
    "pages",
    "beginning",
    "long",
    "comprehension",
    "conditional",
    "parallel",
    "string",
    "table",
)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(max_lines=MAX_LINES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    parser.add_argument(
        "--list",
        nargs="?",
        choices=KINDS,
        const="complex",
        metavar="KIND",
        help=f"name all places of a kind: {', '.join(KINDS)} (complex if none is given)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--check", action="store_true", help="see above")
    return parser.parse_args()


# --- Check ----------------------------------------------------------------------------------------


def check(checkouts: list[Path]) -> int:
    """Print what exceeds the budget; return the exit status."""
    num_problems = 0
    for checkout in checkouts:
        source = read_source(checkout)
        figures = {**figures_of_source(source), **figures_of_calls(str(checkout))}
        problems = [*places_over_budget(source), *figures_over_budget(figures)]
        num_problems += len(problems)
        print("\n".join(problems), end="\n" if problems else "")
    return 1 if num_problems else 0


def places_over_budget(source: Source) -> list[str]:
    """Return a line for each line that is too wide and each function that is too complex."""
    most = BUDGETS["highest complexity"]
    problems = [f"{one.place}: {one.text}" for one in source.findings["wide"]]
    for one in functions_over(source.functions, most):
        problems.append(f"{one.place}: {one.name} has complexity {one.complexity} (at most {most})")
    return problems


def figures_over_budget(figures: Figures) -> list[str]:
    """Return a line for each figure that is over its budget, or missing."""
    problems = []
    for title, limit in BUDGETS.items():
        value = figures.get(title)
        if value is None:
            problems.append(f"{title}: not counted (at most {limit:,})")
        elif value > limit:
            problems.append(f"{title}: {shown(value)} (at most {limit:,})")
    return problems


# --- Figures of the source ------------------------------------------------------------------------


def read_source(checkout: Path) -> Source:
    """Read the package of a checkout, and its pages."""
    modules = read_package(checkout / "distckpt")
    lines = [line for module in modules for line in code_lines(module)]
    functions = [function for module in modules for function in functions_of(module)]
    texts, pages = texts_of(modules), pages_of(checkout)
    imports = Imports(modules)
    findings = {
        "complex": [
            Finding(one.place, f"{one.name} has complexity {one.complexity}")
            for one in functions_over(functions, HIGH_COMPLEXITY)
        ],
        "wide": [
            Finding(line.place, f"{len(line.text)} columns (at most {MAX_COLUMNS})")
            for line in lines
            if len(line.text) > MAX_COLUMNS
        ],
        "file": [
            Finding(module.place, f"{num_lines(module)} lines")
            for module in modules
            if num_lines(module) > MAX_LINES
        ],
        "what": free_whats(texts),
        "pages": free_whats(pages),
        "beginning": weak_beginnings(texts),
        "long": long_beginnings(texts),
        "comprehension": find(modules, is_comprehension),
        "conditional": find(modules, is_conditional),
        "parallel": find(modules, is_parallel),
        "string": imports.calls_with_strings(),
        "table": imports.names_in_tables(),
    }
    assert findings.keys() == set(KINDS)
    return Source(modules, texts, pages, lines, functions, imports, findings)


def figures_of_source(source: Source) -> Figures:
    """Return the figures that no call is needed for."""
    lengths = [len(line.text.strip()) for line in source.lines]
    return {
        "tokens": sum(map(num_tokens, source.modules)),
        "classes": len(find(source.modules, is_class)),
        "functions": len(source.functions),
        "lines of code": len(lengths),
        "mean characters of a line": sum(lengths) / len(lengths),
        **figures_of_kernel(source),
        "classes named ...Plan...": len(find(source.modules, is_class_of_plans)),
        **figures_of_findings(source),
        f"functions over complexity {HIGH_COMPLEXITY}": len(source.findings["complex"]),
        "highest complexity": max((one.complexity for one in source.functions), default=0),
    }


def figures_of_kernel(source: Source) -> Figures:
    """Return the sizes of what the verbs import; none, saying so, where there is no verb."""
    imports = source.imports
    try:
        parts = {
            "kernel": imports.kernel(VERBS),
            "kernel, on demand": imports.kernel_on_demand(VERBS),
            "kernel, by a string": imports.kernel_by_string(VERBS),
        }
    except LookupError as error:
        print(error, file=sys.stderr)
        return {}
    figures: Figures = {}
    for title, names in parts.items():
        modules = [module for module in source.modules if module.name in names]
        figures[f"{title}: modules"] = len(modules)
        figures[f"{title}: lines"] = sum(map(num_lines, modules))
        figures[f"{title}: tokens"] = sum(map(num_tokens, modules))
    return figures


def figures_of_findings(source: Source) -> Figures:
    """Return how many places there are of each kind."""
    count = {kind: len(findings) for kind, findings in source.findings.items()}
    lines = sum(map(num_statements, source.modules)) / 1000
    words = sum(text.num_words for text in source.texts) / 1000
    words_of_pages = sum(text.num_words for text in source.pages) / 1000
    return {
        'free "what" per 1,000 words': count["what"] / max(words, 1),
        'free "what" per 1,000 words of pages': count["pages"] / max(words_of_pages, 1),
        "docstrings that begin with What, How, Of, That, Whose, Where": count["beginning"],
        f"docstrings whose first sentence has over {MAX_WORDS} words": count["long"],
        "comprehensions per 1,000 lines": count["comprehension"] / max(lines, 1),
        "conditional expressions per 1,000 lines": count["conditional"] / max(lines, 1),
        "parallel assignments per 1,000 lines": count["parallel"] / max(lines, 1),
        "imports of own modules by a string": count["string"],
        "own modules named in tables": count["table"],
        f"files over {MAX_LINES} lines": count["file"],
        f"lines over {MAX_COLUMNS} columns": count["wide"],
    }


def functions_over(functions: list[Function], complexity: float) -> list[Function]:
    """Return the functions over a complexity, the most complex one first."""
    return sorted((one for one in functions if one.complexity > complexity), reverse=True)


# --- Figures of calls -----------------------------------------------------------------------------


def figures_of_calls(checkout: str) -> Figures:
    """Return the figures of a save and a load; none, saying so, where they fail."""
    return run_calls(checkout, "calls")


def figures_of_verbs(checkout: str) -> Figures:
    """Return how many modules each verb imports, and how many parameters it has."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for verb in VERBS:
            figures.update(run_calls(checkout, "modules", verb, folder))
    return figures


def run_calls(checkout: str, *arguments: str) -> Figures:
    """Run `structure_calls.py` with the package of a checkout; return what it printed."""
    command = [sys.executable, str(HERE / "structure_calls.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1:]
        print(f"{checkout}: {' '.join(arguments)}: {''.join(last_line)}", file=sys.stderr)
        return {}
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


# --- Tables ---------------------------------------------------------------------------------------


def print_tables(figures: dict[str, Figures], sources: dict[str, Source]) -> None:
    """Print a column of figures and the most complex functions of each checkout."""
    titles = dict.fromkeys(title for column in figures.values() for title in column)
    rows = []
    for title in titles:
        cells = [shown(column.get(title)) for column in figures.values()]
        rows.append([title, *cells, shown(BUDGETS.get(title), missing="")])
    print(markdown_table(["", *figures, "at most"], rows))
    for name, source in sources.items():
        print(f"\nMost complex functions of {name}:\n")
        print_findings(source.findings["complex"][:NUM_WORST])


def print_findings(findings: Iterable[Finding]) -> None:
    """Print places, a line each."""
    for one in findings:
        print(f"{one.place}: {one.text}")


def shown(value: float | None, missing: str = "-") -> str:
    """Return the text of a figure."""
    if value is None:
        return missing
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
