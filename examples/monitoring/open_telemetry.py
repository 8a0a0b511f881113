"""Send the figures of saves to OpenTelemetry.

    python examples/monitoring/open_telemetry.py --work-dir /tmp/open_telemetry

Prints what an exporter would send.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from _run import is_first_rank, step_of, train
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

import distckpt


def to_open_telemetry(meter: Meter) -> Callable[[distckpt.SaveReport], None]:
    """Return a function that records each report with a meter."""
    seconds = meter.create_histogram("distckpt.save.duration", unit="s")
    num_bytes = meter.create_counter("distckpt.save.bytes", unit="By")
    step = meter.create_gauge("distckpt.save.step")

    def report_save(report: distckpt.SaveReport) -> None:
        if not is_first_rank():
            return
        num_bytes.add(report.num_bytes)
        step.set(step_of(report))
        for phase, duration in {**report.phases, "all": report.seconds}.items():
            seconds.record(duration, {"phase": phase})

    return report_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", required=True, type=Path)
    work_dir = parser.parse_args().work_dir
    # In production, the exporter of opentelemetry-exporter-otlp takes the place of this one.
    reader = PeriodicExportingMetricReader(ConsoleMetricExporter())
    provider = MeterProvider(metric_readers=[reader])
    train(work_dir / "run", to_open_telemetry(provider.get_meter("training")))
    provider.shutdown()
