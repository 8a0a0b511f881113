"""`distckpt trace`: turn a journal of phases into a page or a trace.

Perfetto and chrome://tracing show the trace.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from distckpt._base.errors import CheckpointingException
from distckpt._base.options import unsealed
from distckpt._pages.charts import Bar, html_table, timeline, write_static_page
from distckpt.cli._output import Output, count_text, size_text

_Event: TypeAlias = Mapping[str, Any]

_MAX_CALLS = 50
"""Number of the latest calls that are drawn."""
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
    events: list[_Event] = []
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
            json.dump({"traceEvents": _chrome_events(events)}, file)
    if arguments.html is not None:
        _write_page(arguments.html, events)
    output.json({"trace": arguments.output, "html": arguments.html, "num_phases": len(events)})
    for path in filter(None, (arguments.output, arguments.html)):
        output.line(f"{path}: {len(events)} phases")
    return 0


def _parsed(line: str, place: str) -> _Event:
    try:
        return unsealed(line, _FORM)
    except ValueError as error:
        raise CheckpointingException(
            f"{place} is no event of distckpt.events ({error}): {line.strip():.100}"
        ) from error


def _chrome_events(events: Iterable[_Event]) -> list[_Event]:
    """Return complete events, one process per rank, and the names of threads."""
    threads: dict[tuple[Any, str], int] = {}
    traced: list[_Event] = []
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


# --- The page -------------------------------------------------------------------------------------


def _write_page(path: str, events: Sequence[_Event]) -> None:
    """Write a page about the events of a journal."""
    calls = _calls_of(events)
    shown = calls[-_MAX_CALLS:]
    sections = []
    for call in reversed(shown):
        sections.append((_title(call), timeline(_bars(call)) + _longest(call)))
    counted = count_text(len(calls), "call")
    if len(shown) < len(calls):
        counted += f", the last {len(shown)} of which are shown"
    write_static_page(path, "Saves and loads", [counted], sections)


def _calls_of(events: Sequence[_Event]) -> list[list[_Event]]:
    """Group the phases of all ranks by call, in order.

    Calls of one function with one checkpoint follow one another: the next one begins when a rank
    comes to a phase for the second time.
    """
    calls: list[list[_Event]] = []
    open_calls: dict[tuple[Any, ...], list[_Event]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for event in sorted(events, key=lambda item: float(item["start"])):
        name = (event["verb"], event["checkpoint"])
        phase = (*name, event["rank"], event["phase"])
        seen[phase] = seen.get(phase, 0) + 1
        call = (*name, seen[phase])
        if call not in open_calls:
            open_calls[call] = []
            calls.append(open_calls[call])
        open_calls[call].append(event)
    return calls


def _title(call: Sequence[_Event]) -> str:
    first = call[0]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first["start"]))
    return f"{first['verb']} {first['checkpoint']}, {at}"


def _bars(call: Sequence[_Event]) -> list[Bar]:
    events = sorted(call, key=lambda event: (event["rank"], event["start"]))
    return [
        Bar(
            row=f"rank {event['rank']}",
            start=event["start"],
            stop=event["start"] + event["seconds"],
            kind=event["phase"],
            text=_text(event),
            is_bad=bool(event.get("error")),
        )
        for event in events
    ]


def _text(event: _Event) -> str:
    text = f"rank {event['rank']}: {event['phase']} {event['seconds']:.3f} s"
    if event.get("bytes"):
        text += f", {size_text(event['bytes'])}"
    return text + (f", {event['error']}" if event.get("error") else "")


def _longest(call: Sequence[_Event]) -> str:
    """Name for each phase the rank that took longest."""
    rows = []
    for phase in dict.fromkeys(event["phase"] for event in call):
        own = [event for event in call if event["phase"] == phase]
        slowest = max(own, key=lambda event: float(event["seconds"]))
        rows.append([phase, f"{slowest['seconds']:.3f} s", f"rank {slowest['rank']}"])
    table = html_table(["phase", "longest", "on"], rows)
    failed = [_text(event) for event in call if event.get("error")]
    errors = html_table(["failed"], [[text] for text in failed]) if failed else ""
    return f"{errors}<details><summary>Longest phases</summary>{table}</details>"
