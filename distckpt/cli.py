"""The command line: `distckpt VERB ...` or `python -m distckpt VERB ...`.

To add a verb, write a module in `distckpt._cli` that defines a `Verb`, and list it in `_MODULES`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from distckpt import __version__
from distckpt._cli import (
    bench,
    cat,
    completion,
    consolidate,
    convert,
    diff,
    import_hf,
    inspect,
    prune,
    reshard,
    trace,
    verify,
)
from distckpt._cli.output import Output
from distckpt._cli.verb import Verb

__all__ = ["main"]

_MODULES = (inspect, cat, verify, diff, consolidate, import_hf, convert, reshard, prune, bench, trace)
VERBS: tuple[Verb, ...] = (*(module.VERB for module in _MODULES), completion.verb(lambda: _parser()))

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: of the command line, those of this process when None.

    Returns:
        The exit code: 0, 1 for errors and for checks that failed, 2 for errors of checks, 130 after Ctrl-C, 143 after
        SIGTERM.

    Raises:
        SystemExit: with code 2, the arguments make no sense.
    """
    parsed = _parser().parse_args(arguments)
    output = Output(as_json=parsed.json)
    # Ends like Ctrl-C, so that everything is cleaned up.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code: int = parsed.run(parsed, output)
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
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distckpt", description="Inspect, verify, compare and convert checkpoints.")
    parser.add_argument("--version", action="version", version=f"distckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        one = verbs.add_parser(verb.name, aliases=verb.aliases, help=verb.summary, description=verb.summary)
        verb.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print the result as JSON")
        one.add_argument("--debug", action="store_true", help="show a traceback when something fails")
        one.set_defaults(run=verb.run, error_code=verb.error_code)
    return parser


class _Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def _terminate(signal_number: int, frame: object) -> None:
    raise _Terminated
