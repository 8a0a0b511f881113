"""Presence of a complete checkpoint of a readable version at a location."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Sequence
from typing import Any

from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._base.messages import did_you_mean
from distckpt._commit import hidden_directories, posix
from distckpt._format.foreign_formats import MARKED_CHECKPOINTS, TORCH_DIST, ForeignFormat
from distckpt._format.manifest import is_manifest_name
from distckpt._format.marker import CONFIG_FNAME, parse_config
from distckpt._storage import locations

READER_VERSION = 4
"""The newest format version that this package reads."""
_MEGATRON_COMMON = "common.pt"
_PIPELINE = "model_index.json"
_HUB_NAME = re.compile(r"(?:.*\bhuggingface\.co/)?([\w-][\w.-]*/[\w-][\w.-]*)")
_OF_MODELS = ("config.json", ".safetensors.index.json")
_OF_FSDP = "pytorch_model_fsdp_0/.metadata"
_MARKERS = (CONFIG_FNAME, *(known.marker for known in MARKED_CHECKPOINTS), _OF_FSDP)
_MAX_PROBED = 200
_MAX_NAMED = 6
_ABOUT_OTHERS = {
    **dict.fromkeys(
        (".pt", ".pth", ".bin", ".ckpt"),
        "a file of torch.save, which distckpt does not open, since pickles can run code: read it "
        "with torch.load(path, weights_only=True), load_state_dict it into the model, and save "
        "that with distckpt.save.",
    ),
    ".gguf": (
        "a file of llama.cpp (GGUF), which distckpt does not read: open it with transformers, "
        "from_pretrained(path, gguf_file=...), and save that model, or load the Hugging Face "
        "directory that it was made of."
    ),
    ".tensors": (
        "a file of tensorizer, which distckpt does not read: load the model with tensorizer's "
        "TensorDeserializer and save that, or load the Hugging Face directory that it was made of."
    ),
}


def check_marker(marker: dict[str, Any] | None, location: str) -> dict[str, Any]:
    """Check that a marker is of a readable format.

    None stands for no marker. See `verify_checkpoint`.
    """
    if marker is None:
        raise CheckpointNotFoundError(absence(location))
    parse_config(marker, location)
    oldest_reader = marker.get("min_reader_version", 1)
    if type(oldest_reader) is not int or not 1 <= oldest_reader < 2**31:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader!r:.50}, which is no "
            f"version: its {CONFIG_FNAME} was damaged. Restore it from a copy, or load another "
            "checkpoint."
        )
    if oldest_reader > READER_VERSION:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader}; this release of "
            f"distckpt reads up to {READER_VERSION}. Install a newer release: pip install "
            "--upgrade distckpt"
        )
    return marker


def absence(location: str) -> str:
    """Describe a location without a complete checkpoint, and name one nearby."""
    if not locations.exists(location):
        return _absence_of_anything(location)
    if not locations.isdir(location):
        return _about_file(location)
    return _about_directory(location)


def _absence_of_anything(location: str) -> str:
    parent, name = locations.split(location)
    text = f"Checkpoint directory {location} does not exist"
    if (aside := posix.left_aside(location)) is not None:
        return f"{text}. Its overwriting was interrupted: rename {aside!r}, which is its content."
    hint = _about_hub(location)
    if (locations.is_local(location) or hint) and not locations.exists(parent):
        return f"{text}, and neither does {parent!r}.{hint}"
    names = [other for other in _names_in(parent) if hidden_directories.parse(other) is None]
    text += f"{did_you_mean(name, names)}."
    neighbors = _checkpoints_in(parent)
    if neighbors:
        return f"{text} Beside it: {neighbors}."
    return text


def _about_hub(location: str) -> str:
    """Tell how to load `org/model` from the Hugging Face hub."""
    match = None
    # The current directory may have been removed.
    with contextlib.suppress(FileNotFoundError):
        match = _HUB_NAME.fullmatch(os.path.relpath(location))
    if match is None:
        return ""
    return (
        f" If {match[1]!r} is a model on the Hugging Face hub, give the directory to which "
        f"huggingface_hub.snapshot_download({match[1]!r}) downloads it."
    )


def _suffix_by_content(location: str) -> str:
    """Return the usual suffix of a local file of tensorizer or torch.save."""
    # To open a pipe would wait for its other end.
    if locations.is_local(location) and os.path.isfile(location):
        # Imported when it is needed: where something is wrong.
        zipfile = importlib.import_module("zipfile")
        with contextlib.suppress(OSError, zipfile.BadZipFile):
            if locations.read_range(location, 0, 5) == b"|TZR|":
                return ".tensors"
            with zipfile.ZipFile(location) as archive:
                if any(name.endswith("/data.pkl") for name in archive.namelist()):
                    return ".pt"
    return ""


def _about_file(location: str) -> str:
    parent, name = locations.split(location)
    if name in _MARKERS or is_manifest_name(name) or name.endswith(_OF_MODELS):
        return f"{location!r} is a file of a checkpoint: give the directory, {parent!r}."
    if about := _about_other(_suffix_by_content(location) or name):
        return f"{location!r} is {about}"
    return f"{location!r} is a file: a checkpoint is a directory, or a .safetensors file."


def _about_directory(location: str) -> str:
    if inside := _checkpoints_in(location):
        return (
            f"{location!r} is a directory of checkpoints ({inside}): give one of them, or use "
            "CheckpointManager."
        )
    names = _names_in(location)
    if _MEGATRON_COMMON in names:
        return (
            f"{location!r} holds Megatron's {_MEGATRON_COMMON!r}, and neither {TORCH_DIST.marker} "
            f"nor {CONFIG_FNAME}, which Megatron writes last: a save did not finish here, or not "
            "all files were copied; load another step."
        )
    for name in names:
        if about := _about_other(name):
            return f"{location!r} holds {name!r}, {about}"
    return _about_incomplete(location, names)


def _about_incomplete(location: str, names: Sequence[str]) -> str:
    """Name the marker that a directory lacks, and the likely reason."""
    if _PIPELINE in names:
        return (
            f"{location!r} is a pipeline of diffusers ({_PIPELINE}): give the folder of a "
            "component, such as unet or transformer."
        )
    foreign = _format_of_files(names)
    state = "nor files of another format at its top level"
    if foreign is not None or "tensors" in names:
        state = "so a save did not finish here; load another step"
    elif not names:
        state = "so nothing was saved here"
    elif about := _about_models(location, names):
        return about
    lacks = foreign.marker if foreign is not None else CONFIG_FNAME
    return f"{location!r} is not a distributed checkpoint: it has no {lacks}, {state}."


def _about_models(location: str, names: Sequence[str]) -> str:
    """Describe a directory around models, or of one without weights."""
    if models := _models_in(location, names):
        return f"{location!r} holds no model itself: give one of the directories in it, {models}."
    if any(name.endswith(_OF_MODELS) for name in names):
        return (
            f"{location!r} holds files of a model, and no .safetensors files among them: its "
            "weights were not downloaded, or have another format."
        )
    return ""


def _models_in(directory: str, names: Sequence[str]) -> str:
    """Name the directories in a directory that hold safetensors files.

    The Hugging Face cache has them in `snapshots`, one level below.
    """
    if "snapshots" in names:
        names = [f"snapshots/{name}" for name in _names_in(locations.join(directory, "snapshots"))]
    models = []
    for name in names[-_MAX_PROBED:]:
        files = _names_in(locations.join(directory, name))
        if any(file.endswith(".safetensors") and not is_manifest_name(file) for file in files):
            models.append(name)
    return ", ".join(map(repr, models[-_MAX_NAMED:]))


def _about_other(name: str) -> str | None:
    """Describe a file of an unsupported program, None for other files."""
    return next((text for end, text in _ABOUT_OTHERS.items() if name.endswith(end)), None)


def _format_of_files(names: Sequence[str]) -> ForeignFormat | None:
    """Return the format of another program's files in a directory, or None."""
    for known in MARKED_CHECKPOINTS:
        if known.data_suffix and any(name.endswith(known.data_suffix) for name in names):
            return known
    return None


def _names_in(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return locations.list_names(directory)
    return []


def _checkpoints_in(directory: str) -> str:
    """Name the newest checkpoints in a directory.

    An empty string when there are none, or none can be listed.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        for name in _names_in(directory)[-_MAX_PROBED:]:
            paths = [locations.join(directory, name, marker) for marker in _MARKERS]
            if any(map(locations.exists, paths)):
                names.append(name)
    text = ", ".join(map(repr, names[-_MAX_NAMED:]))
    if len(names) > _MAX_NAMED:
        return f"{len(names) - _MAX_NAMED} checkpoints and {text}"
    return text
