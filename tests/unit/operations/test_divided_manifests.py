"""Verbs that go through all chunks of a checkpoint whose manifest has parts: they take a few parts,
or files, at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import io
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

import distckpt
from distckpt import CorruptCheckpointError, tasks
from distckpt._format import manifest, stored_checkpoint
from distckpt._format.lazy_columns import LazyColumn, Segment
from distckpt.cli import main
from tests.support.calls import recorded
from tests.support.disk import flip
from tests.support.hooked_store import hooked_reads
from tests.support.large_states import look_in_windows
from tests.support.manifests import set_limits, write_rows

NUM_RANKS, NUM_TENSORS, ROW_BYTES = 16, 256, 8
NUM_CHUNKS = NUM_RANKS * NUM_TENSORS
AT_ONCE = 512
VALUES = np.random.default_rng(3).integers(0, 256, (NUM_TENSORS, NUM_RANKS, ROW_BYTES), np.uint8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module in (manifest, stored_checkpoint):
        monkeypatch.setattr(module, "CHUNKS_AT_ONCE", AT_ONCE)
    set_limits(monkeypatch, part_rows=AT_ONCE)
    # What is compared at a time is as small as all of this.
    look_in_windows(monkeypatch, 16 * NUM_RANKS * ROW_BYTES)


@pytest.fixture
def divided(tmp_path):
    return write_rows(tmp_path / "divided", VALUES)


@pytest.fixture
def undivided(tmp_path):
    """The same checkpoint with all chunks in one table."""
    return write_rows(tmp_path / "undivided", VALUES, has_parts=False)


def verify(path):
    return distckpt.verify(path, num_threads=1)


def verify_in_parts(path):
    journal = path.with_name(f"journal of {path.name}")
    reports = [task.run() for task in tasks.verify(path, journal=journal, num_tasks=2)]
    return reports[-1].report


def inspect(path):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main(["inspect", str(path), "--tree", "--json"])
    return json.loads(shown.getvalue())


def diff(path):
    return distckpt.diff(path, path)


def consolidate(path):
    target = path.with_name(f"export of {path.name}")
    # A file for each four tensors: what is written at a time is as small as all of this.
    distckpt.consolidate(path, target, max_file_bytes=4 * NUM_RANKS * ROW_BYTES)
    return {file.name: file.read_bytes() for file in target.glob("*.safetensors")}


def reshard(path):
    target = path.with_name(f"reshard of {path.name}")
    distckpt.reshard(path, target, num_ranks=64)
    return {
        str(file.relative_to(target)): file.read_bytes()
        for file in target.rglob("*")
        if file.is_file() and file.name != "metadata.json"
    }


VERBS = [verify, verify_in_parts, inspect, diff, consolidate, reshard]


def without_files(found, path):
    """Return a report without what says where the chunks are listed."""
    if isinstance(found, dict) and "groups" in found:
        files = [file for file in found["files"] if "/chunks-" not in file["name"]]
        writers = [writer for writer in found["writers"] if writer["rank"] is not None]
        found = {**found, "files": files, "writers": writers, "num_files": 0}
        return {**found, "saved_at": None, "location": "", "format": ""}
    if not dataclasses.is_dataclass(found):
        return found
    fields = {name: str(value).replace(str(path), "") for name, value in vars(found).items()}
    return {**fields, "seconds": "", "num_bytes": "", "num_files": ""}


@pytest.mark.parametrize("verb", VERBS)
def test_results_are_those_of_an_undivided_manifest(verb, divided, undivided):
    found, expected = verb(divided), verb(undivided)
    assert without_files(found, divided) == without_files(expected, undivided)


def test_exports_and_rewritten_checkpoints_hold_the_values(divided):
    exported = {}
    for content in consolidate(divided).values():
        exported |= load(content)
    reshard(divided)
    read = distckpt.open(divided.with_name("reshard of divided")).read_tensors()
    for number, values in enumerate(VALUES):
        assert np.array_equal(exported[f"layer.{number:03d}"], values)
        assert np.array_equal(read[f"layer.{number:03d}"], values)
    assert verify(divided).problems == ()
    assert (verify(divided).num_chunks, verify(divided).num_keys) == (NUM_CHUNKS, NUM_TENSORS)


@pytest.mark.parametrize("verb", VERBS)
def test_few_chunks_are_in_memory_at_a_time(verb, divided, monkeypatch):
    counts = {"whole": 0, "at once": 0}
    all_of, at, whole = Segment.all, LazyColumn._at, LazyColumn.whole

    def count(kind, number):
        counts[kind] = max(counts[kind], number)

    monkeypatch.setattr(
        Segment, "all", lambda self, axes: (count("at once", self.num_rows), all_of(self, axes))[1]
    )
    monkeypatch.setattr(
        LazyColumn, "_at", lambda self, rows: (count("at once", len(rows)), at(self, rows))[1]
    )
    monkeypatch.setattr(
        LazyColumn, "whole", lambda self: (count("whole", len(self)), whole(self))[1]
    )
    verb(divided)
    assert counts["whole"] == 0
    assert AT_ONCE <= counts["at once"] <= AT_ONCE + NUM_TENSORS < NUM_CHUNKS


def test_memory_of_verify(divided):
    verify(divided)
    tracemalloc.start()
    verify(divided)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # All blocks, and what was known of all chunks, would take 1 MB.
    assert peak < 500_000


def test_the_same_is_read_in_the_same_order(divided, undivided, monkeypatch):
    found = reads_of(divided)
    monkeypatch.undo()
    expected = reads_of(undivided)
    for kind in ("shard-", ".checksums"):
        of_kind = [each for each in found if kind in each[0]]
        assert of_kind == [each for each in expected if kind in each[0]]
        assert len({name for name, *_ in of_kind}) == NUM_RANKS


def reads_of(path):
    """Return the files that `verify` reads, and which bytes."""
    with recorded(path) as calls:
        verify(path)
    return [(call.paths[0], call.offset, call.length) for call in calls if "read" in call.name]


# --- Damage ---------------------------------------------------------------------------------------


def damage(path):
    """Damage two ranks' data, and a file of checksums."""
    shards = sorted((path / "tensors").iterdir())
    flip(shards[5], 64 + 100 * ROW_BYTES)
    flip(shards[5], 64 + 101 * ROW_BYTES)
    flip(shards[14], 64 + 7 * ROW_BYTES)
    flip(path / "objects" / "rank-00010.checksums", 3)


