"""Another program removes a checkpoint while it is read: at each moment the reader gets all of it,
or is told that it was removed. Nobody is told that it is damaged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    ShardedObject,
    ShardedTensor,
    cli,
    dcp,
    hf,
    torch_dist,
)
from distckpt import megatron as dist_checkpointing
from distckpt.megatron import serialization
from tests.support.calls import watched
from tests.support.harness import error_of, run, sum_over_ranks
from tests.support.sampling import one_in
from tests.support.states import state_of, value_of

VALUES = {"a": torch.arange(12.0).view(3, 4), "b": torch.full((5,), 7.0)}
REMOVED = "was removed while it was being read"
ABSENT = "does not exist"


def state_dict(fill):
    tensors = {
        name: ShardedTensor.from_rank_offsets(name, value if fill else torch.zeros_like(value))
        for name, value in VALUES.items()
    }
    return {**tensors, "object": ShardedObject("object", fill and [1, 2], (1,), (0,)), "step": 3}


def check(tensors):
    assert tensors.keys() >= VALUES.keys()
    for name, value in VALUES.items():
        assert torch.equal(tensors[name], value)


# Each reader takes the checkpoint, a copy of it that stays, and a path for what it writes. It
# checks what it has read.


def load(path, other, out):
    loaded = distckpt.load(state_dict(False), path)
    check(loaded)
    assert loaded["object"] == [1, 2]
    assert loaded["step"] == 3


def load_plain_tensors(path, other, out):
    check(dist_checkpointing.load_plain_tensors(path))


def load_common_state_dict(path, other, out):
    assert dist_checkpointing.load_common_state_dict(path)["step"] == 3


def load_tensors_metadata(path, other, out):
    assert dist_checkpointing.load_tensors_metadata(path).keys() == VALUES.keys()


def load_sharded_metadata(path, other, out):
    assert len(serialization.load_sharded_metadata(path)) == 3


def open_and_read(path, other, out):
    checkpoint = distckpt.open(path)
    check(checkpoint.read_tensors())
    assert checkpoint.common_state["step"] == 3
    assert torch.equal(checkpoint.read("a", (slice(1, 2),)), VALUES["a"][1:2])


def read_tensors(path, other, out):
    check(distckpt.open(path).read_tensors())


def load_as_torch(path, other, out):
    state = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    dcp.load(state, checkpoint_id=path)
    check(state)


def verify(path, other, out):
    report = distckpt.verify(path)
    assert report.is_whole, report.problems


def verify_fast(path, other, out):
    report = distckpt.verify(path, "fast")
    assert report.is_whole, report.problems


def consolidate(path, other, out):
    distckpt.consolidate(path, out)
    check(load_file(f"{out}/model.safetensors"))


def consolidate_as_torch(path, other, out):
    hf.consolidate_safetensors_files(f"{path}/tensors", out)
    check(load_file(f"{out}/model.safetensors"))


def merge(path, other, out):
    distckpt.merge([other, path], out)
    check(load_file(f"{out}/model.safetensors"))


def diff(path, other, out):
    assert distckpt.diff(other, path).is_same


def reshard(path, other, out):
    distckpt.reshard(path, out, num_ranks=2)
    check(distckpt.open(out).read_tensors())


def export_for_torch(path, other, out):
    torch_dist.export(path, out)
    check(distckpt.open(out).read_tensors())


def command(*arguments):
    """Run the command line; raise the error that it prints."""

    def read(path, other, out):
        given = {"PATH": path, "OTHER": other, "OUT": out}
        code = cli.main([*(given.get(argument, argument) for argument in arguments), "--debug"])
        assert code == 0

    read.__name__ = "-".join(("command", *arguments))
    return read


READERS = [
    load,
    load_plain_tensors,
    load_common_state_dict,
    load_tensors_metadata,
    load_sharded_metadata,
    open_and_read,
    load_as_torch,
    verify,
    verify_fast,
    consolidate,
    consolidate_as_torch,
    merge,
    diff,
    reshard,
    export_for_torch,
    command("verify", "PATH"),
    command("stats", "PATH"),
    command("inspect", "PATH"),
    command("inspect", "PATH", "--html", "OUT"),
    command("cat", "PATH", "a"),
    command("cat", "PATH"),
    command("diff", "PATH", "OTHER"),
    command("diff", "PATH", "OTHER", "--html", "OUT"),
    command("consolidate", "PATH", "OUT", "--dry-run"),
]


OF_ALL_FORMATS = [read_tensors, verify, consolidate, diff, command("stats", "PATH")]


class Removal:
    """Removes a checkpoint before one of the calls that the file system gets for it."""

    def __init__(self, path, number):
        self.path, self.number = path, number
        self.is_done = False

    def __call__(self, call, moment):
        if moment == "before" and call.number == self.number:
            # As managers do: no name in it is there any more.
            self.is_done = True
            trash = f"{self.path}.trash{self.number}"
            os.rename(self.path, trash)
            # Some file systems keep the directory of an open file.
            shutil.rmtree(trash, ignore_errors=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    distckpt.save(state_dict(True), path)
    return path


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_at_each_moment(reader, saved, tmp_path):
    remove_at_each_moment(reader, saved, tmp_path)


def save_for_hugging_face(path):
    path.mkdir()
    save_file(VALUES, path / "model.safetensors")


def save_with_torch(path):
    torch.distributed.checkpoint.save(VALUES, checkpoint_id=path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [save_for_hugging_face, save_with_torch])
@pytest.mark.parametrize("reader", OF_ALL_FORMATS)
def test_other_formats(save, reader, tmp_path):
    save(tmp_path / "saved")
    remove_at_each_moment(reader, tmp_path / "saved", tmp_path)


def remove_at_each_moment(reader, saved, tmp_path):
    path, found = tmp_path / "checkpoint", set()
    for number in range(1, 1000):
        shutil.copytree(saved, path, dirs_exist_ok=True)
        removal, out = Removal(str(path), number), tmp_path / f"out{number}"
        with watched(path, removal):
            error = error_of(reader, str(path), str(saved), str(out))
        if not removal.is_done:
            break
        if error is not None:
            assert isinstance(error, CheckpointNotFoundError), (number, repr(error))
            assert REMOVED in str(error) or ABSENT in str(error), (number, str(error))
            assert not (out.exists() and any(out.iterdir())), f"{number}: something is left"
            found.add(REMOVED in str(error))
    assert error is None, "it reads what is left alone"
    assert True in found


# --- Managers -------------------------------------------------------------------------------------


def save_steps(root, *steps):
    with CheckpointManager(root, async_save=False, durable=False) as manager:
        for step in steps:
            manager.save(step, state_of(step, num_rows=4))


class Pruning:
    """Another job commits steps 16 and 18, and then removes 10 and 14, before one of the calls."""

    def __init__(self, root, new, number):
        self.root, self.new, self.number = root, new, number
        self.is_done = False

    def __call__(self, call, moment):
        if moment == "before" and call.number == self.number:
            self.is_done = True
            for step in (16, 18):
                (self.new / f"step_{step:08d}").rename(self.root / f"step_{step:08d}")
            for step in (10, 14):
                trash = self.root / f".step_{step:08d}.trash-0123456789abcdef"
                (self.root / f"step_{step:08d}").rename(trash)
                shutil.rmtree(trash, ignore_errors=True)


def load_newest(root):
    manager = CheckpointManager(root)
    return value_of(manager.load(state_of(-1, num_rows=4))), manager


def newest_listed(root):
    found = distckpt.list_checkpoints(root)
    assert [info.problem for info in found if info.problem] == []
    return max(info.step for info in found), CheckpointManager(root)


@pytest.mark.parametrize("look", [load_newest, newest_listed])
def test_steps_that_come_and_go_while_the_newest_is_looked_for(look, tmp_path):
    save_steps(tmp_path / "saved", 10, 12, 14)
    save_steps(tmp_path / "later", 16, 18)
    for number in range(1, 1000):
        root, new = tmp_path / f"run{number}", tmp_path / f"new{number}"
        # Files of a checkpoint are never changed, so links do for copies.
        shutil.copytree(tmp_path / "saved", root, copy_function=os.link)
        shutil.copytree(tmp_path / "later", new, copy_function=os.link)
        pruning = Pruning(root, new, number)
        with watched(root, pruning):
            newest, manager = look(root)
        if not pruning.is_done:
            break
        # What it began to read it may read to its end.
        assert newest in (14, 18), number
        for step, reason in manager.skipped.items():
            assert "removed" in reason, (number, step, reason)
            assert "not finished" not in reason, (number, step, reason)
        shutil.rmtree(root)
    assert newest == 14


class FailingOnce:
    """Storage that does not answer one of the calls, as network file systems do for a moment."""

    def __init__(self, number):
        self.number, self.is_done = number, False

    def __call__(self, call, moment):
        if moment == "before" and call.number == self.number:
            self.is_done = True
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), call.paths[0])


def test_no_older_step_is_loaded_because_storage_fails_for_a_moment(tmp_path):
    save_steps(tmp_path / "run", 10, 20)
    outcomes = set()
    for number in range(1, 1000):
        failing, newest = FailingOnce(number), None
        with watched(tmp_path / "run", failing), contextlib.suppress(OSError):
            newest, _ = load_newest(tmp_path / "run")
        assert newest in (None, 20), number
        outcomes.add(newest)
        if not failing.is_done:
            break
    assert newest == 20
    assert outcomes == {None, 20}, "where it cannot look again, the error is raised"


# --- Several ranks --------------------------------------------------------------------------------

CALLS = {
    "load": lambda rank, path, out: distckpt.load(
        {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(3, 2), (1, rank, 2))}, path
    ),
    "consolidate": lambda rank, path, out: distckpt.consolidate(path, out, max_file_bytes=20),
    "reshard": lambda rank, path, out: distckpt.reshard(path, out),
}


def read_together(rank, saved, folder, name, remover):
    """Remove the checkpoint before each call of one rank to the file system; return the errors."""
    path, errors = f"{folder}/checkpoint", []
    for number in range(1, 1000):
        if rank == 0:
            shutil.copytree(saved, path, dirs_exist_ok=True)
        sum_over_ranks(1)
        removal = Removal(path, number if rank == remover else 0)
        with watched(path, removal):
            error = error_of(CALLS[name], rank, path, f"{folder}/out{number}")
        # They are still in step.
        if not sum_over_ranks(removal.is_done):
            return errors, error
        errors.append(error)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("remover", one_in(2, [1, 0]))
def test_on_two_ranks(name, remover, saved, tmp_path):
    found = run(read_together, 2, str(saved), str(tmp_path), name, remover)
    for errors, last in found:
        assert last is None, "it reads what is left alone"
        for number, error in enumerate(errors, start=1):
            if error is not None:
                assert isinstance(error, CheckpointNotFoundError), (number, repr(error))
                assert REMOVED in str(error) or ABSENT in str(error), (number, str(error))
        assert any(REMOVED in str(error) for error in errors)
