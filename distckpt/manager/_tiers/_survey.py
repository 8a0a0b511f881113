"""Search for steps over hosts and root, and the choice of one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from distckpt._base.errors import CorruptCheckpointError
from distckpt._commit.conditional_put import SAVE
from distckpt._format.marker import marker_of
from distckpt._ranks.attendance import answer_of
from distckpt._ranks.collectives import Ranks
from distckpt.manager import _rejections as rejections
from distckpt.manager import _steps as steps
from distckpt.manager._tiers._hosts import Hosts, decide_together
from distckpt.manager._tiers._local_steps import (
    ATTEMPT,
    HeldStep,
    LocalRoot,
    pack_files,
    unpack_files,
)

logger = logging.getLogger(__name__)

ROOT_SECONDS = 30.0
"""Seconds within which the root must answer, as hosts may have all."""
_NUM_ROOT_STEPS = 16
"""Newest steps of the root whose markers are read: each takes a request."""

_Answer = TypeVar("_Answer")


@dataclass
class SpreadStep:
    """A step with files on hosts, and perhaps in the root.

    Attributes:
        step: its number.
        save: names the save.
        attempt: when the job began that saved it, in seconds since 1970; 0 if unknown.
        num_files: number of files that the whole step has.
        num_bytes: their size.
        hosts: the hosts that have each file, by name.
        sizes: sizes of the files.
        rejection: the reason why a host rejects the step, if one does.
        root_suffix: suffix of the folders of its files in the root; None if it is not there.
    """

    step: int
    save: str
    attempt: int
    num_files: int = 0
    num_bytes: int = 0
    hosts: dict[str, list[int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    rejection: str | None = None
    root_suffix: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the hosts have all files together."""
        return len(self.sizes) == self.num_files and sum(self.sizes.values()) == self.num_bytes

    def files_of(self, host: int) -> list[str]:
        """Return the files that a host has, sorted."""
        return sorted(name for name, hosts in self.hosts.items() if host in hosts)


def decide_from_held(
    ranks: Ranks, hosts: Hosts, place: LocalRoot, decide: Callable[[list[SpreadStep]], Any]
) -> Any:
    """Return on all ranks the coordinator's decision about the steps of hosts.

    It is for JSON. The newest step comes last.

    Collective operation: all ranks must call it.
    """

    def own() -> list[HeldStep]:
        return place.held() if hosts.leads(ranks.rank) else []

    def decide_from_all(of_ranks: list[Any]) -> Any:
        found: dict[tuple[int, int, str], list[tuple[int, HeldStep]]] = defaultdict(list)
        for host, of_rank in zip(hosts.of_rank, of_ranks, strict=True):
            for values in of_rank:
                held = HeldStep(*values)
                found[held.attempt, held.step, held.save].append((host, held))
        return decide([_united(found[key]) for key in sorted(found)])

    return decide_together(ranks, "look for steps on the hosts", own, decide_from_all)


def _united(parts: Sequence[tuple[int, HeldStep]]) -> SpreadStep:
    """Unite the parts of a step that hosts have."""
    held = parts[0][1]
    rejection = next(filter(None, (held.rejection for _, held in parts)), None)
    spread = SpreadStep(*held[:5], rejection=rejection)
    # A file that was cut off is shorter than its copy, one that was extended is longer.
    for choose in (min, max):
        spread.sizes.clear()
        for _, held in parts:
            for name, size in held.files.items():
                spread.sizes[name] = choose(size, spread.sizes.get(name, size))
        if spread.is_whole:
            break
    for host, held in parts:
        for name, size in held.files.items():
            if size == spread.sizes[name]:
                spread.hosts.setdefault(name, []).append(host)
    return spread


def spread_step(
    ranks: Ranks, hosts: Hosts, place: LocalRoot, step: int, save: str
) -> SpreadStep | None:
    """Return on all ranks which hosts have the files of a step; None if no host has any.

    Collective operation: all ranks must call it.
    """

    def encoded(found: list[SpreadStep]) -> dict[str, Any] | None:
        for spread in found:
            if (spread.step, spread.save) == (step, save):
                return vars(spread)
        return None

    fields = decide_from_held(ranks, hosts, place, encoded)
    return None if fields is None else SpreadStep(**fields)


def fetch_small_files(
    ranks: Ranks, hosts: Hosts, place: LocalRoot, step: int, save: str
) -> Mapping[str, bytes]:
    """Return marker and manifest of a step, on all ranks.

    Collective operation: all ranks must call it.
    """
    # It only logs errors: another host may have them whole.
    contents = place.small_files(step, save)

    def choose(have: list[bool]) -> int:
        if not any(have):
            raise CorruptCheckpointError(f"No host has a whole manifest of step {step}.")
        return -1 if all(have) else have.index(True)

    holder = decide_together(ranks, "find the manifest", lambda: bool(contents), choose)
    if holder < 0:
        return contents
    with ranks.telling("fetch the manifest") as told:
        if ranks.rank == holder:
            told.payload = pack_files(contents)
    with ranks.answering(told, "fetch the manifest"):
        if ranks.is_coordinator:
            told.answer = told.payloads[holder]
    result = unpack_files(told.answer)
    if not contents:
        place.mend(step, save, result)
    return result


