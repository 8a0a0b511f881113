"""Universal checkpoints: a folder per parameter, with files of weights and states."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import map_threads
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.deepspeed.files import (
    SAMPLE,
    WEIGHT,
    Contents,
    Shape,
    StateFile,
    States,
    is_contiguous,
    join,
    key_of,
    read_save,
    read_states,
    settings_of,
)
from distckpt._foreign.deepspeed.pieces import module_contents, pieces_of_view
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_OPTIMIZER_NAME = "optimizer_state.pt"


class _Parameter(NamedTuple):
    """The tensors of a parameter by state, and its step if stored.

    Each tensor comes with its file.
    """

    tensors: dict[str, tuple[StateFile, TensorView]]
    step: float | None


_Groups = Sequence[dict[str, Shape]]
"""Names and shapes of the parameters of each group."""


def universal_contents(location: str, states: States) -> Contents:
    """Return the contents of a Universal checkpoint, whatever its first layout."""
    folder = f"{states.folder}zero"
    [optimizer] = read_states(location, [f"{folder}/{_OPTIMIZER_NAME}"])
    models, others = read_save(location, states)
    model = models[0]
    if any(model.content.get("num_experts") or ()) and not model.content.get("ds_autoep_layers"):
        raise CheckpointingException(
            f"{model.path!r} is of a model with experts, which its conversion leaves out."
        )
    shapes = _shapes_of_groups(model, others)
    parameters = _read_parameters(location, folder, shapes, are_slices=bool(others))
    _check_order(model, parameters, are_slices=bool(others))
    pieces = _pieces_of(parameters)
    aliases: dict[str, str] = {}
    if others:
        present = locations.list_names(join(location, folder))
        if unread := set(present) - {_OPTIMIZER_NAME, *parameters}:
            logger.warning(
                "%s: not trained, and not read, as they may be slices: %s",
                model.path,
                summarize_keys(unread),
            )
    else:
        untrained, aliases = module_contents(models, parameters)
        pieces += untrained
    by_group = _states_of_groups(join(location, folder), optimizer, shapes, parameters)
    settings = settings_of(optimizer, optimizer.content["param_groups"], by_group, shapes)
    return Contents(pieces, aliases, settings)


def _check_order(
    model: StateFile, parameters: Mapping[str, _Parameter], *, are_slices: bool
) -> None:
    """Refuse weights under the names of others.

    DeepSpeed's converter takes the order of the module for that of the weights, which
    `round_robin_gradients` changes. The module in 16 bits has the same weights, rounded.
    """
    config = model.content.get("ds_config") or {}
    zero = config.get("zero_optimization") or {}
    if not zero.get("round_robin_gradients"):
        return
    advice = (
        "the converter of DeepSpeed mixes up parameters of runs with round_robin_gradients: give "
        "the directory that was converted, or train without that option before you save and convert"
    )
    if are_slices:
        logger.warning("%s: tensors may have the values of others, since %s", model.path, advice)
        return
    for name, parameter in sorted(parameters.items()):
        rounded = model.content["module"].get(name)
        file, view = parameter.tensors[WEIGHT]
        if type(rounded) is not TensorView or not is_contiguous(rounded):
            continue
        found = file.elements(view, 0, SAMPLE).to(rounded.dtype)
        if not torch.equal(found, model.elements(rounded, 0, SAMPLE)):
            raise CorruptCheckpointError(
                f"{file.path!r} does not hold {name!r} as it is in {model.path!r}: {advice}."
            )


def _shapes_of_groups(model: StateFile, others: Sequence[StateFile]) -> _Groups:
    """Return the shapes from the files of all ranks; tensor parallel ranks have slices."""
    shapes = model.shapes("param_shapes")
    for file in others:
        slices = file.shapes("param_shapes")
        if len(slices) != len(shapes):
            raise file.damaged(
                f"{len(slices)} groups in param_shapes, where {model.path!r} has {len(shapes)}"
            )
        for group, more in zip(shapes, slices, strict=True):
            group.update(more)
    return shapes


def _pieces_of(parameters: Mapping[str, _Parameter]) -> list[StoredPiece]:
    pieces: list[StoredPiece] = []
    for name, parameter in parameters.items():
        for state, (file, view) in parameter.tensors.items():
            pieces.extend(pieces_of_view(key_of(state, name), file, view))
    return pieces


def _states_of_groups(
    folder: str,
    optimizer: StateFile,
    shapes: _Groups,
    parameters: Mapping[str, _Parameter],
) -> dict[int, dict[str, Any]]:
    """Return the states of each group, which all its parameters share."""
    for options in optimizer.content["param_groups"]:
        # ZeRO-3 divides the parameters of a group further.
        names = []
        for number in options["params"]:
            names.extend(shapes[number])
        _check_same_states(folder, names, parameters)
    # ZeRO-3 keeps the steps there, ZeRO-1 and 2 with each parameter.
    stored = optimizer.content.get("optimizer_state_dict", {}).get("state", {})
    states: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(shapes):
        tensors, step = parameters[next(iter(group))] if group else _Parameter({}, None)
        states[number] = {name: view for name, (_, view) in tensors.items() if name != WEIGHT}
        states[number]["step"] = stored.get(number, {}).get("step") if step is None else step
    return states


def _check_same_states(
    folder: str, names: Sequence[str], parameters: Mapping[str, _Parameter]
) -> None:
    """Check that some parameters have the same states and the same step."""
    for name in names:
        first = parameters[names[0]]
        other = parameters[name]
        if (first.tensors.keys(), first.step) != (other.tensors.keys(), other.step):
            raise CorruptCheckpointError(
                f"{join(folder, name)!r} has other states or another step than those of "
                f"{names[0]!r}, of the same group: convert the checkpoint again."
            )


# ---- the folder of a parameter


def _read_parameters(
    location: str, folder: str, shapes: _Groups, *, are_slices: bool
) -> dict[str, _Parameter]:
    """Read the folders of all parameters, several at once."""
    shapes_by_name = list(itertools.chain.from_iterable(group.items() for group in shapes))

    def read(item: tuple[str, Shape]) -> _Parameter:
        name, shape = item
        return _read_parameter(location, f"{folder}/{name}", shape, are_slices)

    names = [name for name, _ in shapes_by_name]
    return dict(zip(names, map_threads(read, shapes_by_name), strict=True))


def _read_parameter(
    location: str,
    folder: str,
    shape: Shape,
    is_slice: bool,
) -> _Parameter:
    """Read the folder of a parameter.

    With `is_slice`, it may be larger than `shape`.
    """
    path = join(location, folder)
    present = locations.names_within(path)
    names = sorted({f"{WEIGHT}.pt", *(name for name in present if name.endswith(".pt"))})
    files = read_states(location, [f"{folder}/{name}" for name in names])
    tensors: dict[str, tuple[StateFile, TensorView]] = {}
    step = None
    for name, file in zip(names, files, strict=True):
        if name == "step.pt":
            try:
                step = float(file.values(_value_in(file), name))
            except (TypeError, ValueError, RuntimeError) as error:
                raise file.damaged(f"no step: {error}") from error
            continue
        view = _tensor_in(file, shape)
        expected = shape
        if is_slice:
            expected = next((other.shape for _, other in tensors.values()), view.shape)
        if view.shape != expected:
            raise file.damaged(
                f"{folder.rpartition('/')[2]!r} has shape {view.shape} there, elsewhere "
                f"{tuple(expected)}"
            )
        file.first_byte(view)
        tensors[name.removesuffix(".pt")] = file, view
    return _Parameter(tensors, step)


def _value_in(file: StateFile) -> Any:
    if isinstance(file.content, dict):
        return file.content.get("param")
    return file.content


def _tensor_in(file: StateFile, shape: Shape) -> TensorView:
    """Return the tensor in a file; a flat one, as ZeRO-3 stores it, gets its `shape`."""
    view = _value_in(file)
    if type(view) is not TensorView or not is_contiguous(view):
        raise file.damaged("not a contiguous tensor")
    if view.shape != (math.prod(shape),):
        return view
    return view._replace(shape=shape, strides=torch.empty(shape, device="meta").stride())
