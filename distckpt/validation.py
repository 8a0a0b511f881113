"""What must hold before anything is written, and what to do when a checkpoint and a request hold different keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidShardingError,
    LoadMismatchError,
)
from distckpt._base.messages import KeyFault, did_you_mean, summarize_faults, summarize_keys
from distckpt._commit import posix
from distckpt._format.marker import CONFIG_FNAME, parse_config, read_marker
from distckpt._geometry.region import IntArray, find_tiling_faults
from distckpt._ranks import collectives
from distckpt._state.shards import GlobalTable, Shard, describe, merge_tables
from distckpt._storage import locations
from distckpt.dict_utils import nested_values
from distckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor

logger = logging.getLogger(__name__)

READER_VERSION = 1
"""The newest format version this package reads."""


class StrictHandling(Enum):
    """What a load does about keys that only the checkpoint or only the request has (Megatron's names and meaning).

    *Unexpected* keys are asked for and not in the checkpoint. *Missing* keys are in the checkpoint and no rank asks
    for them.
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
        """Tell whether the keys that all ranks ask for must be known."""
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


def validate_shards(table: GlobalTable, *, allow_gaps: bool = False) -> None:
    """Check that main replicas cover every global tensor and object grid exactly once, and that replicas agree.

    Args:
        table: the shards of all ranks.
        allow_gaps: accept elements that no rank holds; they will not be in the checkpoint.

    Raises:
        InvalidShardingError: naming keys, regions and ranks.
    """
    found: list[KeyFault] = []
    is_checked = ~_is_trivial(table)
    main = np.flatnonzero(table.is_main & is_checked[table.key_ids])
    _check_sizes(table)
    for ndim in np.unique(table.ndims).tolist():
        keys = np.flatnonzero((table.ndims == ndim) & is_checked)
        renumbered = np.full(len(table.keys), -1, np.int64)
        renumbered[keys] = np.arange(len(keys))
        rows = main[renumbered[table.key_ids[main]] >= 0]
        faults = find_tiling_faults(
            renumbered[table.key_ids[rows]],
            table.offsets[rows, :ndim],
            table.shapes[rows, :ndim],
            table.global_shapes[keys, :ndim],
        )
        for fault in faults:
            key_id = int(keys[fault.tensor])
            if text := _explain_fault(table, key_id, fault.element, allow_gaps):
                found.append(KeyFault(table.keys[key_id], text, text))
    found = found or _replica_differences(table)
    if found:
        raise InvalidShardingError("Invalid sharding:\n- " + "\n- ".join(summarize_faults(found)))


def _is_trivial(table: GlobalTable) -> npt.NDArray[np.bool_]:
    """Mark keys with one main shard that is the whole tensor: nothing to check."""
    is_whole = table.is_main & (table.shapes == table.global_shapes[table.key_ids]).all(axis=1)
    num_main = np.bincount(table.key_ids[table.is_main], minlength=len(table.keys))
    num_whole = np.bincount(table.key_ids[is_whole], minlength=len(table.keys))
    return np.asarray((num_main == 1) & (num_whole == 1), np.bool_)


def _check_sizes(table: GlobalTable) -> None:
    too_large = np.prod(table.global_shapes.astype(np.float64) + 1, axis=1) >= 2.0**62
    if too_large.any():
        key_id = int(np.flatnonzero(too_large)[0])
        raise InvalidShardingError(
            f"Key {table.keys[key_id]!r} has the global shape {table.global_shape(key_id)}, more elements than any "
            "storage holds: check global_shape."
        )


def _explain_fault(table: GlobalTable, key_id: int, element: tuple[int, ...], allow_gaps: bool) -> str:
    rows = np.flatnonzero(table.key_ids == key_id)
    ndim = int(table.ndims[key_id])
    point = np.array(element, np.int64)
    low, high = table.offsets[rows, :ndim], table.offsets[rows, :ndim] + table.shapes[rows, :ndim]
    holders = rows[((low <= point) & (point < high)).all(axis=1)]
    mains = holders[table.is_main[holders]]
    if allow_gaps and len(mains) == 0:
        pair = _find_overlap(table, rows[table.is_main[rows]], ndim)
        if pair is None:
            return ""
        mains = np.array(pair)
    name = f" (global shape {table.global_shape(key_id)})"
    if len(mains) > 1:
        places = " and ".join(_place(table, row) for row in mains[:3].tolist())
        return (
            f"{name}: {len(mains)} main replicas hold the same element {element if not allow_gaps else ''}: {places}. "
            "If they are copies, number them with replica_id (one has 0); if they are different tensors, such as "
            "experts counted from 0 on every rank, give them different keys or offsets."
        )
    if len(holders):
        places = " and ".join(_place(table, row) for row in holders[:3].tolist())
        return (
            f"{name}: no main replica holds element {element}; it is only in copies with another replica_id: {places}. "
            "Exactly one replica of each shard has replica_id 0."
        )
    return (
        f"{name}: no rank holds element {element}. Check the offsets and fragmentations, and that every rank of the "
        "layout takes part in this save."
    )


def _place(table: GlobalTable, row: int) -> str:
    return f"{table.row_region(row)} on rank {int(table.ranks[row])}"


def _find_overlap(table: GlobalTable, rows: IntArray, ndim: int) -> tuple[int, int] | None:
    """Find two rows whose regions share an element, sweeping along the first axis."""
    if ndim == 0:
        return (int(rows[0]), int(rows[1])) if len(rows) > 1 else None
    rows = rows[(table.shapes[rows, :ndim] > 0).all(axis=1)]
    rows = rows[np.argsort(table.offsets[rows, 0], kind="stable")]
    low = table.offsets[rows, :ndim]
    high = low + table.shapes[rows, :ndim]
    for i in range(len(rows)):
        last = int(np.searchsorted(low[:, 0], high[i, 0], side="left"))
        others = slice(i + 1, last)
        hit = np.flatnonzero(((low[others] < high[i]) & (high[others] > low[i])).all(axis=1))
        if len(hit):
            return int(rows[i]), int(rows[i + 1 + hit[0]])
    return None


def _replica_differences(table: GlobalTable) -> list[KeyFault]:
    """Compare content digests of equal regions, where they were computed."""
    hashed = np.flatnonzero(table.digests)
    if not len(hashed):
        return []
    columns = (*table.shapes[hashed].T, *table.offsets[hashed].T, table.key_ids[hashed])
    order = hashed[np.lexsort((table.ranks[hashed], ~table.is_main[hashed], *columns))]
    same = (table.key_ids[order][1:] == table.key_ids[order][:-1]) & (
        (table.offsets[order][1:] == table.offsets[order][:-1]) & (table.shapes[order][1:] == table.shapes[order][:-1])
    ).all(axis=1)
    first_of_group = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(order))))
    different = np.flatnonzero(table.digests[order] != table.digests[order[first_of_group]])
    found = []
    for index in different.tolist():
        row, first = int(order[index]), int(order[first_of_group[index]])
        ranks = int(table.ranks[first]), int(table.ranks[row])
        text = (
            f": region {table.row_region(row)} differs between rank {ranks[0]} and rank {ranks[1]}, which call "
            "themselves replicas. Make them equal, or save them under different keys (per-rank state such as RNG "
            "belongs in a ShardedObject with one cell per rank)."
        )
        found.append(KeyFault(table.keys[table.key_ids[row]], text, ranks))
    return found


