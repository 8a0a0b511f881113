"""The settings of a save, and its second half: write what is planned and commit it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt._base.messages import check_num_bytes
from distckpt._commit import posix
from distckpt._commit.conditional_put import Transaction, folder_suffix, naming_winner
from distckpt._commit.staging import check_files, choose_staging, make_staging
from distckpt._format.marker import CheckpointingConfig, save_config
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.report import PhaseTimer, SaveReport
from distckpt._storage import locations
from distckpt.mapping import CommonStateDict, StateDict
from distckpt.strategies.base import Options, PreparedSave, SaveShardedStrategy

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 1800.0
DEFAULT_EXIT_TIMEOUT = 600.0


@dataclass(frozen=True)
class SaveSettings(Options):
    """Everything that a caller chooses about a save, see `distckpt.save` and `distckpt.async_save`.

    A strategy gets them too, and uses those of `Options`. `background_bytes` is `max_inflight_bytes` of `async_save`,
    `notes` are further fields of the marker, and `verb` is the name of the call in the journal.
    """

    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    preprocess_common: Callable[[CommonStateDict], StateDict] | None = None
    on_report: Callable[[SaveReport], None] | None = None
    background_bytes: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    exit_timeout: float = DEFAULT_EXIT_TIMEOUT
    notes: Mapping[str, Any] = field(default_factory=dict)
    verb: str = "save"

    def check(self) -> None:
        """Raise TypeError for a size that is none, ValueError for such durations."""
        for num_bytes in (self.max_inflight_bytes, self.background_bytes or 0):
            check_num_bytes("max_inflight_bytes", num_bytes)
        for name, seconds in (("timeout", self.timeout), ("exit_timeout", self.exit_timeout)):
            if not isinstance(seconds, int | float) or not (seconds > 0 or (name, seconds) == ("exit_timeout", 0)):
                raise ValueError(f"{name} is a number of seconds, above 0, got {seconds!r}")

    def of_all_ranks(self) -> dict[str, object]:
        """Return the settings that must be the same on all ranks."""
        names = (
            "overwrite",
            "durable",
            "validate_access_integrity",
            "validate_replicas",
            "sharded_strategy",
            "timeout",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PlannedSave:
    """A save of which everything is decided, on all ranks, and nothing written; `config` names the format."""

    location: str
    settings: SaveSettings
    config: CheckpointingConfig
    prepared: PreparedSave
    timer: PhaseTimer


def write_and_commit(ranks: Ranks, save: PlannedSave) -> SaveReport:
    """Write everything beside the target and commit it. Collective operation: all ranks must call it."""
    location, timer, durable = save.location, save.timer, save.settings.durable
    place = choose_staging(ranks, location, save.prepared.num_bytes)
    staging = place.location
    transaction = None
    held = contextlib.ExitStack()
    try:
        with timer.phase("write") as details:
            details["bytes"] = save.prepared.num_bytes
            make_staging(ranks, place, held, durable=durable)
            if not locations.is_local(location):
                with ranks.phase("begin on the object store", decision=True):
                    transaction = _begin_on_object_store(ranks, save, place.nonce)
            with naming_winner(ranks, transaction, staging), ranks.phase("save"):
                marker_fields = save.prepared.write(staging, ranks)
                if durable:
                    posix.sync(staging)
        with timer.phase("commit"), ranks.phase("commit", decision=True):
            if ranks.is_coordinator:
                extra = {**save.settings.notes, **(marker_fields or {})}
                if transaction is not None:
                    transaction.commit({**extra, **asdict(save.config)}, [name for name, _ in save.prepared.written])
                else:
                    check_files(staging, save.prepared.written, ranks.size)
                    save_config(save.config, staging, extra=extra, durable=durable)
                    posix.commit(staging, location, save.settings.overwrite, durable)
    except BaseException:
        if transaction is not None:
            transaction.abandon()
        elif ranks.is_coordinator:
            posix.abandon(staging)
        raise
    finally:
        held.close()
    figures = timer.summarize(ranks, save.prepared.num_bytes, "write")
    report = SaveReport(location, *figures, save.prepared.plan_reused)
    if ranks.is_coordinator:
        logger.info("%s", report)
    if save.settings.on_report is not None:
        save.settings.on_report(report)
    return report


def _begin_on_object_store(ranks: Ranks, save: PlannedSave, nonce: str) -> Transaction | None:
    """Give the save folders of its own, and begin its transaction on the coordinator."""
    has_folders = save.prepared.folder_suffix is not None
    if has_folders:
        save.prepared.folder_suffix = folder_suffix(nonce)
    return Transaction(save.location, nonce, save.settings.overwrite, has_folders) if ranks.is_coordinator else None
