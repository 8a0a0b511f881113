"""The command line of work in parts."""

from __future__ import annotations

import pytest

import distckpt
from tests.support.cli_command import call, call_error, call_json, call_usage_error
from tests.support.disk import tree_of
from tests.support.states import numbered, save_checkpoint


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "a", {f"layers.{i}.w": numbered(60, 50) for i in range(20)})
    return tmp_path


def test_consolidate(capsys, folder):
    distckpt.consolidate(folder / "a", folder / "one", max_file_bytes=30_000)
    line = ["consolidate", folder / "a", folder / "out", "--max-file-bytes", 30_000]
    assert "5 of 10 pieces whole" in call(capsys, *line, "--part", "0/2")
    text = call(capsys, *line, "--status")
    assert "not complete" in text
    assert "missing: model-00006-of-00010.safetensors" in text
    assert "are missing" in call_error(capsys, *line, "--finish")
    text = call(capsys, *line, "--part", "1/2")
    assert "10 of 10 pieces whole" in text
    assert "20 tensors" in text
    assert tree_of(folder / "out") == tree_of(folder / "one")
    assert "20 tensors" in call(capsys, *line, "--finish")
    assert call_json(capsys, *line, "--status", "--watch")[0]["is_complete"]
    assert len(call_json(capsys, *line, "--abandon")["removed"]) == 1
    assert tree_of(folder / "out") == tree_of(folder / "one")
    assert "No work in parts" in call_error(capsys, *line, "--status")


def test_watching_before_the_first_part_has_begun(capsys, folder, monkeypatch):
    line = ["consolidate", folder / "a", folder / "out"]

    def begin(seconds):
        distckpt.tasks.consolidate(folder / "a", folder / "out", num_tasks=1)[0].run()

    # Where a user waits for the scheduler.
    monkeypatch.setattr("distckpt.cli._parts.time.sleep", begin)
    assert "1 of 1 piece whole" in call(capsys, *line, "--status", "--watch")


def test_the_part_that_the_scheduler_says(capsys, folder, monkeypatch):
    line = ["reshard", folder / "a", folder / "out", "--ranks", 4]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert "part 1/2" in call(capsys, *line, "--part", "auto/2")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert "20 tensors" in call(capsys, *line, "--part", "auto/2")
    assert distckpt.diff(folder / "a", folder / "out").is_same


def test_conversions(capsys, folder):
    call(capsys, "convert", folder / "a", folder / "td", "--to", "torch_dist", "--part", "0/1")
    call(capsys, "convert", folder / "td", folder / "out", "--part", "0/1")
    call(capsys, "export", folder / "a", folder / "hf")
    call(capsys, "import", folder / "hf", folder / "in", "--part", "0/1")
    call(capsys, "merge", folder / "in", folder / "out", folder / "merged", "--part", "0/1")
    assert distckpt.diff(folder / "a", folder / "out").is_same
    assert distckpt.diff(folder / "hf", folder / "merged").is_same


def test_checks(capsys, folder):
    journal = ["--journal", folder / "journal"]
    assert "OK" in call(capsys, "verify", folder / "a", *journal, "--part", "0/1")
    assert "complete" in call(capsys, "verify", folder / "a", *journal, "--status")
    assert "SAME" in call(capsys, "diff", folder / "a", folder / "a", *journal, "--part", "0/1")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["consolidate", "a", "b", "--part", "4/4"], "counted from 0, and the last of 4 is 3/4"),
        (["consolidate", "a", "b", "--part", "1/0"], "is no part; write 3/16"),
        (["consolidate", "a", "b", "--part", "auto/0"], "is no part; write 3/16"),
        (["consolidate", "a", "b", "--part", "4"], "is no part; write 3/16"),
        (["consolidate", "a", "b", "--part", "0/2", "--finish"], "not allowed with"),
        (["consolidate", "a", "b", "--watch"], "--watch goes with --status"),
        (["verify", "a", "--part", "0/2"], "needs --journal"),
        (["verify", "a", "--journal", "b"], "--journal one of --part"),
    ],
)
def test_what_makes_no_sense(capsys, line, text):
    assert text in call_usage_error(capsys, *line)
