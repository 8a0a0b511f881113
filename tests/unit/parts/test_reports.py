"""`verify`, `stats` and `diff` in parts: reports are those of one process."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, ShardedTensor, tasks
from distckpt.tasks import _pieces as work
from tests.support.calls import recorded
from tests.support.cli_command import call_json
from tests.support.disk import flip_in_memory
from tests.support.states import numbered, save_checkpoint, shard_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of 160 MB that differ in a few places; the second is damaged in two."""
    made = tmp_path_factory.mktemp("checkpoints")
    values = torch.arange(6000 * 1101) % 3001 * 0.37
    tensors = {f"layers.{i}.weight": values.view(6000, 1101) + i for i in range(6)}
    save_checkpoint(made / "a", tensors, args={"lr": 1})
    tensors["layers.2.weight"] = tensors["layers.2.weight"].clone()
    tensors["layers.2.weight"][3000:, 7] = torch.nan
    tensors["layers.5.weight"] = -tensors["layers.5.weight"]
    save_checkpoint(made / "b", {**tensors, "more": torch.ones(3)}, args={"lr": 2})
    save_checkpoint(made / "damaged", tensors)
    (file,) = shard_files(made / "damaged")
    with open(file, "r+b") as opened:
        for position in (70_000_000, 70_300_000, 150_000_000):
            opened.seek(position)
            opened.write(b"\xff\x00\xff\x00")
    return made


def same(report, expected):
    """Tell whether reports are equal, NaN in them as well, apart from the time that they took."""
    texts = [repr(dataclasses.replace(each, seconds=0.0)) for each in (report, expected)]
    return texts[0] == texts[1]


def run_parts(work):
    reports = [task.run() for task in work]
    assert sum(report.num_pieces > 0 for report in reports) > 1
    assert [report.is_complete for report in reports] == [False] * (len(work) - 1) + [True]
    return reports[-1].report


@pytest.mark.parametrize("name", ["a", "damaged"])
def test_verify(name, folder, tmp_path):
    expected = distckpt.verify(folder / name)
    assert expected.is_whole == (name == "a")
    work = tasks.verify(folder / name, journal=tmp_path / "journal", num_tasks=3)
    assert same(run_parts(work), expected)


def test_verify_fast_and_what_cannot_be_opened(folder, tmp_path):
    (task,) = tasks.verify(folder / "a", "fast", journal=tmp_path / "j1", num_tasks=1)
    assert same(task.run().report, distckpt.verify(folder / "a", "fast"))
    save_checkpoint(tmp_path / "a", {"w": torch.ones(3)})
    (tmp_path / "a/manifest.safetensors").write_bytes(b"nothing")
    (task,) = tasks.verify(tmp_path / "a", journal=tmp_path / "j2", num_tasks=1)
    assert same(task.run().report, distckpt.verify(tmp_path / "a"))


@pytest.mark.parametrize("spoiled", ["nothing", "in memory", "on disk"])
def test_verify_compares_stored_fingerprints(spoiled, tmp_path, monkeypatch):
    """A bit changes between memory and checksum, or afterwards as well."""
    values = {"w": numbered(6000, 3100), "v": numbered(7), "empty": torch.zeros(0)}
    state = {key: ShardedTensor.from_rank_offsets(key, each) for key, each in values.items()}
    if spoiled != "nothing":
        flip_in_memory(monkeypatch)
    distckpt.save(state, tmp_path / "a", fingerprint=True)
    if spoiled == "on disk":
        (file,) = shard_files(tmp_path / "a")
        with open(file, "r+b") as opened:
            opened.seek(-4, 2)
            opened.write(b"\xff\x00\xff\x00")
    expected = distckpt.verify(tmp_path / "a")
    assert expected.is_whole == (spoiled == "nothing")
    parts = tasks.verify(tmp_path / "a", journal=tmp_path / "journal", num_tasks=2)
    assert same(run_parts(parts), expected)


