"""`distckpt cat`: values of tensors and objects, printed, as JSON and as numpy files."""

from __future__ import annotations

import errno
import json
import os
import random
import resource

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from distckpt.cli import _cat as cat
from tests.support.cli_command import call, call_error, call_json, interrupt_at_first_progress
from tests.support.disks import limited

BIG = torch.randn(30, 11, 13, generator=torch.Generator().manual_seed(1))
SMALL = torch.arange(24, dtype=torch.int32).view(4, 6)


@pytest.fixture
def checkpoint(tmp_path):
    state = {
        f"big{i}": ShardedTensor.from_rank_offsets("big", part, (0, i, 3))
        for i, part in enumerate(BIG.chunk(3))
    }
    whole = {
        "small[0]": SMALL,
        "half": SMALL.bfloat16(),
        "fp8": SMALL.float().to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "flags": SMALL > 3,
        "special": torch.tensor([float("nan"), float("inf"), 1.5]),
    }
    state |= {key: ShardedTensor.from_rank_offsets(key, value) for key, value in whole.items()}
    state["rng"] = [
        ShardedObject("rng", {"seed": i, "state": torch.tensor([i])}, (2,), (i,)) for i in range(2)
    ]
    distckpt.save(
        {**state, "step": 7, "args": {"lr": 0.5, 3: (1, None), "dtype": torch.float16}},
        tmp_path / "c",
    )
    return tmp_path / "c"


SLICES = [
    ("big", np.s_[:]),
    ("big[3]", np.s_[3]),
    ("big[-1, 2:5]", np.s_[-1, 2:5]),
    ("big[8:12, :, 3]", np.s_[8:12, :, 3]),
    ("big[..., 12]", np.s_[..., 12]),
    ("big[:, -4:, 0:200]", np.s_[:, -4:, 0:200]),
    ("big[5:5]", np.s_[5:5]),
    ("big[29, 10, 12]", np.s_[29, 10, 12]),
]


@pytest.mark.parametrize(("text", "index"), SLICES, ids=[text for text, _ in SLICES])
def test_slices_are_those_of_numpy(checkpoint, tmp_path, capsys, monkeypatch, text, index):
    monkeypatch.setattr(cat, "_WINDOW_ELEMENTS", 100)
    expected = BIG.numpy()[index]
    found = call_json(capsys, "cat", checkpoint, text)
    assert found["shape"] == list(expected.shape)
    assert np.array_equal(np.array(found["values"], np.float32).reshape(found["shape"]), expected)
    said = call(capsys, "cat", checkpoint, text, "--npy", tmp_path / "x.npy")
    saved = np.load(tmp_path / "x.npy")
    assert (saved.dtype, saved.shape) == (np.float32, expected.shape)
    assert np.array_equal(saved, expected)
    assert "numpy has no" not in said
    printed = call(capsys, "cat", checkpoint, text).partition("\n")[2].removesuffix("\n")
    assert printed == np.array2string(expected, separator=", ", max_line_width=120)


def test_what_is_asked_for_alone_is_read(checkpoint, tmp_path, capsys):
    """The file with the last third of the rows is gone, and the others can be printed."""
    distckpt.reshard(checkpoint, tmp_path / "r", num_ranks=3, grids={"big": (3, 1, 1)})
    last = BIG[20:].numpy().tobytes()
    (holder,) = [
        file for file in (tmp_path / "r" / "tensors").iterdir() if last in file.read_bytes()
    ]
    holder.unlink()
    assert np.array_equal(
        call_json(capsys, "cat", tmp_path / "r", "big[0:20, 1]")["values"], BIG[:20, 1].numpy()
    )
    assert "is missing" in call_error(capsys, "cat", tmp_path / "r", "big[19:21]")


def test_dtypes_that_numpy_lacks(checkpoint, tmp_path, capsys):
    for key in ("half", "fp8"):
        expected = (
            SMALL.to(torch.bfloat16 if key == "half" else torch.float8_e4m3fn).float().numpy()
        )
        assert np.array_equal(call_json(capsys, "cat", checkpoint, key)["values"], expected)
        said = call(capsys, "cat", checkpoint, key, "--npy", tmp_path / "x.npy")
        assert "as float32, since numpy has no" in said
        assert (
            call_json(capsys, "cat", checkpoint, key, "--npy", tmp_path / "x.npy")["saved_as"]
            == "float32"
        )
        assert np.load(tmp_path / "x.npy").tolist() == expected.tolist()
    assert call_json(capsys, "cat", checkpoint, "flags[0]")["values"] == [False] * 4 + [True] * 2
    assert call_json(capsys, "cat", checkpoint, "special")["values"] == ["NaN", "Infinity", 1.5]
    assert call(capsys, "cat", checkpoint, "scalar") == "scalar: () F32\n2.5\n"


