"""The contest of `distckpt bench`, only durable saves and warm loads, with peaks of memory, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from _contestants import Contestant, State
from _measure import markdown_table

from distckpt._bench import rounds
from distckpt._bench.figures import Figure
from distckpt._bench.measure import at_rest
from distckpt._bench.state import llama_sizes

__all__ = ["CASES", "Figures", "at_rest", "by_contestant", "measure", "tables"]

CASES = ("save", "warm_load")
REFERENCE = "DCP FileSystemWriter"


class Figures(NamedTuple):
    """What was measured of one contestant: a number per round, and the peak of the rank that needed most."""

    name: str
    is_checkpoint: bool
    save_seconds: list[float]
    load_seconds: list[float]
    save_peak_bytes: int
    load_peak_bytes: int


def measure(taking_part: list[Contestant], state: State, targets: State, num_runs: int, folder: str) -> list[Figures]:
    """Save and load with every contestant in turn, `num_runs` times over, and once more for memory."""
    settings = rounds.Settings(llama_sizes(0.01), num_runs, CASES, None, (), folder, with_peaks=True)
    durable = [contestant for contestant in taking_part if "save" in contestant.cases]
    return by_contestant(rounds.measure(durable, state, rounds.Targets(targets, {}, None), settings))


def by_contestant(figures: Sequence[Figure]) -> list[Figures]:
    """Put the figures of both cases together; who takes part in one only has no seconds in the other."""
    of_case = {(figure.case, figure.name): figure for figure in figures}
    results = []
    for name, is_checkpoint in {figure.name: figure.is_checkpoint for figure in figures}.items():
        save, load = (of_case.get((case, name), Figure(case, name, is_checkpoint, 0, [])) for case in CASES)
        peaks = (save.peak_bytes or 0, load.peak_bytes or 0)
        results.append(Figures(name, is_checkpoint, save.seconds, load.seconds, *peaks))
    return results


def tables(results: list[Figures], num_bytes: int) -> str:
    """Lay out what saving and what loading took, as two Markdown tables."""
    return "\n\n".join(_table(verb, results, num_bytes) for verb in ("save", "load"))


def _table(verb: str, every_result: list[Figures], num_bytes: int) -> str:
    results = [result for result in every_result if getattr(result, f"{verb}_seconds")]
    medians = {result.name: statistics.median(getattr(result, f"{verb}_seconds")) for result in results}
    floor = min((medians[result.name] for result in results if not result.is_checkpoint), default=None)
    first = "durable save" if verb == "save" else "warm load"
    rows = []
    for result in results:
        seconds, median = getattr(result, f"{verb}_seconds"), medians[result.name]
        row = {
            first: result.name,
            "seconds": f"{median:.2f}",
            "range": f"{min(seconds):.2f} - {max(seconds):.2f}",
            "GB/s": f"{num_bytes / median / 1e9:.2f}",
        }
        if REFERENCE in medians:
            row["time / DCP's"] = f"{median / medians[REFERENCE]:.2f}"
        if floor:
            row["time / raw"] = f"{median / floor:.2f}"
        peak_bytes = getattr(result, f"{verb}_peak_bytes")
        row["extra peak MB per rank"] = f"{peak_bytes / 1e6:.0f}" if result.is_checkpoint else ""
        rows.append(row)
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])
