"""Megatron's ways to look into a checkpoint; distckpt's is `distckpt.open`.

Any rank may call, alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import nearest_names, summarize_keys
from distckpt._base.options import LoadOptions
from distckpt._checkpoint.consistent_read import ReadAttempt, read_attempts, reading
from distckpt._checkpoint.opening import find_checkpoint, is_built_in
from distckpt._checkpoint.shards import (
    ReadSettings,
    describe_objects,
    describe_tensors,
    load_shards,
)
from distckpt._checkpoint.stored_values import COMMON_STATE
from distckpt._commit import posix
from distckpt._format.manifest import OBJECT
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.checkpoint import check_keys
from distckpt._ranks.collectives import Ranks
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA
from distckpt._storage import locations
from distckpt._tools.remove_tensors import remove_tensors
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject, StateDict
from distckpt.strategies.base import (
    LoadShardedStrategy,
    choose_load_strategy,
)

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, ShardedTensor | ShardedObject]
"""Descriptions of stored tensors, by key, and objects, by unique key."""

_Strategy: TypeAlias = LoadShardedStrategy | tuple[str, int]


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Return the common state of a checkpoint.

    It is everything that was saved without being sharded.

    Any rank may call, alone. An object of a class that is not registered comes back as an
    `UnknownObject`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    location = locations.normalize(checkpoint_dir)
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            strategy = _strategy_that_reads(location, attempt)
            common = strategy.load({"common": COMMON_STATE.without_data()}, location)["common"]
    compacted: StateDict = flatten.compact(common)
    return compacted


def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: _Strategy | None = None
) -> dict[str, ShardedTensor]:
    """Describe the tensors of a checkpoint.

    Each key has a `ShardedTensor` without data that is the whole tensor.

    Any rank may call, alone. With `init_data` the result can be passed to `load`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    location = locations.normalize(checkpoint_dir)
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            strategy = _strategy_that_reads(location, attempt, sharded_strategy)
            metadata = strategy.load_tensors_metadata(location)
    return metadata


def load_sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: _Strategy | None = None
) -> CkptShardedMetadata:
    """Describe the tensors and objects of a checkpoint, without data.

    Tensors have their key, objects their unique key.

    Any rank may call, alone.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    location = locations.normalize(checkpoint_dir)
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            strategy = _strategy_that_reads(location, attempt, sharded_strategy)
            metadata = strategy.load_sharded_metadata(location)
    return {name: shard for name, shard in metadata.items() if shard.key != COMMON_KEY}


@operation
def load_plain_tensors(
    checkpoint_dir: str | os.PathLike[str], *, keys: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Load tensors of a checkpoint whole, by key, onto the CPU.

    Common state and objects are not included.

    Any rank may call, alone.

    Args:
        checkpoint_dir: see `load`.
        keys: keys of the tensors to read; None for all.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: there is no tensor of a key.
    """
    check_keys(keys)
    location = locations.normalize(checkpoint_dir)
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            strategy = _strategy_that_reads(location, attempt)
            stored = strategy.load_tensors_metadata(location)
            requests = stored
            if keys is not None:
                requests = _select(stored, keys, location)
            tensors = strategy.load(requests, location)
    return tensors


def _select(
    stored: Mapping[str, ShardedTensor], keys: Collection[str], location: str
) -> dict[str, ShardedTensor]:
    unknown = [key for key in keys if key not in stored]
    if unknown:
        hint = nearest_names(unknown, stored)
        raise LoadMismatchError(
            f"There are no tensors of these keys in {location!r}: {summarize_keys(unknown)}{hint}",
            unexpected=unknown,
        )
    return {key: stored[key] for key in keys}


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
) -> dict[str, Any] | None:
    """Return the `content_metadata` that was given to `save`, or None.

    Args:
        checkpoint_dir: location of the checkpoint; not read when `preloaded_state_dict` is given.
        preloaded_state_dict: common state that was loaded already.

    Raises:
        ValueError: neither argument was given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("Give checkpoint_dir or preloaded_state_dict.")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(CONTENT_METADATA)


def remove_sharded_tensors(checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
    """Remove the tensors under a key prefix, and free their space.

    The prefix of optimizer state is an example.

    One rank calls. The checkpoint is complete at every moment: the remaining tensors are written
    next to it, and the result takes its place in one step.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        CheckpointingException: another program wrote it, or its strategy cannot remove tensors.
    """
    location = locations.normalize(checkpoint_dir)
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            checkpoint = find_checkpoint(Ranks.alone(), location, attempt=attempt)
    if not is_built_in(checkpoint.marker):
        registered = registered_strategy(location, checkpoint.marker)
        registered.remove_sharded_tensors(location, key_prefix)
        return
    if checkpoint.manifest.origin is not None:
        raise CheckpointingException(f"{location!r} was not written by distckpt: convert it first.")
    manifest = checkpoint.manifest
    removed = []
    for key, key_id in manifest.key_index.items():
        if manifest.dtypes[key_id] != OBJECT and key.startswith(key_prefix):
            removed.append(key)
    if not removed:
        logger.warning(
            "no tensor in %s has a key that begins with %r: nothing removed", location, key_prefix
        )
        return
    with reading(Ranks.alone(), [checkpoint]):
        remove_tensors(replace(checkpoint, location=posix.resolve(location)), removed)


class _OpenStrategy(LoadShardedStrategy):
    """The built-in strategy with an open checkpoint, which queries share."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored

    def load(
        self, sharded_state_dict: Mapping[str, ShardedTensor | ShardedObject], checkpoint_dir: str
    ) -> StateDict:
        shards = list(sharded_state_dict.values())
        values = load_shards(Ranks.alone(), self._stored, shards, ReadSettings(LoadOptions()))
        return dict(zip(sharded_state_dict, values, strict=True))

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, ShardedTensor]:
        return describe_tensors(self._stored)

    def load_sharded_metadata(self, checkpoint_dir: str) -> CkptShardedMetadata:
        return {**describe_tensors(self._stored), **describe_objects(self._stored)}


def _strategy_that_reads(
    location: str, attempt: ReadAttempt, own_strategy: _Strategy | None = None
) -> LoadShardedStrategy:
    """Return the strategy for questions about a checkpoint: the caller's or its own."""
    checkpoint = find_checkpoint(Ranks.alone(), location, attempt=attempt)
    if own_strategy is not None:
        strategy, _ = choose_load_strategy(own_strategy)
        if strategy is not None:
            return strategy
    if is_built_in(checkpoint.marker):
        return _OpenStrategy(checkpoint)
    return registered_strategy(location, checkpoint.marker)


def registered_strategy(location: str, marker: Mapping[str, Any]) -> LoadShardedStrategy:
    """Return the strategy of the user that a marker names.

    Raises:
        CheckpointingException: none is registered under this name.
    """
    name = (marker["sharded_backend"], marker.get("sharded_backend_version", 1))
    try:
        strategy, _ = choose_load_strategy(name)
    except CheckpointingException as error:
        raise CheckpointingException(f"Cannot read {location!r}: {error}") from error
    if strategy is None:
        raise CheckpointingException(
            f"{location!r} was written by the strategy {name[0]!r}, which the built-in one does "
            "not read: register that strategy."
        )
    return strategy
