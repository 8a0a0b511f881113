"""`distckpt bench`: what a storage can do, and what distckpt and other libraries make of it."""

from __future__ import annotations

import importlib
import json
import os
from argparse import ArgumentParser, Namespace
from typing import Any

from distckpt._bench.figures import HEADS, TITLES, Outcome, rows_of, titles, to_json
from distckpt._bench.picture import draw
from distckpt._cli.output import Output, count_text
from distckpt._cli.verb import Verb, positive, positive_number
from distckpt._storage import locations


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dir", metavar="DIR", help="a directory on the storage, or a URL; what it writes is removed")
    parser.add_argument(
        "--gb", type=positive_number, default=2.0, help="size of the state, all ranks together (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes, a power of two (default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=5, help="rounds, whose median counts (default: %(default)s)")
    parser.add_argument("--svg", metavar="FILE", help="also draw the figures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants whose name begins with one of these")
    parser.add_argument("--cases", nargs="+", choices=tuple(TITLES), help="what to measure (default: all)")


def run(arguments: Namespace, output: Output) -> int:
    """Measure, print a table per case, return 1 when distckpt failed."""
    json_file = None if output.as_json else arguments.json
    _check_writable(json_file, arguments.svg)
    cases = _cases(arguments)
    # Imports torch.distributed.checkpoint, which takes most of a second that the other verbs need not wait.
    bench: Any = importlib.import_module("distckpt._bench.run")
    only = tuple(arguments.only) if arguments.only else None
    outcome: Outcome = bench.run_benchmark(
        arguments.dir, arguments.gb, arguments.ranks, arguments.runs, cases, only, tell=output.message
    )
    output.json(to_json(outcome))
    if json_file:
        _write(json_file, json.dumps(to_json(outcome), indent=1) + "\n")
    if arguments.svg:
        _write(arguments.svg, draw(outcome))
    _show(outcome, cases, output)
    return 1 if any(name.startswith("distckpt") for name in outcome.failed) else 0


def _cases(arguments: Namespace) -> tuple[str, ...]:
    """Return the cases to be measured, in their order."""
    there = titles(is_store=not locations.is_local(locations.normalize(arguments.dir)))
    unknown = [case for case in arguments.cases or () if case not in there]
    if unknown:
        raise ValueError(f"an object store has no case {unknown[0]!r}, only {', '.join(there)}")
    return tuple(case for case in there if not arguments.cases or case in arguments.cases)


def _show(outcome: Outcome, cases: tuple[str, ...], output: Output) -> None:
    output.line(f"{outcome.machine}")
    output.line(
        f"{outcome.num_bytes / 1e9:.2f} GB: a Llama in bf16 with fp32 moments of Adam; "
        f"{count_text(outcome.num_ranks, 'rank')}; median of {count_text(outcome.num_runs, 'round')}"
    )
    for case, figures in outcome.cases().items():
        output.line()
        output.table(HEADS, rows_of(figures), title=outcome.title(case))
    output.line()
    output.line("of raw: share of the raw storage's speed; distckpt is: so many times as fast as this contestant")
    if "cold_load" in cases and not outcome.cold:
        output.line("cold load was not measured: the files cannot be taken out of memory here")
    for name, why in outcome.left_out.items():
        output.line(f"left out: {name}: {why}")
    for name, why in outcome.failed.items():
        output.line(f"FAILED: {name}: {' '.join(why.split())[:300]}")


def _check_writable(*paths: str | None) -> None:
    """Find out before minutes of work that a result cannot be stored."""
    for path in paths:
        if path is not None and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            raise PermissionError(f"{path!r} cannot be written: its directory is missing or closed")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


VERB = Verb(
    "bench",
    "Measure a storage, raw and with distckpt and other libraries.",
    add_arguments,
    run,
    json_to_file=True,
)
