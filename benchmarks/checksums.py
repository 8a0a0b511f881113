"""What checksums add: durable saves with and without, loads that verify and that do not.

    python benchmarks/checksums.py [--gb 1] [--runs 7] [--dir DIR]

One process. Saves without checksums exist only here: the writer is asked for none, and the
checkpoint is thrown away. The checkpoint holds matrices of two shapes, one of which has no power of
two in it. Files of cold loads are out of the page cache before each (posix_fadvise). Both
contestants of a case go in turn, round after round; ratios are medians over rounds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import fill_cache
from report import Cell, Report, median, parser_of

import distckpt
from distckpt import ShardedTensor
from distckpt._io.write import WriteSettings, file_of_tensors, write_files
from distckpt.cli._storage_speed import drop_from_page_cache

SHAPES = ((4096, 1024), (3001, 1366))
LAYOUTS = {
    "everything": lambda rows, columns: (slice(0, rows), slice(0, columns)),
    "half of the rows": lambda rows, columns: (slice(rows // 2, rows), slice(0, columns)),
    "a third of the rows": lambda rows, columns: (
        slice(rows // 3, 2 * rows // 3),
        slice(0, columns),
    ),
    "half of the columns": lambda rows, columns: (slice(0, rows), slice(columns // 2, columns)),
    "one row": lambda rows, columns: (slice(rows // 3, rows // 3 + 1), slice(0, columns)),
}


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, runs=7)
    parser.add_argument("--gb", type=float, default=1.0)
    arguments = parser.parse_args()
    report = Report(arguments)
    torch.set_num_threads(1)
    folder = Path(arguments.dir) / f"checksums-{os.getpid()}"
    folder.mkdir()
    pair_bytes = sum(4 * rows * columns for rows, columns in SHAPES)
    tensors = [
        torch.randn(shape)
        for _ in range(round(arguments.gb * 1e9 / pair_bytes))
        for shape in SHAPES
    ]
    checkpoint = folder / "checkpoint"
    try:
        distckpt.save(
            {str(i): ShardedTensor.from_rank_offsets(str(i), t) for i, t in enumerate(tensors)},
            checkpoint,
        )
        cases: dict[str, Callable[[bool], Callable[[], object]]] = {
            "durable write": lambda verifies: lambda: write(folder, tensors, verifies)
        }
        for warmth in ("warm", "cold"):
            for name, part in LAYOUTS.items():
                targets = parts(tensors, part)
                cases[f"{warmth} load of {name}"] = loading(checkpoint, targets, warmth)
        rows = [[name, *measured(case, arguments.runs)] for name, case in cases.items()]
    finally:
        shutil.rmtree(folder)
    report.add(
        [f"{arguments.gb:g} GB", "seconds with", "without", "ratio", "ratio of CPU time"], rows
    )
    report.finish()


def measured(case: Callable[[bool], Callable[[], object]], num_runs: int) -> list[Cell]:
    """Run a case with and without checksums, in turn; return the cells of its row."""
    figures: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for run in range(num_runs + 1):
        # What comes before a contestant may slow it down: change the order.
        for verifies in (True, False)[:: -1 if run % 2 else 1]:
            function = case(verifies)
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            figures[verifies].append((time.perf_counter() - wall, time.process_time() - cpu))
    # The first round is for warming up.
    pairs = list(zip(figures[True][1:], figures[False][1:], strict=True))
    seconds = [median([pair[i][0] for pair in pairs], "{:.4f}") for i in range(2)]
    return seconds + [median([with_[i] / without[i] for with_, without in pairs]) for i in range(2)]


def shard(
    key: int, whole: torch.Tensor, part: tuple[slice, slice], data: torch.Tensor
) -> ShardedTensor:
    """Describe a part of a tensor."""
    offset = tuple(axis.start for axis in part)
    return ShardedTensor(
        str(key), data, data.dtype, tuple(data.shape), tuple(whole.shape), offset, None
    )


def parts(
    tensors: list[torch.Tensor], part: Callable[[int, int], tuple[slice, slice]]
) -> dict[str, ShardedTensor]:
    """Return what is loaded of each tensor, with memory that is there already."""
    places = [part(*tensor.shape) for tensor in tensors]
    return {
        str(key): shard(key, tensor, place, torch.zeros_like(tensor[place]))
        for key, (tensor, place) in enumerate(zip(tensors, places, strict=True))
    }


def loading(
    checkpoint: Path, targets: dict[str, ShardedTensor], warmth: str
) -> Callable[[bool], Callable[[], object]]:
    """Return the case of a load; what it returns loads once."""

    def prepared(verifies: bool) -> Callable[[], object]:
        if warmth == "cold":
            drop_from_page_cache(str(checkpoint))
        else:
            fill_cache(str(checkpoint))
        return lambda: distckpt.load(dict(targets), checkpoint, verify=verifies)

    return prepared


def write(folder: Path, tensors: list[torch.Tensor], with_checksums: bool) -> None:
    """Write one file as a save does."""
    path = folder / "written"
    path.unlink(missing_ok=True)
    file = file_of_tensors(str(path), bytes(4096), [[tensor] for tensor in tensors])
    write_files([file], WriteSettings(with_checksums=with_checksums))


if __name__ == "__main__":
    main()
