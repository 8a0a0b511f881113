"""Optimizer state as shards, derived from the model's sharded state dict.

For a torch optimizer, whatever it keeps:

    model_state = sharded_state_dict(model)
    optimizer_state = sharded_optimizer_state_dict(optimizer, model_state)
    distckpt.save({"model": model_state, "optimizer": optimizer_state}, "checkpoints/step_100")
    ...
    state = {"model": model_state, "optimizer": optimizer_state}
    loaded = distckpt.load(state, "checkpoints/step_100")
    load_sharded_optimizer_state_dict(optimizer, loaded["optimizer"])

Megatron's functions make shards of an optimizer's own state dict. The tensors in it are divided
among ranks as the parameters are, so a model's sharded state dict describes them, too:

    model_state = model.sharded_state_dict(keep_vars=True)
    id_map = get_param_id_to_sharded_param_map(model_state, model.parameters())
    optimizer_state = optimizer.state_dict()
    optim_state_to_sharding_state(optimizer_state, id_map, exclude_keys=("step",))
"""

from distckpt._base.public import set_public_home
from distckpt._models.optimizer.describe import (
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
    sharded_optimizer_state_dict,
)
from distckpt._models.optimizer.read import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    zero1_shards,
)
from distckpt._models.optimizer.restore import load_sharded_optimizer_state_dict

__all__ = [
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "load_sharded_optimizer_state_dict",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
    "sharded_optimizer_state_dict",
    "zero1_shards",
]

set_public_home(globals())
