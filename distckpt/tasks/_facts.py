"""The facts on which the result of some work depends, as texts."""

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

_VERSION = 3
"""Version of the division into pieces and of the contents of journals.

Processes of another version do not go on with them.
"""
_MAX_TEXT = 200
_CONFIG = "config.json"
_MAX_CONFIG = 1 << 28
_UNIMPORTANT = ("max_inflight_bytes", "progress")
"""Options that do not change the output."""
_PLANNED = ("rules", "fqn_to_index_mapping")
"""Options that show in the plan.

Their text may differ from process to process.
"""


def facts_of(
    options: Mapping[str, Any],
    checkpoints: Sequence[StoredCheckpoint],
    outputs: Iterable[OutputTensor] = (),
) -> dict[str, str]:
    """Return the facts on which the result depends, by name.

    Args:
        options: of the call.
        checkpoints: the checkpoints to read.
        outputs: the tensors to write.
    """
    option_texts = {}
    for name, value in options.items():
        if name in (*_UNIMPORTANT, *_PLANNED):
            continue
        if name == "keys" and value is not None:
            # Their order does not matter.
            value = sorted({value} if isinstance(value, str) else set(value))
        option_texts[name] = _short(value)
    # Two versions may compute different values from the same input.
    versions = {
        "the version of distckpt": version.__version__,
        "the version of journals": f"{_VERSION}, format {FORMAT_VERSION}",
    }
    facts = {**versions, **option_texts, **facts_of_sources(checkpoints)}
    plan = _digest(repr(tuple(output)).encode() for output in outputs)
    return {**facts, "the plan (rules, names, shapes)": plan}


def facts_of_extra_files(extra: ExtraFiles) -> dict[str, str]:
    """Return texts that identify the files next to the weights, by name."""
    contents = {}
    for path in extra.copied:
        contents[locations.split(path)[1]] = locations.read_bytes(path)
    facts = {}
    for name, content in {**contents, **extra.written}.items():
        facts[f"the extra file {name}"] = _digest([content])
    return facts


def facts_of_sources(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return a text that identifies the content of each source."""
    facts = {}
    for number, stored in enumerate(checkpoints):
        name = f"the source {number}" if len(checkpoints) > 1 else "the source"
        facts[name] = _content_of(stored)
    return facts


def facts_of_copies(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return a text that distinguishes each source from its copies and replacements.

    It serves reports on the files themselves.
    """
    facts = {}
    for number, stored in enumerate(checkpoints):
        facts[f"the files of the source {number}"] = (
            f"{stored.location} {_digest([_looks_of(stored)])}"
        )
    return facts


def check_sources(facts: Mapping[str, str], checkpoints: Sequence[StoredCheckpoint]) -> None:
    """Refuse to complete work whose sources have changed since it began.

    Raises:
        CheckpointNotFoundError: one was removed.
        CheckpointingException: one has changed.
    """
    facts_now = facts_of_sources(checkpoints)
    for (name, fact), stored in zip(facts_now.items(), checkpoints, strict=True):
        check_is_unchanged(stored)
        if facts[name] != fact:
            raise CheckpointingException(
                f"{stored.location!r} was changed while parts were reading it: nothing was "
                "completed. Abandon this attempt (--abandon, or distckpt.tasks.abandon) and begin "
                "again."
            )


def _content_of(stored: StoredCheckpoint) -> str:
    """Return a text that identifies the content of a checkpoint."""
    manifest = stored.marker.get("manifest")
    if isinstance(manifest, dict):
        return str(manifest.get("checksum"))
    # Without checksums, sizes and times have to do.
    return _digest([stored.manifest.to_bytes(), _looks_of(stored), *_configs_of(stored)])


def _configs_of(stored: StoredCheckpoint) -> list[bytes]:
    """Return the contents of the configurations next to foreign files.

    They define how values are read: their quantization, or the scaling of an adapter.
    """
    location = stored.location
    names = []
    if locations.isdir(location):
        names = locations.list_names(location)
    paths = []
    for name in sorted(names):
        if name.endswith(_CONFIG):
            paths.append(locations.join(location, name))
    return [locations.read_bytes(path, _MAX_CONFIG) for path in paths]


def _looks_of(stored: StoredCheckpoint) -> bytes:
    """Return the sizes and times of a checkpoint's files, as JSON."""
    known = locations.listed_states(stored.location)
    states = states_of_files(stored.location, stored.manifest, known)
    # Sizes and times alone: modes and links may change between the parts, which can take days.
    return json.dumps([state[:2] for state in states.values()]).encode()


def _digest(texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    return digest.hexdigest()[:16]


def _short(value: Any) -> str:
    text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... {_digest([text.encode()])}"
