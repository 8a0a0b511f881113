"""Facts about a whole checkpoint, and how to say them."""

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
from distckpt._cli.output import count_text, size_text, time_text
from distckpt._format.codec.encode import NOT_STORED, unknown_objects
from distckpt._format.manifest import OBJECT
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

_MAX_NAMES = 12


def summarize(stored: StoredCheckpoint) -> dict[str, Any]:
    """Count the tensors, each tied one by its name, objects, chunks and files of a checkpoint."""
    manifest = stored.manifest
    is_tensor = np.array([dtype != OBJECT for dtype in manifest.dtypes], bool)
    sizes = manifest.sums.bytes_of_keys
    items = [
        math.prod(shape) * PACKED_PER_ITEM.get(dtype, 1)
        for shape, dtype in zip(manifest.global_shapes, manifest.dtypes, strict=True)
        if dtype != OBJECT
    ]
    return {
        "location": stored.location,
        "num_tensors": manifest.num_tensors,
        "num_elements": sum(items),
        "tensor_bytes": int(sizes[is_tensor].sum()),
        "num_objects": sum(
            dtype == OBJECT and key != COMMON_KEY
            for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True)
        ),
        "object_bytes": int(sizes[~is_tensor].sum()),
        "num_chunks": len(manifest.key_ids),
        "num_files": len(manifest.files),
        "has_checksums": manifest.has_checksums,
        "tied": manifest.aliases,
        **_of_the_save(stored),
    }


def _of_the_save(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return what the marker and common state say: the time, the step, the format, the names in
    common state, and the values that the save left out of it.
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
        **_of_common_state(stored),
    }


def _of_common_state(stored: StoredCheckpoint) -> dict[str, list[str]]:
    """Return the names in common state; none if it cannot be read."""
    common: dict[Any, Any] = {}
    with contextlib.suppress(CheckpointingException, OSError):
        common = load_common_state(stored) if holds_objects(stored) else {}
    left_out = [
        dotted(position)
        for position, unknown in unknown_objects(common)
        if unknown.name.startswith(NOT_STORED)
    ]
    return {"common_state": [str(name) for name in common], "left_out": left_out}


def save_text(facts: dict[str, Any]) -> str:
    """Say when and in which format a checkpoint was saved, in one line."""
    parts = ["" if facts["step"] is None else f"step {facts['step']}", f"format {facts['format']}"]
    if (written := facts["saved_at"]) is not None:
        # It is not called the time of the save, because copying a checkpoint changes it.
        zone = time.strftime("UTC%z", time.localtime(written)).removesuffix("+0000")
        parts.append(f"{CONFIG_FNAME} written {time_text(written)} {zone}")
    return ", ".join(filter(None, [*parts, "" if facts["has_checksums"] else "no checksums"]))


def objects_text(facts: dict[str, Any]) -> str:
    """Count the objects and name what is in common state, in one line, which may be empty."""
    if not facts["object_bytes"]:
        return ""
    names = facts["common_state"]
    more = f", ... ({len(names)})" if len(names) > _MAX_NAMES else ""
    common = f"common state ({', '.join(names[:_MAX_NAMES])}{more})" if names else ""
    if facts["left_out"]:
        common += f" without {summarize_keys(facts['left_out'])}, which the save left out"
    objects = count_text(facts["num_objects"], "object") if facts["num_objects"] else ""
    parts = list(filter(None, [objects, common]))
    return f"{' and '.join(parts)}, {size_text(facts['object_bytes'])}" if parts else ""
