"""Check that the shards of all ranks make complete tensors, and that a checkpoint and a request hold the same keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
)
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.public import set_public_home
from distckpt._commit import posix
from distckpt._format.marker import CONFIG_FNAME, parse_config, read_marker
from distckpt._ranks import collectives
from distckpt._state.shards import Shard, describe, merge_tables
from distckpt._state.validation import validate_shards as validate_shards
from distckpt._storage import locations
from distckpt.dict_utils import nested_values
from distckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor

__all__ = [
    "READER_VERSION",
    "StrictHandling",
    "determine_global_metadata",
    "parse_strict_flag",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
    "verify_checkpoint",
]

set_public_home(globals())

logger = logging.getLogger(__name__)

READER_VERSION = 1
"""The newest format version this package reads."""


class StrictHandling(Enum):
    """Choose how a load treats keys that only the checkpoint or only the request has (Megatron's names and meaning).

    *Unexpected* keys are requested and not in the checkpoint. *Missing* keys are in the checkpoint and requested by
    no rank.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Unexpected keys are an error while loading; missing ones are ignored."""
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are left out with a warning; missing ones are ignored."""
    LOG_ALL = "log_all"
    """Unexpected keys are left out with a warning; missing ones are warned about."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys are an error; missing ones are ignored."""
    RAISE_ALL = "raise_all"
    """Unexpected and missing keys are errors."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are left out and returned; `load` returns `(state_dict, missing, unexpected)`."""
    RETURN_ALL = "return_all"
    """Both are returned; `load` returns `(state_dict, missing, unexpected)`."""
    IGNORE_ALL = "ignore_all"
    """Unexpected keys are left out silently; missing ones are ignored."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Tell whether the keys of the checkpoint must be known."""
        return val != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Tell whether the keys that all ranks request must be known."""
        return val in (
            StrictHandling.LOG_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
            StrictHandling.IGNORE_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Tell whether `load` returns the differing keys."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Turn the name of a mode into the mode.

    Raises:
        ValueError: no such mode.
    """
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        names = ", ".join(repr(mode.value) for mode in StrictHandling)
        raise ValueError(f"Invalid strict flag: {strict!r}. Use a StrictHandling or one of {names}.") from None


def verify_checkpoint(checkpoint_dir: str) -> dict[str, Any]:
    """Check that a complete checkpoint of a readable format is there (its marker is; contents are not read).

    Returns:
        The fields of the marker.

    Raises:
        CheckpointNotFoundError: no marker.
        CorruptCheckpointError: the marker is damaged, or written by a newer version.
    """
    location = locations.normalize(checkpoint_dir)
    return check_marker(read_marker(location), location)


def check_marker(marker: dict[str, Any] | None, location: str) -> dict[str, Any]:
    """Check that a marker that was read, None when there is none, is of a readable format; as `verify_checkpoint`."""
    if marker is None:
        if not locations.exists(location):
            aside = posix.left_aside(location)
            hint = "" if aside is None else f" Its overwriting was interrupted: rename {aside!r}, which is its content."
            raise CheckpointNotFoundError(f"Checkpoint directory {location!r} does not exist.{hint}")
        raise CheckpointNotFoundError(
            f"{location!r} is not a distributed checkpoint: it has no {CONFIG_FNAME}. Either nothing was saved "
            "here, or a save did not finish; load another step."
        )
    parse_config(marker, location)
    oldest_reader = marker.get("min_reader_version", 1)
    if type(oldest_reader) is not int or not 1 <= oldest_reader < 2**31:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader!r:.50}, which is no version: its "
            f"{CONFIG_FNAME} was damaged. Restore it from a copy, or load another checkpoint."
        )
    if oldest_reader > READER_VERSION:
        raise CorruptCheckpointError(
            f"{location!r} needs a reader of format version {oldest_reader}; this release of distckpt reads up to "
            f"{READER_VERSION}. Install a newer release: pip install --upgrade distckpt"
        )
    return marker


def mismatch_message(missing: Iterable[str], unexpected: Iterable[str], known: Iterable[str], location: str) -> str:
    """Describe differing keys: grouped by pattern, with the nearest names in the checkpoint."""
    missing, unexpected = sorted(missing), sorted(unexpected)
    lines = [f"The requested keys and those in the checkpoint {location!r} differ."]
    if unexpected:
        hint = did_you_mean(unexpected[0], known) if len(unexpected) <= 20 else ""
        lines.append(f"Unexpected (requested, not in the checkpoint): {summarize_keys(unexpected)}{hint}.")
    if missing:
        lines.append(f"Missing (in the checkpoint, requested by no rank): {summarize_keys(missing)}.")
    lines.append("Correct the sharded state dict, or choose another StrictHandling.")
    return " ".join(lines)


