"""What can be read: distckpt checkpoints, and folders of safetensors files that others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt import _hf_source, _storage, core, validation
from distckpt._io import checksum
from distckpt._manifest import MANIFEST_NAME, Manifest

BACKEND = "safetensors"
VERSION = 1


def identify(location: str) -> dict[str, Any]:
    """Return the marker of a checkpoint; for a folder of safetensors files without one, the fields it would need.

    Raises:
        CheckpointNotFoundError: nothing that can be read is there.
        CorruptCheckpointError: the marker is damaged or of a newer version.
    """
    if not _storage.exists(_storage.join(location, core.CONFIG_FNAME)) and _hf_source.holds_safetensors(location):
        return {"sharded_backend": BACKEND, "sharded_backend_version": VERSION, "manifest": None}
    return validation.verify_checkpoint(location)


def manifest_bytes(location: str, marker: Mapping[str, Any]) -> bytes:
    """Read the manifest, or make one from the headers of the files where there is none.

    Raises:
        CorruptCheckpointError: naming the file.
    """
    expected = marker.get("manifest", {})
    if expected is None:
        return _hf_source.read_directory(location).to_bytes()
    if not isinstance(expected, dict) or expected.get("name") != MANIFEST_NAME:
        raise core.CorruptCheckpointError(
            f"The marker of {location!r} names no {MANIFEST_NAME}: it was not written by the {BACKEND!r} backend, or "
            "was damaged."
        )
    path = _storage.join(location, MANIFEST_NAME)
    try:
        data = _storage.read_bytes(path)
    except FileNotFoundError as error:
        raise core.CorruptCheckpointError(f"The manifest {path!r} is missing: restore it from a copy.") from error
    if len(data) != expected.get("bytes") or f"{checksum(data):016x}" != expected.get("checksum"):
        raise core.CorruptCheckpointError(
            f"The manifest {path!r} is not the one that was saved (size or checksum differs from {core.CONFIG_FNAME}): "
            "restore both from a copy, or load another checkpoint."
        )
    return data


def open_manifest(location: str) -> Manifest:
    """Open what is at a location."""
    return Manifest.from_bytes(manifest_bytes(location, identify(location)), location)
