"""The page that `distckpt ls --html` writes: a run over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from distckpt._pages.charts import (
    Point,
    figures_in,
    html_table,
    line_chart,
    tiles,
    write_static_page,
)
from distckpt.cli._output import CHECKPOINT_HEADS, cells_of_checkpoint, size_text
from distckpt.manager._listing import CheckpointInfo

_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}


def write_run_page(
    path: str,
    root: str,
    infos: Sequence[CheckpointInfo],
    num_changes: int | None,
    keys: Sequence[str] | None,
    is_reading: bool,
) -> None:
    """Write a page about the checkpoints of a run.

    With `num_changes`, it is also about the layers of so many of the newest whole ones.

    The tensors are read where a save has stored no statistics, or everywhere with `is_reading`,
    except for steps that an earlier page at this path covers.
    """
    steps = [info for info in infos if info.step is not None]
    sections = [("", tiles(_tiles(infos)))]
    if len(steps) > 1:
        ends = (steps[0].step or 0, steps[-1].step or 0)
        sections += _charts(steps, ends)
    figures = None
    if num_changes:
        # Imported only for this option.
        from distckpt._pages.run_changes import changes_of_layers, figures_of_layers

        whole = [info for info in steps if info.problem is None][-num_changes:]
        figures = figures_of_layers(whole, keys, figures_in(path), is_reading)
        sections += changes_of_layers(whole, figures)
    sections.append(("Checkpoints", _table(infos)))
    title = root.rstrip("/").rpartition("/")[2] or root
    write_static_page(path, title, [root], sections, figures)


def _tiles(infos: Sequence[CheckpointInfo]) -> Iterator[tuple[str, str]]:
    yield f"{len(infos):,}", "checkpoints"
    yield from ((info.name, "newest") for info in infos if info.is_newest)
    yield size_text(sum(info.num_bytes for info in infos)), "in all"
    num_bad = sum(info.problem is not None for info in infos)
    if num_bad:
        yield f"{num_bad:,}", "not whole"
    num_rejected = sum(info.rejected is not None for info in infos)
    if num_rejected:
        yield f"{num_rejected:,}", "rejected"


def _charts(infos: Sequence[CheckpointInfo], ends: tuple[int, int]) -> Iterator[tuple[str, str]]:
    names: dict[str, None] = {}
    for info in infos:
        names.update(dict.fromkeys(info.metrics))
    for name in names:
        points = []
        for info in infos:
            value = info.metrics.get(name, math.nan)
            if math.isfinite(value):
                points.append(Point(info.step or 0, value, f"{info.name}: {name} {value:.6g}"))
        if points:
            yield name, line_chart(points, ends)
    yield from _sizes_and_times(infos, ends)


def _sizes_and_times(
    infos: Sequence[CheckpointInfo], ends: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    sizes = []
    durations = []
    for info in infos:
        step = info.step or 0
        sizes.append(Point(step, info.num_bytes, f"{info.name}: {size_text(info.num_bytes)}"))
        if info.seconds is not None:
            durations.append(Point(step, info.seconds, f"{info.name}: {info.seconds:.3f} s"))
    yield _chart_in("Size", sizes, ends, _BYTES)
    for title, points in (
        ("Duration of the save", durations),
        ("Time since the step before was committed", list(_waits(infos))),
    ):
        if points:
            yield _chart_in(title, points, ends, _SECONDS)


def _chart_in(
    title: str, points: Sequence[Point], ends: tuple[int, int], units: Mapping[str, float]
) -> tuple[str, str]:
    """Return a chart in the largest unit that its largest value reaches."""
    most = max(point.y for point in points)
    unit = next((name for name, size in units.items() if most >= size), [*units][-1])
    scaled = []
    for point in points:
        scaled.append(point._replace(y=point.y / units[unit]))
    return f"{title}, {unit}", line_chart(scaled, ends, 110)


def _waits(infos: Sequence[CheckpointInfo]) -> Iterator[Point]:
    """Yield the time from the commit of each step to the next."""
    before = None
    for info in infos:
        at = info.saved_at
        if at is None:
            continue
        if before is not None:
            wait = at - before
            yield Point(info.step or 0, wait, f"{info.name}: {wait / 60:.1f} minutes")
        before = at


def _table(infos: Sequence[CheckpointInfo]) -> str:
    rows = []
    for info in reversed(infos):
        name, saved, metrics, state, size = cells_of_checkpoint(info)
        if info.problem:
            state += f": {info.problem}"
        rows.append([name, saved, metrics, state, size])
    return html_table(CHECKPOINT_HEADS, rows)