def handle_mismatch(
    strict: StrictHandling,
    missing: set[str],
    unexpected: set[str],
    known: Iterable[str],
    location: str,
    logs: bool = True,
) -> None:
    """Raise LoadMismatchError, log a warning (on one rank) or do nothing about differing keys, as the mode says."""
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.LOG_UNEXPECTED):
        missing = set()
    if not (missing or unexpected):
        return
    if strict in (StrictHandling.RAISE_ALL, StrictHandling.RAISE_UNEXPECTED):
        message = mismatch_message(missing, unexpected, known, location)
        raise LoadMismatchError(message, missing=missing, unexpected=unexpected)
    if logs and strict in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED):
        logger.warning(mismatch_message(missing, unexpected, known, location))


def sharded_leaves(sharded_state_dict: ShardedStateDict) -> list[Shard]:
    """List the `ShardedTensor`s and `ShardedObject`s of nested dicts and lists."""
    return [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor | ShardedObject)]


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: Any = None
) -> tuple[list[Shard], list[list[Shard]]]:
    """Collect the descriptions of all ranks' shards.

    Collective operation: all ranks of the group must call it; each sends its descriptions to all.

    Returns:
        `(mine, all)`: the shards of this rank without data, and those of every rank by rank.
    """
    mine = [shard.without_data() for shard in sharded_leaves(sharded_state_dict)]
    texts = collectives.Ranks(process_group).all_gather(json.dumps([_to_json(shard) for shard in mine]).encode())
    return mine, [[_from_json(fields) for fields in json.loads(text)] for text in texts]


def _to_json(shard: Shard) -> dict[str, Any]:
    fields = {name: value for name, value in vars(shard).items() if name != "data"}
    if isinstance(shard, ShardedTensor):
        flat = shard.flattened_range
        fields["dtype"] = str(shard.dtype).removeprefix("torch.")
        fields["flattened_range"] = None if flat is None else [flat.start, flat.stop]
    return fields


def _from_json(fields: dict[str, Any]) -> Shard:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if "dtype" not in plain:
        return ShardedObject(data=None, **plain)
    flat = plain.pop("flattened_range")
    dtype = getattr(torch, plain.pop("dtype"))
    return ShardedTensor(data=None, dtype=dtype, flattened_range=None if flat is None else slice(*flat), **plain)


def validate_sharding_integrity(
    global_metadata: Sequence[Iterable[ShardedBase]], common_state_dict: Any = None
) -> None:
    """Check that the main replicas of all ranks cover each tensor and object grid exactly once.

    Args:
        global_metadata: for each rank its shards, from `determine_global_metadata`.
        common_state_dict: accepted for compatibility; `save` compares common state itself.

    Raises:
        InvalidShardingError: naming keys, regions and ranks.
    """
    del common_state_dict
    leaves = [[s for s in shards if isinstance(s, ShardedTensor | ShardedObject)] for shards in global_metadata]
    validate_shards(merge_tables([describe(shards) for shards in leaves]))


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[ShardedBase] | None = None,
    global_metadata: Sequence[Sequence[ShardedBase]] | None = None,
    ckpt_sharded_metadata: dict[str, ShardedBase] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Check shards of all ranks and apply a strictness mode, given all metadata (Megatron's function).

    Returns:
        `(sharded_state_dict without unexpected entries, missing keys, unexpected keys)`.

    Raises:
        CheckpointingException: metadata that the mode needs is None.
        InvalidShardingError: shards do not cover their tensors exactly once.
        LoadMismatchError: keys differ and the mode raises.
    """
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException("Cannot compare keys: ckpt_sharded_metadata is None.")
        known = {shard.key for shard in ckpt_sharded_metadata.values()}
        requested = {shard.key for shard in local_metadata or sharded_leaves(sharded_state_dict)}
        unexpected = requested - known
        if StrictHandling.requires_global_app_metadata(strict):
            if global_metadata is None:
                raise CheckpointingException("Cannot find missing keys: global_metadata is None.")
            missing = known - {shard.key for shards in global_metadata for shard in shards}
        handle_mismatch(strict, missing, unexpected, known, "given as metadata")
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException("Cannot check sharding integrity: global_metadata is None.")
        validate_sharding_integrity(global_metadata)
    return _without_keys(sharded_state_dict, unexpected), missing, unexpected


def _without_keys(node: Any, keys: set[str]) -> Any:
    if isinstance(node, dict):
        return {name: _without_keys(child, keys) for name, child in node.items() if not _has_key(child, keys)}
    if isinstance(node, list):
        return [_without_keys(child, keys) for child in node if not _has_key(child, keys)]
    return node


def _has_key(node: Any, keys: set[str]) -> bool:
    return isinstance(node, ShardedBase) and node.key in keys
