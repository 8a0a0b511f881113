"""README and the pages of `docs`, the fenced blocks in them, and the lines of the shell in
these.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)(```+|~~~+)(.*)\n((?:.*\n)*?)\1\2 *$", re.M)


class Block(NamedTuple):
    """A fenced block; `name` is that of its page and its number there."""

    page: str
    name: str
    language: str
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def _blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, those in items of lists included."""
    found = enumerate(FENCED.findall(page.read_text()))
    name = name_of(page)
    return [
        Block(name, f"{name}-{i}", language, textwrap.dedent(text))
        for i, (_, _, language, text) in found
    ]


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]


def blocks(*languages: str, page: str | None = None) -> list[Block]:
    """Return the blocks of these languages, on all pages or on one."""
    return [block for block in BLOCKS if block.language in languages and page in (None, block.page)]


def lines_of(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def commands_in(line: str) -> list[list[str]]:
    """Return the commands of a line of the shell as words, without assignments, redirections and
    comments.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in (">", ">>"):
            next(lexer)
        elif word in ("&&", "||", "|", ";"):
            commands.append([])
        elif commands[-1] or not re.match(r"[A-Z_]+=", word):
            commands[-1].append(word)
    return [command for command in commands if command]
