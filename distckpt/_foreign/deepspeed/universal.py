"""Universal checkpoints: a folder for each parameter, with a file for its weights and for each of
its states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import run_threads
from distckpt._foreign.deepspeed.files import (
    Shape,
    StateFile,
    States,
    is_contiguous,
    join,
    read_save,
    read_states,
)
from distckpt._foreign.deepspeed.zero import (
    WEIGHT,
    Described,
    key_of,
    module_pieces,
    pieces_of_view,
    settings_of,
)
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_OPTIMIZER_NAME = "optimizer_state.pt"
_Parameter: TypeAlias = tuple[dict[str, tuple[StateFile, TensorView]], float | None]
"""The tensors of a parameter by state, each with its file, and its step where it is beside them."""


def describe_universal(location: str, states: States) -> Described:
    """Describe a Universal checkpoint, whatever layout it was made of."""
    folder = f"{states.folder}zero"
    [optimizer] = read_states(location, [f"{folder}/{_OPTIMIZER_NAME}"])
    models, others = read_save(location, states)
    model = models[0]
    if any(model.content.get("num_experts") or ()) and not model.content.get("ds_autoep_layers"):
        raise CheckpointingException(
            f"{model.path!r} is of a model with experts, which its conversion leaves out."
        )
    shapes = model.shapes("param_shapes")
    for file in others:
        slices = file.shapes("param_shapes")
        if len(slices) != len(shapes):
            raise file.damaged(
                f"{len(slices)} groups in param_shapes, where {model.path!r} has {len(shapes)}"
            )
        for group, more in zip(shapes, slices, strict=True):
            group.update(more)
    read: dict[str, _Parameter] = {}
    run_threads(
        lambda item: read.update(
            {item[0]: _read_parameter(location, f"{folder}/{item[0]}", item[1], bool(others))}
        ),
        [item for group in shapes for item in group.items()],
    )
    pieces = [
        piece
        for name in (name for group in shapes for name in group)
        for state, (file, view) in read[name][0].items()
        for piece in pieces_of_view(key_of(state, name), file, view)
    ]
    aliases: dict[str, str] = {}
    if not others:
        rest, aliases = module_pieces(models, read)
        pieces += rest
    elif left := set(locations.list_names(join(location, folder))) - {_OPTIMIZER_NAME, *read}:
        logger.warning(
            "%s: not trained, and not read, as they may be slices: %s",
            model.path,
            summarize_keys(left),
        )
    states_of = _states_of_groups(join(location, folder), optimizer, shapes, read)
    return Described(
        pieces,
        aliases,
        settings_of(optimizer, optimizer.content["param_groups"], states_of, shapes),
    )


def _states_of_groups(
    folder: str,
    optimizer: StateFile,
    shapes: Sequence[dict[str, Shape]],
    read: Mapping[str, _Parameter],
) -> dict[int, dict[str, Any]]:
    """Return the states of the first parameter of each group, which all of the group have."""
    for options in optimizer.content["param_groups"]:
        # ZeRO-3 divides the parameters of a group further.
        kinds = {
            name: (read[name][0].keys(), read[name][1])
            for n in options["params"]
            for name in shapes[n]
        }
        if differing := [name for name, kind in kinds.items() if kind != kinds[next(iter(kinds))]]:
            raise CorruptCheckpointError(
                f"{join(folder, differing[0])!r} has other states or another step than those of "
                f"{next(iter(kinds))!r}, of the same group: convert the checkpoint again."
            )
    # ZeRO-3 has its steps there, the others beside each parameter.
    stored = optimizer.content.get("optimizer_state_dict", {}).get("state", {})
    state_of: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(shapes):
        tensors, step = read[next(iter(group))] if group else ({}, None)
        state_of[number] = {name: view for name, (_, view) in tensors.items() if name != WEIGHT}
        state_of[number]["step"] = stored.get(number, {}).get("step") if step is None else step
    return state_of


def _read_parameter(location: str, folder: str, shape: Shape, is_slice: bool) -> _Parameter:
    """Return the tensors in the folder of a parameter, and the step of its optimizer if it is
    there.
    """
    path = join(location, folder)
    present = locations.list_names(path) if locations.isdir(path) else []
    names = sorted({f"{WEIGHT}.pt", *(name for name in present if name.endswith(".pt"))})
    tensors: dict[str, tuple[StateFile, TensorView]] = {}
    step = None
    for name, file in zip(
        names, read_states(location, [f"{folder}/{name}" for name in names]), strict=True
    ):
        value = file.content.get("param") if isinstance(file.content, dict) else file.content
        if name == "step.pt":
            try:
                step = float(file.values(value, name))
            except (TypeError, ValueError, RuntimeError) as error:
                raise file.damaged(f"no step: {error}") from error
            continue
        if type(value) is not TensorView or not is_contiguous(value):
            raise file.damaged("no contiguous tensor")
        if value.shape == (math.prod(shape),):
            # Those of ZeRO-3 are flat; elsewhere `shape` may be that of a slice.
            value = value._replace(shape=shape, strides=torch.empty(shape, device="meta").stride())
        expected = (
            next((view.shape for _, view in tensors.values()), value.shape) if is_slice else shape
        )
        if value.shape != expected:
            raise file.damaged(
                f"{folder.rpartition('/')[2]!r} has shape {value.shape} there, elsewhere "
                f"{tuple(expected)}"
            )
        file.first_byte(value)
        tensors[name.removesuffix(".pt")] = file, value
    return tensors, step
