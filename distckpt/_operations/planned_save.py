"""Requests and plans of saves, and their writing and commit."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distckpt._base.messages import check_choice, check_num_bytes
from distckpt._base.options import (
    FIGURES,
    SaveOptions,
    SaveReport,
    check_options,
    check_seconds,
    check_switch,
    publish,
)
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings, new_output
from distckpt._format.marker import CheckpointingConfig, config_fields, marker_of, replaced
from distckpt._io.save_shards import PreparedSave
from distckpt._ranks import groups
from distckpt._ranks.collectives import Figures, PhaseTimer, Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt.mapping._wrappers import CommonStateDict, StateDict


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """A request to save a state dict.

    Attributes:
        path: the path or URL of the checkpoint.
        process_group: the ranks that save together.
        overwrite: replace an existing complete checkpoint.
        content_metadata: describes the content.
        has_metadata_entry: whether the entry `content_metadata` of the state dict describes the
            content, as in Megatron Core.
        options: the options of the caller.
        preprocess_common: called with a copy of the common state; returns the part that ranks
            compare.
        notes: further fields of the marker.
        is_step: whether it is a step of a manager, which reads nothing but steps.
        verb: name of the call in the journal.
        has_target: False to plan only: the location is not checked, and common state, which may
            still change, is not compared.
        is_abandoned: in the background, set once the end of the process no longer waits for it.
    """

    path: str | os.PathLike[str]
    process_group: Any = None
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    has_metadata_entry: bool = False
    options: SaveOptions = field(default_factory=SaveOptions)
    preprocess_common: Callable[[CommonStateDict], StateDict] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    is_step: bool = False
    verb: str = "save"
    has_target: bool = True
    is_abandoned: threading.Event | None = None

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: a value is of a wrong type.
            ValueError: a duration is no number of seconds above 0.
        """
        check_options(self.options)
        check_choice("unsupported", self.options.unsupported, ("raise", "warn", None))
        check_switch("overwrite", self.overwrite)
        if not isinstance(self.content_metadata, dict | None):
            raise TypeError(f"content_metadata is a dict, got {self.content_metadata!r:.100}")
        if self.options.max_inflight_bytes is not None:
            check_num_bytes("max_inflight_bytes", self.options.max_inflight_bytes)
        check_seconds("timeout", self.options.timeout)
        if self.options.exit_timeout != 0:
            check_seconds("exit_timeout", self.options.exit_timeout)

    def of_all_ranks(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks."""
        options = self.options
        return {
            "overwrite": self.overwrite,
            "durable": options.durable,
            "validate_access_integrity": options.validate_access_integrity,
            "validate_replicas": options.validate_replicas,
            **{name: getattr(options, name) for name in FIGURES},
            "unsupported": options.unsupported,
            "separate_optimizer": options.separate_optimizer,
            "strategy": options.strategy,
            "timeout": options.timeout,
        }


@dataclass(frozen=True)
class PlannedSave:
    """A save that all ranks have planned and not yet written.

    Attributes:
        location: the location of the new checkpoint.
        request: the request of the caller.
        config: names the format.
        prepared: writes the files.
        timer: the timer of the call.
        source: the marker of the source checkpoint, if this save replaces its source.
    """

    location: str
    request: SaveRequest
    config: CheckpointingConfig
    prepared: PreparedSave
    timer: PhaseTimer
    source: Mapping[str, Any] | None = None


def write_and_commit(ranks: Ranks, save: PlannedSave) -> SaveReport:
    """Write a planned save next to its target and commit it.

    Collective operation: all ranks must call it.
    """
    with new_output(ranks) as output:
        return write_and_commit_to(ranks, save, output)


def write_and_commit_to(ranks: Ranks, save: PlannedSave, output: Output) -> SaveReport:
    """Write a planned save into an output and commit it.

    The directory of the output may already exist since planning.
    """
    timer = save.timer
    prepared = save.prepared
    has_own_folders = prepared.folder_suffix is not None
    aim(output, save.location, save.request, prepared.num_bytes, has_own_folders)
    with contextlib.ExitStack() as written:
        with timer.phase("write") as details:
            details["bytes"] = prepared.num_bytes
            written.enter_context(output.being_written())
            if prepared.exchanges_in_write:
                with ranks.phase("find the directory of the save"):
                    output.check_is_seen()
            with ranks.telling("save") as exchange:
                output.check_is_seen()
                if has_own_folders:
                    prepared.folder_suffix = output.folder_suffix
                own = prepared.write_own(output.location, ranks)
                output.sync()
                exchange.payload = pack_parts([timer.figures(prepared.num_bytes), own])
        with timer.phase("commit"), ranks.answering(exchange, "commit"):
            if ranks.is_coordinator:
                figures, reports = zip(*map(unpack_parts, exchange.payloads), strict=True)
                fields = complete_marker(save, output.location, reports)
                if save.source is not None and marker_of(save.location) != save.source:
                    # It is no longer the source of this save.
                    raise replaced(save.location)
                output.commit(fields, prepared.written)
                exchange.answer = json.dumps(timer.united(figures, "write")).encode()
    return report_save(ranks, save, tuple(json.loads(exchange.answer)))


def complete_marker(save: PlannedSave, directory: str, reports: Sequence[bytes]) -> dict[str, Any]:
    """Write the manifest into the directory of a save; return the fields of the marker.

    It is for the coordinator. `reports` has the result of `PreparedSave.write_own` on each rank.
    """
    fields = save.prepared.complete(directory, reports) or {}
    duration = {}
    # Saves other than steps have no duration, so that equal states have equal bytes.
    if save.request.is_step:
        # A fixed length, so that markers of equal saves have the same size.
        duration["seconds"] = f"{save.timer.seconds:012.3f}"
    return {**duration, **save.request.notes, **fields, **config_fields(save.config)}


def aim(
    output: Output,
    location: str,
    request: SaveRequest,
    num_bytes: int = 0,
    has_own_folders: bool = True,
) -> None:
    """Set the target and the settings of a save's output."""
    settings = OutputSettings(
        num_bytes=num_bytes,
        folders=posix.SUBDIRECTORIES,
        overwrite=request.overwrite,
        durable=request.options.durable,
        has_marker=True,
        has_own_folders=has_own_folders,
    )
    output.target = location
    output.settings = settings


def report_save(ranks: Ranks, save: PlannedSave, figures: Figures) -> SaveReport:
    """Return the report of a committed save, and publish it."""
    report = SaveReport(save.location, *figures, save.prepared.plan_reused)
    publish(report, save.request.options.on_report, ranks.is_coordinator)
    return report


# --- Pending saves --------------------------------------------------------------------------------


FINE, FAILED, OUT_OF_STEP = range(3)


@dataclass
class GroupSaves:
    """The background saves of one process group.

    Attributes:
        ranks: ranks by timeout, with process groups for the background thread alone.
        unreported: the `SaveHandle`s of saves that have failed or may fail, unless the caller has
            seen their outcome.
        state: the worst state since ranks last compared it; `OUT_OF_STEP` after a rank was lost.
    """

    ranks: dict[float, Ranks] = field(default_factory=dict)
    unreported: list[Any] = field(default_factory=list)
    state: int = FINE


_saves_of_groups: weakref.WeakKeyDictionary[Any, GroupSaves] = weakref.WeakKeyDictionary()
"""Background saves by process group of the caller.

When a group is destroyed, so are the groups of its background saves, which other ranks notice.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_saves_of_groups.clear)


def saves_of(process_group: Any) -> GroupSaves:
    """Return the background saves of a process group; new ones are added there."""
    return _saves_of_groups.setdefault(_owner_of(process_group), GroupSaves())


def _owner_of(process_group: Any) -> Any:
    # The class is the key for this process without a group.
    return groups.group_of(process_group) or GroupSaves


@contextlib.contextmanager
def raising_pending_errors(ranks: Ranks, request: SaveRequest) -> Iterator[None]:
    """Run a save, then raise an error of earlier background saves.

    The body is the save. Errors are raised if no caller has seen them. The save comes first: a
    program that ends with the error has stored its newest state.

    Collective operation: all ranks must call it. It exchanges one number, or nothing without
    earlier background saves. If a save has failed on any rank, all ranks wait for their unfinished
    saves, and all raise.
    """
    saves = _saves_of_groups.get(_owner_of(request.process_group))
    if saves is None or not _has_failed(ranks, saves):
        yield
        return
    handles = saves.unreported
    saves.unreported = []
    try:
        yield
    except BaseException:
        saves.unreported[:0] = handles
        saves.state = max(saves.state, FAILED)
        raise
    with ranks.phase("raise the error of an earlier background save"):
        raise_unseen_error(handles)


def _has_failed(ranks: Ranks, saves: GroupSaves) -> bool:
    """Whether a background save has failed on any rank.

    If so, wait for all of them, and enable new saves.
    """
    state = saves.state
    if ranks.all_equal(state) and state == FINE:
        return False
    from distckpt._io.background import wait_for_all

    wait_for_all()
    if OUT_OF_STEP in ranks.all_gather_numbers([saves.state]):
        # The groups are not destroyed: a new group would get the name of a destroyed one, and find
        # its traces in the store.
        saves.ranks.clear()
    saves.state = FINE
    return True


def raise_unseen_error(handles: list[Any]) -> None:
    """Wait for saves; raise the first error that no caller has seen.

    `handles` are `SaveHandle`s; the list is emptied.
    """
    errors = []
    for handle in handles:
        if not handle.was_asked:
            errors.append(handle.exception())
    handles.clear()
    for error in errors:
        if error is not None:
            raise error
