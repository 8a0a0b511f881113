"""What names and classes of torch.distributed.checkpoint mean in `distckpt.dcp`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException

_TORCH_PACKAGE = "torch.distributed.checkpoint"
_READERS = ("FileSystemReader", "FsspecReader", "HuggingFaceStorageReader")
_WRITERS = ("FileSystemWriter", "FsspecWriter")
_TORCH_NAMES = (
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
)
_TORCH_MODULES = ("default_planner", "filesystem", "state_dict", "stateful")
_FOLLOWS_NO_PLANNER = "planners are not followed: change the state dict, or use distckpt.load, which takes rules"
_FOLLOWS_NO_STORAGE = "storage classes are not followed: pass checkpoint_id, a path or any URL that fsspec knows"
_HAS_NO_METADATA = "use distckpt.load_tensors_metadata(path); save returns a SaveReport"
_INSTEAD = {
    "BytesStorageMetadata": _HAS_NO_METADATA,
    "ChunkStorageMetadata": _HAS_NO_METADATA,
    "HuggingFaceStorageWriter": "save, then distckpt.consolidate(path, output_dir)",
    "LoadPlan": _FOLLOWS_NO_PLANNER,
    "LoadPlanner": _FOLLOWS_NO_PLANNER,
    "Metadata": _HAS_NO_METADATA,
    "QuantizedHuggingFaceStorageReader": "quantized weights are read as they are stored, not as what they stand for",
    "ReadItem": _FOLLOWS_NO_PLANNER,
    "SavePlan": _FOLLOWS_NO_PLANNER,
    "SavePlanner": _FOLLOWS_NO_PLANNER,
    "StorageReader": _FOLLOWS_NO_STORAGE,
    "StorageWriter": _FOLLOWS_NO_STORAGE,
    "TensorStorageMetadata": _HAS_NO_METADATA,
    "WriteItem": _FOLLOWS_NO_PLANNER,
    "format_utils": "use distckpt.load_plain_tensors(path) or distckpt.consolidate(path, output_dir)",
    "load_sharded_optimizer_state_dict": "use load with the state dicts of state_dict.get_state_dict",
    "load_state_dict": "use load(state_dict, storage_reader=reader)",
    "save_state_dict": "use save(state_dict, storage_writer=writer)",
    "staging": "leave async_stager out: async_save copies tensors before it returns",
    "state_dict_loader": "use load",
    "state_dict_saver": "use save and async_save; the latter takes AsyncCheckpointerType, and does the same with each",
}
"""Names that mean nothing here, and what to do without them."""


def attribute(name: str) -> Any:
    """Return what a name of torch.distributed.checkpoint is in `distckpt.dcp`.

    Raises:
        ImportError: nothing, and the text says what to do. `from ... import` would hide the text of an AttributeError.
        AttributeError: it is no such name.
    """
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(_TORCH_PACKAGE), name)
    if name in _TORCH_MODULES:
        return importlib.import_module(f"{_TORCH_PACKAGE}.{name}")
    if name == "CheckpointException":
        return CheckpointingException
    if name in _INSTEAD:
        raise ImportError(
            f"distckpt.dcp has no {name}: {_INSTEAD[name]}. What goes on to use PyTorch's own imports it from "
            f"{_TORCH_PACKAGE} as before.",
            name="distckpt.dcp",
        )
    raise AttributeError(f"module 'distckpt.dcp' has no attribute {name!r}")


def saved_location(checkpoint_id: str | os.PathLike[str] | None, storage_writer: Any) -> str | os.PathLike[str]:
    """Return where to save, given what the caller passed."""
    return _location(checkpoint_id, storage_writer, "storage_writer", _WRITERS)


def loaded_location(checkpoint_id: str | os.PathLike[str] | None, storage_reader: Any) -> str | os.PathLike[str]:
    """Return what to load, given what the caller passed."""
    return _location(checkpoint_id, storage_reader, "storage_reader", _READERS)


def _location(
    checkpoint_id: str | os.PathLike[str] | None, storage: Any, argument: str, classes: Sequence[str]
) -> str | os.PathLike[str]:
    if storage is not None and not _is_of_torch(storage, classes):
        raise CheckpointingException(
            f"{argument} is a {type(storage).__name__}, whose way of storing data distckpt does not follow: it must be "
            f"None, or {' or '.join(classes)} of PyTorch itself, whose path is taken. Pass checkpoint_id=path; "
            "distckpt.consolidate writes Hugging Face checkpoints."
        )
    if checkpoint_id:
        return checkpoint_id
    if storage is None:
        raise CheckpointingException(f"Pass checkpoint_id, a path or URL, or {argument}.")
    path: str | os.PathLike[str] = storage.path
    return path


def check_planner(planner: Any, name: str) -> None:
    """Refuse a planner that is not PyTorch's default one, whose name is given."""
    if planner is not None and not _is_of_torch(planner, (name,)):
        raise CheckpointingException(
            f"planner is a {type(planner).__name__}, whose decisions distckpt does not follow: it must be None or "
            f"{name} of PyTorch itself. Change keys and tensors in the state dict instead; distckpt.load takes rules "
            "for other names and shapes, and distckpt.load_plain_tensors loads all there is."
        )


def _is_of_torch(value: Any, classes: Sequence[str]) -> bool:
    kind = type(value)
    return kind.__name__ in classes and f"{kind.__module__}.".startswith(f"{_TORCH_PACKAGE}.")
