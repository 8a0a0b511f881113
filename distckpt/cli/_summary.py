"""Facts about a whole checkpoint, and their texts."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import numpy as np

from distckpt._base.dtypes import PACKED_PER_ITEM
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import dotted
from distckpt._checkpoint.stored_values import holds_objects, load_common_state
from distckpt._format.codec.encode import unknown_objects
from distckpt._format.codec.tree import NOT_STORED
from distckpt._format.manifest import OBJECT
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt.cli._output import count_text, size_text, time_text

_MAX_NAMES = 12


def summarize(stored: StoredCheckpoint) -> dict[str, Any]:
    """Count the tensors, objects, chunks and files of a checkpoint.

    Each name of a tied tensor counts.
    """
    manifest = stored.manifest
    is_tensor = np.array([dtype != OBJECT for dtype in manifest.dtypes], bool)
    sizes = manifest.sums.bytes_of_keys
    items = []
    for shape, dtype in zip(manifest.global_shapes, manifest.dtypes, strict=True):
        if dtype != OBJECT:
            items.append(math.prod(shape) * PACKED_PER_ITEM.get(dtype, 1))
    return {
        "location": stored.location,
        "num_tensors": manifest.num_tensors,
        "num_elements": sum(items),
        "tensor_bytes": int(sizes[is_tensor].sum()),
        "num_objects": int((~is_tensor).sum()) - (COMMON_KEY in manifest.key_index),
        "object_bytes": int(sizes[~is_tensor].sum()),
        "num_chunks": len(manifest.key_ids),
        "num_files": len(manifest.files),
        "has_checksums": manifest.has_checksums or "seal" in (manifest.origin or {}),
        "tied": manifest.aliases,
        **_save_facts(stored),
    }


def _save_facts(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return facts from the marker and common state.

    These are the time, the step, the format, the names in common state, and the values that the
    save left out of it.
    """
    path = locations.join(stored.location, CONFIG_FNAME)
    origin = stored.manifest.origin
    marker = (read_marker(stored.location) if origin is None else None) or {}
    note = marker.get("manager")
    own_format = f"distckpt {marker.get('format_version', 1)}"
    return {
        "saved_at": locations.modified_time(path) if marker else None,
        "step": note.get("step") if isinstance(note, dict) else None,
        "format": (origin or {}).get("format") or own_format,
        **_common_state_names(stored),
    }


def _common_state_names(stored: StoredCheckpoint) -> dict[str, list[str]]:
    """Return the names in common state, or none if it is unreadable."""
    common: dict[Any, Any] = {}
    with contextlib.suppress(CheckpointingException, OSError):
        common = {}
        if holds_objects(stored):
            common = load_common_state(stored)
    left_out = []
    for position, unknown in unknown_objects(common):
        if unknown.name.startswith(NOT_STORED):
            left_out.append(dotted(position))
    return {"common_state": list(map(str, common)), "left_out": left_out}


def save_text(facts: dict[str, Any]) -> str:
    """Describe the time and format of a save in one line."""
    parts = ["" if facts["step"] is None else f"step {facts['step']}", f"format {facts['format']}"]
    if (written := facts["saved_at"]) is not None:
        # It is not called the time of the save, because copying a checkpoint changes it.
        zone = time.strftime("UTC%z", time.localtime(written)).removesuffix("+0000")
        parts.append(f"{CONFIG_FNAME} written {time_text(written)} {zone}")
    return ", ".join(filter(None, [*parts, "" if facts["has_checksums"] else "no checksums"]))


def objects_text(facts: dict[str, Any]) -> str:
    """Count objects and name the values of common state in one line.

    It may be empty.
    """
    if not facts["object_bytes"]:
        return ""
    names = facts["common_state"]
    more = ""
    if len(names) > _MAX_NAMES:
        more = f", ... ({len(names)})"
    common = ""
    if names:
        common = f"common state ({', '.join(names[:_MAX_NAMES])}{more})"
    if facts["left_out"]:
        common += f" without {summarize_keys(facts['left_out'])}, which the save left out"
    objects = ""
    if facts["num_objects"]:
        objects = count_text(facts["num_objects"], "object")
    parts = list(filter(None, [objects, common]))
    if parts:
        return f"{' and '.join(parts)}, {size_text(facts['object_bytes'])}"
    return ""
