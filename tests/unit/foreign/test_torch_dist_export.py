"""Checkpoints written as `torch_dist`: read by torch, and by distckpt; by Megatron Core in
tests/distributed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import errno
import io
import math
import os
import pathlib
import resource
import tracemalloc
import types
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    UnsupportedObjectError,
    torch_dist,
)
from distckpt.cli import main
from tests.support.calls import recorded
from tests.support.disks import limited
from tests.support.states import bits, save_checkpoint


@distckpt.register_object_type
class Mode(enum.Enum):
    FAST = "fast"


@distckpt.register_object_type
@dataclasses.dataclass(frozen=True)
class Config:
    mode: Mode
    lr: float = 0.1


@distckpt.register_object_type
class Point(NamedTuple):
    x: int
    y: int = 2


VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, -1, 255, 256, -129, 2**40, -(2**63), 2**100],
    "floats": [0.0, -0.5, math.inf, 1e300],
    "texts": ["", "a", "\u00e4\U0001f600", "x" * 300],
    "bytes": [b"", bytes(range(256)), bytearray(b"ab")],
    "tuple": (1, (2,), ()),
    "keys": {1: "a", "b": {}, (1, 2): 3},
    "sets": [{1, 2}, frozenset("a")],
    "complex": 1 - 2j,
    "slices": [slice(1, None, 2), range(1, 9, 3)],
    "ordered": collections.OrderedDict(b=1, a=2),
    "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
    "space": types.SimpleNamespace(a=1),
    "dtypes": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
    "path": pathlib.PosixPath("/a/b"),
    "enum": Mode.FAST,
    "config": Config(Mode.FAST, 2.0),
    "point": Point(3),
    "times": [
        datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime.timedelta(1, 2, 3),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    ],
}
ARRAYS = {
    "rng": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "big": np.array([1.5], ">f8"),
    "scalar": np.float32(2),
}
TENSORS = {
    "long": torch.arange(3),
    "bf16": torch.randn(2, 2).bfloat16(),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "c"
    weight = torch.randn(6, 4)
    parts = [
        ShardedTensor("w", weight[:2].clone(), weight.dtype, (2, 4), (6, 4), (0, 0), None),
        ShardedTensor("w", weight[2:].clone(), weight.dtype, (4, 4), (6, 4), (2, 0), None),
    ]
    layers = [
        ShardedTensor.from_rank_offsets(
            "layers.w", torch.full((3,), float(i)), (0, i, 2), prepend_axis_num=1
        )
        for i in range(2)
    ]
    objects = [
        ShardedObject("a/rng", {"state": ARRAYS["rng"], "rank": i}, (2,), (i,)) for i in range(2)
    ]
    dtypes = [
        torch.float64,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.complex64,
    ]
    others = {str(d): torch.ones(2, 3).to(d) for d in dtypes}
    state = {
        "w": parts,
        "layers": layers,
        "objects": objects,
        "empty": ShardedTensor.from_rank_offsets("empty", torch.empty(0, 3)),
        "others": [ShardedTensor.from_rank_offsets(key, value) for key, value in others.items()],
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(7.0)),
        **VALUES,
        "arrays": ARRAYS,
        "tensors": TENSORS,
        "memory": io.BytesIO(b"abc"),
    }
    distckpt.save(state, path, content_metadata={"layout": "plain"})
    return path, weight, others


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "c"
    seen = []
    assert (
        torch_dist.export(source[0], path, progress=lambda done, total: seen.append((done, total)))
        is None
    )
    assert seen[-1][0] == seen[-1][1] > 100
    return path


def check_values(found):
    assert {name: found[name] for name in VALUES} == VALUES
    assert {name: type(found[name]) for name in VALUES} == {
        name: type(value) for name, value in VALUES.items()
    }
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found["arrays"][name], array)
        # numpy's own pickles bring the byte order of the machine.
        assert found["arrays"][name].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    for name, tensor in TENSORS.items():
        assert (found["tensors"][name].dtype, found["tensors"][name].shape) == (
            tensor.dtype,
            tensor.shape,
        )
        assert torch.equal(found["tensors"][name], tensor)
    assert found["memory"].getvalue() == b"abc"
    assert found["content_metadata"] == {"layout": "plain"}


def test_torch_reads_common_state(exported):
    check_values(torch.load(exported / "common.pt", weights_only=False))


def test_torch_loads_tensors_and_objects(source, exported):
    _, weight, others = source
    state = {"w": torch.zeros(6, 4), "layers.w": torch.zeros(2, 3), "scalar": torch.tensor(0.0)}
    state |= {key: torch.zeros_like(value) for key, value in others.items()}
    state |= {f"a/rng/shard_{i}_2": None for i in range(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(exported))
    assert torch.equal(state["w"], weight)
    assert state["layers.w"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert state["scalar"] == 7
    assert [
        key
        for key, value in others.items()
        if not torch.equal(state[key].view(torch.uint8), value.view(torch.uint8))
    ] == []
    for i in range(2):
        (value,) = state[f"a/rng/shard_{i}_2"]
        np.testing.assert_array_equal(value["state"], ARRAYS["rng"])
        assert value["rank"] == i


def test_distckpt_reads_it_back(source, exported, tmp_path):
    original = distckpt.open(source[0]).read_tensors()
    found = distckpt.open(exported).read_tensors()
    assert found.keys() == original.keys()
    assert {key: bits(value) for key, value in found.items()} == {
        key: bits(value) for key, value in original.items()
    }
    check_values(distckpt.open(exported).common_state)
    distckpt.reshard(exported, tmp_path / "again")
    assert distckpt.megatron.serialization.load_sharded_metadata(tmp_path / "again").keys() >= {
        "w",
        "a/rng/shard_0_2",
        "a/rng/shard_1_2",
    }


def test_targets_and_values_that_are_refused(source, exported, tmp_path):
    with pytest.raises(CheckpointExistsError):
        torch_dist.export(source[0], exported)
    with pytest.raises(CheckpointingException, match="its own source"):
        torch_dist.export(source[0], source[0], overwrite=True)
    with pytest.raises(CheckpointingException, match="local path"):
        torch_dist.export(source[0], "memory://bucket/x")
    distckpt.save({"values": collections.deque([1])}, tmp_path / "c")
    with pytest.raises(UnsupportedObjectError, match=r"'values' of type collections\.deque"):
        torch_dist.export(tmp_path / "c", tmp_path / "d")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("limit", [0, 100])
def test_a_file_that_cannot_be_written_is_named(source, tmp_path, limit):
    with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match="large") as caught:
        torch_dist.export(source[0], tmp_path / "exported")
    assert caught.value.errno == errno.EFBIG
    assert str(tmp_path) in caught.value.filename
    assert not (tmp_path / "exported").exists()


def test_the_command(tmp_path, capsys):
    distckpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 3}, tmp_path / "c"
    )
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "d"), "--to", "torch_dist"]) == 0
    assert torch.load(tmp_path / "d" / "common.pt") == {"step": 3}
    assert (
        main(
            [
                "convert",
                str(tmp_path / "c"),
                str(tmp_path / "d"),
                "--to",
                "torch_dist",
                "--overwrite",
            ]
        )
        == 0
    )
    assert sorted(os.listdir(tmp_path / "d")) == [
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
    ]


# --- What it takes --------------------------------------------------------------------------------


def test_a_large_chunk_is_not_in_memory_as_a_whole(tmp_path):
    large = torch.arange(50 << 20, dtype=torch.int32).view(50 << 10, 1 << 10)
    save_checkpoint(tmp_path / "a", {"w": large}, num_parts=1)
    tracemalloc.start()
    torch_dist.export(tmp_path / "a", tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * large.nbytes
    state = {"w": torch.empty_like(large)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "b")
    assert torch.equal(state["w"], large)


def test_each_file_is_opened_once(tmp_path):
    save_checkpoint(tmp_path / "a", {f"w{i}": torch.arange(6) + i for i in range(9)})
    with recorded(tmp_path / "a/tensors") as calls:
        torch_dist.export(tmp_path / "a", tmp_path / "b")
    assert [call.name for call in calls].count("open") == 1
