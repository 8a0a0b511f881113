"""Requests for exports: checked, compared between the ranks, then opened."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from distckpt._base.errors import CheckpointExistsError, CheckpointingException
from distckpt._base.messages import check_choice, check_file_bytes, check_num_bytes, check_path
from distckpt._base.options import ExportOptions, check_options, check_switch
from distckpt._base.wings import wing
from distckpt._checkpoint.opening import holds_checkpoint, open_undisturbed
from distckpt._commit import posix
from distckpt._commit.target import check_replaceable, names_in
from distckpt._format.hf_names import belongs_to_export
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import num_export_threads
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.rules._rules import check_rules

_Source = TypeVar("_Source")


@dataclass(frozen=True)
class Sources(Generic[_Source]):
    """The checkpoints of an export, and the adapter merged into them."""

    checkpoints: Sequence[_Source]
    adapter: _Source | None = None

    @property
    def all(self) -> list[_Source]:
        """Everything that is read."""
        return [*self.checkpoints, *([self.adapter] if self.adapter else [])]


SourceLocations: TypeAlias = Sources[str]
OpenedSources: TypeAlias = Sources[StoredCheckpoint]


@dataclass(frozen=True)
class ExportRequest:
    """One call that exports.

    Attributes:
        sources: locations of the checkpoints and the adapter.
        target: location of the export.
        options: options of the caller.
        num_threads: number of writing threads on each rank.
        started: time when the call began.
    """

    sources: SourceLocations
    target: str
    options: ExportOptions
    num_threads: int
    started: float = field(default_factory=time.perf_counter)


def check_request(
    ranks: Ranks,
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    overwrite: bool,
    options: ExportOptions,
) -> ExportRequest:
    """Check the arguments of a call, and the target of the export.

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
        sources = locate_sources(checkpoints, options)
        target = posix.resolve(output_dir)
        if ranks.is_coordinator:
            check_target(sources, target, overwrite)
    num_threads = num_export_threads(options.max_inflight_bytes)
    return ExportRequest(sources, target, options, num_threads)


def _of_all_ranks(options: ExportOptions) -> dict[str, object]:
    """Return the options that must be equal on all ranks.

    Paths may differ between nodes.
    """
    names = ("keys", "rules", "layout", "rename", "dtype", "quantize", "tied", "unmatched")
    same = {name: getattr(options, name) for name in (*names, "max_file_bytes", "verify")}
    return {**same, "merge_adapter": options.merge_adapter is not None}


def check_export_options(options: ExportOptions) -> None:
    """Check the values of options.

    Raises:
        TypeError: a size is not a number of bytes.
        ValueError: an option is not one of its values.
    """
    check_choice("tied", options.tied, ("drop", "write"))
    check_choice("unmatched", options.unmatched, ("error", "keep"))
    check_options(options)
    check_rules(options.rules)
    check_num_bytes("max_inflight_bytes", options.max_inflight_bytes)
    check_file_bytes("max_file_bytes", options.max_file_bytes)
    for name in ("family", "like", "merge_adapter", "extra_files_from"):
        check_path(name, getattr(options, name))
    numbers = options.fqn_to_index_mapping
    if not isinstance(numbers, Mapping | None):
        raise TypeError(f"fqn_to_index_mapping is a dict of names -> numbers, got {numbers!r:.200}")
    if options.quantize is not None:
        wing("computed").check_formats(options.quantize)


def locate_sources(
    checkpoints: Sequence[str | os.PathLike[str]], options: ExportOptions
) -> SourceLocations:
    """Return the locations of checkpoints, and of the options' adapter."""
    located = [locations.normalize(checkpoint) for checkpoint in checkpoints]
    if options.merge_adapter is None:
        return SourceLocations(located)
    return SourceLocations(located, locations.normalize(options.merge_adapter))


def check_target(sources: SourceLocations, target: str, overwrite: bool) -> None:
    """Check that an export may be written to a target.

    Only the coordinator calls it.
    """
    for source in sources.all:
        place = posix.resolve(source)
        folders = [locations.join(place, name) for name in posix.SUBDIRECTORIES]
        if target in (place, *folders):
            raise CheckpointingException(f"The export cannot replace its own source {source!r}.")
    posix.put_back(target)
    if locations.isfile(target):
        raise CheckpointExistsError(f"{target!r} is a file, an export is a directory.")
    check_replaceable(target)
    present = list(filter(belongs_to_export, names_in(target)))
    if not overwrite and holds_checkpoint(target):
        raise CheckpointExistsError(
            f"{target!r} is a checkpoint, which distckpt.load would go on to read there: choose a "
            "directory of its own for the export, or pass overwrite=True to write it beside."
        )
    if present and not (overwrite and locations.is_local(target)):
        raise CheckpointExistsError(
            f"{target!r} already holds an export ({present[0]!r}). Choose another directory, or, "
            "on local file systems, pass overwrite=True."
        )


def open_sources(ranks: Ranks, sources: SourceLocations, verify: bool) -> OpenedSources:
    """Open checkpoints, and an adapter, to read them in the context `reading`.

    Collective operation: all ranks must call it.

    Raises:
        CheckpointNotFoundError: the checkpoint or the adapter does not exist.
        CorruptCheckpointError: shards are missing, overlap or contradict each other.
    """
    adapter = None
    if sources.adapter is not None:
        wing("computed").check_is_adapter(ranks, sources.adapter)
        adapter = open_undisturbed(ranks, sources.adapter, verify=verify)
    checkpoints = []
    for location in sources.checkpoints:
        checkpoints.append(open_undisturbed(ranks, location, verify=verify))
    return OpenedSources(checkpoints, adapter)
