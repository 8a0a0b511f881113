"""Public names that tell their public module."""

from __future__ import annotations

import typing
from collections.abc import MutableMapping
from types import ModuleType
from typing import TYPE_CHECKING, Any


def set_public_home(module: MutableMapping[str, Any]) -> None:
    """Set the `__module__` of a public module's names to it.

    This concerns the names in its `__all__` that a private module defines. Call it with `globals()`
    below the imports. The first public module that lists a name is its home.
    """
    for name in module["__all__"]:
        give_home(module.get(name), module["__name__"])


def give_home(value: Any, home: str) -> None:
    """Set `home` as the module of a value from a private module.

    Tracebacks, `help()` and pickles then show the name that programs import.
    """
    if "._" not in getattr(value, "__module__", ""):
        return
    if isinstance(value, type):
        # `typing.get_type_hints` would look up the names in them in the new home.
        hints = typing.get_type_hints(value)
        value.__annotations__ = {
            name: hints[name] for name in vars(value).get("__annotations__", ())
        }
    value.__module__ = home


def first_use(name: str, module: MutableMapping[str, Any], *private: ModuleType) -> Any:
    """Return a name of a public package from the private module that has it, and keep it there."""
    value = next(vars(home)[name] for home in private if name in vars(home))
    give_home(value, module["__name__"])
    module[name] = value
    return value


# --- Other names ----------------------------------------------------------------------------------


_HERE = {
    "Checkpoint.items": "tensors, and read(key)",
    "Checkpoint.keys": "tensors, which has them",
    "Checkpoint.load": "read(key), read_tensors(), or distckpt.load",
    "Checkpoint.step": "common_state['step']",
    "SaveHandle.wait": "result()",
    "AsyncCheckpointer": "distckpt.async_save, or distckpt.CheckpointManager",
    "Checkpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "PyTreeCheckpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "StandardCheckpointer": "distckpt.save and distckpt.load, or distckpt.CheckpointManager",
    "CheckpointManagerOptions": "arguments of CheckpointManager",
    "all_steps": "steps()",
    "best_fn": "best_metric",
    "best_step": "best_metric and keep_best, or list_checkpoints",
    "checkpoint_id": "the path as it is",
    "convert": "reshard, or the command distckpt convert",
    "dir": "the path as it is",
    "exist_ok": "overwrite",
    "export": "consolidate",
    "inspect": "open, or the command distckpt inspect",
    "keep_last_n": "keep_last",
    "keep_period": "keep_every",
    "latest_step": "latest()",
    "load_checkpoint": "load",
    "ls": "list_checkpoints",
    "load_state_dict": "load",
    "map_location": (
        "nothing: tensors are loaded to where those of the state dict are, modules on the meta "
        "device with materialize='cpu'"
    ),
    "max_to_keep": "keep_last",
    "no_dist": "nothing: without a process group, one process saves and loads",
    "parallel_load": "share_reads",
    "restore": "load",
    "save_async": "async_save",
    "save_checkpoint": "save",
    "save_state_dict": "save",
    "save_total_limit": "keep_last",
    "wait_until_finished": "wait()",
    "weights_only": "nothing: no pickle is read",
}


def used_here(name: str) -> str:
    """Return ` (here: ...)` with the counterpart of a name of another library.

    An empty string if the name is unknown.
    """
    if name not in _HERE:
        return ""
    return f" (here: {_HERE[name]})"


class SaysOtherNames:
    """An object that names the counterpart of an attribute that it lacks."""

    if not TYPE_CHECKING:  # else a type checker believes that it has every attribute

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            near = used_here(f"{kind}.{name}") or used_here(name)
            raise AttributeError(
                f"{kind!r} object has no attribute {name!r}{near}", name=name, obj=self
            )
