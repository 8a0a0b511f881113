"""The contest: every contestant saves and loads in turn, round after round; what they needed, as tables."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _contestants import Contestant, State
from _measure import markdown_table, peak_memory_bytes, time_together

REFERENCE = "DCP FileSystemWriter"
SETTLE_SECONDS = 0.5


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
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in taking_part]
    peaks: list[tuple[int, int]] = []
    for round_number in range(num_runs + 2):
        for contestant, (save_seconds, load_seconds) in zip(taking_part, seconds, strict=True):
            if round_number <= num_runs:
                saved, loaded = save_and_load(contestant, state, targets, folder, time_together)
                save_seconds.append(saved)
                load_seconds.append(loaded)
            else:
                pair = torch.tensor(save_and_load(contestant, state, targets, folder, peak_memory_bytes))
                dist.all_reduce(pair, dist.ReduceOp.MAX)
                peaks.append((int(pair[0]), int(pair[1])))
    return [
        Figures(contestant.name, contestant.is_checkpoint, saves[1:], loads[1:], *peak)
        for contestant, (saves, loads), peak in zip(taking_part, seconds, peaks, strict=True)
    ]


def save_and_load(contestant: Contestant, state: State, targets: State, folder: str, gauge: Any) -> tuple[Any, Any]:
    """Save, load, compare and delete one checkpoint; `gauge` calls the first two and returns its measurement."""
    location = f"{folder}/checkpoint"
    to_save, to_fill = contestant.prepare(state), contestant.prepare(targets)
    for part in targets.values():
        part.local.zero_()
    at_rest(folder)
    saved = gauge(lambda: contestant.save(to_save, location))
    at_rest(location)
    loaded = gauge(lambda: contestant.load(to_fill, location))
    if contestant.is_checkpoint:
        wrong = [key for key, part in targets.items() if not torch.equal(part.local, state[key].local)]
        assert not wrong, f"{contestant.name} loaded other values than it saved: {wrong[:3]}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(location)
    return saved, loaded


def at_rest(folder: str) -> None:
    """Wait until nothing is being written to disk any more, and all files in a folder are in the page cache."""
    gc.collect()  # nobody pays for what others left behind
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        buffer = bytearray(16 << 20)
        for path in Path(folder).rglob("*.*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
        time.sleep(SETTLE_SECONDS)  # deleted blocks are given back to the disk in the background
    dist.barrier()


def tables(results: list[Figures], num_bytes: int) -> str:
    """Lay out what saving and what loading took, as two Markdown tables."""
    return "\n\n".join(_table(verb, results, num_bytes) for verb in ("save", "load"))


def _table(verb: str, results: list[Figures], num_bytes: int) -> str:
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
