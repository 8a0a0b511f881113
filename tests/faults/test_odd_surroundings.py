"""Directories and clocks that are not as usual: saving and loading work there, or say why they do
not.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointingException, CheckpointManager, RankFailedError
from tests.support.calls import watched
from tests.support.disk import tree_of
from tests.support.harness import error_of, run
from tests.support.rights import NOBODY, as_nobody
from tests.support.states import state_of, value_in, value_of

TIMEOUT = 60.0


def use_every_door(folder):
    """Save, overwrite, load, verify, export and keep steps in a directory, and leave nothing else
    there.
    """
    path = os.path.join(folder, "checkpoint")
    distckpt.save(state_of(1), path)
    distckpt.save(state_of(2), path, overwrite=True)
    assert value_in(path) == 2
    assert distckpt.verify(path).is_whole
    distckpt.consolidate(path, os.path.join(folder, "export"))
    handle = distckpt.async_save(state_of(3), path, overwrite=True)
    handle.result(TIMEOUT)
    assert value_in(path) == 3
    with CheckpointManager(os.path.join(folder, "run"), keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.latest() == 2
        assert manager.load(state_of(-1))["value"] == 2
    assert sorted(os.listdir(folder)) == ["checkpoint", "export", "run"]


# --- Names ----------------------------------------------------------------------------------------

NAMES = {
    "spaces": " a  b ",
    "unicode": "prüfpunkt-检查点-😀",
    "decomposed": "u\u0308",
    "brackets": "run[x]*?{1..2}",
    "newline": "a\nb",
    "quotes": "a'b\"c`$HOME;%s",
    "hidden": ".hidden",
    "colon": "a:b",
    "backslash": "a\\b",
    "not text": os.fsdecode(b"\xff\xfe"),
    "like staging": ".checkpoint.tmp-0123456789abcdef",
    "long": "n" * 240,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_directories(name, tmp_path):
    folder = tmp_path / NAMES[name]
    folder.mkdir()
    use_every_door(str(folder))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "long"])
def test_names_of_checkpoints(name, tmp_path):
    path = str(tmp_path / NAMES[name])
    distckpt.save(state_of(1), path)
    distckpt.save(state_of(2), path, overwrite=True)
    assert value_in(path) == 2
    assert os.listdir(tmp_path) == [NAMES[name]]


def test_a_name_that_leaves_no_room_beside_it_is_refused(tmp_path):
    """The name of what is written beside a checkpoint is longer than its own."""
    room = os.pathconf(tmp_path, "PC_NAME_MAX")
    longest = next(
        n
        for n in range(room, 0, -1)
        if error_of(distckpt.save, state_of(1), tmp_path / ("n" * n)) is None
    )
    assert longest >= 200
    assert value_in(tmp_path / ("n" * longest)) == 1
    error = error_of(distckpt.save, state_of(1), tmp_path / ("n" * (longest + 1)))
    assert isinstance(error, OSError)
    assert error.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == ["n" * longest]


def test_a_path_that_is_too_long_is_refused(tmp_path):
    path = str(tmp_path) + "/d" * 3000
    for error in (
        error_of(distckpt.save, state_of(1), path),
        error_of(distckpt.load, state_of(1), path),
    ):
        assert isinstance(error, OSError)
        assert error.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == []


def test_a_deep_path(tmp_path):
    path = tmp_path.joinpath(*["d" * 100] * 20, "checkpoint")
    distckpt.save(state_of(1), path)
    assert value_in(path) == 1


# --- Links ----------------------------------------------------------------------------------------


def test_a_root_that_is_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    use_every_door(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()


def test_a_checkpoint_that_is_a_link_to_another_disk(tmp_path):
    """What is overwritten is the directory that the link leads to; the link stays."""
    (tmp_path / "disk").mkdir()
    distckpt.save(state_of(1), tmp_path / "disk" / "step")
    (tmp_path / "latest").symlink_to("disk/step")
    distckpt.save(state_of(2), tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert value_in(tmp_path / "latest") == value_in(tmp_path / "disk" / "step") == 2
    assert os.listdir(tmp_path / "disk") == ["step"]


def test_links_that_lead_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for verb in (distckpt.save, distckpt.load):
        error = error_of(verb, state_of(1), tmp_path / "a" / "checkpoint")
        assert isinstance(error, OSError | CheckpointingException)
        assert str(tmp_path / "a") in str(error)


# --- The working directory ------------------------------------------------------------------------


@contextmanager
def working_directory(path):
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_relative_path_means_the_directory_of_the_call(tmp_path):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    with working_directory(tmp_path / "before"):
        handle = distckpt.async_save(state_of(1), "checkpoint")
        manager = CheckpointManager("run", keep_last=1)
        os.chdir(tmp_path / "after")
        handle.result(TIMEOUT)
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.close()
        assert manager.latest() == 2
    assert value_in(tmp_path / "before" / "checkpoint") == 1
    assert value_in(tmp_path / "before" / "run" / "step_00000002") == 2
    assert os.listdir(tmp_path / "after") == []


# --- Rights ---------------------------------------------------------------------------------------


def needs_root():
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")


@pytest.fixture
def public():
    """A directory of ours with a checkpoint, that everybody may read."""
    needs_root()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        distckpt.save(state_of(1), folder / "checkpoint")
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        yield folder


def test_a_directory_that_may_only_be_read(public):
    (error,) = run(as_nobody, 1, distckpt.save, state_of(2), str(public / "new"), backend=None)
    assert isinstance(error, PermissionError)
    assert str(public) in str(error)
    assert run(as_nobody, 1, value_in, str(public / "checkpoint"), backend=None) == [None]
    (error,) = run(as_nobody, 1, overwrite, str(public / "checkpoint"), backend=None)
    assert isinstance(error, PermissionError)
    assert value_in(public / "checkpoint") == 1
    assert os.listdir(public) == ["checkpoint"]


def overwrite(path):
    distckpt.save(state_of(2), path, overwrite=True)


@pytest.mark.parametrize("name", ["metadata.json", "manifest.safetensors", "tensors", "."])
def test_a_file_that_may_not_be_read_is_named(name, public):
    (public / "checkpoint" / name).chmod(0)
    (error,) = run(as_nobody, 1, value_in, str(public / "checkpoint"), backend=None)
    assert isinstance(error, PermissionError)
    assert str(public / "checkpoint") in str(error)


def test_a_seal_that_may_not_be_read_is_named(public):
    pytest.importorskip("tensorstore")
    from tests.support.orbax_trees import write_chunks

    values = np.arange(16, dtype=np.float32)
    (public / "step").mkdir()
    (public / "step/_CHECKPOINT_METADATA").write_text('{"item_handlers": {"params": ""}}')
    (public / "step/params").mkdir()
    write_chunks(public / "step/params", values, (8,))
    distckpt.seal(public / "step")
    (public / "step/distckpt.seal").chmod(0)
    # One item alone, too, is compared with it.
    for path in (public / "step", public / "step/params"):
        (error,) = run(as_nobody, 1, distckpt.load, {}, str(path), backend=None)
        assert isinstance(error, PermissionError)
        assert str(public / "step/distckpt.seal") in str(error)


def keep_the_last_step(root):
    with CheckpointManager(root, keep_last=1, async_save=False) as manager:
        manager.save(5, state_of(5))
        assert manager.steps() == [0, 1, 2, 5]
        assert value_of(manager.load(state_of(-1))) == 5
        assert list(manager.not_removed) == [0, 1]
        for problem in manager.not_removed.values():
            assert "its files cannot be removed by this user" in problem


def test_steps_of_another_user(public):
    """In a directory of our own we can rename steps of root, but neither empty them, nor, perhaps,
    read.
    """
    root = public / "run"
    for step in range(3):
        CheckpointManager(root, async_save=False).save(step, state_of(step))
    before = tree_of(root)
    (root / "step_00000002").chmod(0o700)
    os.chown(root, NOBODY, NOBODY)
    assert run(as_nobody, 1, keep_the_last_step, str(root), backend=None) == [None]
    after = tree_of(root)
    assert {name: after.get(name) for name in before if name.startswith("step")} == {
        name: before[name] for name in before if name.startswith("step")
    }
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def save_under_a_mask(rank, path, mask):
    del rank
    os.umask(mask)
    distckpt.save(state_of(1), path)
    return value_in(path)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_files_get_the_rights_that_the_mask_leaves(mask, tmp_path):
    path = tmp_path / "checkpoint"
    assert run(save_under_a_mask, 1, str(path), mask, backend=None) == [1]
    for file in [path, *path.rglob("*")]:
        expected = (0o777 if file.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(file.stat().st_mode) == expected, file


@contextmanager
def read_only(folder):
    """Mount a directory at its own place, to be read only."""
    try:
        mounted = subprocess.run(
            ["mount", "--bind", folder, folder], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_may_only_be_read(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    distckpt.save(state_of(1), folder / "checkpoint")
    with read_only(folder):
        error = error_of(distckpt.save, state_of(2), folder / "new")
        assert isinstance(error, OSError)
        assert error.errno == errno.EROFS
        assert str(folder) in str(error)
        assert (
            error_of(distckpt.save, state_of(2), folder / "checkpoint", overwrite=True).errno
            == errno.EROFS
        )
        assert value_in(folder / "checkpoint") == 1
        assert distckpt.verify(folder / "checkpoint").is_whole
        distckpt.consolidate(folder / "checkpoint", tmp_path / "export")


# --- Clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("years", [-60, 40], ids=["past", "future"])
def test_clocks_that_are_wrong(years, tmp_path):
    """Which step is the newest, and whether anything changed, is not told by times of files."""
    moment = time.time() + years * 365 * 86400 if years > 0 else 0.0
    with CheckpointManager(tmp_path, keep_last=2, async_save=False) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
            for file in tmp_path.rglob("*"):
                os.utime(file, (moment - step, moment - step))
        assert manager.steps() == [3, 4]
        assert manager.latest() == 4
        distckpt.save(state_of(5), manager.location(4), overwrite=True)
        for file in tmp_path.rglob("*"):
            os.utime(file, (moment, moment))
        assert value_in(manager.location(4)) == 5


# --- Files of other ranks that are seen late ------------------------------------------------------


def save_half_blind(rank, folder):
    """No directory or file is there when a rank looks for it once; return what the rank has
    touched, and looked for.
    """
    looked_for, touched = set(), set()

    def on_call(call, moment):
        if moment == "after":
            return
        if call.name not in ("stat", "lstat"):
            touched.update(call.paths)
        if call.name in ("stat", "lstat") and call.paths[0] not in looked_for:
            looked_for.add(call.paths[0])
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), call.paths[0])

    with watched(folder, on_call):
        distckpt.save(state_of(7, rank, 2), f"{folder}/checkpoint")
    return touched, looked_for


def test_a_save_waits_for_what_is_seen_late(tmp_path):
    """Each rank looks for the directory, and rank 0 for all files, more than once; none opens files
    of others.
    """
    (first, looked_for_by_first), (second, looked_for) = run(save_half_blind, 2, str(tmp_path))
    assert any("shard-00002" in path for path in looked_for_by_first)
    assert any(path.endswith("/tensors") for path in looked_for)
    own_files = [
        {path for path in touched if path.endswith(".safetensors")} for touched in (first, second)
    ]
    assert all(
        "shard-00001" in path or "rank-00001" in path or "manifest" in path for path in own_files[0]
    )
    assert all("shard-00002" in path or "rank-00002" in path for path in own_files[1])
    assert distckpt.verify(tmp_path / "checkpoint").is_whole
    assert set(
        distckpt.open(tmp_path / "checkpoint").read_tensors()["rows"].flatten().tolist()
    ) == {7}


def load_half_blind(rank, folder):
    """Rank 1 does not see the shard files yet."""

    def on_call(call, moment):
        if rank == 1 and moment == "before" and "/tensors/" in call.paths[0]:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), call.paths[0])

    with watched(folder, on_call):
        return error_of(distckpt.load, state_of(-1, rank, 2), f"{folder}/checkpoint")


def save_on_two_ranks(rank, path):
    distckpt.save(state_of(7, rank, 2), path)


def test_a_load_that_does_not_see_a_file_yet_says_so(tmp_path):
    run(save_on_two_ranks, 2, str(tmp_path / "checkpoint"))
    for error in run(load_half_blind, 2, str(tmp_path)):
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert "is not visible on this machine yet" in str(error)


def _with_default_device(rank: int, path: str) -> None:
    """Buffers of exchanges are on the CPU wherever new tensors are."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(40, 30) for _ in range(3)]
    state = {"net": models[0], "values": [1.5] * 9000}
    with torch.device("meta"):
        distckpt.save(state, f"{path}/saved", fingerprint=True, stats=True)
        distckpt.async_save(state, f"{path}/in_background").result()
        distckpt.load({"net": models[1], "values": None}, f"{path}/in_background")
        assert distckpt.verify(f"{path}/saved", live={"net": models[1]}).is_whole
        distckpt.redistribute({"net": models[0]} if rank == 0 else {}, {"net": models[2]})
        distckpt.consolidate(f"{path}/saved", f"{path}/fp8", quantize="fp8-block")
        distckpt.consolidate(f"{path}/saved", f"{path}/bf16", dtype=torch.bfloat16)
        expected = distckpt.open(f"{path}/saved").fingerprints()
        assert distckpt.fingerprint({"net": models[2]}) == expected
    stored = distckpt.open(f"{path}/saved").read("net.weight")
    quantized = distckpt.open(f"{path}/fp8").read("net.weight").float()
    assert torch.allclose(quantized, stored, rtol=0.1, atol=0.01)
    assert torch.equal(distckpt.open(f"{path}/bf16").read("net.weight"), stored.bfloat16())


def test_another_default_device(tmp_path):
    run(_with_default_device, 2, str(tmp_path))
