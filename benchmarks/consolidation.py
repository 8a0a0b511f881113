"""Consolidate folders of shards beside torch's and NeMo Automodel's functions of the same name, and
import by slices.

    python benchmarks/consolidation.py [--runs 5] [--scale 1] [--dir DIR] [--automodel DIR]
        [--only WORD ...]

Automodel takes part when its wheel was unpacked before, which needs none of its dependencies:
`pip install --no-deps --target DIR nemo-automodel`. Input files are in the page cache. Every run is
a fresh process, whose peak of memory is measured, too; contestants take turns, and what they wrote
is compared with what the shards were made of. A round before the first is not counted. Medians over
the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from measure import peak_memory_bytes, timed
from report import Cell, Report, figure, median, parser_of, ratio
from safetensors import safe_open
from safetensors.torch import save_file

import distckpt
from distckpt import ShardedTensor
from distckpt.cli._processes import run_ranks

Tensors = dict[str, torch.Tensor]

MODULES = {
    "distckpt": "distckpt.hf",
    "torch": "torch.distributed.checkpoint._consolidate_hf_safetensors",
    "Automodel": "nemo_automodel.components.checkpoint._backports.consolidate_hf_safetensors",
}
FLOOR = "cp + fsync"
NUM_THREADS = 2
SETTLE_SECONDS = 5


class Case(NamedTuple):
    """A folder to consolidate: its tensors, how they are cut into shard files, and how many files
    may be open.
    """

    name: str
    tensors: Callable[[float], Tensors]
    axis: int | None
    num_files: int
    max_open_files: int = 1024


class Run(NamedTuple):
    """What came of one run."""

    seconds: float
    peak_bytes: int
    error: str | None


def matrices(count: int, rows: int, columns: int, multiple: int = 4) -> Callable[[float], Tensors]:
    """Return a function that makes fp32 matrices, with fewer rows (a multiple of some number) at a
    smaller scale.
    """

    def make(scale: float) -> Tensors:
        shape = (max(1, round(rows * scale / multiple)) * multiple, columns)
        seeds = (torch.Generator().manual_seed(i) for i in range(count))
        return {
            f"layers.{i}.weight": torch.rand(shape, generator=seed) for i, seed in enumerate(seeds)
        }

    return make


def tiny(scale: float) -> Tensors:
    """Make many tensors of 64 bytes."""
    return {
        f"layers.{i}.norm.weight": torch.full((16,), float(i)) for i in range(int(8000 * scale))
    }


CASES = [
    Case("2 GB, 8 tensors, 4 row shards", matrices(8, 16384, 4096), 0, 4),
    Case("1 GB, 65536 x 4096, 4 column shards", matrices(1, 65536, 4096), 1, 4),
    Case("256 MB, 1048576 x 64, 4 column shards", matrices(1, 1048576, 64), 1, 4),
    Case("4 files x 2000 tiny tensors", tiny, None, 4),
    Case("1100 files, 256 may be open", matrices(1, 17600, 1024, 1100), 0, 1100, 256),
]


def main() -> None:
    """Run all cases and the import, print tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes, for a quick look")
    parser.add_argument(
        "--automodel", help="folder that the wheel nemo-automodel was unpacked into"
    )
    parser.add_argument(
        "--only", nargs="+", help="cases with one of these words in their name ('import' is one)"
    )
    arguments = parser.parse_args()
    report = Report(arguments)
    if arguments.automodel:
        sys.path.append(arguments.automodel)
    names = [name for name in MODULES if is_there(name)]
    report.notes += [
        NOTES,
        *(f"{name} is not installed and left out." for name in MODULES if name not in names),
    ]
    rows: list[list[Cell]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        for case in CASES:
            if not arguments.only or any(word in case.name for word in arguments.only):
                rows += measure(case, [*names, FLOOR], arguments, folder)
        report.add(HEADS, rows)
        if not arguments.only or "import" in arguments.only:
            report.add(IMPORT_HEADS, measure_import(arguments.scale, arguments.runs, folder))
    report.finish()


def is_there(name: str) -> bool:
    """Tell whether a contestant can be imported."""
    try:
        import_module(MODULES[name])
    except ImportError:
        return False
    return True


# ---- consolidation

HEADS = ["case: by", "seconds", "range", "GB/s", "speed / torch's", "speed / cp's", "extra peak MB"]


def measure(
    case: Case, names: list[str], arguments: argparse.Namespace, folder: str
) -> list[list[Cell]]:
    """Consolidate a folder with every contestant in turn, round after round; returns rows of the
    table.
    """
    tensors = case.tensors(arguments.scale)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    source = f"{folder}/in"
    write_shards(case, tensors, source)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for round_number in range(arguments.runs + 1):
        targets = [f"{folder}/{name}" for name in names]
        for name, target in zip(names, targets, strict=True):
            os.mkdir(target)
            at_rest(source)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                todo = (name, source, target, case.max_open_files, arguments.automodel)
                runs[name].append(fresh.submit(run_once, *todo).result())
            if round_number == 0 and name != FLOOR and runs[name][-1].error is None:
                compare(tensors, target, name)
            print(f"{case.name}: {name}: {runs[name][-1]}", file=sys.stderr)
        # Deleted blocks are given back to the disk in the background, which slows down whoever
        # writes then.
        for target in targets:
            shutil.rmtree(target)
        os.sync()
        time.sleep(SETTLE_SECONDS * min(1, arguments.scale))
    shutil.rmtree(source)
    runs = {name: all_runs[1:] for name, all_runs in runs.items()}
    return [row(case, name, runs, num_bytes) for name in names]


def row(case: Case, name: str, runs: dict[str, list[Run]], num_bytes: int) -> list[Cell]:
    """Lay out what one contestant needed for one case."""
    errors = {run.error for run in runs[name]} - {None}
    if errors:
        return [f"{case.name}: {name}", str(errors.pop()), "", "", "", "", ""]
    seconds = [run.seconds for run in runs[name]]

    def speed(other: str) -> Cell:
        failed = other not in runs or any(run.error for run in runs[other])
        return "" if failed else ratio([run.seconds for run in runs[other]], seconds)

    peak = max(run.peak_bytes for run in runs[name])
    return [
        f"{case.name}: {name}",
        median(seconds),
        f"{min(seconds):.2f} - {max(seconds):.2f}",
        figure(f"{num_bytes / statistics.median(seconds) / 1e9:.2f}", seconds),
        speed("torch"),
        speed(FLOOR),
        "" if name == FLOOR else f"{peak / 1e6:.0f}",
    ]


def write_shards(case: Case, tensors: Tensors, folder: str) -> None:
    """Write what torch's `HuggingFaceStorageWriter(save_distributed=True)` writes."""
    os.mkdir(folder)
    for number in range(case.num_files):
        pieces = dict(shard_of(case, tensors, number))
        info = {key: {"saved_offsets": offsets} for key, (offsets, _) in pieces.items()}
        save_file(
            {key: piece for key, (_, piece) in pieces.items()},
            f"{folder}/shard-{number + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )


def shard_of(
    case: Case, tensors: Tensors, number: int
) -> Iterator[tuple[str, tuple[list[int], torch.Tensor]]]:
    """Yield the part of each tensor that goes into a shard file, with its offset."""
    for index, (key, tensor) in enumerate(tensors.items()):
        if case.axis is None:
            if index % case.num_files == number:
                yield key, ([0] * tensor.ndim, tensor)
            continue
        first = number * math.ceil(tensor.shape[case.axis] / case.num_files)
        offsets = [first if axis == case.axis else 0 for axis in range(tensor.ndim)]
        yield key, (offsets, tensor.chunk(case.num_files, case.axis)[number].contiguous())


def at_rest(folder: str) -> None:
    """Wait until nothing is being written to disk any more, and all files in a folder are in the
    page cache.
    """
    os.sync()
    buffer = bytearray(16 << 20)
    for path in Path(folder).iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_once(
    name: str, source: str, target: str, max_open_files: int, automodel: str | None
) -> Run:
    """In a process of its own: consolidate once."""
    torch.set_num_threads(1)
    sys.path += [automodel] if automodel else []
    mapping: dict[str, int] = {}
    for path in sorted(Path(source).iterdir()):
        with safe_open(path, "pt") as file:
            mapping |= dict.fromkeys(file.keys(), 1)
    if name == FLOOR:
        function = partial(copy, source, target)
    else:
        function = partial(
            import_module(MODULES[name]).consolidate_safetensors_files,
            source,
            target,
            mapping,
            NUM_THREADS,
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max_open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    seconds: list[float] = []
    try:
        peak = peak_memory_bytes(lambda: seconds.append(timed(function)[1]))
    except Exception as error:
        return Run(math.inf, 0, f"fails: {getattr(error, 'strerror', None) or repr(error)[:40]}")
    return Run(seconds[0], peak, None)


def copy(source: str, target: str) -> None:
    """Copy the shard files as they are; they are on disk when this returns."""
    subprocess.run(["cp", "-r", f"{source}/.", target], check=True)
    for path in [*Path(target).iterdir(), Path(target)]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def compare(tensors: Tensors, target: str, name: str) -> None:
    """Check that an export holds exactly these tensors."""
    found = 0
    for path in Path(target).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                found += 1
                assert torch.equal(file.get_tensor(key), tensors[key]), (
                    f"{name} wrote another {key}"
                )
    assert found == len(tensors), f"{name} wrote {found} of {len(tensors)} tensors"


# ---- import

IMPORT_HEADS = [
    "import, TP2",
    "seconds",
    "range",
    "GB/s of both ranks",
    "read / held, rank 0",
    "read / held, rank 1",
]


def measure_import(scale: float, num_runs: int, folder: str) -> list[list[Cell]]:
    """Load a Hugging Face file by halves on two ranks; returns rows of the table."""
    tensors = matrices(8, 16384, 4096)(scale)
    os.mkdir(f"{folder}/hf")
    save_file(tensors, f"{folder}/hf/model.safetensors", metadata={"format": "pt"})
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    rows = []
    for axis in (0, 1):
        run_ranks(import_half, 2, folder, shapes, axis, num_runs)
        figures = [json.loads(Path(f"{folder}/rank{rank}.json").read_text()) for rank in range(2)]
        seconds = [max(pair) for pair in zip(*(f["seconds"] for f in figures), strict=True)]
        rows.append(
            [
                f"{num_bytes / 1e9:.1f} GB, cut along axis {axis}",
                median(seconds),
                f"{min(seconds):.2f} - {max(seconds):.2f}",
                figure(f"{num_bytes / statistics.median(seconds) / 1e9:.2f}", seconds),
                *(f"{f['ratio']:.3f}" for f in figures),
            ]
        )
    shutil.rmtree(f"{folder}/hf")
    return rows


def import_half(
    rank: int, folder: str, shapes: dict[str, tuple[int, ...]], axis: int, num_runs: int
) -> None:
    """On a rank: load one half of every tensor, several times."""
    state = {}
    for key, shape in shapes.items():
        half = torch.zeros([size // 2 if i == axis else size for i, size in enumerate(shape)])
        state[key] = ShardedTensor.from_rank_offsets(key, half, (axis, rank, 2))
    seconds, read = [], 0
    for _ in range(num_runs + 1):
        torch.distributed.barrier()
        before = bytes_read()
        seconds.append(timed(lambda: distckpt.load(state, f"{folder}/hf"))[1])
        read = bytes_read() - before
    held = sum(shard.data.nbytes for shard in state.values())
    Path(f"{folder}/rank{rank}.json").write_text(
        json.dumps({"seconds": seconds[1:], "ratio": read / held})
    )


def bytes_read() -> int:
    """Return how many bytes this process has asked for in calls of read and pread."""
    match = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.M)
    assert match is not None
    return int(match[1])


NOTES = (
    f"One output file, {NUM_THREADS} threads, warm input. distckpt's output is on disk when it "
    "returns, and so is what cp has copied (shard files as they are, each synced); torch's and "
    "Automodel's functions call no fsync, and what they have written is not synced in the time "
    "measured. Extra peak memory is what became resident beyond what was before, the largest of "
    "all runs. read / held: bytes asked of the system by the bytes of the rank's slices; along "
    "axis 1 the runs of a slice are 8 KiB long, with gaps as long."
)


if __name__ == "__main__":
    main()