def test_keys_with_brackets(checkpoint, capsys):
    assert call_json(capsys, "cat", checkpoint, "small[0]")["values"] == SMALL.tolist()
    assert (
        call_json(capsys, "cat", checkpoint, "small[0][1, 2:4]")["values"] == SMALL[1, 2:4].tolist()
    )


def test_objects_and_common_state(checkpoint, capsys):
    common = json.loads(call(capsys, "cat", checkpoint))
    assert common == {"step": 7, "args": {"lr": 0.5, "3": [1, None], "dtype": "torch.float16"}}
    text = call(capsys, "cat", checkpoint, "rng")
    assert text.startswith("rng[0]:\n{")
    assert "rng[1]:\n{" in text
    found = call_json(capsys, "cat", checkpoint, "rng")
    state = {"dtype": "int64", "shape": [1], "values": [1]}
    assert found["parts"][1] == {"offset": [1], "value": {"seed": 1, "state": state}}


def test_states_of_generators_are_shortened_but_not_in_json(tmp_path, capsys):
    path = str(tmp_path / "c")
    distckpt.save({"rng": distckpt.RngState()}, path)
    python, torchs = random.getstate()[1], torch.get_rng_state()
    text = call(capsys, "cat", path, "rng")
    assert len(text.splitlines()) < 60
    assert str(python[0]) in text
    assert "null" in text  # what Python's generator says about its next Gaussian number
    (part,) = call_json(capsys, "cat", path, "rng")["parts"]
    shown = part["value"]["value"]
    assert shown["python"] == [3, list(python), None]
    assert shown["torch"]["values"] == torchs.tolist()
    shortened = json.loads(text[text.index("{") :])["value"]
    first, last = torchs[:3].tolist(), torchs[-3:].tolist()
    assert shortened["torch"]["values"] == [*first, "...", *last]
    assert shortened["python"][1] == [*python[:3], "...", *python[-3:]]


def test_a_long_integer_is_printed_in_hex(tmp_path, capsys):
    path = str(tmp_path / "c")
    distckpt.save({"long": 10**5000, "short": [10**1000], "keys": {10**5000: 1}}, path)
    found = json.loads(call(capsys, "cat", path))
    assert int(found["long"], 16) == 10**5000
    assert found["short"] == [10**1000]
    assert found["keys"] == {hex(10**5000): 1}


def test_what_makes_no_sense_is_refused(checkpoint, tmp_path, capsys):
    cases = {
        "big[40]": "out of range for axis 0 of size 30",
        "big[0, 0, 0, 0]": "more indices than the tensor has axes",
        "big[::2]": "steps are not supported",
        "big[x]": "neither an index nor start:stop",
        "bigg": "did you mean 'big'?",
        "model.big": "stored without 'model.'",
        "step": "a value of the common state of",
        "rng[0]": "is an object",
    }
    for text, message in cases.items():
        assert message in call_error(capsys, "cat", checkpoint, text)
    assert "numpy array" in call_error(
        capsys, "cat", checkpoint, "rng", "--npy", tmp_path / "x.npy"
    )
    distckpt.consolidate(checkpoint, tmp_path / "hf")
    assert "no common state" in call_error(capsys, "cat", tmp_path / "hf")


def test_an_interrupted_file_does_not_appear(checkpoint, tmp_path, capsys, monkeypatch):
    (tmp_path / "out").mkdir()
    restore = interrupt_at_first_progress(monkeypatch)
    try:
        call(capsys, "cat", checkpoint, "big", "--npy", tmp_path / "out" / "x.npy", code=130)
    finally:
        restore()
    assert os.listdir(tmp_path / "out") == []


def test_a_file_for_which_there_is_no_space_is_named(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with limited(resource.RLIMIT_FSIZE, 1000):
        text = call_error(capsys, "cat", checkpoint, "big", "--npy", tmp_path / "out" / "x.npy")
    assert os.strerror(errno.EFBIG) in text
    assert f"'{tmp_path}/out/x.npy'" in text
    assert os.listdir(tmp_path / "out") == []


def test_in_memory_of_an_object_store(capsys, tmp_path):
    distckpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", SMALL), "step": 1}, "memory://test_cli_cat/c"
    )
    assert (
        call_json(capsys, "cat", "memory://test_cli_cat/c", "w[2]")["values"] == SMALL[2].tolist()
    )
    assert json.loads(call(capsys, "cat", "memory://test_cli_cat/c")) == {"step": 1}
