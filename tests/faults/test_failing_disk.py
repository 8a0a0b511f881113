"""A disk that is full, or fails: nothing is committed and all ranks say why, or all is right.

Each file-system call in turn reports an error or moves only some of its bytes, on one rank.
Afterwards the process group works, what was there before has not changed, and the next save
succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, RankFailedError, ShardedTensor
from tests.support.calls import READS, WRITES, Call, recorded, watched
from tests.support.disk import tree_of
from tests.support.disks import limited, loop_disk, small_disk
from tests.support.harness import Launch, ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.readings import READINGS
from tests.support.scenarios import SCENARIOS, judge_checkpoint, old_checkpoint, save
from tests.support.states import state_of, value_of

SHORT = 0
"""Stands for a read or write that moves half of its bytes."""
FAULTS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "EINTR")} | {
    "SHORT": SHORT
}
MAX_TOGETHER = 50
"""So many failures the same ranks live through."""
STRIDE = 18
"""The default run takes one of so many calls, with one fault each."""


class Injection(NamedTuple):
    """What happens at a call of one rank."""

    number: int
    fault: int


def every_call(num_calls: int, fault: int) -> list[Injection]:
    return [Injection(number, fault) for number in range(1, num_calls + 1)]


def sampled(num_calls: int, seed: int) -> list[Injection]:
    """Take some calls, with faults that take turns."""
    faults, numbers = list(FAULTS.values()), range(1 + seed % STRIDE, num_calls + 1, STRIDE)
    return [
        Injection(number, faults[index % len(faults)]) for index, number in enumerate(numbers, seed)
    ]


@contextlib.contextmanager
def failing(folder: Path, injection: Injection) -> Iterator[list[Call]]:
    """Have a call of this process fail; what is handed out will hold the call."""
    hit: list[Call] = []

    def on_call(call: Call, moment: str) -> int | None:
        if call.number != injection.number or moment != "before":
            return None
        hit.append(call)
        if injection.fault != SHORT:
            # As the system does: an error of a descriptor names no file.
            names = call.paths[:1] if call.fd < 0 else ()
            raise OSError(injection.fault, os.strerror(injection.fault), *names)
        return max(1, call.length // 2) if call.name in (*READS, *WRITES) else None

    with watched(folder, on_call):
        yield hit


class Result(NamedTuple):
    """What came of an operation: the error of each rank, and the calls that were recorded or failed
    on the victim.
    """

    errors: list[BaseException | None]
    calls: list[Call]


class Ranks(NamedTuple):
    """Running ranks, one of which is to suffer."""

    launch: Launch
    num_ranks: int
    victim: int

    def do(
        self, function: Callable[[Path, int, int], object], injection: Injection | None = None
    ) -> Result:
        """Call `function(folder, rank, num_ranks)` on all ranks, and record the calls of the victim
        or let one fail.
        """
        for rank in range(self.num_ranks):
            self.launch.answer(rank, (function, injection))
        results = [self.launch.wait_for_signal(rank) for rank in range(self.num_ranks)]
        return Result([error for error, _ in results], results[self.victim][1])


@contextlib.contextmanager
def ranks_at_work(folder: Path, num_ranks: int, victim: int) -> Iterator[Ranks]:
    with launched(obey, num_ranks, folder, num_ranks, victim) as launch:
        for rank in range(num_ranks):
            launch.wait_for_signal(rank)
        yield Ranks(launch, num_ranks, victim)
        for rank in range(num_ranks):
            launch.answer(rank, None)
        launch.values()


def obey(rank: int, folder: Path, num_ranks: int, victim: int) -> None:
    """Do what the test orders, one thing after the other."""
    result: object = None
    while (order := ask_parent(result)) is not None:
        function, injection = order
        calls: list[Call] = []
        with contextlib.ExitStack() as stack:
            if rank == victim:
                calls = stack.enter_context(
                    recorded(folder) if injection is None else failing(folder, injection)
                )
            error = error_of(function, folder, rank, num_ranks)
        assert sum_over_ranks(1) == num_ranks, "the process group does not work"
        result = error, [call._replace(buffers=(), outcome=None) for call in calls]


def copy_anew(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def has_failed(
    result: Result, victim: int, fault: int, kind: type[BaseException], where: str
) -> bool:
    """Tell whether an operation failed; it does so on all ranks or on none, and all say who failed,
    and of what.
    """
    if result.errors == [None] * len(result.errors):
        return False
    assert fault != SHORT, f"{where}: {result.errors}"
    for error in result.errors:
        cause = error
        if len(result.errors) > 1:
            assert isinstance(error, RankFailedError), f"{where}: {result.errors}"
            assert list(error.failures) == [victim], f"{where}: {error}"
            assert f"rank {victim}" in str(error), where
            cause = error.failures[victim]
        assert isinstance(cause, kind), f"{where}: {cause!r}"
        assert os.strerror(fault) in str(error), f"{where}: {error}"
    return True


# --- Saves ----------------------------------------------------------------------------------------


def check_injections(
    name: str, folder: Path, num_ranks: int, victim: int, choose: Callable[[int], list[Injection]]
) -> int:
    """Let one call of a rank fail after the other; returns how many."""
    prepared, work = folder / "prepared", folder / "work"
    prepared.mkdir()
    SCENARIOS[name].prepare(prepared)
    copy_anew(prepared, work)
    with ranks_at_work(work, num_ranks, victim) as ranks:
        injections = choose(len(ranks.do(SCENARIOS[name].run).calls))
    seen: Counter[bool] = Counter()
    for start in range(0, len(injections), MAX_TOGETHER):
        seen += inject(
            name, prepared, work, num_ranks, victim, injections[start : start + MAX_TOGETHER]
        )
    assert seen[True] > 0 or {injection.fault for injection in injections} == {SHORT}
    return seen.total()


def inject(
    name: str,
    prepared: Path,
    work: Path,
    num_ranks: int,
    victim: int,
    injections: Sequence[Injection],
) -> Counter[bool]:
    """Have the same ranks suffer one failure after the other; returns how often an operation failed
    or did not.
    """
    scenario, before = SCENARIOS[name], tree_of(prepared)
    seen: Counter[bool] = Counter()
    with ranks_at_work(work, num_ranks, victim) as ranks:
        for injection in injections:
            copy_anew(prepared, work)
            result = ranks.do(scenario.run, injection)
            where = (
                f"{injection} on rank {victim} of {num_ranks}: {', '.join(map(str, result.calls))}"
            )
            failed = has_failed(result, victim, injection.fault, OSError, where)
            seen[failed] += 1
            check_left(name, work, before, failed, where)
            # What was interrupted may be done once more.
            is_harmless = injection.fault in (SHORT, errno.EINTR)
            assert failed or is_harmless or not any(map(must_succeed, result.calls)), where
            assert ranks.do(scenario.run_again).errors == [None] * num_ranks, where
            assert judged(name, work, where) == "new", where
    return seen


def must_succeed(call: Call) -> bool:
    """Tell whether there is no good save without this call, so that its failure must not be
    ignored.
    """
    return call.name in (*WRITES, "fsync", "mkdir") and ".tmp-" in call.paths[0]


def check_left(name: str, work: Path, before: dict[str, bytes], failed: bool, where: str) -> None:
    """After a failure everything is as it was; what an unfinished save had left may have been moved
    aside.
    """
    assert judged(name, work, where) == (SCENARIOS[name].before if failed else "new"), where
    if failed and name != "save_over_unfinished":
        assert tree_of(work) == before, f"{where}: something was left or changed"


def judged(name: str, work: Path, where: str) -> str:
    try:
        return SCENARIOS[name].judge(work)
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


SEVERAL = [name for name, scenario in SCENARIOS.items() if scenario.max_ranks > 1]


@pytest.mark.parametrize(("seed", "name"), list(enumerate(SCENARIOS)))
def test_a_call_fails(seed, name, tmp_path, record_property):
    record_property("points", check_injections(name, tmp_path, 1, 0, partial(sampled, seed=seed)))


@pytest.mark.parametrize(
    ("name", "num_ranks", "victim"),
    [
        ("save", 3, 2),
        ("overwrite", 2, 0),
        ("async_manager", 2, 1),
        ("async_overwrite", 2, 0),
        ("export", 2, 1),
    ],
)
def test_a_call_fails_on_one_of_several_ranks(name, num_ranks, victim, tmp_path, record_property):
    record_property(
        "points", check_injections(name, tmp_path, num_ranks, victim, partial(sampled, seed=victim))
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_fails(name, fault, tmp_path, record_property):
    record_property(
        "points", check_injections(name, tmp_path, 1, 0, partial(every_call, fault=FAULTS[fault]))
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("name", SEVERAL)
def test_every_call_of_one_of_several_ranks_fails(
    name, num_ranks, victim, tmp_path, record_property
):
    record_property(
        "points",
        check_injections(name, tmp_path, num_ranks, victim, partial(every_call, fault=errno.EIO)),
    )


# --- Loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "victim"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("name", READINGS)
def test_a_read_fails(name, num_ranks, victim, tmp_path, record_property):
    """What comes out is right, as the reading itself checks, or an error."""
    reading = READINGS[name]
    if num_ranks > reading.max_ranks:
        pytest.skip("one process reads")
    reading.prepare(tmp_path)
    seen: Counter[bool] = Counter()
    with ranks_at_work(tmp_path, num_ranks, victim) as ranks:
        num_calls = len(ranks.do(reading.run).calls)
        for injection in [*every_call(num_calls, errno.EIO), *every_call(num_calls, SHORT)]:
            result = ranks.do(reading.run, injection)
            where = (
                f"{injection} on rank {victim} of {num_ranks}: {', '.join(map(str, result.calls))}"
            )
            seen[
                has_failed(
                    result, victim, injection.fault, (OSError, CorruptCheckpointError), where
                )
            ] += 1
    assert seen[True] > 0
    record_property("points", seen.total())


# --- Real disks, real limits, real signals --------------------------------------------------------


def fill(ballast: Path, num_free: int) -> None:
    """Take up a disk but for some bytes."""
    ballast.unlink(missing_ok=True)
    disk = os.statvfs(ballast.parent)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - num_free)


overwrite = partial(save, overwrite=True)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_disk_with_any_number_of_free_pages(num_ranks, tmp_path):
    """Space runs out for a directory, the header of a shard file, its data, the manifest or the
    marker.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = [page * pages for pages in range(7 * num_ranks + 6)]
    failed = []
    with small_disk(tmp_path, 64 * page * num_ranks):
        old_checkpoint(tmp_path)
        with ranks_at_work(tmp_path, num_ranks, 0) as ranks:
            for num_free in sizes:
                fill(tmp_path / "ballast", num_free)
                before = tree_of(tmp_path)
                errors = ranks.do(overwrite).errors
                failed.append(errors[0] is not None)
                if failed[-1]:
                    check_all_full(errors)
                    assert tree_of(tmp_path) == before
            assert judge_checkpoint(tmp_path) == "new"
            (tmp_path / "ballast").unlink()
            assert ranks.do(overwrite).errors == [None] * num_ranks
    num_failed = sum(failed)
    assert 2 < num_failed < len(sizes)
    assert failed == [True] * num_failed + [False] * (len(sizes) - num_failed)


