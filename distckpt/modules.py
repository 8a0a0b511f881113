"""Sharded state dicts of torch modules.

    state = sharded_state_dict(model)
    distckpt.save(state, "checkpoints/step_100")
    ...
    load_sharded_state_dict(model, distckpt.load(sharded_state_dict(model), "checkpoints/step_100"))

Parallel layouts are read from the tensors: a DTensor (as FSDP2, `parallelize_module` and
`distribute_tensor` make them) has a mesh and placements, and other tensors are taken to be complete
and the same on every rank. A module with tensors that are divided in other ways defines
`sharded_state_dict(prefix, sharded_offsets, metadata)`, for which the functions with Megatron's
names are of use.
"""

from distckpt._base.public import set_public_home
from distckpt._models.layers import (
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from distckpt._models.modules import (
    load_sharded_state_dict,
    sharded_state_dict,
    sharded_state_dict_default,
)

__all__ = [
    "load_sharded_state_dict",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensor_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "sharded_state_dict",
    "sharded_state_dict_default",
]

set_public_home(globals())
