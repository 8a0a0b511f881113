"""What can be read: distckpt checkpoints, folders of safetensors files, checkpoints of PyTorch and Megatron Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt import _dcp_source, _hf_source, _storage, core, validation
from distckpt._io import checksum
from distckpt._manifest import MANIFEST_NAME, MAX_TABLE_BYTES, Manifest, is_manifest_name

BACKEND = "safetensors"
VERSION = 1


def identify(location: str, marker: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the marker of a checkpoint; for one that others wrote, the fields that a marker would need.

    Args:
        location: of the checkpoint.
        marker: its content, when it was read already: on an object store each look takes a request.

    Raises:
        CheckpointNotFoundError: nothing that can be read is there.
        CorruptCheckpointError: the marker is damaged or of a newer version.
    """
    foreign = {"sharded_backend": BACKEND, "sharded_backend_version": VERSION, "manifest": None}
    if marker is None:
        marker = core.read_marker(location)
    if marker is None and (_dcp_source.holds_metadata(location) or _hf_source.holds_safetensors(location)):
        return foreign
    marker = validation.check_marker(marker, location)
    return foreign if marker["sharded_backend"] == _dcp_source.MARKER_BACKEND else marker


def manifest_bytes(location: str, marker: Mapping[str, Any]) -> bytes:
    """Read the manifest, or make one from what the files say of themselves where there is none.

    Raises:
        CorruptCheckpointError: naming the file.
    """
    expected = marker.get("manifest", {})
    if expected is None and not _hf_source.holds_safetensors(location):
        return _dcp_source.read_directory(location).to_bytes()
    if expected is None:
        return _hf_source.read_directory(location).to_bytes()
    if not isinstance(expected, dict) or not is_manifest_name(expected.get("name")):
        raise core.CorruptCheckpointError(
            f"The marker of {location!r} names no {MANIFEST_NAME}: it was not written by the {BACKEND!r} backend, or "
            "was damaged."
        )
    path = _storage.join(location, expected["name"])
    try:
        data = core.read_file(path, MAX_TABLE_BYTES)
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
