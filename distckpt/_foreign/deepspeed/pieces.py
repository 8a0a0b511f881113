"""The pieces of tensors in the files of DeepSpeed.

They lie in flat vectors, or singly. In the module, which has no optimizer, they are buffers, frozen
parameters and tied tensors.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._base.messages import summarize_keys
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._foreign.deepspeed.files import Shape, StateFile, is_contiguous, locate_views
from distckpt._foreign.torch_dist.objects import TensorView
from distckpt._foreign.torch_dist.runs import contiguous_runs
from distckpt._geometry.region import flat_range_regions, whole
from distckpt._geometry.units import spans_within

logger = logging.getLogger(__name__)


class FlatVector(NamedTuple):
    """A flat vector in one or several files.

    Attributes:
        dtype: of its elements.
        runs: file and first byte of each stretch of it.
        sizes: the number of elements in each stretch.
    """

    dtype: torch.dtype
    runs: list[tuple[str, int]]
    sizes: list[int]


def flat_vector(runs: Sequence[tuple[StateFile, TensorView, int]]) -> FlatVector:
    """Join one-dimensional tensors, each with its file and length.

    Elements past that length do not count.
    """
    dtype = runs[0][1].dtype
    for file, view, size in runs:
        is_flat = len(view.shape) == 1 and is_contiguous(view)
        if not is_flat or view.shape[0] < size or view.dtype != dtype:
            raise file.damaged("a tensor where a flat vector should be")
    places = [(file.name, file.first_byte(view)) for file, view, _ in runs]
    return FlatVector(dtype, places, [size for _, _, size in runs])


def pieces_in_vectors(
    key: str, shape: Shape, vectors: Sequence[FlatVector], at: int
) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor that vectors hold in equal shares.

    Each share begins at element `at`.

    The shares of the last vectors may be cut off.
    """
    total = math.prod(shape)
    dtype = vectors[0].dtype
    if odd := [vector for vector in vectors if vector.dtype != dtype]:
        raise CorruptCheckpointError(
            f"{odd[0].runs[0][0]!r} has {key!r} as {odd[0].dtype}, not {dtype}: restore it."
        )
    name = TO_NAME[dtype]
    item_bytes = dtype.itemsize
    if not total:
        yield StoredPiece(key, name, whole(shape), shape, *vectors[0].runs[0], 0)
    share = -(-total // len(vectors))
    for rank, vector in enumerate(vectors):
        first = min(rank * share, total)
        last = min(rank * share + share, total)
        for run, begin, end in spans_within(vector.sizes, at, at + last - first):
            file, byte = vector.runs[run]
            byte += begin * item_bytes
            for region in flat_range_regions(shape, first, first + end - begin):
                num_bytes = region.num_elements * item_bytes
                yield StoredPiece(key, name, region, shape, file, byte, num_bytes)
                byte += num_bytes
            first += end - begin


def pieces_of_view(key: str, file: StateFile, view: TensorView) -> Iterator[StoredPiece]:
    """Yield the pieces of a tensor that is stored as it is."""
    byte = file.first_byte(view)
    item = view.dtype.itemsize
    name = TO_NAME[view.dtype]
    for region, start in contiguous_runs(view, whole(view.shape)):
        first_byte = byte + start * item
        num_bytes = region.num_elements * item
        yield StoredPiece(key, name, region, view.shape, file.name, first_byte, num_bytes)


def module_contents(
    models: Sequence[StateFile], trained: Iterable[str]
) -> tuple[list[StoredPiece], dict[str, str]]:
    """Return the untrained pieces of a module, and its tied tensors' aliases."""
    model = models[0]
    shapes = _frozen_shapes(model)
    frozen = _shares_of_frozen(models, shapes)
    tied = model.content.get("shared_params") or {}
    aliases = {str(alias): str(name) for alias, name in tied.items()}
    known = {*trained, *shapes}
    stored = _checked_module(model)
    views = _views(model, stored, {*known, *aliases})
    in_module = [(model, view) for view in views.values()]
    locate_views(itertools.chain(in_module, *frozen.values()))
    pieces: list[StoredPiece] = []
    for name, view in views.items():
        pieces.extend(pieces_of_view(name, model, view))
    for name, shares in frozen.items():
        vectors = [flat_vector([(file, view, math.prod(view.shape))]) for file, view in shares]
        pieces.extend(pieces_in_vectors(name, shapes[name], vectors, 0))
    return pieces, _needed_aliases(model, aliases, known | views.keys())


def _frozen_shapes(model: StateFile) -> dict[str, Shape]:
    """Return the shapes of the frozen parameters of ZeRO-3."""
    shapes: dict[str, Shape] = {}
    # ZeRO-1 and ZeRO-2 keep them in the module.
    if model.name.rpartition("/")[2].startswith("zero_pp_rank"):
        for group in model.shapes("frozen_param_shapes"):
            shapes.update(group)
    return shapes


def _shares_of_frozen(
    models: Sequence[StateFile], names: Collection[str]
) -> dict[str, list[tuple[StateFile, TensorView]]]:
    """Return the shares that the ranks have of each frozen parameter."""
    shares: dict[str, list[tuple[StateFile, TensorView]]] = {name: [] for name in names}
    if not names:
        return shares
    for file in models:
        share = file.content.get("frozen_param_fragments") or {}
        if missing := set(names) - share.keys():
            raise file.damaged(f"frozen_param_fragments lacks {summarize_keys(missing)}")
        for name in names:
            shares[name].append((file, share[name]))
    return shares


def _checked_module(model: StateFile) -> Mapping[str, Any]:
    """Check a module's state dict against its file, and return it."""
    stored: Mapping[str, Any] = model.content.get("module") or {}
    if absent := set(model.content.get("buffer_names") or ()) - stored.keys():
        raise model.damaged(f"the module lacks {summarize_keys(absent)} of buffer_names")
    for group in model.shapes("param_shapes"):
        for name, shape in group.items():
            view = stored.get(name)
            # ZeRO-3 leaves an empty tensor instead of each parameter.
            if type(view) is TensorView and view.shape not in ((0,), shape):
                raise model.damaged(
                    f"{name!r} has shape {view.shape} in the module, {tuple(shape)} in param_shapes"
                )
    return stored


def _views(
    model: StateFile,
    stored: Mapping[str, Any],
    known: Set[str],
) -> dict[str, TensorView]:
    """Return the tensors of the module without the `known` ones."""
    buffers = model.content.get("buffer_names") or ()
    views = {}
    odd = []
    lost = []
    for name, value in stored.items():
        if name in known:
            continue
        if type(value) is not TensorView:
            odd.append(name)
            continue
        views[name] = value
        # Of a tensor that is elsewhere; buffers may be empty.
        if value.shape == (0,) and name not in buffers:
            lost.append(name)
    if odd:
        logger.warning(
            "%s: %s of the module is not read, as it is no tensor", model.path, summarize_keys(odd)
        )
    if lost:
        raise model.damaged(f"{summarize_keys(lost)}: nothing says where they are")
    return views


def _needed_aliases(
    model: StateFile, aliases: Mapping[str, str], known: Set[str]
) -> dict[str, str]:
    """Return the aliases whose tensors are not stored under their own names."""
    needed = {}
    dangling = []
    for alias, name in aliases.items():
        if alias in known:
            continue
        if name in known:
            needed[alias] = name
        else:
            dangling.append(alias)
    # Without frozen_param_shapes, frozen parameters were left out of the save, including those to
    # which other names are tied.
    if dangling and model.content.get("frozen_param_shapes") is not None:
        raise model.damaged(
            f"shared_params ties {summarize_keys(dangling)} to tensors that are not there"
        )
    return needed
