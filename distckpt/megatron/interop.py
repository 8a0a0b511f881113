"""Megatron Core's sharded state dicts, and the classes in its checkpoints.

Megatron Core itself is not needed.

`distckpt.save` and `distckpt.load` take sharded state dicts of Megatron as they are:

    state = {"model": gpt_model.sharded_state_dict(), "iteration": 100}
    distckpt.save(state, "checkpoints/iter_100")

The functions here are for the rest: working on such a state dict with other functions of distckpt,
and storing the arguments of a training run, in which there are values of Megatron's own Enum
classes.
"""

from distckpt._base.public import set_public_home
from distckpt.megatron._impl.interop import (
    convert,
    register_types,
)

__all__ = [
    "convert",
    "register_types",
]

set_public_home(globals())
