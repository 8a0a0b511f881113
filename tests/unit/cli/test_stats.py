"""`distckpt stats`: statistics of values, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.cli_command import call, call_error, call_json
from tests.support.large_states import look_in_windows

GENERATOR = torch.Generator().manual_seed(5)
VALUES = {
    "wide": torch.randn(300, 40, generator=GENERATOR),
    "half": torch.randn(50, 8, generator=GENERATOR).bfloat16(),
    "fp8": torch.randn(16, 8, generator=GENERATOR).to(torch.float8_e4m3fn),
    "codes": torch.arange(256).to(torch.uint8).view(torch.float8_e5m2),
    "int8": torch.arange(-128, 128).to(torch.int8),
    "constant": torch.full((1 << 16,), 0.1),
    "tiny": torch.full((6,), 1e-25),
    "huge": torch.full((6,), 1e25),
    "large": torch.tensor([1e300, -1e300, 0.0, 5e299], dtype=torch.float64),
    "extreme": torch.tensor([-1.2e308, 1.2e308], dtype=torch.float64),
    "small": torch.tensor([1e-300, 3e-300], dtype=torch.float64),
    "count": torch.arange(-3, 2**40, 2**37),
    "mask": torch.tensor([True, False, False]),
    "complex": torch.tensor([3 + 4j, 0j]),
    "special": torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -2.0]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    VALUES["scales"] = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu)


@pytest.fixture
def checkpoint(tmp_path):
    distckpt.save(
        {**{key: ShardedTensor.from_rank_offsets(key, v) for key, v in VALUES.items()}, "s": 1},
        tmp_path / "c",
    )
    return tmp_path / "c"


@pytest.mark.parametrize(("window", "block"), [(1 << 22, 1 << 18), (1024, 1024), (4096, 100)])
def test_statistics_are_those_of_numpy(checkpoint, capsys, monkeypatch, window, block):
    look_in_windows(monkeypatch, window, block)
    found = {
        item["key"]: item for item in call_json(capsys, "stats", checkpoint, code=1)["tensors"]
    }
    assert list(found) == sorted(VALUES)
    for key, value in VALUES.items():
        flat = torch.view_as_real(value) if value.is_complex() else value
        numbers = (flat.float() if flat.itemsize == 1 else flat).double().numpy().ravel()
        finite, item = numbers[np.isfinite(numbers)], found[key]
        assert (item["num_elements"], item["shape"]) == (value.numel(), list(value.shape))
        assert item["num_nan"] == np.isnan(numbers).sum()
        assert item["num_infinite"] == np.isinf(numbers).sum()
        assert item["num_zero"] == (finite == 0).sum()
        assert item["norm"] == pytest.approx(math.hypot(*finite), rel=1e-6, abs=0)
        assert sum(item["histogram"]) == (
            len(finite) if len(finite) < 2000 else sum(item["histogram"])
        )
        if len(finite):
            assert (item["min"], item["max"]) == (finite.min(), finite.max())
            assert item["mean"] == pytest.approx(finite.mean(), rel=1e-6, abs=1e-7)
    assert 1000 <= sum(found["wide"]["histogram"]) <= 2000


def test_a_histogram_has_bins_of_equal_width(tmp_path, capsys):
    values = torch.cat([torch.zeros(7), torch.ones(2), torch.tensor([8.0])])
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    (found,) = call_json(capsys, "stats", tmp_path / "c")["tensors"]
    assert (
        found["histogram"]
        == np.histogram(values.numpy(), 8)[0].tolist()
        == [7, 2, 0, 0, 0, 0, 0, 1]
    )


def test_the_exit_code_tells_of_nan(checkpoint, capsys):
    text = call(capsys, "stats", checkpoint, code=1)
    with_nan = VALUES.keys() & {"special", "codes", "scales"}
    assert f"{len(VALUES)} tensors, {len(with_nan)} with NaN; " in text
    without = [word for key in with_nan for word in ("--keys", f"!{key}")]
    assert "15 tensors, 0 with NaN" in call(capsys, "stats", checkpoint, *without)
    assert "matches 'v'; there are 'codes'" in call_error(
        capsys, "stats", checkpoint, "--keys", "v", code=2
    )


def test_a_checkpoint_without_tensors(tmp_path, capsys):
    distckpt.save({"step": 1}, tmp_path / "c")
    assert "has no tensors, only common state" in call_error(
        capsys, "stats", tmp_path / "c", code=2
    )


def test_numbers_beyond_the_squares_of_float32(checkpoint, capsys):
    found = call_json(capsys, "stats", checkpoint, "--keys", "tiny", "--keys", "huge")
    norms = {item["key"]: item["norm"] for item in found["tensors"]}
    assert norms == pytest.approx({"tiny": math.sqrt(6) * 1e-25, "huge": math.sqrt(6) * 1e25})


def test_tied_tensors_have_statistics_under_each_name(tmp_path, capsys):
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(2, 3, bias=False), "head": torch.nn.Linear(2, 3, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    distckpt.save({"model": model}, tmp_path / "tied")
    for arguments in ((), ("--keys", "head.*")):
        found = call_json(capsys, "stats", tmp_path / "tied", *arguments)["tensors"]
        norms = {each["key"]: each["norm"] for each in found}
        assert norms["head.weight"] == pytest.approx(
            float(model["embed"].weight.detach().norm()), rel=1e-6
        )
    names = {each["key"] for each in call_json(capsys, "stats", tmp_path / "tied")["tensors"]}
    assert names == {"embed.weight", "head.weight"}


def test_layers_share_a_line(tmp_path, capsys):
    layers = {f"layers.{i}.w": torch.randn(4, 3, generator=GENERATOR) * (i + 1) for i in range(3)}
    layers["layers.3.w"] = torch.full((4, 3), float("nan"))
    state = {
        key: ShardedTensor.from_rank_offsets(key, value)
        for key, value in {**layers, "head": torch.ones(2)}.items()
    }
    distckpt.save(state, tmp_path / "c")
    _, _, head, line, summary, nan = call(capsys, "stats", tmp_path / "c", code=1).splitlines()
    values = torch.cat([layers[f"layers.{i}.w"] for i in range(3)]).double()
    numbers = (values.norm(), values.mean(), values.min(), values.max())
    shown = [f"{number.item():.3g}" for number in numbers]
    assert line.split() == ["layers.{0..3}.w", "4", *shown, "12"]
    assert head.split()[:2] == ["head", "1"]
    assert summary.startswith("5 tensors, 1 with NaN")
    assert nan == "NaN in 'layers.3.w'"
    assert "layers.1.w" in call(capsys, "stats", tmp_path / "c", "--tree", code=1)


def test_statistics_that_a_save_has_stored_are_shown_unless_they_are_computed_again(
    tmp_path, capsys
):
    state = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in VALUES.items()}
    distckpt.save(state, tmp_path / "c", stats=True)
    computed = call_json(capsys, "stats", tmp_path / "c", "--recompute", code=1)
    for file in (tmp_path / "c" / "tensors").iterdir():
        file.unlink()

    text = call(capsys, "stats", tmp_path / "c", code=1)
    assert "as stored by the save, nothing was read (--recompute reads the tensors)" in text
    assert f"{len(VALUES)} tensors, " in text
    assert "values" not in text.splitlines()[0]
    stored = call_json(capsys, "stats", tmp_path / "c", code=1)
    assert (stored.pop("from_save"), computed.pop("from_save")) == (True, False)
    for before, after in zip(computed["tensors"], stored["tensors"], strict=True):
        assert after.pop("histogram") == []
        del before["histogram"]
        assert after == before
    assert "missing" in call_error(capsys, "stats", tmp_path / "c", "--recompute", code=2)


def test_saved_statistics_of_some_tensors_and_of_tied_ones(tmp_path, capsys):
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(2, 3, bias=False), "head": torch.nn.Linear(2, 3, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    distckpt.save({"model": model, "step": 3}, tmp_path / "tied", stats=True)
    found = call_json(capsys, "stats", tmp_path / "tied", "--keys", "head.*")
    assert found["from_save"]
    (item,) = found["tensors"]
    assert item["norm"] == pytest.approx(float(model["head"].weight.detach().norm()), rel=1e-6)
    assert "matches 'v'" in call_error(capsys, "stats", tmp_path / "tied", "--keys", "v", code=2)
