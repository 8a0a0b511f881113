"""Exports in parts: `consolidate` and `merge`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from distckpt._base.memory import Bytes
from distckpt._base.options import ExportOptions
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.file_states import states_of
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings, continued_output
from distckpt._compute.merge import check_is_apart, check_terms, plan_opened_sum
from distckpt._format.hf_names import INDEX_NAME, SINGLE_NAME, belongs_to_export
from distckpt._geometry.units import Span
from distckpt._io.export import (
    export_settings,
    num_export_threads,
    output_file,
)
from distckpt._io.tensor_source import TensorSource
from distckpt._io.write import Fill, NewFile, WriteSettings, write_files, write_span
from distckpt._operations.consolidate import plan_opened
from distckpt._operations.export_plan import ExportPlan
from distckpt._operations.export_request import (
    OpenedSources,
    SourceLocations,
    check_export_options,
    check_target,
    locate_sources,
    open_sources,
)
from distckpt._operations.export_write import ExportReport, complete_export, report_of_export
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.tasks._facts import check_sources, facts_of, facts_of_extra_files
from distckpt.tasks._work import Attempt, Piece, Work, cut_files


def consolidation(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: ExportOptions,
) -> Work:
    """Return the work of `consolidate` with these arguments."""
    check_export_options(options)
    located = locate_sources([checkpoint], options)
    opened = open_sources(Ranks.alone(), located, options.verify)
    plan = plan_opened(Ranks.alone(), opened, options)
    return _ExportWork("consolidate", output_dir, overwrite, located, opened, plan, options)


def merger(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    overwrite: bool = False,
    options: ExportOptions,
) -> Work:
    """Return the work of `merge` with these arguments."""
    check_export_options(options)
    sources, factors = check_terms(checkpoints, weights, ema)
    located = locate_sources(sources, options)
    opened = open_sources(Ranks.alone(), located, options.verify)
    plan = plan_opened_sum(Ranks.alone(), opened, factors, ema, options)
    more = {"weights": factors, "ema": ema}
    return _ExportWork("merge", output_dir, overwrite, located, opened, plan, options, more)


class _ExportWork(Work):
    """An export that is planned."""

    def __init__(
        self,
        verb: str,
        output_dir: str | os.PathLike[str],
        overwrite: bool,
        located: SourceLocations,
        opened: OpenedSources,
        plan: ExportPlan,
        options: ExportOptions,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._options = options
        self._overwrite = overwrite
        self._located = located
        self._opened = opened.all
        self._files = {file.name: file for file in plan.files}
        self._sizes = {file.name: file.file_bytes for file in plan.files}
        self.verb = verb
        self.place = posix.resolve(output_dir)
        self.sources = located.all
        self._is_local = locations.is_local(self.place)
        self.pieces: Sequence[Piece] = cut_files(self._sizes, divides=self._is_local)
        option_values = {}
        for field in fields(options):
            option_values[field.name] = getattr(options, field.name)
        self.facts = {
            **facts_of({**option_values, **(more or {})}, self._opened, plan.outputs),
            **facts_of_extra_files(plan.extra_files),
        }

    def costs(self) -> Sequence[int]:
        edges = {}
        for file in self._plan.files:
            tensors, header = file.laid_out
            # Scales are small, and as much work as the codes of the same values.
            sizes = []
            for t in tensors:
                sizes.append([t.num_bytes, max(t.num_bytes, math.prod(t.mapped.shape))])
            edges[file.name] = np.cumsum([[0, 0], [len(header)] * 2, *sizes], axis=0).T
        return [
            int(np.diff(np.interp([piece.start, piece.stop], *edges[piece.name]))[0])
            for piece in self.pieces
        ]

    def files(self, attempt: Attempt) -> list[str]:
        extra = self._plan.extra_files
        copied = [locations.split(path)[1] for path in extra.copied]
        return [*self._files, *copied, *extra.written, INDEX_NAME]

    def damaged(self, attempt: Attempt) -> list[str]:
        headers = {name: file.laid_out[1] for name, file in self._files.items()}
        return other_files(self.directory(attempt), self._sizes, headers)

    def check(self) -> None:
        check_target(self._located, self.place, self._overwrite)
        if self.verb == "merge":
            check_is_apart(self.place, self._located.checkpoints)

    def _output(self, attempt: Attempt) -> Output:
        settings = OutputSettings(num_bytes=sum(self._sizes.values()), files=list(self._files))
        return continued_output(self.place, attempt.nonce, attempt.journal, settings)

    def begin(self, attempt: Attempt, is_new: bool) -> None:
        output = self._output(attempt)
        output.begin_again()
        if is_new:
            output.check_space()

    def is_begun(self, attempt: Attempt) -> bool:
        return not self._is_local or locations.isdir(self.directory(attempt))

    def directory(self, attempt: Attempt) -> str:
        return self._output(attempt).location

    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        directory = self.directory(attempt)
        settings = export_settings(num_export_threads(self._options.max_inflight_bytes), add_bytes)
        with (
            reading(Ranks.alone(), self._opened),
            OpenFiles.for_many_reads() as open_files,
        ):
            source = self._plan.source.with_files(open_files)
            for number in assigned:
                yield number, self._write(source, directory, self.pieces[number], settings)

    def _write(
        self, source: TensorSource, directory: str, piece: Piece, settings: WriteSettings
    ) -> dict[str, int]:
        """Write a piece; return the overflows in it, by tensor."""
        file = self._files[piece.name]
        path = locations.join(directory, piece.name)
        overflows: dict[str, int] = {}
        new_file = output_file(source, file, path, overflows)
        if not self._is_local:
            write_files([new_file], settings)
            return overflows
        uncounted = output_file(source, file, path, {}).fill
        write_span(
            counting_from(new_file, piece.start, uncounted), piece.start, piece.stop, settings
        )
        locations.sync_directory(directory)
        return overflows

    def complete(self, attempt: Attempt, results: Sequence[Any]) -> None:
        check_sources(self.facts, self._opened)
        output = self._output(attempt)
        if self._is_local:
            check_target(self._located, self.place, self._overwrite)
            remove_others(output.location, self.files(attempt))
        complete_export(self._plan, self._opened, output)

    def commit(self, attempt: Attempt, results: Sequence[Any]) -> None:
        self._output(attempt).commit_beside_others(belongs_to_export)

    def proof(self, attempt: Attempt, directory: str) -> Any:
        is_single = [*self._files] == [SINGLE_NAME]
        last = INDEX_NAME
        if is_single:
            last = SINGLE_NAME
        return proof_of(directory, last, self.files(attempt))

    def report(self, results: Sequence[Any], seconds: float) -> ExportReport:
        return report_of_export(self._plan, add_up(results), seconds)


def counting_from(file: NewFile, start: int, uncounted: Fill) -> NewFile:
    """Return a file that leaves some of its units uncounted.

    Units that begin before `start` are filled by `uncounted`, which counts no overflows: another
    process writes and counts them.
    """
    starts = list(itertools.accumulate(file.chunk_bytes, initial=len(file.header)))

    def fill(unit: Sequence[Span], memory_of_thread: Bytes) -> list[Bytes]:
        if unit and starts[unit[0].chunk] + unit[0].start < start:
            return uncounted(unit, memory_of_thread)
        return file.fill(unit, memory_of_thread)

    return file._replace(fill=fill)


def remove_others(directory: str, names: Container[str]) -> None:
    """Remove the remains of an interrupted completion from an output directory.

    Files with these names stay: another process may be about to let them appear.
    """
    for name in locations.list_names(directory):
        if name not in names:
            locations.remove_tree(locations.join(directory, name))


def other_files(
    directory: str, sizes: Mapping[str, int], headers: Mapping[str, bytes]
) -> list[str]:
    """Return the files that are longer than planned, or have another header."""
    others = []
    for name, header in headers.items():
        path = locations.join(directory, name)
        with contextlib.suppress(FileNotFoundError):
            is_longer = locations.file_size(path) > sizes[name]
            if is_longer or locations.read_range(path, 0, len(header)) != header:
                others.append(name)
    return others


def add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of all pieces together, by name."""
    total: Counter[str] = Counter()
    for counter in counts:
        total.update(counter)
    return dict(total)


def proof_of(directory: str, marker: str, names: Iterable[str]) -> Any:
    """Return a proof that identifies the complete output in a directory.

    It is the time of its last file, and the sizes of all files that are there; None without its
    last file.
    """
    paths = {}
    for name in [*names, marker]:
        paths[locations.join(directory, *name.split("/"))] = name
    states = states_of(list(paths), locations.listed_states(directory))
    last = states.get(locations.join(directory, marker))
    if last is None:
        return None
    sizes = sorted((paths[path], state.num_bytes) for path, state in states.items())
    return {"modified": last.modified, "sizes": sizes}
