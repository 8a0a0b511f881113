"""The page that `distckpt trace --html` writes: the phases of each call, by rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from distckpt._pages.charts import Bar, html_table, timeline, write_static_page
from distckpt.cli._output import count_text, size_text

_Event: TypeAlias = Mapping[str, Any]

_MAX_CALLS = 50
"""Number of the latest calls that are drawn."""


def write_trace_page(path: str, events: Sequence[_Event]) -> None:
    """Write a page about the events of a journal."""
    calls = calls_of(events)
    shown = calls[-_MAX_CALLS:]
    sections = []
    for call in reversed(shown):
        sections.append((_title(call), timeline(_bars(call)) + _longest(call)))
    counted = count_text(len(calls), "call")
    if len(shown) < len(calls):
        counted += f", the last {len(shown)} of which are shown"
    write_static_page(path, "Saves and loads", [counted], sections)


def calls_of(events: Sequence[_Event]) -> list[list[_Event]]:
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
