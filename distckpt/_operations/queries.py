"""Reading metadata and plain tensors of a checkpoint, without a sharded state dict. Any rank may
call, alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from distckpt._base.errors import LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import nearest_names, summarize_keys
from distckpt._checkpoint import opening
from distckpt._io import background
from distckpt._mapping.wrappers import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from distckpt._operations.consistent_read import read_unchanged
from distckpt._ranks.collectives import Ranks
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA
from distckpt._storage import locations
from distckpt.strategies.base import LoadShardedStrategy
from distckpt.strategies.defaults import load_strategy

_Result = TypeVar("_Result")


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Return the common state of a checkpoint: everything that was saved without being sharded.

    Any rank may call, alone. An object of a class that is not registered comes back as an
    `UnknownObject`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    request: ShardedStateDict = {"common": ShardedObject(COMMON_KEY, None, (1,), (0,))}
    common = _read_alone(
        checkpoint_dir, lambda strategy, location: strategy.load(dict(request), location)["common"]
    )
    compacted: StateDict = flatten.compact(common)
    return compacted


def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: LoadShardedStrategy | None = None
) -> dict[str, ShardedTensor]:
    """Describe the tensors of a checkpoint: for each key a `ShardedTensor` without data that is the
    whole tensor.

    Any rank may call, alone. With `init_data` the result can be passed to `load`.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    return _read_alone(
        checkpoint_dir,
        lambda strategy, location: strategy.load_tensors_metadata(location),
        sharded_strategy,
    )


def load_sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: LoadShardedStrategy | None = None
) -> dict[str, ShardedTensor | ShardedObject]:
    """Describe the tensors (by key) and objects (by unique key) of a checkpoint, without data.

    Any rank may call, alone.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    described = _read_alone(
        checkpoint_dir,
        lambda strategy, location: strategy.load_sharded_metadata(location),
        sharded_strategy,
    )
    return {name: shard for name, shard in described.items() if shard.key != COMMON_KEY}


@operation
def load_plain_tensors(
    checkpoint_dir: str | os.PathLike[str], *, keys: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Load tensors of a checkpoint whole, by key, onto the CPU. Common state and objects are not
    included.

    Any rank may call, alone.

    Args:
        checkpoint_dir: see `load`.
        keys: keys of the tensors to read; None for all.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        LoadMismatchError: there is no tensor of a key.
    """

    def read(strategy: LoadShardedStrategy, location: str) -> dict[str, torch.Tensor]:
        stored = strategy.load_tensors_metadata(location)
        if unknown := [key for key in keys or () if key not in stored]:
            hint = nearest_names(unknown, stored)
            raise LoadMismatchError(
                f"There are no tensors of these keys in {location!r}: "
                f"{summarize_keys(unknown)}{hint}",
                unexpected=unknown,
            )
        return strategy.load(
            {key: stored[key] for key in (stored if keys is None else keys)}, location
        )

    listed = [] if keys is None else keys
    if (
        isinstance(keys, str)
        or not isinstance(listed, Collection)
        or any(not isinstance(key, str) for key in listed)
    ):
        hint = f"; for one tensor, keys={[keys]!r}" if isinstance(keys, str) else ""
        raise TypeError(f"keys is a list of whole keys, not of patterns, got {keys!r:.200}{hint}.")
    return _read_alone(checkpoint_dir, read)


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
    """Remove the tensors whose keys begin with a prefix, optimizer state for example, and give
    their space back.

    One rank calls. The checkpoint is complete at every moment: what remains is put together beside
    it and takes its place in one step.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
    """
    location = locations.normalize(checkpoint_dir)
    background.wait_for_location(location)
    load_strategy(None, opening.identify(location), location).remove_sharded_tensors(
        location, key_prefix
    )


def _read_alone(
    checkpoint_dir: str | os.PathLike[str],
    read: Callable[[LoadShardedStrategy, str], _Result],
    given: LoadShardedStrategy | None = None,
) -> _Result:
    """Call a function with the strategy that reads a checkpoint, and its location."""
    location = locations.normalize(checkpoint_dir)
    return read_unchanged(
        Ranks.alone(),
        location,
        lambda marker: read(
            load_strategy(given, opening.identify(location, marker), location), location
        ),
    )
