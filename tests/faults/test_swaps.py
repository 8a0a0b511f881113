"""A new directory takes the place of an earlier one: what happens in between, by chance or by other
programs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial

import pytest

import distckpt
from distckpt import CheckpointExistsError, CheckpointManager, CheckpointNotFoundError
from tests.support.calls import recorded, watched
from tests.support.harness import run
from tests.support.scenarios import (
    NEW,
    OLD,
    export,
    judge_checkpoint,
    judge_export,
    judge_export_over_another,
    old_checkpoint,
    save,
    save_without_exchange,
    scenario_state,
    source_and_old_export,
    two_steps,
    verdict_on,
    without_exchange,
)


@pytest.fixture(params=["exchange", "two renames"])
def kind_of_swap(request):
    with contextlib.nullcontext() if request.param == "exchange" else without_exchange():
        yield


@pytest.mark.usefixtures("kind_of_swap")
def test_files_that_others_put_into_an_export_meanwhile_stay(tmp_path):
    """New files, deep down as well, and new versions of those that were there."""
    source_and_old_export(tmp_path)
    folder = tmp_path / "export"
    done = []

    def on_call(call, moment):
        if call.name in ("rename", "renameat2") and moment == "before" and not done:
            done.append(call)
            (folder / "come.txt").write_text("come")
            (folder / "notes" / "deep" / "come.txt").write_text("come")
            (folder / "other.txt").write_text("changed")
            os.replace(folder / "other.txt", folder / "changed.txt")

    (folder / "changed.txt").write_text("first")
    with watched(tmp_path, on_call):
        export(tmp_path, 0, 1, overwrite=True)
    assert len(done) == 1
    assert judge_export_over_another(tmp_path) == "new"
    assert (
        (folder / "come.txt").read_text()
        == (folder / "notes" / "deep" / "come.txt").read_text()
        == "come"
    )
    assert (folder / "changed.txt").read_text() == "changed"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def lose_name(path):
    """Leave a directory as an overwrite does that is interrupted between two renames."""
    aside = path.with_name(f".{path.name}.old-0123456789abcdef")
    path.rename(aside)
    return aside


def test_a_checkpoint_without_its_name_is_found_again(tmp_path, caplog):
    old_checkpoint(tmp_path)
    path = tmp_path / "checkpoint"
    aside = lose_name(path)
    with pytest.raises(CheckpointNotFoundError, match=str(aside)):
        distckpt.load({}, path)
    with pytest.raises(CheckpointNotFoundError, match=str(aside)):
        distckpt.verify(path)
    # It counts as there: it is not replaced unasked.
    with pytest.raises(CheckpointExistsError):
        save(tmp_path, 0, 1)
    assert f"{path} was interrupted" in caplog.text
    assert judge_checkpoint(tmp_path) == "old"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_export_without_its_name_is_not_replaced_unasked(tmp_path):
    source_and_old_export(tmp_path)
    lose_name(tmp_path / "export")
    with pytest.raises(CheckpointExistsError):
        export(tmp_path, 0, 1)
    assert judge_export_over_another(tmp_path) == "old"


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_without_its_name_is_not_lost(step, tmp_path):
    """Readers are told; whoever saves gives it its name back."""
    two_steps(tmp_path)
    aside = lose_name(tmp_path / "step_00000002")
    with CheckpointManager(tmp_path, async_save=False) as manager:
        assert manager.latest() == 1
        assert aside.name in manager.skipped[2]
        assert aside.exists(), "looking changes nothing"
        if step == 2:
            with pytest.raises(CheckpointExistsError):
                manager.save(2, scenario_state(NEW))
        else:
            manager.save(3, scenario_state(NEW))
        assert manager.steps() == [1, *range(2, step + 1)]
    assert not aside.exists()
    assert verdict_on(tmp_path / "step_00000002") == "old"


def test_an_overwritten_step_leaves_nothing(tmp_path):
    """A crash just after the second rename: the step is there, and what it has replaced."""
    two_steps(tmp_path)
    aside = lose_name(tmp_path / "step_00000002")
    shutil.copytree(aside, tmp_path / "step_00000002")
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(3, scenario_state(NEW))
    assert not aside.exists()
    assert verdict_on(tmp_path / "step_00000002") == "old"


def save_unasked(folder):
    """Takes the overwrite for an interrupted one, and undoes it."""
    with pytest.raises(CheckpointExistsError):
        distckpt.save(scenario_state(OLD), folder / "checkpoint")


def overwrite_too(folder):
    distckpt.save(scenario_state(OLD), folder / "checkpoint", overwrite=True)


def finish_a_save(folder):
    """Has found nothing at the target, and commits."""
    (folder / "other").rename(folder / "checkpoint")


def in_another_program(rank, other, folder):
    other(folder)


@pytest.mark.parametrize(
    "other", [save_unasked, overwrite_too, finish_a_save], ids=lambda case: case.__name__
)
def test_another_program_comes_between_two_renames(other, tmp_path):
    """The overwrite goes on all the same: it replaces what is there then."""
    old_checkpoint(tmp_path)
    distckpt.save(scenario_state(OLD), tmp_path / "other")
    done = []

    def on_call(call, moment):
        if (
            call.name == "rename"
            and moment == "after"
            and call.paths[0] == "checkpoint"
            and not done
        ):
            done.append(call)
            run(in_another_program, 1, other, tmp_path, backend=None)

    with without_exchange(), watched(tmp_path, on_call):
        save(tmp_path, 0, 1, overwrite=True)
    assert len(done) == 1
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    assert judge_checkpoint(tmp_path) == "new"
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("save", [save, save_without_exchange])
def test_what_is_overwritten_is_removed_at_any_moment(save, tmp_path):
    """By a job that keeps few steps, say: it is not there to be replaced, which is no error."""
    overwrite = save if save is save_without_exchange else partial(save, overwrite=True)
    old_checkpoint(tmp_path)
    with recorded(tmp_path) as calls:
        overwrite(tmp_path, 0, 1)
    about_it = [call.number for call in calls if "checkpoint" in call.paths]
    committed = next(call.number for call in calls if call.name.startswith("rename"))
    for number in about_it[: about_it.index(committed) + 1]:

        def on_call(call, moment, number=number):
            if call.number == number and moment == "before":
                shutil.rmtree(tmp_path / "checkpoint")

        with watched(tmp_path, on_call):
            overwrite(tmp_path, 0, 1)
        assert judge_checkpoint(tmp_path) == "new", calls[number - 1]
        assert os.listdir(tmp_path) == ["checkpoint"]


def test_the_export_that_another_one_replaces_is_removed_at_any_moment(tmp_path):
    """With the files of others in it: the new export is there without them."""
    prepared, folder = tmp_path / "prepared", tmp_path / "folder"
    prepared.mkdir()
    source_and_old_export(prepared)
    shutil.copytree(prepared, folder)
    with recorded(folder) as calls:
        export(folder, 0, 1, overwrite=True)
    # The swap, or the name that the new export gets where none is to be replaced any more.
    committed = next(
        call.number for call in calls if call.name.startswith("rename") and "export" in call.paths
    )
    about_it = [
        call.number
        for call in calls[:committed]
        if any(path.partition("/")[0] == "export" for path in call.paths)
    ]
    for number in about_it:
        shutil.rmtree(folder)
        shutil.copytree(prepared, folder)

        def on_call(call, moment, number=number):
            if call.number == number and moment == "before":
                shutil.rmtree(folder / "export")

        with watched(folder, on_call):
            export(folder, 0, 1, overwrite=True)
        assert judge_export(folder) == "new", calls[number - 1]
        assert sorted(os.listdir(folder)) == sorted(os.listdir(prepared)), calls[number - 1]


def save_beside(rank, folder):
    with CheckpointManager(folder, async_save=False) as manager:
        manager.save(4, scenario_state(NEW))


def test_a_step_that_is_removed_while_another_job_saves_stays_removed(tmp_path):
    """The other manager takes what is being removed for what an interrupted overwrite has left, and
    gives it its name back.
    """
    two_steps(tmp_path)
    done = []

    def on_call(call, moment):
        if call.name == "rename" and moment == "after" and "step_00000001" in call.paths:
            if not done:
                run(save_beside, 1, tmp_path, backend=None)
            done.append(call)

    with (
        watched(tmp_path, on_call),
        CheckpointManager(tmp_path, keep_last=1, async_save=False) as manager,
    ):
        manager.save(3, scenario_state(NEW))
    assert len(done) > 1, "it was put back, and removed again"
    assert CheckpointManager(tmp_path).steps() == [3, 4]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
