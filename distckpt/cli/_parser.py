"""The verbs of the command line and its parser.

To add a verb, list it in `VERBS`, declare its arguments in `_arguments.py`, and define
`run(arguments, output)` in its module. The module, and torch with it, is imported when the verb
runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from distckpt._base.messages import did_you_mean
from distckpt._base.version import __version__
from distckpt.cli import _arguments as arguments

_EXAMPLES = """examples:
  distckpt inspect checkpoints/step_100                     its content, and the ranks that wrote it
  distckpt diff checkpoints/step_100 checkpoints/step_200   which tensors differ, and by how much
  distckpt export checkpoints/step_100 exports/step_100     one Hugging Face directory of all shards

`distckpt VERB --help` lists the options of a verb."""


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Attributes:
        name: its name.
        summary: one line for the help.
        module: `_MODULE.py` in this folder; its `run` returns the exit code, and an exception is
            printed as one line.
        aliases: further names.
        error_code: the exit code for exceptions; 2 for checks, whose 1 means that the check failed.
        arguments: the function in `_arguments.py` that declares them, unless it has the name of
            the module.
    """

    name: str
    summary: str
    module: str
    aliases: tuple[str, ...] = ()
    error_code: int = 1
    arguments: str = ""


VERBS = (
    Verb(
        "ls",
        "List the checkpoints of a run: size, time, metrics, and whether they are whole.",
        "ls",
    ),
    Verb("inspect", "Show the content of a checkpoint and which ranks wrote it.", "inspect"),
    Verb("cat", "Print values of a tensor or an object, or save them for numpy.", "cat"),
    Verb("verify", "Check that a checkpoint is complete and undamaged.", "verify", error_code=2),
    Verb("seal", "Store the checksums of another program's checkpoint beside it.", "seal"),
    Verb("stats", "Norm, extremes, NaN and zeros of each tensor.", "stats", error_code=2),
    Verb(
        "diff",
        "Compare two checkpoints: keys, shapes, dtypes, values, objects.",
        "diff",
        error_code=2,
    ),
    Verb(
        "consolidate",
        "Merge the shards of a checkpoint into a Hugging Face directory.",
        "consolidate",
        ("export",),
    ),
    Verb(
        "merge",
        "Average checkpoints into a Hugging Face directory.",
        "consolidate",
        arguments="merge",
    ),
    Verb(
        "import",
        "Convert a Hugging Face directory to a checkpoint.",
        "reshard",
        arguments="import_hf",
    ),
    Verb(
        "convert",
        "Convert a checkpoint of PyTorch, Megatron Core or DeepSpeed, or make one for these.",
        "reshard",
        arguments="convert",
    ),
    Verb("reshard", "Rewrite a checkpoint as other ranks would have saved it.", "reshard"),
    Verb("plan", "Show what a load and a save under a layout would cost.", "plan"),
    Verb("reject", "Let managers pass over a step that a check found bad.", "reject"),
    Verb("prune", "Remove old checkpoints, and leftovers of interrupted saves.", "prune"),
    Verb("bench", "Measure saves and loads, and the raw speed of a storage.", "bench"),
    Verb("trace", "Turn a journal of phases into a Chrome trace.", "trace"),
    Verb("completion", "Print a script with which a shell completes this command.", "completion"),
)


_ELSEWHERE = {
    "check": "verify PATH",
    "compare": "diff A B",
    "delete": "prune ROOT, or rm -r of the directory",
    "dump": "cat PATH KEY",
    "du": "ls ROOT, or inspect PATH --sort size",
    "head": "cat PATH KEY",
    "help": "--help, or VERB --help",
    "info": "inspect PATH",
    "keys": "inspect PATH",
    "list": "ls ROOT",
    "load": "distckpt.load in a program; inspect PATH or cat PATH KEY to look",
    "print": "cat PATH KEY",
    "restore": "distckpt.load in a program",
    "rm": "prune ROOT, or rm -r of the directory",
    "save": "distckpt.save in a program",
    "show": "inspect PATH, or cat PATH KEY",
    "size": "ls ROOT, or inspect PATH --sort size",
    "tree": "inspect PATH --tree",
    "watch": "ls ROOT --html FILE",
}
"""Aliases of verbs that other commands use."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def parse(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse the command line; without any words, print help and return None."""
    parser = make_parser()
    if not words:
        parser.print_help()
        return None
    _check_verb(parser, words[0])
    parsed, unknown = parser.parse_known_args(words)
    parser_of_verb = getattr(parsed, "parser", parser)
    if unknown:
        _refuse(parser_of_verb, unknown[0])
    if text := arguments.contradiction(parsed):
        parser_of_verb.error(text)
    return parsed


def _check_verb(parser: argparse.ArgumentParser, word: str) -> None:
    verbs: list[str] = []
    for verb in VERBS:
        verbs.extend((verb.name, *verb.aliases))
    if not word.startswith("-") and word not in verbs:
        near = f": use {_ELSEWHERE[word]}" if word in _ELSEWHERE else did_you_mean(word, verbs)
        near = near or f": choose from {', '.join(verbs)}"
        parser.error(f"there is no verb {word!r}{near}")


def _refuse(parser: argparse.ArgumentParser, word: str) -> None:
    options: list[str] = []
    for action in parser._actions:
        options.extend(action.option_strings)
    near = did_you_mean(word, options)
    kind = "does not take"
    if word.startswith("-"):
        kind = "has no option"
    verb = parser.prog.rpartition(" ")[2]
    parser.error(f"{verb} {kind} {word!r}{near}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="distckpt",
        description="Inspect, verify, compare and convert checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in VERBS:
        verb_parser = verbs.add_parser(
            verb.name, aliases=verb.aliases, help=verb.summary, description=verb.summary
        )
        getattr(arguments, verb.arguments or verb.module)(verb_parser)
        verb_parser.add_argument("--json", action="store_true", help="print the result as JSON")
        verb_parser.add_argument(
            "--debug", action="store_true", help="show a traceback when something fails"
        )
        verb_parser.set_defaults(module=verb.module, error_code=verb.error_code, parser=verb_parser)
    return parser
