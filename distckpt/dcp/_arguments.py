"""Check the arguments that torch.distributed.checkpoint takes, and find the location in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._ranks.groups import lone_group
from distckpt.dcp._names import TORCH_PACKAGE

_CLASSES = {
    "storage_reader": ("FileSystemReader", "FsspecReader", "HuggingFaceStorageReader"),
    "storage_writer": ("FileSystemWriter", "FsspecWriter"),
}


def group_of(*args: Any, process_group: Any = None, no_dist: bool = False, **kwargs: Any) -> Any:
    """Return the process group whose ranks make such a call together."""
    if no_dist:
        return lone_group()
    return process_group


def location_in(
    checkpoint_id: str | os.PathLike[str] | None, storage: Any, argument: str
) -> str | os.PathLike[str]:
    """Return the location to save to or load from.

    A `storage_writer` or `storage_reader` may give it.
    """
    classes = _CLASSES[argument]
    if storage is not None and not _is_of_torch(storage, classes):
        raise CheckpointingException(
            f"{argument} is a {type(storage).__name__}, which distckpt does not follow: it must be "
            f"None or PyTorch's own {' or '.join(classes)}, whose path is used. Pass "
            "checkpoint_id=path; distckpt.consolidate writes Hugging Face checkpoints."
        )
    if checkpoint_id:
        return checkpoint_id
    if storage is None:
        raise CheckpointingException(f"Pass checkpoint_id, a path or URL, or {argument}.")
    path: str | os.PathLike[str] = storage.path
    return path


def check_planner(planner: Any, name: str) -> None:
    """Refuse a planner other than PyTorch's default one, the class `name`."""
    if planner is not None and not _is_of_torch(planner, (name,)):
        raise CheckpointingException(
            f"planner is a {type(planner).__name__}, which distckpt does not follow: it must be "
            f"None or PyTorch's own {name}. Change keys and tensors in the state dict instead; "
            "distckpt.load takes rules for other names and shapes, and "
            "distckpt.open(path).read_tensors() loads everything."
        )


def _is_of_torch(value: Any, classes: Sequence[str]) -> bool:
    kind = type(value)
    return kind.__name__ in classes and f"{kind.__module__}.".startswith(f"{TORCH_PACKAGE}.")
