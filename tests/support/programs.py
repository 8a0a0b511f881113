"""Python programs that start in milliseconds: like ranks, they are forked from the process that has
imported torch.

They end as an interpreter does, with exit functions, threads and an exit code.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch.multiprocessing

from distckpt.cli import _processes as processes
from tests.support.harness import fork_context

PATIENCE = 200.0
"""Seconds after which a program is killed."""


class Program:
    """A running program; what it prints comes through the files `stdout` and `stderr`.

    At the end of a `with` block it is killed, and its files are closed.

    Args:
        arguments: those of `python`: `-c CODE`, `-m MODULE` or a file, with `-W error` before it or
            not.
        environment: its environment variables.
        folder: its current directory.
        streams: `stdout` and `stderr`, file descriptors to use instead of pipes.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        folder: str | Path = "/",
        **streams: int,
    ) -> None:
        pipes = {name: os.pipe() for name in ("stdout", "stderr") if name not in streams}
        ends = {name: Connection(os.dup(fd), readable=False) for name, fd in streams.items()}
        ends |= {name: Connection(pipe[1], readable=False) for name, pipe in pipes.items()}
        self.stdout, self.stderr = (
            os.fdopen(pipes[name][0]) if name in pipes else None for name in ("stdout", "stderr")
        )
        work = (arguments, dict(environment), str(folder), ends["stdout"], ends["stderr"])
        self._process = fork_context().Process(target=_become, args=work)
        self._process.start()
        for end in ends.values():
            end.close()
        self.pid: int = self._process.pid  # type: ignore[assignment]
        self._is_read = False

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self.communicate()

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, None while the program runs."""
        return self._process.exitcode

    poll = returncode.fget

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return the rest of the output, in the first call."""
        if self._is_read:
            return "", ""
        self._is_read = True
        with ThreadPoolExecutor() as pool:
            reads = [
                pool.submit(file.read) if file else None for file in (self.stdout, self.stderr)
            ]
            self._process.join(PATIENCE)
            self._process.kill()
            self._process.join()
            output, errors = (read.result() if read else "" for read in reads)
        for file in filter(None, (self.stdout, self.stderr)):
            file.close()
        return output, errors


def run_program(
    arguments: list[str], environment: Mapping[str, str], folder: str | Path = "/", **streams: int
) -> CompletedProcess[str]:
    """Run a program to its end; see `Program`."""
    program = Program(arguments, environment, folder, **streams)
    output, errors = program.communicate()
    return CompletedProcess(arguments, program.returncode, output, errors)  # type: ignore[arg-type]


def fork_spawned(monkeypatch: Any) -> None:
    """Let `distckpt.bench` start ranks as the harness does where it calls torch's
    `start_processes`.
    """
    fork_context()

    def start(
        function: Callable[..., None], args: tuple[Any, ...], num_ranks: int, join: bool
    ) -> Any:
        work = (dict(os.environ), function, *args)
        return torch.multiprocessing.start_processes(
            _run_rank, work, num_ranks, join, start_method="forkserver"
        )

    monkeypatch.setattr(processes, "start_processes", start)


def _run_rank(
    rank: int, environment: dict[str, str], function: Callable[..., None], *args: Any
) -> None:
    os.environ.update(environment)
    function(rank, *args)


def _become(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    stdout: Connection,
    stderr: Connection,
) -> None:
    """Be the program, and exit."""
    for number, (stream, end) in enumerate([(sys.stdout, stdout), (sys.stderr, stderr)], 1):
        os.dup2(end.fileno(), number)
        end.close()
        stream.reconfigure(line_buffering=number == 2 or os.isatty(number))  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Some start processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.resetwarnings()
    if arguments[0] == "-W":
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)  # of torch 2.6
        arguments = arguments[2:]
    # Torch 2.6 leaves a directory to the exit.
    warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
    code: Any = 0
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # multiprocessing would end the process without exit functions.
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code if isinstance(code, int) else bool(code)))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
