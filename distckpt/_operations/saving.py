"""The two halves of a save: what needs the caller's state dict to stand still, and what follows."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._commit import posix
from distckpt._commit.conditional_put import Transaction, folder_suffix
from distckpt._format.marker import CheckpointingConfig, save_config
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, SaveReport
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA, comparable, digest, warn_about_differences
from distckpt._state.shards import Shard
from distckpt._storage import locations
from distckpt.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from distckpt.strategies.base import Options, PreparedSave, SaveShardedStrategy, prepare_save
from distckpt.strategies.defaults import save_strategy
from distckpt.utils import _clean_metadata_for_serialization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where a save goes, and how it gets there; `notes` are further fields of the marker."""

    location: str
    overwrite: bool
    durable: bool
    config: CheckpointingConfig
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveRequest:
    """What the caller of a save asks for, see `distckpt.save`."""

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    preprocess_common: Callable[[CommonStateDict], StateDict] | None = None


def begin_save(ranks: Ranks, request: SaveRequest, timer: PhaseTimer, options: Options) -> tuple[Target, PreparedSave]:
    """Decide everything about a save.

    Collective: every rank calls.

    Returns:
        Where it goes, and what is to be written; that refers to the tensors of the state dict.
    """
    with timer.phase("describe"):
        with ranks.phase("take their state dicts apart"):
            location = posix.resolve(request.checkpoint_dir)
            strategy = save_strategy(request.sharded_strategy).configure(options)
            shards, common = _split_for_saving(request.sharded_state_dict, request.content_metadata)
            compared = comparable(common, request.preprocess_common)
            compares = options.validate_access_integrity and ranks.size > 1
            digest_of_common = digest(compared) if compares else 0
        if compares:
            warn_about_differences(ranks, compared, digest_of_common)
        with ranks.phase("check the target", decision=True):
            if ranks.is_coordinator:
                posix.check_target(location, request.overwrite)
        sharded = {str(index): shard for index, shard in enumerate(shards)}
        if ranks.is_coordinator:
            sharded["common"] = ShardedObject(COMMON_KEY, common, (1,), (0,))
    with timer.phase("plan"):
        prepared = prepare_save(strategy, sharded)
    config = CheckpointingConfig(strategy.backend, strategy.version)
    return Target(location, request.overwrite, options.durable, config), prepared


def finish_save(ranks: Ranks, timer: PhaseTimer, target: Target, prepared: PreparedSave) -> SaveReport:
    """Write everything beside the target and commit it.

    Collective: every rank calls.
    """
    location, durable = target.location, target.durable
    nonce = ranks.broadcast(secrets.token_hex(8).encode()).decode()
    staging = posix.staging_location(location, nonce)
    transaction = None
    try:
        with timer.phase("write"):
            with ranks.phase("create directories", decision=True):
                posix.prepare(staging, durable)
                if not locations.is_local(location):
                    transaction = _begin_on_object_store(ranks, target, prepared, nonce)
            with ranks.phase("save"):
                marker_fields = prepared.write(staging, ranks)
                if durable:
                    posix.sync(staging)
        with timer.phase("commit"), ranks.phase("commit", decision=True):
            if ranks.is_coordinator:
                extra = {**target.notes, **(marker_fields or {})}
                if transaction is not None:
                    transaction.commit({**extra, **asdict(target.config)})
                else:
                    save_config(target.config, staging, extra=extra, durable=durable)
                    posix.commit(staging, location, target.overwrite, durable)
    except BaseException:
        if transaction is not None:
            transaction.abandon()
        elif ranks.is_coordinator:
            posix.abandon(staging)
        raise
    report = SaveReport(location, *timer.summarize(ranks, prepared.num_bytes, "write"), prepared.plan_reused)
    if ranks.is_coordinator:
        logger.info("%s", report)
    return report


def _begin_on_object_store(ranks: Ranks, target: Target, prepared: PreparedSave, nonce: str) -> Transaction | None:
    """Give the save its folders, and begin its transaction on the coordinator."""
    has_folders = prepared.folder_suffix is not None
    if has_folders:
        prepared.folder_suffix = folder_suffix(nonce)
    return Transaction(target.location, nonce, target.overwrite, has_folders) if ranks.is_coordinator else None


def _split_for_saving(
    sharded_state_dict: ShardedStateDict, content_metadata: dict[str, Any] | None
) -> tuple[list[Shard], CommonStateDict]:
    shards, common, _ = flatten.split(sharded_state_dict)
    for shard in shards:
        if shard.key == COMMON_KEY:
            raise InvalidShardingError(f"The key {COMMON_KEY!r} is reserved: rename yours.")
    if content_metadata is not None:
        if CONTENT_METADATA in sharded_state_dict:
            raise CheckpointingException(
                f"The state dict has an entry {CONTENT_METADATA!r} and content_metadata was given: both would be "
                "stored under this name. Rename the entry, or leave content_metadata out."
            )
        common = {**common, CONTENT_METADATA: _clean_metadata_for_serialization(content_metadata)}
    return shards, common
