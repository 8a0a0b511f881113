"""README and docs: Python blocks run, commands parse, explained messages are in the code, links lead somewhere."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest

from distckpt import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return all blocks of a language, with names."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    found = {page: pattern.findall(page.read_text()) for page in PAGES}
    return [(f"{name_of(page)}-{number}", block) for page in PAGES for number, block in enumerate(found[page])]


COMMANDS = [
    (name, line)
    for name, block in blocks("sh")
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("distckpt ")
]


def parameters(named: list[tuple[str, str]]) -> list[object]:
    return [pytest.param(text, id=name) for name, text in named]


@pytest.mark.parametrize("block", parameters(blocks("python")))
def test_python_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("line", parameters(COMMANDS))
def test_command_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    own = itertools.takewhile(lambda word: word not in ("|", ">", "&&"), words[1:])
    cli._parser().parse_args(list(own))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def texts_of_the_package() -> list[str]:
    """Return all texts in the code, with `…` in the place of what is filled in."""
    texts = []
    for file in (ROOT / "distckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[srd]", "…", node.value))
    return texts


TEXTS = texts_of_the_package()
MESSAGES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


def test_many_messages_are_explained() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 20


def holds_in_order(text: str, parts: list[str]) -> bool:
    position = 0
    for part in parts:
        position = text.find(part, position) + len(part)
        if position < len(part):
            return False
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_an_explained_message_is_one_of_the_code(message: str) -> None:
    # What is filled in may stand between quotes in the code.
    parts = [part.strip() for part in message.split("…")]
    assert [text for text in TEXTS if holds_in_order(text, parts)], message
