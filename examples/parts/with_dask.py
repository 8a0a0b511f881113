"""Export a checkpoint with Dask.

    python examples/parts/with_dask.py --work-dir /tmp/parts

Give `Client` the address of your scheduler instead of starting workers on this machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dask.distributed import Client
from in_processes import make_checkpoint

from distckpt import tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put everything")
    folder: Path = parser.parse_args().work_dir
    make_checkpoint(folder / "step_1")

    work = tasks.consolidate(
        folder / "step_1", folder / "export", num_tasks=8, max_file_bytes=2_000_000
    )
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        # Dask runs a task again whose worker has died; it goes on from what is whole.
        reports = client.gather(client.map(tasks.Task.run, work, pure=False))
    print(f"{sum(report.num_pieces for report in reports)} pieces were written now")
    print(f"{work[0].finish().num_tensors} tensors")


if __name__ == "__main__":
    main()
