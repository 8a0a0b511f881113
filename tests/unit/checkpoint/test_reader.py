"""A format that a program brings itself: registered in a few lines, then read like any other."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ShardedObject,
)
from distckpt.cli import main
from distckpt.readers import OBJECT, Reader, Region, StoredPiece, build_manifest, register_reader
from tests.support.toy_format import BIAS, SAMPLER, WEIGHT, ToyReader, sampler_shard, write_toy


@pytest.fixture(autouse=True)
def registered():
    register_reader(ToyReader())


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path / "toy")


def test_load_gives_any_region_objects_and_common_state(toy):
    target = torch.zeros(4, 4)
    shard = distckpt.ShardedTensor("w", target, torch.float32, (4, 4), (4, 8), (0, 2), None)
    state = distckpt.load({"half": shard, "sampler": sampler_shard()}, toy)
    assert torch.equal(state["half"], WEIGHT[:, 2:6])
    assert state["sampler"] == SAMPLER
    assert state["step"] == 7
    assert distckpt.open(toy).common_state == {"step": 7}
    plain = distckpt.open(toy).read_tensors()
    assert torch.equal(plain["w"], WEIGHT)
    assert torch.equal(plain["bias"], BIAS)
    described = distckpt.megatron.serialization.load_sharded_metadata(toy)
    assert {shard.key for shard in described.values()} == {"w", "bias", "sampler"}


def test_consolidate_and_reshard(toy, tmp_path):
    distckpt.consolidate(toy, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["w"], WEIGHT)
    assert torch.equal(exported["bias"], BIAS)
    distckpt.reshard(toy, tmp_path / "resharded", num_ranks=2, grids={"w": (2, 1)})
    assert distckpt.verify(tmp_path / "resharded").has_checksums
    assert distckpt.diff(toy, tmp_path / "resharded").is_same
    assert distckpt.open(tmp_path / "resharded").common_state == {"step": 7}


def test_verify_and_diff(toy, tmp_path):
    report = distckpt.verify(toy)
    assert (report.is_whole, report.has_checksums, report.num_keys) == (True, False, 3)
    other = write_toy(tmp_path / "other", {"epoch": 3, "seen": [1, 5]})
    differences = distckpt.diff(toy, other)
    assert (differences.tensors, differences.objects_compared) == ((), True)
    assert [(d.key, d.path) for d in differences.objects] == [("sampler", "seen[1]")]
    os.truncate(toy / "b.bin", 30)
    with pytest.raises(CorruptCheckpointError, match=r"b\.bin"):
        distckpt.open(toy).read_tensors()


def test_the_command_line(toy, capsys):
    assert main(["inspect", str(toy)]) == 0
    assert "2 tensors, 40 elements" in capsys.readouterr().out
    assert main(["cat", str(toy), "w[1, 2:4]"]) == 0
    assert "[10., 11.]" in capsys.readouterr().out.replace("  ", " ")
    assert main(["cat", str(toy)]) == 0
    assert '"step": 7' in capsys.readouterr().out


# --- What a reader may do wrong -------------------------------------------------------------------


def piece(offset, shape, first_byte=0, key="w", file="a.bin", dtype="F32"):
    return StoredPiece(
        key, dtype, Region(offset, shape), None, file, first_byte, 4 * int(np.prod(shape))
    )


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [piece((0,), (4,)), piece((3,), (2,), 16)],
            r"'w'.*\(3,\) is stored several times: \[0:4\] in 'a.bin' and",
        ),
        ([piece((0,), (4,)), piece((5,), (2,), 16)], r"'w'.*\(4,\) is in no file"),
        ([piece((0,), (4,)), piece((4,), (2,), 16, dtype="I32")], "do not fit together"),
        ([piece((0,), (4,), file="absent.bin")], "absent.bin' is missing"),
        ([piece((0,), (4,), file="../a.bin")], "leads elsewhere"),
    ],
)
def test_pieces_must_make_up_tensors(toy, pieces, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        build_manifest("toy", str(toy), pieces)


class WithoutObjects(ToyReader):
    name = "without"
    is_used = False
    load_objects = Reader.load_objects

    def detect(self, location, marker):
        return self.is_used and super().detect(location, marker)


def test_objects_that_nobody_loads_are_named(toy, monkeypatch):
    register_reader(WithoutObjects())
    monkeypatch.setattr(WithoutObjects, "is_used", True)
    with pytest.raises(CheckpointingException, match="WithoutObjects describes objects"):
        distckpt.load({"sampler": sampler_shard()}, toy)


def test_what_no_reader_detects_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        distckpt.load({}, tmp_path)


@pytest.mark.parametrize("name", ["unheard of", None, [], {}])
def test_a_marker_cannot_name_just_any_reader(tmp_path, name):
    marker = {
        "sharded_backend": "safetensors",
        "sharded_backend_version": 1,
        "manifest": None,
        "reader": name,
    }
    (tmp_path / "metadata.json").write_text(json.dumps(marker))
    with pytest.raises(CheckpointingException, match="no reader is registered"):
        distckpt.open(tmp_path).read_tensors()


# --- Readers with mistakes ------------------------------------------------------------------------


class _Named(ToyReader):
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    "name", ["", None, 5, "safetensors", "huggingface", "torch_dist", "distckpt"]
)
def test_names_that_a_reader_cannot_have(name):
    with pytest.raises(ValueError, match="cannot name a format"):
        register_reader(_Named(name))


def test_a_class_is_no_reader():
    with pytest.raises(TypeError, match="an instance of a Reader"):
        register_reader(ToyReader)


READS = {
    "load": lambda toy: distckpt.load({"sampler": ShardedObject("sampler", None, (1,), (0,))}, toy),
    "diff": lambda toy: distckpt.diff(toy, toy),
    "reshard": lambda toy: distckpt.reshard(toy, f"{toy}-resharded"),
}


@pytest.mark.parametrize(
    "values", [[], [SAMPLER, SAMPLER], None], ids=["too few", "too many", "none"]
)
@pytest.mark.parametrize("read", READS)
def test_a_wrong_number_of_objects_is_an_error_that_names_the_reader(
    toy, monkeypatch, values, read
):
    monkeypatch.setattr(ToyReader, "load_objects", lambda self, stored, chunks: values)
    with pytest.raises(CheckpointingException, match="The reader of 'toy'"):
        READS[read](toy)


@pytest.mark.parametrize("common", [None, [1]])
def test_common_state_that_is_no_dict_is_an_error(toy, monkeypatch, common):
    monkeypatch.setattr(ToyReader, "load_common_state", lambda self, stored: common)
    with pytest.raises(CheckpointingException, match="must be a dict"):
        distckpt.load({}, toy)


@pytest.mark.parametrize("method", ["detect", "manifest", "load_objects", "load_common_state"])
def test_errors_of_a_reader_name_it_and_the_location(toy, monkeypatch, method):
    def fail(*arguments):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ToyReader, method, fail)
    with pytest.raises(
        CheckpointingException,
        match=r"The reader of 'toy' failed on '.*toy.*': ZeroDivisionError: oh",
    ):
        distckpt.load({"sampler": ShardedObject("sampler", None, (1,), (0,))}, toy)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([((0,), (1,)), ((0,), (1,))], "is stored several times"),
        ([((0,), (2,))], "is not one cell"),
    ],
    ids=["twice", "two cells in one"],
)
def test_parts_of_objects_are_checked(tmp_path, parts, problem):
    (tmp_path / "x.bin").write_bytes(b"1234")
    pieces = [
        StoredPiece("o", OBJECT, Region(*region), (2,), "x.bin", i, 1)
        for i, region in enumerate(parts)
    ]
    with pytest.raises(CorruptCheckpointError, match=problem):
        build_manifest("toy", str(tmp_path), pieces)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"region": Region((0.5,), (4,))}, "not an integer"),
        ({"region": Region((-1,), (4,))}, "not an integer"),
        ({"region": Region((0, 0), (4,))}, "number of axes"),
        ({"global_shape": (4, 4)}, "number of axes"),
        ({"key": 7}, "not a str"),
        ({"file": None}, "not a str"),
        ({"dtype": "F31"}, "dtype is unknown"),
        ({"dtype": ["F32"]}, "dtype is unknown"),
        ({"first_byte": 1.0}, "not an integer"),
        ({"first_byte": -4}, "not an integer"),
        ({"global_shape": (3,)}, "lies outside the global shape"),
        ({"num_bytes": 12}, "12 bytes instead of 16"),
    ],
    ids=str,
)
def test_a_piece_that_cannot_be_is_named_with_the_reader(toy, changes, fault):
    wrong = piece((0,), (4,))._replace(**changes)
    with pytest.raises(
        CorruptCheckpointError, match=f"reader of 'toy' describes .*toy' wrongly, or .*{fault}"
    ) as caught:
        build_manifest("toy", str(toy), [piece((0,), (4,), key="right"), wrong])
    assert repr(wrong) in str(caught.value)


def test_offsets_may_be_numbers_of_numpy(toy):
    pieces = [piece((np.int64(0),), (np.int32(4),)), piece((4,), (2,), np.uint64(16))]
    assert build_manifest("toy", str(toy), pieces).global_shapes == [(6,)]


class Greedy(ToyReader):
    name = "greedy"
    is_used = False

    def detect(self, location, marker):
        return self.is_used


@pytest.fixture
def greedy(monkeypatch):
    register_reader(Greedy())
    monkeypatch.setattr(Greedy, "is_used", True)


def test_a_save_leaves_what_a_reader_reads_as_it_is(toy):
    before = {name: (toy / name).read_bytes() for name in os.listdir(toy)}
    distckpt.save({"step": 1}, toy)
    distckpt.save({"step": 2}, toy, overwrite=True)
    assert {name: (toy / name).read_bytes() for name in before} == before
    assert os.listdir(toy.parent) == ["toy"]
    assert distckpt.open(toy).common_state == {"step": 2}


def test_a_reader_is_not_asked_about_what_does_not_exist(tmp_path, greedy):
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        distckpt.load({}, tmp_path / "nowhere")


def test_a_reader_that_takes_what_it_cannot_read_is_named(tmp_path, greedy):
    save_file({"w": WEIGHT}, tmp_path / "model.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"in the reader of 'greedy', for '.*index\.toy\.json"
    ):
        distckpt.open(tmp_path).read_tensors()
    distckpt.save({"step": 3}, tmp_path / "ours")
    assert distckpt.open(tmp_path / "ours").common_state == {"step": 3}


def test_the_key_of_common_state_is_reserved(toy, tmp_path):
    index = json.loads((toy / "index.toy.json").read_text())
    index["pieces"][-1]["key"] = "distckpt.common_state"
    (toy / "index.toy.json").write_text(json.dumps(index))
    for read in (
        distckpt.megatron.load_plain_tensors,
        lambda path: distckpt.reshard(path, tmp_path / "resharded"),
    ):
        with pytest.raises(
            CheckpointingException, match=r"reader of 'toy' .* reserved: .*load_common_state"
        ):
            read(toy)
