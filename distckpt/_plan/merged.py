"""A view of several checkpoints, in which each tensor is the weighted sum of those of its key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._format.manifest import ChunkTable, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.codes import check_scales_cast
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.export import select_tensors


class Merge(NamedTuple):
    """Checkpoints to merge: their locations, and the weight of each."""

    locations: tuple[str, ...]
    weights: tuple[float, ...]


def merged(
    sources: Sequence[StoredCheckpoint],
    weights: Sequence[float],
    keys: str | Sequence[str] | None,
    write_tied: bool,
) -> StoredCheckpoint:
    """Return the view of the tensors that match `keys`, which must be in all checkpoints, with the
    same shapes.

    Quantised tensors become values. Names are tied that are tied in all. It has no chunks: only
    exports read it.
    """
    sources = [decoded(source) for source in sources]
    ids = [_select(source, keys) for source in sources]
    common = dict.fromkeys(name for name in ids[0] if all(name in others for others in ids))
    for here, source in zip(ids, sources, strict=True):
        held = {here[name] for name in common}
        # A name that is only tied to another one may be absent elsewhere, as in Hugging Face
        # directories.
        absent = [
            name for name in here if name not in common and (write_tied or here[name] not in held)
        ]
        if absent:
            where = next(
                s.location for s, names in zip(sources, ids, strict=True) if absent[0] not in names
            )
            raise LoadMismatchError(
                f"Merging needs the same tensors in all checkpoints: {summarize_keys(absent)} of "
                f"{source.location!r} cannot be found in {where!r}. Leave them out with `keys`, "
                "or convert one of the checkpoints (`consolidate` with rules) so that their "
                "names agree.",
                missing=absent,
            )
    firsts: dict[tuple[int, ...], str] = {}
    tied = {name: firsts.setdefault(tuple(names[name] for names in ids), name) for name in common}
    names = list(firsts.values())
    dtypes = [_dtype_of_sum(name, sources) for name in names]
    shapes = [sources[0].global_shape(name) for name in names]
    aliases = {alias: name for alias, name in tied.items() if alias != name}
    manifest = Manifest(names, dtypes, shapes, ChunkTable.empty(), aliases, has_checksums=False)
    return StoredCheckpoint(
        sources[0].location, manifest, sources=tuple(zip(sources, weights, strict=True))
    )


def _select(source: StoredCheckpoint, keys: str | Sequence[str] | None) -> dict[str, int]:
    """Return the index of each name that matches, tied ones included."""
    tensors = select_tensors(source.manifest, keys, True, hidden_keys(source))
    check_scales_cast(
        source,
        {key: torch.float64 for key, info in tensors.items() if is_summed(FROM_NAME[info.dtype])},
    )
    index = source.manifest.key_index
    return {
        key: index[key]
        for key in (*source.manifest.keys, *source.manifest.aliases)
        if key in tensors
    }


def _dtype_of_sum(name: str, sources: Sequence[StoredCheckpoint]) -> str:
    """Return the dtype of a merged tensor: one that holds the values of all, 8-bit floats beside
    others aside.
    """
    shapes = {source.location: source.global_shape(name) for source in sources}
    if len(set(shapes.values())) > 1:
        raise LoadMismatchError(
            f"Key {name!r} has different shapes: {shapes}. Leave it out with `keys`."
        )
    dtypes = {source.location: FROM_NAME[source.dtype_name(name)] for source in sources}
    different = set(dtypes.values())
    # Float16 has all values of 8-bit floats.
    wide = {dtype for dtype in different if dtype.itemsize > 1} or {torch.float16}
    of_sum = functools.reduce(torch.promote_types, wide if len(different) > 1 else different)
    if len(different) > 1 and not (all(map(is_summed, different)) and of_sum in TO_NAME):
        raise CheckpointingException(
            f"Key {name!r} has dtypes of which there is no sum: {dtypes}. Leave it out with "
            "`keys`, or convert one of the checkpoints first."
        )
    return TO_NAME[of_sum]