def export(folder: Path) -> None:
    distckpt.consolidate(folder / "checkpoint", folder / "export", keys="rows", overwrite=True)


@pytest.mark.parametrize("rounds", [8, pytest.param(120, marks=pytest.mark.slow)])
def test_an_ext4_disk_with_little_space(rounds, tmp_path):
    disk, random, failed = tmp_path / "disk", Random(5), []
    disk.mkdir()
    with loop_disk("ext4", disk, tmp_path / "image", 16 << 20):
        distckpt.save(state_of(0), disk / "checkpoint")
        export(disk)
        value = 0
        for number in range(rounds):
            space = os.statvfs(disk)
            num_bytes = space.f_bfree * space.f_frsize - random.randrange(150 << 10, 1100 << 10)
            (disk / "ballast").write_bytes(bytes(num_bytes))
            before = tree_of(disk)
            try:
                if number % 2:
                    export(disk)
                else:
                    distckpt.save(state_of(number), disk / "checkpoint", overwrite=True)
                    value = number
                failed.append(0)
            except OSError as error:
                failed.append(error.errno)
            if failed[-1]:
                assert tree_of(disk) == before
            assert value_of(distckpt.load(state_of(-1), disk / "checkpoint")) == value
            assert sorted(os.listdir(disk)) == ["ballast", "checkpoint", "export", "lost+found"]
            (disk / "ballast").unlink()
            os.sync()
    assert set(failed) == {0, errno.ENOSPC}


