"""Merging checkpoints: sums by an oracle that rounds once, other formats and layouts, and what is
refused.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import (
    CheckpointExistsError,
    CorruptCheckpointError,
    LoadMismatchError,
    ShardedTensor,
    cli,
)
from distckpt.megatron.core import CheckpointingException
from distckpt.rules import Split, Transpose
from tests.support.cli_command import call, call_json
from tests.support.disk import flip
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.hooked_store import hooked_reads
from tests.support.quantized_models import fp8_block
from tests.support.states import save_checkpoint

CODES = getattr(torch, "float8_e8m0fnu", torch.float8_e5m2fnuz)  # torch 2.7
PRECISION = {
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}


def rounded(values, dtype):
    """Round float64 values to a narrower dtype, once, to the nearest even."""
    if dtype == torch.float64:
        return torch.from_numpy(values)
    info = torch.finfo(dtype)
    exponents = np.frexp(np.where(np.isfinite(values), values, 0))[1]
    units = np.ldexp(1.0, np.maximum(exponents, math.frexp(info.tiny)[1]) - PRECISION[dtype])
    nearest = np.rint(values / units) * units
    exact = torch.from_numpy(
        np.where(np.abs(nearest) > info.max, np.copysign(np.inf, nearest), nearest)
    ).float()
    return exact.to(dtype)


def expected(tensors, weights, dtype=None):
    total = sum(
        tensor.double().numpy() * weight for tensor, weight in zip(tensors, weights, strict=True)
    )
    return rounded(np.asarray(total), dtype or tensors[0].dtype)


def averaged(tensors, _):
    """Round the moving average with 0.9, in the words of its documentation."""
    average = tensors[0].double().numpy()
    for tensor in tensors[1:]:
        average = 0.9 * average + (1 - 0.9) * tensor.double().numpy()
    return rounded(np.asarray(average), tensors[0].dtype)


def model(seed):
    """Make tensors of every floating point dtype with values of all magnitudes, and some others."""
    draw = torch.Generator().manual_seed(seed)

    def values(*shape, scale=1.0):
        return torch.randn(shape, generator=draw).double() * scale

    return {
        "m.float32": values(300, 7).float(),
        "m.bfloat16": values(70, 300).bfloat16(),
        "m.tiny": values(50, 30, scale=1e-39).bfloat16(),
        "m.float16": values(50, 400, scale=1e-5).half(),
        "m.e4m3": values(64, 2).to(torch.float8_e4m3fn),
        "m.e5m2": values(64, 2).to(torch.float8_e5m2),
        "m.scalar": values().float(),
        "m.empty": torch.empty(4, 0),
        "m.ids": torch.arange(9),
        "m.mask": torch.arange(8) % 3 == 0,
    }


@pytest.fixture
def three(tmp_path):
    """Three checkpoints of other formats and layouts."""
    models = [model(seed) for seed in range(3)]
    save_checkpoint(tmp_path / "a", models[0], axis=1)
    write_plain(tmp_path / "b" / "model.safetensors", models[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(models[2], checkpoint_id=tmp_path / "c")
    return [tmp_path / name for name in "abc"], models


@pytest.mark.parametrize("options", [{}, {"weights": (0.5, -2, 3.25)}, {"ema": 0.9}], ids=str)
def test_sums_of_all_formats_are_rounded_once(three, tmp_path, options):
    paths, models = three
    report = distckpt.merge(paths, tmp_path / "out", **options)
    weights = options.get("weights", (1 / 3,) * 3)
    combined = averaged if "ema" in options else expected
    sums = {
        key: combined([each[key] for each in models], weights)
        if tensor.is_floating_point()
        else tensor
        for key, tensor in models[0].items()
    }
    assert same_bytes(read_export(tmp_path / "out"), sums)
    assert (report.num_tensors, report.overflows) == (len(sums), {})


def test_a_moving_average_from_the_oldest_to_the_newest(tmp_path, capsys):
    tensors = torch.randn(6, 40, dtype=torch.float64)
    paths = [
        write_plain(tmp_path / f"{i}" / "model.safetensors", {"w": tensor}).parent
        for i, tensor in enumerate(tensors)
    ]
    average = tensors[0]
    for tensor in tensors[1:]:
        average = 0.75 * average + 0.25 * tensor
    report = call_json(capsys, "merge", *paths, tmp_path / "out", "--ema", "0.75")
    assert report["num_tensors"] == 1
    assert torch.equal(read_export(tmp_path / "out")["w"], average)
    call_json(
        capsys,
        "merge",
        *paths[:2],
        tmp_path / "sum",
        "--weights",
        "1",
        "-1",
        "--keys",
        "w",
        "--dtype",
        "fp32",
    )
    assert torch.equal(read_export(tmp_path / "sum")["w"], (tensors[0] - tensors[1]).float())


def test_conversions_come_after_the_sum(three, tmp_path):
    """In bfloat16 a tie between two float32 numbers would be lost before it is rounded."""
    paths, models = three
    distckpt.merge(paths, tmp_path / "out", keys=["m.b", "m.float"], dtype=torch.float32)
    found = read_export(tmp_path / "out")
    for key in ("m.bfloat16", "m.float16", "m.float32"):
        assert torch.equal(
            found[key], expected([each[key] for each in models], (1 / 3,) * 3, torch.float32)
        )
    distckpt.merge(paths, tmp_path / "narrow", keys="m.float32", dtype=torch.bfloat16)
    narrow = expected([each["m.float32"] for each in models], (1 / 3,) * 3, torch.bfloat16)
    assert torch.equal(read_export(tmp_path / "narrow")["m.float32"], narrow)


def test_no_sum_is_rounded_twice(tmp_path):
    """By way of float32, the sums would become ties, and the ties even."""
    for dtype in (torch.bfloat16, torch.float16):
        tie = 1 + torch.finfo(dtype).eps * (torch.arange(8) + 0.5).double()
        tensors = [tie.float(), torch.full((8,), 2.0**-40), torch.full((8,), -(2.0**-40))]
        paths = [tmp_path / f"{dtype}.{i}" for i in range(3)]
        for path, tensor in zip(paths, tensors, strict=True):
            write_plain(path / "model.safetensors", {"w": tensor})
        for number, nearest in ((1, tie + 2.0**-20), (2, tie - 2.0**-20)):
            out = tmp_path / f"out {dtype} {number}"
            distckpt.merge([paths[0], paths[number]], out, weights=(1, 1), dtype=dtype)
            assert torch.equal(read_export(out)["w"], nearest.float().to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str
)
def test_every_number_and_every_middle_between_two(tmp_path, dtype):
    """And the float64 numbers next to these, subnormal ones and those beyond the largest
    included.
    """
    codes = torch.arange(1 << 8 * dtype.itemsize).to(
        torch.uint16 if dtype.itemsize == 2 else torch.uint8
    )
    numbers = codes.view(dtype).double()
    finite = numbers[numbers.isfinite()].unique()
    ends = finite[-1] * torch.tensor(
        [1 + torch.finfo(dtype).eps / 4, 1 + torch.finfo(dtype).eps, 2], dtype=torch.float64
    )
    exact = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, ends, -ends]).numpy()
    values = torch.from_numpy(
        np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])
    )
    for name, tensor in (("a", values), ("b", torch.zeros_like(values))):
        write_plain(tmp_path / name / "model.safetensors", {"w": tensor})
    paths = [tmp_path / "a", tmp_path / "b"]
    distckpt.merge(paths, tmp_path / "out", weights=(1, 1), dtype={"w": dtype})
    assert same_bytes(
        read_export(tmp_path / "out"),
        {"w": expected([values, torch.zeros_like(values)], (1, 1), dtype)},
    )


def test_sums_of_any_size_and_of_many_tensors(tmp_path):
    """More than is read, and summed, at a time; tensors that lie in another order in the export;
    and small ones.
    """
    draw = torch.Generator().manual_seed(0)
    models = [{} for _ in range(3)]
    for tensors in models:
        values = torch.randn(1300, 1200, generator=draw) * 10.0 ** torch.randint(
            -40, 30, (1200,), generator=draw
        )
        tensors["large"] = values
        tensors["turned"] = values[:300, :400].bfloat16()
        tensors["half"] = torch.randn(70, 1001, generator=draw).half()
        for index in range(60):
            dtype = (torch.bfloat16, torch.float32, torch.float64)[index % 3]
            tensors[f"small.{index:02}"] = torch.randn(index % 7, index % 4 + 1, generator=draw).to(
                dtype
            )
        tensors["n"] = torch.tensor(7)
    # Ties and what lies next to them, sums that cancel, and the ends of the range.
    for tensors, value in zip(models, (1.0, 2.0**-8, 2.0**-133), strict=True):
        tensors["large"][0, :8] = value * torch.tensor([1, -1, 1, -1, 2, 3, 0, 5])
        tensors["large"][1, :3] = torch.tensor(
            [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny, 0.0]
        )
    for name, tensors in zip("abc", models, strict=True):
        write_plain(tmp_path / name / "model.safetensors", tensors)
    paths = [tmp_path / name for name in "abc"]
    dtypes = {"small.05": torch.float16, "large": torch.bfloat16}
    for weights in ((1 / 3,) * 3, (1, 1, 2.0**-10)):
        options = {"rules": [Transpose("turned", "turned")], "unmatched": "keep", "dtype": dtypes}
        distckpt.merge(paths, tmp_path / "out", weights=weights, overwrite=True, **options)
        terms = {key: [each[key] for each in models] for key in models[0] if key != "n"}
        sums = {key: expected(each, weights, dtypes.get(key)) for key, each in terms.items()}
        sums["turned"] = sums["turned"].T.contiguous()
        assert same_bytes(read_export(tmp_path / "out"), sums | {"n": torch.tensor(7)})


def test_complex_numbers_are_summed_part_by_part(tmp_path):
    big, nan = torch.finfo(torch.float32).max, math.nan
    a = torch.tensor(
        [1 + 2j, complex(big, 1), complex(big, -big), complex(math.inf, 1), complex(nan, 0)]
    )
    b = torch.tensor([3 - 1j, complex(big, 0), complex(big, -big), complex(1, 1), complex(0, 0)])
    paths = [
        write_plain(tmp_path / name / "model.safetensors", {"w": w}).parent
        for name, w in (("a", a), ("b", b))
    ]
    report = distckpt.merge(paths, tmp_path / "out", weights=(1, 0.5))
    sums = expected([torch.view_as_real(each) for each in (a, b)], (1, 0.5))
    found = torch.view_as_real(read_export(tmp_path / "out")["w"])
    assert torch.equal(found.nan_to_num(0.5), sums.nan_to_num(0.5))
    assert torch.equal(found.isnan(), sums.isnan())
    assert report.overflows == {"w": 2}
    double = write_plain(
        tmp_path / "c" / "model.safetensors", {"w": torch.ones(5, dtype=torch.float64)}
    ).parent
    with pytest.raises(CheckpointingException, match=r"'w' has dtypes .* no sum"):
        distckpt.merge([*paths, double], tmp_path / "mixed")


def test_what_is_not_a_number_stays_so_and_overflows_are_counted(tmp_path):
    big = torch.finfo(torch.float16).max
    a = torch.tensor([math.nan, math.inf, math.inf, 1.0, big, big, -big, 0.0]).half()
    b = torch.tensor([1.0, 1.0, -math.inf, math.nan, big, 1.0, -big, -0.0]).half()
    for name, tensor in zip("ab", (a, b), strict=True):
        write_plain(tmp_path / name / "model.safetensors", {"w": tensor})
    report = distckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", weights=(1, 1))
    found = read_export(tmp_path / "out")["w"]
    assert torch.equal(found.isnan(), (a + b).isnan())
    assert torch.equal(found[~found.isnan()], (a + b)[~found.isnan()])
    assert report.overflows == {"w": 2}


def test_sums_that_overflow_float64_are_counted(tmp_path):
    big = torch.tensor([1.7e308, 1.7e308, math.inf, math.nan, 1.0], dtype=torch.float64)
    paths = [
        write_plain(tmp_path / name / "model.safetensors", {"w": big}).parent for name in "abc"
    ]
    assert distckpt.merge(paths, tmp_path / "out", weights=(1, 1, 1e300)).overflows == {"w": 2}
    assert distckpt.merge(paths, tmp_path / "mean").overflows == {}
    report = distckpt.merge(paths, tmp_path / "short", weights=(1, 1, -2), dtype=torch.float16)
    assert report.overflows == {"w": 2}, "inf - inf"
    assert read_export(tmp_path / "short")["w"].isnan().tolist() == [True] * 4 + [False]


def test_the_config_has_the_dtype_of_the_sum(tmp_path):
    paths = [
        write_plain(tmp_path / name / "model.safetensors", {"w": torch.ones(4)}).parent
        for name in "ab"
    ]
    mixed = write_plain(
        tmp_path / "c" / "model.safetensors", {"w": torch.ones(4).bfloat16(), "n": torch.ones(2)}
    ).parent
    (paths[0] / "config.json").write_text(
        '{"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}'
    )
    distckpt.merge(paths, tmp_path / "out", extra_files_from=paths[0])
    distckpt.consolidate(mixed, tmp_path / "kept", extra_files_from=paths[0])
    for name, dtype in (("out", "float32"), ("kept", "bfloat16")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config == {"torch_dtype": dtype, "text_config": {"dtype": dtype}}


def test_different_dtypes_get_one_that_holds_all(tmp_path):
    draw = torch.randn(3, 50)
    kinds = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float8_e5m2}
    tensors = [draw[i].to(dtype) for i, dtype in enumerate(kinds.values())]
    for name, tensor in zip(kinds, tensors, strict=True):
        write_plain(tmp_path / name / "model.safetensors", {"w": tensor})
    distckpt.merge([tmp_path / name for name in "abc"], tmp_path / "abc")
    assert torch.equal(
        read_export(tmp_path / "abc")["w"], expected(tensors, (1 / 3,) * 3, torch.float32)
    )
    write_plain(
        tmp_path / "d" / "model.safetensors", {"w": (other := draw[0].to(torch.float8_e4m3fn))}
    )
    distckpt.merge([tmp_path / name for name in "cd"], tmp_path / "cd")
    eighths = expected([tensors[2], other], (0.5, 0.5), torch.float16)
    assert same_bytes(read_export(tmp_path / "cd"), {"w": eighths})
    distckpt.merge([tmp_path / name for name in "ca"], tmp_path / "ca")
    assert torch.equal(
        read_export(tmp_path / "ca")["w"],
        expected([tensors[2], tensors[0]], (0.5, 0.5), torch.bfloat16),
    )


def test_what_is_no_number_is_compared_and_may_be_converted(tmp_path):
    tensors = {"small": torch.arange(-3, 9).to(torch.int8), "large": torch.tensor([2**40, -7])}
    tensors["packed"] = torch.randint(0, 256, (4, 2), dtype=torch.uint8).view(CODES)
    paths = [save_checkpoint(tmp_path / name, tensors) for name in "ab"]
    distckpt.merge(paths, tmp_path / "out", dtype={"small": torch.float32, "large": torch.float64})
    wide = {"small": tensors["small"].float(), "large": tensors["large"].double()}
    assert same_bytes(read_export(tmp_path / "out"), tensors | wide)


def test_rules_and_formats_apply_to_the_sum(tmp_path):
    tensors = [torch.randn(64, 32).bfloat16() for _ in range(2)]
    for name, tensor in zip("ab", tensors, strict=True):
        save_checkpoint(tmp_path / name, {"fc1.weight": tensor}, axis=1)
    paths, rules = (
        [tmp_path / "a", tmp_path / "b"],
        [Split("fc1.weight", ("gate.weight", "up.weight"))],
    )
    distckpt.merge(paths, tmp_path / "out", rules=rules, rename={"up": "mlp.up"})
    total = expected(tensors, (0.5, 0.5))
    assert same_bytes(
        read_export(tmp_path / "out"), {"gate.weight": total[:32], "mlp.up.weight": total[32:]}
    )
    distckpt.merge(paths, tmp_path / "float32", rules=rules, dtype=torch.float32)
    distckpt.merge(paths, tmp_path / "codes", rules=rules, quantize="int8-channel")
    distckpt.consolidate(tmp_path / "float32", tmp_path / "from float32", quantize="int8-channel")
    codes, others = read_export(tmp_path / "codes"), read_export(tmp_path / "from float32")
    assert torch.equal(codes["up.weight"], others["up.weight"])
    assert codes["up.weight"].dtype == torch.int8


def test_quantised_tensors_become_values_first(tmp_path):
    quantized = fp8_block()
    other = {key: torch.randn_like(tensor) for key, tensor in quantized.values.items()}
    paths = [
        quantized.write(tmp_path / "a"),
        write_plain(tmp_path / "b" / "model.safetensors", other).parent,
    ]
    distckpt.merge(paths, tmp_path / "out", weights=(1, 1))
    found = read_export(tmp_path / "out")
    assert found.keys() == other.keys()
    for key, values in quantized.values.items():
        # Those of codes are not rounded to the dtype of the model first.
        assert torch.equal(found[key], expected([values, other[key]], (1, 1), torch.float32))
    unknown = {"l.qweight": torch.ones(4, 8, dtype=torch.int32), "l.scales": torch.ones(1, 8)}
    path = write_plain(tmp_path / "c" / "model.safetensors", unknown).parent
    with pytest.raises(LoadMismatchError, match="scales"):
        distckpt.merge([path, path], tmp_path / "none")


def test_tied_names_and_names_that_are_left_out_since_they_are_tied(tmp_path):
    embed, head = torch.randn(6, 4), torch.randn(6, 4)
    distckpt.save(
        {name: ShardedTensor.from_rank_offsets(name, embed) for name in ("embed", "head")},
        tmp_path / "tied",
    )
    write_plain(tmp_path / "hf" / "model.safetensors", {"embed": head})
    write_plain(tmp_path / "untied" / "model.safetensors", {"embed": embed, "head": head})
    mean = expected([embed, head], (0.5, 0.5))
    tied, hf, untied = (tmp_path / name for name in ("tied", "hf", "untied"))
    distckpt.merge([tied, hf], tmp_path / "1")
    assert same_bytes(read_export(tmp_path / "1"), {"embed": mean})
    distckpt.merge([tied, tied], tmp_path / "2", tied="write")
    assert same_bytes(read_export(tmp_path / "2"), {"embed": embed, "head": embed})
    # Tied in one of them only: two tensors.
    distckpt.merge([tied, untied], tmp_path / "3")
    assert same_bytes(read_export(tmp_path / "3"), {"embed": embed, "head": mean})
    with pytest.raises(LoadMismatchError, match=r"'head' of .*untied.* cannot be found in .*hf"):
        distckpt.merge([hf, untied], tmp_path / "4")
    with pytest.raises(LoadMismatchError, match="head"):
        distckpt.merge([tied, hf], tmp_path / "4", tied="write")


def change(tensors, path, **changed):
    kept = {key: tensor for key, tensor in {**tensors, **changed}.items() if tensor is not None}
    return write_plain(path / "model.safetensors", kept).parent


def test_what_does_not_agree_is_named(tmp_path):
    tensors = {"w": torch.ones(4, 2), "n": torch.tensor(3), "mask": torch.ones(3, dtype=torch.bool)}
    same = change(tensors, tmp_path / "same")
    cases = {
        "missing": (
            {"n": None},
            LoadMismatchError,
            r"'n' of '.*same' cannot be found in '.*missing'",
        ),
        "more": (
            {"v": torch.ones(2)},
            LoadMismatchError,
            r"'v' of '.*more' cannot be found in '.*same'",
        ),
        "shape": (
            {"w": torch.ones(2, 4)},
            LoadMismatchError,
            r"'w' has different shapes: .*\(2, 4\)",
        ),
        "kind": (
            {"w": torch.ones(4, 2, dtype=torch.int32)},
            CheckpointingException,
            r"'w' has dtypes .* no sum",
        ),
        "bools": (
            {"w": torch.ones(4, 2, dtype=torch.bool)},
            CheckpointingException,
            r"'w' has dtypes .* no sum",
        ),
        "counter": (
            {"n": torch.tensor(3).int()},
            CheckpointingException,
            r"'n' has dtypes .* no sum",
        ),
        "number": (
            {"n": torch.tensor(4)},
            CheckpointingException,
            r"'n' is I64.*number.* differ .*same",
        ),
        "mask": (
            {"mask": torch.zeros(3, dtype=torch.bool)},
            CheckpointingException,
            r"'mask' is BOOL",
        ),
    }
    for name, (changed, error, message) in cases.items():
        other = change(tensors, tmp_path / name, **changed)
        with pytest.raises(error, match=message):
            distckpt.merge([same, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    distckpt.merge([same, tmp_path / "missing"], tmp_path / "chosen", keys="!n")
    assert read_export(tmp_path / "chosen").keys() == {"w", "mask"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1,)}, "2 checkpoints, .* a finite weight for each"),
        ({"weights": (None, 1j)}, r"weights=\(None, 1j\).* a finite weight"),
        ({"weights": 2}, "weights=2.* a finite weight"),
        ({"weights": "12"}, "weights='12'.* give a finite weight for each"),
        ({"ema": "0.5"}, "ema='0.5'.* an ema from 0 to 1"),
        ({"weights": (1, math.nan)}, "a finite weight"),
        ({"weights": (1, math.inf)}, "a finite weight"),
        ({"ema": 1.5}, "an ema from 0 to 1"),
        ({"ema": math.nan}, "an ema from 0 to 1"),
        ({"ema": 0.9, "weights": (1, 1)}, "or an ema"),
    ],
    ids=str,
)
def test_weights_that_mean_nothing(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        distckpt.merge([tmp_path, tmp_path], tmp_path / "out", **options)
    with pytest.raises(ValueError, match="a finite weight"):
        distckpt.merge([tmp_path, tmp_path], tmp_path / "out", weights=(10**400, 1))
    for few in ([], [tmp_path]):
        with pytest.raises(ValueError, match=r"two checkpoints or more, got .*consolidate"):
            distckpt.merge(few, tmp_path / "out")
    with pytest.raises(TypeError, match="a list of checkpoints"):
        distckpt.merge(str(tmp_path), tmp_path / "out")


def test_the_same_checkpoint_twice_and_an_output_in_its_place(tmp_path):
    path = save_checkpoint(tmp_path / "a", {"w": torch.randn(4, 6)})
    other = save_checkpoint(tmp_path / "b", {"w": torch.randn(4, 6)})
    distckpt.merge([path, path, path], tmp_path / "out")
    assert torch.equal(read_export(tmp_path / "out")["w"], distckpt.open(path).read_tensors()["w"])
    for place in (
        other,
        other / "tensors",
        other / "out",
        tmp_path / "b" / ".." / "a" / "x" / "out",
    ):
        with pytest.raises(CheckpointingException, match="cannot replace its own source"):
            distckpt.merge([path, other], place, overwrite=True)


def test_an_output_that_was_forgotten(tmp_path, capsys):
    """Then the last checkpoint is in its place; an export is replaced only where an option names
    it.
    """
    paths = [str(save_checkpoint(tmp_path / name, {"w": torch.randn(4, 6)})) for name in "abc"]
    exports = [
        str(write_plain(tmp_path / f"hf_{i}" / "model.safetensors", {"w": torch.ones(4, 6)}).parent)
        for i in "12"
    ]
    torch_dist, deepspeed = tmp_path / "dcp", tmp_path / "zero2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(4)}, checkpoint_id=torch_dist)
    with zipfile.ZipFile(Path(__file__).parents[2] / "data" / "deepspeed_0_19.zip") as archive:
        archive.extractall(
            tmp_path, [name for name in archive.namelist() if name.startswith("zero2/")]
        )
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for arguments in (paths, [*paths, *exports]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["merge", *arguments, "--overwrite"])
        assert (
            f"--output must name the output directory: '{arguments[-1]}' could be"
            in capsys.readouterr().err
        )
    assert cli.main(["merge", *paths, *exports]) == 1
    assert "already holds an export" in capsys.readouterr().err
    for place in (paths[2], torch_dist, deepspeed):
        assert cli.main(["merge", *paths[:2], "-o", str(place), "--overwrite"]) == 1
        assert f"{place}' is a checkpoint: choose" in capsys.readouterr().err
        with pytest.raises(CheckpointExistsError, match="is a checkpoint"):
            distckpt.merge(paths[:2], place)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    assert cli.main(["merge", *paths, "--output", exports[1], "--overwrite"]) == 0
    mean = expected([distckpt.open(path).read_tensors()["w"] for path in paths], (1 / 3,) * 3)
    assert torch.equal(read_export(exports[1])["w"], mean)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "two checkpoints or more, and an output"),
        (["a", "-o", "out"], "two checkpoints or more, and an output"),
        (["a", "b", "out", "--weights", "1"], "--weights has 1 numbers for 2 checkpoints"),
        (
            ["a", "b", "-o", "out", "--weights", "1", "2", "3"],
            "--weights has 3 numbers for 2 checkpoints",
        ),
        (
            ["--weights", "1", "2", "a", "b", "out"],
            "'a' is not a finite number; --weights comes behind all paths",
        ),
        (["a", "b", "out", "--ema", "2"], "'2' is not a number from 0 to 1"),
        (["a", "b", "out", "--ema", "nan"], "'nan' is not a number from 0 to 1"),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["merge", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("how", [["--ema", "0.5"], ["--weights", "1", "-1"], []], ids=str)
def test_a_dry_run_says_what_would_be_written(tmp_path, capsys, how):
    paths = [
        write_plain(tmp_path / name / "model.safetensors", {"w": torch.rand(3), "n": torch.ones(1)})
        for name in "ab"
    ]
    paths = [path.parent for path in paths]
    options = ["--keys", "w", "--dtype", "bf16", "--dry-run", *how]
    report = call_json(capsys, "merge", *paths, "-o", tmp_path / "out", *options)
    (tensor,) = report["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("w", "BF16", [3])
    assert "nothing was written" in call(capsys, "merge", *paths, tmp_path / "out", "--dry-run")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_the_settings_of_consolidate_are_those_of_merge():
    """With the same types and defaults."""
    of_merge, others = (
        inspect.signature(function).parameters
        for function in (distckpt.merge, distckpt.consolidate)
    )
    own = [
        of_merge[name]
        for name in of_merge
        if name not in ("checkpoints", "output_dir", "weights", "ema")
    ]
    assert own == [others[name] for name in others if name not in ("checkpoint", "output_dir")]


def test_load_reads_the_average(tmp_path):
    tensors = [torch.randn(8, 6) for _ in range(2)]
    paths = [
        save_checkpoint(tmp_path / f"step_{i}", {"model.w": tensor})
        for i, tensor in enumerate(tensors)
    ]
    distckpt.merge(paths, tmp_path / "average")
    half = torch.empty(8, 3)
    distckpt.load(
        {"w": ShardedTensor.from_rank_offsets("model.w", half, (1, 1, 2))}, tmp_path / "average"
    )
    assert torch.equal(half, expected(tensors, (0.5, 0.5))[:, 3:])
    distckpt.reshard(tmp_path / "average", tmp_path / "checkpoint")
    assert distckpt.verify(tmp_path / "checkpoint").is_whole


def test_damage_in_any_of_them(tmp_path):
    paths = [save_checkpoint(tmp_path / name, {"w": torch.randn(400, 600)}) for name in "ab"]
    (file,) = (paths[1] / "tensors").iterdir()
    flip(file, -1000)
    with pytest.raises(CorruptCheckpointError, match=r"b/tensors.*'w'"):
        distckpt.merge(paths, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_one_that_is_overwritten_meanwhile(tmp_path):
    paths = [
        write_plain(tmp_path / name / "model.safetensors", {"w": torch.ones(4)}).parent
        for name in "ab"
    ]
    changed = []

    def overwrite(path, start, stop):
        if start and not changed:
            changed.append(
                write_plain(
                    tmp_path / "b" / "model.safetensors", {"w": torch.ones(4), "new": torch.ones(4)}
                )
            )

    with (
        hooked_reads(overwrite),
        pytest.raises(CheckpointingException, match=r"overwritten|replaced"),
    ):
        distckpt.merge([paths[0], f"hooked://{paths[1]}"], tmp_path / "out")
    assert changed
    assert not (tmp_path / "out").exists()