def shared_out(step: SpreadStep, hosts: Hosts) -> dict[str, int]:
    """Choose a rank for each file, on a host that has it; each gets about the same bytes."""
    loads = [0] * len(hosts.of_rank)
    chosen = {}
    for name in sorted(step.sizes, key=lambda name: -step.sizes[name]):
        candidates = []
        for host in step.hosts[name]:
            candidates += hosts.members[host]
        rank = min(candidates, key=loads.__getitem__)
        loads[rank] += step.sizes[name]
        chosen[name] = rank
    return chosen


# --- The choice of a step -------------------------------------------------------------------------


@dataclass
class Passed:
    """The steps that a load has found unfit so far.

    Attributes:
        problems: of steps that were passed over.
        reasons: problems by save: several attempts may have saved a step.
        damaged_in_root: saves whose copies in the root are damaged.
    """

    problems: dict[int, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    damaged_in_root: set[str] = field(default_factory=set)


class Root:
    """The root, which may not answer for a while.

    Attributes:
        location: its location.
        answers: whether it has answered the last time.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.answers = True

    def ask(self, question: Callable[..., _Answer], *details: Any, default: _Answer) -> _Answer:
        """Return an answer, or the default if none comes soon; then it is not asked again.

        The question is called with the location and the details.
        """
        if not self.answers:
            return default
        try:
            return answer_of(partial(question, self.location, *details), ROOT_SECONDS)
        except (OSError, RuntimeError) as error:
            logger.warning("%s does not answer (%s): going on without it", self.location, error)
            self.answers = False
            return default


def known_steps(found: Sequence[SpreadStep], root: Root) -> list[SpreadStep]:
    """Unite the steps of hosts and root; the newest one of the newest attempt comes first."""
    known = {(spread.step, spread.save): spread for spread in found}
    nothing: list[SpreadStep] = []
    for in_root in root.ask(_steps_in_root, default=nothing):
        same = known.setdefault((in_root.step, in_root.save), in_root)
        same.root_suffix = in_root.root_suffix
    return sorted(known.values(), key=lambda item: (item.attempt, item.step), reverse=True)


def _steps_in_root(root: str) -> list[SpreadStep]:
    """Return the newest steps in the root."""
    result = []
    for step in steps.all_steps(root)[-_NUM_ROOT_STEPS:]:
        marker = marker_of(steps.step_location(root, step))
        if marker is None:
            continue
        note = steps.note_in(marker)
        attempt = note[ATTEMPT] if isinstance(note.get(ATTEMPT), int) else 0
        nonce = marker.get(SAVE)
        suffix = f"-{nonce}" if isinstance(nonce, str) else ""
        save = str(note.get("save"))
        if steps.OPTIMIZER_REMOVED in note:
            save += " without optimizer"  # no copy of what hosts have
        result.append(SpreadStep(step, save, attempt, root_suffix=suffix))
    return result


def choose(
    found: Sequence[SpreadStep], root: Root, passed: Passed, wanted: int | None = None
) -> tuple[SpreadStep | None, dict[int, str]]:
    """Return the step to load, if any, and newer ones' problems.

    Args:
        found: the steps that hosts have.
        root: the place of uploaded steps.
        passed: steps that were found unfit before.
        wanted: a step by number; None for the newest.
    """
    problems: dict[int, str] = {}
    for item in known_steps(found, root):
        step = item.step
        if wanted not in (None, step):
            continue
        if item.save in passed.damaged_in_root:
            item.root_suffix = None
        problem = passed.reasons.get(item.save)
        if problem is None:
            problem = _rejection_of(item, root)
            if problem is not None and wanted is not None:
                logger.warning("step %d was %s: it is loaded because it was named", step, problem)
                problem = None
        problem = problem or _problem_with(item, root)
        if problem is None:
            return item, problems
        problems.setdefault(step, problem)
    return None, problems


def _rejection_of(item: SpreadStep, root: Root) -> str | None:
    reason = item.rejection
    if reason is None and item.root_suffix is not None:
        reason = root.ask(rejections.rejection_of, item.step, default=None)
    return reason and f"rejected: {reason}"


def _problem_with(item: SpreadStep, root: Root) -> str | None:
    if item.hosts and item.is_whole:
        return None
    if item.root_suffix is not None:
        return steps.problem_with(root.location, item.step)
    return (
        f"the hosts that are left have {len(item.sizes)} of its {item.num_files} files "
        f"({sum(item.sizes.values())} of {item.num_bytes} bytes), and it is not in the root"
        + (", which does not answer" * (not root.answers))
    )


def unknown_steps(root: str, problems: Mapping[int, str]) -> str:
    """Return the message of a search that the root did not answer."""
    return (
        f"{root!r} does not answer, and no step on the hosts can be loaded: start the job again "
        f"when it answers.{_listed(problems)}"
    )


def _listed(problems: Mapping[int, str]) -> str:
    return "".join(f"\n  {number}: {problem}" for number, problem in problems.items())


def nothing_to_load(root: str, step: int | None, reasons: Mapping[int, str]) -> str:
    """Return the message of a load that finds no step."""
    if step is not None and step not in reasons:
        return f"Step {step} is neither on any host nor in {root!r}."
    if not reasons:
        return (
            f"No step is on any host or in {root!r}. A run that begins has none: call load() only "
            "if manager.steps() has any."
        )
    return f"No step on the hosts or in {root!r} can be loaded.{_listed(reasons)}"
