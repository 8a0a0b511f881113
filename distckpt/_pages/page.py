"""A page about a checkpoint or a comparison, from the template `page.html`.

Everything from a checkpoint is in one compressed block of JSON. Its texts cannot break out of it,
and the page shows them as text.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import natural_order
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt.cli._grid import chunks_of
from distckpt.cli._output import finite
from distckpt.cli._writers import balance_text, list_files, list_writers, owner_of

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
    places = {}
    for place, owner in enumerate(owners):
        places[owner] = place
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
    chunks_of_key = chunks_of(stored, key)
    chunks = (
        [[places[c.owner], c.offset, c.shape, c.num_bytes] for c in chunks_of_key] if places else []
    )
    size = sum(chunk.num_bytes for chunk in chunks_of_key)
    shape = stored.global_shape(key)
    tied = stored.manifest.aliases.get(key)
    return [name, stored.dtype_name(key), shape, size, chunks, tied, changes.get(name)]
