"""ZeRO checkpoints: the places of parameters and states in the flat vectors of ranks.

ZeRO-1 and ZeRO-2 flatten the parameters of a group into one vector and divide it among the ranks.
ZeRO-3 divides each parameter among the ranks and flattens a rank's shares of a group.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.messages import summarize_keys
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.deepspeed.files import (
    WEIGHT,
    Contents,
    Shape,
    StateFile,
    States,
    is_array,
    join,
    key_of,
    locate_views,
    read_save,
    settings_of,
    step_of,
)
from distckpt._foreign.deepspeed.pieces import flat_vector, module_contents, pieces_in_vectors
from distckpt._foreign.deepspeed.without_zero import contents_without_zero
from distckpt._foreign.torch_dist.objects import TensorView

logger = logging.getLogger(__name__)

_Groups = Sequence[Mapping[str, Shape]]
"""Names and shapes of the parameters of each group."""


@dataclass(frozen=True)
class _RankState:
    """The optimizer's part on one rank.

    Attributes:
        file: its file.
        fields: the content of the file about the optimizer.
        is_stage_3: whether ZeRO-3 wrote it.
        states: states of the flat parameters by number.
        groups: `param_groups` of the optimizer.
        paddings: the number of elements of each group, at the end, that belong to no parameter.
        vectors: for each group, which ZeRO-3 calls a sub-group, its weights and states by name.
    """

    file: StateFile
    fields: dict[str, Any]
    is_stage_3: bool
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    paddings: list[int]
    vectors: list[dict[str, TensorView]]

    def num_elements(self, group: int) -> int:
        """Return the number of a group's weights on the rank."""
        return self.vectors[group][WEIGHT].shape[0]

    def has_elements(self, group: int, state: str) -> bool:
        """Whether a state of a group has an element for each weight.

        Only the weights of the rank count.
        """
        size = math.prod(self.vectors[group][state].shape)
        # Only the weights are stored without the padding at the end.
        return size - self.num_elements(group) in (0, self.paddings[group])


def zero_contents(location: str, states: States) -> Contents:
    """Return the contents of a ZeRO checkpoint, or one without ZeRO."""
    models, optims = read_save(location, states)
    shapes = models[0].shapes("param_shapes")
    if not shapes and not states.optim:
        return contents_without_zero(models)
    ranks = list(map(_rank_state, optims))
    _check_ranks(states, ranks, join(location, states.folder))
    _check_model(models[0], ranks, shapes)
    views = []
    for rank in ranks:
        for vectors in rank.vectors:
            views += [(rank.file, view) for view in vectors.values()]
    locate_views(views)
    pieces: list[StoredPiece] = []
    values: dict[int, dict[str, Any]] = {}
    for number, group in enumerate(shapes):
        group_pieces, unread = _pieces_of_group(ranks, number, group)
        pieces.extend(group_pieces)
        state = _holders(ranks, number)[0].states.get(number, {})
        values[number] = {name: value for name, value in state.items() if name not in unread}
    others, aliases = module_contents(models, list(itertools.chain.from_iterable(shapes)))
    settings = settings_of(ranks[0].file, ranks[0].groups, values, shapes)
    return Contents([*pieces, *others], aliases, settings)


# ---- the files of the ranks


