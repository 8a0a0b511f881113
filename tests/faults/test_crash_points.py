"""A process dies at every file-system call of an operation: what was there before, or what it
makes, is there, whole.

Real processes are killed (`SIGKILL`) before a call, after it, or in the middle of a write. A call
that changes nothing leaves what the one before it left: the default run takes the first of each
kind of the others and a sample of the rest, the long form every call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from distckpt import RankFailedError
from tests.support.calls import WRITES, Call, recorded, watched
from tests.support.harness import Outcome, error_of, launched, run
from tests.support.scenarios import GROUP_TIMEOUT, SCENARIOS, Verdict

NUM_PARTS = 3
"""Into which a sweep of all points is divided, so that each ends in time on a busy machine as
well.
"""
STRIDE = 6
"""The default run takes one of so many points beside one of each kind."""
VARIANTS = {
    "overwrite_without_exchange",
    "save_among_others",
    "async_save",
    "async_overwrite",
    "async_manager",
}
"""What differs little from another operation: the default run takes fewer points, and others than
of that one.
"""
AT_ONCE = 4
"""So many groups of ranks run at the same time: survivors mostly wait."""


class Point(NamedTuple):
    """Where a process dies: before, after or `within` (after half of a write) a call.

    Calls are told apart by what they are about, and those that are alike by their `count`, from 1:
    what a rank does depends a little on which of them comes first.
    """

    moment: Literal["before", "within", "after"]
    call: str
    count: int


def points_of(calls: Sequence[Call], *, exhaustive: bool) -> list[Point]:
    """List where to kill a process that makes these calls."""
    points, counts = [], Counter[str]()
    for call in calls:
        counts[str(call)] += 1
        if exhaustive or call.changes_something:
            points.append(Point("before", str(call), counts[str(call)]))
        if call.name in WRITES and call.length > 1:
            points.append(Point("within", str(call), counts[str(call)]))
        if exhaustive or call is calls[-1]:
            points.append(Point("after", str(call), counts[str(call)]))
    return points


def sampled(points: Sequence[Point], is_variant: bool) -> list[tuple[int, Point]]:
    """Take the first point of each kind, and one of some of the others, each with its number; of a
    variant the last one of each kind.
    """
    one_of_each = {}
    for number, point in enumerate(points):
        kind = point.moment, point.call.split()[0]
        if is_variant or kind not in one_of_each:
            one_of_each[kind] = number
    certain = {*one_of_each.values(), len(points) - 1}
    others = [number for number in range(len(points)) if number not in certain]
    others = others[1 :: 2 * STRIDE] if is_variant else others[::STRIDE]
    return [(number, points[number]) for number in sorted({*certain, *others})]


def dying_at(point: Point, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Have this process die when it comes to a point."""
    count = 0

    def on_call(call: Call, moment: str) -> int | None:
        nonlocal count
        if str(call) != point.call:
            return None
        count += moment == "before"
        if count == point.count and (moment == "after" or point.moment == "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        return call.length // 2 if count == point.count and point.moment == "within" else None

    return watched(folder, on_call)


# --- One process ----------------------------------------------------------------------------------


def in_child(function: Callable[..., Any], *args: Any) -> int:
    """Call a function in a forked process; returns the exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def record(name: str, folder: Path, rank: int, num_ranks: int) -> list[Call]:
    with recorded(folder) as calls:
        SCENARIOS[name].run(folder, rank, num_ranks)
    return [call._replace(buffers=(), outcome=None) for call in calls]


def record_to_file(name: str, folder: Path, file: Path) -> None:
    file.write_bytes(pickle.dumps(record(name, folder, 0, 1)))


def run_and_die(name: str, folder: Path, point: Point) -> None:
    with dying_at(point, folder):
        SCENARIOS[name].run(folder, 0, 1)


def sweep(
    rank: int, name: str, folder: Path, exhaustive: bool, part: int, num_parts: int
) -> list[tuple[int, str, Verdict]]:
    """Kill one process after the other at the points of one part; returns each with the verdict on
    what is left.

    What is forked has no threads but the one that forks: background saves are made by children
    only.
    """
    scenario = SCENARIOS[name]
    prepared, work, file = folder / "prepared", folder / "work", folder / "calls"
    prepared.mkdir()
    scenario.prepare(prepared)
    shutil.copytree(prepared, work)
    assert in_child(record_to_file, name, work, file) == 0
    calls, names_after = pickle.loads(file.read_bytes()), os.listdir(work)
    points = points_of(calls, exhaustive=exhaustive)
    chosen = list(enumerate(points)) if exhaustive else sampled(points, name in VARIANTS)
    verdicts = []
    for number, point in chosen[part::num_parts]:
        shutil.rmtree(work)
        shutil.copytree(prepared, work)
        assert in_child(run_and_die, name, work, point) == -signal.SIGKILL
        verdicts.append((number, str(point), judged(point, scenario.judge, work)))
        scenario.run_again(work, 0, 1)
        assert judged(point, scenario.judge, work) == "new"
        check_names(point, os.listdir(work), names_after, scenario.clears)
    return verdicts


def judged(point: Point, judge: Callable[[Path], Verdict], folder: Path) -> Verdict:
    try:
        return judge(folder)
    except BaseException as error:
        raise AssertionError(f"killed at {point}: {type(error).__name__}: {error}") from error


def check_names(point: Point, names: Iterable[str], expected: Iterable[str], clears: bool) -> None:
    """Whatever is left has a hidden name, or is gone."""
    left = {name for name in names if clears or not name.startswith(".")}
    assert left == {name for name in expected if not name.startswith(".")}, f"killed at {point}"


def check_sweep(name: str, folder: Path, exhaustive: bool) -> int:
    """Whatever is there turns from the state before to that after at one call, and does not turn
    back.
    """
    verdicts = []
    num_parts = NUM_PARTS if exhaustive else 1
    for part in range(num_parts):
        (folder / str(part)).mkdir()
        verdicts += run(
            sweep, 1, name, folder / str(part), exhaustive, part, num_parts, backend=None
        )[0]
    verdicts.sort()
    found = [verdict for _, _, verdict in verdicts]
    num_before = found.count(SCENARIOS[name].before)
    assert found == [SCENARIOS[name].before] * num_before + ["new"] * (len(found) - num_before), (
        verdicts
    )
    assert 0 < num_before < len(found), "no operation, or nothing comes of it"
    return len(found)


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process_dies_at_any_call_that_changes_something(name, tmp_path, record_property):
    record_property("points", check_sweep(name, tmp_path, exhaustive=False))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process_dies_before_and_after_every_call(name, tmp_path, record_property):
    record_property("points", check_sweep(name, tmp_path, exhaustive=True))


# --- One of several ranks -------------------------------------------------------------------------


def record_on_rank(rank: int, name: str, folder: Path, num_ranks: int) -> list[Call]:
    return record(name, folder, rank, num_ranks)


def run_and_lose_a_rank(
    rank: int, name: str, folder: Path, num_ranks: int, victim: int, point: Point
) -> BaseException | None:
    with dying_at(point, folder) if rank == victim else contextlib.nullcontext():
        return error_of(SCENARIOS[name].run, folder, rank, num_ranks)


def lose_ranks(
    name: str, prepared: Path, num_ranks: int, losses: Sequence[tuple[int, Point]]
) -> list[Verdict]:
    """Run an operation once for each victim and point, at the same time, and judge what each leaves
    where the rank has died.
    """
    works = [prepared.with_name(f"work_{number}") for number in range(len(losses))]
    with contextlib.ExitStack() as stack:
        launches = []
        for work, loss in zip(works, losses, strict=True):
            shutil.copytree(prepared, work)
            args = (name, work, num_ranks, *loss)
            launches.append(
                stack.enter_context(
                    launched(run_and_lose_a_rank, num_ranks, *args, group_timeout=GROUP_TIMEOUT)
                )
            )
        outcomes = [launch.outcomes() for launch in launches]
    verdicts = []
    for work, (victim, point), of_ranks in zip(works, losses, outcomes, strict=True):
        verdict = judged(point, SCENARIOS[name].judge, work)
        check_survivors(
            of_ranks, victim, verdict, f"rank {victim} of {num_ranks} killed at {point}"
        )
        # A new job, of another size.
        SCENARIOS[name].run_again(work, 0, 1)
        assert judged(point, SCENARIOS[name].judge, work) == "new"
        if of_ranks[victim] is None:
            verdicts.append(verdict)
        shutil.rmtree(work)
    return verdicts


def check_survivors(
    outcomes: Sequence[Outcome | None], victim: int, verdict: Verdict, where: str
) -> None:
    """Survivors are told who died, unless everything was done by then."""
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            assert rank == victim, f"{where}: so did rank {rank}"
            continue
        assert outcome.error is None, f"{where}: {outcome.error}"
        error = outcome.value
        if error is None:
            assert verdict == "new", (
                f"{where}: rank {rank} knows nothing of it, and nothing is committed"
            )
            continue
        assert isinstance(error, RankFailedError), f"{where}: rank {rank}: {error!r}"
        assert list(error.failures) == [victim], f"{where}: rank {rank}: {error}"


def check_lost_ranks(name: str, folder: Path, num_ranks: int, num_points: int | None) -> int:
    """Kill each rank at some points, evenly spread, or at all."""
    scenario, prepared = SCENARIOS[name], folder / "prepared"
    prepared.mkdir()
    scenario.prepare(prepared)
    shutil.copytree(prepared, folder / "recorded")
    recordings = run(record_on_rank, num_ranks, name, folder / "recorded", num_ranks)
    losses = []
    for victim, calls in enumerate(recordings):
        points = points_of(calls, exhaustive=False)
        step = 1 if num_points is None else max(1, len(points) // num_points)
        # Another rank dies at other points; rank 0 at the last one too, where all is committed.
        chosen = points[victim % step :: step] + ([points[-1]] if victim == 0 else [])
        losses += [(victim, point) for point in chosen]
    verdicts: list[Verdict] = []
    for start in range(0, len(losses), AT_ONCE):
        verdicts += lose_ranks(name, prepared, num_ranks, losses[start : start + AT_ONCE])
    assert set(verdicts) == {scenario.before, "new"}
    return len(verdicts)


SEVERAL = [name for name, scenario in SCENARIOS.items() if scenario.max_ranks > 1]
SAMPLED = [("save", 3, 1), ("async_manager", 2, 2), ("export_over_another", 2, 2)]
"""Scenario, number of ranks, and at how many points each of them dies."""


@pytest.mark.parametrize(("name", "num_ranks", "num_points"), SAMPLED)
def test_a_rank_dies(name, num_ranks, num_points, tmp_path, record_property):
    record_property("points", check_lost_ranks(name, tmp_path, num_ranks, num_points))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_rank_dies_at_any_call_that_changes_something(name, num_ranks, tmp_path, record_property):
    record_property("points", check_lost_ranks(name, tmp_path, num_ranks, num_points=None))
