"""Hosts: the ranks that share a local directory."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, in the order of their lowest ranks.

    Attributes:
        of_rank: the host of each rank.
        names: their names.
        peers: for each host the one that keeps its copies; -1 without one.
    """

    of_rank: Sequence[int]
    names: Sequence[str]
    peers: Sequence[int]

    @cached_property
    def members(self) -> list[list[int]]:
        """The ranks of each host, ascending; the first one leads."""
        members: list[list[int]] = [[] for _ in self.names]
        for rank, host in enumerate(self.of_rank):
            members[host].append(rank)
        return members

    def leads(self, rank: int) -> bool:
        """Whether a rank is the lowest one of its host."""
        return self.members[self.of_rank[rank]][0] == rank


def decide_together(
    ranks: Ranks, title: str, own: Callable[[], Any], decide: Callable[[list[Any]], Any]
) -> Any:
    """Return on all ranks the coordinator's decision about a value of each.

    All are for JSON.

    Collective operation: all ranks must call it.
    """
    with ranks.telling(title) as told:
        told.payload = json.dumps(own()).encode()
    with ranks.answering(told, title):
        if ranks.is_coordinator:
            values = list(map(json.loads, told.payloads))
            told.answer = json.dumps(decide(values)).encode()
    return json.loads(told.answer)


def meet(ranks: Ranks, directory: str, domains: Mapping[str, str], num_peers: int) -> Hosts:
    """Find out which ranks share a local directory.

    Collective operation: all ranks must call it.

    Args:
        ranks: the ranks of the job.
        directory: the local directory of this rank, which is made.
        domains: failure domains of hosts by name; a host without one is a domain of its own.
        num_peers: number of hosts that keep copies of another one's files, 0 or 1.
    """
    own = partial(_identity_of, directory)
    group = partial(_grouped, domains=domains, num_peers=num_peers)
    hosts = Hosts(*decide_together(ranks, "find the hosts", own, group))
    if num_peers and ranks.is_coordinator and min(hosts.peers) < 0:
        alone = [name for name, peer in zip(hosts.names, hosts.peers, strict=True) if peer < 0]
        text = "no other failure domain keeps copies of the files of %s: after its loss, steps "
        logger.warning(text + "are loaded from the root", ", ".join(alone))
    return hosts


def _identity_of(directory: str) -> list[str | int]:
    """Make the directory of a host; return name and directory, and their identity."""
    locations.make_directories(directory)
    status = os.stat(directory)
    name = os.uname().nodename
    # Containers of a machine have names of their own.
    machine = _BOOT_ID.read_text() if _BOOT_ID.exists() else name
    return [name, directory, machine, status.st_dev, status.st_ino]


def _grouped(
    identities: Sequence[Sequence[Any]], domains: Mapping[str, str], num_peers: int
) -> tuple[list[int], list[str], list[int]]:
    numbers: dict[tuple[Any, ...], int] = {}
    of_rank = []
    for _, _, *place in identities:
        of_rank.append(numbers.setdefault(tuple(place), len(numbers)))
    firsts = [identities[of_rank.index(number)] for number in range(len(numbers))]
    times = Counter(name for name, *_ in firsts)
    names = []
    for name, directory, *_ in firsts:
        # Containers and hosts of a test may have the same name.
        names.append(name if times[name] == 1 else f"{name}:{directory}")
    peers = [-1] * len(names)
    if num_peers:
        peers = peers_of([domains.get(name, f"host {name}") for name in names])
    return of_rank, names, peers


def peers_of(domains: Sequence[str]) -> list[int]:
    """Return for each host one in another domain, or -1.

    Copies are spread evenly, unless one domain has more than half of the hosts.

    Args:
        domains: the failure domain of each host.
    """
    order = sorted(range(len(domains)), key=lambda host: (domains[host], host))
    largest = max(Counter(domains).values())
    peers = [-1] * len(domains)
    for place, host in enumerate(order):
        for distance in range(largest, largest + len(order)):
            other = order[(place + distance) % len(order)]
            if domains[other] != domains[host]:
                peers[host] = other
                break
    return peers