def test_damage_is_reported_as_with_an_undivided_manifest(divided, undivided):
    for path in (divided, undivided):
        damage(path)
    found = verify(divided).problems
    assert found == verify_in_parts(divided).problems
    names = [(Path(problem.file).name, problem.key, problem.region) for problem in found]
    assert names == [
        ("rank-00010.checksums", None, None),
        ("shard-00006-model-00001-of-00001.safetensors", "layer.100", "[5:6, 0:8]"),
        ("shard-00006-model-00001-of-00001.safetensors", "layer.101", "[5:6, 0:8]"),
        ("shard-00015-model-00001-of-00001.safetensors", "layer.007", "[14:15, 0:8]"),
    ]
    expected = verify(undivided).problems
    texts = [str(each).replace(str(undivided), str(divided)) for each in expected]
    assert [str(problem) for problem in found] == texts


@pytest.mark.parametrize("verb", [diff, consolidate, reshard])
def test_damage_is_refused(verb, divided):
    flip(min((divided / "tensors").iterdir()), 64 + 200 * ROW_BYTES)
    with pytest.raises(CorruptCheckpointError, match=r"shard-00001.*'layer\.200'"):
        verb(divided)


@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_part_is_refused_by_name(verb, divided):
    flip(divided / "objects" / "chunks-00003.safetensors", -1)
    assert "chunks-00003.safetensors" in refusal(verb, divided)


@pytest.mark.parametrize("verb", VERBS)
def test_a_part_that_contradicts_the_files_is_refused(verb, tmp_path):
    forged = write_rows(tmp_path / "forged", VALUES, first_byte=1 << 40)
    assert "a chunk lies outside its file" in refusal(verb, forged)


def refusal(verb, path):
    """Return why a verb refuses a checkpoint, or what a check reports."""
    if verb in (verify, verify_in_parts):
        (problem,) = verb(path).problems
        return problem.message
    if verb is inspect:
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            assert main(["inspect", str(path)]) != 0
        return shown.getvalue()
    with pytest.raises(CorruptCheckpointError) as caught:
        verb(path)
    return str(caught.value)


def test_verify_reports_a_file_of_checksums_that_it_can_read_only_once(undivided):
    reads = collections.Counter()

    def fail_again(path, start, stop):
        del start, stop
        reads[path] += 1
        if path.endswith("rank-00003.checksums") and reads[path] > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with hooked_reads(fail_again):
        report = distckpt.verify(f"hooked://{undivided}")
    (problem,) = report.problems
    assert problem.file.endswith("rank-00003.checksums")
    assert "cannot be read" in problem.message
