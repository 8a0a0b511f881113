"""`distckpt completion`: print a script with which a shell completes verbs, options and file names."""

from __future__ import annotations

import importlib
from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from typing import Any

from distckpt._cli.output import Output
from distckpt._cli.verb import Verb

SHELLS = ("bash", "zsh", "fish")


def verb(make_parser: Callable[[], ArgumentParser]) -> Verb:
    """Make the verb; `make_parser` returns the parser of the whole command line."""

    def run(arguments: Namespace, output: Output) -> int:
        script = script_for(make_parser(), arguments.shell)
        output.json({"shell": arguments.shell, "script": script})
        output.line(script)
        return 0

    return Verb("completion", "Print a script with which a shell completes this command.", add_arguments, run)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


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
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where the library looks for it
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    """Yield the arguments of a parser and of the parsers of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, _SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
