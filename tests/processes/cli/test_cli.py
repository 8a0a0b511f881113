"""The command line as a process: its start, terminals, pipes and signals. What each verb does is in tests/unit/cli."""

from __future__ import annotations

import fcntl
import os
import signal
import threading

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.cli_command import call, command, run, shown_on_terminal
from tests.support.programs import Program, run_program

GRID = torch.arange(60, dtype=torch.float32).view(6, 10)


@pytest.fixture
def checkpoint(tmp_path):
    columns = enumerate(GRID.chunk(2, 1))
    state = {f"g{i}": ShardedTensor.from_rank_offsets("grid", c.contiguous(), (1, i, 2)) for i, c in columns}
    distckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def without_rich(tmp_path):
    """A folder that hides rich when it comes first in the path."""
    (tmp_path / "hidden" / "rich").mkdir(parents=True)
    (tmp_path / "hidden" / "rich" / "__init__.py").write_text("raise ImportError('not here')")
    return tmp_path / "hidden"


def test_without_a_verb_usage_is_shown():
    ended = run(code=2)
    assert ended.stdout == ""
    assert "usage: distckpt" in ended.stderr


def test_a_traceback_on_demand(tmp_path):
    trace = run("inspect", tmp_path / "nothing", "--debug", code=1).stderr
    assert trace.startswith("Traceback")
    assert "opening.py" in trace


def test_a_reader_that_stops_early_is_no_error(checkpoint):
    line, environment = command("inspect", checkpoint)
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_program(line, environment, stdout=writer)
    os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr == ""


# --- Terminals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide_rich", [False, True])
def test_progress_is_shown_on_terminals(checkpoint, tmp_path, without_rich, hide_rich):
    line, environment = command("export", checkpoint, tmp_path / "out", path=[without_rich] if hide_rich else [])
    shown = shown_on_terminal(line, {**environment, "TERM": "xterm"}, "stderr")
    assert b"writing" in shown
    assert (b"240 B of 240 B" in shown) is hide_rich


def test_progress_is_not_shown_elsewhere(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "out").stderr == ""


def test_inspect_works_without_rich(checkpoint, without_rich, capsys):
    assert run("inspect", checkpoint, path=[without_rich]).stdout == call(capsys, "inspect", checkpoint)


@pytest.mark.parametrize("no_colour", [False, True])
def test_inspect_is_coloured_on_terminals(checkpoint, no_colour):
    line, environment = command("inspect", checkpoint, "--key", "grid")
    environment |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_colour else {})}
    shown = shown_on_terminal(line, environment, "stdout")
    assert b"[0:6, 5:10]" in shown
    assert (b"\x1b[48;2;78;121;167m" in shown) is not no_colour


# --- Interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_export_leaves_nothing(checkpoint, tmp_path, number, code, line):
    # The export waits for a file to copy, on which this process has a lease: its staging directory is there meanwhile.
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "tokenizer.json").write_text("{}")
    is_opened = threading.Event()
    previous = signal.signal(signal.SIGUSR2, lambda *_: is_opened.set())
    with open(tmp_path / "extra" / "tokenizer.json", "r+b") as leased:
        fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGUSR2)
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        words, environment = command("export", checkpoint, tmp_path / "out", "--extra-files-from", tmp_path / "extra")
        process = Program(words, environment)
        assert is_opened.wait(200)
        assert any(".tmp-" in path.name for path in tmp_path.iterdir())
        process.send_signal(number)
        errors = process.communicate()[1]
    signal.signal(signal.SIGUSR2, previous)
    assert process.returncode == code
    assert f"error: {line}\n" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "extra"]
