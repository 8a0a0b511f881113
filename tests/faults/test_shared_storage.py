"""Ranks that do not share their storage, wholly or for a while, and files that vanish from a save:
never a success.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import distckpt
from distckpt import CheckpointingException, CheckpointManager, RankFailedError, torch_dist
from distckpt._commit import output
from distckpt.strategies.safetensors import ShardSave
from tests.support.harness import error_of, run, sum_over_ranks
from tests.support.states import state_of, value_of
from tests.support.stopping import stopping

_CLONE_NEWNS = 0x20000


def impatient():
    """Do not wait long for what does not come; other tests show that ranks wait."""
    output.SECONDS_TO_APPEAR = 0.3


def mounting(*arguments):
    done = subprocess.run(
        ["mount", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def enter_private_mounts():
    """From now on mounts of this process are its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    mounting("--make-rprivate", "/")


def try_to_mount(rank, folder):
    enter_private_mounts()
    mounting("-t", "tmpfs", "tmpfs", folder)


@pytest.fixture
def private_mounts(tmp_path):
    (error,) = run(error_of_mounting, 1, tmp_path, backend=None)
    if error is not None:
        pytest.skip(f"no private mounts here: {error}")


def error_of_mounting(rank, folder):
    error = error_of(try_to_mount, rank, folder)
    return None if error is None else str(error)


def files_below(folder):
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
    )


# --- Verbs that write -----------------------------------------------------------------------------


def save(rank, folder):
    distckpt.save(state_of(2, rank, 2, 50), folder / "checkpoint")


def save_in_background(rank, folder):
    distckpt.async_save(state_of(2, rank, 2, 50), folder / "checkpoint").result(60)


def save_step(rank, folder):
    manager = CheckpointManager(folder, keep_last=1)
    manager.save(2, state_of(2, rank, 2, 50)).result(60)


def export(rank, folder):
    distckpt.consolidate(folder.parent / "source", folder / "export")


WRITERS = [save, save_in_background, save_step, export]


def write_apart(rank, verb, folder, is_mount):
    """Call a verb with a directory of this rank's own: by its path, or by what is mounted there."""
    impatient()
    own = folder / (f"disk_{rank}" if not is_mount else "disk")
    if is_mount:
        enter_private_mounts()
        mounting("-t", "tmpfs", "tmpfs", own)
    if verb is save_step:
        alone = [dist.new_group([each]) for each in range(2)][rank]
        distckpt.save(state_of(1), own / "step_00000001", process_group=alone)
    before = files_below(own)
    error = error_of(verb, rank, own)
    assert sum_over_ranks(1) == 2
    assert files_below(own) == before
    assert [path for path in own.rglob("*") if ".tmp-" in path.name] == []
    return error


@pytest.mark.parametrize("verb", WRITERS)
def test_ranks_with_paths_of_their_own(verb, tmp_path):
    check_refused(verb, tmp_path, is_mount=False)


@pytest.mark.usefixtures("private_mounts")
@pytest.mark.parametrize("verb", [save, save_step])
def test_ranks_with_disks_of_their_own(verb, tmp_path):
    check_refused(verb, tmp_path, is_mount=True)


def check_refused(verb, folder, is_mount):
    distckpt.save(state_of(1), folder / "source")
    disks = [folder / "disk"] * 2 if is_mount else [folder / f"disk_{rank}" for rank in range(2)]
    for disk in disks:
        disk.mkdir(exist_ok=True)
    errors = run(write_apart, 2, verb, folder, is_mount)
    for error in errors:
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert str(disks[0]) in str(error)
        assert str(disks[1]) in str(error)
        assert f"on rank 1 (host {socket.gethostname()!r})" in str(error)
    assert str(errors[0]) == str(errors[1])


def save_to_own_url(rank, is_same_url):
    impatient()
    url = "memory://bucket/run" if is_same_url else f"memory://bucket/run_{rank}"
    return error_of(distckpt.save, state_of(1, rank, 2), url)


@pytest.mark.parametrize(
    ("is_same_url", "message"),
    [(False, "memory://bucket/run_0"), (True, "rank-00002.*was written and is missing")],
)
def test_ranks_with_stores_of_their_own(is_same_url, message):
    for error in run(save_to_own_url, 2, is_same_url):
        with pytest.raises(CheckpointingException, match=message):
            raise error


def write_with_little_patience(rank, verb, folder):
    """Call a verb with a directory of this rank's own, in a group that waits for a short time."""
    return error_of(verb, rank, folder / f"disk_{rank}")


@pytest.mark.parametrize("verb", [save, export])
def test_the_paths_are_named_before_the_group_gives_up(verb, tmp_path):
    distckpt.save(state_of(1), tmp_path / "source")
    for rank in range(2):
        (tmp_path / f"disk_{rank}").mkdir()
    for error in run(write_with_little_patience, 2, verb, tmp_path, group_timeout=3.0):
        assert isinstance(error, RankFailedError)
        assert str(tmp_path / "disk_0") in str(error)
        assert str(tmp_path / "disk_1") in str(error)


def read_from_own_disk(rank, verb, source, target):
    return error_of(verb, source if rank == 0 else source.parent / "elsewhere" / "source", target)


@pytest.mark.parametrize("verb", [distckpt.consolidate, distckpt.reshard, torch_dist.export])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_source_that_one_rank_does_not_have(verb, is_ours, tmp_path):
    distckpt.save(state_of(1), tmp_path / "ours")
    distckpt.consolidate(tmp_path / "ours", tmp_path / "hugging_face", keys="rows")
    (tmp_path / ("ours" if is_ours else "hugging_face")).rename(tmp_path / "source")
    for error in run(read_from_own_disk, 2, verb, tmp_path / "source", tmp_path / "out"):
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        state = "is no checkpoint" if is_ours else "does not exist"
        assert f"'{tmp_path}/elsewhere/source' on rank 1" in str(error)
        assert f"{state}. Give all ranks the same location, on storage that all" in str(error)
    assert not (tmp_path / "out").exists()


