"""What a limit of requests a second does to a save of many ranks: an event simulation.

    python benchmarks/store_limits.py [--ranks 4096] [--tb 5.67] [--rank-mbps 5 150]
        [--folders 1 16] [--json FILE]

Every rank begins at the same time to upload one file in parts, ten at a time, and then a small file
of checksums. A folder takes so many requests a second (S3: 3,500 PUTs for each prefix), and as many
at once; it refuses others with 503. Clients try again after a time that doubles, from 0.1 s to 15
s, with jitter, as those of distckpt do; after 20 attempts the save has failed. The rate of a rank
is shared by its requests.
"""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple

from report import Report, parser_of

from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES, NUM_REQUESTS, UNIT_BYTES
from distckpt._storage.cloud import _ATTEMPTS_WHILE_BUSY as ATTEMPTS
from distckpt._storage.remote import part_bytes_of

LATENCY = 0.05
FIRST_DELAY, LONGEST_DELAY = 0.1, 15.0


class Outcome(NamedTuple):
    """What came of a save: requests, those that were refused, the most often that one was, how many
    were given up, and the seconds it took.
    """

    requests: int
    refused: int
    most_refusals: int
    given_up: int
    seconds: float


class Folder:
    """Takes `rate` requests a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._tokens, self._time = rate, rate, 0.0

    def takes(self, now: float) -> bool:
        """Tell whether a request is taken."""
        self._tokens = min(self._rate, self._tokens + (now - self._time) * self._rate)
        self._time = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, runs=None, has_files=False)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tb", type=float, default=5.67)
    parser.add_argument("--rank-mbps", type=float, nargs="+", default=[5, 150])
    parser.add_argument("--folders", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--limit", type=float, default=3500, help="requests a second of a folder")
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = f"{arguments.ranks} ranks save {arguments.tb:g} TB."
    rows = []
    for mbps in arguments.rank_mbps:
        for count in arguments.folders:
            found = simulated(
                arguments.ranks, arguments.tb * 1e12, mbps * 1e6, count, arguments.limit
            )
            rows.append(
                [
                    f"{mbps:g} MB/s a rank, {count} folders",
                    f"{found.requests:,}",
                    f"{found.refused / (found.requests + found.refused):.1%}",
                    f"{found.most_refusals}",
                    f"{found.given_up:,}",
                    f"{found.seconds:,.0f}",
                ]
            )
    report.add(["", "requests", "refused", "most often", "given up", "seconds"], rows)
    report.finish()


def simulated(
    num_ranks: int, num_bytes: float, rate: float, num_folders: int, limit: float
) -> Outcome:
    """Let ranks save, each to one of some folders."""
    rng = random.Random(1)
    folders = [Folder(limit) for _ in range(num_folders)]
    rank_bytes = int(num_bytes / num_ranks)
    part_bytes = part_bytes_of(rank_bytes, DEFAULT_INFLIGHT_BYTES // NUM_REQUESTS - UNIT_BYTES)
    num_parts = -(-rank_bytes // part_bytes)
    part_seconds = LATENCY + part_bytes * NUM_REQUESTS / rate
    # One request after another: begin, the parts (ten at a time), complete, and the checksums.
    left = [num_parts] * num_ranks
    under_way = [0] * num_ranks
    # Time, a number that keeps the order, rank, the kind of request, and how often it was refused;
    # "done" marks the end of one.
    events = [(rng.random() * 0.2, rank, rank, "begin", 0) for rank in range(num_ranks)]
    heapq.heapify(events)
    number, requests, refused, most, given_up, now = num_ranks, 0, 0, 0, 0, 0.0

    def add(time: float, rank: int, kind: str, refusals: int = 0) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, rank, kind, refusals))

    while events:
        now, _, rank, kind, refusals = heapq.heappop(events)
        if kind.startswith("done "):
            _go_on(kind[5:], rank, now, left, under_way, add)
            continue
        if folders[rank * num_folders // num_ranks].takes(now):
            requests += 1
            seconds = part_seconds if kind == "part" else LATENCY
            add(now + seconds * rng.uniform(0.8, 1.2), rank, f"done {kind}")
            continue
        refused += 1
        most = max(most, refusals + 1)
        if refusals + 1 >= ATTEMPTS:
            given_up += 1
            add(now, rank, f"done {kind}")
            continue
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2**refusals)
        add(now + LATENCY + delay * rng.uniform(0.5, 1.0), rank, kind, refusals + 1)
    return Outcome(requests, refused, most, given_up, now)


def _go_on(kind, rank, now, left, under_way, add) -> None:
    """Make the requests that follow one that is done."""
    if kind == "part":
        under_way[rank] -= 1
    if kind in ("begin", "part"):
        while left[rank] and under_way[rank] < NUM_REQUESTS:
            left[rank] -= 1
            under_way[rank] += 1
            add(now, rank, "part")
        if not left[rank] and not under_way[rank]:
            add(now, rank, "complete")
    elif kind == "complete":
        add(now, rank, "checksums")


if __name__ == "__main__":
    main()
