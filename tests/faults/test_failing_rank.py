"""One rank fails in some phase of a save or load: all ranks learn which and why, and nothing is
lost.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    RankFailedError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    UnsupportedObjectError,
)
from distckpt.strategies.safetensors import SafetensorsLoadStrategy, SafetensorsSaveStrategy
from tests.support.disk import header_of, tree_of
from tests.support.disks import limited
from tests.support.harness import error_of, launched, run, sum_over_ranks

NUM_RANKS = 4
FAILING = 2
ROWS = 300
"""Rows of 1 KB per rank, much more than the size that LIMIT_BYTES lets a file have."""
LIMIT_BYTES = 64 << 10


def good_state(rank, value):
    rows = torch.full((ROWS, 256), float(value))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, NUM_RANKS)),
        "rng": ShardedObject("rng", {"value": value}, (NUM_RANKS,), (rank,)),
        "value": value,
    }


def loads_as(rank, path, value):
    """Tell whether the checkpoint holds what `good_state` with this value saved."""
    loaded = distckpt.load(good_state(rank, -1), path)
    return bool((loaded["rows"] == value).all()) and (loaded["rng"], loaded["value"]) == (
        {"value": value},
        value,
    )


def factory(build_error=None, merge_error=None, replica_id=0):
    """Return a factory whose functions raise what is given, if anything."""

    def build(key, data, replica_id, flattened_range):
        del flattened_range
        if build_error is not None:
            raise build_error
        return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)

    def merge(loaded):
        if merge_error is not None:
            raise merge_error
        return loaded

    return ShardedTensorFactory("fused", torch.ones(4), build, merge, replica_id)


class NotRegistered:
    """A type that checkpoints do not know."""


class RaisesBefore(SafetensorsSaveStrategy):
    def save(self, sharded_state_dict, checkpoint_dir):
        if torch.distributed.get_rank() == FAILING:
            raise RuntimeError("my strategy does not like rank 2")
        return super().save(sharded_state_dict, checkpoint_dir)


class RaisesAfter(SafetensorsSaveStrategy):
    def save(self, sharded_state_dict, checkpoint_dir):
        fields = super().save(sharded_state_dict, checkpoint_dir)
        if torch.distributed.get_rank() == FAILING:
            raise KeyError("lost on rank 2")
        return fields


def build_fn_raises(rank, path):
    error = ValueError("3 heads do not divide by 2") if rank == FAILING else None
    distckpt.save(
        {**good_state(rank, 5), "fused": factory(error, replica_id=rank)}, path, overwrite=True
    )


def preprocessing_raises(rank, path):
    def preprocess(common):
        if rank == FAILING:
            raise RuntimeError("no such entry on rank 2")
        return common

    distckpt.megatron.save(
        good_state(rank, 5),
        path,
        preprocess_common_before_consistancy_check=preprocess,
        overwrite=True,
    )


def unsupported_common_state(rank, path):
    state = {
        **good_state(rank, 5),
        "args": {"callback": NotRegistered() if rank == FAILING else None},
    }
    distckpt.save(state, path, overwrite=True)


def unsupported_object(rank, path):
    value = {"sampler": [0, NotRegistered()]} if rank == FAILING else None
    distckpt.save(
        {**good_state(rank, 5), "o": ShardedObject("loader", value, (4,), (rank,))},
        path,
        overwrite=True,
    )


def no_data(rank, path):
    shard = ShardedTensor.from_rank_offsets("empty", torch.ones(3), (0, rank, 4))
    distckpt.save(
        {"empty": shard.without_data() if rank == FAILING else shard}, path, overwrite=True
    )


def file_too_large(rank, path):
    with limited(resource.RLIMIT_FSIZE, LIMIT_BYTES if rank == FAILING else resource.RLIM_INFINITY):
        distckpt.save(good_state(rank, 5), path, overwrite=True)


class WithoutFiles(SafetensorsSaveStrategy):
    """Lets one rank open no more files."""

    def save(self, sharded_state_dict, checkpoint_dir):
        if torch.distributed.get_rank() != FAILING:
            return super().save(sharded_state_dict, checkpoint_dir)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        with limited(resource.RLIMIT_NOFILE, lowest_free):
            return super().save(sharded_state_dict, checkpoint_dir)


def too_many_open_files(rank, path):
    distckpt.save(good_state(rank, 5), path, strategy=WithoutFiles(), overwrite=True)


def strategy_raises_before(rank, path):
    distckpt.save(good_state(rank, 5), path, strategy=RaisesBefore(), overwrite=True)


def strategy_raises_after(rank, path):
    distckpt.save(good_state(rank, 5), path, strategy=RaisesAfter(), overwrite=True)


SAVES = {
    build_fn_raises: (
        CheckpointingException,
        ["flatten the state dict", "3 heads do not divide by 2"],
    ),
    preprocessing_raises: (RuntimeError, ["no such entry on rank 2"]),
    unsupported_common_state: (
        UnsupportedObjectError,
        ["flatten the state dict", "args", "callback", "NotRegistered"],
    ),
    unsupported_object: (
        UnsupportedObjectError,
        ["describe", "'loader'", "sampler", "NotRegistered"],
    ),
    no_data: (CheckpointingException, ["describe", "'empty'", "(6,)", "data"]),
    file_too_large: (
        OSError,
        ["write shard files", os.strerror(errno.EFBIG), "tensors/shard-00003-"],
    ),
    too_many_open_files: (
        OSError,
        ["write shard files", os.strerror(errno.EMFILE), "tensors/shard-00003-"],
    ),
    strategy_raises_before: (RuntimeError, ["my strategy does not like rank 2"]),
    strategy_raises_after: (KeyError, ["save", "lost on rank 2"]),
}


def fail_to_save_then_recover(rank, fail, folder):
    """Fail once where nothing is and once over an earlier checkpoint; return the errors, and what
    is not as before.
    """
    old, new = f"{folder}/old", f"{folder}/new"
    distckpt.save(good_state(rank, 1), old)
    sum_over_ranks(0)
    before = tree_of(Path(folder))
    errors, wrong = [], []
    for path in (new, old):
        errors.append(error_of(fail, rank, path))
        if sum_over_ranks(rank) != 6:
            wrong.append("the process group does not work")
        # Only now is it certain that rank 0 has cleaned up.
        if tree_of(Path(folder)) != before:
            wrong.append(f"left over: {sorted(set(tree_of(Path(folder))) ^ set(before))}")
        sum_over_ranks(0)
    if not loads_as(rank, old, 1):
        wrong.append("the earlier checkpoint")
    for path in (new, old):
        distckpt.save(good_state(rank, 2), path, overwrite=True)
        if not loads_as(rank, path, 2):
            wrong.append("the next save")
    return errors, wrong


def check_rank_failed(error, rank, kind, words):
    """Check an error that a rank got because rank FAILING failed."""
    assert isinstance(error, RankFailedError), error
    assert list(error.failures) == [FAILING]
    cause = error.failures[FAILING]
    assert isinstance(cause, kind), (rank, cause)
    for word in words:
        assert word in str(error), (rank, error)
    assert f"rank {FAILING}" in str(error)
    assert str(cause) in str(error)


@pytest.mark.parametrize("fail", SAVES, ids=lambda case: case.__name__)
def test_a_save_that_fails_on_one_rank(run, fail, tmp_path):
    results = run(fail_to_save_then_recover, NUM_RANKS, fail, str(tmp_path))
    for rank, (errors, wrong) in enumerate(results):
        assert wrong == []
        for error in errors:
            check_rank_failed(error, rank, *SAVES[fail])
            if SAVES[fail][0] is OSError:
                assert error.failures[FAILING].errno in (errno.EFBIG, errno.EMFILE)


class Interrupting:
    """Stands for a value that is being encoded when the user presses a key."""

    def __init__(self, interruption):
        self.interruption = interruption

    def interrupt(self):
        raise self.interruption


def interrupt_in_first_phase(rank, path, interruption):
    distckpt.save({**good_state(rank, 5), "fused": factory(interruption, replica_id=rank)}, path)


def interrupt_in_inner_phase(rank, path, interruption):
    """The phase in which strategies describe shards lies inside the one around strategies."""
    distckpt.register_object_type(
        Interrupting, to_state=Interrupting.interrupt, from_state=Interrupting
    )
    value = None if interruption is None else Interrupting(interruption)
    distckpt.save({**good_state(rank, 5), "o": ShardedObject("o", value, (4,), (rank,))}, path)


def save_interrupted(rank, folder, where, interruption):
    path = f"{folder}/checkpoint"
    error = error_of(where, rank, path, interruption if rank == FAILING else None)
    total = sum_over_ranks(rank)
    left = os.listdir(folder)
    sum_over_ranks(0)
    distckpt.save(good_state(rank, 1), path)
    return error, total, left, loads_as(rank, path, 1)


@pytest.mark.parametrize(
    "where", [interrupt_in_first_phase, interrupt_in_inner_phase], ids=lambda case: case.__name__
)
@pytest.mark.parametrize(
    "interruption",
    [
        CheckpointException("read", {0: (ValueError("torn"), None)}),
        KeyboardInterrupt("stop"),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_exception_ends_its_rank_and_fails_the_others(where, interruption, tmp_path):
    results = run(save_interrupted, NUM_RANKS, str(tmp_path), where, interruption)
    for rank, (error, total, left, fine) in enumerate(results):
        if rank == FAILING:
            assert type(error) is type(interruption)
        else:
            assert isinstance(error, RankFailedError)
            assert list(error.failures) == [FAILING]
            assert type(interruption).__name__ in str(error)
            assert str(interruption) in str(error)
        assert total == 6
        assert left == []
        assert fine


class FinishedByAnother(SafetensorsSaveStrategy):
    """While this save writes, something appears at its target."""

    def __init__(self, appears, target):
        super().__init__()
        self.appears = appears
        self.target = target

    def configure(self, options, process_group):
        self.options, self.process_group = options, process_group
        return self

    def save(self, sharded_state_dict, checkpoint_dir):
        fields = super().save(sharded_state_dict, checkpoint_dir)
        if torch.distributed.get_rank() == 0:
            self.appears(self.target)
        return fields


def a_whole_checkpoint(path):
    shutil.copytree(f"{os.path.dirname(path)}/other", path)


def a_file(path):
    Path(path).write_text("notes")


def find_target_taken(rank, folder, appears):
    path = f"{folder}/checkpoint"
    distckpt.save(good_state(rank, 1), f"{folder}/other")
    sum_over_ranks(0)
    taken = FinishedByAnother(appears, path)
    error = error_of(distckpt.save, good_state(rank, 2), path, strategy=taken)
    total = sum_over_ranks(rank)
    return error, total, sorted(os.listdir(folder))


@pytest.mark.parametrize("appears", [a_whole_checkpoint, a_file], ids=lambda case: case.__name__)
def test_a_target_that_is_taken_when_the_save_is_to_be_committed(run, appears, tmp_path):
    results = run(find_target_taken, NUM_RANKS, str(tmp_path), appears)
    for error, total, left in results:
        assert isinstance(error, CheckpointExistsError)
        assert str(error) == str(results[0][0])
        assert str(tmp_path / "checkpoint") in str(error)
        assert total == 6
        assert left == ["checkpoint", "other"], "what appeared stays, what was written goes"
    if appears is a_whole_checkpoint:
        assert distckpt.open(str(tmp_path / "checkpoint")).common_state == {"value": 1}


def save_over_another(rank, folder):
    path = f"{folder}/checkpoint"
    distckpt.save(good_state(rank, 1), path)
    sum_over_ranks(0)
    before = tree_of(Path(folder))
    error = error_of(distckpt.save, good_state(rank, 2), path)
    total = sum_over_ranks(rank)
    return error, total, tree_of(Path(folder)) == before


def test_a_whole_checkpoint_is_not_overwritten_unasked(run, tmp_path):
    results = run(save_over_another, NUM_RANKS, str(tmp_path))
    for error, total, unchanged in results:
        assert isinstance(error, CheckpointExistsError)
        assert str(error) == str(results[0][0])
        assert str(tmp_path / "checkpoint") in str(error)
        assert "overwrite=True" in str(error)
        assert total == 6
        assert unchanged


def save_over_unfinished(rank, path):
    distckpt.save(good_state(rank, 2), path)
    return loads_as(rank, path, 2)


def test_what_an_unfinished_save_left_is_moved_aside(run, tmp_path):
    path = tmp_path / "checkpoint"
    run(save_over_unfinished, NUM_RANKS, str(path))
    (path / "metadata.json").unlink()
    left = tree_of(path)
    with launched(save_over_unfinished, NUM_RANKS, str(path)) as launch:
        outcomes = launch.outcomes()
    assert [outcome.value for outcome in outcomes] == [True] * NUM_RANKS
    (aside,) = [name for name in tmp_path.iterdir() if name != path]
    assert tree_of(aside) == left
    (warning,) = outcomes[0].warnings_logged
    assert str(path) in warning
    assert str(aside) in warning
    assert [outcome.warnings_logged for outcome in outcomes[1:]] == [[], [], []], (
        "one rank speaks for all"
    )


def many_small(rank):
    """Rank 1 holds so many tensors that the list of them is larger than LIMIT_BYTES."""
    keys = [f"layers.{i}.a.rather.long.name.of.a.tensor" for i in range(1500)] if rank == 1 else []
    return {key: ShardedTensor.from_rank_offsets(key, torch.zeros(1)) for key in keys}


def fail_to_write_the_manifest(rank, folder):
    path = f"{folder}/checkpoint"
    with limited(resource.RLIMIT_FSIZE, LIMIT_BYTES if rank == 0 else resource.RLIM_INFINITY):
        error = error_of(distckpt.save, many_small(rank), path)
    total = sum_over_ranks(rank)
    left = os.listdir(folder)
    sum_over_ranks(0)
    distckpt.save(many_small(rank), path)
    return error, total, left


def test_a_manifest_that_cannot_be_written(run, tmp_path):
    results = run(fail_to_write_the_manifest, 2, str(tmp_path))
    for error, total, left in results:
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [0]
        assert isinstance(error.failures[0], OSError)
        assert error.failures[0].errno == errno.EFBIG
        assert "manifest" in str(error)
        assert os.strerror(errno.EFBIG) in str(error)
        assert (total, left) == (1, [])
    assert len(distckpt.open(str(tmp_path / "checkpoint")).tensors) == 1500


def save_below_a_file(rank, folder):
    return error_of(
        distckpt.save, good_state(rank, 1), f"{folder}/file/checkpoint"
    ), sum_over_ranks(rank)


def test_a_directory_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("notes")
    results = run(save_below_a_file, NUM_RANKS, str(tmp_path))
    for error, total in results:
        assert isinstance(error, RankFailedError)
        assert isinstance(error.failures[0], NotADirectoryError)
        assert str(tmp_path / "file") in str(error)
        assert total == 6
    assert (tmp_path / "file").read_text() == "notes"


class ReadsNotBefore(SafetensorsLoadStrategy):
    def load(self, sharded_state_dict, checkpoint_dir):
        if torch.distributed.get_rank() == FAILING:
            raise CorruptCheckpointError("my strategy finds no index on rank 2")
        return super().load(sharded_state_dict, checkpoint_dir)


class ReadsNotAfter(SafetensorsLoadStrategy):
    def load(self, sharded_state_dict, checkpoint_dir):
        loaded = super().load(sharded_state_dict, checkpoint_dir)
        if torch.distributed.get_rank() == FAILING:
            raise RuntimeError("my strategy lost what it read on rank 2")
        return loaded


def load_damaged(rank, path):
    distckpt.load(good_state(rank, -1), f"{path}_damaged")


def load_cut_off(rank, path):
    distckpt.load(good_state(rank, -1), f"{path}_cut_off")


def load_incomplete(rank, path):
    distckpt.load(good_state(rank, -1), f"{path}_incomplete")


def merge_fn_raises(rank, path):
    error = RuntimeError("gate and up do not fit") if rank == FAILING else None
    distckpt.load(
        {**good_state(rank, -1), "fused": factory(merge_error=error, replica_id=rank)}, path
    )


def build_fn_raises_while_loading(rank, path):
    error = ValueError("3 heads do not divide by 2") if rank == FAILING else None
    distckpt.load({**good_state(rank, -1), "fused": factory(error, replica_id=rank)}, path)


def strategy_does_not_read(rank, path):
    distckpt.load(good_state(rank, -1), path, strategy=ReadsNotBefore())


def strategy_loses_what_it_read(rank, path):
    distckpt.load(good_state(rank, -1), path, strategy=ReadsNotAfter())


def no_files_to_read_with(rank, path):
    """What a rank with thousands of open files sees."""
    # Modules are imported when a function is first used.
    state, load = good_state(rank, -1), distckpt.load
    lowest_free = os.dup(0)
    os.close(lowest_free)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(resource.RLIMIT_NOFILE, lowest_free if rank == FAILING else hard):
        load(state, path)


LOADS = {
    load_damaged: (CorruptCheckpointError, ["load", "shard-00003-", "'rows'", "Checksum mismatch"]),
    load_cut_off: (CorruptCheckpointError, ["load", "shard-00003-", "bytes"]),
    load_incomplete: (CorruptCheckpointError, ["load", "shard-00003-", "missing"]),
    merge_fn_raises: (CheckpointingException, ["load", "gate and up do not fit"]),
    build_fn_raises_while_loading: (CheckpointingException, ["3 heads do not divide by 2"]),
    strategy_does_not_read: (CorruptCheckpointError, ["my strategy finds no index on rank 2"]),
    strategy_loses_what_it_read: (RuntimeError, ["my strategy lost what it read on rank 2"]),
    no_files_to_read_with: (OSError, [os.strerror(errno.EMFILE), "metadata.json"]),
}


def save_with_factory(rank, path):
    distckpt.save({**good_state(rank, 1), "fused": factory(replica_id=rank)}, path)


def fail_to_load_then_recover(rank, fail, path):
    error = error_of(fail, rank, path)
    return error, sum_over_ranks(rank), loads_as(rank, path, 1)


@pytest.fixture(scope="module")
def stored(run, tmp_path_factory):
    """A checkpoint, and copies of it in which the file that only rank FAILING reads is not what it
    was.
    """
    path = tmp_path_factory.mktemp("loads") / "checkpoint"
    run(save_with_factory, NUM_RANKS, str(path))
    for kind in ("damaged", "cut_off", "incomplete"):
        copy = path.with_name(f"checkpoint_{kind}")
        shutil.copytree(path, copy)
        (file,) = (copy / "tensors").glob("shard-00003-*")
        content = bytearray(file.read_bytes())
        position = header_of(file)[0] + len(content) // 2
        content[position] ^= 1
        file.write_bytes(content if kind == "damaged" else content[:position])
        if kind == "incomplete":
            file.unlink()
    return path


@pytest.mark.parametrize("fail", LOADS, ids=lambda case: case.__name__)
def test_a_load_that_fails_on_one_rank(run, fail, stored):
    before = tree_of(stored.parent)
    results = run(fail_to_load_then_recover, NUM_RANKS, fail, str(stored))
    for rank, (error, total, fine) in enumerate(results):
        check_rank_failed(error, rank, *LOADS[fail])
        assert total == 6
        assert fine
    assert tree_of(stored.parent) == before


def load_without_manifest(rank, folder):
    return error_of(distckpt.load, good_state(rank, -1), folder), sum_over_ranks(rank)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_manifest_is_the_same_error_on_every_rank(run, damage, stored, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    manifest = copy / "manifest.safetensors"
    if damage == "changed":
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    else:
        manifest.unlink()
    results = run(load_without_manifest, NUM_RANKS, str(copy))
    for error, total in results:
        assert isinstance(error, CorruptCheckpointError)
        assert str(error) == str(results[0][0])
        assert str(manifest) in str(error)
        assert total == 6


def fail_in_a_sub_group(rank, path):
    """The group counts its own ranks: global rank 3 is rank 1 of it."""
    group = torch.distributed.new_group([1, 3])
    error = None
    if rank in (1, 3):
        value = NotRegistered() if rank == 3 else None
        state = {"o": ShardedObject("o", value, (2,), (rank // 2,))}
        error = error_of(distckpt.save, state, path, process_group=group)
        assert sum_over_ranks(1, group) == 2
    return error, sum_over_ranks(rank)


def test_a_rank_of_a_sub_group_fails(run, tmp_path):
    results = run(fail_in_a_sub_group, NUM_RANKS, str(tmp_path / "checkpoint"))
    for rank, (error, total) in enumerate(results):
        assert total == 6
        if rank in (1, 3):
            assert isinstance(error, RankFailedError)
            assert list(error.failures) == [1]
            assert isinstance(error.failures[1], UnsupportedObjectError)
        else:
            assert error is None
    assert list(tmp_path.iterdir()) == []
