"""Megatron Core's sharded state dicts, and the classes in its checkpoints.

Megatron Core itself is not needed.

`distckpt.save` and `distckpt.load` take sharded state dicts of Megatron as they are:

    state = {"model": gpt_model.sharded_state_dict(), "iteration": 100}
    distckpt.save(state, "checkpoints/iter_100")

The functions here are for the rest: working on such a state dict with other functions of distckpt,
and storing the arguments of a training run, in which there are values of Megatron's own Enum
classes.
"""

from __future__ import annotations

import enum
import importlib
import signal
from typing import Any

from distckpt._base.tree import is_plain_container, map_leaves, new_like
from distckpt._format.codec import register_object_type
from distckpt._state.flatten import adopt
from distckpt.mapping._wrappers import ShardedStateDict

__all__ = ["convert", "register_types"]

_ENUM_MODULES = (
    "megatron.core.enums",
    "megatron.core.transformer.enums",
    "megatron.core.rerun_state_machine",
)
_SETTINGS_MODULE = "megatron.core.optimizer.optimizer_config"


def convert(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Convert a sharded state dict of Megatron Core to distckpt's classes.

    `save` and `load` do this themselves. Use it before functions that work on the objects, such as
    `distckpt.megatron.utils`.

    Args:
        sharded_state_dict: nested dicts, lists and tuples in which
            `megatron.core.dist_checkpointing` objects stand. It is not changed.

    Returns:
        The same structure with `distckpt.ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`
        and `LocalNonpersistentObject` in their places. Tensors are the same ones, not copies,
        except 8-bit tensors of Transformer Engine, which become the tensors that they represent.
        Factories build Megatron's objects.

    Raises:
        InvalidShardingError: an object describes an impossible placement.
    """
    converted: ShardedStateDict = map_leaves(
        lambda _, leaf: adopt(leaf), sharded_state_dict, _is_converted, join=_join
    )
    return converted


def _is_converted(node: Any) -> bool:
    return isinstance(node, dict) or type(node) in (list, tuple)


def _join(container: Any, children: list[Any]) -> Any:
    converted = new_like(container, children)
    if is_plain_container(container):
        return converted
    return type(container)(converted)


def register_types() -> list[type]:
    """Import the classes of Megatron Core that its scripts' checkpoints hold.

    These are Enum classes and optimizer settings.

    Saving needs no call: Enum classes, dataclasses and namedtuple classes of Megatron's packages
    are stored without registration. They come back in programs that have imported them; a program
    that has not calls this once, on every rank, before loading. Classes that the installed Megatron
    lacks are left out.

    Returns:
        The classes that are registered now; `signal.Signals` is one of them.
    """
    classes: list[type] = [signal.Signals]
    for name in _ENUM_MODULES:
        classes += [cls for cls in _classes_of(name) if issubclass(cls, enum.Enum)]
    classes += [
        cls for cls in _classes_of(_SETTINGS_MODULE) if cls.__name__.endswith("OptimizerConfig")
    ]
    return list(map(register_object_type, classes))


def _classes_of(name: str) -> list[type]:
    """Return the classes that a module defines, or none without the module."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    classes = []
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == name:
            classes.append(value)
    return classes
