"""The page that `distckpt ls --html` writes: a run over its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from distckpt._cli.charts import Point, figures_in, html_table, line_chart, tiles, write_static_page
from distckpt._cli.output import size_text, state_text, time_text
from distckpt._manager.listing import CheckpointInfo

_BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
_SECONDS = {"hours": 3600, "minutes": 60, "seconds": 1}


def write_run_page(
    path: str,
    root: str,
    found: Sequence[CheckpointInfo],
    num_changes: int | None,
    keys: Sequence[str] | None,
    is_reading: bool,
) -> None:
    """Write a page about the checkpoints of a run; with `num_changes`, about the layers of so many
    of the newest ones that are whole.

    The tensors of those are read whose saves have stored no statistics, of all of them with
    `is_reading`, except for those that an earlier page at this path is about.
    """
    of_steps = [info for info in found if info.step is not None]
    sections = [("", tiles(_tiles(found)))]
    if len(of_steps) > 1:
        ends = (of_steps[0].step or 0, of_steps[-1].step or 0)
        sections += [(name, line_chart(points, ends)) for name, points in _metrics(of_steps)]
        sections += _sizes_and_times(of_steps, ends)
    figures = None
    if num_changes:
        whole = [info for info in of_steps if info.problem is None]
        # Imported when it is asked for.
        from distckpt._cli.run_changes import changes_of_layers, figures_of_layers

        known = figures_in(path)
        figures = figures_of_layers(whole[-num_changes:], keys, known, is_reading)
        sections += changes_of_layers(whole[-num_changes:], figures)
    sections.append(("Checkpoints", _table(found)))
    title = root.rstrip("/").rpartition("/")[2] or root
    write_static_page(path, title, [root], sections, figures)


def _tiles(found: Sequence[CheckpointInfo]) -> Iterator[tuple[str, str]]:
    yield f"{len(found):,}", "checkpoints"
    yield from ((info.name, "newest") for info in found if info.is_newest)
    yield size_text(sum(info.num_bytes for info in found)), "in all"
    num_bad = sum(info.problem is not None for info in found)
    if num_bad:
        yield f"{num_bad:,}", "not whole"


def _metrics(found: Sequence[CheckpointInfo]) -> Iterator[tuple[str, list[Point]]]:
    names = dict.fromkeys(name for info in found for name in info.metrics)
    for name in names:
        values = [(info, info.metrics[name]) for info in found if name in info.metrics]
        points = [
            Point(info.step or 0, value, f"{info.name}: {name} {value:.6g}")
            for info, value in values
            if math.isfinite(value)
        ]
        if points:
            yield name, points


def _sizes_and_times(
    found: Sequence[CheckpointInfo], ends: tuple[int, int]
) -> Iterator[tuple[str, str]]:
    sizes = [
        Point(info.step or 0, info.num_bytes, f"{info.name}: {size_text(info.num_bytes)}")
        for info in found
    ]
    yield _chart_in("Size", sizes, ends, _BYTES)
    durations = [
        Point(info.step or 0, info.seconds, f"{info.name}: {info.seconds:.3f} s")
        for info in found
        if info.seconds is not None
    ]
    if durations:
        yield _chart_in("Duration of the save", durations, ends, _SECONDS)
    waits = list(_waits(found))
    if waits:
        yield _chart_in("Time since the step before was committed", waits, ends, _SECONDS)


def _chart_in(
    title: str, points: Sequence[Point], ends: tuple[int, int], units: Mapping[str, float]
) -> tuple[str, str]:
    """Return a chart in the largest of the units that its largest value reaches."""
    most = max(point.y for point in points)
    unit = next((name for name, size in units.items() if most >= size), [*units][-1])
    scaled = [point._replace(y=point.y / units[unit]) for point in points]
    return f"{title}, {unit}", line_chart(scaled, ends, 110)


def _waits(found: Sequence[CheckpointInfo]) -> Iterator[Point]:
    """Yield how long after the step before each step was committed."""
    timed = [(info, info.saved_at) for info in found if info.saved_at is not None]
    for (_, before), (info, at) in itertools.pairwise(timed):
        yield Point(info.step or 0, at - before, f"{info.name}: {(at - before) / 60:.1f} minutes")


def _table(found: Sequence[CheckpointInfo]) -> str:
    rows = [
        [
            info.name,
            time_text(info.saved_at),
            " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items()),
            ": ".join(filter(None, [state_text(info), info.problem])),
            size_text(info.num_bytes) if info.num_bytes else "",
        ]
        for info in reversed(found)
    ]
    return html_table(["checkpoint", "saved", "metrics", "state", "size"], rows)
