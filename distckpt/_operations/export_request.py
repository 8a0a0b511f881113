"""What a call exports, and where to: checked and compared between the ranks, then opened."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distckpt._base.errors import CheckpointExistsError, CheckpointingException
from distckpt._base.messages import check_choice, check_num_bytes
from distckpt._base.options import ExportOptions, check_options, check_switch
from distckpt._checkpoint.consistent_read import read_attempts
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._commit import posix
from distckpt._commit.target import check_replaceable
from distckpt._format.hf_names import belongs_to_export
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import num_export_threads
from distckpt._operations.on_demand import on_demand
from distckpt._ranks.collectives import Ranks
from distckpt._rules.rules import check_rules
from distckpt._storage import locations


@dataclass(frozen=True)
class ExportRequest:
    """One call that exports.

    Attributes:
        sources: locations of the checkpoints.
        target: location of the export.
        options: of the caller.
        num_threads: how many threads of each rank write.
        started: when the call began.
    """

    sources: Sequence[str]
    target: str
    options: ExportOptions
    num_threads: int
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class OpenedSources:
    """The checkpoints that an export is made of, and the adapter that is merged into it."""

    checkpoints: Sequence[StoredCheckpoint]
    adapter: StoredCheckpoint | None = None

    @property
    def all(self) -> list[StoredCheckpoint]:
        """Everything that is read."""
        return [*self.checkpoints, *([self.adapter] if self.adapter else [])]


def check_request(
    ranks: Ranks,
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    overwrite: bool,
    options: ExportOptions,
) -> ExportRequest:
    """Check the arguments of a call, and that an export may be written to its target.

    Collective operation: all ranks must call it.

    Raises:
        ValueError: an option is not one of its values.
        CheckpointExistsError: the target holds an export, and `overwrite` is False.
        CheckpointingException: the target is one of the sources.
    """
    same = {"overwrite": overwrite, **_of_all_ranks(options)}
    with ranks.phase("check the arguments", decision=True, same=same):
        check_switch("overwrite", overwrite)
        check_export_options(options)
        sources = [locations.normalize(checkpoint) for checkpoint in checkpoints]
        target = posix.resolve(output_dir)
        if ranks.is_coordinator:
            read = sources if options.merge_adapter is None else [*sources, options.merge_adapter]
            check_target(read, target, overwrite)
    num_threads = num_export_threads(options.max_inflight_bytes)
    return ExportRequest(sources, target, options, num_threads)


def _of_all_ranks(options: ExportOptions) -> dict[str, object]:
    """Return the options that must be the same on all ranks: paths may differ between nodes."""
    names = ("keys", "rules", "rename", "dtype", "quantize", "tied", "unmatched", "max_file_bytes")
    same = {name: getattr(options, name) for name in (*names, "verify")}
    return {**same, "merge_adapter": options.merge_adapter is not None}


def check_export_options(options: ExportOptions) -> None:
    """Check that options have values that they may have.

    Raises:
        TypeError: a size is no number of bytes.
        ValueError: an option is not one of its values.
    """
    check_choice("tied", options.tied, ("drop", "write"))
    check_choice("unmatched", options.unmatched, ("error", "keep"))
    check_options(options)
    check_rules(options.rules)
    check_num_bytes("max_inflight_bytes", options.max_inflight_bytes)
    if options.quantize:
        on_demand("quantize").formats_by_pattern(options.quantize)


def check_target(sources: Sequence[str | os.PathLike[str]], target: str, overwrite: bool) -> None:
    """Check that an export of some sources may be written to a target; on the coordinator."""
    for source in sources:
        _check_is_not_inside(target, locations.normalize(source))
    posix.put_back(target)
    exists = locations.exists(target)
    if exists and not locations.isdir(target):
        raise CheckpointExistsError(f"{target!r} is a file, an export is a directory.")
    check_replaceable(target)
    names = locations.list_names(target) if exists else []
    present = [name for name in names if belongs_to_export(name)]
    if present and not (overwrite and locations.is_local(target)):
        raise CheckpointExistsError(
            f"{target!r} already holds an export ({present[0]!r}). Choose another directory, or, "
            "on local file systems, pass overwrite=True."
        )


def _check_is_not_inside(target: str, source: str) -> None:
    """Refuse a target that is a source, or where a source has its files."""
    place = posix.resolve(source)
    folders = [locations.join(place, name) for name in posix.SUBDIRECTORIES]
    if target in (place, *folders):
        raise CheckpointingException(f"The export cannot replace its own source {source!r}.")


def open_sources(ranks: Ranks, sources: Sequence[str], options: ExportOptions) -> OpenedSources:
    """Open checkpoints, and the adapter that the options name.

    Collective operation: all ranks must call it.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no adapter.
        CorruptCheckpointError: shards are missing, overlap or contradict each other.
    """
    adapter = None
    if options.merge_adapter is not None:
        location = locations.normalize(options.merge_adapter)
        on_demand("merge_adapter").check_is_adapter(ranks, location)
        adapter = _open(ranks, location, options.verify)
    checkpoints = [_open(ranks, source, options.verify) for source in sources]
    return OpenedSources(checkpoints, adapter)


def _open(ranks: Ranks, location: str, verify: bool) -> StoredCheckpoint:
    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, verify=verify, marker=attempt.marker)
    return stored
