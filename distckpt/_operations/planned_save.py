"""A save as values, and its second half: write what is planned and commit it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt._base.messages import check_num_bytes
from distckpt._base.options import SaveOptions
from distckpt._base.reports import SaveReport
from distckpt._commit import posix
from distckpt._commit.conditional_put import Transaction, folder_suffix, naming_winner
from distckpt._commit.staging import check_files, choose_staging, make_staging
from distckpt._format.marker import CheckpointingConfig, save_config
from distckpt._io.prepared_save import PreparedSave
from distckpt._mapping.wrappers import CommonStateDict, StateDict
from distckpt._ranks.collectives import PhaseTimer, Ranks
from distckpt._storage import locations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One call that saves.

    Attributes:
        state_dict: of the caller.
        path: where to save it.
        process_group: the ranks that save together.
        overwrite: replace a complete checkpoint that is there.
        content_metadata: describes the content.
        options: of the caller.
        preprocess_common: called with a copy of the common state; returns what ranks compare.
        notes: further fields of the marker.
        verb: name of the call in the journal.
        has_target: False to plan only: the location is not looked at, and common state, which may
            be another by then, is not compared.
    """

    state_dict: Any
    path: str | os.PathLike[str]
    process_group: Any = None
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    options: SaveOptions = field(default_factory=SaveOptions)
    preprocess_common: Callable[[CommonStateDict], StateDict] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    verb: str = "save"
    has_target: bool = True

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: a size is no number of bytes.
            ValueError: a duration is no number of seconds above 0.
        """
        if self.options.max_inflight_bytes is not None:
            check_num_bytes("max_inflight_bytes", self.options.max_inflight_bytes)
        check_seconds("timeout", self.options.timeout)
        if self.options.exit_timeout != 0:
            check_seconds("exit_timeout", self.options.exit_timeout)

    def of_all_ranks(self) -> dict[str, object]:
        """Return what must be the same on all ranks."""
        options = self.options
        return {
            "overwrite": self.overwrite,
            "durable": options.durable,
            "validate_access_integrity": options.validate_access_integrity,
            "validate_replicas": options.validate_replicas,
            "strategy": options.strategy,
            "timeout": options.timeout,
        }


def check_seconds(name: str, seconds: object) -> None:
    """Check a duration."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"{name} is a number of seconds, above 0, got {seconds!r}")


@dataclass(frozen=True)
class PlannedSave:
    """A save of which everything is decided, on all ranks, and nothing written; `config` names the
    format.
    """

    location: str
    request: SaveRequest
    config: CheckpointingConfig
    prepared: PreparedSave
    timer: PhaseTimer


def write_and_commit(ranks: Ranks, save: PlannedSave) -> SaveReport:
    """Write everything beside the target and commit it. Collective operation: all ranks must call
    it.
    """
    location, timer, durable = save.location, save.timer, save.request.options.durable
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
                extra = {**save.request.notes, **(marker_fields or {})}
                if transaction is not None:
                    transaction.commit(
                        {**extra, **asdict(save.config)},
                        [name for name, _ in save.prepared.written],
                    )
                else:
                    check_files(staging, save.prepared.written, ranks.size)
                    save_config(save.config, staging, extra=extra, durable=durable)
                    posix.commit(staging, location, save.request.overwrite, durable)
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
    if save.request.options.on_report is not None:
        save.request.options.on_report(report)
    return report


def _begin_on_object_store(ranks: Ranks, save: PlannedSave, nonce: str) -> Transaction | None:
    """Give the save folders of its own, and begin its transaction on the coordinator."""
    has_folders = save.prepared.folder_suffix is not None
    if has_folders:
        save.prepared.folder_suffix = folder_suffix(nonce)
    return (
        Transaction(save.location, nonce, save.request.overwrite, has_folders)
        if ranks.is_coordinator
        else None
    )
