"""Hosts are lost with their local directories, at any moment: the newest step that has copies comes
back, bit by bit, at any number of ranks.

Four hosts are imitated by directories. Losses follow one another: a job that has loaded what the
last loss left goes on, and loses hosts itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from distckpt import CheckpointManager, ShardedTensor
from tests.support.harness import ask_parent, launched, run
from tests.support.lost_hosts import (
    Ledger,
    Left,
    Loss,
    Phase,
    Saved,
    Start,
    left_on_disk,
    loaded_alone,
    newest,
    num_wrong,
    run_to_end,
    run_until_loss,
)
from tests.support.s3_server import reached_at

PHASES: tuple[Phase, ...] = ("training", "saving", "copying", "uploading", "restoring")
SHARES = (1, 3, 3, 3, 3)
NUM_CALLS = {"training": 1, "saving": 100, "copying": 60, "uploading": 70, "restoring": 60}
"""About how many file-system calls a rank makes in a phase."""
MAX_SECONDS = 0.15
LENGTH = 10
"""Losses of a long chain, each of which takes 1 to 3 seconds."""
SMALL = 8
LARGE = 512
"""Columns of 2520 rows of four bytes."""


class Report(NamedTuple):
    """The outcome of one loss."""

    phase: Phase
    is_delay: bool
    sizes: tuple[int, int]
    num_lost: int
    left: Left
    loaded: Saved
    promised: Saved
    uploaded: Saved
    wrong: int


class Chain:
    """Starts of one job, each of which loses hosts.

    Args:
        folder: for all files.
        seed: of all that is random.
        num_lost: hosts that are lost together.
        root: of the manager; a directory in the folder by default.
        server: URL of the store that the root is in.
    """

    def __init__(
        self, folder: Path, seed: int, num_lost: int = 1, root: str = "", server: str = ""
    ) -> None:
        self._folder = folder
        self._server = server
        self._root = root or f"{folder}/data/root"
        self._random = random.Random(seed)
        self._num_lost = num_lost
        self._num_hosts = 0
        self._number = 0
        self._hosts = [self._new_host() for _ in range(4)]
        self._columns = self._random.choice((SMALL, SMALL, LARGE))
        self._settings = {
            "upload_every": self._random.choice((1, 2, 4)),
            "keep_local": self._random.choice((1, 2)),
            "keep_last": 3,
            "timeout": 30.0,
        }
        self._ledger = Ledger(str(folder))
        self._num_lines_at_loss = 0
        self._pending: list[Any] = []
        self.reports: list[Report] = []

    def lose(self, phase: Phase, count: int | None = None, seconds: float | None = None) -> None:
        """Start, and lose hosts in a phase: at its n-th call, after seconds, or at random.

        If that moment does not come, they are lost after all copies and uploads.
        """
        if phase == "restoring":
            # All processes end, and no host is lost: a loss would count as a second one.
            self._start("saving", [], None, None)
        self._start(phase, self._random.sample(self._hosts, self._num_lost), count, seconds)

    def lose_anywhere(self) -> None:
        """Start, and lose hosts at a random moment."""
        (phase,) = self._random.choices(PHASES, SHARES)
        self.lose(phase)

    def end(self) -> None:
        """Start once more, end as a job ends, and load the newest step alone."""
        start = self._new_start(None)
        run_to_end(start)
        self._check_loaded(start)
        saved = newest(self._ledger.lines(), "local")
        location = f"{self._root}/step_{saved.step:08d}"
        with loaded_alone(location, self._columns) as loaded:
            assert (loaded["start"], loaded["step"]) == saved
            assert num_wrong(loaded, 0, 1, self._columns) == 0

    def _new_host(self) -> str:
        self._num_hosts += 1
        directory = f"{self._folder}/data/host{self._num_hosts}"
        os.makedirs(directory)
        return directory

    def _new_start(self, loss: Loss | None, ranks: Sequence[str] = ()) -> Start:
        ranks = ranks or self._ranks()
        start = Start(
            str(self._folder),
            self._root,
            self._server,
            self._number,
            tuple(ranks),
            loss,
            self._columns,
            self._random.choice((3, 4)),
            self._random.random() < 0.5,
            self._settings,
        )
        self._number += 1
        return start

    def _ranks(self) -> list[str]:
        ranks = []
        self._random.shuffle(self._hosts)
        for host in self._hosts:
            ranks += [host] * self._random.choice((1, 1, 2))
        if self._random.random() < 0.3:
            # Ranks of a host need not follow one another.
            self._random.shuffle(ranks)
        return ranks

    def _start(
        self, phase: Phase, victims: Sequence[str], count: int | None, seconds: float | None
    ) -> None:
        ranks = self._ranks()
        loss = self._loss(phase, victims, ranks, count, seconds)
        start = self._new_start(loss, ranks)
        where = f"start {start.number} of {self._folder}: {start}"
        survivors_end = self._random.random() < 0.1
        try:
            run_until_loss(start, survivors_end)
            self._check_loaded(start)
            self._note_loss(start)
        except AssertionError as error:
            raise AssertionError(f"{where}\n{error}") from error

    def _loss(
        self,
        phase: Phase,
        victims: Sequence[str],
        ranks: Sequence[str],
        count: int | None,
        seconds: float | None,
    ) -> Loss:
        choice = self._random
        candidates = [rank for rank, host in enumerate(ranks) if host in (victims or ranks)]
        rank = choice.choice(candidates)
        if count is None and seconds is None and choice.random() < 0.6 and phase != "training":
            count = 1 + int(choice.random() ** 2 * NUM_CALLS[phase])
        if seconds is None:
            seconds = choice.random() * MAX_SECONDS
        save = 0 if phase == "restoring" else choice.choice((0, 1, 1, 2))
        moment = choice.choice(("before", "after"))
        return Loss(tuple(victims), rank, phase, count or 0, moment, seconds, save)

    def _note_loss(self, start: Start) -> None:
        """Note what must come back, and go on with other hosts."""
        loss = start.loss
        assert loss is not None
        lines = self._ledger.lines()
        own = [line for line in lines if line.get("number") == start.number]
        (killed,) = [line for line in own if line["event"] == "killed"]
        for line in own[: own.index(killed)]:
            assert "is not saved to the hosts" not in line.get("text", ""), line
        promised = uploaded = newest(lines, "uploaded")
        since = lines[self._num_lines_at_loss :]
        if not loss.hosts:
            promised = max(newest(since, "local", "loaded"), uploaded)
        elif len(loss.hosts) == 1:
            promised = max(newest(since, "replicated"), uploaded)
        left = left_on_disk(self._folder, self._root)
        phase = killed["phase"]
        self._pending.append((loss, phase, len(start.hosts), uploaded, left, promised))
        if loss.hosts:
            self._num_lines_at_loss = len(lines)
            self._replace(loss.hosts)

    def _replace(self, lost: Sequence[str]) -> None:
        """Go on with as many hosts as before, fewer, or one more."""
        self._hosts = [host for host in self._hosts if host not in lost]
        num_left = len(self._hosts)
        num_new = self._random.choice((0, len(lost), len(lost), len(lost) + 1))
        for _ in range(min(5, max(3, num_left + num_new)) - num_left):
            self._hosts.append(self._new_host())

    def _check_loaded(self, start: Start) -> None:
        """Compare what a start has loaded with what the losses before have left."""
        lines = [line for line in self._ledger.lines() if line.get("number") == start.number]
        loaded = [line for line in lines if line["event"] == "loaded"]
        if not self._pending:
            assert not loaded
            return
        *_, left, promised = self._pending[-1]
        is_nothing = not loaded and any(line["event"] == "nothing" for line in lines)
        if is_nothing:
            assert left.whole is None, f"nothing is loaded, {left.whole} is there"
            assert promised == Saved(-1, -1), f"nothing is loaded, {promised} was promised"
        for line in loaded:
            saved = Saved(*line["saved"])
            assert line["wrong"] == 0, line
            assert saved >= promised, f"{saved} is loaded, {promised} was promised"
            assert saved.step == left.whole, f"{saved} is loaded, {left.whole} is whole"
            assert left.partial <= set(line["skipped"]), f"{line} does not name {left.partial}"
        if loaded or is_nothing:
            self._report(start, loaded)

    def _report(self, start: Start, loaded: Sequence[Any]) -> None:
        saved = Saved(-1, -1)
        if loaded:
            saved = Saved(*loaded[0]["saved"])
        for loss, phase, num_ranks, uploaded, left, promised in self._pending:
            self.reports.append(
                Report(
                    phase,
                    not loss.count,
                    (num_ranks, len(start.hosts)),
                    len(loss.hosts),
                    left,
                    saved,
                    promised,
                    uploaded,
                    sum(line["wrong"] for line in loaded),
                )
            )
        self._pending = []


def size_of(report: Report) -> str:
    before, after = report.sizes
    if before == after:
        return "same"
    return "smaller" if after < before else "larger"


def summary_of(reports: Sequence[Report]) -> dict[str, Any]:
    """Count losses by phase and world size."""
    hosts = [report for report in reports if report.num_lost]
    return {
        "losses": len(hosts),
        "whole jobs killed": len(reports) - len(hosts),
        "phases": dict(Counter(report.phase for report in hosts)),
        "sizes": dict(Counter(size_of(report) for report in hosts)),
        "exact": sum(not report.is_delay for report in hosts),
        "newer than uploaded": sum(report.loaded > report.uploaded for report in hosts),
        "promised by copies": sum(report.promised > report.uploaded for report in hosts),
        "fell back": sum(bool(report.left.partial) for report in hosts),
        "nothing yet": sum(report.loaded.step < 0 for report in hosts),
        "wrong": sum(report.wrong for report in reports),
    }


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_is_lost(phase, tmp_path):
    chain = Chain(tmp_path, seed=PHASES.index(phase))
    chain.lose("training", count=1)
    chain.lose(phase, count=3)
    chain.end()
    (first, *_, last) = [report for report in chain.reports if report.num_lost]
    assert (first.phase, last.phase) == ("training", phase)
    assert first.promised > Saved(0, 0)


def test_two_hosts_are_lost_together(tmp_path):
    chain = Chain(tmp_path, seed=11, num_lost=2)
    chain.lose("training", count=1)
    chain.lose("copying", count=3)
    chain.end()
    assert all(report.loaded >= report.uploaded > Saved(0, 0) for report in chain.reports)


def sweep(folder: Path, seed: int, *args: Any) -> list[Report]:
    chain = Chain(folder, seed, *args)
    chain.lose("training")
    for _ in range(LENGTH - 1):
        chain.lose_anywhere()
    chain.end()
    return chain.reports


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(30))
def test_any_host_is_lost_at_any_moment(seed, tmp_path, record_property):
    record_property("summary", json.dumps(summary_of(sweep(tmp_path, seed, 1))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_any_two_hosts_are_lost_at_any_moment(seed, tmp_path, record_property):
    record_property("summary", json.dumps(summary_of(sweep(tmp_path, 1000 + seed, 2))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_any_host_is_lost_beside_an_object_store(seed, tmp_path, server, bucket, record_property):
    with reached_at(server):
        reports = sweep(tmp_path, 2000 + seed, 1, f"{bucket}/run", server)
    record_property("summary", json.dumps(summary_of(reports)))


# --- What was found -------------------------------------------------------------------------------


def rows_with(step, rank, num_rows):
    rows = torch.full((num_rows,), float(step))
    return {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, 2)), "step": step}


def save_faster_than_copies(rank, folder):
    """Copy a large file at once, and no other one for minutes after it."""
    settings = {"peers": 1, "keep_local": 1, "upload_every": 9, "peer_bandwidth": 20_000}
    with CheckpointManager(f"{folder}/root", local=f"{folder}/host{rank}", **settings) as manager:
        manager.save(10, rows_with(10, rank, 16))
        manager.wait(uploaded=True)
        manager.save(20, rows_with(20, rank, 1 << 20))
        manager.wait(uploaded=True)
        assert manager.states[20].is_replicated
        for step in (30, 40, 50):
            manager.save(step, rows_with(step, rank, 16)).result()
        ask_parent()


def load_on_hosts(rank, folder, names, num_rows):
    directory = f"{folder}/{names[rank]}"
    with CheckpointManager(f"{folder}/root", local=directory, peers=1) as manager:
        loaded = manager.load(rows_with(0, rank, num_rows))
        assert (loaded["rows"].data == loaded["step"]).all()
        return loaded["step"], sorted(manager.skipped)


def test_the_newest_step_with_copies_stays_until_a_newer_one_has_some(tmp_path):
    with launched(save_faster_than_copies, 2, str(tmp_path)) as launch:
        for rank in range(2):
            launch.wait_for_signal(rank)
        launch.kill(0, 1)
    shutil.rmtree(tmp_path / "host1")
    args = (str(tmp_path), ["host0", "host2"], 1 << 20)
    assert run(load_on_hosts, 2, *args) == [(20, [30, 40, 50])] * 2


def save_without_upload(rank, folder):
    """Leave steps 10 and 20 with copies on two hosts, of which only the first is in the root."""
    manager = CheckpointManager(
        f"{folder}/root", local=f"{folder}/host{rank}", peers=1, upload_every=9
    )
    for step in (10, 20):
        manager.save(step, rows_with(step, rank, 16))
        manager.wait(uploaded=True)
    manager._close(has_failed=True)


def load_and_save_again(rank, folder, names):
    directory = f"{folder}/{names[rank]}"
    manager = CheckpointManager(f"{folder}/root", local=directory, peers=1, upload_every=9)
    first = manager.load(rows_with(0, rank, 16))["step"]
    manager.save(first + 10, rows_with(first + 10, rank, 16)).result()
    manager.wait(uploaded=True)
    manager._close(has_failed=True)
    return first, {step: (state.tier, state.problem) for step, state in manager.states.items()}


def test_a_step_is_saved_again_over_a_copy_that_was_interrupted(tmp_path):
    run(save_without_upload, 2, str(tmp_path))
    for path in tmp_path.glob("host*/run-*/step_00000020/tensors/shard-00001-*"):
        path.rename(path.with_name(f".{path.name}.0123456789abcdef"))
    results = run(load_and_save_again, 2, str(tmp_path), ["host0", "host1"])
    states = {10: ("uploaded", None), 20: ("uploaded", None)}
    assert results == [(10, states)] * 2
    names = {path.name for path in tmp_path.glob("host*/run-*/step_00000020/tensors/*")}
    assert not any(name.startswith(".") for name in names)


def load_on_an_empty_host(rank, folder):
    local = Path(folder, f"new{rank}" if rank else "host0")
    with CheckpointManager(f"{folder}/root", local=local, peers=1) as manager:
        manager.load(rows_with(0, rank, 16))
        # Copies and uploads go on beside saves, which may clear away what they have begun.
        names = {path.name for path in local.glob("run-*/step_00000020/*.*")}
        manager.save(30, rows_with(30, rank, 16))
        manager.wait(uploaded=True)
        return names, manager.states[20].problem


def test_an_empty_host_has_the_manifest_before_copies_and_uploads_begin(tmp_path):
    run(save_without_upload, 2, str(tmp_path))
    shutil.rmtree(tmp_path / "host1")
    names, problem = run(load_on_an_empty_host, 2, str(tmp_path))[1]
    assert names == {"metadata.json", "manifest.safetensors"}
    assert problem is None or "given up" in problem


def save_faster_than_uploads(rank, folder):
    settings = {"peers": 1, "upload_bandwidth": 60_000, "peer_bandwidth": 60_000}
    with CheckpointManager(f"{folder}/root", local=f"{folder}/host{rank}", **settings) as manager:
        for step in (10, 20, 30):
            manager.save(step, rows_with(step, rank, 30_000)).result()
        manager.wait(uploaded=True)
        return manager.states[20].problem, manager.states[30]


def test_a_step_that_is_given_up_holds_up_no_later_one(tmp_path):
    for problem, last in run(save_faster_than_uploads, 2, str(tmp_path)):
        assert "given up" in problem
        assert last.is_replicated
        assert last.is_uploaded
        assert last.problem is None
