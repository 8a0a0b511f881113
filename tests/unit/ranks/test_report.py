"""The journal: what is logged about phases, and the trace that is made of it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointExistsError, ShardedTensor, UnsupportedObjectError
from distckpt._base.options import sealed, unsealed
from distckpt.cli import main
from tests.support.cli_command import call


def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0))}


@pytest.fixture
def journal(tmp_path):
    """Write a journal; yield its path, and what reads its events."""
    path = tmp_path / "journal.jsonl"
    handler = logging.FileHandler(path)
    logger = logging.getLogger("distckpt.events")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield path
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    handler.close()


def events_in(path):
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(len(event.pop("checksum")) == 16 for event in events)
    return events


def phases_in(path):
    return [(event["verb"], event["phase"]) for event in events_in(path)]


def test_every_phase_of_every_verb_is_logged(tmp_path, journal):
    began = time.time()
    distckpt.save(state(), tmp_path / "c")
    distckpt.load(state(), tmp_path / "c")
    distckpt.verify(tmp_path / "c")
    distckpt.consolidate(tmp_path / "c", tmp_path / "hf")
    distckpt.reshard(tmp_path / "c", tmp_path / "d")
    distckpt.async_save(state(), tmp_path / "e").result()
    expected = {
        "save": ["describe", "plan", "write", "commit"],
        "load": ["plan", "read"],
        "verify": ["plan", "read"],
        "consolidate": ["plan", "write", "commit"],
        "reshard": ["plan", "write", "commit"],
        "async_save": ["describe", "plan", "stage", "write", "commit"],
    }
    assert phases_in(journal) == [
        (verb, phase) for verb, phases in expected.items() for phase in phases
    ]
    places = {
        "save": "c",
        "load": "c",
        "verify": "c",
        "consolidate": "hf",
        "reshard": "d",
        "async_save": "e",
    }
    events = events_in(journal)
    for event in events:
        assert event["checkpoint"] == str(tmp_path / places[event["verb"]])
        assert (event["rank"], "error" in event) == (0, False)
        assert ("bytes" in event) == (event["phase"] in ("stage", "write", "read"))
        assert event.get("bytes", 4000) >= 4000
        assert began <= event["start"] <= event["start"] + event["seconds"] <= time.time() + 1
    threads = [event["thread"] for event in events if event["verb"] == "async_save"]
    assert len(set(threads[:3])) == 1
    assert threads[3] == threads[4] != threads[0]


def test_a_phase_that_fails_says_so(tmp_path, journal):
    distckpt.save(state(), tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        distckpt.save(state(), tmp_path / "c")
    last = events_in(journal)[-1]
    assert (last["verb"], last["phase"], last["error"]) == (
        "save",
        "describe",
        "CheckpointExistsError",
    )


def test_a_state_dict_that_is_refused_is_logged_at_its_whole_path(tmp_path, journal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedObjectError):
        distckpt.save({"function": print}, "c")
    assert events_in(journal)[-1]["checkpoint"] == str(tmp_path / "c")


def test_other_loggers_do_not_get_the_journal(tmp_path, journal):
    others = logging.FileHandler(tmp_path / "others")
    root = logging.getLogger()
    root.addHandler(others)
    try:
        distckpt.save(state(), tmp_path / "c")
    finally:
        root.removeHandler(others)
        others.close()
    assert len(phases_in(journal)) == 4
    assert '"verb"' not in (tmp_path / "others").read_text()


def test_a_trace_shows_the_phases_of_all_ranks(tmp_path, journal, capsys):
    distckpt.save(state(), tmp_path / "c")
    journals = [journal, tmp_path / "of rank 1"]
    lines = [sealed({**event, "rank": 1}) for event in events_in(journal)]
    journals[1].write_text("\n".join(lines))
    assert "8 phases" in call(capsys, "trace", *journals, "-o", tmp_path / "trace.json")
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in traced if event["ph"] == "X"]
    assert [(span["pid"], span["name"]) for span in spans] == [
        (rank, f"save: {phase}")
        for rank in range(2)
        for phase in ("describe", "plan", "write", "commit")
    ]
    for span, event in zip(spans, events_in(journals[0]) + events_in(journals[1]), strict=True):
        assert (span["ts"], span["dur"], span["args"]) == (
            event["start"] * 1e6,
            event["seconds"] * 1e6,
            event,
        )
    names = {(event["pid"], event["tid"]) for event in traced if event["name"] == "thread_name"}
    assert names == {(span["pid"], span["tid"]) for span in spans}
    assert len(names) == 2


@pytest.mark.parametrize(
    "line", ["no JSON", "[]", "{}", '{"verb": "save", "phase": "plan", "rank": 0}']
)
def test_a_line_that_is_no_event_is_named(tmp_path, capsys, line):
    journal = tmp_path / "journal"
    journal.write_text(f"\n{line}\n")
    call(capsys, "trace", journal, "-o", tmp_path / "trace.json", code=1)
    assert not (tmp_path / "trace.json").exists()


def test_a_flipped_bit_in_a_journal_is_named(tmp_path, journal, capsys):
    distckpt.save(state(), tmp_path / "c")
    content, random = journal.read_bytes(), np.random.default_rng(5)
    events = events_in(journal)
    for place in random.integers(0, 8 * len(content), 40).tolist():
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "flipped").write_bytes(flipped)
        code = main(["trace", str(tmp_path / "flipped"), "-o", str(tmp_path / "trace.json")])
        shown = capsys.readouterr()
        if code:
            assert "is no event of distckpt.events" in shown.err, shown
        else:
            # A space, or the end of a line, was another.
            traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
            assert [event["args"] for event in traced if event["ph"] == "X"] == events


@pytest.mark.parametrize("form", [{}, {"verb": str, "start": float}])
def test_every_flipped_bit_of_a_line_is_found_or_does_no_harm(form):
    fields = {"verb": "save \u00fc", "start": 1.5, "sizes": [1, [2, None]], "more": {"7": math.inf}}
    content = sealed(fields).encode()
    assert unsealed(content, form) == fields
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        with contextlib.suppress(ValueError):
            assert unsealed(bytes(flipped), form) == fields
    for stop in range(len(content)):
        with pytest.raises(ValueError, match=r"."):
            unsealed(content[:stop], form)


def test_lines_of_another_form(tmp_path):
    assert unsealed(json.dumps(json.loads(sealed({"a": 1})), indent=4), {"a": int}) == {"a": 1}
    for line in ("[" * 100_000, "[]", "{}", '{"a": 1}', sealed({"b": 1}), sealed({"a": "1"})):
        with pytest.raises(ValueError, match=r"."):
            unsealed(line, {"a": int})
