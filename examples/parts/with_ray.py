"""Export a checkpoint with Ray.

    python examples/parts/with_ray.py --work-dir /tmp/parts

Give `ray.init` the address of your cluster instead of starting one on this machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from in_processes import make_checkpoint

from distckpt import tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put everything")
    folder: Path = parser.parse_args().work_dir
    make_checkpoint(folder / "step_1")

    ray.init(num_cpus=2, include_dashboard=False)
    # A task whose worker was killed is run again; it goes on from what is whole.
    run = ray.remote(tasks.Task.run).options(max_retries=3)
    work = tasks.consolidate(
        folder / "step_1", folder / "export", num_tasks=8, max_file_bytes=2_000_000
    )
    reports = ray.get([run.remote(task) for task in work])
    print(f"{sum(report.num_pieces for report in reports)} pieces were written now")
    print(f"{work[0].finish().num_tensors} tensors")
    ray.shutdown()


if __name__ == "__main__":
    main()
