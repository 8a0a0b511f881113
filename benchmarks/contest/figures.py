"""What was measured, and what follows from it: medians, rates and ratios, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from report import Cell, figure, median, ratio

TITLES = {
    "save": "durable save",
    "save_unsynced": "save without fsync",
    "warm_load": "warm load, same layout",
    "cold_load": "cold load, same layout",
    "reshard_axis": "warm load, axis 0 -> axis 1",
    "reshard_one": "warm load, TP{num_ranks} -> TP1",
}
"""The cases, as they are shown."""
STORE_TITLES = {
    "save": "save",
    "warm_load": "load, same layout",
    "reshard_axis": "load, axis 0 -> axis 1",
    "reshard_one": "load, TP{num_ranks} -> TP1",
}
"""Those of an object store, where what was put is durable and nothing is in the page cache."""
HEADS = ("seconds", "range", "GB/s", "of raw", "distckpt is")


def titles(is_store: bool) -> dict[str, str]:
    """Return the cases that there are, as they are shown."""
    return STORE_TITLES if is_store else TITLES


class Figure(NamedTuple):
    """What was measured of one contestant in one case.

    Attributes:
        case: a key of `TITLES`.
        name: of the contestant.
        is_checkpoint: False for raw bytes.
        num_bytes: that all ranks together moved.
        seconds: until the last rank was done, one number per round.
        peak_bytes: of extra memory, of the rank that needed most; None when it was not measured.
    """

    case: str
    name: str
    is_checkpoint: bool
    num_bytes: int
    seconds: list[float]
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """The median of the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def gb_per_second(self) -> float:
        """The rate, in 10^9 bytes per second."""
        return self.num_bytes / self.median / 1e9


class Outcome(NamedTuple):
    """Everything that came out of a benchmark.

    Attributes:
        machine: facts in one line.
        num_bytes: size of the state.
        num_ranks: that saved and loaded.
        num_runs: rounds that count.
        is_store: whether it was an object store.
        cold: how files were taken out of the page cache; empty when they were not.
        figures: by case.
        left_out: contestants that cannot be measured here, and why.
    """

    machine: str
    num_bytes: int
    num_ranks: int
    num_runs: int
    is_store: bool
    cold: str
    figures: Sequence[Figure]
    left_out: Mapping[str, str]

    def title(self, case: str) -> str:
        """Return a case as it is shown."""
        how = f" (files out of memory by {self.cold})" if case == "cold_load" else ""
        return titles(self.is_store)[case].format(num_ranks=self.num_ranks) + how

    def cases(self) -> dict[str, list[Figure]]:
        """Return the figures of each case."""
        return {
            case: of_case
            for case in TITLES
            if (of_case := [figure for figure in self.figures if figure.case == case])
        }


def fastest_raw(figures: Sequence[Figure]) -> Figure | None:
    """Return the fastest raw contestant of one case."""
    return min(
        (one for one in figures if not one.is_checkpoint), key=lambda one: one.median, default=None
    )


def own_defaults(figures: Sequence[Figure]) -> Figure | None:
    """Return distckpt in one case: with its defaults, where they take part."""
    return next(filter(is_own, figures), None)


def table_of(title: str, figures: Sequence[Figure]) -> tuple[list[str], list[list[Cell]]]:
    """Lay the figures of one case out as a table, with peaks of memory where they were measured."""
    heads, rows = [title, *HEADS], rows_of(figures)
    if any(one.peak_bytes is not None for one in figures):
        heads.append("extra peak MB per rank")
        for row, one in zip(rows, figures, strict=True):
            row.append(f"{(one.peak_bytes or 0) / 1e6:.0f}" if one.is_checkpoint else "")
    return heads, rows


def rows_of(figures: Sequence[Figure]) -> list[list[Cell]]:
    """Lay the figures of one case out as rows under a title and `HEADS`."""
    raw, own = fastest_raw(figures), own_defaults(figures)
    return [
        [
            one.name,
            median(one.seconds, "{:.3f}"),
            f"{min(one.seconds):.3f} - {max(one.seconds):.3f}",
            figure(f"{one.gb_per_second:.2f}", one.seconds),
            ratio(raw.seconds, one.seconds) if raw else "",
            ratio(one.seconds, own.seconds, "{:.2f}x")
            if own and one.is_checkpoint and not is_own(one)
            else "",
        ]
        for one in figures
    ]


def is_own(figure: Figure) -> bool:
    """Tell whether a figure is one of distckpt."""
    return figure.name.startswith("distckpt")


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Put everything into values that JSON can hold."""
    figures = [one._asdict() for one in outcome.figures]
    return {**outcome._asdict(), "left_out": dict(outcome.left_out), "figures": figures}


def from_json(value: dict[str, Any]) -> Outcome:
    """Take back what `to_json` has made."""
    return Outcome(**{**value, "figures": [Figure(**one) for one in value["figures"]]})
