"""Search for steps over all hosts: which of them have the files of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._ranks.collectives import Ranks
from distckpt.manager._tiers._hosts import Hosts, decide_together
from distckpt.manager._tiers._local_steps import (
    HeldStep,
    LocalRoot,
    pack_files,
    unpack_files,
)


@dataclass
class SpreadStep:
    """A step whose files are spread over hosts, and perhaps in the root.

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
    """Return on all ranks the coordinator's decision, for JSON, about the steps of all hosts.

    The newest of them comes last.

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
    contents: Mapping[str, bytes] = {}

    def look() -> bool:
        nonlocal contents
        contents = place.small_files(step, save)
        return bool(contents)

    def choose(have: list[bool]) -> int:
        if not any(have):
            raise CorruptCheckpointError(f"No host has a whole manifest of step {step}.")
        return -1 if all(have) else have.index(True)

    holder = decide_together(ranks, "find the manifest", look, choose)
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
