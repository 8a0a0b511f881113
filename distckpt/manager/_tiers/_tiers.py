"""The tiers of a manager: its saves, loads and waits with a local directory."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError, RankFailedError
from distckpt._base.options import SaveReport
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._commit import posix
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.planned_save import PlannedSave, SaveRequest
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _rejections as rejections
from distckpt.manager import _steps as steps
from distckpt.manager._root_steps import RootSteps
from distckpt.manager._tiers import _survey as survey
from distckpt.manager._tiers._copies import copy_to_peers, deliveries
from distckpt.manager._tiers._host_save import HostSave
from distckpt.manager._tiers._lane import Pace, PassedOverError
from distckpt.manager._tiers._local_steps import ATTEMPT, LocalRoot
from distckpt.manager._tiers._meeting import Meeting, TierSettings, agree
from distckpt.manager._tiers._run_files import RUN, StepState, write_state
from distckpt.manager._tiers._survey import Passed, Root, SpreadStep, choose
from distckpt.manager._tiers._tier_files import SCHEME, served
from distckpt.manager._tiers._uploads import Progress, planned_upload

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Tiers:
    """The tiers of a manager: local directories, other hosts, and the root.

    Attributes:
        states: the state of each step that this job has saved, or resumed to upload.
    """

    def __init__(self, settings: TierSettings, request: SaveRequest, root_steps: RootSteps) -> None:
        """Start without a look at any tier.

        Args:
            settings: see `TierSettings`.
            request: the request of all saves; its path is the root.
            root_steps: the steps in the root.
        """
        self._settings = settings
        self._request = request
        self._root = os.fspath(request.path)
        self._options = request.options
        self._root_steps = root_steps
        self._met: Meeting | None = None
        self._num_saves = 0
        self._saves: dict[int, str] = {}
        self._last = -1
        # The last step known to survive the loss of a host.
        self._safe = -1
        self.states: dict[int, StepState] = {}
        self._noting = threading.RLock()
        self._upload_pace = Pace(settings.upload_bandwidth)
        self._peer_pace = Pace(settings.peer_bandwidth)

    @property
    def _meeting(self) -> Meeting:
        assert self._met is not None, "ranks have not met yet"
        return self._met

    def meet(self, ranks: Ranks) -> Meeting:
        """Agree about hosts, run and attempt, once.

        Collective operation: all ranks must call it.
        """
        if self._met is None:
            self._met = agree(ranks, self._settings, self._request)
        return self._met

    # --- Save

    def aimed(self, request: SaveRequest, step: int) -> SaveRequest:
        """Return a request for a step in the local directory."""
        return replace(request, path=self._meeting.place.step(step))

    def begin(self, step: int, notes: Sequence[bytes], request: SaveRequest) -> SaveRequest:
        """Return the request with all ranks' notes; for the coordinator.

        Raises:
            CheckpointExistsError: the hosts have the step whole, and it must not be replaced.
        """
        met = self._meeting
        is_there = step in met.whole or step in self._saves
        outcome = "replaced when the new one is complete"
        overwrite = (
            request.overwrite
            or not is_there
            or rejections.warn_of(met.place.location, step, outcome)
        )
        if not overwrite:
            raise posix.already_complete(f"step {step} on the hosts", "pass overwrite=True")
        # Files of a step that hosts do not have whole are no obstacle.
        request = replace(request, overwrite=True)
        # The root may not answer, and training goes on.
        self._root_steps.seen.look_if_it_answers()
        return self._root_steps.noted(step, notes, request)

    def write(self, step: int, ranks: Ranks, save: PlannedSave) -> SaveReport:
        """Write a planned save to all hosts; copies and uploads follow in the background.

        Where a local disk is full or broken, the step goes to the root at once.

        Collective operation: all ranks must call it.
        """
        met = self._meeting
        host_save = HostSave(met.place, step, met.attempt, met.is_leader)
        try:
            report = host_save.write(ranks, save)
        except BaseException as error:
            if not steps.all_find(ranks, error, steps.is_of_the_storage):
                raise
            return self._write_to_root(step, ranks, save, error)
        self._note(step, StepState(is_local=True))
        is_due = self._num_saves % self._settings.upload_every == 0
        self._num_saves += 1
        if met.is_leader:
            with locations.only_logging(f"remove old steps from {met.place.location}"):
                self._remove_old(met.place, step)
        self._queue(step, host_save.name, is_due)
        return report

    def _write_to_root(
        self, step: int, ranks: Ranks, save: PlannedSave, error: BaseException
    ) -> SaveReport:
        if ranks.is_coordinator:
            text = "step %d is not saved to the hosts (%s: %s): it goes to %s at once"
            logger.warning(text, step, type(error).__name__, error, self._root)
        location = steps.step_location(self._root, step)
        self._last = step
        notes = dict(save.request.notes)
        if steps.NOTE in notes:
            # Without the attempt it would be older than all steps on hosts.
            met = self._meeting
            notes[steps.NOTE] = {**notes[steps.NOTE], RUN: met.place.run, ATTEMPT: met.attempt}
        request = replace(save.request, notes=notes)
        save = replace(save, location=location, request=request)
        report = self._root_steps.write(step, ranks, save)
        self._note(step, StepState(is_uploaded=True))
        return report

    def _remove_old(self, place: LocalRoot, last: int) -> None:
        """Remove all but the newest local steps, and the ones to upload; for the leader."""
        held = sorted(place.held(), key=lambda item: (item.attempt, item.step), reverse=True)
        kept = {last, self._safe}
        for lane in (self._meeting.copies, self._meeting.uploads):
            kept |= {lane.running, lane.waiting}
        good = [item for item in held if item.rejection is None]
        for item in good[: self._settings.keep_local]:
            kept.add(item.step)
        for item in held:
            if item.step not in kept:
                place.remove(item.step)

    def _queue(self, step: int, save: str, is_due: bool) -> None:
        """Queue the copies of a step, and its upload if due."""
        met = self._meeting
        self._saves[step] = save
        self._last = step
        if max(met.hosts.peers) >= 0:
            note = partial(self._note_problem, step, "copies")
            met.copies.submit(step, partial(self._copy, step, save), note)
        if is_due:
            note = partial(self._note_problem, step, "uploads")
            met.uploads.submit(step, partial(self._upload, step, save), note)

    @staticmethod
    def check_planned(save: PlannedSave) -> None:
        """Refuse a save of a strategy of the user.

        Raises:
            CheckpointingException: its files need not be apart for each rank.
        """
        if save.prepared.exchanges_in_write:
            raise CheckpointingException(
                "A manager with a local directory stores the built-in format only: leave out "
                "strategy=, or local=."
            )

    # --- States

    def _note(self, step: int, state: StepState, is_seen_here_only: bool = False) -> None:
        """Note the state of a step, for other programs, too."""
        met = self._meeting
        with self._noting:
            self.states[step] = state
            if met.is_leader or is_seen_here_only:
                with locations.only_logging(f"note the state of step {step}"):
                    write_state(met.place.location, step, state)

    def _note_problem(
        self, step: int, lane: str, problem: str, is_seen_here_only: bool = False
    ) -> None:
        with self._noting:
            state = replace(self.states[step], problem=f"{lane}: {problem}")
            self._note(step, state, is_seen_here_only)

    def _note_success(self, step: int, lane: str, **changes: Any) -> None:
        """Note that a step has reached a tier; a problem of another lane stays."""
        with self._noting:
            state = replace(self.states[step], **changes)
            if (state.problem or "").startswith(lane):
                state = replace(state, problem=None)
            self._note(step, state)

    # --- Copies and uploads, in their threads

    def _copy(self, step: int, save: str, ranks: Ranks) -> None:
        met = self._meeting
        spread = survey.spread_step(ranks, met.hosts, met.place, step, save)
        if spread is None:
            return
        stored = self._opened(ranks, spread)
        checksums = {
            stored.manifest.files[number].name for number in stored.manifest.checksum_files
        }
        problems = []
        # Files of checksums come first: the others are compared with them.
        for is_first in (True, False):
            planned = []
            for delivery in deliveries(spread, met.hosts):
                if (delivery.name in checksums) == is_first:
                    planned.append(delivery)
            if planned:
                durable = self._options.durable
                problems += copy_to_peers(ranks, stored, planned, durable, self._peer_pace)
        if problems:
            text = f"{len(problems)} files of step {step} have no copy: {problems[0]}"
            raise PassedOverError(text)
        if spread.is_whole and min(met.hosts.peers) >= 0:
            self._safe = step
            self._note_success(step, "copies", is_replicated=True)

    def _opened(self, ranks: Ranks, spread: SpreadStep) -> StoredCheckpoint:
        """Open a step in the local directory.

        Collective operation: all ranks must call it.
        """
        place = self._meeting.place
        with ranks.phase("open the step"):
            if not place.small_files(spread.step, spread.save):
                raise CheckpointingException(f"{place.location!r} has no manifest of the step")
            return open_checkpoint(Ranks.alone(), place.step(spread.step))

    def _upload(self, step: int, save: str, ranks: Ranks) -> None:
        met = self._meeting
        location = steps.step_location(self._root, step)
        spread = survey.spread_step(ranks, met.hosts, met.place, step, save)
        if spread is None or not spread.is_whole:
            raise PassedOverError("its local files are gone")
        if spread.rejection is not None:
            raise PassedOverError(f"it was rejected: {spread.rejection}")
        stored = self._opened(ranks, spread)
        chosen = survey.shared_out(spread, met.hosts)
        own = [name for name, rank in chosen.items() if rank == ranks.rank]
        note_stall = partial(self._note_problem, step, "uploads", is_seen_here_only=True)
        with Progress(step, self._settings.stall_timeout, note_stall) as progress:
            try:
                pace = self._upload_pace
                planned = planned_upload(
                    ranks.rank, stored, own, location, self._options, progress, pace
                )
                self._root_steps.write(step, ranks, planned)
            except BaseException as error:
                # The next upload finds whole copies, on other hosts.
                if steps.all_find(ranks, error, _is_damage):
                    self._drop_damaged(ranks, step, save)
                raise
        self._note_success(step, "uploads", is_uploaded=True)

    def _drop_damaged(self, ranks: Ranks, step: int, save: str) -> bool:
        """Remove damaged files of a step; return whether there were any.

        Collective operation: all ranks must call it.
        """
        met = self._meeting
        with ranks.phase("look for damaged files") as vote:
            if met.is_leader:
                vote.number = met.place.drop_damaged(step, save)
        return vote.largest > 0

    # --- Load

    def load(
        self,
        ranks: Ranks,
        load_at: Callable[[str], _Result],
        step: int | None,
        skipped: dict[int, str],
    ) -> _Result:
        """Load a step, or the newest that loads, from the nearest tiers.

        Collective operation: all ranks must call it.

        Args:
            ranks: the ranks of the job.
            load_at: loads a step at a location.
            step: None for the newest one that loads.
            skipped: gets the problems of newer steps.

        Raises:
            CheckpointNotFoundError: no step can be loaded, with the problem of each.
        """
        self.meet(ranks)
        passed = Passed(skipped)
        root = Root(self._root)
        while True:
            known, problems = self._decide(ranks, root, passed, step)
            skipped |= problems
            if known is None:
                message = survey.nothing_to_load(self._root, step, passed.problems)
                raise CheckpointNotFoundError(message)
            try:
                result = self._load_spread(ranks, known, load_at)
            except BaseException as error:
                if not steps.all_find(ranks, error, _is_damage):
                    raise
                self._note_damage(ranks, known, passed, error)
                continue
            if known.hosts:
                self._resume(known)
            return result

    def _decide(
        self, ranks: Ranks, root: Root, passed: Passed, step: int | None = None
    ) -> tuple[SpreadStep | None, dict[int, str]]:
        def decide(found: list[SpreadStep]) -> list[Any]:
            known, problems = choose(found, root, passed, step)
            for number, problem in problems.items():
                if number not in passed.problems:
                    logger.warning("step %d is passed over: %s", number, problem)
            if known is None and not root.answers:
                # Training would begin anew beside the steps in the root.
                raise CheckpointingException(survey.unknown_steps(root.location, problems))
            return [known and vars(known), list(problems.items())]

        met = self._meeting
        fields, problems = survey.decide_from_held(ranks, met.hosts, met.place, decide)
        return fields and SpreadStep(**fields), dict(problems)

    def _load_spread(
        self, ranks: Ranks, spread: SpreadStep, load_at: Callable[[str], _Result]
    ) -> _Result:
        met = self._meeting
        in_root = steps.step_location(self._root, spread.step)
        if not spread.hosts:
            return load_at(in_root)
        contents = survey.fetch_small_files(ranks, met.hosts, met.place, spread.step, spread.save)
        with served(ranks, met.hosts, met.place, spread, in_root, contents) as url:
            result = load_at(url)
        with ranks.phase("keep the manifest"):
            # Before copies and uploads begin: both need it.
            if met.is_leader and not met.place.small_files(spread.step, spread.save):
                with locations.only_logging(f"keep the manifest of step {spread.step}"):
                    met.place.adopt(spread.step, contents)
        return result

    def _note_damage(
        self, ranks: Ranks, spread: SpreadStep, passed: Passed, error: BaseException
    ) -> None:
        """Remove damaged local files; without any, note that the step does not load."""
        if self._drop_damaged(ranks, spread.step, spread.save):
            return
        if spread.root_suffix is not None and spread.save not in passed.damaged_in_root:
            passed.damaged_in_root.add(spread.save)
            if spread.hosts:
                return
        passed.reasons[spread.save] = f"{type(error).__name__}: {error}"

    def _resume(self, spread: SpreadStep) -> None:
        """Queue the copies and the upload that a loaded step lacks."""
        step = spread.step
        if self._settings.peers:
            self._safe = step
        is_due = spread.root_suffix is None
        if step not in self.states:
            self._note(step, StepState(is_local=True, is_uploaded=not is_due))
        self._queue(step, spread.save, is_due)

    def find(self, ranks: Ranks) -> tuple[int | None, dict[int, str]]:
        """Return the newest step that may load, and newer ones' problems.

        Collective operation: all ranks must call it.
        """
        self.meet(ranks)
        known, problems = self._decide(ranks, Root(self._root), Passed())
        return None if known is None else known.step, problems

    def list(self, ranks: Ranks) -> list[int]:
        """Return the steps that hosts have whole, or the root has, ascending.

        Collective operation: all ranks must call it.
        """
        met = self.meet(ranks)

        def numbers(found: list[SpreadStep]) -> list[int]:
            whole = {spread.step for spread in found if spread.is_whole}
            none: list[int] = []
            root = Root(self._root)
            in_root = root.ask(steps.committed_steps, default=none)
            if not whole and not root.answers:
                raise CheckpointingException(survey.unknown_steps(self._root, {}))
            return sorted(whole.union(in_root))

        result: list[int] = survey.decide_from_held(ranks, met.hosts, met.place, numbers)
        return result

    def reject(self, step: int, reason: str | None) -> None:
        """Reject a step here, and in the root if it is there."""
        if self._met is None or not self._met.place.small_files(step):
            self._root_steps.reject(step, reason)
            return
        place = self._met.place
        rejections.reject(place.location, step, reason)
        try:
            self._root_steps.reject(step, reason)
        except CheckpointNotFoundError:
            pass  # it is not uploaded yet
        except OSError as error:
            logger.warning("%s does not know the rejection of step %d: %s", self._root, step, error)

    # --- End

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for copies and uploads; return False if some are not done in `seconds`."""
        if self._met is None:
            return True
        started = time.monotonic()
        are_done = self._met.copies.wait(seconds)
        if seconds is not None:
            seconds = max(0.0, started + seconds - time.monotonic())
        return self._met.uploads.wait(seconds) and are_done

    def close(self, has_failed: bool) -> None:
        """Upload the last step, wait for `exit_timeout` at most, and stop.

        After a failure, nothing is uploaded any more.
        """
        met = self._met
        if met is None:
            return
        if not has_failed:
            self._upload_last()
        for lane in (met.copies, met.uploads):
            lane.abandon()

    def _upload_last(self) -> None:
        """Wait for copies and uploads; upload the last step if needed."""
        deadline = time.monotonic() + self._options.exit_timeout
        last = self._last
        is_done = self.wait(self._options.exit_timeout)
        if is_done and last in self._saves and not self.states[last].is_uploaded:
            self._queue(last, self._saves[last], is_due=True)
            is_done = self.wait(max(0.0, deadline - time.monotonic()))
        if not is_done:
            text = "the manager is closed before step %d is uploaded to %s: it stays on the hosts, "
            logger.warning(text + "and the next start goes on from it", last, self._root)


def _is_damage(error: BaseException) -> bool:
    """Whether files are damaged, or on no tier that answers."""
    if isinstance(error, RankFailedError):
        return bool(error.failures) and all(map(_is_damage, error.failures.values()))
    if isinstance(error, OSError) and error.errno == errno.ENODATA:
        return True
    return steps.is_damage_of(SCHEME, error)