def check_all_full(errors: Sequence[BaseException | None]) -> None:
    """Which ranks find no space is chance, but all know the same of it."""
    for error in errors:
        failures = error.failures if isinstance(error, RankFailedError) else {0: error}
        assert {cause.errno for cause in failures.values()} == {errno.ENOSPC}, errors
        assert str(error) == str(errors[0])
        assert os.strerror(errno.ENOSPC) in str(error)


def save_too_much(folder: Path, rank: int, num_ranks: int) -> None:
    rows = torch.ones(1 << 18).view(2, -1)
    distckpt.save(
        {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks))},
        folder / "checkpoint",
    )


def export_too_much(folder: Path, rank: int, num_ranks: int) -> None:
    distckpt.consolidate(folder.parent / "source" / "checkpoint", folder / "export")


@pytest.mark.parametrize("verb", [save_too_much, export_too_much])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_space_is_compared_with_the_plan_before_anything_is_written(num_ranks, verb, tmp_path):
    """What a rank writes would fit, but not what all of them write."""
    disk, num_bytes = tmp_path / "disk", num_ranks << 20
    for name in ("disk", "source"):
        (tmp_path / name).mkdir()
    run(call, num_ranks, save_too_much, tmp_path / "source", num_ranks)
    with small_disk(disk, num_bytes - (1 << 16)), ranks_at_work(disk, num_ranks, 0) as ranks:
        for error in ranks.do(verb).errors:
            cause = error.failures[0] if isinstance(error, RankFailedError) else error
            assert cause.errno == errno.ENOSPC
            match = re.search(
                rf"(\d+) bytes are to be written, and host {os.uname().nodename!r} reports (\d+)",
                str(error),
            )
            assert int(match[1]) >= num_bytes > int(match[2])
            assert str(disk) in str(error)
        assert os.listdir(disk) == []


