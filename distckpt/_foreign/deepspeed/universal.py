"""Universal checkpoints: a folder for each parameter, with a file for its weights and for each of its states."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import run_threads
from distckpt._foreign.deepspeed.files import (
    UNIVERSAL_FOLDER,
    Shape,
    StateFile,
    States,
    is_contiguous,
    locate_views,
    read_states,
    shapes_of,
)  # fmt: skip
from distckpt._foreign.deepspeed.zero import WEIGHT, Described, frozen_pieces, key_of, module_pieces, settings_of
from distckpt._foreign.pieces import StoredPiece
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._geometry.region import whole
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_OPTIMIZER_NAME = "optimizer_state.pt"
_STEP = "step"


def describe_universal(location: str, states: States) -> Described:
    """Describe a Universal checkpoint, whatever layout it was made of."""
    folder = f"{states.folder}/{UNIVERSAL_FOLDER}" if states.folder else UNIVERSAL_FOLDER
    model, *others = read_states(location, [states.model[min(states.model)], *states.others])
    if any(model.content.get("num_experts") or ()) and not model.content.get("ds_autoep_layers"):
        raise CheckpointingException(f"{model.path!r} is of a model with experts, which its conversion leaves out.")
    shapes = shapes_of(model, "param_shapes")
    for file in others:
        for group, more in zip(shapes, shapes_of(file, "param_shapes"), strict=True):
            group.update(more)
    [optimizer] = read_states(location, [f"{folder}/{_OPTIMIZER_NAME}"])
    files = _read_parameters(location, folder, [name for group in shapes for name in group])
    pieces, found = _parameter_pieces(files, shapes)
    aliases: dict[str, str] = {}
    if not others:
        frozen, names = frozen_pieces(location, states, model)
        rest, aliases = module_pieces(model, [*files, *names])
        pieces += [*frozen, *rest]
    elif left := set(locations.list_names(locations.join(location, *folder.split("/")))) - {_OPTIMIZER_NAME, *files}:
        logger.warning(
            "%s: not trained, and not read: a slice of each may be stored: %s", location, summarize_keys(left)
        )
    stored = optimizer.content.get("optimizer_state_dict", {}).get("state", {})
    steps = {number: optimizer.values(state.get(_STEP), _STEP) for number, state in stored.items()}
    by_number = {n: {**({_STEP: steps[n]} if n in steps else {}), **state} for n, state in enumerate(found)}
    return Described(pieces, aliases, settings_of(optimizer, optimizer.content["param_groups"], by_number, shapes))


def _read_parameters(location: str, folder: str, names: list[str]) -> dict[str, dict[str, StateFile]]:
    """Return the files of each parameter by the names of what they hold."""
    found: dict[str, dict[str, StateFile]] = {}

    def read(name: str) -> None:
        path = locations.join(location, *folder.split("/"), name)
        present = locations.list_names(path) if locations.isdir(path) else []
        kinds = sorted({WEIGHT, *(entry.removesuffix(".pt") for entry in present if entry.endswith(".pt"))})
        files = read_states(location, [f"{folder}/{name}/{kind}.pt" for kind in kinds])
        locate_views((file, view) for file in files if (view := _view(file)).shape)
        found[name] = dict(zip(kinds, files, strict=True))

    run_threads(read, names)
    return {name: found[name] for name in names}


def _parameter_pieces(
    files: Mapping[str, Mapping[str, StateFile]], shapes: list[dict[str, Shape]]
) -> tuple[list[StoredPiece], list[dict[str, Any]]]:
    """Return the pieces of all parameters, and for each group the states that all its parameters have."""
    pieces: list[StoredPiece] = []
    states: list[dict[str, Any]] = []
    for group in shapes:
        first: dict[str, Any] | None = None
        for name, shape in group.items():
            views = {kind: _view(file) for kind, file in files[name].items()}
            step = files[name][_STEP].values(files[name][_STEP].content, _STEP) if _STEP in views else None
            state = {kind: view for kind, view in views.items() if kind not in (WEIGHT, _STEP)}
            for kind, view in {WEIGHT: views[WEIGHT], **state}.items():
                pieces.append(_piece(files[name][kind], key_of(kind, name), view, shape))
            state |= {} if step is None else {_STEP: float(step)}
            first = first or state
            if state.keys() != first.keys() or state.get(_STEP) != first.get(_STEP):
                raise CorruptCheckpointError(
                    f"{files[name][WEIGHT].path!r} stands beside other states or another step than those of "
                    f"{next(iter(group))!r}: convert the checkpoint again."
                )
        states.append(first or {})
    return pieces, states


def _view(file: StateFile) -> Any:
    return file.content.get("param") if isinstance(file.content, dict) else file.content


def _piece(file: StateFile, key: str, view: Any, shape: Shape) -> StoredPiece:
    if type(view) is not TensorView or not is_contiguous(view):
        raise file.damaged("no contiguous tensor")
    # Of ZeRO-3 they are flat; elsewhere `shape` may be that of a slice.
    shape = shape if view.shape == (math.prod(shape),) else view.shape
    num_bytes = math.prod(shape) * view.dtype.itemsize
    return StoredPiece(key, TO_NAME[view.dtype], whole(shape), shape, file.name, file.first_byte(view), num_bytes)
