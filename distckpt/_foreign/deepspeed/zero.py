"""ZeRO checkpoints: where in the flat vectors of all ranks each parameter and its optimizer state
lie.

ZeRO-1 and ZeRO-2 flatten the parameters of a group into one vector and divide that among the ranks.
ZeRO-3 divides each parameter among the ranks, and flattens what a rank has of a group.
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
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.deepspeed.files import (
    Shape,
    StateFile,
    States,
    is_contiguous,
    join,
    locate_views,
    read_save,
)
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
    """What one rank has of the optimizer: vectors by name for each group, which ZeRO-3 calls
    sub-group.
    """

    file: StateFile
    fields: dict[str, Any]
    vectors: list[dict[str, TensorView]]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]


class _Vector(NamedTuple):
    """A flat vector that lies in several places: file and first byte of each run, and where it ends
    in the vector.
    """

    dtype: torch.dtype
    runs: list[tuple[str, int]]
    ends: list[int]


def key_of(state: str, name: str) -> str:
    """Return the key of a parameter, or of a tensor in its optimizer state."""
    return name if state == WEIGHT else f"optimizer.state.{state}.{name}"


def describe_zero(location: str, states: States) -> Described:
    """Describe a checkpoint of ZeRO-1, 2 or 3; of one without ZeRO what is not the optimizer's."""
    models, optims = read_save(location, states)
    shapes = models[0].shapes("param_shapes")
    if not shapes and not states.optim:
        return Described(*module_pieces(models, ()), [])
    parts = [_part(file) for file in optims]
    _check_ranks(states, parts, join(location, states.folder))
    if (num_ranks := models[0].content.get("dp_world_size")) not in (None, len(parts)):
        raise CorruptCheckpointError(
            f"{models[0].path!r} was saved by {num_ranks} ranks, and the optimizer states beside "
            f"it by {len(parts)}: copy the files of one save again."
        )
    if len(parts[0].vectors) != len(shapes):
        raise parts[0].file.damaged(
            f"{len(parts[0].vectors)} groups, of which the model has {len(shapes)}"
        )
    locate_views(
        (part.file, view) for part in parts for vectors in part.vectors for view in vectors.values()
    )
    pieces = [
        piece
        for number, group in enumerate(shapes)
        for piece in _pieces_of_group(parts, number, group)
    ]
    rest, aliases = module_pieces(models, [name for group in shapes for name in group])
    return Described(
        [*pieces, *rest],
        aliases,
        settings_of(parts[0].file, parts[0].groups, parts[0].states, shapes),
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
        for weights, (number, padding) in zip(flat, enumerate(paddings), strict=True):
            size = math.prod(weights.shape)
            vectors = {
                n: v
                for n, v in part.states.get(number, {}).items()
                if type(v) is TensorView and v.shape
            }
            # Only the weights are stored without the padding at the end.
            fitting = {
                n: v for n, v in vectors.items() if math.prod(v.shape) in (size, size + padding)
            }
            if fitting != vectors:
                odd = summarize_keys(vectors.keys() - fitting)
                logger.warning(
                    "%s: of the optimizer, %s is not read: no element for each weight",
                    file.path,
                    odd,
                )
            part.vectors.append({WEIGHT: weights, **fitting})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise file.damaged(
            f"no optimizer state of ZeRO, or one of an elastic checkpoint: {error!r}"
        ) from error
    return part


def _check_ranks(states: States, parts: Sequence[_Part], path: str) -> None:
    """Check that there is one file of each rank, all of one save."""
    if not parts:
        raise CorruptCheckpointError(
            f"{path!r} holds no *_optim_states.pt, where ZeRO keeps the weights: restore them."
        )
    for part in parts:
        counts = part.fields.get("partition_count")
        distinct = set(counts if isinstance(counts, list) else [counts])
        if len(distinct) > 1:
            raise CheckpointingException(
                f"{part.file.path!r} divides experts among other ranks, which is not read."
            )
        for files in (
            (states.optim, states.model) if "fp32_flat_groups" in part.fields else (states.optim,)
        ):
            if distinct != {len(files)} or sorted(files) != list(range(len(files))):
                raise CorruptCheckpointError(
                    f"{part.file.path!r} was saved by {distinct.pop()} ranks, but {path!r} holds "
                    f"{', '.join(name.rpartition('/')[2] for name in files.values()):.500}: "
                    "restore what is missing, or remove what is of another save."
                )
        if _traits(part) != _traits(parts[0]):
            raise CorruptCheckpointError(
                f"{part.file.path!r} and {parts[0].file.path!r} are of different saves (their "
                "groups, states or steps differ): copy the files of one save again."
            )


def _traits(part: _Part) -> Any:
    steps = [_step(part.file, state) for _, state in sorted(part.states.items())]
    return "fp32_flat_groups" in part.fields, [set(vectors) for vectors in part.vectors], steps


def _check_slices(parts: Sequence[_Part], number: int, shapes: Mapping[str, Shape]) -> None:
    """Compare what ZeRO-1 and 2 note of the parameters in each file with what belongs in the file
    of that rank.
    """
    first, ends = 0, list(itertools.accumulate(map(math.prod, shapes.values()), initial=0))
    for part in parts:
        last = first + part.vectors[number][WEIGHT].shape[0]
        spans = [
            (name, max(a, first), min(b, last))
            for name, a, b in zip(shapes, ends, ends[1:], strict=False)
        ]
        expected = {name: (begin - first, end - begin) for name, begin, end in spans if begin < end}
        mappings = part.fields.get("param_slice_mappings") or []
        found = {
            str(n): (a.get("start"), a.get("numel"))
            for n, a in dict(*mappings[number : number + 1]).items()
        }
        if (
            mappings
            and {name: address for name, address in found.items() if address[1]} != expected
        ):
            raise CorruptCheckpointError(
                f"{part.file.path!r} is not the file of its rank, or of another model "
                f"(param_slice_mappings[{number}] is {found!s:.150}, its place has "
                f"{expected!s:.150}): copy the files of one save again."
            )
        first = last


# ---- pieces


def _pieces_of_group(
    parts: Sequence[_Part], number: int, shapes: Mapping[str, Shape]
) -> Iterator[StoredPiece]:
    fields, is_stage_3 = parts[0].fields, "fp32_flat_groups" in parts[0].fields
    paddings = (fields.get("param_alignment_paddings") or {number: [0] * len(shapes)})[number]
    if len(paddings) != len(shapes):
        raise parts[0].file.damaged(
            f"group {number} has {len(paddings)} parameters, param_shapes {len(shapes)}"
        )
    for state in parts[0].vectors[number]:
        runs = [
            (part.file, part.vectors[number][state], part.vectors[number][WEIGHT].shape[0])
            for part in parts
        ]
        vectors = [_vector([run]) for run in runs] if is_stage_3 else [_vector(runs)]
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            yield from _pieces_in(key_of(state, name), shape, vectors, at)
            at += -(-math.prod(shape) // len(vectors)) + padding
        # The optimizer of bfloat16 keeps the padding, which is less than two elements for each
        # rank.
        slack = 1 if is_stage_3 else 2 * len(parts)
        if not all(at <= vector.ends[-1] < at + slack for vector in vectors):
            raise parts[0].file.damaged(
                f"group {number} has {vectors[0].ends[-1]} elements, its parameters {at}"
            )
    # DeepSpeed notes other places than those it uses where it reorders parameters, and did where it
    # pads them.
    zero = (parts[0].file.content.get("ds_config") or {}).get("zero_optimization") or {}
    if not is_stage_3 and not any(paddings) and not zero.get("round_robin_gradients"):
        _check_slices(parts, number, shapes)


def _vector(runs: Sequence[tuple[StateFile, TensorView, int]]) -> _Vector:
    for file, view, size in runs:
        if (
            len(view.shape) != 1
            or not is_contiguous(view)
            or view.shape[0] < size
            or view.dtype != runs[0][1].dtype
        ):
            raise file.damaged("a flat vector that is none")
    ends = list(itertools.accumulate(size for _, _, size in runs))
    return _Vector(
        runs[0][1].dtype, [(file.name, file.first_byte(view)) for file, view, _ in runs], ends
    )


def _pieces_in(
    key: str, shape: Shape, vectors: Sequence[_Vector], at: int
) -> Iterator[StoredPiece]:
    """Find a tensor, of which each vector has a share of equal size at one position; the last ones
    may be cut off.
    """
    total, dtype = math.prod(shape), vectors[0].dtype
    if odd := [vector for vector in vectors if vector.dtype != dtype]:
        raise CorruptCheckpointError(
            f"{odd[0].runs[0][0]!r} has {key!r} as {odd[0].dtype}, not {dtype}: restore it."
        )
    if not total:
        yield StoredPiece(key, TO_NAME[dtype], whole(shape), shape, *vectors[0].runs[0], 0)
    share = -(-total // len(vectors))
    for rank, vector in enumerate(vectors):
        first, last = min(rank * share, total), min(rank * share + share, total)
        run, position = bisect.bisect_right(vector.ends, at), at
        while first < last and run < len(vector.ends):
            file, byte = vector.runs[run]
            byte += (position - (vector.ends[run - 1] if run else 0)) * dtype.itemsize
            size = min(last - first, vector.ends[run] - position)
            for region in flat_range_regions(shape, first, first + size):
                num_bytes = region.num_elements * dtype.itemsize
                yield StoredPiece(key, TO_NAME[dtype], region, shape, file, byte, num_bytes)
                byte += num_bytes
            first, position, run = first + size, position + size, run + 1


def pieces_of_view(key: str, file: StateFile, view: TensorView) -> Iterator[StoredPiece]:
    """Find a tensor that a file holds as it is."""
    byte, item = file.first_byte(view), view.dtype.itemsize
    for region, start in contiguous_runs(view, whole(view.shape)):
        num_bytes = region.num_elements * item
        yield StoredPiece(
            key, TO_NAME[view.dtype], region, view.shape, file.name, byte + start * item, num_bytes
        )


def module_pieces(
    models: Sequence[StateFile], trained: Iterable[str]
) -> tuple[list[StoredPiece], dict[str, str]]:
    """Describe what of a module is beside the optimizer (buffers, frozen parameters), and the names
    of tied ones.
    """
    model = models[0]
    is_stage_3 = model.name.rpartition("/")[2].startswith("zero_pp_rank")
    shapes = {
        name: shape
        for group in model.shapes("frozen_param_shapes")
        if is_stage_3
        for name, shape in group.items()
    }
    fragments = [
        (file, file.content.get("frozen_param_fragments") or {}) for file in models if shapes
    ]
    for file, own in fragments:
        if missing := shapes.keys() - own.keys():
            raise file.damaged(f"frozen_param_fragments lacks {summarize_keys(missing)}")
    aliases = {
        str(alias): str(name) for alias, name in (model.content.get("shared_params") or {}).items()
    }
    known = {*trained, *shapes}
    stored = model.content.get("module") or {}
    if absent := set(model.content.get("buffer_names") or ()) - stored.keys():
        raise model.damaged(f"the module lacks {summarize_keys(absent)} of buffer_names")
    for name, shape in (item for group in model.shapes("param_shapes") for item in group.items()):
        # ZeRO-3 leaves an empty tensor in the place of each parameter.
        if type(view := stored.get(name)) is TensorView and view.shape not in ((0,), shape):
            raise model.damaged(
                f"{name!r} has shape {view.shape} in the module, {tuple(shape)} in param_shapes"
            )
    module = {name: v for name, v in stored.items() if name not in {*known, *aliases}}
    views = {name: view for name, view in module.items() if type(view) is TensorView}
    if odd := module.keys() - views.keys():
        logger.warning(
            "%s: %s of the module is not read, as it is no tensor", model.path, summarize_keys(odd)
        )
    lost = [
        n
        for n, view in views.items()
        if view.shape == (0,) and n not in model.content.get("buffer_names", ())
    ]
    if lost:
        raise model.damaged(f"{summarize_keys(lost)}: nothing says where they are")
    locate_views(
        [(f, own[name]) for f, own in fragments for name in shapes]
        + [(model, v) for v in views.values()]
    )
    pieces = [piece for name, view in views.items() for piece in pieces_of_view(name, model, view)]
    for name, shape in shapes.items():
        vectors = [
            _vector([(file, own[name], math.prod(own[name].shape))]) for file, own in fragments
        ]
        pieces.extend(_pieces_in(name, shape, vectors, 0))
    known |= views.keys()
    # Without frozen_param_shapes, frozen parameters were left out of the save, also those that
    # others are tied to.
    dangling = [
        alias for alias, name in aliases.items() if name not in known and alias not in known
    ]
    if dangling and model.content.get("frozen_param_shapes") is not None:
        raise model.damaged(
            f"shared_params ties {summarize_keys(dangling)} to tensors that are not there"
        )
    return pieces, {
        alias: name for alias, name in aliases.items() if alias not in known and name in known
    }


# ---- settings


def settings_of(
    file: StateFile,
    groups: Iterable[Any],
    states: Mapping[int, dict[str, Any]],
    shapes: Sequence[Mapping[str, Shape]],
) -> list[dict[str, Any]]:
    """Return the settings of the optimizer in distckpt's form: options and steps by the names of
    parameters.
    """
    entries = []
    for group in groups:
        # An option of DeepSpeed's own Adam: that of PyTorch always does it.
        left_out = {"params", "step"} | (
            {"bias_correction"} if group.get("bias_correction") is True else set()
        )
        options = file.values(
            {name: value for name, value in group.items() if name not in left_out}, "param_groups"
        )
        for number in group["params"]:
            state = states.get(number, {})
            tensors = sorted(
                name for name, value in state.items() if type(value) is TensorView and value.shape
            )
            values = {
                n: file.values(v, n)
                for n, v in {"step": group.get("step"), **state}.items()
                if n not in tensors
            }
            if values["step"] is None:
                del values["step"]
            else:
                # FusedAdam and DeepSpeedCPUAdam count with integers, PyTorch with tensors.
                values["step"] = torch.tensor(float(values["step"]))
            scalars = {
                name: value.dtype
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            values |= {name: values[name].item() for name in scalars}
            entry = {"options": options, "tensors": tensors, "values": values, "scalars": scalars}
            entries.append({**entry, "has_state": bool(state), "params": list(shapes[number])})
    return entries


def _step(file: StateFile, state: Mapping[str, Any]) -> float | None:
    step = file.values(state.get("step"), "step")
    return None if step is None else float(step)
