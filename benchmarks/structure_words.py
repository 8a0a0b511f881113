"""The docstrings, comments and pages of a package in numbers."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from structure_source import Finding, Module, docstrings

MAX_WORDS = 12
"""In the first sentence of a docstring."""

_SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+|\n\s*\n")
_WHAT = re.compile(r"(?<![`\w])what\b", re.IGNORECASE)
_ASKING = r"(?:ask|say|know|tell|show|explain|learn|see|state|decide|report|check)(?:s|d|ed|n|ing)?"
_ASKED = re.compile(
    rf"\b(?:{_ASKING}|said|told)\s+(?:\w+\s+)?what\b|\bwhat\s+(?:to|else)\b", re.IGNORECASE
)
_WEAK_BEGINNING = re.compile(r"(?:What|How|Of|That|Whose|Where)\b")
_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


class Text(NamedTuple):
    """A docstring, a comment or a page."""

    place: str
    text: str
    is_docstring: bool = False

    @property
    def num_words(self) -> int:
        """How many words it has."""
        return len(self.text.split())


def texts_of(modules: list[Module]) -> list[Text]:
    """Return all docstrings and comments; comments on consecutive lines are one."""
    texts = []
    for module in modules:
        for node in docstrings(module):
            texts.append(Text(f"{module.place}:{node.lineno}", str(node.value), True))
        texts += _comments(module)
    return texts


def _comments(module: Module) -> Iterator[Text]:
    block: list[str] = []
    last = 0
    for token in module.tokens:
        if token.type != tokenize.COMMENT:
            continue
        number = token.start[0]
        if block and number != last + 1:
            yield Text(f"{module.place}:{last}", " ".join(block))
            block = []
        block.append(token.string.lstrip("#: "))
        last = number
    if block:
        yield Text(f"{module.place}:{last}", " ".join(block))


def pages_of(checkout: Path) -> list[Text]:
    """Return the README and the pages of the documentation, without their code."""
    paths = sorted([*checkout.glob("README.md"), *checkout.glob("docs/*.md")])
    pages = []
    for path in paths:
        text = _CODE_BLOCK.sub("", path.read_text(encoding="utf-8"))
        pages.append(Text(str(path.relative_to(checkout)), text))
    return pages


def free_whats(texts: list[Text]) -> list[Finding]:
    """Return the sentences in which a relative "what" stands for a thing that could be named.

    Questions are left out, those that a verb such as "say" leads to, too, and "what to do".
    """
    findings = []
    for text in texts:
        for sentence in _SENTENCE_END.split(text.text):
            is_question = sentence.rstrip().endswith("?")
            if not is_question and _WHAT.search(_ASKED.sub("", sentence)):
                findings.append(Finding(text.place, " ".join(sentence.split())))
    return findings


def weak_beginnings(texts: list[Text]) -> list[Finding]:
    """Return the docstrings that begin with What, How, Of, That, Whose or Where."""
    return [one for one in _first_sentences(texts) if _WEAK_BEGINNING.match(one.text)]


def long_beginnings(texts: list[Text]) -> list[Finding]:
    """Return the docstrings whose first sentence has more than `MAX_WORDS` words."""
    return [one for one in _first_sentences(texts) if len(one.text.split()) > MAX_WORDS]


def _first_sentences(texts: list[Text]) -> Iterator[Finding]:
    for text in texts:
        if text.is_docstring:
            first = _SENTENCE_END.split(text.text.strip())[0]
            yield Finding(text.place, " ".join(first.split()))