def export_to_own_store(rank, source):
    return error_of(distckpt.consolidate, source, "memory://bucket/export", max_file_bytes=60_000)


def test_an_export_to_stores_of_their_own(tmp_path):
    distckpt.save(state_of(1), tmp_path / "source")
    for error in run(export_to_own_store, 2, tmp_path / "source"):
        assert isinstance(error, CheckpointingException)
        assert "was written and is missing as rank 0" in str(error)
        assert "not all ranks share this storage. Nothing was committed" in str(error)


def check_value(path, value):
    """Check a checkpoint that two ranks have saved."""
    assert distckpt.verify(path).is_whole
    assert distckpt.open(path).common_state["value"] == value


# --- Storage that is shared all the same ----------------------------------------------------------


def save_through_own_mount(rank, folder):
    enter_private_mounts()
    own = folder / f"mount_{rank}"
    mounting("--bind", folder / "shared", own)
    distckpt.save(state_of(3, rank, 2, 50), own / "checkpoint")


@pytest.mark.usefixtures("private_mounts")
def test_one_disk_may_have_several_paths(tmp_path):
    for name in ("shared", "mount_0", "mount_1"):
        (tmp_path / name).mkdir()
    run(save_through_own_mount, 2, tmp_path)
    check_value(tmp_path / "shared" / "checkpoint", 3)
    assert os.listdir(tmp_path / "shared") == ["checkpoint"]


def save_with_late_view(rank, folder):
    """Rank 1 sees the shared directory only after rank 0 has made one in it."""
    if rank == 1:
        enter_private_mounts()
        beneath = os.open(folder, os.O_RDONLY)
        mounting("-t", "tmpfs", "tmpfs", folder)

        def uncover():
            while not os.listdir(beneath):
                os.sched_yield()
            subprocess.run(["umount", str(folder)], check=True)

        threading.Thread(target=uncover).start()
    distckpt.save(state_of(4, rank, 2, 50), folder / "checkpoint")


@pytest.mark.usefixtures("private_mounts")
def test_a_view_that_lags_behind_is_waited_for(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    run(save_with_late_view, 2, folder)
    check_value(folder / "checkpoint", 4)


# --- Files that vanish while they are saved -------------------------------------------------------


class Cleaned(ShardSave):
    """Another program removes or cuts off a file when everything is written."""

    def write(self, checkpoint_dir, ranks):
        fields = super().write(checkpoint_dir, ranks)
        if ranks.is_coordinator:
            pattern, change = Cleaned.damage
            change(next(Path(checkpoint_dir).glob(pattern)))
        return fields


def save_while_cleaned(rank, path, pattern, change):
    impatient()
    Cleaned.damage = pattern, change
    return error_of(
        distckpt.save, state_of(2, rank, 2, 50), path, strategy=stopping(Cleaned), overwrite=True
    )


def cut_off(path):
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("pattern", "change", "state"),
    [
        ("tensors/shard-00002-*", os.unlink, "is missing"),
        ("objects/*", cut_off, "has 100 bytes instead of"),
        ("manifest.safetensors", os.unlink, "is missing"),
        ("tensors", shutil.rmtree, "(?s)No such file|is missing"),
    ],
)
def test_files_that_vanish_from_a_save(pattern, change, state, tmp_path):
    path = tmp_path / "checkpoint"
    distckpt.save(state_of(1), path)
    for error in run(save_while_cleaned, 2, path, pattern, change):
        with pytest.raises(CheckpointingException, match=state):
            raise error
    assert value_of(distckpt.load(state_of(-1), path)) == 1
    assert os.listdir(tmp_path) == ["checkpoint"]


# --- Loads ----------------------------------------------------------------------------------------


def load_own(rank, folder, verb):
    error = error_of(verb, rank, folder / f"disk_{rank}")
    assert sum_over_ranks(1) == 2
    return error


def load_plainly(rank, folder):
    # Objects of one cell: the checkpoint is one of a single process.
    state = {**state_of(-1, rank, 2, 50), "rng": state_of(-1)["rng"]}
    assert (
        value_of(
            distckpt.load(
                state, folder / "checkpoint", verify=False, validate_access_integrity=False
            )
        )
        == 1
    )


def export_own(rank, folder):
    distckpt.consolidate(
        folder / "checkpoint", folder.parent / "export", verify=False, overwrite=True
    )


@pytest.mark.parametrize("verb", [load_plainly, export_own])
@pytest.mark.parametrize("other", ["copy", "another", "none"])
def test_ranks_that_read_from_disks_of_their_own(other, verb, tmp_path):
    """Copies of one checkpoint are as good as one; another checkpoint of the same layout is not."""
    distckpt.save(state_of(1), tmp_path / "disk_0" / "checkpoint")
    if other == "copy":
        shutil.copytree(tmp_path / "disk_0", tmp_path / "disk_1")
    elif other == "another":
        distckpt.save(state_of(2), tmp_path / "disk_1" / "checkpoint")
    for error in run(load_own, 2, tmp_path, verb):
        if other == "copy":
            assert error is None
            continue
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert f"{tmp_path}/disk_1/checkpoint' on rank 1 (host {socket.gethostname()!r}) is" in str(
            error
        )
