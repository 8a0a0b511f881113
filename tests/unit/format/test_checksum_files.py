"""Checkpoints as large ones are stored: with files of checksums, and parts of the manifest."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
from safetensors.torch import load_file

import distckpt
from distckpt import CheckpointingException, CorruptCheckpointError, ShardedObject, ShardedTensor
from distckpt.cli import main
from distckpt.megatron.serialization import remove_sharded_tensors
from tests.support.disk import flip
from tests.support.forged_files import forge_files
from tests.support.manifests import set_limits

GENERATOR = torch.Generator().manual_seed(5)
TENSORS = {
    "large": torch.randn(500, 700, generator=GENERATOR),
    "other": torch.randn(700, 300, generator=GENERATOR).to(torch.bfloat16),
    "small": torch.arange(7),
}


@pytest.fixture(autouse=True)
def as_large(monkeypatch):
    set_limits(monkeypatch)


def state_of(tensors):
    sharded = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    return {**sharded, "o": ShardedObject("o", {"a": [1]}, (1,), (0,)), "step": 3}


@pytest.fixture
def path(tmp_path):
    distckpt.save(state_of(TENSORS), tmp_path / "c")
    return tmp_path / "c"


def assert_is_whole(path, keys=tuple(TENSORS)):
    report = distckpt.verify(path)
    assert report.problems == ()
    tensors = distckpt.open(path).read_tensors()
    assert tensors.keys() == set(keys)
    for key in keys:
        assert torch.equal(tensors[key], TENSORS[key])


def checksum_file(path):
    (file,) = (path / "objects").glob("*.checksums")
    return file


def test_checksums_lie_in_the_order_of_the_bytes(path):
    assert_is_whole(path)
    expected = []
    for file in (*(path / "tensors").iterdir(), path / "objects" / "rank-00001.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for first, end in sorted(entry["data_offsets"] for entry in header.values()):
            data = content[8 + length + first : 8 + length + end]
            blocks = [data[i : i + (256 << 10)] for i in range(0, len(data), 256 << 10)]
            expected += map(xxhash.xxh3_64_intdigest, blocks)
    assert np.fromfile(checksum_file(path), "<u8").tolist() == expected
    stored = safetensors.numpy.load((path / "manifest.safetensors").read_bytes())
    assert stored["block_checksums"].size == stored["key_ids"].size == 0


def test_repeated_saves_and_overwriting(path):
    for _ in range(2):
        distckpt.save(state_of(TENSORS), path, overwrite=True)
        assert_is_whole(path)


def test_a_part_of_a_tensor_is_verified(path):
    wanted = {"large": ShardedTensor.from_rank_offsets("large", torch.zeros(500, 350), (1, 1, 2))}
    assert torch.equal(distckpt.load(wanted, path)["large"], TENSORS["large"][:, 350:])
    (file,) = (path / "tensors").iterdir()
    place = len(file.read_bytes()) - 5
    flip(file, place)
    (problem,) = distckpt.verify(path).problems
    assert problem.first_byte <= place < problem.stop_byte
    with pytest.raises(CorruptCheckpointError, match=f"Checksum mismatch .*{problem.key}"):
        distckpt.open(path).read_tensors()


@pytest.mark.parametrize("how", ["missing", "damaged", "cut off"])
def test_files_of_checksums_that_are_damaged(path, how):
    file = checksum_file(path)
    if how == "missing":
        file.unlink()
    elif how == "damaged":
        flip(file, 9)
    else:
        file.write_bytes(file.read_bytes()[:-8])
    (problem,) = distckpt.verify(path).problems
    assert problem.file == str(file)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00001\.checksums.*verify=False"):
        distckpt.open(path).read_tensors()
    wanted = {"large": ShardedTensor.from_rank_offsets("large", torch.zeros(500, 700))}
    loaded = distckpt.load(wanted, path, verify=False)
    assert torch.equal(loaded["large"], TENSORS["large"])


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_parts_that_are_damaged(path, how):
    part = min((path / "objects").glob("chunks-*"))
    part.unlink() if how == "missing" else flip(part, -1)
    (problem,) = distckpt.verify(path).problems
    assert problem.file == str(part)
    with pytest.raises(CorruptCheckpointError, match=r"chunks-00001\.safetensors"):
        distckpt.open(path)


def without_checksum_file(files):
    files[:] = [each for each in files if not each[0].endswith(".checksums")]


def shorter(files):
    for each in files:
        if each[0].endswith(".checksums"):
            each[1:3] = [each[1] - 8] * 2


def before_all(files):
    files.sort(key=lambda each: not each[0].endswith(".checksums"))


def huge_part(files):
    for each in files:
        if "chunks-" in each[0]:
            each[1:3] = [1 << 50] * 2


@pytest.mark.parametrize("change", [without_checksum_file, shorter, before_all, huge_part])
def test_manifests_that_contradict_their_files(path, change):
    forge_files(path, change)
    assert len(distckpt.verify(path).problems) == 1
    with pytest.raises(CorruptCheckpointError, match=r"is damaged|no such file"):
        distckpt.open(path).read_tensors()


def test_it_is_resharded_and_tensors_are_removed(path, tmp_path):
    distckpt.reshard(path, tmp_path / "r", num_ranks=3, grids={"large": (4, 1)})
    assert_is_whole(tmp_path / "r")
    remove_sharded_tensors(tmp_path / "r", "other")
    assert checksum_file(tmp_path / "r").stat().st_size % 8 == 0
    assert_is_whole(tmp_path / "r", ["large", "small"])


def test_it_is_exported_merged_compared_and_shown(path, tmp_path, capsys):
    other = {**TENSORS, "large": TENSORS["large"] + 2}
    distckpt.save(state_of(other), tmp_path / "other")
    distckpt.consolidate(path, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[key], TENSORS[key]) for key in TENSORS)
    distckpt.merge([path, tmp_path / "other"], tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(merged["large"], TENSORS["large"] + 1)
    found = distckpt.diff(path, tmp_path / "other")
    assert [each.key for each in found.tensors] == ["large"]
    assert main(["inspect", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = {str(file.relative_to(path)) for file in path.rglob("*/*") if file.is_file()}
    assert {file["name"] for file in shown["files"]} == names


def test_a_checkpoint_too_large_for_readers_is_refused_before_it_is_written(tmp_path, monkeypatch):
    set_limits(monkeypatch, max_table_bytes=50)
    with pytest.raises(CheckpointingException, match="readers accept 50"):
        distckpt.save(state_of(TENSORS), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("num_rows", [1 << 40, 3])
def test_parts_whose_runs_claim_other_rows(path, num_rows):
    part = min((path / "objects").glob("chunks-*"))
    columns = safetensors.numpy.load(part.read_bytes())
    columns.pop("key_ids")
    columns["key_ids.deltas"] = np.zeros(1, np.int64)
    columns["key_ids.counts"] = np.array([num_rows])
    content = safetensors.numpy.save(columns)
    part.write_bytes(content)

    def name_it(files):
        for each in files:
            if each[0] == f"objects/{part.name}":
                each[1:] = [len(content), len(content), xxhash.xxh3_64_intdigest(content)]

    forge_files(path, name_it)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        distckpt.open(path)


def test_parts_of_regular_tensors_hold_runs(tmp_path):
    # Parts along the last axis do not follow one another in memory: each is a chunk.
    shards = {
        f"part.{number}": ShardedTensor.from_rank_offsets(
            "columns", torch.full((2, 3), number), (1, number, 100)
        )
        for number in range(100)
    }
    distckpt.save(shards, tmp_path / "c")
    part = min((tmp_path / "c" / "objects").glob("chunks-*"))
    assert "offsets.deltas" in safetensors.numpy.load(part.read_bytes())
    tensor = distckpt.open(tmp_path / "c").read_tensors()["columns"]
    assert torch.equal(tensor, torch.arange(100).repeat_interleave(3).expand(2, -1))
