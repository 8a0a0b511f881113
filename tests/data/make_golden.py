"""Writes the checkpoints in `format-1/` and others like it, once: `python -m tests.data.make_golden
NEW_DIRECTORY [large]`; with `large` as large checkpoints are stored.

What lies there was written when that format was released and is never written again:
`tests/unit/format/test_golden.py` shows that it stays readable. For a new format, run this with the
code that writes it, into a directory of its own. Values are made by numpy: `format-1/expected.npz`
holds the bits of each tensor, as unsigned integers; `COMMON` below is what the objects are made of.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import math
import os
import pathlib
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from tests.support.harness import run
from tests.support.manifests import set_limits

NUM_RANKS = 2


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = 2


@dataclasses.dataclass
class Schedule:
    phase: Phase
    lr: float


class Point(NamedTuple):
    x: int
    y: int


for _cls in (Phase, Schedule, Point):
    distckpt.register_object_type(_cls, f"golden.{_cls.__name__}")

TENSORS = np.random.default_rng(1)
"""Its bits are the same with every release of numpy: PCG64 is fixed."""


def _bits(*shape: int, num_bytes: int = 4) -> np.ndarray:
    """Return random finite values as unsigned integers of their size."""
    raw = TENSORS.integers(0, 256, (*shape, num_bytes), np.uint8)
    # Two exponent bits are zero in all floating point formats of at least 8 bits: no infinity, no
    # NaN.
    raw[..., -1:] &= 0x9F
    return raw.view(f"<u{num_bytes}")[..., 0]


DTYPES = {
    "bool": np.array([1, 0, 1], np.uint8),
    "uint8": _bits(3, num_bytes=1),
    "int8": _bits(3, num_bytes=1),
    "uint16": _bits(3, num_bytes=2),
    "int16": _bits(3, num_bytes=2),
    "uint32": _bits(3),
    "int32": _bits(3),
    "uint64": _bits(3, num_bytes=8),
    "int64": _bits(3, num_bytes=8),
    "float16": _bits(2, 3, num_bytes=2),
    "bfloat16": _bits(2, 3, num_bytes=2),
    "float32": _bits(2, 3),
    "float64": _bits(2, 3, num_bytes=8),
    "complex64": _bits(2, 3, num_bytes=8),
    "float8_e4m3fn": _bits(2, 3, num_bytes=1),
    "float8_e5m2": _bits(2, 3, num_bytes=1),
    "float8_e4m3fnuz": _bits(2, 3, num_bytes=1),
    "float8_e5m2fnuz": _bits(2, 3, num_bytes=1),
}
"""Name of a torch dtype -> bits of a tensor."""
NEW_DTYPES = {
    "float8_e8m0fnu": _bits(2, 3, num_bytes=1),
    "float4_e2m1fn_x2": _bits(2, 4, num_bytes=1),
}
"""The same for dtypes that not every release of torch has."""

EXPECTED: dict[str, np.ndarray] = {
    "grid/columns": _bits(6, 8),
    "grid/rows": _bits(8, 5),
    "grid/bias": _bits(4, 3),
    "grid/stack": _bits(4, 2, 3),
    "flat/weight": _bits(7, 5),
    "flat/embedding": _bits(6, 4),
    "odd/scalar": _bits(num_bytes=8),
    "odd/empty": np.zeros((0, 4), np.uint32),
    "odd/tied": _bits(3, 4),
    **{f"dtypes/{name}": bits for name, bits in DTYPES.items()},
    **{f"new_dtypes/{name}": bits for name, bits in NEW_DTYPES.items()},
    **{f"run/step {step}": _bits(8, 2) for step in (10, 20, 30)},
}
"""Checkpoint and key -> bits of the whole tensor."""

CELLS = [{"rank": rank, "rng": np.arange(rank, rank + 5)} for rank in range(4)]
"""The cells of an object of shape (2, 2)."""

COMMON: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**62, 2**100, -(2**100)],
    "floats": [0.1, -0.0, 1e300, math.inf, -math.inf],
    "complex": 1.5 - 2j,
    "texts": ["", "ä€😀", "line\nbreak", "\ud800", "x" * 300],
    "bytes": [b"", b"\x00\xff", bytes(range(256)) * 20, bytearray(b"abc")],
    "containers": ([1, (2, [3])], (), set(), {1, "a", (2, 3)}, frozenset({b"x"}), {}, []),
    "dicts": {"a.b": 1, 7: "int", None: 2, ("t", 1): [3], 1.5: {"deep": {"er": ()}}},
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, k=[1]),
    "slices": [slice(1, None, 2), range(3, 30, 4)],
    "namespaces": [argparse.Namespace(lr=0.5, names=["a"]), types.SimpleNamespace(x=(1,))],
    "times": [
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 12, 30, 15, 123456),
        datetime.datetime(
            2024, 2, 29, 12, 30, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")
        ),
        datetime.timedelta(days=-3, seconds=5, microseconds=7),
        datetime.timezone.utc,
    ],
    "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("C:\\a")],
    "torch": [
        torch.bfloat16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        torch.arange(6.0).view(2, 3),
        torch.tensor(True),
    ],
    "numpy": [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.float32(1.5),
        np.str_("s"),
        np.bool_(True),
        np.array(["ab", "c"]),
    ],
    "registered": [Phase.DECAY, Schedule(Phase.WARMUP, 0.25), Point(1, 2)],
}
"""Common state with every kind of value that can be stored."""


def tensor_of(bits: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of these bits."""
    integers = np.array(bits).view(f"i{bits.itemsize}")
    return torch.from_numpy(integers).view(dtype)


