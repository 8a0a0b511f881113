"""Load quantised directories as values, beside plain ones of the same values and torch's reader of
FP8.

    python benchmarks/quantized.py [--mib 512] [--runs 5] [--dir DIR]

All load the same number of bf16 values into tensors that are there, from files in the page cache
and from disk (cold); contestants take turns, and a round before the first is not counted. Prints
medians, the speed in values, the CPU time of all threads, and by how much the resident memory grew
at most.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint
from measure import empty_cache, fill_cache, peak_memory_bytes, sync_file, timed
from report import Report, figure, median, parser_of, ratio
from safetensors.torch import save_file

import distckpt
from distckpt import ShardedTensor

Tensors = dict[str, torch.Tensor]

ROWS, COLUMNS = 4096, 4096


def random_bytes(*shape: int) -> torch.Tensor:
    """Return bytes that are no NaN in any format."""
    return torch.randint(0, 126, shape, dtype=torch.uint8)


def fp8_block(stem: str) -> Tensors:
    """FP8 in blocks of 128 x 128."""
    codes = random_bytes(ROWS, COLUMNS).view(torch.float8_e4m3fn)
    return {
        f"{stem}.weight": codes,
        f"{stem}.weight_scale_inv": torch.rand(ROWS // 128, COLUMNS // 128),
    }


def int4(stem: str) -> Tensors:
    """Packed INT4 in groups of 32."""
    return {
        f"{stem}.weight_packed": random_bytes(ROWS, COLUMNS // 2).view(torch.int32),
        f"{stem}.weight_scale": torch.rand(ROWS, COLUMNS // 32).bfloat16(),
        f"{stem}.weight_shape": torch.tensor([ROWS, COLUMNS], dtype=torch.int32),
    }


def mxfp4(stem: str) -> Tensors:
    """MXFP4 as DeepSeek packs it."""
    # Powers of two as models have them: smaller ones make subnormal values, which are slow to
    # multiply.
    scales = torch.randint(112, 124, (ROWS, COLUMNS // 32), dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )
    return {
        f"{stem}.weight": random_bytes(ROWS, COLUMNS // 2).view(torch.int8),
        f"{stem}.scale": scales,
    }


def plain(stem: str) -> Tensors:
    """bfloat16."""
    return {f"{stem}.weight": torch.rand(ROWS, COLUMNS).bfloat16()}


def write(folder: Path, make: Callable[[str], Tensors], count: int) -> None:
    """Write a directory of one file, with the index that torch's reader wants."""
    folder.mkdir()
    tensors = {
        key: tensor for number in range(count) for key, tensor in make(f"l.{number}").items()
    }
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    # Only what is on disk can be dropped from the cache.
    sync_file(str(folder / "model-00001-of-00001.safetensors"))
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def load_with_distckpt(folder: Path, state: Tensors) -> None:
    """Fill tensors with `distckpt.load`."""
    distckpt.load(
        {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()}, folder
    )


def load_with_torch(folder: Path, state: Tensors) -> None:
    """Fill tensors with torch's reader."""
    storage = torch.distributed.checkpoint.quantized_hf_storage
    reader = storage.QuantizedHuggingFaceStorageReader(
        str(folder), target_dtype=torch.bfloat16, thread_count=2
    )
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)


def main() -> None:
    """Write the directories, let the contestants take turns, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the values")
    arguments = parser.parse_args()
    report = Report(arguments)
    count = max(1, (arguments.mib << 20) // (2 * ROWS * COLUMNS))
    state = {
        f"l.{number}.weight": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
        for number in range(count)
    }
    contestants = {
        make.__name__: (make, load_with_distckpt) for make in (plain, fp8_block, int4, mxfp4)
    }
    if hasattr(torch.distributed.checkpoint, "quantized_hf_storage"):
        contestants["fp8_block, torch's reader"] = (fp8_block, load_with_torch)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    processor: dict[str, list[float]] = {name: [] for name in contestants}
    cold: dict[str, list[float]] = {name: [] for name in contestants}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.dir) as base, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in (plain, fp8_block, int4, mxfp4):
            write(Path(base) / make.__name__, make, count)
        for number in range(arguments.runs + 1):
            for name, (make, load) in contestants.items():
                folder = Path(base) / make.__name__
                fill_cache(str(folder))
                started = time.process_time()
                _, taken = timed(lambda load=load, folder=folder: load(folder, state))
                processor[name] += [time.process_time() - started] if number else []
                seconds[name] += [taken] if number else []
                empty_cache(str(folder))
                cold[name].append(timed(lambda load=load, folder=folder: load(folder, state))[1])
                if number == 1:
                    peaks[name] = peak_memory_bytes(
                        lambda load=load, folder=folder: load(folder, state)
                    )
    size = 2 * ROWS * COLUMNS * count
    rows = [
        [
            name,
            median(each, "{:.3f}"),
            figure(f"{size / statistics.median(each) / 1e9:.2f}", each),
            ratio(seconds["plain"], each),
            median([used / (size / 2) * 1e9 for used in processor[name]]),
            ratio(processor["plain"], processor[name]),
            median(cold[name][1:], "{:.3f}"),
            ratio(cold["plain"][1:], cold[name][1:]),
            f"{peaks[name] / 2**20:.0f}",
        ]
        for name, each in seconds.items()
    ]
    heads = [
        "s",
        "GB/s of values",
        "of plain",
        "CPU ns/value",
        "of plain",
        "cold s",
        "of plain",
        "peak MiB",
    ]
    report.about = f"{count} tensors of {ROWS} x {COLUMNS}, medians of {arguments.runs} runs."
    report.add(["directory", *heads], rows)
    report.finish()


if __name__ == "__main__":
    main()
