"""Merge checkpoints beside reading and writing as many bytes in the same run.

    python benchmarks/merging.py [--gigabytes 0.5] [--checkpoints 3] [--dtype bfloat16]
        [--cold] [--runs 5] [--dir DIR]

Inputs are in the page cache, or, with --cold, on disk. The floor reads all of them and writes as
much as one of them, with as many threads and the same functions, and does no arithmetic. Every run
is a fresh process, which has imported what it calls, and whose peak of memory is measured; the
contestants take turns. A round before the first is not counted. Medians over the runs; the
processor time is that of all threads, for an element of the output.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
from measure import peak_memory_bytes, timed
from report import Report, figure, median, parser_of, ratio

import distckpt
from distckpt._base.threads import NUM_THREADS, UNIT_BYTES
from distckpt._io.write import NewFile, WriteSettings, write_files


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of each checkpoint")
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--cold", action="store_true", help="drop the inputs from the page cache before each run"
    )
    arguments = parser.parse_args()
    report = Report(arguments)
    inputs = f"{arguments.checkpoints} checkpoints of {arguments.gigabytes:g} GB, {arguments.dtype}"
    report.about = f"{inputs}, {'on disk' if arguments.cold else 'in the page cache'}."
    contestants = {
        "read + write": floor,
        "distckpt.merge": merge,
        "distckpt.merge, verified": merge_verified,
    }
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        dtype = getattr(torch, arguments.dtype)
        paths = [
            checkpoint(f"{folder}/{i}", i, arguments.gigabytes, dtype)
            for i in range(arguments.checkpoints)
        ]
        sizes = [os.path.getsize(file_of(path)) for path in paths]
        runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contestants}
        for _ in range(arguments.runs + 1):
            for name, function in contestants.items():
                os.sync()
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                    runs[name].append(
                        fresh.submit(
                            run_once, function, paths, f"{folder}/out", arguments.cold
                        ).result()
                    )
                shutil.rmtree(f"{folder}/out")
    seconds = {name: [one for one, _, _ in all_runs[1:]] for name, all_runs in runs.items()}
    num_elements = sizes[0] / dtype.itemsize
    rows = [
        [
            name,
            median(each),
            figure(f"{sum(sizes) / statistics.median(each) / 1e9:.2f}", each),
            ratio(seconds["read + write"], each),
            median([used / num_elements * 1e9 for _, used, _ in runs[name][1:]], "{:.1f}"),
            f"{max(peak for _, _, peak in runs[name]) / 1e6:.0f}",
        ]
        for name, each in seconds.items()
    ]
    report.add(
        ["", "seconds", "GB/s read", "speed / floor", "CPU ns / element", "extra peak MB"], rows
    )
    report.finish()


def checkpoint(path: str, seed: int, gigabytes: float, dtype: torch.dtype) -> str:
    """Save a checkpoint of matrices."""
    draw = torch.Generator().manual_seed(seed)
    num_matrices = max(1, round(gigabytes * 1e9 / 2**24 / dtype.itemsize))
    matrices = {
        f"layers.{i}.weight": torch.randn(4096, 4096, generator=draw) for i in range(num_matrices)
    }
    distckpt.save(
        {
            k: distckpt.ShardedTensor.from_rank_offsets(k, each.to(dtype))
            for k, each in matrices.items()
        },
        path,
    )
    return path


def file_of(path: str) -> str:
    """Return the file with the tensors of a checkpoint."""
    (name,) = os.listdir(f"{path}/tensors")
    return f"{path}/tensors/{name}"


def run_once(function, paths: list[str], target: str, cold: bool) -> tuple[float, float, int]:
    """In a process of its own: seconds, processor time and extra peak memory of a call."""
    torch.set_num_threads(1)
    _ = distckpt.merge  # imports it
    for path in paths:
        with open(file_of(path), "rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.read(UNIT_BYTES):
                pass
    seconds: list[float] = []
    before = sum(os.times()[:2])
    peak = peak_memory_bytes(lambda: seconds.append(timed(lambda: function(paths, target))[1]))
    return seconds[0], sum(os.times()[:2]) - before, peak


def merge(paths: list[str], target: str) -> None:
    """Merge without verification."""
    distckpt.merge(paths, target, verify=False)


def merge_verified(paths: list[str], target: str) -> None:
    """Merge, comparing the checksums of all blocks."""
    distckpt.merge(paths, target)


def floor(paths: list[str], target: str) -> None:
    """Read each input, and write as much as there is in one of them."""
    os.mkdir(target)
    files = [os.open(file_of(path), os.O_RDONLY) for path in paths]
    size = os.fstat(files[0]).st_size

    def fill(unit, memory):
        filled = memory[: sum(span.num_bytes for span in unit)]
        for fd in files:
            os.preadv(fd, [filled], unit[0].start)
        return [filled]

    settings = WriteSettings(with_checksums=False, num_threads=NUM_THREADS)
    write_files([NewFile(f"{target}/model.safetensors", bytes(4096), [size], fill)], settings)


if __name__ == "__main__":
    main()