def grid_state(rank: int) -> dict[str, Any]:
    """Tensor parallel shards along both axes, a replica, and layers stacked along an axis that the
    shards lack.
    """
    columns, rows, bias, stack = (
        tensor_of(EXPECTED[f"grid/{key}"]) for key in ("columns", "rows", "bias", "stack")
    )
    return {
        "columns": ShardedTensor.from_rank_offsets(
            "columns", columns.chunk(2, 1)[rank], (1, rank, 2)
        ),
        "rows": ShardedTensor.from_rank_offsets("rows", rows.chunk(2, 0)[rank], (0, rank, 2)),
        "bias": ShardedTensor.from_rank_offsets("bias", bias, replica_id=rank),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "stack", stack[layer], (0, layer, 4), prepend_axis_num=1
            )
            for layer in (2 * rank, 2 * rank + 1)
        ],
        "step": 7,
    }


def flat_state(rank: int) -> dict[str, Any]:
    """Optimizer shards of ZeRO-1: of the flattened tensor each rank has a part, at no boundary of a
    row.
    """
    weight, embedding = (tensor_of(EXPECTED[f"flat/{key}"]) for key in ("weight", "embedding"))
    parts = [slice(0, 17), slice(17, 35)]
    flat = ShardedTensor.from_rank_offsets_flat(
        "weight", weight.flatten()[parts[rank]], tuple(weight.shape), flattened_range=parts[rank]
    )
    rows = embedding.chunk(2, 0)[rank]
    whole_part = ShardedTensor.from_rank_offsets_flat(
        "embedding",
        rows.flatten(),
        tuple(rows.shape),
        (0, rank, 2),
        flattened_range=slice(0, rows.numel()),
    )
    return {"weight": flat, "embedding": whole_part}


def odd_state(rank: int) -> dict[str, Any]:
    """A tensor without axes, one without elements, and one under two keys."""
    tied = tensor_of(EXPECTED["odd/tied"])
    tensors = {
        "scalar": tensor_of(EXPECTED["odd/scalar"], torch.float64),
        "empty": tensor_of(EXPECTED["odd/empty"]),
        "tied": tied,
        "alias": tied,
    }
    return {
        key: ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
        for key, data in tensors.items()
    }


def dtypes_state(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """One tensor of each dtype."""
    return {
        name: ShardedTensor.from_rank_offsets(name, tensor_of(bits, getattr(torch, name)))
        for name, bits in values.items()
    }


def objects_state(rank: int) -> dict[str, Any]:
    """A grid of objects, and common state of all kinds."""
    cells = {
        f"cell {index}": ShardedObject("cells", CELLS[index], (2, 2), divmod(index, 2))
        for index in (2 * rank, 2 * rank + 1)
    }
    return {**cells, **COMMON}


def run_state(rank: int, step: int) -> dict[str, Any]:
    """What a training run saves."""
    rows = tensor_of(EXPECTED[f"run/step {step}"]).chunk(2, 0)[rank]
    return {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, 2)), "step": step}


def write(rank: int, folder: str, as_large: bool) -> None:
    """Save everything; both ranks call."""
    _set_limits(as_large)
    distckpt.save(grid_state(rank), f"{folder}/grid", content_metadata={"layout": "tp2"})
    distckpt.save(flat_state(rank), f"{folder}/flat")
    distckpt.save(odd_state(rank), f"{folder}/odd")
    distckpt.save(objects_state(rank), f"{folder}/objects")
    with distckpt.CheckpointManager(f"{folder}/run", keep_last=2, best_metric="loss") as manager:
        for step in (10, 20, 30):
            manager.save(step, run_state(rank, step), metrics={"loss": step / 10})


def write_alone(rank: int, folder: str, as_large: bool) -> None:
    """Save what one process saves."""
    del rank
    _set_limits(as_large)
    distckpt.save(dtypes_state(DTYPES), f"{folder}/dtypes")
    distckpt.save(dtypes_state(NEW_DTYPES), f"{folder}/new_dtypes")


def _set_limits(as_large: bool) -> None:
    """Let small checkpoints be stored like large ones, in which checksums have files of their
    own, and the manifest has parts.
    """
    if as_large:
        set_limits(pytest.MonkeyPatch())


if __name__ == "__main__":
    folder, *large = sys.argv[1:]
    os.mkdir(folder)
    run(write, NUM_RANKS, folder, bool(large))
    run(write_alone, 1, folder, bool(large), backend=None)
    np.savez_compressed(os.path.join(folder, "expected.npz"), **EXPECTED)
