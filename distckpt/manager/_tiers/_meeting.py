"""Settings of tiers, and the agreement of ranks about them."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from distckpt._base.messages import check_count
from distckpt._base.options import check_seconds
from distckpt._commit import posix
from distckpt._operations.planned_save import SaveRequest
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager._tiers._hosts import Hosts, decide_together, meet
from distckpt.manager._tiers._lane import Lane
from distckpt.manager._tiers._local_steps import LocalRoot, run_of_root, runs_in
from distckpt.manager._tiers._survey import Root, SpreadStep, decide_from_held, known_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierSettings:
    """Settings of the tiers of a manager, see `CheckpointManager`."""

    local: str
    peers: int
    keep_local: int
    upload_every: int
    hosts: Mapping[str, str]
    peer_bandwidth: float | None
    upload_bandwidth: float | None
    stall_timeout: float

    def __post_init__(self) -> None:
        check_count("keep_local", self.keep_local)
        check_count("upload_every", self.upload_every)
        if type(self.peers) is not int or self.peers not in (0, 1):
            raise ValueError(f"peers is 0 or 1, the number of copies, got {self.peers!r}")
        check_seconds("stall_timeout", self.stall_timeout)
        for name in ("peer_bandwidth", "upload_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is a number of bytes per second, got {value!r}")


@dataclass(frozen=True)
class Meeting:
    """The facts that ranks agree about at their first call."""

    hosts: Hosts
    is_leader: bool
    place: LocalRoot
    attempt: int
    whole: frozenset[int]
    copies: Lane
    uploads: Lane


def agree(ranks: Ranks, settings: TierSettings, request: SaveRequest) -> Meeting:
    """Agree about hosts, run and attempt, and make process groups.

    Collective operation: all ranks must call it.
    """
    root = Root(os.fspath(request.path))
    directory = posix.resolve(settings.local)
    hosts = meet(ranks, directory, settings.hosts, settings.peers)
    is_leader = hosts.leads(ranks.rank)

    def own_runs() -> list[tuple[str, bool]]:
        return runs_in(directory, root.location) if is_leader else []

    run, is_new = decide_together(ranks, "find the run", own_runs, partial(_run_of, root))
    place = LocalRoot(locations.join(directory, f"run-{run}"), run, root.location, is_new)
    with ranks.phase("open the local directories"):
        if is_leader:
            # On a full or broken disk, saves go to the root.
            with locations.only_logging(f"open {place.location}"):
                place.make()
                place.clear_leftovers()

    def number_attempt(found: list[SpreadStep]) -> tuple[int, list[int]]:
        good = [spread.step for spread in found if spread.is_whole and not spread.rejection]
        # Above those of all attempts: the time, unless a clock was wrong.
        last = max((item.attempt for item in known_steps(found, root)), default=0)
        return max(last + 1, int(time.time())), good

    attempt, whole = decide_from_held(ranks, hosts, place, number_attempt)
    lanes = []
    for name in ("copies", "uploads"):
        own = Ranks.in_background(request.process_group, request.options.timeout)
        lanes.append(Lane(name, own, request.options.exit_timeout))
    return Meeting(hosts, is_leader, place, attempt, frozenset(whole), *lanes)


def _run_of(root: Root, of_ranks: Sequence[Sequence[tuple[str, bool]]]) -> tuple[str, bool]:
    """Return the identity of the run; may the root not know it?

    If the root does not answer, most local directories decide.
    """
    known: list[str] = []
    old: set[str] = set()
    for run, is_new in itertools.chain(*of_ranks):
        known.append(run)
        if not is_new:
            old.add(run)
    guess = max(known, key=known.count, default=secrets.token_hex(8))
    # Other runs that the root has forgotten are not believed.
    name = secrets.token_hex(8) if guess in old else guess
    run = root.ask(run_of_root, name, default=guess)
    if known and run not in known:
        text = "steps of run %s on hosts are ignored: run.json in %s is of run %s"
        logger.warning(text, guess, root.location, run)
    if not root.answers:
        source = "as local directories say" if known else "a new one"
        logger.warning("the run is taken for %s, %s", run, source)
    return run, not root.answers and run not in old
