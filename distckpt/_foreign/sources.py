"""What can be read: distckpt checkpoints, folders of safetensors files, checkpoints of PyTorch and Megatron Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt import validation
from distckpt._base.errors import CorruptCheckpointError
from distckpt._foreign import hugging_face
from distckpt._foreign.torch_dist import source
from distckpt._format.checksum import checksum
from distckpt._format.manifest import MANIFEST_NAME, MAX_TABLE_BYTES, Manifest, is_manifest_name
from distckpt._format.marker import CONFIG_FNAME, read_file, read_marker
from distckpt._storage import locations

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
        marker = read_marker(location)
    if marker is None and (source.holds_metadata(location) or hugging_face.holds_safetensors(location)):
        return foreign
    marker = validation.check_marker(marker, location)
    return foreign if marker["sharded_backend"] == source.MARKER_BACKEND else marker


def manifest_bytes(location: str, marker: Mapping[str, Any]) -> bytes:
    """Read the manifest, or make one from what the files say of themselves where there is none.

    Raises:
        CorruptCheckpointError: naming the file.
    """
    expected = marker.get("manifest", {})
    if expected is None and not hugging_face.holds_safetensors(location):
        return source.read_directory(location).to_bytes()
    if expected is None:
        return hugging_face.read_directory(location).to_bytes()
    if not isinstance(expected, dict) or not is_manifest_name(expected.get("name")):
        raise CorruptCheckpointError(
            f"The marker of {location!r} names no {MANIFEST_NAME}: it was not written by the {BACKEND!r} backend, or "
            "was damaged."
        )
    path = locations.join(location, expected["name"])
    try:
        data = read_file(path, MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"The manifest {path!r} is missing: restore it from a copy.") from error
    if len(data) != expected.get("bytes") or f"{checksum(data):016x}" != expected.get("checksum"):
        raise CorruptCheckpointError(
            f"The manifest {path!r} is not the one that was saved (size or checksum differs from {CONFIG_FNAME}): "
            "restore both from a copy, or load another checkpoint."
        )
    return data


def open_manifest(location: str) -> Manifest:
    """Open what is at a location."""
    return Manifest.from_bytes(manifest_bytes(location, identify(location)), location)