def mismatch_message(missing: Iterable[str], unexpected: Iterable[str], known: Iterable[str], location: str) -> str:
    """Describe differing keys: grouped by pattern, with the nearest names in the checkpoint."""
    missing, unexpected = sorted(missing), sorted(unexpected)
    lines = [f"The keys asked for and those in the checkpoint {location!r} differ."]
    if unexpected:
        hint = did_you_mean(unexpected[0], known) if len(unexpected) <= 20 else ""
        lines.append(f"Unexpected (asked for, not in the checkpoint): {summarize_keys(unexpected)}{hint}.")
    if missing:
        lines.append(f"Missing (in the checkpoint, asked for by no rank): {summarize_keys(missing)}.")
    lines.append("Correct the sharded state dict, or choose another StrictHandling.")
    return " ".join(lines)


def handle_mismatch(
    strict: StrictHandling,
    missing: set[str],
    unexpected: set[str],
    known: Iterable[str],
    location: str,
    is_speaker: bool = True,
) -> None:
    """Raise, warn (on the rank that speaks for all) or stay silent about differing keys, as the mode says.

    Raises:
        LoadMismatchError: with `.missing` and `.unexpected`.
    """
    raising = strict in (StrictHandling.RAISE_ALL, StrictHandling.RAISE_UNEXPECTED)
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.LOG_UNEXPECTED):
        missing = set()
    if not (missing or unexpected):
        return
    if raising:
        message = mismatch_message(missing, unexpected, known, location)
        raise LoadMismatchError(message, missing=missing, unexpected=unexpected)
    if is_speaker and strict in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED):
        logger.warning(mismatch_message(missing, unexpected, known, location))


def sharded_leaves(sharded_state_dict: ShardedStateDict) -> list[Shard]:
    """List the `ShardedTensor`s and `ShardedObject`s of nested dicts and lists."""
    return [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor | ShardedObject)]


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: Any = None
) -> tuple[list[Shard], list[list[Shard]]]:
    """Collect the descriptions of all ranks' shards.

    Collective: every rank of the group calls; each sends its descriptions to all.

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
        asked = {shard.key for shard in local_metadata or sharded_leaves(sharded_state_dict)}
        unexpected = asked - known
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
        kept = {name: _without_keys(child, keys) for name, child in node.items() if not _has_key(child, keys)}
        return kept
    if isinstance(node, list):
        return [_without_keys(child, keys) for child in node if not _has_key(child, keys)]
    return node


def _has_key(node: Any, keys: set[str]) -> bool:
    return isinstance(node, ShardedBase) and node.key in keys
