"""Log the figures of saves to Weights & Biases.

    python examples/monitoring/weights_and_biases.py --work-dir /tmp/weights_and_biases

Runs offline, and prints the last figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb
from _run import is_first_rank, step_of, train

import distckpt


def to_wandb(run: Any) -> Callable[[distckpt.SaveReport], None]:
    """Return a function that logs each report to a run.

    A background save reports when it is committed, while training has logged later steps already.
    So the step of the checkpoint is the x axis of these figures, in the place of W&B's own.
    """
    run.define_metric("save/step")
    run.define_metric("save/*", step_metric="save/step")

    def report_save(report: distckpt.SaveReport) -> None:
        if not is_first_rank():
            return
        seconds = {f"save/seconds/{name}": value for name, value in report.phases.items()}
        run.log({"save/step": step_of(report), "save/bytes": report.num_bytes, **seconds})

    return report_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", required=True, type=Path)
    work_dir = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    # Offline: the figures stay in this directory until `wandb sync` sends them.
    with wandb.init(project="distckpt-example", mode="offline", dir=work_dir) as run:
        train(work_dir / "run", to_wandb(run))
        print({name: run.summary[name] for name in ("save/step", "save/bytes")})
