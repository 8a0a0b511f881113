"""`distckpt prune`: what is removed of a manager's directory, and above all what is not."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor, tasks
from tests.support.cli_command import call, call_error, call_json


def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(value)))}


@pytest.fixture
def root(tmp_path):
    """Five steps, one of them pinned."""
    root = tmp_path / "root"
    with CheckpointManager(root, async_save=False) as manager:
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
            manager.save(step, state(step), metrics={"loss": loss}, pinned=step == 2)
    return root


def steps(root):
    return [int(name[5:]) for name in sorted(os.listdir(root)) if name.startswith("step_")]


def leave(root, name, age):
    """Make what an interrupted save leaves, in which nothing was written for `age` seconds."""
    (root / name / "tensors").mkdir(parents=True)
    (root / name / "tensors" / "x").write_bytes(b"x")
    then = (root / "step_00000000").stat().st_mtime - age
    for path in (root / name / "tensors" / "x", root / name / "tensors", root / name):
        os.utime(path, (then, then))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["--keep-last", 1], [2, 4]),
        (["--keep-last", 2], [2, 3, 4]),
        (["--keep-last", 1, "--keep-every", 3], [0, 2, 3, 4]),
        (["--keep-last", 1, "--best-metric", "loss"], [1, 2, 4]),
        (["--keep-last", 1, "--best-metric", "loss", "--best-mode", "max"], [0, 2, 4]),
        (["--keep-last", 1, "--best-metric", "loss", "--keep-best", 2], [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_what_is_kept(root, capsys, options, kept):
    removed = [step for step in range(5) if step not in kept]
    before = sorted(root.rglob("*"))
    tried = call_json(capsys, "prune", root, *options, "--dry-run")
    assert (tried["kept"], tried["removed"], tried["dry_run"]) == (kept, removed, True)
    assert sorted(root.rglob("*")) == before
    assert steps(root) == [0, 1, 2, 3, 4]
    done = call_json(capsys, "prune", root, *options)
    assert (done["kept"], done["removed"]) == (kept, removed)
    assert steps(root) == kept
    assert CheckpointManager(root).latest() == 4


def test_without_keep_last_all_are_kept_which_the_command_says(root, capsys):
    assert "5 of 5 checkpoints kept" in call(capsys, "prune", root)
    assert "without --keep-last all are" in call(capsys, "prune", root)
    assert "without --keep" not in call(capsys, "prune", root, "--keep-last", 2)


def test_a_dry_run_says_what_would_happen(root, capsys):
    text = call(capsys, "prune", root, "--keep-last", 1, "--dry-run")
    assert text.splitlines()[:3] == [f"would remove step_0000000{step}" for step in (0, 1, 3)]
    assert "2 of 5 checkpoints kept" in text
    assert "removed step_00000003\n" in call(capsys, "prune", root, "--keep-last", 1)


def test_the_newest_whole_step_is_kept_and_damaged_ones_are_left(root, capsys):
    for step in (3, 4):
        (shard,) = (root / f"step_0000000{step}" / "tensors").iterdir()
        shard.write_bytes(b"")
    found = call_json(capsys, "prune", root, "--keep-last", 1)
    assert (found["kept"], found["removed"]) == ([2, 3, 4], [0, 1])
    for step in (2,):
        shutil.rmtree(root / f"step_0000000{step}" / "tensors")
    assert call_json(capsys, "prune", root, "--keep-last", 1)["removed"] == []


def test_what_is_not_the_managers_is_left_alone(root, tmp_path, capsys):
    distckpt.save(state(9), root / "step_00000000_copy")
    distckpt.save(state(9), root / "step_00000009")  # of this name, but no manager saved it
    distckpt.save(state(9), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", root / "step_00000008")
    shutil.copytree(
        root / "step_00000001", root / "step_00000007"
    )  # its marker says that it is step 1
    others = [
        "notes.txt",
        "step_1",
        ".step_00000001.damaged-0123456789abcdef",
        ".step_00000001.tmp-short",
    ]
    for name in others:
        (root / name).mkdir()
    call(capsys, "prune", root, "--keep-last", 1, "--abandoned-after", 1)
    left = set(os.listdir(root))
    assert {
        *others,
        "step_00000000_copy",
        "step_00000009",
        "step_00000008",
        "step_00000007",
    } <= left
    assert {"step_00000002", "step_00000004"} <= left
    assert not {"step_00000000", "step_00000001", "step_00000003"} & left
    assert distckpt.verify(tmp_path / "elsewhere").is_whole


def test_leftovers_of_dead_saves_go_and_live_ones_stay(root, capsys):
    nonce = "0123456789abcdef"
    dead, live, trash = (
        f".step_00000005.tmp-{nonce}",
        f".step_00000006.tmp-{nonce}",
        f".step_00000001.trash-{nonce}",
    )
    leave(root, dead, age=2 * 3600)
    leave(root, live, age=0)
    leave(root, trash, age=0)
    tried = call_json(capsys, "prune", root, "--dry-run")
    assert (tried["leftovers_removed"], tried["leftovers_kept"]) == ([trash, dead], [live])
    assert (root / dead).exists()
    text = call(capsys, "prune", root)
    assert f"kept {live}: " in text
    assert [name for name in (dead, live, trash) if (root / name).exists()] == [live]
    leave(root, dead, age=2 * 3600)
    assert call_json(capsys, "prune", root, "--abandoned-after", 180)["leftovers_removed"] == []


def test_what_makes_no_sense_is_refused(root, tmp_path, capsys):
    assert "give keep_last as well" in call_error(capsys, "prune", root, "--keep-every", 2)
    assert "is not a directory" in call_error(capsys, "prune", tmp_path / "nothing")
    assert steps(root) == [0, 1, 2, 3, 4]


def test_in_memory_of_an_object_store(capsys):
    root = "memory://test_cli_prune"
    with CheckpointManager(root, async_save=False) as manager:
        for step in range(3):
            manager.save(step, state(step))
    assert json.loads(call(capsys, "prune", root, "--keep-last", 1, "--json"))["removed"] == [0, 1]
    assert CheckpointManager(root).steps() == [2]


def test_journals_of_work_in_parts_go_when_nothing_was_written_for_long(root, capsys):
    output = root / "export"
    options = {"num_tasks": 2, "max_file_bytes": 1000}
    step = next(path for path in root.iterdir() if path.name.startswith("step_"))
    first, second = tasks.consolidate(step, output, **options)
    first.run()
    (journal,) = root.glob(".export.parts-*")

    def prune_after(hours, *options):
        long_ago = time.time() - hours * 3600
        for path in (journal, *journal.rglob("*")):
            os.utime(path, (long_ago, long_ago))
        return call_json(capsys, "prune", root, *options, "--dry-run")["leftovers_removed"]

    # The other part may be in a queue.
    assert prune_after(0) == []
    assert prune_after(48) == []
    assert prune_after(2, "--abandoned-after", 60) == [journal.name]
    assert prune_after(170) == [journal.name]
    second.run()
    assert prune_after(0) == []
    assert prune_after(2) == [journal.name]
    assert call_json(capsys, "prune", root)["leftovers_removed"] == [journal.name]
    assert not journal.exists()
    assert output.exists()
