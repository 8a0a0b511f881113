"""`distckpt reshard` and `distckpt import`: checkpoints rewritten, offline and in one process."""

from __future__ import annotations

import json
import os
import struct
import warnings

import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from benchmarks.measure import peak_memory_bytes
from distckpt import ShardedObject, ShardedTensor, rules
from distckpt.cli import main
from tests.support.cli_command import call, call_error, call_json, interrupt_at_first_progress
from tests.support.disk import flip
from tests.support.states import bits


def tensors():
    generator = torch.Generator().manual_seed(5)
    return {
        "model.up": torch.randn(120, 90, generator=generator),
        "model.down": torch.randn(64, 301, generator=generator).bfloat16(),
        "model.fp8": torch.randn(40, 8, generator=generator).to(torch.float8_e4m3fn),
        "model.scalar": torch.tensor(2.5),
        "model.empty": torch.empty(0, 3),
        "optimizer.count": torch.arange(7),
    }


@pytest.fixture
def checkpoint(tmp_path):
    """Tensors cut along their last axis, tied ones, an object in three parts, and common state."""
    values = tensors()
    values["model.head"] = values["model.up"]
    state = {"step": 7, "args": {"lr": 0.5}}
    for key, value in values.items():
        parts = 2 if value.ndim == 2 and value.shape[1] % 2 == 0 else 1
        for number, part in enumerate(value.chunk(parts, -1) if value.ndim else [value]):
            place = [(1, number, parts)] if parts > 1 else []
            shard = part if value is values["model.up"] else part.contiguous()
            state[f"{key}/{number}"] = ShardedTensor.from_rank_offsets(key, shard, *place)
    state["rng"] = [ShardedObject("rng", {"seed": i}, (3,), (i,)) for i in range(3)]
    distckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def assert_holds_everything(location):
    assert distckpt.verify(location).is_whole
    expected = tensors()
    expected["model.head"] = expected["model.up"]
    loaded = distckpt.open(location).read_tensors()
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        assert bits(loaded[key]) == bits(value), key
    assert distckpt.open(location).common_state == {"step": 7, "args": {"lr": 0.5}}
    state = distckpt.load(
        {"rng": [ShardedObject("rng", None, (3,), (i,)) for i in range(3)]}, location
    )
    assert state["rng"] == [{"seed": i} for i in range(3)]


def chunks(location):
    """Read from the headers of shard files: key -> {offset: (shape, rank)}."""
    found = {}
    for file in sorted((location / "tensors").iterdir()):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for key, entry in header.items():
            place = tuple(offsets[key]["saved_offsets"])
            found.setdefault(key, {})[place] = (tuple(entry["shape"]), int(file.name[6:11]) - 1)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_everything_is_kept(checkpoint, tmp_path, capsys, num_ranks):
    report = call_json(capsys, "reshard", checkpoint, tmp_path / "r", "--ranks", num_ranks)
    assert_holds_everything(tmp_path / "r")
    files = [*(tmp_path / "r" / "tensors").iterdir(), *(tmp_path / "r" / "objects").iterdir()]
    assert report["num_files"] == len(files)
    assert (report["num_tensors"], report["num_objects"]) == (6, 1)
    # No two ranks differ by more than the row of a tensor that is cut.
    ranks = [file.stat().st_size for file in (tmp_path / "r" / "tensors").iterdir()]
    assert len(ranks) == num_ranks
    assert max(ranks) - min(ranks) < 3 * 4096
    assert "6 tensors in" in call(capsys, "reshard", checkpoint, tmp_path / "s")


def test_grids_say_which_rank_holds_what(checkpoint, tmp_path, capsys):
    arguments = ["--ranks", 4, "--grid", "model.up=3x2", "--grid", "*.down=1x2"]
    call(capsys, "reshard", checkpoint, tmp_path / "r", *arguments)
    assert_holds_everything(tmp_path / "r")
    found = chunks(tmp_path / "r")
    assert found["model.up"] == {
        (40 * row, 45 * column): ((40, 45), (2 * row + column) % 4)
        for row in range(3)
        for column in range(2)
    }
    # Two parts and four ranks: ranks 0 and 2 share the first, 1 and 3 the second.
    assert {(place[1], rank % 2) for place, (_, rank) in found["model.down"].items()} == {
        (0, 0),
        (150, 1),
    }
    call(capsys, "reshard", tmp_path / "r", tmp_path / "back", "--ranks", 2)
    assert_holds_everything(tmp_path / "back")


def test_grids_that_do_not_fit_are_refused(checkpoint, tmp_path, capsys):
    out = tmp_path / "r"
    for grid, message in {
        "model.up=3": "give one number of parts for each axis",
        "model.up=3x91": "from 1 to its size",
        "nothing=1x2": "fit no tensor",
    }.items():
        assert message in call_error(capsys, "reshard", checkpoint, out, "--grid", grid)
    for grid in ("model.up", "model.up=3x", "model.up=0x2"):
        with pytest.raises(SystemExit, match="2"):
            main(["reshard", str(checkpoint), str(out), "--grid", grid])
        assert "is not PATTERN=AxB" in capsys.readouterr().err
    assert "or pass --overwrite" in call_error(capsys, "reshard", checkpoint, checkpoint)
    assert sorted(os.listdir(tmp_path)) == ["c"]
    call(capsys, "reshard", checkpoint, out)
    assert "or pass --overwrite" in (error := call_error(capsys, "reshard", checkpoint, out)), error
    call(capsys, "reshard", checkpoint, out, "--overwrite", "--ranks", 3)
    assert_holds_everything(out)


