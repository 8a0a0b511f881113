"""Exports in parts: `consolidate` and `merge`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distckpt._base.options import ExportOptions
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings
from distckpt._compute.merge import check_is_apart, check_terms, plan_opened_sum
from distckpt._format.hf_names import INDEX_NAME, SINGLE_NAME, belongs_to_export
from distckpt._io.export import export_settings, num_export_threads, output_file
from distckpt._io.write import NewFile
from distckpt._operations.consolidate import (
    ExportReport,
    complete_export,
    plan_opened,
    report_of_export,
)
from distckpt._operations.export_request import (
    check_export_options,
    check_target,
    locate_sources,
    open_sources,
)
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.tasks._outputs import FileWork, overflows_of
from distckpt.tasks._work import Work, facts_of, facts_of_extra_files


def consolidation(
    checkpoint: str, output_dir: str, *, overwrite: bool = False, options: ExportOptions
) -> Work:
    """Return the work of `consolidate` with these arguments."""
    return _ExportWork([checkpoint], output_dir, overwrite, options)


def merger(
    checkpoints: Sequence[str],
    output_dir: str,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    overwrite: bool = False,
    options: ExportOptions,
) -> Work:
    """Return the work of `merge` with these arguments."""
    sources, factors = check_terms(checkpoints, weights, ema)
    return _ExportWork(sources, output_dir, overwrite, options, factors, ema)


class _ExportWork(FileWork):
    """An export, with `factors` of the sum of several checkpoints."""

    def __init__(
        self,
        checkpoints: Sequence[str],
        output_dir: str,
        overwrite: bool,
        options: ExportOptions,
        factors: Sequence[float] | None = None,
        ema: float | None = None,
    ) -> None:
        check_export_options(options)
        ranks = Ranks.alone()
        self._located = locate_sources(checkpoints, options)
        opened = open_sources(ranks, self._located, options.verify)
        more: dict[str, Any] = {}
        if factors is None:
            self.verb = "consolidate"
            plan = plan_opened(ranks, opened, options)
        else:
            self.verb = "merge"
            plan = plan_opened_sum(ranks, opened, factors, ema, options)
            more = {"weights": factors, "ema": ema}
        self._plan = plan
        self._overwrite = overwrite
        self._files = {file.name: file for file in plan.files}
        self.place = posix.resolve(output_dir)
        self.checkpoints = opened.all
        self.source = plan.source
        self._max_inflight_bytes = options.max_inflight_bytes
        self.write_settings = export_settings(num_export_threads(options.max_inflight_bytes))
        self.divide(
            {file.name: file.file_bytes for file in plan.files},
            {file.name: file.laid_out[1] for file in plan.files},
        )
        num_bytes = sum(self.sizes.values())
        self.settings = OutputSettings(num_bytes=num_bytes, files=list(self._files))
        self.last_file = INDEX_NAME
        if [*self._files] == [SINGLE_NAME]:
            self.last_file = SINGLE_NAME
        self.facts = {
            **facts_of({**vars(options), **more}, self.checkpoints, plan.outputs),
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

    def files(self) -> list[str]:
        extra = self._plan.extra_files
        copied = [locations.split(path)[1] for path in extra.copied]
        return [*self._files, *copied, *extra.written, INDEX_NAME]

    def check(self) -> None:
        check_target(self._located, self.place, self._overwrite)
        if self.verb == "merge":
            check_is_apart(self.place, self._located.checkpoints)

    def new_file(self, output: Output, name: str, overflows: dict[str, int]) -> NewFile:
        path = locations.join(output.location, name)
        return output_file(
            self.source, self._files[name], path, overflows, self._max_inflight_bytes
        )

    def add_rest(self, results: Sequence[Any]) -> None:
        complete_export(self._plan, self.checkpoints, self.output())

    def commit(self, results: Sequence[Any]) -> None:
        self.output().commit_beside_others(belongs_to_export)

    def report(self, results: Sequence[Any], seconds: float) -> ExportReport:
        return report_of_export(self._plan, overflows_of(results), seconds)
