"""How tests run the command line: in this process (`call`), or, where that matters, as one of its
own (`run`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import signal
from pathlib import Path

import pytest

from distckpt import cli
from distckpt.cli._output import Output
from tests.support.programs import Program, run_program

ROOT = Path(__file__).parents[2]


def command(*arguments, path=()):
    """Return how Python starts the command line, and the environment."""
    places = os.pathsep.join(map(str, [*path, ROOT]))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return ["-W", "error", "-m", "distckpt", *map(str, arguments)], environment


def run(*arguments, code=0, path=()):
    """Run the command line to its end; return what it printed."""
    line, environment = command(*arguments, path=path)
    ended = run_program(line, environment)
    assert ended.returncode == code, ended.stderr
    return ended


def call(capsys, *arguments, code=0):
    """Run the command line in this process, which is faster and sees `memory://`; return what it
    printed.
    """
    capsys.readouterr()
    returned = cli.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert returned == code, printed.err
    return printed.out


def call_error(capsys, *arguments, code=1):
    """Run in this process what must fail with one line on stderr and nothing on stdout; return the
    line.
    """
    capsys.readouterr()
    assert cli.main(list(map(str, arguments))) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: "), printed.err
    assert printed.err.count("\n") == 1
    return printed.err


def call_usage_error(capsys, *arguments):
    """Run in this process what argparse refuses; return what it printed to stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        cli.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def call_json(capsys, *arguments, code=0):
    """Run the command line in this process with `--json`; return the value it printed."""
    return json.loads(call(capsys, *arguments, "--json", code=code))


def journal_line(fields):
    """Return an event as a journal holds it, which `trace` reads: with a checksum of its values."""
    digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()
    return json.dumps({**fields, "checksum": digest})


def shown_on_terminal(line, environment, stream):
    """Run a command with stdout or stderr being a terminal, the other one empty; return what the
    terminal shows.
    """
    master, terminal = pty.openpty()
    with Program(line, environment, **{stream: terminal}) as program:
        os.close(terminal)
        shown = b""
        try:
            while part := os.read(master, 65536):
                shown += part
        except OSError:
            pass  # how Linux reports that the other end of a terminal is closed
        os.close(master)
        printed = program.communicate()
    assert (program.returncode, printed[1]) == (0, "")
    return shown


def interrupt_at_first_progress(monkeypatch):
    """Let Ctrl-C come as soon as the work under way has moved its first bytes."""

    @contextlib.contextmanager
    def progress(self, label):
        yield lambda done, total: signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Output, "progress", progress)
    # Shells let what they start in the background ignore Ctrl-C, and that would be inherited.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    return lambda: signal.signal(signal.SIGINT, previous)
