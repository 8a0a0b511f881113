"""The state that a torch optimizer will keep for a parameter, before it has made a step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException


class BlankStates:
    """Makes blank states; a step of the optimizer is tried once for all parameters of one kind.

    The `step` of the optimizer must need no closure. Neither the optimizer nor its parameters are changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._prototypes: dict[Any, dict[str, Any]] = {}

    def make(self, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """Return what the optimizer would keep for a parameter of a group, by name, with zeros in place of the values.

        Numbers and 0-D tensors are those after a first step. CheckpointingException when the optimizer cannot make a
        step with gradients of zero.
        """
        mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", None)
        kind = (id(group), tuple(param.shape), param.stride(), param.dtype, param.device, mesh, placements)
        if kind not in self._prototypes:
            self._prototypes[kind] = _state_after_a_step(self._optimizer, group, param)
        return {name: _blank(value) for name, value in self._prototypes[kind].items()}


def _blank(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros_like(value) if value.ndim else value.clone()


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    # On a stand-in: even with gradients and learning rate of zero, a step may change a parameter (0 / 0 with eps=0).
    stand_in = torch.zeros_like(param).detach().requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    # Not copy.copy, which leaves attributes of subclasses behind.
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__.update(vars(optimizer))
    # Learning rate schedulers replace `step` by one that is bound to the optimizer itself, and hooks count steps.
    shadow.__dict__.pop("step", None)
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**group, "params": [stand_in]}]
    try:
        shadow.step()
    except Exception as error:
        raise CheckpointingException(
            f"{type(optimizer).__name__} does not show what it keeps for a parameter of shape {tuple(param.shape)}: a "
            f"step with gradients of zero failed ({type(error).__name__}: {error}). Have it make a step of its own "
            "before calling sharded_optimizer_state_dict, for saving and for loading."
        ) from error
    return dict(shadow.state[stand_in])
