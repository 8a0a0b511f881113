"""Append a line of JSON for each save to a file.

    python examples/monitoring/json_lines.py --work-dir /tmp/json_lines

Prints step and size of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from _run import is_first_rank, step_of, train

import distckpt


def to_json_lines(path: Path) -> Callable[[distckpt.SaveReport], None]:
    """Return a function that appends each report to a file."""

    def report_save(report: distckpt.SaveReport) -> None:
        if not is_first_rank():
            return
        fields = {
            "time": time.time(),
            "step": step_of(report),
            "bytes": report.num_bytes,
            "seconds": report.seconds,
            "phases": dict(report.phases),
            "slowest_rank": report.slowest_rank,
        }
        with path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    return report_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", required=True, type=Path)
    work_dir = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    train(work_dir / "run", to_json_lines(work_dir / "saves.jsonl"))
    for line in (work_dir / "saves.jsonl").read_text().splitlines():
        print("step", json.loads(line)["step"], "bytes", json.loads(line)["bytes"])
