"""Hosts of a job, imitated on one machine, that are lost: their ranks are killed, their local
directory is gone.

A host is a directory and the ranks that have it as `local`. A job loads the newest step, saves some
more, and loses hosts at a given moment; the next start finds what is left. Values follow from the
number of the step and of the start that saved it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from distckpt.manager._tiers import _copies
from tests.support.calls import Call, Moment, watched
from tests.support.harness import launched
from tests.support.s3_server import reached_at

Phase = Literal["training", "saving", "copying", "uploading", "restoring"]
NUM_ROWS = 2520
"""Can be divided by any number of ranks up to 10."""
STEP = 10
"""Between two saves."""
GROUP_TIMEOUT = 20.0
MAX_SECONDS = 100.0
"""Seconds after which a rank says where it hangs, and ends."""


class Loss(NamedTuple):
    """The moment at which hosts are lost.

    Attributes:
        hosts: local directories of the lost hosts; without any, the whole job is killed, and all
            directories stay.
        rank: the rank that comes to the moment; it kills all ranks of the hosts.
        phase: what it does then.
        count: number of its file-system call in this phase, from 1; 0 for a delay.
        moment: before or after that call.
        seconds: delay after the phase has begun.
        save: number of the save, from 0, with or after which calls count, or the delay begins.
    """

    hosts: tuple[str, ...]
    rank: int
    phase: Phase
    count: int = 0
    moment: Moment = "before"
    seconds: float = 0.0
    save: int = 0


class Start(NamedTuple):
    """One start of the job.

    Attributes:
        folder: holds the directories of hosts, and the ledger.
        root: the root of the manager, a directory in `folder` or on an object store.
        server: URL of that store; empty without one.
        number: of the start, from 0.
        hosts: the directory of each rank.
        loss: None lets the job end.
        num_columns: of the tensor of rows.
        num_saves: after those that are loaded.
        waits: whether the job waits for copies and uploads after each save.
        settings: of the manager.
    """

    folder: str
    root: str
    server: str
    number: int
    hosts: tuple[str, ...]
    loss: Loss | None
    num_columns: int
    num_saves: int
    waits: bool
    settings: Mapping[str, Any]


class Saved(NamedTuple):
    """A step, and the start that saved it; later starts count as newer."""

    start: int
    step: int


# --- Values ---------------------------------------------------------------------------------------


def values_of(saved: Saved, first: int, last: int, num_columns: int) -> np.ndarray:
    """Return the rows [first, last) of a step."""
    index = np.arange(first * num_columns, last * num_columns, dtype=np.uint64)
    values = index * np.uint64(2654435761) + np.uint64(saved.step * 40503 + saved.start * 69069)
    return (values % np.uint64(1 << 31)).astype(np.int32).reshape(last - first, num_columns)


def state_of(saved: Saved, rank: int, num_ranks: int, num_columns: int) -> dict[str, Any]:
    """Return the state of a rank at a step."""
    count = NUM_ROWS // num_ranks
    rows = values_of(saved, rank * count, (rank + 1) * count, num_columns)
    mean = torch.full((1000,), float(saved.step + saved.start))
    tensor = torch.from_numpy(rows)
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", tensor, (0, rank, num_ranks)),
        "mean": ShardedTensor.from_rank_offsets("mean", mean, replica_id=rank),
        "step": saved.step,
        "start": saved.start,
    }


def empty_state(rank: int, num_ranks: int, num_columns: int) -> dict[str, Any]:
    """Return a state to load into, which equals no step."""
    return state_of(Saved(99, 7), rank, num_ranks, num_columns)


def num_wrong(loaded: Mapping[str, Any], rank: int, num_ranks: int, num_columns: int) -> int:
    """Count the bytes that differ from the values of the step that was loaded."""
    saved = Saved(loaded["start"], loaded["step"])
    count = NUM_ROWS // num_ranks
    rows = values_of(saved, rank * count, (rank + 1) * count, num_columns)
    mean = np.full(1000, saved.step + saved.start, np.float32)
    result = 0
    for name, expected in (("rows", rows), ("mean", mean)):
        value = loaded[name]
        actual = getattr(value, "data", value).numpy()
        result += int((actual.view(np.uint8) != expected.view(np.uint8)).sum())
    return result


# --- On a rank ------------------------------------------------------------------------------------


class Ledger:
    """Lines about what ranks know, in a file that outlives them."""

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/ledger"

    def note(self, event: str, **fields: Any) -> None:
        """Append a line, at once."""
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(fd, line)
        os.close(fd)

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in Path(self._path).read_text().splitlines()]
        return []


class _Warnings(logging.Handler):
    """Notes warnings and errors in the ledger."""

    def __init__(self, ledger: Ledger, **fields: Any) -> None:
        super().__init__(logging.WARNING)
        self._ledger = ledger
        self._fields = fields

    def emit(self, record: logging.LogRecord) -> None:
        self._ledger.note("warning", text=record.getMessage(), **self._fields)


class _Rank:
    """One rank of a start."""

    def __init__(self, rank: int, start: Start) -> None:
        self.rank = rank
        self.start = start
        self.num_ranks = len(start.hosts)
        self.ledger = Ledger(start.folder)
        self.is_restoring = False
        self.loaded = Saved(-1, -1)
        self.num_calls = 0
        self._early: list[tuple[int, Any]] = []
        self._handles: list[Any] = []
        self._manager: CheckpointManager | None = None
        self._pids: list[int] = [0] * self.num_ranks
        dist.all_gather_object(self._pids, os.getpid())

    def run(self) -> None:
        start = self.start
        warnings = _Warnings(self.ledger, number=start.number, rank=self.rank)
        logging.getLogger("distckpt").addHandler(warnings)
        _copies.PIECE_BYTES = 64 << 10
        directory = start.hosts[self.rank]
        with CheckpointManager(start.root, local=directory, peers=1, **start.settings) as manager:
            self._manager = manager
            manager._place.states = _States(self)  # type: ignore[union-attr]
            self._restore(manager)
            for number in range(start.num_saves):
                self._begin("training", number)
                total = torch.ones(1)
                dist.all_reduce(total)
                self._save(manager, number)
                if start.waits:
                    manager.wait(uploaded=True)
            manager.wait(uploaded=True)
            if start.loss is not None:
                # The moment did not come.
                dist.barrier()
                if self.rank == start.loss.rank:
                    self._kill("training")
                dist.barrier()

    def _restore(self, manager: CheckpointManager) -> None:
        self.is_restoring = True
        self._begin("restoring")
        steps = manager.steps()
        if steps:
            size = (self.rank, self.num_ranks, self.start.num_columns)
            result = manager.load(empty_state(*size))
            self.loaded = Saved(result["start"], result["step"])
            self.ledger.note(
                "loaded",
                number=self.start.number,
                saved=self.loaded,
                wrong=num_wrong(result, *size),
                skipped=sorted(manager.skipped),
            )
        else:
            self.ledger.note("nothing", number=self.start.number)
        self.is_restoring = False
        for step, state in self._early:
            self.note_state(step, state)

    def _save(self, manager: CheckpointManager, number: int) -> None:
        step = max(self.loaded.step, 0) + STEP * (number + 1)
        saved = Saved(self.start.number, step)
        self._begin("saving", number)
        state = state_of(saved, self.rank, self.num_ranks, self.start.num_columns)
        handle = manager.save(step, state)
        self._handles.append(handle)

        def note_commit(done: Any) -> None:
            if handle.error() is None:
                self.ledger.note("local", saved=saved)
                self._begin("copying", number)
                self._begin("uploading", number)

        handle.add_done_callback(note_commit)

    def note_state(self, step: int, state: Any) -> None:
        """Note what a manager says about a step."""
        if self.is_restoring:
            # The start that has saved it is not known yet.
            self._early.append((step, state))
            return
        saved = Saved(self.start.number, step)
        if step == self.loaded.step:
            saved = self.loaded
        for tier in ("replicated", "uploaded"):
            if getattr(state, f"is_{tier}"):
                self.ledger.note(tier, saved=saved)

    # --- The moment

    def on_call(self, call: Call, moment: Moment) -> None:
        """Kill where the call of the loss is made."""
        loss = self.start.loss
        assert loss is not None
        if moment != loss.moment or self._phase_of(call) != loss.phase:
            return
        if len(self._handles) < loss.save:
            return
        self.num_calls += 1
        if self.num_calls == loss.count:
            self._kill(loss.phase, f"{moment} {call}")

    def _phase_of(self, call: Call) -> Phase | None:
        if self.is_restoring:
            return "restoring"
        top, _, rest = call.paths[0].partition("/")
        if "step_" not in rest:
            return None
        if top == "root":
            return "uploading"
        if "/.step_" in rest:
            return "saving"
        is_file = "/tensors/" in rest or "/objects/" in rest
        return "copying" if is_file else None

    def _begin(self, phase: Phase, save: int = 0) -> None:
        loss = self.start.loss
        if loss is None or loss.count or self.rank != loss.rank:
            return
        if (phase, save) == (loss.phase, loss.save):
            timer = threading.Timer(loss.seconds, lambda: self._kill(self._doing()))
            timer.daemon = True
            timer.start()

    def _doing(self) -> Phase:
        if self.is_restoring:
            return "restoring"
        if not all(handle.done() for handle in self._handles):
            return "saving"
        newest = len(self._handles) - 1
        states = self._manager.states if self._manager is not None else {}
        state = states.get(max(states, default=-1))
        if state is None:
            return "training"
        if not state.is_replicated:
            return "copying"
        is_due = newest % self.start.settings.get("upload_every", 1) == 0
        return "uploading" if is_due and not state.is_uploaded else "training"

    def _kill(self, phase: Phase, call: str = "") -> None:
        loss = self.start.loss
        assert loss is not None
        self.ledger.note("killed", number=self.start.number, phase=phase, call=call)
        lost = [
            pid
            for pid, host in zip(self._pids, self.start.hosts, strict=True)
            if host in loss.hosts or not loss.hosts
        ]
        for pid in sorted(lost, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)


class _States(dict[int, Any]):
    """The states of steps, each of which is noted."""

    def __init__(self, rank: _Rank) -> None:
        super().__init__()
        self._rank = rank

    def __setitem__(self, step: int, state: Any) -> None:
        super().__setitem__(step, state)
        self._rank.note_state(step, state)


def run_start(rank: int, start: Start) -> None:
    """Be a rank of a start, until the end or the loss."""
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    loss = start.loss
    with contextlib.ExitStack() as watching:
        watching.callback(faulthandler.cancel_dump_traceback_later)
        if start.server:
            watching.enter_context(reached_at(start.server))
        this = _Rank(rank, start)
        if loss is not None and loss.count and loss.rank == rank:
            watching.enter_context(watched(f"{start.folder}/data", this.on_call))
        this.run()


# --- In the test ----------------------------------------------------------------------------------


class Left(NamedTuple):
    """The steps that are left on disk, as their files say.

    Attributes:
        whole: the step of the newest one whose files are all there; None without one.
        partial: steps that are newer, of which some files are there.
    """

    whole: int | None
    partial: set[int]


def left_on_disk(folder: str | os.PathLike[str], root: str) -> Left:
    """Find the newest step whose files are all there, over the hosts and the root together."""
    wanted: dict[tuple[int, int, str], dict[str, int]] = {}
    there: dict[tuple[int, int, str], dict[str, int]] = {}
    for place in {f"{folder}/data", root}:
        files, path = fsspec.core.url_to_fs(place)
        files.invalidate_cache()
        for marker in files.glob(f"{path}/**/step_*/metadata.json"):
            if any(part.startswith(".") for part in marker.split("/")):
                continue
            fields = json.loads(files.cat_file(marker))
            note = fields["manager"]
            key = (note["attempt"], note["step"], note["save"])
            step = marker.rpartition("/")[0]
            manifest = load(files.cat_file(f"{step}/{fields['manifest']['name']}"))
            for name, size, *_ in json.loads(bytes(manifest["json"]))["files"]:
                # A store tells apart what several saves write.
                name_on_hosts = re.sub(r"-[0-9a-f]{16}/", "/", name)
                wanted.setdefault(key, {})[name_on_hosts] = size
                if files.exists(f"{step}/{name}") and files.size(f"{step}/{name}") == size:
                    there.setdefault(key, {})[name_on_hosts] = size
    partial = set()
    for key in sorted(wanted, reverse=True):
        if there.get(key) == wanted[key]:
            return Left(key[1], partial)
        partial.add(key[1])
    return Left(None, partial)


def run_until_loss(start: Start, survivors_end: bool) -> None:
    """Run a start until its hosts are lost, and all other ranks have ended or are killed."""
    loss = start.loss
    assert loss is not None
    lost = [rank for rank, host in enumerate(start.hosts) if host in loss.hosts or not loss.hosts]
    others = sorted(set(range(len(start.hosts))) - set(lost))
    with launched(run_start, len(start.hosts), start, group_timeout=GROUP_TIMEOUT) as launch:
        launch.wait_for_end(*lost)
        for host in loss.hosts:
            shutil.rmtree(host)
        # While torch makes a group, it notices a lost rank only after a multiple of its timeout.
        if survivors_end and others and loss.phase != "restoring":
            # As with torchrun, which ends all ranks after one has failed.
            launch.wait_for_any_end(*others)
        launch.kill(*others)
        for rank, outcome in enumerate(launch.outcomes()):
            if rank in lost and outcome is not None:
                raise AssertionError(f"rank {rank} was not killed: {outcome.error}")


def run_to_end(start: Start) -> None:
    """Run a start that loses no host."""
    with launched(run_start, len(start.hosts), start, group_timeout=GROUP_TIMEOUT) as launch:
        launch.values()


@contextlib.contextmanager
def loaded_alone(location: str, num_columns: int) -> Iterator[dict[str, Any]]:
    """Yield a step that this process has loaded alone, without a manager."""
    yield distckpt.load(empty_state(0, 1, num_columns), location)


def newest(lines: Sequence[Mapping[str, Any]], *events: str) -> Saved:
    """Return the newest step of which some rank has noted one of these events."""
    found = [Saved(*line["saved"]) for line in lines if line["event"] in events]
    return max(found, default=Saved(-1, -1))