def _rank_state(file: StateFile) -> _RankState:
    try:
        fields = file.content["optimizer_state_dict"]
        is_stage_3 = "fp32_flat_groups" in fields
        flat = fields["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
        base = fields["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
        states = dict(base["state"])
        groups = list(base["param_groups"])
        paddings = list(fields.get("group_paddings") or [0] * len(flat))
        vectors = []
        for weights, number in zip(flat, range(len(paddings)), strict=True):
            others = {n: value for n, value in states.get(number, {}).items() if is_array(value)}
            vectors.append({WEIGHT: weights, **others})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise file.damaged(
            f"no optimizer state of ZeRO, or one of an elastic checkpoint: {error!r}"
        ) from error
    return _RankState(file, fields, is_stage_3, states, groups, paddings, vectors)


def _check_ranks(states: States, ranks: Sequence[_RankState], path: str) -> None:
    """Check that each rank has one file, all of one save."""
    if not ranks:
        raise CorruptCheckpointError(
            f"{path!r} holds no *_optim_states.pt, where ZeRO keeps the weights: restore them."
        )
    for rank in ranks:
        _check_all_are_there(states, rank, path)
        if len(rank.vectors) != len(ranks[0].vectors):
            raise _different_saves_error(rank, ranks[0])
    for number in range(len(ranks[0].vectors)):
        first, *others = _holders(ranks, number)
        for rank in others:
            if _traits(rank, number) != _traits(first, number):
                raise _different_saves_error(rank, first)


def _different_saves_error(rank: _RankState, other: _RankState) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{rank.file.path!r} and {other.file.path!r} are of different saves (their groups, states "
        "or steps differ): copy the files of one save again."
    )


def _check_all_are_there(states: States, rank: _RankState, path: str) -> None:
    """Check that there are as many files as a rank's file says."""
    counts = rank.fields.get("partition_count")
    distinct = set(counts if isinstance(counts, list) else [counts])
    if len(distinct) > 1:
        raise CheckpointingException(
            f"{rank.file.path!r} divides experts among other ranks, which is not read."
        )
    for files in (states.optim, states.model) if rank.is_stage_3 else (states.optim,):
        if distinct != {len(files)} or sorted(files) != list(range(len(files))):
            raise CorruptCheckpointError(
                f"{rank.file.path!r} was saved by {distinct.pop()} ranks, but {path!r} holds "
                f"{', '.join(name.rpartition('/')[2] for name in files.values()):.500}: "
                "restore what is missing, or remove what is of another save."
            )


def _holders(ranks: Sequence[_RankState], group: int) -> Sequence[_RankState]:
    """Return the ranks with weights of a group, or all without any."""
    return [rank for rank in ranks if rank.num_elements(group)] or ranks


def _traits(rank: _RankState, group: int) -> Any:
    """Return the traits of a group that its ranks must share.

    Only ranks with weights of the group count.
    """
    step = step_of(rank.file, rank.states.get(group, {}))
    return rank.is_stage_3, set(rank.vectors[group]), step


def _check_model(model: StateFile, ranks: Sequence[_RankState], shapes: _Groups) -> None:
    """Check that the model is of the same save as the optimizer."""
    num_ranks = model.content.get("dp_world_size")
    if num_ranks not in (None, len(ranks)):
        raise CorruptCheckpointError(
            f"{model.path!r} was saved by {num_ranks} ranks, and the optimizer states beside "
            f"it by {len(ranks)}: copy the files of one save again."
        )
    num_groups = len(ranks[0].vectors)
    if num_groups != len(shapes):
        raise ranks[0].file.damaged(f"{num_groups} groups, of which the model has {len(shapes)}")


# ---- pieces


@dataclass(frozen=True)
class _Group:
    """The parameters of a group in the vectors of the ranks.

    Attributes:
        ranks: all of them.
        number: of the group.
        shapes: of its parameters, by name.
        paddings: the number of elements behind each parameter.
    """

    ranks: Sequence[_RankState]
    number: int
    shapes: Mapping[str, Shape]
    paddings: Sequence[int]

    def stretches(self) -> Iterator[tuple[_RankState, dict[str, tuple[int, int]]]]:
        """Yield each rank with its slices of parameters, by name.

        A slice is a start and a size. ZeRO-1 and 2 divide one vector of the group among the ranks.
        """
        first = 0
        for rank in self.ranks:
            last = first + rank.num_elements(self.number)
            yield rank, self._slices_between(first, last)
            first = last

    def _slices_between(self, first: int, last: int) -> dict[str, tuple[int, int]]:
        slices = {}
        end = 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            begin = end
            end += math.prod(shape)
            start = max(begin, first)
            stop = min(end, last)
            if start < stop:
                slices[name] = (start - first, stop - start)
            end += padding
        return slices


def _pieces_of_group(
    ranks: Sequence[_RankState], number: int, shapes: Mapping[str, Shape]
) -> tuple[list[StoredPiece], set[str]]:
    """Return a group's pieces, and the names of states without pieces.

    These are not read from vectors.
    """
    group = _Group(ranks, number, shapes, _paddings_of_group(ranks[0], number, len(shapes)))
    holders = _holders(ranks, number)
    pieces: list[StoredPiece] = []
    unread: set[str] = set()
    for state in holders[0].vectors[number]:
        if all(rank.has_elements(number, state) for rank in holders):
            pieces.extend(_pieces_of_state(group, state))
        elif (whole_pieces := _pieces_of_wholes(group, state)) is not None:
            pieces.extend(whole_pieces)
        else:
            unread.add(state)
    if _notes_places(group):
        _check_slices(group)
    if unread:
        logger.warning(
            "%s: of the optimizer, %s is not read: neither an element for each weight of a rank, "
            "nor whole parameters",
            holders[0].file.path,
            summarize_keys(unread),
        )
    return pieces, unread


def _paddings_of_group(rank: _RankState, number: int, num_parameters: int) -> Sequence[int]:
    """Return the padding behind each parameter of a group."""
    by_group = rank.fields.get("param_alignment_paddings") or {number: [0] * num_parameters}
    paddings: Sequence[int] = by_group[number]
    if len(paddings) != num_parameters:
        raise rank.file.damaged(
            f"group {number} has {len(paddings)} parameters, param_shapes {num_parameters}"
        )
    return paddings


def _pieces_of_state(group: _Group, state: str) -> Iterator[StoredPiece]:
    """Yield the pieces of a group's weights, or of an elementwise state."""
    runs = []
    for rank in group.ranks:
        view = rank.vectors[group.number].get(state)
        if view is not None:
            runs.append((rank.file, view, rank.num_elements(group.number)))
    is_stage_3 = group.ranks[0].is_stage_3
    # ZeRO-1 and 2 share one vector among the ranks.
    vectors = [flat_vector([run]) for run in runs] if is_stage_3 else [flat_vector(runs)]
    end = 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        yield from pieces_in_vectors(key_of(state, name), shape, vectors, end)
        end += -(-math.prod(shape) // len(vectors)) + padding
    # The optimizer of bfloat16 keeps the padding, which is less than two elements for each rank.
    slack = 1 if is_stage_3 else 2 * len(group.ranks)
    counts = [sum(vector.sizes) for vector in vectors]
    if not all(end <= count < end + slack for count in counts):
        raise group.ranks[0].file.damaged(
            f"group {group.number} has {counts[0]} elements, its parameters {end}"
        )


def _pieces_of_wholes(group: _Group, state: str) -> list[StoredPiece] | None:
    """Return the pieces of a state that ranks hold for whole parameters.

    Under ZeRO-1 and 2, Muon has it on each rank that has weights of a parameter. None if it has
    another form.
    """
    if group.ranks[0].is_stage_3:
        return None
    pieces_by_name: dict[str, list[StoredPiece]] = {}
    for rank, slices in group.stretches():
        if not slices:
            continue
        view = rank.vectors[group.number].get(state)
        count = sum(math.prod(group.shapes[name]) for name in slices)
        if view is None or math.prod(view.shape) != count:
            return None
        vectors = [flat_vector([(rank.file, view, count)])]
        end = 0
        for name in slices:
            shape = group.shapes[name]
            # Several ranks have a parameter that is divided: the first one's is read.
            if name not in pieces_by_name:
                key = key_of(state, name)
                pieces_by_name[name] = list(pieces_in_vectors(key, shape, vectors, end))
            end += math.prod(shape)
    if group.shapes.keys() - pieces_by_name.keys():
        return None
    return list(itertools.chain.from_iterable(pieces_by_name.values()))


def _notes_places(group: _Group) -> bool:
    """Whether the places that DeepSpeed notes are the ones it uses.

    They differ where it reorders parameters, and did where it pads them.
    """
    rank = group.ranks[0]
    config = rank.file.content.get("ds_config") or {}
    zero = config.get("zero_optimization") or {}
    return not (rank.is_stage_3 or any(group.paddings) or zero.get("round_robin_gradients"))


def _check_slices(group: _Group) -> None:
    """Compare the slices that ZeRO-1 and 2 note with those expected."""
    for rank, expected in group.stretches():
        mappings = rank.fields.get("param_slice_mappings") or []
        # Parameters of which a rank has nothing are noted as well.
        slices = {}
        for name, place in dict(*mappings[group.number : group.number + 1]).items():
            if place.get("numel"):
                slices[str(name)] = (place.get("start"), place.get("numel"))
        if mappings and slices != expected:
            raise CorruptCheckpointError(
                f"{rank.file.path!r} is not the file of its rank, or of another model "
                f"(param_slice_mappings[{group.number}] is {slices!s:.150}, its place has "
                f"{expected!s:.150}): copy the files of one save again."
            )
