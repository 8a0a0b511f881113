"""`distckpt completion`: print a script for completion in a shell."""

from __future__ import annotations

import importlib
from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from typing import Any

from distckpt.cli._output import Output
from distckpt.cli._parser import make_parser


def run(arguments: Namespace, output: Output) -> int:
    """Print the script."""
    script = script_for(make_parser(), arguments.shell)
    output.json({"shell": arguments.shell, "script": script})
    output.line(script)
    return 0


def script_for(parser: ArgumentParser, shell: str) -> str:
    """Return the script for a shell.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    try:
        shtab: Any = importlib.import_module("shtab")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("completion needs shtab: pip install 'distckpt[cli]'") from error
    for action in _actions(parser):
        takes_file = not action.option_strings or action.metavar in ("FILE", "DIR")
        if takes_file and action.choices is None:
            # Where the library looks for it.
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    """Yield the arguments of a parser and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, _SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
