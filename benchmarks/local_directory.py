"""Loads of a Hugging Face directory on a local disk: whole, and a slice of a tensor parallel rank.

    python benchmarks/local_directory.py [--layers 8] [--runs 7] [--dir DIR]

Six safetensors files with bfloat16 matrices of a small Llama, loaded into tensors that are there
already, by one process. The slice is that of rank 1 of 4: rows of q, k, v, gate and up, columns of
o and down. Warm: files are in the page cache; cold: they were dropped from it before. Contestants
take turns, after a round that does not count; times are medians, and the ratios those of a round to
distckpt's time from the directory. "own format" verifies checksums.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import empty_cache, fill_cache, sync_file, timed
from report import Report, median, parser_of, ratio
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import ShardedTensor

HIDDEN, FFN, WORDS = 2048, 5632, 32_000
NUM_FILES = 6
RANK, NUM_RANKS = 1, 4
AXES = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}
"""The axis along which tensor parallelism divides a matrix."""

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Print a table for whole tensors and one for slices."""
    parser = parser_of(__doc__, runs=7)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    report = Report(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        stored = write(folder, arguments.layers)
        for name, ways in (("whole", whole(folder, stored)), ("slice", sliced(folder, stored))):
            for state in ("warm", "cold"):
                found = measured(folder, ways, arguments.runs, state)
                rows = [
                    [way, median(seconds, "{:.3f}"), ratio(seconds, found["distckpt"])]
                    for way, seconds in found.items()
                ]
                report.add([f"{name}, {state}", "seconds", "ratio to distckpt"], rows)
    report.finish()


def matrices(num_layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield names and shapes."""
    yield "embed", (WORDS, HIDDEN)
    for layer in range(num_layers):
        for name in "qkvo":
            yield f"{layer}.{name}", (HIDDEN, HIDDEN)
        yield f"{layer}.gate", (FFN, HIDDEN)
        yield f"{layer}.up", (FFN, HIDDEN)
        yield f"{layer}.down", (HIDDEN, FFN)


def write(folder: str, num_layers: int) -> Tensors:
    """Write the same tensors as a directory and in distckpt's own format."""
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in matrices(num_layers)}
    distckpt.save(shards(tensors), f"{folder}/own")
    files: dict[str, Tensors] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number * NUM_FILES // len(tensors) + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        files.setdefault(file, {})[name] = tensor
    os.makedirs(f"{folder}/hf")
    for file, content in files.items():
        save_file(content, f"{folder}/hf/{file}")
        sync_file(f"{folder}/hf/{file}")
    weight_map = {name: file for file, content in files.items() for name in content}
    with open(f"{folder}/hf/model.safetensors.index.json", "w", encoding="utf-8") as index:
        json.dump({"metadata": {}, "weight_map": weight_map}, index)
    return tensors


def part_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view that the rank has of a tensor."""
    return tensor.chunk(NUM_RANKS, AXES[name.split(".")[-1]])[RANK]


def whole(folder: str, stored: Tensors) -> dict[str, Callable[[], object]]:
    """Return the ways to load all tensors."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}

    def load_files() -> None:
        for path in paths(folder):
            for name, tensor in load_file(path).items():
                targets[name].copy_(tensor)

    def load_by_torch() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = dcp.HuggingFaceStorageReader(f"{folder}/hf")
            dcp.load(dict(targets), storage_reader=reader)

    return {
        **ours(folder, shards(targets)),
        "safetensors load_file": load_files,
        "torch HuggingFaceStorageReader": load_by_torch,
    }


def sliced(folder: str, stored: Tensors) -> dict[str, Callable[[], object]]:
    """Return the ways to load the slice of a rank."""
    divided = {name: tensor for name, tensor in stored.items() if name != "embed"}
    targets = {name: torch.zeros_like(part_of(name, t)) for name, t in divided.items()}
    described = {}
    for name, target in targets.items():
        place = (AXES[name.split(".")[-1]], RANK, NUM_RANKS)
        described[name] = ShardedTensor.from_rank_offsets(name, target, place)

    def load_slices() -> None:
        for path in paths(folder):
            with safe_open(path, "pt") as file:
                for name in targets.keys() & set(file.keys()):
                    axis = AXES[name.split(".")[-1]]
                    size = targets[name].shape[axis]
                    region = (slice(None),) * axis + (slice(RANK * size, (RANK + 1) * size),)
                    targets[name].copy_(file.get_slice(name)[region])

    return {**ours(folder, described), "safetensors slices": load_slices}


def ours(folder: str, state: dict[str, ShardedTensor]) -> dict[str, Callable[[], object]]:
    """Return the loads of distckpt."""
    return {
        "distckpt": lambda: distckpt.load(dict(state), f"{folder}/hf"),
        "distckpt, own format": lambda: distckpt.load(dict(state), f"{folder}/own"),
    }


def shards(tensors: Tensors) -> dict[str, ShardedTensor]:
    """Describe whole tensors."""
    return {name: ShardedTensor.from_rank_offsets(name, t) for name, t in tensors.items()}


def paths(folder: str) -> list[str]:
    """Return the files with tensors."""
    return sorted(glob.glob(f"{folder}/hf/*.safetensors"))


def measured(
    folder: str, ways: dict[str, Callable[[], object]], num_runs: int, state: str
) -> dict[str, list[float]]:
    """Time all ways in turn; return their seconds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(num_runs + 1):
        for name in list(ways)[:: -1 if run % 2 else 1]:
            if state == "warm":
                fill_cache(folder)
            elif not empty_cache(folder):
                raise SystemExit("The files stay in the page cache: take another disk.")
            found[name].append(timed(ways[name])[1])
    return {name: seconds[1:] for name, seconds in found.items()}


if __name__ == "__main__":
    main()
