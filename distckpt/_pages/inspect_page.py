"""The page that `distckpt inspect --html` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.file_checks import Problem
from distckpt._pages.page import write_page
from distckpt.cli._output import count_text, finite, size_text
from distckpt.cli._plain import plain
from distckpt.cli._summary import objects_text, save_text
from distckpt.cli._verify import describe
from distckpt.cli._writers import list_files, list_writers


def write_inspect_page(
    path: str, stored: StoredCheckpoint, facts: dict[str, Any], problems: Sequence[Problem]
) -> None:
    """Write a page about a checkpoint: its facts, and the problems of its files."""
    texts = (facts["location"], save_text(facts), objects_text(facts))
    head = {
        "title": stored.location.rstrip("/").rpartition("/")[2],
        "lines": [("", text) for text in texts if text],
        "problems": list(map(describe, problems)),
        "common": _common_state_text(stored) if facts["common_state"] else "",
        "tiles": _tiles(stored, facts),
    }
    names = {}
    for key in stored.manifest.key_index:
        if not stored.is_object(key):
            names[key] = key
    write_page(path, stored, names, head)


def _common_state_text(stored: StoredCheckpoint) -> str:
    values = plain(load_common_state(stored))
    if values:
        return json.dumps(finite(values), indent=2, ensure_ascii=False)
    return ""


def _tiles(stored: StoredCheckpoint, facts: dict[str, Any]) -> list[tuple[str, ...]]:
    writers = list_writers(list_files(stored.manifest))
    num_ranks = sum(writer["rank"] is not None for writer in writers)
    written = ""
    if num_ranks:
        written = f", written by {count_text(num_ranks, 'rank')}"
    files = count_text(facts["num_files"], "file") + written
    return [
        tuple(count_text(facts["num_tensors"], "tensor").split(" ")),
        (_count_in_words(facts["num_elements"]), "elements"),
        (size_text(facts["tensor_bytes"]), "of tensors"),
        tuple(files.split(" ", 1)),
    ]


def _count_in_words(number: int) -> str:
    for name, unit in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,}"
