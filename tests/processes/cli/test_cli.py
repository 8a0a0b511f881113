"""The command line as a process: its start, terminals, pipes and signals. What each verb does is in
tests/unit/cli.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.cli_command import command, run, shown_on_terminal
from tests.support.programs import Program, run_program

BAR = "\u2501"  # a heavy horizontal line
GRID = torch.arange(60, dtype=torch.float32).view(6, 10)


@pytest.fixture
def checkpoint(tmp_path):
    columns = enumerate(GRID.chunk(2, 1))
    state = {
        f"g{i}": ShardedTensor.from_rank_offsets("grid", c.contiguous(), (1, i, 2))
        for i, c in columns
    }
    distckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_without_a_verb_help_is_shown():
    help_text = run().stdout
    assert help_text == run("--help").stdout
    assert len(re.findall("^  distckpt ", help_text.partition("examples:")[2], re.M)) == 3


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


# --- Terminals ------------------------------------------------------------------------------------


def test_progress_is_shown_on_terminals(checkpoint, tmp_path):
    line, environment = command("export", checkpoint, tmp_path / "out")
    shown = shown_on_terminal(line, environment, "stderr").decode()
    assert re.search(f"writing {BAR}{{30}} 240 B of 240 B", shown)


def test_progress_is_not_shown_elsewhere(checkpoint, tmp_path):
    assert run("export", checkpoint, tmp_path / "out").stderr == ""


@pytest.mark.parametrize("no_color", [False, True])
def test_inspect_is_colored_on_terminals(checkpoint, no_color):
    line, environment = command("inspect", checkpoint, "--key", "grid")
    environment |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_color else {})}
    shown = shown_on_terminal(line, environment, "stdout")
    assert b"[0:6, 5:10]" in shown
    assert (b"\x1b[48;2;78;121;167m" in shown) is not no_color


# --- Interruptions --------------------------------------------------------------------------------


def test_an_interrupt_while_torch_is_imported_is_quiet(checkpoint, tmp_path):
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text(interrupt)
    line, environment = command("export", checkpoint, tmp_path / "o", path=[tmp_path / "hidden"])
    # Shells let what they start in the background ignore Ctrl-C, and that would be inherited.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = subprocess.run(
        [sys.executable, *line], env=environment, capture_output=True, timeout=100, check=False
    )
    signal.signal(signal.SIGINT, previous)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupted_export_leaves_nothing(checkpoint, tmp_path, number, code, line):
    # The export waits for a file to copy, on which this process has a lease: its staging directory
    # is there meanwhile.
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "tokenizer.json").write_text("{}")
    is_opened = threading.Event()
    previous = signal.signal(signal.SIGUSR2, lambda *_: is_opened.set())
    with open(tmp_path / "extra" / "tokenizer.json", "r+b") as leased:
        fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGUSR2)
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        words, environment = command(
            "export", checkpoint, tmp_path / "out", "--extra-files-from", tmp_path / "extra"
        )
        with Program(words, environment) as process:
            assert is_opened.wait(200)
            assert any(".tmp-" in path.name for path in tmp_path.iterdir())
            process.send_signal(number)
            errors = process.communicate()[1]
    signal.signal(signal.SIGUSR2, previous)
    assert process.returncode == code
    assert f"error: {line}\n" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "extra"]
