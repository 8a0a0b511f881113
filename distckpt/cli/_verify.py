"""`distckpt verify`: check that a checkpoint is complete and undamaged."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from distckpt._operations.file_checks import Problem
from distckpt._operations.verify import VerifyReport, verify
from distckpt._state.common_state import COMMON_KEY
from distckpt.cli._output import MAX_LISTED, Output, count_text, size_text
from distckpt.cli._selection import call

_MAX_NAMED = 3


def run(arguments: Namespace, output: Output) -> int:
    """Verify, list the problems, return 1 if there are any."""
    values = {
        "checkpoint_dir": arguments.path,
        "mode": "fast" if arguments.fast else "full",
        "num_threads": arguments.jobs,
    }
    return call(arguments, output, verify, values, _print_report, verb="verify", doing="verifying")


def _print_report(report: VerifyReport, output: Output) -> int:
    problems = list(map(vars, report.problems))
    output.json({**vars(report), "is_whole": report.is_whole, "problems": problems})
    list_problems(report.problems, output)
    if report.strays:
        output.line(strays_text(report.strays))
    output.line(summary(report))
    return int(not report.is_whole)


def list_problems(problems: Sequence[Problem], output: Output) -> None:
    """Print a line for each problem."""
    for problem in problems[:MAX_LISTED]:
        output.line(f"BAD  {describe(problem)}")
    if len(problems) > MAX_LISTED:
        output.line(f"BAD  ... and {len(problems) - MAX_LISTED} more (all with --json)")


def describe(problem: Problem) -> str:
    """Format a problem as one line."""
    text = f"{problem.file}: {problem.message}"
    if problem.first_byte is not None:
        text += f"; bytes {problem.first_byte} to {problem.stop_byte}"
    if problem.key is not None:
        name = "common state"
        if problem.key != COMMON_KEY:
            name = f"key {problem.key!r}"
        text += f"; {name}"
        if problem.region is not None and problem.key != COMMON_KEY:
            text += f", region {problem.region}"
    return text


def strays_text(strays: Sequence[str]) -> str:
    """Name in one line the files foreign to a checkpoint."""
    names = ", ".join([*strays[:_MAX_NAMED], *["..."] * (len(strays) > _MAX_NAMED)])
    return (
        f"note: {len(strays)} more files, left by interrupted saves or being written by a save in "
        f"progress: {names}"
    )


def summary(report: VerifyReport) -> str:
    """Format the outcome as one line."""
    verdict = "OK"
    rate = ""
    note = ""
    if not report.is_whole:
        verdict = f"DAMAGED ({count_text(len(report.problems), 'problem')})"
    if report.mode == "full":
        rate = f", {size_text(report.num_bytes / report.seconds)}/s"
    if report.mode == "fast":
        note = "; only sizes and headers were read, no values"
    elif not report.has_checksums:
        note = "; these files have no checksums: only their structure was checked"
    if report.num_fingerprints:
        compared = count_text(report.num_fingerprints, "tensor")
        note += f"; {compared} compared with the fingerprints of the save"
    tensors = count_text(report.num_tensors, "tensor")
    files = count_text(report.num_files, "file")
    return (
        f"{verdict}: {report.location}, {tensors} in {files}, {report.mode}: "
        f"{size_text(report.num_bytes)} read in {report.seconds:.2f} s{rate}{note}"
    )
