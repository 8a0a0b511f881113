"""Reports of saves and loads: how much was moved and how long each phase took."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distckpt._ranks.collectives import Ranks


@dataclass(frozen=True)
class _Report:
    """The size and duration of a save or load, the same on every rank."""

    location: str
    """Location of the checkpoint."""
    num_bytes: int
    """Bytes of tensors and objects, of all ranks together."""
    seconds: float
    """Seconds from the call to the return, on the rank that took longest."""
    phases: Mapping[str, float]
    """Seconds by phase, each on the rank that took longest in it."""
    slowest_rank: int
    """The rank that spent most time moving bytes."""
    num_ranks: int
    """Number of ranks."""
    _verb: ClassVar[str]

    @property
    def gigabytes_per_second(self) -> float:
        """10**9 bytes per second over the whole call, all ranks together."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """Return one line for a log."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        slowest = f", slowest rank {self.slowest_rank}" if self.num_ranks > 1 else ""
        return (
            f"{self._verb} {self.location}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.2f} s "
            f"({self.gigabytes_per_second:.2f} GB/s; {phases}{slowest})"
        )


@dataclass(frozen=True)
class SaveReport(_Report):
    """The size and duration of a save.

    Phases: "describe" (flattening the state dict, comparing common state), "plan" (deciding who
    writes what), "stage" (copying tensors, of a background save), "write" (shard files and
    manifest) and "commit".
    """

    plan_reused: bool = False
    """Whether the plan of an earlier save was used."""
    _verb = "saved"


@dataclass(frozen=True)
class LoadReport(_Report):
    """The size and duration of a load.

    Phases: "plan" (finding the checkpoint, comparing the requests) and "read" (manifest, tensors
    and objects). `num_bytes` counts what each rank requested.
    """

    missing: frozenset[str] = frozenset()
    """Keys that the checkpoint has and no rank requested, where `strict` compares keys."""
    unexpected: frozenset[str] = frozenset()
    """Keys that some rank requested and the checkpoint does not have: left out."""
    _verb = "loaded"


events = logging.getLogger("distckpt.events")
"""One line of JSON for each phase on each rank, for the handlers that are added to this logger and
no others.
"""
events.propagate = False


class PhaseTimer:
    """Measures the phases of one call, and logs each to `events`."""

    def __init__(self, verb: str, rank: int, location: str) -> None:
        self._started = time.perf_counter()
        self._verb, self._rank, self.location = verb, rank, location
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Add the time the body takes to a phase; yields further fields of its event, which the
        body may add to.
        """
        start, started = time.time(), time.perf_counter()
        details: dict[str, Any] = {}
        try:
            yield details
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            if events.handlers and events.isEnabledFor(logging.INFO):
                what = {
                    "verb": self._verb,
                    "phase": name,
                    "rank": self._rank,
                    "checkpoint": self.location,
                }
                times = {"start": start, "seconds": time.perf_counter() - started}
                event = {**what, **times, "thread": threading.current_thread().name, **details}
                events.info("%s", json.dumps(event))

    def summarize(
        self, ranks: Ranks, num_bytes: int, moving: str
    ) -> tuple[int, float, dict[str, float], int, int]:
        """Return the fields of a report that follow the location, from the figures of all ranks.

        Collective operation: all ranks must call it. The slowest rank is that of the phase
        `moving`.
        """
        own = np.array([num_bytes, time.perf_counter() - self._started, *self.phases.values()])
        figures = np.stack([np.frombuffer(data) for data in ranks.all_gather(own.tobytes())])
        longest = dict(zip(self.phases, figures[:, 2:].max(axis=0).tolist(), strict=True))
        slowest = int(figures[:, 2 + list(self.phases).index(moving)].argmax())
        return int(figures[:, 0].sum()), float(figures[:, 1].max()), longest, slowest, ranks.size
