"""The settings of DeepSpeed's optimizer in distckpt's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distckpt._base.lazy import torch
from distckpt._foreign.deepspeed.files import Shape, StateFile, is_array


def settings_of(
    file: StateFile,
    groups: Iterable[Any],
    states: Mapping[int, dict[str, Any]],
    shapes: Sequence[Mapping[str, Shape]],
) -> list[dict[str, Any]]:
    """Return options and steps by the names of parameters.

    Args:
        file: holds the optimizer.
        groups: `param_groups` of the optimizer.
        states: states of the flat parameters that the groups number.
        shapes: names and shapes of the parameters in each flat parameter.
    """
    settings = []
    for group in groups:
        options = _options(file, group)
        for number in group["params"]:
            state = states.get(number, {})
            tensors = sorted(name for name, value in state.items() if is_array(value))
            values = _values(file, {"step": group.get("step"), **state}, tensors)
            scalars = {}
            for name, v in values.items():
                if isinstance(v, torch.Tensor):
                    scalars[name] = v.dtype
            values |= {name: values[name].item() for name in scalars}
            settings.append(
                {
                    "options": options,
                    "tensors": tensors,
                    "values": values,
                    "scalars": scalars,
                    "has_state": bool(state),
                    "params": list(shapes[number]),
                }
            )
    return settings


def _options(file: StateFile, group: Mapping[str, Any]) -> Any:
    left_out = {"params", "step"}
    if group.get("bias_correction") is True:
        # An option of DeepSpeed's own Adam, which PyTorch's always applies.
        left_out.add("bias_correction")
    options = {}
    for name, value in group.items():
        if name not in left_out:
            options[name] = value
    return file.values(options, "param_groups")


def _values(
    file: StateFile,
    state: Mapping[str, Any],
    tensors: Sequence[str],
) -> dict[str, Any]:
    """Return a state without `tensors`, with the step as PyTorch counts it."""
    values = {}
    for name, value in state.items():
        if name not in tensors:
            values[name] = file.values(value, name)
    if values["step"] is None:
        del values["step"]
    else:
        # FusedAdam and DeepSpeedCPUAdam count with integers, PyTorch with tensors.
        values["step"] = torch.tensor(float(values["step"]), device="cpu")
    return values


def step_of(file: StateFile, state: Mapping[str, Any]) -> float | None:
    """Return the step of a state, or None if it has none."""
    step = file.values(state.get("step"), "step")
    if step is None:
        return None
    return float(step)
