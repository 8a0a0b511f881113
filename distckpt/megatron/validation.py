"""Check that shards make complete tensors, and that keys match a checkpoint's."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.public import set_public_home
from distckpt._commit.presence import READER_VERSION, check_marker
from distckpt._format.marker import read_marker
from distckpt._operations.verify import verify
from distckpt._ranks.collectives import Ranks
from distckpt._state.flatten import adopt
from distckpt._state.shards import Shard, merge_tables, shard_table
from distckpt._state.strictness import StrictHandling, handle_mismatch, parse_strict_flag
from distckpt._state.validation import validate_shards
from distckpt._storage import locations
from distckpt.mapping._base import ShardedBase
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, ShardedStateDict
from distckpt.megatron.dict_utils import extract_matching_values, nested_values

__all__ = [
    "INTEGRITY_FNAME",
    "READER_VERSION",
    "StrictHandling",
    "adjust_non_strict_load",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "save_integrity_manifest",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "verify_checkpoint",
    "verify_integrity_manifest",
]

set_public_home(globals())

logger = logging.getLogger(__name__)

INTEGRITY_FNAME = "integrity.json"
"""Megatron's file of hashes; distckpt has checksums in its own files."""


def verify_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Check that a complete checkpoint of a readable format is there.

    It is complete if its marker is there; contents are not read.

    Returns:
        The fields of the marker.

    Raises:
        CheckpointNotFoundError: no marker.
        CorruptCheckpointError: the marker is damaged, or written by a newer version.
    """
    location = locations.normalize(checkpoint_dir)
    return check_marker(read_marker(location), location)


def _sharded_leaves(sharded_state_dict: ShardedStateDict | list[Any]) -> list[Shard]:
    """List the `ShardedTensor`s and `ShardedObject`s of nested dicts and lists."""
    leaves = map(adopt, nested_values(sharded_state_dict))
    return [leaf for leaf in leaves if isinstance(leaf, ShardedTensor | ShardedObject)]


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: Any = None
) -> tuple[list[Shard], list[list[Shard]]]:
    """Collect the descriptions of all ranks' shards.

    Collective operation: all ranks of the group must call it; each sends its descriptions to all.

    Returns:
        `(mine, all)`: the shards of this rank without data, and every rank's by rank.
    """
    local_shards = [shard.without_data() for shard in _sharded_leaves(sharded_state_dict)]
    texts = Ranks(process_group).all_gather(json.dumps(list(map(_to_json, local_shards))).encode())
    shards_of_ranks = []
    for text in texts:
        shards_of_ranks.append(list(map(_from_json, json.loads(text))))
    return local_shards, shards_of_ranks


def _to_json(shard: Shard) -> dict[str, Any]:
    fields = {name: value for name, value in vars(shard).items() if name != "data"}
    if isinstance(shard, ShardedTensor):
        flat = shard.flattened_range
        fields["dtype"] = str(shard.dtype).removeprefix("torch.")
        fields["flattened_range"] = None if flat is None else [flat.start, flat.stop]
    return fields


def _from_json(fields: dict[str, Any]) -> Shard:
    if isinstance(fields["replica_id"], list):
        fields["replica_id"] = tuple(fields["replica_id"])
    if "dtype" not in fields:
        return ShardedObject(data=None, **fields)
    flat = fields.pop("flattened_range")
    dtype = getattr(torch, fields.pop("dtype"))
    return ShardedTensor(
        data=None, dtype=dtype, flattened_range=None if flat is None else slice(*flat), **fields
    )


def validate_sharding_integrity(
    global_metadata: Sequence[Iterable[ShardedBase]], common_state_dict: Any = None
) -> None:
    """Check that main replicas cover each tensor and object grid exactly once.

    The shards of all ranks count.

    `global_metadata` comes from `determine_global_metadata`; `common_state_dict` is accepted for
    compatibility: `save` compares common state itself.

    Raises:
        InvalidShardingError: naming keys, regions and ranks.
    """
    del common_state_dict
    leaves = [_sharded_leaves(list(shards)) for shards in global_metadata]
    validate_shards(merge_tables(list(map(shard_table, leaves))))


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[ShardedBase] | None = None,
    global_metadata: Sequence[Sequence[ShardedBase]] | None = None,
    ckpt_sharded_metadata: dict[str, ShardedBase] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Check shards of all ranks and apply a strictness mode.

    This is Megatron's function, and takes all metadata.

    Returns:
        `(sharded_state_dict without unexpected entries, missing keys, unexpected keys)`.

    Raises:
        CheckpointingException: metadata that the mode needs is None.
        InvalidShardingError: shards do not cover their tensors exactly once.
        LoadMismatchError: keys differ and the mode raises.
    """
    missing = set[str]()
    unexpected = set[str]()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException("Cannot compare keys: ckpt_sharded_metadata is None.")
        known = _keys_of(ckpt_sharded_metadata.values())
        unexpected = _keys_of(local_metadata or _sharded_leaves(sharded_state_dict)) - known
        if StrictHandling.requires_global_app_metadata(strict):
            if global_metadata is None:
                raise CheckpointingException("Cannot find missing keys: global_metadata is None.")
            missing = known.difference(*map(_keys_of, global_metadata))
        handle_mismatch(strict, missing, unexpected, known, "given as metadata")
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException(
                "Cannot check sharding integrity: global_metadata is None."
            )
        validate_sharding_integrity(global_metadata)
    return adjust_non_strict_load(sharded_state_dict, unexpected), missing, unexpected


def _keys_of(shards: Iterable[ShardedBase]) -> set[str]:
    return {shard.key for shard in shards}


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Return a state dict without the entries of some keys.

    Shards, objects and factories are left out.
    """
    rest: ShardedStateDict
    _, rest = extract_matching_values(
        sharded_state_dict,
        lambda leaf: isinstance(leaf, ShardedBase) and leaf.key in sharded_keys_to_remove,
    )
    return rest


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise LoadMismatchError when there are differing keys, or log a warning instead."""
    mode = StrictHandling.RAISE_ALL if raise_error else StrictHandling.LOG_ALL
    handle_mismatch(mode, set(missing_keys), set(unexpected_keys), (), "given as keys")


def save_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Check that a checkpoint has checksums.

    Every save computes them: there is nothing to add.

    Raises:
        CheckpointingException: it has none, since another program wrote it.
    """
    if not verify(checkpoint_dir, "fast").has_checksums:
        raise CheckpointingException(
            f"{os.fspath(checkpoint_dir)!r} has no checksums: make a checkpoint of it that has, "
            "with distckpt convert."
        )


def verify_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Compare all bytes of a checkpoint with their checksums, on rank 0.

    Collective operation: all ranks must call it.

    Raises:
        CorruptCheckpointError: on every rank, when anything differs.
        CheckpointingException: the checkpoint has no checksums.
    """
    ranks = Ranks()
    with ranks.phase("verify the checkpoint", decision=True):
        if ranks.is_coordinator:
            save_integrity_manifest(checkpoint_dir)
            if problems := verify(checkpoint_dir).problems:
                raise CorruptCheckpointError(
                    f"{os.fspath(checkpoint_dir)!r} is damaged: {problems[0]}"
                )
