"""What planning costs at scale: seconds, memory and bytes by role, by layout and number of ranks.

    python benchmarks/planning.py [--layouts fsdp2 zero1 deepseek 405b ddp]
        [--ranks 256 1024] [--tensors N] [--planners N] [--dcp] [--chunks N] [--shared-reads N]
        [--verbs] [--json FILE]

One process makes up the descriptions of all ranks, without tensor data, and calls what the ranks
call: the coordinator (rank 0), one of the planners if there are several, and another rank. Seconds
are of CPU time, so that other programs hardly matter; memory is by how much the process grows, with
the messages that the role holds. Exchanges themselves are not simulated. With several numbers of
ranks, the last column is the exponent e of the power law N**e that fits best.

- fsdp2: every rank has rows of every tensor, none of some where there are not enough.
- zero1: TP8 x PP16, and as many replicas as it takes, with all weights and rows of the moments.
- deepseek: DeepSeek-V3, experts divided over 64 ranks, rows of them and of others over all.
- 405b: Llama 3.1 405B as in fsdp2.
- ddp: every rank has everything.

--planners 1 plans with the coordinator alone, as few shards are. --dcp plans 1,024 tensors of shape
(1024, 1), divided by rows, with the functions of torch.distributed.checkpoint too. --shared-reads N
plans a load in which each rank requests N regions, and each 8 ranks columns of the same rows.
--verbs opens each checkpoint with the verbs that go through all of it, and plans what they read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from measure import peak_memory_bytes
from planning_layouts import LAYOUTS, PP, TP
from planning_manifest import write_and_open_a_manifest
from planning_roles import COORDINATOR, OTHER, Plan, plan_alone, plan_divided
from planning_shares import plan_shared_reads
from planning_verbs import measure_verbs
from report import Cell, Report, parser_of

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._format.checksum import checksum
from distckpt._format.manifest_reading import joined, manifest_from_bytes
from distckpt._format.planned_manifest import report_of
from distckpt._format.safetensors_file import ShardFile
from distckpt._io.save_shards import write_manifest
from distckpt._storage import locations

_T = TypeVar("_T")


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__, runs=None, has_files=False)
    parser.add_argument("--layouts", nargs="*", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1024], help=f"zero1: multiples of {TP * PP}"
    )
    parser.add_argument("--tensors", type=int, help="on each rank, at most")
    parser.add_argument("--planners", type=int, help="as many as a save has by default")
    parser.add_argument(
        "--chunks", type=int, default=0, help="of a manifest that is written and opened"
    )
    parser.add_argument("--dcp", action="store_true", help="plan with torch, too")
    parser.add_argument(
        "--shared-reads", type=int, default=0, help="regions of each rank in a load that shares"
    )
    parser.add_argument("--verbs", action="store_true", help="verify, consolidate and others, too")
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = "Seconds are of CPU time."
    for name in arguments.layouts:
        layout, num_tensors = LAYOUTS[name]
        found = []
        for num_ranks in arguments.ranks:
            tables = list(layout(num_ranks, arguments.tensors or num_tensors))
            with paused_garbage_collection():  # as `save` does
                found.append(plan_a_save(tables, arguments.planners, arguments.verbs))
        heads = [name, *(f"{count:,} ranks" for count in arguments.ranks), "exponent"]
        report.add(heads, _compared(arguments.ranks, found))
    if arguments.dcp:
        # Imported here: torch.distributed.checkpoint takes seconds.
        from planning_dcp import compare

        found = [compare(num_ranks) for num_ranks in arguments.ranks]
        heads = ["1,024 x (1024, 1)", *(f"{n:,} ranks" for n in arguments.ranks), "exponent"]
        report.add(heads, _compared(arguments.ranks, found))
    if arguments.shared_reads:
        found = [plan_shared_reads(count, arguments.shared_reads) for count in arguments.ranks]
        heads = ["shared reads", *(f"{n:,} ranks" for n in arguments.ranks), "exponent"]
        report.add(heads, _compared(arguments.ranks, found))
    if arguments.chunks:
        figures = write_and_open_a_manifest(arguments.chunks)
        rows = [[name, _text(value)] for name, value in figures.items()]
        report.add([f"a manifest of {arguments.chunks:,} chunks", ""], rows)
    report.finish()


def plan_a_save(
    tables: list[Any], num_planners: int | None, with_verbs: bool = False
) -> dict[str, Any]:
    """Return what the ranks spend on a save that is planned, one that repeats it, and a load; and,
    if they are asked for, what verbs spend.
    """
    plan = plan_alone(tables) if num_planners == 1 else plan_divided(tables, num_planners)
    figures = plan.figures()
    with tempfile.TemporaryDirectory() as folder:
        marker, of_save = save_again(plan, folder)
        figures |= of_save
        figures |= open_it(folder)
        if with_verbs:
            figures |= measure_verbs(folder, marker, plan.num_blocks)
    return figures


def save_again(plan: Plan, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the marker, and what the coordinator spends on the manifest of a save
    whose plan was kept, with files of checksums.
    """
    none = np.zeros(0, np.int64)
    digests = {n: checksum(bytes(8 * n)) for n in set(plan.num_blocks)}
    reports = [
        report_of([ShardFile("", 8 * n, 8 * n, digests[n])], none, none.astype(np.uint64))
        for n in plan.num_blocks
    ]
    Path(folder, "objects").mkdir()
    (marker, _), seconds = cpu_timed(
        lambda: write_manifest(folder, plan.manifest, reports, "", False)
    )
    files = Path(folder).rglob("*.safetensors")
    return dict(marker), {
        f"{COORDINATOR}: repeated save, s": seconds,
        f"{COORDINATOR}: receives in a repeated save, MB": sum(map(len, reports)) / 1e6,
        "manifest with its parts, MB": sum(file.stat().st_size for file in files) / 1e6,
    }


def open_it(folder: str) -> dict[str, Any]:
    """Return what a rank that loads spends on the manifest that it gets."""
    name = f"{folder}/manifest.safetensors"
    data, reading = cpu_timed(lambda: joined(locations.read_bytes(name), folder))
    seconds: list[float] = []

    def decode() -> None:
        seconds.append(cpu_timed(lambda: manifest_from_bytes(data, folder))[1])

    return {
        f"{COORDINATOR}: read the manifest, s": reading,
        f"{OTHER}: receives the manifest, MB": len(data) / 1e6,
        f"{OTHER}: memory to open, MB": peak_memory_bytes(decode) / 1e6,
        f"{OTHER}: open, s": seconds[0],
    }


def cpu_timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return its result and the seconds of CPU time."""
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


def _compared(num_ranks: list[int], found: list[dict[str, Any]]) -> list[list[Cell]]:
    """Make rows with a column for each number of ranks, and the exponents of growth."""
    rows = []
    for name in dict.fromkeys(name for figures in found for name in figures):
        values = [figures.get(name, "") for figures in found]
        exponent = ""
        are_numbers = all(not isinstance(value, str) and value > 0 for value in values)
        if len(found) > 1 and are_numbers:
            exponent = f"{np.polyfit(np.log(num_ranks), np.log(values), 1)[0]:.2f}"
        rows.append([name, *map(_text, values), exponent])
    return rows


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
