"""The command line: `distckpt VERB ...` or `python -m distckpt VERB ...`.

Each verb has a file in this folder.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from distckpt._base.interrupts import paused_garbage_collection
from distckpt.cli._output import Output
from distckpt.cli._parser import parse

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, or print help when there are no arguments.

    Args:
        arguments: of the command line; None for the arguments of this process.

    Returns:
        The exit code: 0, 1 for errors and for checks that failed, 2 for errors of checks, 130 after
        Ctrl-C, 143 after SIGTERM.

    Raises:
        SystemExit: with code 2, the arguments make no sense.
    """
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    if parsed is None:
        return 0
    output = Output(as_json=parsed.json)
    try:
        # With most verbs torch is imported, too.
        with paused_garbage_collection():
            verb = importlib.import_module(f"distckpt.cli._{parsed.module}")
        with _signals_raise():
            code: int = verb.run(parsed, output)
            sys.stdout.flush()
        return code
    except _Terminated:
        output.error("terminated")
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        output.error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it; without this Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:
        if parsed.debug:
            raise
        # Messages name the argument in Python.
        text = str(error).replace("overwrite=True", "--overwrite")
        output.error(f"{text} ({type(error).__name__}; --debug shows where)")
        return int(parsed.error_code)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise exceptions, so that a verb cleans up."""
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def _terminate(signal_number: int, frame: object) -> None:
    raise _Terminated
