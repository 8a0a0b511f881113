"""Write the figures of saves for TensorBoard.

    python examples/monitoring/tensorboard_scalars.py --work-dir /tmp/tensorboard_scalars

Prints the command that shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from _run import is_first_rank, step_of, train
from torch.utils.tensorboard import SummaryWriter

import distckpt


def to_tensorboard(writer: SummaryWriter) -> Callable[[distckpt.SaveReport], None]:
    """Return a function that writes each report as scalars."""

    def report_save(report: distckpt.SaveReport) -> None:
        if not is_first_rank():
            return
        step = step_of(report)
        writer.add_scalar("save/gigabytes", report.num_bytes / 1e9, step)
        for phase, duration in {**report.phases, "all": report.seconds}.items():
            writer.add_scalar(f"save/seconds/{phase}", duration, step)

    return report_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", required=True, type=Path)
    work_dir = parser.parse_args().work_dir
    with SummaryWriter(str(work_dir / "tensorboard")) as writer:
        train(work_dir / "run", to_tensorboard(writer))
    print("tensorboard --logdir", work_dir / "tensorboard")
