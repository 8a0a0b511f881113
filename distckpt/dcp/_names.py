"""Names of torch.distributed.checkpoint in `distckpt.dcp`: PyTorch's own, and refused ones."""

from __future__ import annotations

import importlib
from typing import Any

from distckpt._base.errors import CheckpointingException

TORCH_PACKAGE = "torch.distributed.checkpoint"
_TORCH_NAMES = (
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
)
_TORCH_MODULES = ("default_planner", "filesystem", "state_dict", "stateful")
_FOLLOWS_NO_PLANNER = (
    "custom planners are not supported: change the state dict, or use distckpt.load, which takes "
    "rules"
)
_FOLLOWS_NO_STORAGE = (
    "storage classes are not supported: pass checkpoint_id, a path or any fsspec URL"
)
_HAS_NO_METADATA = "use distckpt.open(path).tensors; save returns a SaveReport"
_INSTEAD = {
    "BytesStorageMetadata": _HAS_NO_METADATA,
    "CheckpointableTensor": (
        "it is a protocol: tensors with its attributes are recognized without it"
    ),
    "ChunkStorageMetadata": _HAS_NO_METADATA,
    "HuggingFaceStorageWriter": "save, then distckpt.consolidate(path, output_dir)",
    "LoadPlan": _FOLLOWS_NO_PLANNER,
    "LoadPlanner": _FOLLOWS_NO_PLANNER,
    "Metadata": _HAS_NO_METADATA,
    "QuantizedHuggingFaceStorageReader": "use load: quantized weights are read as values",
    "ReadItem": _FOLLOWS_NO_PLANNER,
    "SavePlan": _FOLLOWS_NO_PLANNER,
    "SavePlanner": _FOLLOWS_NO_PLANNER,
    "StorageReader": _FOLLOWS_NO_STORAGE,
    "StorageWriter": _FOLLOWS_NO_STORAGE,
    "TensorStorageMetadata": _HAS_NO_METADATA,
    "WriteItem": _FOLLOWS_NO_PLANNER,
    "format_utils": (
        "use distckpt.open(path).read_tensors() or distckpt.consolidate(path, output_dir)"
    ),
    "load_sharded_optimizer_state_dict": (
        "use load with the state dicts of state_dict.get_state_dict"
    ),
    "load_state_dict": "use load(state_dict, storage_reader=reader)",
    "save_state_dict": "use save(state_dict, storage_writer=writer)",
    "staging": "leave async_stager out: async_save copies tensors before it returns",
    "state_dict_loader": "use load",
    "state_dict_saver": (
        "use save and async_save; the latter takes AsyncCheckpointerType, and does the same with "
        "each"
    ),
}
"""Names that do not exist here, with their replacement."""


def torch_name(name: str) -> Any:
    """Look up a name of torch.distributed.checkpoint that `distckpt.dcp` does not define itself.

    Raises:
        ImportError: it does not exist here, with the name to use instead; `from ... import` would
            hide the text of an AttributeError.
        AttributeError: torch.distributed.checkpoint has no such name.
    """
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(TORCH_PACKAGE), name)
    if name in _TORCH_MODULES:
        return importlib.import_module(f"{TORCH_PACKAGE}.{name}")
    if name == "CheckpointException":
        return CheckpointingException
    if name in _INSTEAD:
        raise ImportError(
            f"distckpt.dcp has no {name}: {_INSTEAD[name]}. To use PyTorch's own, import it from "
            f"{TORCH_PACKAGE} as before.",
            name="distckpt.dcp",
        )
    raise AttributeError(f"module 'distckpt.dcp' has no attribute {name!r}")
