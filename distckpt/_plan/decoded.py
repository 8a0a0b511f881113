"""Planning of reads of quantized tensors.

In a view of the checkpoint, each quantized tensor is one chunk under the key of the model. Its
stored parts have other names there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.code_names import may_be_codes
from distckpt._format.manifest import OBJECT, Manifest, take_figures
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._plan.codes import AS_STORED
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._quantization.detect import find_quantized
from distckpt._quantization.quantized import QuantizedTensor, part_regions
from distckpt.rules._mapped import TensorSpec

PIECE_ELEMENTS = 8 << 20
"""Values whose codes are read at a time."""


def find(stored: StoredCheckpoint) -> dict[str, QuantizedTensor]:
    """Find the quantized tensors of a checkpoint, by the model's key."""
    manifest = stored.manifest
    if not any(map(may_be_codes, set(manifest.dtypes))):
        return {}
    columns = zip(manifest.keys, manifest.global_shapes, manifest.dtypes, strict=True)
    tensors = {}
    for key, shape, dtype in columns:
        if dtype != OBJECT:
            tensors[key] = TensorSpec(shape, dtype)
    return find_quantized(tensors, manifest.quantization)


def decoded(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Return a view of a checkpoint with its quantized tensors decoded.

    A view stays as it is.
    """
    quantized_tensors = {}
    if not stored.quantized:
        quantized_tensors = find(stored)
    if not quantized_tensors:
        return stored
    manifest = stored.manifest
    tensors = list(quantized_tensors.values())
    names = {}
    for tensor in tensors:
        for key in tensor.keys:
            names[key] = key + AS_STORED
    # Nothing is stored about the values that codes stand for.
    ids = [*range(len(manifest.keys)), *(-1 for _ in tensors)]
    view = manifest.replaced(
        keys=[*(names.get(key, key) for key in manifest.keys), *quantized_tensors],
        dtypes=[*manifest.dtypes, *(tensor.dtype for tensor in tensors)],
        global_shapes=[*manifest.global_shapes, *(tensor.model_shape for tensor in tensors)],
        chunks=manifest.chunks.followed_by(_chunks_of(manifest, tensors)),
        aliases=_aliases_in_view(manifest.aliases, quantized_tensors, names),
        figures=take_figures(manifest.figures, ids),
    )
    renamed = [_with_names(tensor, names) for tensor in tensors]
    quantized = dict(enumerate(renamed, len(manifest.key_ids)))
    return replace(stored, manifest=view, quantized=quantized)


def _aliases_in_view(
    aliases: Mapping[str, str], quantized_keys: Collection[str], names: Mapping[str, str]
) -> dict[str, str]:
    """Return the aliases of a view, given its new `names` of parts."""
    view_aliases = {}
    for alias, key in aliases.items():
        if key in quantized_keys or key not in names:
            view_aliases[alias] = key
    for alias, key in aliases.items():
        if key in names:
            view_aliases[alias + AS_STORED] = names[key]
    return view_aliases


def _with_names(quantized: QuantizedTensor, names: Mapping[str, str]) -> QuantizedTensor:
    """Return a quantized tensor with other keys for its parts."""
    parts = {role: part._replace(key=names[part.key]) for role, part in quantized.parts.items()}
    companions = tuple(names[key] for key in quantized.companions)
    return replace(quantized, parts=parts, companions=companions)


def _chunks_of(manifest: Manifest, tensors: Sequence[QuantizedTensor]) -> ChunkTable:
    """Return a chunk for each tensor, whose key follows those of the manifest."""
    ndim = manifest.offsets.shape[1]
    first_key = len(manifest.keys)
    shapes = np.ones((len(tensors), ndim), np.int64)
    for row, quantized in enumerate(tensors):
        shapes[row, : len(quantized.shape)] = quantized.model_shape
    items = np.array([ITEM_BYTES[tensor.dtype] for tensor in tensors], np.int64)
    return ChunkTable.empty()._replace(
        key_ids=np.arange(first_key, first_key + len(tensors)),
        file_ids=np.zeros(len(tensors), np.int64),
        # They are stored nowhere, each at another position.
        first_bytes=np.arange(-len(tensors), 0),
        num_bytes=np.prod(shapes, axis=1) * items,
        offsets=np.zeros((len(tensors), ndim), np.int64),
        shapes=shapes,
    )


def name_in_view(view: StoredCheckpoint, key: str, dtype: torch.dtype) -> str:
    """Return a view's name for a requested key and dtype.

    It is the name of the stored tensor if that has the dtype.
    """
    as_stored = key + AS_STORED
    if as_stored not in view.manifest.key_index:
        return key
    is_model_key = key in view.manifest.key_index
    if is_model_key and FROM_NAME[view.dtype_name(as_stored)] != dtype:
        return key
    return as_stored


def hidden_keys(view: StoredCheckpoint) -> set[str]:
    """Return the keys of a view that only its quantized tensors use."""
    hidden: set[str] = set()
    for quantized in view.quantized.values():
        hidden.update(quantized.keys)
    return hidden | {alias for alias, key in view.manifest.aliases.items() if key in hidden}


class Piece(NamedTuple):
    """A region of a quantized tensor to compute, with its parts.

    `region` is in the stored layout, and `copy` has the request. `parts` has the stored region of
    each part by its role, and `copies` their reads, whose requests count from 0.
    """

    quantized: QuantizedTensor
    region: Region
    copy: Copy
    parts: Mapping[str, Region]
    copies: list[Copy]


def plan_decoding(view: StoredCheckpoint, copies: Sequence[Copy]) -> list[Piece]:
    """Divide the copies out of quantized tensors into pieces.

    Each piece has the parts to read.
    """
    pieces: list[Piece] = []
    requests: list[Request] = []
    owners: list[tuple[int, int]] = []
    for copy in copies:
        quantized = view.quantized.get(copy.chunk)
        if quantized is None:
            continue
        # Items of a narrow slice hold more codes than the slice.
        source = quantized.to_model(copy.source)
        for region in cut_region(
            source, max(1, PIECE_ELEMENTS // -(-quantized.pack // source.shape[-1]))
        ):
            regions = part_regions(quantized, region)
            for index, (role, part_region) in enumerate(regions.items()):
                spec = quantized.parts[role]
                owners.append((len(pieces), index))
                requests.append(Request(spec.key, spec.shape, part_region))
            pieces.append(Piece(quantized, region, copy, regions, []))
    if not requests:
        return pieces
    for part in plan_load(view, requests):
        piece, index = owners[part.request]
        pieces[piece].copies.append(part._replace(request=index))
    return pieces


def target_of(piece: Piece, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the view that a piece fills, in the stored layout."""
    copy = piece.copy
    quantized = piece.quantized
    goal = targets[copy.request][copy.target.slices()]
    if quantized.transposed:
        goal = goal.transpose(-2, -1)
    return goal[piece.region.relative_to(quantized.to_model(copy.source).offset).slices()]
