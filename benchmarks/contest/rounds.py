"""The rounds: every contestant saves and loads in turn, round after round, so that noise hits all
alike.

Each round has an order of its own: what one has written and deleted, the disk may still be busy
with in the next turn.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import (
    MAX_SETTLE_SECONDS,
    at_rest,
    empty_cache,
    fill_cache,
    machine_facts,
    peak_memory_bytes,
    time_together,
)

from contest.contestants import (
    ACROSS,
    ALONE,
    COLD,
    SAVE_UNSYNCED,
    WARM,
    Contestant,
    chosen,
    contestants,
    has_case,
    loading_cases,
    saving_case,
)
from contest.figures import Figure, Outcome
from contest.state import (
    Part,
    Sizes,
    State,
    across,
    differing_keys,
    empty_like,
    llama_state,
    local_bytes,
    whole,
)
from contest.stores import store_contestants
from distckpt._storage import locations

COLD_METHODS = ("", "posix_fadvise", "drop_caches")


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        num_bytes: size of the state.
        num_runs: rounds that count.
        cases: of `contestants.CASES`.
        folder: where checkpoints go, one at a time: a path or URL.
        with_peaks: whether one more round measures memory.
    """

    num_bytes: int
    num_runs: int
    cases: tuple[str, ...]
    folder: str
    with_peaks: bool = False


class Targets(NamedTuple):
    """Memory to load into: under the layout of the save, across it, and whole in rank 0."""

    same: State
    across: State
    alone: State | None

    def of(self, case: str) -> State | None:
        """Return what a case loads into."""
        return {ACROSS: self.across, ALONE: self.alone}.get(case, self.same)


def run_rank(rank: int, sizes: Sizes, only: Sequence[str] | None, settings: Settings) -> Outcome:
    """Measure a Llama of some sizes in one rank; `only` are beginnings of names of contestants."""
    os.dup2(2, 1)  # libraries that print do not print among the results
    warnings.simplefilter("ignore")
    left_out: dict[str, str] = {}
    is_local = locations.is_local(settings.folder)
    every = contestants(left_out) if is_local else store_contestants(left_out)
    measured = [one for one in chosen(every, only) if has_case(one, settings.cases)]
    state = llama_state(sizes)
    figures: list[Figure] = []
    cold = ""
    # The less memory is free, the sooner the system makes a writer wait for the disk. Saves that do
    # not wait for it are measured before there is anything to load into.
    for is_unsynced in (True, False):
        group = [one for one in measured if (saving_case(one) == SAVE_UNSYNCED) == is_unsynced]
        cases = [case for case in settings.cases if (case == SAVE_UNSYNCED) == is_unsynced]
        if group:
            of_group, cold = measure(group, state, make_targets(state, cases), settings)
            figures += of_group
    figures.sort(key=lambda figure: settings.cases.index(figure.case))
    place = os.path.dirname(settings.folder) if is_local else settings.folder
    return Outcome(
        machine_facts(place),
        sizes.num_bytes,
        dist.get_world_size(),
        settings.num_runs,
        not is_local,
        cold,
        figures,
        left_out,
    )


def make_targets(state: State, cases: Sequence[str]) -> Targets:
    """Make the memory that some cases need."""
    is_loader = ALONE in cases and dist.get_rank() == 0
    return Targets(
        empty_like(state) if {WARM, COLD}.intersection(cases) else {},
        across(state) if ACROSS in cases else {},
        {key: Part(tensor, None) for key, tensor in whole(state).items()} if is_loader else None,
    )


