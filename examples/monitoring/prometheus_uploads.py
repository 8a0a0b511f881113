"""Serve to Prometheus how far steps of fast tiers are on their way to the root.

    python examples/monitoring/prometheus_uploads.py --work-dir /tmp/prometheus_uploads

Prints what Prometheus would fetch from it, and ends.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from _run import train
from prometheus_client import CollectorRegistry, Gauge, start_http_server

import distckpt


class Uploads:
    """Gauges of a manager with a local directory, on the lowest rank of each host."""

    def __init__(self, registry: CollectorRegistry, manager: distckpt.CheckpointManager) -> None:
        self._manager = manager
        self._uploaded = -1
        # Until the first upload, the time of the start counts.
        self._seen_at = time.time()
        gauges = {
            "distckpt_last_upload_timestamp_seconds": ("When an upload was seen", self.seen_at),
            "distckpt_steps_on_hosts_only": ("Steps since the last upload", self.num_later),
            "distckpt_steps_with_problems": ("Such steps with a problem", self.num_problems),
        }
        for name, (text, function) in gauges.items():
            # Called whenever Prometheus asks: a stalled upload calls nothing.
            Gauge(name, text, registry=registry).set_function(function)

    def later(self) -> list[Any]:
        """Return the states of the steps since the last upload."""
        states = self._manager.states
        newest = max((step for step, state in states.items() if state.is_uploaded), default=-1)
        if newest != self._uploaded:
            self._uploaded = newest
            self._seen_at = time.time()
        return [state for step, state in states.items() if step > newest]

    def seen_at(self) -> float:
        """Return when the newest step in the root was seen first."""
        self.later()
        return self._seen_at

    def num_later(self) -> int:
        """Return the number of steps since the last upload."""
        return len(self.later())

    def num_problems(self) -> int:
        """Return the number of such steps whose copy or upload has a problem."""
        return sum(state.problem is not None for state in self.later())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--work-dir", required=True, type=Path)
    arguments = parser.parse_args()
    registry = CollectorRegistry()
    server, _ = start_http_server(arguments.port, addr="127.0.0.1", registry=registry)
    train(
        arguments.work_dir / "run",
        on_start=partial(Uploads, registry),
        local=arguments.work_dir / "on_this_host",
        upload_every=2,
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        print(answer.read().decode())
    server.shutdown()