def call(rank: int, verb: Callable[[Path, int, int], object], folder: Path, num_ranks: int) -> None:
    verb(folder, rank, num_ranks)


@pytest.mark.parametrize("figures", [(0, 0), (1 << 20, 0), (1 << 20, 1 << 40)])
def test_file_systems_that_do_not_know_their_space(figures, tmp_path, monkeypatch):
    num_blocks, num_free = figures
    real = os.statvfs(tmp_path)
    unknown = os.statvfs_result((4096, 4096, num_blocks, num_free, num_free, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: unknown)
    save(tmp_path, 0, 1)
    assert judge_checkpoint(tmp_path) == "new"


def overwrite_within_limit(folder: Path, rank: int, num_ranks: int, *, num_bytes: int) -> None:
    """Save while the files of the last rank may be so large."""
    limit = num_bytes if rank == num_ranks - 1 else resource.RLIM_INFINITY
    with limited(resource.RLIMIT_FSIZE, limit):
        overwrite(folder, rank, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_that_may_not_grow(num_ranks, tmp_path):
    """The system ends a write in the middle (SIGXFSZ, which Python ignores, and EFBIG)."""
    old_checkpoint(tmp_path)
    before = tree_of(tmp_path)
    with ranks_at_work(tmp_path, num_ranks, 0) as ranks:
        for num_bytes in (0, 1, 100, 1000, 4095, 4096, 4097, 4200):
            result = ranks.do(partial(overwrite_within_limit, num_bytes=num_bytes))
            assert has_failed(
                result, num_ranks - 1, errno.EFBIG, OSError, f"{num_bytes} bytes allowed"
            )
            assert tree_of(tmp_path) == before
        assert (
            ranks.do(partial(overwrite_within_limit, num_bytes=1 << 20)).errors
            == [None] * num_ranks
        )
    assert judge_checkpoint(tmp_path) == "new"


def save_among_signals(rank: int, folder: Path) -> int:
    """Signals whose handler does nothing interrupt system calls; returns how many came."""
    count = 0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        overwrite(folder, rank, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return count


def test_signals_interrupt_nothing(tmp_path):
    old_checkpoint(tmp_path)
    assert min(run(save_among_signals, 2, tmp_path)) > 1
    assert judge_checkpoint(tmp_path) == "new"