def measure(
    measured: Sequence[Contestant], state: State, targets: Targets, settings: Settings
) -> tuple[list[Figure], str]:
    """Save and load with every contestant in turn; return the figures, and how files left the page
    cache.

    Round 0 does not count; what is loaded in it is compared with what was saved. Collective
    operation: all ranks must call it.
    """
    alone_group = dist.new_group([0])
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    peaks: dict[tuple[str, str], int] = {}
    cold_methods: set[str] = set()
    for round_number in range(settings.num_runs + 1 + settings.with_peaks):
        is_for_peaks = round_number > settings.num_runs
        # The same order on all ranks.
        for contestant in random.Random(round_number).sample(measured, len(measured)):
            if dist.get_rank() == 0:
                what = (
                    f"round {round_number} of {settings.num_runs}" if round_number else "warming up"
                )
                print(
                    f"{'memory' if is_for_peaks else what}: {contestant.name}",
                    file=sys.stderr,
                    flush=True,
                )
            turn = _Turn(
                contestant, state, targets, settings, alone_group, round_number == 0, cold_methods
            )
            for case, value in turn.run(
                peak_memory_bytes if is_for_peaks else time_together
            ).items():
                if is_for_peaks:
                    peak = torch.tensor(value)
                    dist.all_reduce(peak, dist.ReduceOp.MAX)
                    peaks[contestant.name, case] = int(peak)
                elif round_number:
                    seconds[contestant.name, case].append(value)
    sizes = _bytes_of_cases(state, targets)
    figures = [
        Figure(
            case,
            name,
            one.is_checkpoint,
            sizes.get(case, sizes[""]),
            seconds[name, case],
            peaks.get((name, case)),
        )
        for one in measured
        for name in [one.name]
        for case in settings.cases
        if (name, case) in seconds
    ]
    return figures, min(cold_methods, default="")


def _bytes_of_cases(state: State, targets: Targets) -> dict[str, int]:
    """Return how many bytes all ranks together move; "" stands for the cases that move all."""
    num_bytes = torch.tensor(
        [local_bytes(state), sum(part.num_bytes for part in targets.across.values())]
    )
    dist.all_reduce(num_bytes)
    return {"": int(num_bytes[0]), ACROSS: int(num_bytes[1])}


class _Turn(NamedTuple):
    """One contestant's turn in one round."""

    contestant: Contestant
    state: State
    targets: Targets
    settings: Settings
    alone_group: Any
    is_compared: bool
    cold_methods: set[str]

    def run(self, gauge: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
        """Save, load in all cases, delete; return what `gauge` measured, by case."""
        location = locations.join(self.settings.folder, "checkpoint")
        prepared = self.contestant.prepare(self.state)
        at_rest(self.settings.folder, self._settle_seconds())
        measured = {}
        took = gauge(lambda: self.contestant.save(prepared, location))
        saved_as = saving_case(self.contestant)
        if saved_as in self.settings.cases:
            measured[saved_as] = took
        for case, is_alone in loading_cases(self.contestant).items():
            if case not in self.settings.cases or not self._make_ready(location, case == COLD):
                continue
            load = self._loading(case, is_alone, location)
            self._forget(case)
            measured[case] = gauge(load)
            self._compare(case)
        dist.barrier()
        if dist.get_rank() == 0:
            locations.remove_tree(location)
        return {case: value for case, value in measured.items() if case is not None}

    def _make_ready(self, location: str, is_cold: bool) -> bool:
        """Have the files in the page cache, or not there; False where that cannot be."""
        at_rest(location, self._settle_seconds())
        if not is_cold:
            # What was read past the page cache before is not there.
            if dist.get_rank() == 0:
                fill_cache(location)
            dist.barrier()
            return True
        method = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            method[0] = COLD_METHODS.index(empty_cache(location))
        dist.broadcast(method, 0)
        self.cold_methods.add(COLD_METHODS[int(method)])
        return bool(method)

    def _settle_seconds(self) -> float:
        # Little is soon done.
        return min(MAX_SETTLE_SECONDS, self.settings.num_bytes / 1e9)

    def _loading(self, case: str, is_alone: bool, location: str) -> Callable[[], Any]:
        target = self.targets.of(case)
        if not is_alone:
            assert target is not None
            to_fill = self.contestant.prepare(target)
            return lambda: self.contestant.load(to_fill, location)
        load_alone = self.contestant.load_alone
        assert load_alone is not None
        if target is None:
            return lambda: None
        tensors = {key: part.local for key, part in target.items()}
        return lambda: load_alone(tensors, location, self.alone_group)

    def _forget(self, case: str) -> None:
        for part in (self.targets.of(case) or {}).values() if self.is_compared else ():
            part.local.zero_()

    def _compare(self, case: str) -> None:
        if self.is_compared and self.contestant.is_checkpoint:
            target = self.targets.of(case)
            axes = (
                dict.fromkeys(self.state)
                if case == ALONE
                else {key: part.axis for key, part in (target or {}).items()}
            )
            wrong = differing_keys(self.state, axes, target)
            if wrong:
                raise ValueError(
                    f"it loaded other values than it saved, for example of {wrong[0]!r} ({case})"
                )
