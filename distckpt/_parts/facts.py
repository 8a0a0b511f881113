"""What the result of some work depends on, as texts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distckpt._base import version
from distckpt._base.errors import CheckpointingException
from distckpt._checkpoint.file_states import states_of_files
from distckpt._checkpoint.opening import check_is_unchanged
from distckpt._format.manifest import FORMAT_VERSION
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.extra_files import ExtraFiles
from distckpt._plan.export import OutputTensor
from distckpt._storage import locations

_VERSION = 2
"""Of the division into pieces and of what journals hold; processes of another one do not go on with
them.
"""
_MAX_TEXT = 200
_CONFIG, _MAX_CONFIG = "config.json", 1 << 28
_UNIMPORTANT = ("max_inflight_bytes", "progress")
"""Options that change nothing in what is written."""
_PLANNED = ("rules", "fqn_to_index_mapping")
"""Options that show in the plan, and may have no text that is the same in each process."""


def facts_of(
    options: Mapping[str, Any],
    checkpoints: Sequence[StoredCheckpoint],
    outputs: Iterable[OutputTensor] = (),
) -> dict[str, str]:
    """Return what the result depends on, by name.

    Args:
        options: of the call.
        checkpoints: that are read.
        outputs: tensors that are written.
    """
    chosen = {
        name: _short(_in_order(value) if name == "keys" else value)
        for name, value in options.items()
        if name not in (*_UNIMPORTANT, *_PLANNED)
    }
    # What two versions compute of the same values may differ.
    versions = {
        "the version of distckpt": version.__version__,
        "the version of journals": f"{_VERSION}, format {FORMAT_VERSION}",
    }
    facts = {**versions, **chosen, **facts_of_sources(checkpoints)}
    return {**facts, "the plan (rules, names, shapes)": _digest_of_plan(outputs)}


def facts_of_extra_files(extra: ExtraFiles) -> dict[str, str]:
    """Return what tells the files beside the weights, by name."""
    contents = {locations.split(path)[1]: locations.read_bytes(path) for path in extra.copied}
    return {
        f"the extra file {name}": _digest([content])
        for name, content in {**contents, **extra.written}.items()
    }


def facts_of_sources(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return what tells the content of each source."""
    many = len(checkpoints) > 1
    return {
        f"the source {number}" if many else "the source": _content_of(stored)
        for number, stored in enumerate(checkpoints)
    }


def facts_of_copies(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return what tells each source from its copies, and files from what replaces them: for reports
    on the files themselves.
    """
    return {
        f"the files of the source {number}": f"{stored.location} {_digest([_looks_of(stored)])}"
        for number, stored in enumerate(checkpoints)
    }


def check_sources(facts: Mapping[str, str], checkpoints: Sequence[StoredCheckpoint]) -> None:
    """Refuse to complete work whose sources have changed since it began.

    Raises:
        CheckpointNotFoundError: one was removed.
        CheckpointingException: one has changed.
    """
    found = facts_of_sources(checkpoints)
    for (name, fact), stored in zip(found.items(), checkpoints, strict=True):
        check_is_unchanged(stored)
        if facts[name] != fact:
            raise CheckpointingException(
                f"{stored.location!r} was changed while parts were reading it: nothing was "
                "completed. Abandon this attempt (--abandon, or distckpt.tasks.abandon) and begin "
                "again."
            )


def _content_of(stored: StoredCheckpoint) -> str:
    """Return a text for the content of a checkpoint: another one has another text."""
    manifest = stored.marker.get("manifest")
    if isinstance(manifest, dict):
        return str(manifest.get("checksum"))
    # Without checksums, sizes and times have to tell.
    return _digest([stored.manifest.to_bytes(), _looks_of(stored), *_configs_of(stored)])


def _configs_of(stored: StoredCheckpoint) -> list[bytes]:
    """Return what the configurations beside files of other programs hold, which say how values are
    read: how they are quantized, or the scaling of an adapter.
    """
    location = stored.location
    names = locations.list_names(location) if locations.isdir(location) else []
    paths = [locations.join(location, name) for name in sorted(names) if name.endswith(_CONFIG)]
    return [locations.read_bytes(path, _MAX_CONFIG) for path in paths]


def _looks_of(stored: StoredCheckpoint) -> bytes:
    """Return the sizes and times of the files of a checkpoint, as a text."""
    known = locations.listed_states(stored.location)
    states = states_of_files(stored.location, stored.manifest, known)
    # Sizes and times alone: modes and links may change between the parts, which can take days.
    return json.dumps([state[:2] for state in states.values()]).encode()


def _digest_of_plan(outputs: Iterable[OutputTensor]) -> str:
    return _digest(repr(tuple(output)).encode() for output in outputs)


def _digest(texts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text)
    return found.hexdigest()[:16]


def _in_order(patterns: str | Sequence[str] | None) -> list[str] | None:
    """Return the same patterns for each order in which they may be given."""
    if patterns is None:
        return None
    return sorted({patterns} if isinstance(patterns, str) else set(patterns))


def _short(value: Any) -> str:
    text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... {_digest([text.encode()])}"
