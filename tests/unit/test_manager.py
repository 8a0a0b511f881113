"""The checkpoint manager in one process: the newest complete step, retention, and what is left
alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointManager,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    PreemptionGuard,
    ShardedTensor,
    UnsupportedObjectError,
)
from distckpt.megatron.core import read_marker, write_marker
from tests.support.cli_command import call
from tests.support.disk import flip, tree_of
from tests.support.disks import immutable, mounted_read_only
from tests.support.hooked_store import hooked_reads
from tests.support.other_program import as_another_program
from tests.support.states import state_of, value_of

pytestmark = pytest.mark.usefixtures("no_saves_left")

PATIENCE = 200.0


def names_in(root):
    return sorted(os.listdir(root))


def directories_in(root):
    return [name for name in names_in(root) if (root / name).is_dir()]


def save_steps(root, steps, **settings):
    with CheckpointManager(root, **settings) as manager:
        for step in steps:
            manager.save(step, state_of(step)).result(PATIENCE)


# --- Saving and loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
def test_steps_come_back(async_save, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    with CheckpointManager(root, async_save=async_save) as manager:
        assert (manager.latest(), manager.steps()) == (None, [])
        with pytest.raises(CheckpointNotFoundError, match="No step in"):
            manager.load(state_of(-1))
        for step in (5, 100, 123456784):
            state = state_of(step)
            handle = manager.save(step, state)
            state["rows"].data.fill_(-1)
            assert async_save or handle.done()
        # Loading waits for what is on its way.
        assert value_of(manager.load(state_of(-1))) == 123456784
        assert value_of(manager.load(state_of(-1), 5)) == 5
        assert (manager.latest(), manager.steps(), manager.skipped) == (
            123456784,
            [5, 100, 123456784],
            {},
        )
        assert manager.location(5) == str(root / "step_00000005")
    assert names_in(root) == [
        "latest_checkpointed_iteration.txt",
        "step_00000005",
        "step_00000100",
        "step_123456784",
    ]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "123456784"
    assert distckpt.load(state_of(-1), root / "step_00000100")["value"] == 100


def test_arguments_are_passed_on(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1), content_metadata={"kind": "test"}).result(PATIENCE)
        assert distckpt.open(manager.location(1)).metadata == {"kind": "test"}
        reports = []
        loaded = manager.load(
            {"x": state_of(0)["rows"]}, 1, strict="report", on_report=reports.append
        )
    assert loaded["value"] == 1
    assert (reports[0].missing, reports[0].unexpected) == ({"rng", "shared"}, set())


def test_an_option_that_there_is_not_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"no option 'tiemout' \(did you mean 'timeout'"):
        CheckpointManager(tmp_path, tiemout=1.0)
    manager = CheckpointManager(tmp_path, options=distckpt.SaveOptions(durable=False))
    with pytest.raises(TypeError, match=r"load\(\) has no option 'verfy' \(did you mean 'verify'"):
        manager.load({}, verfy=False)


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", None])
def test_steps_are_numbers(step, tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="integer from 0"):
        manager.save(step, {})


def test_a_step_that_is_there(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, state_of(3)).result(PATIENCE)
        with pytest.raises(CheckpointExistsError):
            manager.save(3, state_of(4))
        manager.save(3, state_of(5), overwrite=True).result(PATIENCE)
        assert value_of(manager.load(state_of(-1))) == 5


def test_a_root_that_is_a_checkpoint(tmp_path):
    """A job that is given the step to go on from, instead of its root, must not begin anew."""
    CheckpointManager(tmp_path, async_save=False).save(1, state_of(1))
    manager = CheckpointManager(tmp_path / "step_00000001", async_save=False)
    before = tree_of(tmp_path)
    calls = [manager.steps, manager.latest, lambda: manager.load({}), lambda: manager.save(2, {})]
    for refused in calls:
        with pytest.raises(CheckpointingException, match="give the directory above"):
            refused()
    assert tree_of(tmp_path) == before


def test_a_closed_manager(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    manager.close()
    manager.close()
    assert (tmp_path / "step_00000001" / "metadata.json").exists()
    with pytest.raises(CheckpointingException, match="closed"):
        manager.save(2, state_of(2))


def in_the_way(root, step):
    """Make the background save of a step fail when it is committed."""
    (root / f"step_{step:08d}").write_text("a file")


def test_wait_raises_what_nobody_has_asked_for_once(tmp_path):
    manager = CheckpointManager(tmp_path)
    gate = threading.Event()
    first = distckpt.async_save(
        state_of(0), tmp_path / "step_00000000", progress=lambda done, total: gate.wait(PATIENCE)
    )
    manager.save(1, state_of(1))
    in_the_way(tmp_path, 1)
    gate.set()
    with pytest.raises(CheckpointExistsError, match="is a file"):
        manager.wait()
    manager.wait()
    first.result(PATIENCE)
    manager.save(2, state_of(2)).result(PATIENCE)
    manager.close()
    assert manager.steps() == [0, 2]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_job_that_goes_on_without_a_checkpoint(async_save, tmp_path, caplog):
    in_the_way(tmp_path, 1)
    settings = {"async_save": async_save, "on_failure": "log", "unsupported": "raise"}
    with CheckpointManager(tmp_path, **settings) as manager:
        handle = manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        manager.save(3, state_of(3)).result(PATIENCE)
        assert list(manager.failures) == [1]
        assert "is a file" in manager.failures[1]
        assert "is a file" in caplog.text
        with pytest.raises(CheckpointExistsError, match="is a file"):
            handle.result(PATIENCE)
        manager.wait()
        for step, state, error in (
            (-1, {}, ValueError),
            (4, {"x": object()}, UnsupportedObjectError),
        ):
            with pytest.raises(error):
                manager.save(step, state)
        assert manager.steps() == [2, 3]
    with pytest.raises(ValueError, match="on_failure"):
        CheckpointManager(tmp_path, on_failure="ignore")


def test_a_failure_in_the_background_is_logged_when_the_job_goes_on(tmp_path):
    gate = threading.Event()
    with CheckpointManager(tmp_path, on_failure="log") as manager:
        distckpt.async_save(
            state_of(0),
            tmp_path / "step_00000000",
            progress=lambda done, total: gate.wait(PATIENCE),
        )
        manager.save(1, state_of(1))
        in_the_way(tmp_path, 1)
        gate.set()
        manager.wait()
        assert "is a file" in manager.failures[1]
        manager.save(2, state_of(2)).result(PATIENCE)
        manager.wait()
        assert manager.steps() == [0, 2]


def test_an_error_in_the_block_is_not_replaced(tmp_path):
    gate = threading.Event()
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path) as manager:  # noqa: PT012
        distckpt.async_save(
            state_of(0),
            tmp_path / "step_00000000",
            progress=lambda done, total: gate.wait(PATIENCE),
        )
        manager.save(1, state_of(1))
        in_the_way(tmp_path, 1)
        gate.set()
        1 / 0  # noqa: B018


# --- The newest complete step among broken ones ---------------------------------------------------


def shard_file(step_directory):
    (file,) = (step_directory / "tensors").iterdir()
    return file


def cut_file(path):
    with open(shard_file(path), "r+b") as file:
        file.truncate(5000)


def missing_file(path):
    shard_file(path).unlink()


def longer_file(path):
    with open(shard_file(path), "ab") as file:
        file.write(b"x")


def changed_header(path):
    with open(shard_file(path), "r+b") as file:
        file.seek(20)
        file.write(b"?")


def no_marker(path):
    (path / "metadata.json").unlink()


def empty_marker(path):
    (path / "metadata.json").write_bytes(b"")


def marker_of_zeros(path):
    content = (path / "metadata.json").read_bytes()
    (path / "metadata.json").write_bytes(bytes(len(content)))


def marker_is_a_list(path):
    (path / "metadata.json").write_text("[]")


def marker_is_a_directory(path):
    (path / "metadata.json").unlink()
    (path / "metadata.json").mkdir()


def newer_format(path):
    write_marker(path, {**read_marker(path), "format_version": 99, "min_reader_version": 99})


def no_manifest(path):
    (path / "manifest.safetensors").unlink()


def changed_manifest(path):
    flip((path / "manifest.safetensors"), -1)


def no_tensors(path):
    shutil.rmtree(path / "tensors")


def empty_directory(path):
    shutil.rmtree(path)
    path.mkdir()


def a_file(path):
    shutil.rmtree(path)
    path.write_text("")


def a_dangling_link(path):
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def another_step(path):
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_00000001"), path)


BREAKAGES = {
    cut_file: "cut off",
    missing_file: "missing",
    longer_file: "extended",
    changed_header: "header",
    no_marker: "no metadata.json",
    empty_marker: "not valid JSON",
    marker_of_zeros: "not valid JSON",
    marker_is_a_list: "JSON object",
    marker_is_a_directory: "is no file",
    newer_format: "99",
    no_manifest: "manifest",
    changed_manifest: "manifest",
    no_tensors: "missing",
    empty_directory: "no metadata.json",
    a_file: "it is a file",
    a_dangling_link: "leads nowhere",
    another_step: "says that this is step 1",
}


def test_a_zoo_of_broken_steps(tmp_path, caplog):
    steps = list(range(len(BREAKAGES) + 2))
    save_steps(tmp_path, steps, durable=False)
    for step, damage in enumerate(BREAKAGES, start=2):
        damage(tmp_path / f"step_{step:08d}")
    for name in (
        "step_99999999.bak",
        "step_5",
        "step_000000099",
        "step_-0000001",
        "tmp_00000999",
        ".step_00000777.tmp-x",
    ):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    before = tree_of(tmp_path)
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 1
    assert list(manager.skipped) == steps[:1:-1]
    for step, words in enumerate(BREAKAGES.values(), start=2):
        assert words in manager.skipped[step], (step, manager.skipped[step])
        assert f"step {step} in {tmp_path} is passed over" in caplog.text
    assert value_of(manager.load(state_of(-1))) == 1
    assert tree_of(tmp_path) == before
    for step in (0, 1):
        cut_file(tmp_path / f"step_{step:08d}")
    assert manager.latest() is None
    with pytest.raises(CheckpointNotFoundError, match=r"1: .*cut off"):
        manager.load(state_of(-1))


def damage_data(path):
    """Flip a bit that shows only when the data is read."""
    with open(shard_file(path), "r+b") as file:
        file.seek(-4, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-4, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_a_step_that_does_not_load_is_passed_over(tmp_path, caplog):
    save_steps(tmp_path, [1, 2, 3, 4])
    for step in (2, 4):
        damage_data(tmp_path / f"step_{step:08d}")
    no_marker(tmp_path / "step_00000003")
    manager = CheckpointManager(tmp_path)
    assert (manager.latest(), manager.skipped) == (4, {})
    assert value_of(manager.load(state_of(-1))) == 1
    assert list(manager.skipped) == [4, 3, 2]
    for step, words in {4: "shard-00001", 3: "no metadata.json", 2: "shard-00001"}.items():
        assert words in manager.skipped[step]
        assert caplog.text.count(f"step {step} in {tmp_path} is passed over") == 1
    with pytest.raises(CorruptCheckpointError, match="step_00000004"):
        manager.load(state_of(-1), 4)
    damage_data(tmp_path / "step_00000001")
    with pytest.raises(
        CheckpointNotFoundError, match=r"is undefined(.|\n)* 4: Corrupt(.|\n)* 1: Corrupt"
    ):
        manager.load(state_of(-1))


def test_a_step_that_does_not_fit_or_is_not_at_fault_is_not_passed_over(tmp_path):
    save_steps(tmp_path, [1, 2])
    manager = CheckpointManager(tmp_path)
    with pytest.raises(LoadMismatchError):
        manager.load(state_of(-1, num_rows=7))
    with pytest.raises(LoadMismatchError):
        manager.load({"x": ShardedTensor.from_rank_offsets("x", torch.zeros(3))})

    def progress(num_bytes, total_bytes):
        raise FileNotFoundError(2, "No such file", "/my/own/file")

    with pytest.raises(FileNotFoundError):
        manager.load(state_of(-1), progress=progress)
    assert manager.skipped == {}


def test_a_damaged_step_does_not_stop_a_run_that_comes_to_it_again(tmp_path, caplog):
    save_steps(tmp_path, [1, 2])
    cut_file(tmp_path / "step_00000002")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() == 1
        manager.save(2, state_of(2)).result(PATIENCE)
        assert manager.latest() == 2
        assert value_of(manager.load(state_of(-1))) == 2
    (aside,) = [name for name in names_in(tmp_path) if name.startswith(".")]
    assert aside.startswith(".step_00000002.damaged-")
    assert "is incomplete" in caplog.text


def test_checkpoints_that_no_manager_saved_can_be_the_latest(tmp_path):
    distckpt.save(state_of(7), tmp_path / "step_00000007")
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 7
    assert value_of(manager.load(state_of(-1))) == 7


# --- Retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1}, [6]),
        ({"keep_last": 3}, [4, 5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [0, 3, 6]),
        ({"keep_last": 1, "keep": lambda step: step in (1, 4)}, [1, 4, 6]),
        ({"keep_last": 1, "best_metric": "loss"}, [2, 6]),
        ({"keep_last": 1, "best_metric": "loss", "best_mode": "max", "keep_best": 2}, [0, 4, 6]),
    ],
)
def test_what_is_kept(settings, kept, tmp_path):
    losses = [9, 2, float("nan"), 3, 8, 1, 4]
    losses[2], losses[5] = 1, float("nan")
    with CheckpointManager(tmp_path, durable=False, **settings) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, state_of(step), metrics={"loss": loss})
        manager.wait()
        assert manager.steps() == kept
        assert directories_in(tmp_path) == [f"step_{step:08d}" for step in kept]


def test_a_best_metric_that_no_save_has_given_is_an_error(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1, best_metric="los", async_save=False) as manager:
        # Nothing is measured yet.
        for step in (0, 1):
            manager.save(step, state_of(step))
        assert manager.steps() == [1]
        with pytest.raises(
            ValueError, match=r"best_metric 'los', only \['loss'\] \(did you mean 'loss'\?\)"
        ):
            manager.save(2, state_of(2), metrics={"loss": 1.0})
        manager.save(2, state_of(2), metrics={"loss": 1.0, "los": float("nan")})
        manager.save(3, state_of(3), metrics={"loss": 1.0})
    assert CheckpointManager(tmp_path).steps() == [1, 2, 3]


def test_steps_whose_best_is_not_known_stay(tmp_path, caplog):
    losses = {0: 1.0, 1: 3.0, 2: 2.0}
    with CheckpointManager(tmp_path, async_save=False) as manager:
        for step, loss in losses.items():
            manager.save(step, state_of(step), metrics={"loss": loss})
    with CheckpointManager(tmp_path, keep_last=1, best_metric="los", async_save=False) as manager:
        manager.save(3, state_of(3))
        assert manager.steps() == [0, 1, 2, 3]
    assert "no step has the best_metric 'los', only ['loss'] (did you mean 'loss'?)" in caplog.text
    save_steps(tmp_path, [4], keep_last=1, best_metric="loss")
    assert CheckpointManager(tmp_path).steps() == [0, 4]


@pytest.mark.parametrize("odd", [10**400, "low", None, float("nan"), [1]], ids=str)
def test_a_step_with_odd_metrics_stays_and_stops_nothing(odd, tmp_path, caplog, capsys):
    with CheckpointManager(tmp_path, async_save=False) as manager:
        for step in range(3):
            manager.save(step, state_of(step), metrics={"loss": 3.0 - step})
    marker = read_marker(tmp_path / "step_00000001")
    marker["manager"]["metrics"] = odd if odd == [1] else {"loss": odd}
    write_marker(tmp_path / "step_00000001", marker)
    save_steps(tmp_path, [3], keep_last=1, best_metric="loss")
    assert CheckpointManager(tmp_path).steps() == [1, 2, 3]
    assert "step 1 in" in caplog.text
    assert "is not removed" in caplog.text
    call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert CheckpointManager(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("metric", ["much", None, [1.0]])
def test_metrics_are_numbers(metric, tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(TypeError, match="'loss' is no number"),
    ):
        manager.save(1, state_of(1), metrics={"loss": metric})


def test_numbers_of_other_libraries_are_metrics(tmp_path):
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(
            1,
            state_of(1),
            metrics={"a": np.float32(0.5), "b": torch.tensor(2), "c": 10**400, "d": float("inf")},
        )
    assert read_marker(tmp_path / "step_00000001")["manager"]["metrics"] == {"a": 0.5, "b": 2.0}


def test_a_step_that_cannot_be_removed_stops_nothing(tmp_path, caplog, capsys):
    save_steps(tmp_path, [1, 2, 3])
    with immutable(tmp_path / "step_00000001"):
        with CheckpointManager(tmp_path, keep_last=1, async_save=False) as manager:
            manager.save(4, state_of(4))
            assert manager.steps() == [1, 4]
            assert list(manager.not_removed) == [1]
            manager.save(5, state_of(5))
        assert CheckpointManager(tmp_path).steps() == [1, 5]
        assert "step 1 cannot be removed" in caplog.text
        save_steps(tmp_path, [6])
        text = call(capsys, "prune", tmp_path, "--keep-last", 1, code=1)
        assert "cannot remove step_00000001: " in text
        assert "removed step_00000005" in text
    save_steps(tmp_path, [7], keep_last=1)
    assert CheckpointManager(tmp_path).steps() == [7]


def test_pinned_steps_stay_for_later_managers(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1, state_of(1), pinned=True)
        manager.save(2, state_of(2), metrics={"loss": 0.5})
    with CheckpointManager(tmp_path, keep_last=1, best_metric="loss") as manager:
        for step in (3, 4):
            manager.save(step, state_of(step), metrics={"loss": 1.5})
        manager.wait()
        assert manager.steps() == [1, 2, 4]
        assert value_of(manager.load(state_of(-1), 1)) == 1


def test_only_whole_steps_count(tmp_path):
    save_steps(tmp_path, [1, 2, 3])
    cut_file(tmp_path / "step_00000003")
    save_steps(tmp_path, [4], keep_last=2)
    # What is not whole may be repaired, or be readable tomorrow: it goes when enough whole ones are
    # newer.
    assert directories_in(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]
    save_steps(tmp_path, [5], keep_last=2)
    assert directories_in(tmp_path) == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize(
    ("keep_last", "kept"),
    [(1, [5, 50]), (2, [5, 40, 50]), (3, [5, 30, 40, 50]), (9, [5, 10, 20, 30, 40, 50])],
)
def test_after_going_back_the_new_step_stays_beside_the_newest(keep_last, kept, tmp_path, capsys):
    with CheckpointManager(tmp_path, keep_last=keep_last, async_save=False) as manager:
        for step in (10, 20, 30, 40, 50, 5):
            manager.save(step, state_of(step))
        assert manager.steps() == kept
        # The tracker file names the step that was saved last.
        text = call(capsys, "prune", tmp_path, "--keep-last", 1)
        assert "removed step_00000050" not in text
        assert manager.steps() == [5, 50]
        manager.save(6, state_of(6))
        assert manager.steps() == ([6, 50] if keep_last == 1 else [5, 6, 50][-keep_last:])
    assert value_of(distckpt.load(state_of(-1), tmp_path / "step_00000050")) == 50


def test_after_going_back_beside_another_job_all_newest_stay(tmp_path):
    """Steps that another job commits meanwhile are counted, and neither job removes the newest."""
    with CheckpointManager(tmp_path, keep_last=2, async_save=False) as ahead:
        for step in (10, 20, 30):
            ahead.save(step, state_of(step))
        with CheckpointManager(tmp_path, keep_last=2, async_save=False) as behind:
            for step in (5, 6):
                behind.save(step, state_of(step))
                assert behind.steps() == [step, 20, 30]
            ahead.save(40, state_of(40))
            # What the other job saved since this one began is not its own to remove.
            assert ahead.steps() == [6, 30, 40]
            behind.save(7, state_of(7))
            assert behind.steps() == [7, 30, 40]


def test_newer_steps_are_named_once_after_going_back(tmp_path, caplog):
    save_steps(tmp_path, [10, 20, 30])
    assert "beside newer steps" not in caplog.text
    save_steps(tmp_path, [15, 16, 40, 41])
    assert caplog.text.count("step 15 is saved to") == caplog.text.count("beside newer steps") == 1
    assert "beside newer steps [20, 30], of which a restart loads the newest" in caplog.text
    assert f"remove those ({tmp_path / 'step_00000020'}" in caplog.text


def test_what_others_have_put_there_is_left_alone(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save_steps(root, [1, 2])
    distckpt.save(state_of(3), root / "step_00000003")
    (root / "step_00000004").mkdir()
    (root / "step_00000004" / "notes.txt").write_text("mine")
    save_steps(elsewhere, [5])
    (root / "step_00000005").symlink_to(elsewhere / "step_00000005")
    for name in (
        "step_6",
        ".step_00000001.tmp-mine",
        ".step_00000001.damaged-0123456784abcdef",
        "export",
        ".hidden",
    ):
        shutil.copytree(root / "step_00000001", root / name)
    (root / "step_00000007").write_text("a file")
    before = tree_of(root)
    save_steps(root, [8], keep_last=1)
    after = tree_of(root)
    gone = {name.partition("/")[0] for name in before if name not in after}
    assert gone == {"step_00000001", "step_00000002"}
    assert (root / "step_00000005" / "metadata.json").exists()
    changed = {name for name in before if name in after and after[name] != before[name]}
    assert changed == {"latest_checkpointed_iteration.txt"}


def test_leftovers_of_interrupted_saves_and_removals_are_cleared(tmp_path):
    save_steps(tmp_path, [1])
    of_another_machine = ".step_00000002.tmp-0123456784abcdef"
    for name in (of_another_machine, ".step_00000001.trash-0123456784abcdef"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    # What is unchanged since a look this long ago is taken for abandoned.
    manager = CheckpointManager(tmp_path, timeout=1e-9, async_save=False)
    assert manager.latest() == 1
    assert len(directories_in(tmp_path)) == 3
    manager.save(3, state_of(3))
    assert directories_in(tmp_path) == [of_another_machine, "step_00000001", "step_00000003"]
    (tmp_path / of_another_machine / "tensors" / "more").write_text("it goes on")
    manager.save(4, state_of(4))
    assert directories_in(tmp_path)[0] == of_another_machine
    manager.save(5, state_of(5))
    assert directories_in(tmp_path) == [f"step_{step:08d}" for step in (1, 3, 4, 5)]


def test_the_directory_of_a_running_save_is_no_leftover(tmp_path, capsys):
    started, gate = threading.Event(), threading.Event()

    def progress(num_bytes, total_bytes):
        started.set()
        assert gate.wait(PATIENCE)

    handle = distckpt.async_save(state_of(2), tmp_path / "step_00000002", progress=progress)
    assert started.wait(PATIENCE)
    (staging,) = tmp_path.glob(".step_00000002.tmp-*")
    # Of a machine whose clock is wrong by decades.
    os.utime(staging, (0, 0))
    manager = CheckpointManager(tmp_path, timeout=1e-9, async_save=False)
    for step in (3, 4, 5):
        manager.save(step, state_of(step))
    assert "may still be writing it" in call(capsys, "prune", tmp_path, "--abandoned-after", 1)
    gate.set()
    handle.result(PATIENCE)
    assert value_of(manager.load(state_of(-1), 2)) == 2


def test_steps_that_another_manager_has_saved_meanwhile_stay(tmp_path):
    save_steps(tmp_path, [10])
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        assert value_of(manager.load(state_of(-1), 10)) == 10
        save_steps(tmp_path, [5, 20])
        with CheckpointManager(tmp_path) as other:
            other.save(10, state_of(11), overwrite=True).result(PATIENCE)
        manager.save(30, state_of(30)).result(PATIENCE)
        manager.save(40, state_of(40)).result(PATIENCE)
        assert manager.steps() == [5, 10, 20, 40]
    save_steps(tmp_path, [50], keep_last=1)
    assert directories_in(tmp_path) == ["step_00000050"]


def test_a_directory_that_is_renamed_during_a_run(tmp_path, caplog):
    root = tmp_path / "run"
    with CheckpointManager(root, keep_last=1, async_save=False) as manager:
        manager.save(1, state_of(1))
        assert caplog.text == ""
        root.rename(tmp_path / "renamed")
        manager.save(2, state_of(2))
        assert f"step 1 is no longer in {root}, where it was saved" in caplog.text
        manager.save(3, state_of(3))
    assert caplog.text.count("renamed, replaced or removed") == 1
    assert directories_in(root) == ["step_00000003"]
    assert value_of(CheckpointManager(tmp_path / "renamed").load(state_of(-1))) == 1


@pytest.mark.parametrize("others", [[], [5, 6]], ids=["empty", "another run"])
def test_a_directory_that_is_replaced_during_a_run(tmp_path, caplog, others):
    root, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    save_steps(other, others)
    with CheckpointManager(root, async_save=False) as manager:
        manager.save(1, state_of(1))
        root.rename(tmp_path / "renamed")
        other.rename(root)
        manager.save(2, state_of(2))
    (warning,) = caplog.messages
    assert f"step 1 is no longer in {root}, where it was saved" in warning
    assert CheckpointManager(root).steps() == [2, *others]


def test_steps_that_go_in_other_ways_are_no_replaced_directory(tmp_path, caplog):
    root = tmp_path / "run"
    with CheckpointManager(root, async_save=False) as manager, CheckpointManager(root) as other:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        # Going back, as the warning about newer steps says.
        shutil.rmtree(manager.location(3))
        manager.save(3, state_of(3))
        # The retention of another job, or a person.
        other.save(4, state_of(4)).result(PATIENCE)
        shutil.rmtree(manager.location(3))
        manager.save(5, state_of(5))
        # Another disk, with a link in the place of the directory.
        root.rename(tmp_path / "elsewhere")
        root.symlink_to("elsewhere")
        manager.save(6, state_of(6))
    assert caplog.messages == []
    assert CheckpointManager(tmp_path / "elsewhere").steps() == [1, 2, 4, 5, 6]


def test_a_link_to_the_directory_that_leads_elsewhere_during_a_run(tmp_path, caplog):
    for name in ("old disk", "new disk"):
        (tmp_path / name).mkdir()
    link = tmp_path / "run"
    link.symlink_to("old disk")
    with CheckpointManager(link, async_save=False) as manager:
        manager.save(1, state_of(1))
        assert caplog.text == ""
        link.unlink()
        link.symlink_to("new disk")
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
    (warning,) = caplog.messages
    assert f"{link} leads to {tmp_path / 'new disk'} now" in warning
    assert f"goes on in {tmp_path / 'old disk'}" in warning
    assert directories_in(tmp_path / "old disk") == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert directories_in(tmp_path / "new disk") == []


def test_steps_on_a_read_only_file_system_say_so(tmp_path, capsys):
    root = tmp_path / "run"
    save_steps(root, [1, 2])
    with mounted_read_only(root):
        manager = CheckpointManager(root, keep_last=1, async_save=False)
        assert value_of(manager.load(state_of(-1))) == 2
        with pytest.raises(OSError, match="Read-only file system"):
            manager.save(3, state_of(3))
        text = call(capsys, "prune", root, "--keep-last", 1, code=1)
        assert "cannot remove step_00000001: OSError: [Errno 30] Read-only file system" in text
    save_steps(root, [3], keep_last=1)
    assert directories_in(root) == ["step_00000003"]


def test_a_predicate_that_fails_removes_nothing(tmp_path, caplog):
    def keep(step):
        raise KeyError("no such step")

    save_steps(tmp_path, [1, 2], keep_last=1, keep=keep)
    assert directories_in(tmp_path) == ["step_00000001", "step_00000002"]
    assert "could not remove old checkpoints" in caplog.text


def test_directories_that_vanish_meanwhile(tmp_path):
    def keep(step):
        shutil.rmtree(tmp_path / "step_00000001", ignore_errors=True)
        return False

    save_steps(tmp_path, [1, 2])
    save_steps(tmp_path, [3], keep_last=1, keep=keep)
    assert directories_in(tmp_path) == ["step_00000003"]


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_last": 0},
        {"keep_last": 1.5},
        {"keep_last": "2"},
        {"keep_last": 1, "keep_every": 0},
        {"keep_last": True},
        {"keep_every": 5},
        {"keep_last": 1, "best_mode": "up"},
        {"keep_last": 1, "keep_best": 2},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": "60"},
        {"exit_timeout": -1.0},
    ],
    ids=repr,
)
def test_settings_that_make_no_sense(settings, tmp_path):
    with pytest.raises(
        ValueError, match=r"must be|keep_last|timeout is a number of seconds, above 0, got "
    ):
        CheckpointManager(tmp_path, **settings)


def test_a_reader_of_a_checkpoint_that_is_removed_is_told_so(tmp_path):
    save_steps(tmp_path, [1])

    def remove(path, start, stop):
        if path.endswith("manifest.safetensors"):
            as_another_program(save_steps, tmp_path, [2], keep_last=1)

    with (
        hooked_reads(remove),
        pytest.raises(CheckpointNotFoundError, match="was removed while it was being read"),
    ):
        distckpt.load(state_of(-1), f"hooked://{tmp_path}/step_00000001")
    assert directories_in(tmp_path) == ["step_00000002"]


def test_on_an_object_store():
    root = "memory://managed/run"
    with CheckpointManager(root, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        manager.wait()
        assert (manager.steps(), manager.latest()) == ([2, 3], 3)
        assert value_of(manager.load(state_of(-1), 2)) == 2


def test_removed_files_leave_no_folders_in_a_remote_file_system_that_has_them(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(fsspec.config.conf, "hooked", {"auto_mkdir": True})
    with CheckpointManager(f"hooked://{tmp_path}/run", keep_last=1, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    distckpt.save(state_of(3), f"hooked://{tmp_path}/run/step_00000002", overwrite=True)
    empty = [below for below, folders, files in os.walk(tmp_path) if not folders + files]
    assert empty == []
    assert directories_in(tmp_path / "run") == ["step_00000002"]


# --- Preemption -----------------------------------------------------------------------------------


def test_a_signal_is_noted_and_the_handler_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    saved: list[int] = []
    with PreemptionGuard() as guard, CheckpointManager(tmp_path) as manager:
        for step in range(10):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if guard.should_stop():
                manager.save(step, state_of(step)).result(PATIENCE)
                saved.append(step)
                break
    assert saved == [3]
    assert manager.latest() == 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert Path(manager.location(3)).is_dir()


@pytest.mark.parametrize("signals", [signal.SIGTERM, "SIGTERM", ["SIGTERM"], None])
def test_signals_are_listed(signals):
    with pytest.raises(TypeError, match=r"signals is a list such as \[signal.SIGTERM\], got "):
        PreemptionGuard(signals)


def test_a_signal_that_cannot_be_caught_leaves_the_handlers_of_the_others():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"):
        PreemptionGuard([signal.SIGTERM, signal.SIGKILL]).__enter__()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_is_noted_by_all_guards_around(tmp_path):
    with PreemptionGuard() as outer, PreemptionGuard() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert inner.should_stop()
        assert outer.should_stop()
    with pytest.raises(distckpt.CheckpointingException, match="in a `with` statement"):
        PreemptionGuard().should_stop()
