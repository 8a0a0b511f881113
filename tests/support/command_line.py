"""The options of the command line as tables of docs/command-line.md, taken from its parser.

python -m tests.support.command_line  # writes them into the page
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from distckpt.cli._parser import VERBS, make_parser

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"(?<=<!-- options of )([\w ]+)( -->\n).*?(?=<!-- end -->\n)", re.S)
VERB_NAMES = [verb.name for verb in VERBS]
PARTS = "parts"
OF_EVERY_VERB = {"--help", "--json", "--debug"}
SUPERSETS = {"merge": "consolidate"}
"""Verbs whose table lists only the options that another verb lacks."""


def with_tables(page: str) -> str:
    """Replace the text between the comments that name a verb by its options."""
    tables = make_tables()
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}\n{tables[match[1]]}\n", page)


def make_tables() -> dict[str, str]:
    """Return a table of options for each verb that has some, and one of work in parts."""
    parsers = {verb: parser_of(verb) for verb in VERB_NAMES}
    tables = {PARTS: _table(_parts_of(parsers["verify"]))}
    for verb, parser in parsers.items():
        listed = {*OF_EVERY_VERB, *(_name(action) for action in _parts_of(parser))}
        if verb in SUPERSETS:
            listed |= {_name(action) for action in parsers[SUPERSETS[verb]]._actions}
        options = [action for action in _options_of(parser) if _name(action) not in listed]
        if options:
            tables[verb] = _table(options)
    return tables


def parser_of(verb: str) -> argparse.ArgumentParser:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser: argparse.ArgumentParser = action.choices[verb]
            return parser
    raise AssertionError("the command line has no verbs")


def _options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _parts_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of work in parts, `--journal` included."""
    members = [action for group in _groups_of_parts(parser) for action in group._group_actions]
    return members + [action for action in parser._actions if _name(action) == "--journal"]


def _groups_of_parts(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    return [group for group in parser._action_groups if group.title == "in parts"]


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.dest


def _table(options: list[argparse.Action]) -> str:
    rows = [f"| `{_usage(action)}` | {_help(action)} |\n" for action in options]
    return "| option | |\n|---|---|\n" + "".join(rows)


def _usage(action: argparse.Action) -> str:
    """Return the option with the name of its value; `\\|` separates choices within a table."""
    words = [", ".join(action.option_strings)]
    if action.nargs != 0:
        value = action.metavar or _name(action).removeprefix("--").upper()
        choices = "|".join(map(str, action.choices or ()))
        words.append(choices or str(value))
    if action.nargs == "+":
        words.append("...")
    return " ".join(words).replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default}
    return text.replace("*", "\\*").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
