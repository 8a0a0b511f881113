"""`distckpt trace`: turn a journal of phases into a page or a trace.

Perfetto and chrome://tracing show the trace.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import unsealed
from distckpt._pages.trace_page import write_trace_page
from distckpt.cli._output import Output

_FORM = {
    "verb": str,
    "phase": str,
    "rank": int,
    "checkpoint": str,
    "start": float,
    "seconds": float,
    "thread": str,
}


def run(arguments: Namespace, output: Output) -> int:
    """Write the trace."""
    events: list[Mapping[str, Any]] = []
    for path in arguments.journals:
        # An undecodable byte becomes an error that names the line.
        with open(path, encoding="utf-8", errors="replace") as file:
            events += [
                _parsed(line, f"{path}:{number}")
                for number, line in enumerate(file, 1)
                if line.strip()
            ]
    if arguments.output is not None:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": _trace_events(events)}, file)
    if arguments.html is not None:
        write_trace_page(arguments.html, events)
    output.json({"trace": arguments.output, "html": arguments.html, "num_phases": len(events)})
    for path in filter(None, (arguments.output, arguments.html)):
        output.line(f"{path}: {len(events)} phases")
    return 0


def _parsed(line: str, place: str) -> Mapping[str, Any]:
    try:
        return unsealed(line, _FORM)
    except ValueError as error:
        raise CheckpointingException(
            f"{place} is no event of distckpt.events ({error}): {line.strip():.100}"
        ) from error


def _trace_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return complete events, one process per rank, and the names of threads."""
    threads: dict[tuple[Any, str], int] = {}
    traced: list[Mapping[str, Any]] = []
    for event in events:
        thread = threads.setdefault((event["rank"], event["thread"]), len(threads))
        times = {"ts": event["start"] * 1e6, "dur": event["seconds"] * 1e6}
        name = f"{event['verb']}: {event['phase']}"
        traced.append(
            {"name": name, "ph": "X", **times, "pid": event["rank"], "tid": thread, "args": event}
        )
    for (rank, name), thread in threads.items():
        traced.append(
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        )
    return traced
