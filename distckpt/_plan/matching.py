"""What is asked for must be stored as it is asked for: keys, dtypes, and the parts of objects."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._format.manifest import OBJECT, Manifest
from distckpt.mapping import ShardedObject


def check_known(manifest: Manifest, keys: Iterable[str], checkpoint_dir: str) -> None:
    """Refuse keys that are not stored."""
    absent = sorted({key for key in keys if key not in manifest.key_index})
    if absent:
        hint = did_you_mean(absent[0], manifest.key_index)
        raise LoadMismatchError(
            f"Not in the checkpoint {checkpoint_dir!r}: {summarize_keys(absent)}{hint}. Correct the keys, or choose a "
            "StrictHandling that leaves unexpected keys out.",
            unexpected=absent,
        )


def check_dtype(manifest: Manifest, key: str, wanted: torch.dtype, checkpoint_dir: str, allow_cast: bool) -> None:
    """Refuse a tensor that is stored as an object, or in a dtype whose values would change."""
    name = manifest.dtypes[manifest.key_index[key]]
    if name == OBJECT:
        raise LoadMismatchError(
            f"Key {key!r} is an object in {checkpoint_dir!r} and was asked for as a tensor.", unexpected=[key]
        )
    stored = FROM_NAME[name]
    if not (allow_cast or is_lossless_cast(stored, wanted)):
        raise LoadMismatchError(
            f"Key {key!r} is stored in {checkpoint_dir!r} as {stored} and was asked for as {wanted}, which would "
            "change values. Ask for the stored dtype or a wider one, or pass allow_dtype_cast=True.",
            unexpected=[key],
        )


def object_chunk(manifest: Manifest, shard: ShardedObject, checkpoint_dir: str) -> int:
    """Return the number of the chunk that holds a part of an object."""
    key_id = manifest.key_index[shard.key]
    if manifest.dtypes[key_id] != OBJECT:
        raise LoadMismatchError(
            f"Key {shard.key!r} is a tensor in {checkpoint_dir!r} and was asked for as an object.",
            unexpected=[shard.key],
        )
    stored_shape = manifest.global_shapes[key_id]
    if stored_shape != tuple(shard.global_shape):
        raise LoadMismatchError(
            f"The object {shard.key!r} was saved in {stored_shape} parts and is asked for in {shard.global_shape} "
            f"(checkpoint {checkpoint_dir!r}): objects cannot be resharded. Such per-rank state (RNG, data loader "
            "position) belongs to the number of ranks it was saved with: leave the key out, or load all stored parts "
            "(see load_sharded_metadata) and merge them yourself.",
            unexpected=[shard.unique_key],
        )
    rows = manifest.chunk_rows(key_id)
    offsets = manifest.offsets[rows, : len(stored_shape)]
    hits = np.flatnonzero((offsets == np.array(shard.global_offset, np.int64)).all(axis=1))
    if len(hits):
        return int(rows.start) + int(hits[0])
    raise LoadMismatchError(
        f"Part {shard.global_offset} of the object {shard.key!r} is not in {checkpoint_dir!r}.",
        unexpected=[shard.unique_key],
    )
