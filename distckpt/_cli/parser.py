"""The verbs of the command line and its parser.

To add a verb, declare its arguments in `arguments.py`, list it in `VERBS`, and define `run(arguments, output)`, which
returns the exit code, in a module of its name. The module is imported when the verb runs, and torch with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distckpt import __version__
from distckpt._base.messages import did_you_mean
from distckpt._cli import arguments

_EXAMPLES = """examples:
  distckpt inspect checkpoints/step_100                       what is in a checkpoint, and who wrote it
  distckpt diff checkpoints/step_100 checkpoints/step_200     which tensors differ, and by how much
  distckpt export checkpoints/step_100 exports/step_100       one Hugging Face directory of all shards

`distckpt VERB --help` lists the options of a verb."""


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        summary: one line for the help.
        add_arguments: declares its arguments, beside `--json` and `--debug`.
        module: of `distckpt._cli`, whose `run` returns the exit code; an exception is printed as one line.
        error_code: the exit code for exceptions; 2 for checks, whose 1 means that the check failed.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], object]
    module: str
    aliases: tuple[str, ...] = ()
    error_code: int = 1


VERBS = (
    Verb("ls", "List the checkpoints of a run: size, time, metrics, and whether they are whole.", arguments.ls, "ls"),
    Verb("inspect", "Show the content of a checkpoint and which ranks wrote it.", arguments.inspect, "inspect"),
    Verb("cat", "Print values of a tensor or an object, or save them for numpy.", arguments.cat, "cat"),
    Verb("verify", "Check that a checkpoint is complete and undamaged.", arguments.verify, "verify", error_code=2),
    Verb("stats", "Norm, extremes, NaN and zeros of each tensor.", arguments.stats, "stats", error_code=2),
    Verb(
        "diff",
        "Compare two checkpoints: keys, shapes, dtypes, values, objects.",
        arguments.diff,
        "diff",
        error_code=2,
    ),
    Verb(
        "consolidate",
        "Merge the shards of a checkpoint into a Hugging Face directory.",
        arguments.consolidate,
        "consolidate",
        aliases=("export",),
    ),
    Verb("merge", "Average checkpoints into a Hugging Face directory.", arguments.merge, "consolidate"),
    Verb("import", "Convert a Hugging Face directory to a checkpoint.", arguments.import_hf, "import_hf"),
    Verb(
        "convert",
        "Convert a checkpoint that PyTorch, Megatron Core or DeepSpeed wrote, or make one that the former read.",
        arguments.convert,
        "convert",
    ),
    Verb("reshard", "Rewrite a checkpoint as other ranks would have saved it.", arguments.reshard, "reshard"),
    Verb("prune", "Remove old checkpoints, and leftovers of interrupted saves.", arguments.prune, "prune"),
    Verb("bench", "Measure saves and loads beside the raw speed of a storage.", arguments.bench, "bench"),
    Verb("trace", "Turn a journal of phases into a Chrome trace.", arguments.trace, "trace"),
    Verb(
        "completion",
        "Print a script with which a shell completes this command.",
        arguments.completion,
        "completion",
    ),
)


def parse(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse the command line; None when help was printed, since there are no words."""
    parser = make_parser()
    if not words:
        parser.print_help()
        return None
    verbs = [name for verb in VERBS for name in (verb.name, *verb.aliases)]
    if not words[0].startswith("-") and words[0] not in verbs:
        near = did_you_mean(words[0], verbs) or f": choose from {', '.join(verbs)}"
        parser.error(f"there is no verb {words[0]!r}{near}")
    return parser.parse_args(words)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="distckpt",
        description="Inspect, verify, compare and convert checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"distckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in VERBS:
        one = verbs.add_parser(verb.name, aliases=verb.aliases, help=verb.summary, description=verb.summary)
        verb.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print the result as JSON")
        one.add_argument("--debug", action="store_true", help="show a traceback when something fails")
        one.set_defaults(module=verb.module, error_code=verb.error_code)
    return parser
