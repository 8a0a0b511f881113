"""Serve the figures of saves to Prometheus.

    python examples/monitoring/prometheus.py --work-dir /tmp/prometheus

Prints what Prometheus would fetch from it, and ends.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from _run import is_first_rank, step_of, train
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

import distckpt


def to_prometheus(registry: CollectorRegistry) -> Callable[[distckpt.SaveReport], None]:
    """Return a function that sets gauges and counters from each report."""
    committed = Gauge(
        "distckpt_last_commit_timestamp_seconds", "When a save was committed", registry=registry
    )
    step = Gauge("distckpt_last_step", "The newest step that was saved", registry=registry)
    saves = Counter("distckpt_saves", "Saves that were committed", registry=registry)
    num_bytes = Counter("distckpt_saved_bytes", "Bytes of all saves", registry=registry)
    seconds = Gauge(
        "distckpt_save_seconds", "Duration of the last save", ["phase"], registry=registry
    )
    slowest = Gauge(
        "distckpt_slowest_rank", "The rank that took longest to write", registry=registry
    )

    def report_save(report: distckpt.SaveReport) -> None:
        if not is_first_rank():
            return
        committed.set(time.time())
        step.set(step_of(report))
        saves.inc()
        num_bytes.inc(report.num_bytes)
        slowest.set(report.slowest_rank)
        for phase, duration in {**report.phases, "all": report.seconds}.items():
            seconds.labels(phase).set(duration)

    return report_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--work-dir", required=True, type=Path)
    arguments = parser.parse_args()
    registry = CollectorRegistry()
    server, _ = start_http_server(arguments.port, addr="127.0.0.1", registry=registry)
    train(arguments.work_dir / "run", to_prometheus(registry))
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        print(answer.read().decode())
    server.shutdown()
