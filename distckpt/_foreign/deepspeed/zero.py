"""ZeRO checkpoints: where in the flat vectors of all ranks each parameter and its optimizer state lie.

ZeRO-1 and ZeRO-2 flatten the parameters of a group into one vector and divide that among the ranks. ZeRO-3 divides each
parameter among the ranks, and flattens what a rank has of a group.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.messages import summarize_keys
from distckpt._foreign.deepspeed.files import (
    Shape,
    StateFile,
    States,
    is_contiguous,
    locate_views,
    read_states,
    shapes_of,
)  # fmt: skip
from distckpt._foreign.pieces import StoredPiece
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._foreign.torch_dist.source import contiguous_runs
from distckpt._geometry.region import flat_range_regions, whole

logger = logging.getLogger(__name__)

WEIGHT = "fp32"
"""The name of the weights themselves among the states of a parameter."""


class Described(NamedTuple):
    """The tensors of a checkpoint, names of tied ones, and the optimizer's settings."""

    pieces: list[StoredPiece]
    aliases: dict[str, str]
    settings: list[dict[str, Any]]


class _Part(NamedTuple):
    """What one rank has of the optimizer: vectors by name for each group, which ZeRO-3 calls sub-group."""

    file: StateFile
    fields: dict[str, Any]
    vectors: list[dict[str, TensorView]]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]


class _Vector(NamedTuple):
    """A flat vector that lies in several places: file and first byte of each run, and where it ends in the vector."""

    dtype: torch.dtype
    runs: list[tuple[str, int]]
    ends: list[int]


def key_of(state: str, name: str) -> str:
    """Return the key of a parameter, or of a tensor in its optimizer state."""
    return name if state == WEIGHT else f"optimizer.state.{state}.{name}"


def describe_zero(location: str, states: States) -> Described:
    """Describe a checkpoint of ZeRO-1, 2 or 3; of one without ZeRO what is not the optimizer's."""
    [model] = read_states(location, [states.model[min(states.model)]])
    shapes = shapes_of(model, "param_shapes")
    if not shapes and not states.optim:
        return Described(*module_pieces(model, ()), [])
    parts = [_part(file) for file in read_states(location, [states.optim[rank] for rank in sorted(states.optim)])]
    is_stage_3 = bool(parts) and "fp32_flat_groups" in parts[0].fields
    _check_ranks(states, parts, states.path(location), is_stage_3)
    locate_views((part.file, view) for part in parts for vectors in part.vectors for view in vectors.values())
    pieces: list[StoredPiece] = []
    for number, group in enumerate(shapes):
        pieces.extend((_pieces_of_shares if is_stage_3 else _pieces_of_vectors)(parts, number, group))
    frozen, names = frozen_pieces(location, states, model)
    rest, aliases = module_pieces(model, [*names, *(name for group in shapes for name in group)])
    return Described(
        [*pieces, *frozen, *rest], aliases, settings_of(parts[0].file, parts[0].groups, parts[0].states, shapes)
    )


# ---- the files of the ranks


