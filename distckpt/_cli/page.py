"""A page of HTML about a checkpoint, or about the differences between two, from the template
`page.html`.

All that comes from a checkpoint is in one compressed block of JSON, which its texts cannot break
out of, and which the page shows as text.
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
from distckpt._cli.grid import chunks_of
from distckpt._cli.output import finite
from distckpt._cli.writers import balance_text, list_files, list_writers, owner_of
from distckpt._format.stored_checkpoint import StoredCheckpoint

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
        head: about the whole: `title`, `lines` (pairs of a label and a text), `tiles` (pairs of a
            number and what it counts), `common` (a text), `problems` (texts, if there are any); for
            a comparison also `same`, and `objects` (place, value in A, in B).
        changes: for a comparison the differences by name: `text`, `rate` (rel L2, None if no values
            differ), and if some do, `max`, `different`, `elements` and `where`.
        other: for a comparison the other checkpoint, and the keys that it alone has.
    """
    files = list_files(stored.manifest)
    writers = list_writers(files)
    owners = [owner_of(writer["rank"], writer["file"]) for writer in writers]
    places = {owner: place for place, owner in enumerate(owners)}
    tensors = [_describe(stored, name, key, places, changes or {}) for name, key in names.items()]
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
    """Return name, dtype, shape, bytes, chunks (place of the owner, offset, shape, bytes), tied
    tensor, difference.
    """
    found = chunks_of(stored, key)
    chunks = [[places[c.owner], c.offset, c.shape, c.num_bytes] for c in found] if places else []
    size = sum(chunk.num_bytes for chunk in found)
    shape, tied = stored.global_shape(key), stored.manifest.aliases.get(key)
    return [name, stored.dtype_name(key), shape, size, chunks, tied, changes.get(name)]
