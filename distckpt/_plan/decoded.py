"""Planning reads of quantized tensors: a view of the checkpoint with them, and which parts a region
is made of.

In the view each quantized tensor is one chunk under the key of the model. What it is stored as has
other names there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import OBJECT, Manifest, take_figures
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._plan.codes import AS_STORED
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._quantization.detect import find_quantized
from distckpt._quantization.names import may_be_codes
from distckpt._quantization.quantized import QuantizedTensor, part_regions
from distckpt._rules.mapped import TensorSpec

PIECE_ELEMENTS = 8 << 20
"""Number of values whose codes are read at a time."""


def find(stored: StoredCheckpoint) -> dict[str, QuantizedTensor]:
    """Find the quantized tensors of a checkpoint, by the key of the model."""
    manifest = stored.manifest
    if not any(map(may_be_codes, set(manifest.dtypes))):
        return {}
    columns = zip(manifest.keys, manifest.global_shapes, manifest.dtypes, strict=True)
    tensors = {key: TensorSpec(shape, dtype) for key, shape, dtype in columns if dtype != OBJECT}
    return find_quantized(tensors, manifest.quantization)


def decoded(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Return a view of a checkpoint with its quantized tensors as they are in the model; a view
    stays as it is.
    """
    found = {} if stored.quantized else find(stored)
    if not found:
        return stored
    manifest, tensors = stored.manifest, list(found.values())
    names = {key: key + AS_STORED for each in tensors for key in each.keys}
    view = manifest.replaced(
        keys=[*(names.get(key, key) for key in manifest.keys), *found],
        dtypes=[*manifest.dtypes, *(each.dtype for each in tensors)],
        global_shapes=[*manifest.global_shapes, *(each.model_shape for each in tensors)],
        chunks=manifest.chunks.followed_by(_chunks_of(manifest, tensors)),
        aliases=_aliases_in_view(manifest.aliases, found, names),
        # Nothing is stored about the values that codes stand for.
        figures=take_figures(manifest.figures, [*range(len(manifest.keys)), *(-1 for _ in found)]),
    )
    renamed = [_with_names(each, names) for each in tensors]
    quantized = dict(enumerate(renamed, len(manifest.key_ids)))
    return replace(stored, manifest=view, quantized=quantized)


def _aliases_in_view(
    aliases: Mapping[str, str], found: Collection[str], names: Mapping[str, str]
) -> dict[str, str]:
    """Return the aliases of a view, which has `names` for what is stored under other ones."""
    in_view = {alias: key for alias, key in aliases.items() if key in found or key not in names}
    for alias, key in aliases.items():
        if key in names:
            in_view[alias + AS_STORED] = names[key]
    return in_view


def _with_names(quantized: QuantizedTensor, names: Mapping[str, str]) -> QuantizedTensor:
    """Return a quantized tensor whose parts have other keys."""
    parts = {role: replace(part, key=names[part.key]) for role, part in quantized.parts.items()}
    companions = tuple(names[key] for key in quantized.companions)
    return replace(quantized, parts=parts, companions=companions)


def _chunks_of(manifest: Manifest, tensors: Sequence[QuantizedTensor]) -> ChunkTable:
    """Return a chunk for each tensor, whose key follows those of the manifest."""
    ndim, first_key = manifest.offsets.shape[1], len(manifest.keys)
    shapes = np.ones((len(tensors), ndim), np.int64)
    for row, quantized in enumerate(tensors):
        shapes[row, : len(quantized.shape)] = quantized.model_shape
    items = np.array([ITEM_BYTES[each.dtype] for each in tensors], np.int64)
    return ChunkTable.empty()._replace(
        key_ids=np.arange(first_key, first_key + len(tensors)),
        file_ids=np.zeros(len(tensors), np.int64),
        # Nowhere, and each elsewhere.
        first_bytes=np.arange(-len(tensors), 0),
        num_bytes=np.prod(shapes, axis=1) * items,
        offsets=np.zeros((len(tensors), ndim), np.int64),
        shapes=shapes,
    )


def name_in_view(view: StoredCheckpoint, key: str, dtype: torch.dtype) -> str:
    """Return the name under which a view has what is requested: what is stored, where that has the
    dtype.
    """
    as_stored = key + AS_STORED
    if as_stored not in view.manifest.key_index:
        return key
    is_model_key = key in view.manifest.key_index
    return key if is_model_key and FROM_NAME[view.dtype_name(as_stored)] != dtype else as_stored


def hidden_keys(view: StoredCheckpoint) -> set[str]:
    """Return the keys of a view that are stored only for its quantized tensors."""
    hidden = {key for quantized in view.quantized.values() for key in quantized.keys}
    return hidden | {alias for alias, key in view.manifest.aliases.items() if key in hidden}


class Piece(NamedTuple):
    """Values to compute: a region of a quantized tensor as it is stored, of which request, and what
    it is made of.

    `parts` has for each part its role, the stored region, and the copies of which it consists;
    their requests count from 0.
    """

    quantized: QuantizedTensor
    region: Region
    copy: Copy
    roles: tuple[str, ...]
    parts: tuple[Region, ...]
    copies: list[Copy]


def plan_decoding(view: StoredCheckpoint, copies: Sequence[Copy]) -> list[Piece]:
    """Divide copies out of quantized tensors into pieces, and find the parts that each piece is
    made of.
    """
    pieces: list[Piece] = []
    requests: list[Request] = []
    owners: list[tuple[int, int]] = []
    for copy in copies:
        quantized = view.quantized[copy.chunk]
        # Of narrow slices, items are read that hold more codes than those of the slice.
        source = quantized.to_model(copy.source)
        for region in cut_region(
            source, max(1, PIECE_ELEMENTS // -(-quantized.pack // source.shape[-1]))
        ):
            regions = part_regions(quantized, region)
            owners += [(len(pieces), index) for index in range(len(regions))]
            requests += [
                Request(quantized.parts[role].key, quantized.parts[role].shape, regions[role])
                for role in regions
            ]
            pieces.append(
                Piece(quantized, region, copy, tuple(regions), tuple(regions.values()), [])
            )
    for part in plan_load(view, requests):
        piece, index = owners[part.request]
        pieces[piece].copies.append(part._replace(request=index))
    return pieces


def target_of(piece: Piece, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the view of a target that a piece fills, with the axes as they are stored."""
    copy, quantized = piece.copy, piece.quantized
    goal = targets[copy.request][copy.target.slices()]
    goal = goal.transpose(-2, -1) if quantized.transposed else goal
    return goal[piece.region.relative_to(quantized.to_model(copy.source).offset).slices()]