def _part(file: StateFile) -> _Part:
    try:
        fields = file.content["optimizer_state_dict"]
        is_stage_3 = "fp32_flat_groups" in fields
        flat = fields["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
        base = fields["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
        part = _Part(file, fields, [], dict(base["state"]), list(base["param_groups"]))
        paddings = fields.get("group_paddings") or [0] * len(flat)
        for number, weights in enumerate(flat):
            size = math.prod(weights.shape)
            vectors = {n: v for n, v in part.states.get(number, {}).items() if type(v) is TensorView and v.shape}
            # Only the weights are stored without the padding at the end.
            fitting = {n: v for n, v in vectors.items() if math.prod(v.shape) in (size, size + paddings[number])}
            if fitting != vectors:
                odd = summarize_keys(vectors.keys() - fitting)
                logger.warning("%s: of the optimizer, %s is not read: no element for each weight", file.path, odd)
            part.vectors.append({WEIGHT: weights, **fitting})
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise file.damaged(f"no optimizer state of ZeRO, or one of an elastic checkpoint: {error!r}") from error
    return part


def _check_ranks(states: States, parts: Sequence[_Part], path: str, is_stage_3: bool) -> None:
    """Check that there is one file of each rank, all of one save."""
    if not parts:
        raise CorruptCheckpointError(
            f"{path!r} holds no *_optim_states.pt, where ZeRO keeps the weights: restore them."
        )
    for part in parts:
        counts = part.fields.get("partition_count")
        distinct = set(counts if isinstance(counts, list) else [counts])
        if len(distinct) > 1:
            raise CheckpointingException(f"{part.file.path!r} divides experts among other ranks, which is not read.")
        for files in (states.optim, states.model) if is_stage_3 else (states.optim,):
            if distinct != {len(files)} or sorted(files) != list(range(len(files))):
                raise CorruptCheckpointError(
                    f"{part.file.path!r} was saved by {distinct.pop()} ranks, but {path!r} holds "
                    f"{', '.join(name.rpartition('/')[2] for name in files.values()):.500}: restore what is missing, "
                    "or remove what is of another save."
                )
        if _traits(part) != _traits(parts[0]):
            raise CorruptCheckpointError(
                f"{part.file.path!r} and {parts[0].file.path!r} are of different saves (their groups, states or steps "
                "differ): copy the files of one save again."
            )


def _traits(part: _Part) -> Any:
    steps = [_step(part.file, state) for _, state in sorted(part.states.items())]
    return "fp32_flat_groups" in part.fields, [set(vectors) for vectors in part.vectors], steps


# ---- pieces


def _pieces_of_vectors(parts: Sequence[_Part], number: int, shapes: Mapping[str, Shape]) -> Iterator[StoredPiece]:
    """Find the parameters of a group of ZeRO-1 or 2 in the vector that the ranks have runs of."""
    known = parts[0].fields.get("param_alignment_paddings")
    paddings = known[number] if known else [0] * len(shapes)
    for state in _vectors_of(parts[0], number):
        vector = _vector([(p.file, p.vectors[number][state], p.vectors[number][WEIGHT].shape[0]) for p in parts])
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            yield from _pieces_in(key_of(state, name), shape, 0, math.prod(shape), vector, at)
            at += math.prod(shape) + padding
        # The optimizer of bfloat16 keeps the padding, which is less than two elements for each rank.
        if not at <= vector.ends[-1] < at + 2 * len(parts):
            raise parts[0].file.damaged(f"group {number} has {vector.ends[-1]} elements, its parameters {at}")


def _pieces_of_shares(parts: Sequence[_Part], number: int, shapes: Mapping[str, Shape]) -> Iterator[StoredPiece]:
    """Find the parameters of a sub-group of ZeRO-3, of which each rank has a share."""
    for state in _vectors_of(parts[0], number):
        vectors = [_vector([(p.file, v := p.vectors[number][state], v.shape[0])]) for p in parts]
        at = 0
        for name, shape in shapes.items():
            yield from _pieces_of_ranks(key_of(state, name), shape, vectors, at)
            at += -(-math.prod(shape) // len(parts))
        for part, vector in zip(parts, vectors, strict=True):
            if vector.ends[-1] != at:
                raise part.file.damaged(f"sub-group {number} has {vector.ends[-1]} elements, its parameters {at}")


def frozen_pieces(location: str, states: States, model: StateFile) -> tuple[list[StoredPiece], list[str]]:
    """Find the frozen parameters of ZeRO-3, of which each rank has a share, and their names; none of others."""
    groups = shapes_of(model, "frozen_param_shapes") if "zero_pp_rank" in model.name else []
    shapes = {name: shape for group in groups for name, shape in group.items()}
    models = read_states(location, [states.model[rank] for rank in sorted(states.model)]) if shapes else []
    fragments = [(file, file.content.get("frozen_param_fragments") or {}) for file in models]
    for file, views in fragments:
        if views.keys() != shapes.keys():
            raise file.damaged("other frozen parameters than in the files of other ranks")
    locate_views((file, view) for file, views in fragments for view in views.values())
    pieces: list[StoredPiece] = []
    for name, shape in shapes.items():
        vectors = [_vector([(file, views[name], math.prod(views[name].shape))]) for file, views in fragments]
        pieces.extend(_pieces_of_ranks(name, shape, vectors, 0))
    return pieces, list(shapes)


def _pieces_of_ranks(key: str, shape: Shape, vectors: Sequence[_Vector], at: int) -> Iterator[StoredPiece]:
    size = math.prod(shape)
    share = -(-size // len(vectors))
    for rank, vector in enumerate(vectors[: max(1, size)]):
        first = min(rank * share, size)
        yield from _pieces_in(key, shape, first, min(share, size - first), vector, at)


def _vectors_of(part: _Part, number: int) -> dict[str, TensorView]:
    if number < len(part.vectors):
        return part.vectors[number]
    raise part.file.damaged(f"it has {len(part.vectors)} groups, the model more")


def _vector(runs: Iterable[tuple[StateFile, TensorView, int]]) -> _Vector:
    runs = list(runs)
    for file, view, size in runs:
        if len(view.shape) != 1 or not is_contiguous(view) or view.shape[0] < size or view.dtype != runs[0][1].dtype:
            raise file.damaged("a flat vector that is none")
    ends = list(itertools.accumulate(size for _, _, size in runs))
    return _Vector(runs[0][1].dtype, [(file.name, file.first_byte(view)) for file, view, _ in runs], ends)


def _pieces_in(key: str, shape: Shape, first: int, count: int, vector: _Vector, at: int) -> Iterator[StoredPiece]:
    """Find elements [first, first + count) of a tensor at a position of a vector."""
    dtype, item = TO_NAME[vector.dtype], vector.dtype.itemsize
    if not math.prod(shape):
        file, byte = vector.runs[0]
        yield StoredPiece(key, dtype, whole(shape), shape, file, byte, 0)
    run = bisect.bisect_right(vector.ends, at)
    while count > 0 and run < len(vector.ends):
        file, byte = vector.runs[run]
        byte += (at - (vector.ends[run - 1] if run else 0)) * item
        size = min(count, vector.ends[run] - at)
        for region in flat_range_regions(shape, first, first + size):
            yield StoredPiece(key, dtype, region, shape, file, byte, region.num_elements * item)
            byte += region.num_elements * item
        first, at, count, run = first + size, at + size, count - size, run + 1


def module_pieces(model: StateFile, known: Iterable[str]) -> tuple[list[StoredPiece], dict[str, str]]:
    """Describe what of a module is beside the optimizer (buffers, frozen parameters), and the names of tied ones."""
    known = set(known)
    aliases = {str(alias): str(name) for alias, name in (model.content.get("shared_params") or {}).items()}
    module = model.content.get("module") or {}
    views = {name: view for name, view in module.items() if name not in known and name not in aliases}
    if odd := [name for name, view in views.items() if type(view) is not TensorView]:
        logger.warning("%s: %s of the module is not read, as it is no tensor", model.path, summarize_keys(odd))
    views = {name: view for name, view in views.items() if type(view) is TensorView}
    # ZeRO-3 leaves an empty tensor in the place of each parameter.
    lost = [n for n, view in views.items() if view.shape == (0,) and n not in model.content.get("buffer_names", ())]
    if lost:
        raise model.damaged(f"{summarize_keys(lost)}: nothing says where they are")
    locate_views((model, view) for view in views.values())
    pieces = []
    for name, view in views.items():
        byte, item = model.first_byte(view), view.dtype.itemsize
        for region, start in contiguous_runs(view, whole(view.shape)):
            size = region.num_elements * item
            pieces.append(
                StoredPiece(name, TO_NAME[view.dtype], region, view.shape, model.name, byte + start * item, size)
            )
    stored = known.union(views)
    return pieces, {alias: name for alias, name in aliases.items() if alias not in known and name in stored}


# ---- settings


def settings_of(
    file: StateFile, groups: Iterable[Any], states: Mapping[int, dict[str, Any]], shapes: Sequence[Mapping[str, Shape]]
) -> list[dict[str, Any]]:
    """Return the settings of the optimizer in distckpt's form: options and steps by the names of parameters."""
    entries = []
    for group in groups:
        options = {name: value for name, value in group.items() if name not in ("params", "step")}
        if options.get("bias_correction") is True:
            # An option of DeepSpeed's own Adam: that of PyTorch always does it.
            del options["bias_correction"]
        for number in group["params"]:
            state = states.get(number, {})
            step = _step(file, {"step": group.get("step"), **state})
            names = {name for name, value in state.items() if type(value) is TensorView and value.shape}
            entry = {
                "options": file.values(options, "param_groups"),
                "tensors": sorted(names),
                "has_state": bool(state),
            }
            entry |= {"values": {}} if step is None else {"values": {"step": step}, "scalars": {"step": torch.float32}}
            entries.append({**entry, "params": list(shapes[number])})
    return entries


def _step(file: StateFile, state: Mapping[str, Any]) -> float | None:
    step = file.values(state.get("step"), "step")
    return None if step is None else float(step)
