"""Checkpoints without ZeRO: the model's file has the optimizer, by number.

With 16-bit weights, the optimizer keeps 32-bit ones: a tensor for each parameter, or with
DeepSpeed's FusedAdam one flat vector for each group. Names are found by content: rounded, they are
the weights of the module. With 32-bit weights, parameters keep their numbers, which are those of an
optimizer that is created as the saved one was.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    is_array,
    is_contiguous,
    key_of,
    settings_of,
)
from distckpt._foreign.deepspeed.pieces import (
    flat_vector,
    module_contents,
    pieces_in_vectors,
    pieces_of_view,
)
from distckpt._foreign.torch_dist.objects import TensorView

logger = logging.getLogger(__name__)


class _Master(NamedTuple):
    """A tensor of 32-bit weights in the optimizer.

    It has its number, its group, and whether it is flat, of several parameters.
    """

    number: int
    group: int
    view: TensorView
    is_flat: bool


class _Place(NamedTuple):
    """The place of a parameter: a tensor of the optimizer, and the first element in it."""

    master: _Master
    start: int


def contents_without_zero(models: Sequence[StateFile]) -> Contents:
    """Return the contents of a checkpoint without ZeRO."""
    file = models[0]
    optimizer = file.content.get("optimizer")
    masters = []
    if isinstance(optimizer, dict):
        masters = _masters(optimizer)
    if not masters:
        pieces, aliases = module_contents(models, ())
        is_of_torch = isinstance(optimizer, dict) and optimizer.keys() == {"state", "param_groups"}
        if not is_of_torch:
            return Contents(pieces, aliases, [])
        pieces += _numbered_pieces(file, optimizer["state"])
        return Contents(pieces, aliases, [], len(optimizer["param_groups"]))
    trained, tied = _parameters(file)
    places = _places(file, masters, trained)
    if not places:
        logger.warning(
            "%s: the 32-bit weights and the state of the optimizer are not read, since it numbers "
            "parameters, and their values do not tell which is which. The weights are those of the "
            "module, rounded to 16 bits.",
            file.path,
        )
        return Contents(*module_contents(models, ()), [])
    shapes: list[dict[str, Shape]] = [{} for _ in range(1 + masters[-1].number)]
    for name, place in places.items():
        shapes[place.master.number][name] = trained[name].shape
    aliases = {alias: name for alias, name in tied.items() if name in places}
    base = optimizer["optimizer_state_dict"]
    pieces, states = _pieces_of(file, places, trained, dict(base["state"]))
    others, more = module_contents(models, [*places, *aliases])
    settings = settings_of(file, base["param_groups"], states, shapes)
    return Contents([*pieces, *others], {**aliases, **more}, settings)


def _numbered_pieces(file: StateFile, states: Mapping[Any, Any]) -> Iterator[StoredPiece]:
    """Yield the tensors with axes in the state of each parameter."""
    for number, state in states.items():
        for name, value in state.items():
            if is_array(value):
                yield from pieces_of_view(key_of(str(number), str(name)), file, value)


def numbered_values(file: StateFile) -> dict[str, Any]:
    """Read the other values of an optimizer."""
    optimizer = file.content["optimizer"]
    states = {}
    for number, state in optimizer["state"].items():
        others = {name: value for name, value in state.items() if not is_array(value)}
        states[number] = file.values(others, f"the state of parameter {number}")
    groups = file.values(optimizer["param_groups"], "param_groups")
    return {"state": states, "param_groups": groups}


def _masters(optimizer: Mapping[str, Any]) -> list[_Master]:
    """Return the 32-bit weights of an optimizer, or none.

    There are none where the module has all weights.
    """
    masters: list[_Master] = []
    flat = optimizer.get("fp32_groups_flat")
    groups = optimizer.get("fp32_groups") if flat is None else [[view] for view in flat]
    for group, views in enumerate(groups or ()):
        for view in views:
            masters.append(_Master(len(masters), group, view, flat is not None))
    return masters


def _parameters(file: StateFile) -> tuple[dict[str, TensorView], dict[str, str]]:
    """Return the parameters of the module, and aliases of tied ones."""
    parameters: dict[str, TensorView] = {}
    tied: dict[str, str] = {}
    first: dict[TensorView, str] = {}
    buffers = set(file.content.get("buffer_names") or ())
    for name, view in file.content["module"].items():
        if type(view) is not TensorView or name in buffers:
            continue
        if first.setdefault(view, name) == name:
            parameters[name] = view
        else:
            tied[name] = first[view]
    return parameters, tied


# ---- names of parameters


def _places(
    file: StateFile, masters: Sequence[_Master], parameters: Mapping[str, TensorView]
) -> dict[str, _Place]:
    """Return the place of each trained parameter.

    The result is empty if some place is not certain.
    """
    left = _samples(file, parameters)
    groups: dict[Any, set[int]] = defaultdict(set)
    places: dict[str, _Place] = {}
    for master in masters:
        start = 0
        size = math.prod(master.view.shape)
        while start < size:
            name = _name_at(file, master, start, parameters, left)
            if name is None:
                return {}
            places[name] = _Place(master, start)
            start += math.prod(parameters[name].shape)
            groups[parameters[name].shape, left.pop(name)].add(master.group)
    # Groups keep the order of the module. If two parameters are equal, it is unknown which is in
    # which.
    if any(len(group) > 1 for group in groups.values()):
        return {}
    return places


def _samples(file: StateFile, parameters: Mapping[str, TensorView]) -> dict[str, bytes]:
    """Return the first elements of parameters, read several at once."""

    def read(view: TensorView) -> bytes:
        if not is_contiguous(view):
            return b""
        return _bytes_of(file.elements(view, 0, SAMPLE))

    samples = zip(parameters, map_threads(read, parameters.values()), strict=True)
    return {name: sample for name, sample in samples if sample}


def _name_at(
    file: StateFile,
    master: _Master,
    start: int,
    parameters: Mapping[str, TensorView],
    left: Mapping[str, bytes],
) -> str | None:
    """Return the parameter left for an element of a tensor, or None."""
    values = file.elements(master.view, start, SAMPLE)
    for name, sample in left.items():
        view = parameters[name]
        if not master.is_flat and view.shape != master.view.shape:
            continue
        if sample == _bytes_of(values[: math.prod(view.shape)].to(view.dtype)):
            return name
    return None


def _bytes_of(values: Any) -> bytes:
    data: bytes = values.contiguous().view(torch.uint8).numpy().tobytes()
    return data


# ---- pieces


def _pieces_of(
    file: StateFile,
    places: Mapping[str, _Place],
    parameters: Mapping[str, TensorView],
    states: Mapping[int, Mapping[str, Any]],
) -> tuple[list[StoredPiece], dict[int, dict[str, Any]]]:
    """Return the pieces of weights and states, and the other states' values."""
    pieces: list[StoredPiece] = []
    values: dict[int, dict[str, Any]] = {}
    unread: set[str] = set()
    for name, place in places.items():
        master = place.master
        shape = parameters[name].shape
        pieces.extend(_pieces_at(file, key_of(WEIGHT, name), shape, master.view, place.start))
        state = dict(states.get(master.number, {}))
        for key, value in list(state.items()):
            if not is_array(value):
                continue
            if value.shape == master.view.shape:
                pieces.extend(_pieces_at(file, key_of(key, name), shape, value, place.start))
            else:
                unread.add(key)
                del state[key]
        values[master.number] = state
    if unread:
        logger.warning(
            "%s: of the optimizer, %s is not read: no element for each weight",
            file.path,
            summarize_keys(unread),
        )
    return pieces, values


def _pieces_at(
    file: StateFile, key: str, shape: Shape, view: TensorView, start: int
) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor from an element of another on."""
    if not is_contiguous(view):
        raise file.damaged(f"{key!r} is not a contiguous tensor")
    size = math.prod(view.shape)
    flat = flat_vector([(file, view._replace(shape=(size,), strides=(1,)), size)])
    yield from pieces_in_vectors(key, shape, [flat], start)
