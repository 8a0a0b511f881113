"""Running the benchmark: room first, then the rounds on fresh ranks, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import estimate_available_memory
from distckpt._bench.contestants import ALONE
from distckpt._bench.figures import Figure, Outcome
from distckpt._bench.measure import machine_facts
from distckpt._bench.ranks import RankError, run_ranks
from distckpt._bench.rounds import Settings, run_rank
from distckpt._bench.state import MAX_RANKS, llama_sizes
from distckpt._storage import locations

RANK_BYTES = 500_000_000
"""Memory of a process that has imported torch and the other libraries."""
STATE_COPIES = 5
"""State, targets, and what the hungriest contestant takes; the page cache holds the files."""


def run_benchmark(
    folder: str,
    gigabytes: float,
    num_ranks: int,
    num_runs: int,
    cases: tuple[str, ...],
    only: tuple[str, ...] | None,
    with_peaks: bool = False,
    tell: Callable[[str], object] = lambda text: None,
) -> Outcome:
    """Measure contestants on some storage. A contestant that fails is left out, and the others begin anew.

    Args:
        folder: an existing directory on the storage, or a URL; what is written into it is removed.
        gigabytes: size of the state.
        num_ranks: processes that save and load together, a power of two.
        num_runs: rounds that count.
        cases: what to measure, see `contestants.CASES`.
        only: beginnings of the names of contestants; None for all.
        with_peaks: whether to measure memory, in one more round.
        tell: called with a line on what is done next.

    Raises:
        CheckpointingException: the storage or the memory has no room, or nobody can take part.
        RankError: something failed that is not a contestant's fault.
    """
    if num_ranks > MAX_RANKS or num_ranks & (num_ranks - 1):
        raise CheckpointingException(f"--ranks must be a power of two up to {MAX_RANKS}, not {num_ranks}")
    folder = locations.normalize(folder)
    sizes = llama_sizes(gigabytes)
    _check_room(folder, sizes.num_bytes)
    _check_memory(sizes.num_bytes, num_ranks, cases)
    failed: dict[str, str] = {}
    news = _News(tell, num_runs)
    with _scratch(folder) as scratch:
        while not news.figures:
            settings = Settings(sizes, num_runs, cases, only, tuple(failed), scratch, with_peaks)
            try:
                run_ranks(run_rank, num_ranks, settings, receive=news.receive)
            except RankError as error:
                if error.last is None or error.last[0] != "at":
                    raise
                failed[error.last[1]] = error.cause
                tell(f"{error.last[1]} failed and is left out: {error.cause}")
                locations.remove_tree(scratch)
                locations.make_directories(scratch)
                continue
            if not news.figures:
                raise CheckpointingException(
                    "No contestant is left to measure." + "".join(f" {name}: {why}" for name, why in failed.items())
                )
    return Outcome(
        machine_facts(folder), sizes.num_bytes, num_ranks, num_runs, not locations.is_local(folder), news.cold,
        news.figures, failed, news.left_out,
    )  # fmt: skip


class _News:
    """What the ranks have told."""

    def __init__(self, tell: Callable[[str], object], num_runs: int) -> None:
        self.tell = tell
        self.num_runs = num_runs
        self.figures: list[Figure] = []
        self.left_out: dict[str, str] = {}
        self.cold = ""

    def receive(self, rank: int, message: Any) -> None:
        match message:
            case ("at", str(name), int(round_number)) if rank == 0:
                what = f"round {round_number} of {self.num_runs}" if round_number else "warming up"
                self.tell(f"{what if round_number <= self.num_runs else 'memory'}: {name}")
            case ("cold", str(method)):
                self.cold = method
            case ("figures", figures, left_out):
                self.figures, self.left_out = figures, left_out


def _check_room(folder: str, num_bytes: int) -> None:
    if not locations.is_local(folder):
        return
    if not os.path.isdir(folder):
        raise CheckpointingException(f"{folder!r} is no directory: name one on the storage to be measured")
    free = shutil.disk_usage(folder).free
    if free < 2 * num_bytes:
        raise CheckpointingException(
            f"{folder!r} has {free / 1e9:.1f} GB free, this needs {2 * num_bytes / 1e9:.1f}: give a smaller --gb"
        )


def _check_memory(num_bytes: int, num_ranks: int, cases: tuple[str, ...]) -> None:
    needed = (STATE_COPIES + (ALONE in cases)) * num_bytes + num_ranks * RANK_BYTES
    available = estimate_available_memory()
    if available < needed:
        raise CheckpointingException(
            f"{available / 1e9:.1f} GB of memory are available, this needs {needed / 1e9:.1f}: give a smaller --gb"
            " or fewer --ranks"
        )


@contextlib.contextmanager
def _scratch(folder: str) -> Iterator[str]:
    """Make a place below a directory or URL that is gone afterwards, however impatient the user is."""
    scratch = locations.join(folder, f"distckpt-bench-{secrets.token_hex(8)}")
    try:
        if locations.is_local(folder):
            os.mkdir(scratch)
        else:
            # Stores have no directories: this finds out what cannot be written to before ranks are started.
            locations.write_bytes(locations.join(scratch, "begun"), b"")
        yield scratch
    finally:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        for _ in range(2):
            # A store may still carry out what a rank that was killed has asked for: look again.
            locations.remove_tree(scratch)
        for number, handler in before.items():
            signal.signal(number, handler)
