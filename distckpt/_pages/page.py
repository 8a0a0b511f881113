"""A page about a checkpoint or a comparison, from the template `page.html`.

Everything from a checkpoint is in one compressed block of JSON. Its texts cannot break out of it,
and the page shows them as text.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import natural_order
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.file_checks import Problem
from distckpt._plan.selection import names_of_tensors
from distckpt.cli._grid import balance_text, chunks_of, list_files, list_writers, owner_of
from distckpt.cli._output import count_text, finite, size_text
from distckpt.cli._plain import plain
from distckpt.cli._summary import objects_text, save_text
from distckpt.cli._verify import describe

_MAX_TEXT = 200_000


def write_page(
    path: str,
    stored: StoredCheckpoint,
    names: Mapping[str, str],
    head: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    other: tuple[StoredCheckpoint, Sequence[str]] | None = None,
) -> None:
    """Write a page.

    Args:
        path: of the file.
        stored: the checkpoint.
        names: the tensors to show, as name on the page -> key.
        head: facts about the whole: `title`, `lines` (pairs of a label and a text), `tiles` (pairs
            of a number and its name), `common` (a text), `problems` (texts, if there are any); for
            a comparison also `same`, and `objects` (place, value in A, in B).
        changes: for a comparison the differences by name: `text`, `rate` (rel L2, None if no values
            differ), and if some do, `max`, `different`, `elements` and `where`.
        other: for a comparison the other checkpoint, and the keys that only it has.
    """
    files = list_files(stored.manifest)
    writers = list_writers(files)
    owners = [owner_of(writer["rank"], writer["file"]) for writer in writers]
    places = dict(zip(owners, itertools.count(), strict=False))
    tensors = []
    for name, key in names.items():
        tensors.append(_describe(stored, name, key, places, changes or {}))
    if other is not None:
        tensors += [_describe(other[0], key, key, None, changes or {}) for key in other[1]]
    content = {
        **head,
        "common": head.get("common", "")[:_MAX_TEXT],
        "name": stored.location.rstrip("/").rpartition("/")[2],
        "other": changes is not None,
        "chunks": len(stored.manifest.key_ids),
        "owners": owners,
        "files": files,
        "writers": writers,
        "balance": balance_text(writers),
        "tensors": sorted(tensors, key=lambda tensor: natural_order(tensor[0])),
    }
    data = gzip.compress(json.dumps(finite(content), separators=(",", ":")).encode(), mtime=0)
    template = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(template.replace("@DATA@", base64.b64encode(data).decode()))
    except OSError as error:
        raise CheckpointingException(
            f"The page cannot be written to {path!r}: {error.strerror}."
        ) from error


def _describe(
    stored: StoredCheckpoint,
    name: str,
    key: str,
    places: Mapping[str, int] | None,
    changes: Mapping[str, Any],
) -> list[Any]:
    """Return the row of a tensor, as the template expects it.

    It has name, dtype, shape, bytes, chunks (place of the owner, offset, shape, bytes), tied tensor
    and difference.
    """
    chunks = []
    size = 0
    for chunk in chunks_of(stored, key):
        size += chunk.num_bytes
        if places:
            chunks.append([places[chunk.owner], chunk.offset, chunk.shape, chunk.num_bytes])
    shape = stored.global_shape(key)
    tied = stored.manifest.aliases.get(key)
    return [name, stored.dtype_name(key), shape, size, chunks, tied, changes.get(name)]


# --- One checkpoint ------------------------------------------------------------------------------


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
    names = names_of_tensors(stored.manifest)
    write_page(path, stored, dict(zip(names, names, strict=True)), head)


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