def test_damage_is_found_and_nothing_appears(checkpoint, tmp_path, capsys):
    (file,) = [
        f
        for f in (checkpoint / "tensors").iterdir()
        if tensors()["model.down"].view(torch.uint8).numpy().tobytes() in f.read_bytes()
    ]
    flip(file, -1)
    assert "Checksum mismatch" in call_error(
        capsys, "reshard", checkpoint, tmp_path / "r", "--ranks", 2
    )
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize("verb", ["reshard", "import"])
def test_an_interrupt_leaves_nothing(checkpoint, tmp_path, capsys, monkeypatch, verb):
    distckpt.consolidate(checkpoint, tmp_path / "hf")
    source = checkpoint if verb == "reshard" else tmp_path / "hf"
    restore = interrupt_at_first_progress(monkeypatch)
    try:
        assert call(capsys, verb, source, tmp_path / "r", code=130) == ""
    finally:
        restore()
    assert sorted(os.listdir(tmp_path)) == ["c", "hf"]


def test_what_torch_saved(tmp_path, capsys):
    state = {"model": {"w": torch.arange(12.0).view(3, 4)}, "step": 3, "list": [1, {"a": None}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
    call(capsys, "reshard", tmp_path / "dcp", tmp_path / "r", "--ranks", 2, "--grid", "model.w=1x2")
    assert distckpt.verify(tmp_path / "r").has_checksums
    assert torch.equal(distckpt.open(tmp_path / "r").read_tensors()["model.w"], state["model"]["w"])
    assert distckpt.open(tmp_path / "r").common_state == {"step": 3, "list": [1, {"a": None}]}


def test_import_of_a_hugging_face_directory(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    values = {key: value for key, value in tensors().items() if key.startswith("model.")}
    for number, key in enumerate(values, start=1):
        safetensors.torch.save_file(
            {key: values[key]}, tmp_path / "hf" / f"model-{number:05d}-of-00005.safetensors"
        )
    weight_map = {
        key: f"model-{number:05d}-of-00005.safetensors"
        for number, key in enumerate(values, start=1)
    }
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    arguments = ["--rename", "model.=net.", "--dtype", "*.up=bf16", "--ranks", 3]
    report = call_json(capsys, "import", tmp_path / "hf", tmp_path / "c", *arguments)
    assert (report["num_tensors"], report["overflows"]) == (5, {})
    assert distckpt.verify(tmp_path / "c").has_checksums
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    for key, value in values.items():
        expected = value.bfloat16() if key == "model.up" else value
        assert bits(loaded[key.replace("model.", "net.")]) == bits(expected)
    assert distckpt.open(tmp_path / "c").common_state == {}
    call(capsys, "import", tmp_path / "hf", tmp_path / "few", "--keys", "*.up", "--keys", "model.s")
    assert distckpt.open(tmp_path / "few").read_tensors().keys() == {"model.up", "model.scalar"}


def test_conversions_that_lose_values_are_told(tmp_path, capsys):
    safetensors.numpy.save_file(
        {"w": torch.tensor([1.0, 1e30, -1e30]).numpy()}, tmp_path / "model.safetensors"
    )
    call(capsys, "import", tmp_path, tmp_path / "c", "--dtype", "fp16")
    main(["import", str(tmp_path), str(tmp_path / "c"), "--dtype", "fp16", "--overwrite"])
    assert "warning: 2 values of 'w' did not fit" in capsys.readouterr().err


def test_rules_change_shapes(checkpoint, tmp_path):
    split = rules.Split("model.up", to=("a", "b"), axis=1, sizes=(30, 60))
    distckpt.reshard(checkpoint, tmp_path / "r", num_ranks=2, rules=[split], grids={"b": (3, 1)})
    loaded = distckpt.open(tmp_path / "r").read_tensors()
    assert torch.equal(torch.cat([loaded["a"], loaded["b"]], 1), tensors()["model.up"])
    assert torch.equal(loaded["model.head"], tensors()["model.up"])
    assert distckpt.verify(tmp_path / "r").is_whole


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    big = torch.zeros(512 << 20, dtype=torch.uint8).view(1 << 15, -1)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", big)}, tmp_path / "c")
    del big
    limit = 64 << 20

    def rewrite():
        distckpt.reshard(
            tmp_path / "c",
            tmp_path / "r",
            num_ranks=2,
            grids={"w": (1, 2)},
            max_inflight_bytes=limit,
        )

    assert peak_memory_bytes(rewrite) < 4 * limit


def test_in_memory_of_an_object_store(checkpoint, capsys):
    call(
        capsys,
        "reshard",
        checkpoint,
        "memory://test_cli_reshard/a",
        "--ranks",
        3,
        "--grid",
        "model.up=2x2",
    )
    call(capsys, "reshard", "memory://test_cli_reshard/a", "memory://test_cli_reshard/b")
    assert_holds_everything("memory://test_cli_reshard/b")
