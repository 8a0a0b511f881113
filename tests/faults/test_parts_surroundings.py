"""Work in parts amid what machines do to it: other users, removed files, a part that goes on after
the work was abandoned, another version.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import distckpt
from distckpt import CheckpointingException, tasks
from distckpt.tasks import _pieces as division
from tests.support.disk import tree_of
from tests.support.harness import run
from tests.support.parts import contents_of
from tests.support.rights import NOBODY, as_nobody
from tests.support.states import numbered, save_checkpoint

MANY = {"max_file_bytes": 30_000}
VERBS = {
    "export": (
        lambda source, place: distckpt.consolidate(source, place, **MANY),
        lambda source, place: tasks.consolidate(source, place, num_tasks=2, **MANY),
    ),
    "reshard": (
        lambda source, place: distckpt.reshard(source, place, num_ranks=6),
        lambda source, place: tasks.reshard(source, place, num_tasks=2, num_ranks=6),
    ),
}


def save(path: Path) -> Path:
    return save_checkpoint(path, {f"layers.{i}.w": numbered(60, 50) - i for i in range(20)})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("source") / "a")


# --- Other users ----------------------------------------------------------------------------------


@pytest.fixture
def public():
    """A directory of ours that everybody may write into, with a checkpoint and the first part of an
    export.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "a")
        tasks.consolidate(folder / "a", folder / "out", num_tasks=2, **MANY)[0].run()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        folder.chmod(0o777)
        yield folder


def do(folder: str, index: int) -> None:
    tasks.consolidate(f"{folder}/a", f"{folder}/out", num_tasks=2, **MANY)[index].run()


def test_abandoning_what_another_user_has_begun(public):
    before = tree_of(public)
    (error,) = run(as_nobody, 1, tasks.abandon, str(public / "out"), backend=None)
    assert isinstance(error, PermissionError)
    assert "belongs to user 0" in str(error)
    assert ".out.parts-" in str(error)
    assert tree_of(public) == before


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_going_on_with_what_another_user_has_begun(mode, public):
    (journal,) = public.glob(".out.parts-*")
    journal.chmod(mode)
    (error,) = run(as_nobody, 1, do, str(public), 1, backend=None)
    assert isinstance(error, PermissionError)
    assert "belongs to user 0" in str(error)
    assert "umask" in str(error)
    assert tasks.status(public / "out")[0].num_whole == 5


def test_users_of_a_group_work_together(public):
    for path in [public, *public.rglob("*")]:
        os.chown(path, -1, NOBODY)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    assert run(as_nobody, 1, do, str(public), 1, backend=None) == [None]
    distckpt.consolidate(public / "a", public / "one", **MANY)
    assert tree_of(public / "out") == tree_of(public / "one")


# --- What is removed meanwhile --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "cut"])
@pytest.mark.parametrize("name", VERBS)
def test_files_that_were_lost_are_written_again(name, how, source, tmp_path):
    in_one, in_parts = VERBS[name]
    work = in_parts(source, tmp_path / "out")
    reports = [task.run() for task in work[:-1]]
    lost = [path for path in tmp_path.glob(".out.parts-*/.out.tmp-*/**/*") if path.is_file()]
    if how == "removed":
        lost[0].unlink()
    else:
        os.truncate(lost[0], 100)
    with pytest.raises(CheckpointingException, match=r"1 of \d+ pieces must be done again"):
        work[-1].run()
    assert not (tmp_path / "out").exists()
    assert tasks.status(tmp_path / "out")[0].num_whole == reports[-1].num_total - 1
    assert any(task.run().is_complete for task in work)
    in_one(source, tmp_path / "one")
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "one")


DAMAGES = {
    "noise": lambda content, other: bytes(len(content)),
    "other JSON": lambda content, other: content[:8] + b'{"a": 1}' + content[16:],
    "another file": lambda content, other: other,
    "appended": lambda content, other: content + b"more",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", VERBS)
def test_files_that_are_not_those_that_were_written_are_written_again(
    name, damage, source, tmp_path
):
    in_one, in_parts = VERBS[name]
    work = in_parts(source, tmp_path / "out")
    for task in work[:-1]:
        task.run()
    file, other, *_ = sorted(tmp_path.glob(".out.parts-*/.out.tmp-*/**/*.safetensors"))
    file.write_bytes(DAMAGES[damage](file.read_bytes(), other.read_bytes()))
    with pytest.raises(CheckpointingException, match=rf"{file.name}.*pieces must be done again"):
        work[-1].run()
    assert not (tmp_path / "out").exists()
    assert any(task.run().is_complete for task in work)
    in_one(source, tmp_path / "one")
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "one")


@pytest.mark.parametrize(
    ("in_one", "in_parts"),
    [(distckpt.consolidate, tasks.consolidate), (distckpt.reshard, tasks.reshard)],
    ids=VERBS,
)
def test_a_file_is_removed_before_the_rest_of_it_is_written(
    in_one, in_parts, tmp_path, monkeypatch
):
    """Nobody takes the zeros in the place of what was removed for values."""
    monkeypatch.setattr(division, "_MIN_PIECE_BYTES", 1 << 20)
    source = save_checkpoint(tmp_path / "a", {"w": numbered(1000, 1000)})
    in_one(source, tmp_path / "one")
    first, second = in_parts(source, tmp_path / "out", num_tasks=2)
    assert first.run().num_whole > 1
    files = [*tmp_path.glob(".out.parts-*/.out.tmp-*/**/*.safetensors")]
    max(files, key=lambda path: path.stat().st_size).unlink()
    assert not second.run().is_complete
    assert not (tmp_path / "out").exists()
    assert first.run().is_complete
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "one")


def test_a_part_that_goes_on_when_the_work_was_abandoned(source, tmp_path):
    (task,) = tasks.consolidate(source, tmp_path / "out", num_tasks=1, **MANY)

    def abandon(done, total):
        tasks.abandon(tmp_path / "out")

    with pytest.raises(FileNotFoundError, match=r"abandoned .* run the part again"):
        task.run(progress=abandon)
    assert list(tmp_path.iterdir()) == []
    assert task.run().is_complete


# --- Other programs -------------------------------------------------------------------------------


def test_another_version_does_not_go_on(source, tmp_path, monkeypatch):
    first, second = tasks.consolidate(source, tmp_path / "out", num_tasks=2, **MANY)
    first.run()
    with monkeypatch.context() as patch:
        patch.setattr("distckpt._base.version.__version__", "99.9")
        with pytest.raises(
            CheckpointingException, match=r"the version of distckpt was \S+ and is 99\.9"
        ):
            second.run()
    assert second.run().is_complete


def test_another_configuration_beside_the_output_is_refused(source, tmp_path):
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "config.json").write_text('{"a": 1}')
    options = {"extra_files_from": extra, **MANY}
    first, second = tasks.consolidate(source, tmp_path / "out", num_tasks=2, **options)
    first.run()
    (extra / "config.json").write_text('{"a": 2}')
    with pytest.raises(CheckpointingException, match=r"the extra file config\.json was .* and is"):
        second.run()
