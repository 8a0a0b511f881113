"""Fingerprints of tensors: equal for equal tensors under any layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import summarize_keys
from distckpt._base.threads import ProgressCounter
from distckpt._base.tree import dotted, leaves
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._format.fingerprint import PRIME, Fingerprint, region_number
from distckpt._format.manifest import FINGERPRINTS, NO_FINGERPRINT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.figures import sum_over_ranks, sums_of
from distckpt._io.save_shards import plan_regions
from distckpt._operations.planned_save import SaveRequest
from distckpt._operations.save import describe_shards
from distckpt._operations.windows import Window, map_windows
from distckpt._ranks.collectives import Ranks, collective
from distckpt.mapping._wrappers import ShardedStateDict

logger = logging.getLogger(__name__)


@collective()
def fingerprint(
    state_dict: ShardedStateDict, *, process_group: Any = None
) -> dict[str, Fingerprint]:
    """Compute a fingerprint of each tensor, whatever the tensors' layout.

        before = distckpt.fingerprint({"model": model})
        ...
        assert distckpt.fingerprint({"model": model_on_other_ranks}) == before

    Each element counts once, on one of the ranks that hold it: replicas are not compared.

    Collective operation: all ranks must call it. They exchange the messages of a save, and one
    number for each tensor.

    Args:
        state_dict: as `save` takes it. Objects and common state are left out, and so are plain
            tensors, with a warning: give the module itself, not its `state_dict()`.
        process_group: the ranks that hold it together, see `save`.

    Returns:
        The fingerprint of each tensor by key, as `Checkpoint.fingerprints` returns it for a
        checkpoint of this state dict; the same on all ranks.

    Raises:
        InvalidShardingError: shards overlap, leave gaps or contradict each other.
        RankFailedError: raised on all ranks when any rank failed.
        ValueError: no rank has a tensor that is not plain.
    """
    ranks = Ranks(process_group)
    request = SaveRequest(
        path="", process_group=process_group, has_target=False, verb="fingerprint"
    )
    local, _ = describe_shards(ranks, state_dict, request)
    regions, manifest = plan_regions(ranks, local.shards, request.options, local.target.engine)
    keys, dtypes, shapes, aliases = ranks.decide_json("list the keys", lambda: _kinds_of(manifest))
    if not set(dtypes).intersection(FROM_NAME):
        raise ValueError(
            "The state dict holds no tensor that has a fingerprint on any rank: plain tensors are "
            "common state. Give it the module itself, such as {'model': model}."
        )
    if ranks.is_coordinator:
        _warn_of_plain(local.common)
    with ranks.phase("compute fingerprints"):
        own = sums_of(regions, len(keys))
    totals = sum_over_ranks(ranks, own)
    fingerprints = {}
    for key, dtype, shape, number in zip(keys, dtypes, shapes, totals, strict=True):
        if dtype in FROM_NAME:
            fingerprints[key] = Fingerprint(dtype, tuple(shape), number)
    return fingerprints | {alias: fingerprints[key] for alias, key in aliases.items()}


def _warn_of_plain(common: Any) -> None:
    plain = []
    for path, leaf in leaves(common):
        if isinstance(leaf, torch.Tensor):
            plain.append(dotted(path))
    if plain:
        logger.warning(
            "fingerprint leaves out %s, which are plain tensors: give it the module, or "
            "ShardedTensors, in their place",
            summarize_keys(plain),
        )


def _kinds_of(manifest: Manifest | None) -> tuple[Any, ...]:
    """Return the keys of all ranks, with dtypes, shapes and aliases."""
    assert manifest is not None
    return manifest.keys, manifest.dtypes, manifest.global_shapes, dict(manifest.aliases)


def computed_fingerprints(
    stored: StoredCheckpoint, keys: Sequence[str], add_bytes: Callable[[int], None] | None = None
) -> dict[str, Fingerprint]:
    """Compute the fingerprints of tensors, reading each of them once."""
    tensors = [StoredTensor(stored, key) for key in keys]
    counter = ProgressCounter(None, 0)

    def compute(window: Window, values: torch.Tensor) -> int:
        if add_bytes is not None:
            add_bytes(values.nbytes)
        return window_number(window, values)

    return fingerprints_of(tensors, map_windows([tensors], compute, counter))


def window_number(window: Window, values: torch.Tensor) -> int:
    """Return a window's share of its tensor's fingerprint."""
    return region_number(values, window.region.offset)


def fingerprints_of(
    tensors: Sequence[StoredTensor], numbers: Iterable[Sequence[int]]
) -> dict[str, Fingerprint]:
    """Return the fingerprints of tensors from numbers of their windows."""
    fingerprints = {}
    for tensor, window_numbers in zip(tensors, numbers, strict=True):
        fingerprints[tensor.key] = Fingerprint(
            tensor.dtype, tensor.shape, sum(window_numbers) % PRIME
        )
    return fingerprints


def saved_fingerprints(stored: StoredCheckpoint, keys: Sequence[str]) -> dict[str, Fingerprint]:
    """Return the stored fingerprints of some tensors.

    Raises:
        CheckpointingException: some have none.
    """
    manifest = stored.manifest
    numbers = manifest.figures.get(FINGERPRINTS)
    lacking = []
    fingerprints = {}
    for key in keys:
        number = NO_FINGERPRINT if numbers is None else int(numbers[manifest.key_index[key]])
        if number == NO_FINGERPRINT:
            lacking.append(key)
        else:
            dtype = stored.dtype_name(key)
            fingerprints[key] = Fingerprint(dtype, stored.global_shape(key), number)
    if lacking:
        raise CheckpointingException(
            f"{stored.location!r} has no stored fingerprints of {summarize_keys(lacking)}: save "
            "with fingerprint=True, or compute them from what is stored, without stored=True."
        )
    return fingerprints