@pytest.mark.parametrize("options", [{}, {"keys": "layers.", "atol": 0.5}])
def test_diff(options, folder, tmp_path):
    expected = distckpt.diff(folder / "a", folder / "b", **options)
    assert len(expected.tensors) == 2
    journal = tmp_path / "journal"
    work = tasks.diff(folder / "a", folder / "b", journal=journal, num_tasks=3, **options)
    assert same(run_parts(work), expected)


def test_stats(capsys, folder, tmp_path):
    expected = call_json(capsys, "stats", folder / "b", code=1)
    parts = [
        call_json(capsys, "stats", folder / "b", "--journal", tmp_path, "--part", part, code=code)
        for part, code in (("0/2", 0), ("1/2", 1))
    ]
    assert not parts[0]["is_complete"]
    assert parts[1] == expected


@pytest.mark.parametrize("verb", ["verify", "stats", "diff"])
def test_a_part_looks_at_each_file_once_and_opens_its_own(verb, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "_MIN_PIECE_BYTES", 1 << 20)
    tensors = {f"w{i}": torch.arange(1 << 18, dtype=torch.float32) + i for i in range(8)}
    save_checkpoint(tmp_path / "whole", tensors)
    distckpt.reshard(tmp_path / "whole", tmp_path / "a", num_ranks=8)
    source = {"a": tmp_path / "a", "b": tmp_path / "whole"}
    arguments = source if verb == "diff" else {"checkpoint_dir": tmp_path / "a"}
    part = tasks.Task(verb, {**arguments, "journal": tmp_path / "journal"}, 1, 4)
    with recorded(tmp_path / "a/tensors") as calls:
        part.run()
    names = Counter(call.name for call in calls)
    assert 1 <= names["open"] <= 3
    # One that is opened is looked at once more.
    assert 8 <= names["stat"] <= 8 + 2 * names["open"]
    with recorded(tmp_path / "a") as calls:
        tasks.status(tmp_path / "journal" / verb)
    assert not calls


def test_other_arguments_are_refused_by_name(folder, tmp_path):
    tasks.diff(folder / "a", folder / "b", journal=tmp_path, num_tasks=3)[0].run()
    others = tasks.diff(folder / "a", folder / "b", journal=tmp_path, num_tasks=3, atol=1.0)
    with pytest.raises(CheckpointingException, match=r"atol was 0\.0 and is 1\.0"):
        others[1].run()
    assert tasks.abandon(tmp_path / "diff")
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_keys_is_of_no_account(capsys, folder, tmp_path):
    keys = ["layers.1", "layers.2", "layers.1"]
    first, second = [[f"--keys={key}" for key in each] for each in (keys, keys[1:])]
    expected = call_json(capsys, "stats", folder / "a", *first)
    command = ["stats", folder / "a", "--journal", tmp_path]
    assert not call_json(capsys, *command, *first, "--part", "0/2")["is_complete"]
    assert call_json(capsys, *command, *second, "--part", "1/2") == expected
    tasks.diff(folder / "a", folder / "b", journal=tmp_path, num_tasks=2, keys=keys)[0].run()
    others = {"journal": tmp_path, "num_tasks": 2, "keys": keys[1:]}
    assert tasks.diff(folder / "a", folder / "b", **others)[1].run().is_complete


def test_a_journal_is_not_of_copies_and_not_of_files_that_changed_since(tmp_path):
    save_checkpoint(tmp_path / "a", {"w": torch.ones(300)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (file,) = shard_files(tmp_path / "b")

    def is_whole(name):
        (task,) = tasks.verify(tmp_path / name, journal=tmp_path / "journal", num_tasks=1)
        return task.run().report.is_whole

    undamaged = file.read_bytes()
    file.write_bytes(undamaged[:-4] + b"\xff\x00\xff\x00")
    shutil.copystat(shard_files(tmp_path / "a")[0], file)
    assert is_whole("a")
    assert not is_whole("b")
    file.write_bytes(undamaged)
    assert is_whole("b")
