"""`distckpt diff`: what differs between two checkpoints, whatever their layouts."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import numpy as np
import pytest
import safetensors.torch
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from tests.support.cli_command import (
    call,
    call_error,
    call_json,
    call_usage_error,
    interrupt_at_first_progress,
)
from tests.support.large_states import look_in_windows


def tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "model.up": torch.randn(40, 24, generator=generator),
        "model.half": torch.randn(7, 5, generator=generator).bfloat16(),
        "model.count": torch.arange(6).view(2, 3),
        "model.scalar": torch.tensor(2.5),
        "model.fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "model.empty": torch.empty(0, 3),
    }


def save(path, values, num_parts=1, **common):
    """Save tensors, those of several rows cut along their first axis."""
    state = dict(common)
    for key, value in values.items():
        parts = (
            value.chunk(num_parts)
            if num_parts > 1 and value.ndim and len(value) >= num_parts
            else [value]
        )
        position = 0
        for number, part in enumerate(parts):
            offset = (position,) + (0,) * (value.ndim - 1) if value.ndim else ()
            shard = ShardedTensor(
                key, part.clone(), value.dtype, tuple(part.shape), tuple(value.shape), offset, None
            )
            state[f"{key}/{number}"] = shard
            position += len(part) if value.ndim else 0
    distckpt.save(state, path)
    return path


def test_the_same_under_other_layouts(tmp_path, capsys):
    save(tmp_path / "a", tensors(), step=1)
    save(tmp_path / "b", tensors(), num_parts=3, step=1)
    assert call(capsys, "diff", tmp_path / "a", tmp_path / "b").startswith(
        "SAME: 6 tensors compared"
    )
    report = distckpt.diff(tmp_path / "a", tmp_path / "b")
    assert report.is_same
    assert report.objects_compared
    assert report.num_bytes == 2 * sum(value.nbytes for value in tensors().values())


@pytest.mark.parametrize("window", [1 << 22, 7, 50])
def test_values_that_differ_are_counted_and_placed(tmp_path, capsys, monkeypatch, window):
    look_in_windows(monkeypatch, window)
    changed = tensors()
    changed["model.up"][17, 5:9] += torch.tensor([0.5, -3.0, 0.25, 1.0])
    changed["model.up"][30, 2] = 9.0
    changed["model.count"][1, 0] = -4
    save(tmp_path / "a", tensors())
    save(tmp_path / "b", changed, num_parts=4)
    found = {
        item["key"]: item
        for item in call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["tensors"]
    }
    assert found.keys() == {"model.up", "model.count"}
    up = found["model.up"]
    distance = (tensors()["model.up"].double() - changed["model.up"].double()).abs()
    assert up["num_different"] == int((distance > 0).sum()) == 5
    assert up["max_difference"] == float(distance.max())
    assert (up["first_index"], up["region"]) == ([17, 5], "[17:31, 2:9]")
    assert (found["model.count"]["num_different"], found["model.count"]["max_difference"]) == (
        1,
        7.0,
    )
    assert found["model.count"]["region"] == "[1:2, 0:1]"
    text = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert re.search(r"^model\.up +5 of 960  1\.0e\+01  \S+  \[17:31, 2:9\]$", text, re.M)
    assert re.search(r"^model\.count +1 of 6 .*  \[1, 0\]$", text, re.M)
    assert "DIFFERENT: 6 tensors compared: 4 equal, 2 differ\n" in text
    old, new = tensors()["model.up"].double(), changed["model.up"].double()
    assert up["norms"] == pytest.approx([float(old.norm()), float(new.norm())])
    assert up["difference_norm"] == pytest.approx(float((old - new).norm()))
    assert up["relative_difference"] == pytest.approx(float((old - new).norm() / new.norm()))
    (tensor,) = distckpt.diff(tmp_path / "a", tmp_path / "b", keys="model.up").tensors
    assert tensor.relative_difference == up["relative_difference"]


def test_keys_shapes_and_dtypes(tmp_path, capsys):
    other = tensors()
    other["model.more"] = other.pop("model.half")
    other["model.up"] = other["model.up"][:30]
    other["model.scalar"] = other["model.scalar"].double()
    save(tmp_path / "a", tensors())
    save(tmp_path / "b", other)
    report = call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert (report["only_in_a"], report["only_in_b"]) == (["model.half"], ["model.more"])
    found = {item["key"]: item for item in report["tensors"]}
    assert found["model.up"]["shapes"] == [[40, 24], [30, 24]]
    assert found["model.up"]["num_elements"] == 0
    assert found["model.scalar"]["dtypes"] == ["F32", "F64"]
    assert found["model.scalar"]["num_different"] == 0
    text = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert re.search(r"^model\.up +shape 40x24 / 30x24$", text, re.M)
    assert re.search(r"^model\.scalar +dtype F32 / F64, values equal$", text, re.M)
    assert re.search(r"^model\.half +only in A$", text, re.M)
    assert "3 equal, 1 differs; 1 of another shape, 1 only in A, 1 only in B\n" in text


def test_special_numbers_and_tolerances(tmp_path, capsys):
    values = torch.tensor([float("nan"), float("inf"), 0.0, 1.0, float("inf"), 100.0])
    other = torch.tensor([float("nan"), float("inf"), -0.0, 1.01, 5.0, 100.5])
    save(tmp_path / "a", {"w": values})
    save(tmp_path / "b", {"w": other})

    def different(*options):
        report = call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", *options, code=1)
        return report["tensors"][0]["num_different"], report["tensors"][0]["max_difference"]

    assert different() == (3, "Infinity")
    assert different("--rtol", "0.006") == (2, "Infinity")
    assert different("--atol", "0.6") == (1, "Infinity")
    save(tmp_path / "c", {"w": torch.where(other == 5, torch.inf, other)})
    assert call_json(capsys, "diff", tmp_path / "a", tmp_path / "c", "--atol", "0.6")["is_same"]
    expected = ~np.isclose(values.numpy(), other.numpy(), rtol=0.006, atol=0, equal_nan=True)
    assert int(expected.sum()) == 2
    for key, value in {
        "d": torch.tensor(float("nan")),
        "e": torch.tensor(float("nan")),
        "f": torch.tensor(1.0),
    }.items():
        save(tmp_path / key, {"w": value})
    assert call_json(capsys, "diff", tmp_path / "d", tmp_path / "e")["is_same"]
    (found,) = call_json(capsys, "diff", tmp_path / "d", tmp_path / "f", code=1)["tensors"]
    assert (found["max_difference"], found["first_index"]) == ("Infinity", [])


@pytest.mark.parametrize("block", [1 << 18, 100])
def test_norms_of_every_dtype_are_those_of_numpy(tmp_path, monkeypatch, block):
    look_in_windows(monkeypatch, 250, block)
    dtypes = [
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.int32,
    ]
    old = {str(dtype): (torch.randn(600) * 50).to(dtype) for dtype in dtypes}
    old["huge"] = torch.full((600,), 1e200, dtype=torch.float64)
    new = {key: value.clone() for key, value in old.items()}
    for value in new.values():
        value[400:] = value[100:300].clone()
    new["huge"][7] = -1e200
    found = distckpt.diff(save(tmp_path / "a", old), save(tmp_path / "b", new, num_parts=3)).tensors
    assert {item.key for item in found} == old.keys()
    for item in found:
        a, b = (
            (v.float() if v.itemsize < 4 else v).numpy().astype(np.complex128)
            for v in (old[item.key], new[item.key])
        )
        assert item.num_different == np.count_nonzero(a != b)
        assert item.max_difference == pytest.approx(abs(a - b).max())
        scale = abs(a).max()
        norms = [scale * np.linalg.norm(v / scale) for v in (a, b, a - b)]
        assert [*item.norms, item.difference_norm] == pytest.approx(norms, rel=1e-6)


def test_large_integers_are_compared_exactly(tmp_path, capsys):
    save(tmp_path / "a", {"w": torch.tensor([2**60, 5])})
    save(tmp_path / "b", {"w": torch.tensor([2**60 + 1, 5])})
    (found,) = call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["tensors"]
    assert (found["num_different"], found["region"], found["max_difference"]) == (1, "[0:1]", 1.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int8])
@pytest.mark.parametrize(
    "tolerance", [(0, 0), (0.5, 0), (100, 0), (0, 1e-20), (1, 2**-53), (1e30, 0), (2.0**63, 0)]
)
def test_tolerances_of_integers_are_exact(tmp_path, dtype, tolerance):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if dtype == torch.int8:
        pairs = [(low, high), (high, low), (0, 100), (0, 101), (5, 5)]
    else:
        pairs = [
            (2**53, 2**53 + 1),
            (2**62, 2**62 + 500),
            (2**62 + 100, 2**62),
            (low, high),
            (high, low),
            (7, 7),
        ]
    for name, side in (("a", 0), ("b", 1)):
        save(tmp_path / name, {"n": torch.tensor([pair[side] for pair in pairs], dtype=dtype)})
    atol, rtol = map(Fraction, tolerance)
    distances = [abs(x - y) for x, y in pairs if abs(x - y) > atol + rtol * abs(y)]
    report = distckpt.diff(tmp_path / "a", tmp_path / "b", atol=tolerance[0], rtol=tolerance[1])
    found = [(item.num_different, item.max_difference) for item in report.tensors]
    assert found == ([(len(distances), float(max(distances)))] if distances else [])


def test_objects_and_common_state(tmp_path, capsys):
    def state(seed, args, parts=2):
        cells = [
            ShardedObject("rng", {"seed": seed, "kind": "x"}, (parts,), (i,)) for i in range(parts)
        ]
        return {"cells": cells, "args": args, "step": 3}

    distckpt.save(state(1, {"lr": 0.1, "gone": 1}), tmp_path / "a")
    distckpt.save(state(2, {"lr": 0.2, "new": [1]}), tmp_path / "b")
    found = call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["objects"]
    assert [(item["key"], item["offset"], item["path"], item["where"]) for item in found] == [
        ("distckpt.common_state", [0], "args.lr", "both"),
        ("distckpt.common_state", [0], "args.gone", "a"),
        ("distckpt.common_state", [0], "args.new[0]", "b"),
        ("rng", [0], "seed", "both"),
        ("rng", [1], "seed", "both"),
    ]
    text = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [item["values"] for item in found[:3]] == [["0.1", "0.2"], ["1", None], [None, "1"]]
    assert "common state: args.lr: 0.1 -> 0.2\n" in text
    assert "common state: args.gone: only in A (1)\n" in text
    assert "rng part [1]: seed: 1 -> 2\n" in text
    distckpt.save({"args": {"lr": 0.1, "gone": 1}, "step": 3}, tmp_path / "c")
    (only,) = call_json(capsys, "diff", tmp_path / "a", tmp_path / "c", code=1)["objects"]
    assert (only["key"], only["offset"], only["where"]) == ("rng", None, "a")
    assert call_json(capsys, "diff", tmp_path / "a", tmp_path / "a")["is_same"]


def test_with_a_hugging_face_directory(tmp_path, capsys):
    save(tmp_path / "a", tensors() | {"optimizer.m": torch.ones(3)}, num_parts=2, step=1)
    distckpt.consolidate(tmp_path / "a", tmp_path / "hf", keys="model.", rename={"model.": ""})
    both = [tmp_path / "a", tmp_path / "hf"]
    report = call_json(
        capsys, "diff", *both, "--rename", "model.=", "--rename", "optimizer.=opt.", code=1
    )
    assert (report["only_in_a"], report["only_in_b"], report["objects_compared"]) == (
        ["opt.m"],
        [],
        False,
    )
    keys = [part for key in tensors() for part in ("--keys", key)]
    assert "objects and common state were not compared" in call(
        capsys, "diff", *both, "--rename", "model.=", *keys
    )
    exported = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    exported["up"][39, 23] += 1
    safetensors.torch.save_file(exported, tmp_path / "hf" / "model.safetensors")
    (found,) = call_json(capsys, "diff", *both, "--rename", "model.=", *keys, code=1)["tensors"]
    assert (found["key"], found["num_different"], found["first_index"]) == ("up", 1, [39, 23])


def test_keys_select_before_renaming_as_in_exports(tmp_path):
    save(
        tmp_path / "a",
        {"model.up": torch.ones(2), "model.gone": torch.ones(2), "ema.up": torch.ones(2)},
    )
    save(tmp_path / "b", {"up": torch.ones(2), "more": torch.ones(2)})
    report = distckpt.diff(tmp_path / "a", tmp_path / "b", keys="model.", rename={"model.": ""})
    assert (report.num_compared, report.only_in_a, report.only_in_b) == (1, ("gone",), ("more",))
    report = distckpt.diff(tmp_path / "a", tmp_path / "b", keys="model.up", rename={"model.": ""})
    assert (report.num_compared, report.is_same) == (1, True)


def test_tensors_that_differ_alike_share_a_line(tmp_path, capsys):
    values = {f"layers.{i}.{name}": torch.ones(4, 2) for i in range(6) for name in ("up", "down")}
    save(tmp_path / "a", values)
    changed = {
        key: value * (1 + 0.001 * (key != "layers.3.up"))
        for key, value in values.items()
        if "up" in key
    }
    save(tmp_path / "b", {**values, **changed})
    text = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert re.search(r"^layers\.\{0..2,4,5\}\.up  40 of 40  1\.0e-03  1\.0e-03$", text, re.M)
    assert "12 tensors compared: 7 equal, 5 differ" in text


def test_the_largest_differences_come_first_and_a_nan_is_not_hidden(tmp_path, capsys):
    values = {
        f"layers.{i}.{name}": torch.ones(4) for i in range(3) for name in ("up", "down", "norm")
    }
    save(tmp_path / "a", values)
    factors = {
        "layers.1.up": 1.001,
        "layers.2.down": 2.0,
        "layers.0.norm": 1.5,
        "layers.1.norm": float("nan"),
    }
    save(
        tmp_path / "b",
        {
            key: value * factors.get(key, 1.0)
            for key, value in values.items()
            if key != "layers.0.up"
        },
    )
    lines = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["layers.{0..1}.norm", "8", "of", "8", "inf", "nan"],
        ["layers.2.down", "4", "of", "4", "1.0e+00", "5.0e-01"],
        ["layers.1.up", "4", "of", "4", "1.0e-03", "1.0e-03"],
        ["layers.0.up", "only", "in", "A"],
    ]


def test_errors_have_a_code_of_their_own(tmp_path, capsys):
    save(tmp_path / "a", {"w": torch.ones(3)})
    assert "CheckpointNotFoundError" in call_error(
        capsys, "diff", tmp_path / "a", tmp_path / "nothing", code=2
    )
    (shard,) = (tmp_path / "a" / "tensors").iterdir()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    save(tmp_path / "b", {"w": torch.ones(3)})
    shard.write_bytes(content)
    assert "Checksum mismatch" in call_error(capsys, "diff", tmp_path / "b", tmp_path / "a", code=2)
    assert "matches ['v']" in call_error(
        capsys, "diff", tmp_path / "b", tmp_path / "b", "--keys", "v", code=2
    )
    assert "is not a tolerance" in call_usage_error(capsys, "diff", "x", "y", "--atol", "-1")


def test_an_interrupt_is_no_answer(tmp_path, capsys, monkeypatch):
    save(tmp_path / "a", {"w": torch.ones(3)})
    restore = interrupt_at_first_progress(monkeypatch)
    try:
        assert call(capsys, "diff", tmp_path / "a", tmp_path / "a", code=130) == ""
    finally:
        restore()


def test_in_memory_of_an_object_store(capsys):
    root = "memory://test_cli_diff"
    save(f"{root}/a", tensors(), step=1)
    save(f"{root}/b", {**tensors(), "model.scalar": torch.tensor(1.0)}, num_parts=2, step=1)
    (found,) = call_json(capsys, "diff", f"{root}/a", f"{root}/b", code=1)["tensors"]
    assert (found["key"], found["first_index"], found["max_difference"]) == (
        "model.scalar",
        [],
        1.5,
    )
    assert json.loads(call(capsys, "diff", f"{root}/a", f"{root}/a", "--json"))["is_same"]


def test_the_model_comes_first_and_the_optimizer_is_one_line(tmp_path, capsys):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, factor)
        torch.nn.init.constant_(model.bias, 1.0)
        adam = torch.optim.AdamW(model.parameters(), lr=0.0)
        model(torch.full((1, 3), factor)).sum().backward()
        adam.step()
        distckpt.save({"net": model, "adam": adam}, tmp_path / name)
    lines = call(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    assert lines[2].startswith("net.weight")
    assert lines[4].startswith("optimizer: 2 differ, largest rel L2 ")
    assert not [line for line in lines if line.startswith("adam.state")]
    found = call_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [name for name in found["optimizer_keys"] if name.endswith("exp_avg.net.weight")]
    lines = call(capsys, "diff", tmp_path / "a", tmp_path / "b", "--keys", "*", code=1).splitlines()
    assert lines[2].startswith("net.weight")
    assert lines[3].startswith("adam.state")
    distckpt.consolidate(tmp_path / "a", tmp_path / "hf")
    text = call(capsys, "diff", tmp_path / "a", tmp_path / "hf", code=1)
    assert "optimizer: 4 only in A (--keys lists them)" in text
