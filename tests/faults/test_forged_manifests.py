"""Manifests in parts that somebody changed, all hashes agreeing: what looks at a few rows refuses
it, or returns what was saved, or what the same manifest without parts returns, all rows of which
are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash

import distckpt
from distckpt import CheckpointingException, ShardedTensor, tasks
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._ranks.collectives import Ranks
from distckpt._tools.remove_tensors import with_checksums
from distckpt.cli import main
from distckpt.megatron.core import write_marker
from tests.support.forged_files import files_in, marker_of, widened
from tests.support.manifests import set_limits

SHAPES = {"a": (12, 5), "b": (7,), "c": (6, 2, 3), "d": (), "e": (9, 4)}
NUMBERS = [0, -1, 1, 255, 2**62]
FIELDS = [None, 0, -1, 2**70, "", [], {}, 1.5, True, "OBJECT", "F64", [[]]]
DTYPES = [np.float64, np.int32, np.uint8, np.uint64]


# --- Verbs: each returns what can be compared -----------------------------------------------------


def state(factor=1.0):
    tensors = {
        key: torch.arange(1.0, 1 + np.prod(shape)).view(shape) * factor
        for key, shape in SHAPES.items()
    }
    shards = {key: ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    return shards | {"step": 3}


def as_lists(tensors):
    return {key: np.asarray(each).tolist() for key, each in sorted(tensors.items())}


def load(path):
    target = state(0.0)
    loaded = distckpt.load(target, path)
    return as_lists({key: target[key].data for key in SHAPES}), loaded["step"]


def read(key):
    return lambda path: distckpt.open(path).read(key).tolist()


def of_report(report):
    if report.problems:
        raise CheckpointingException(str(report.problems))
    varying = {"seconds": 0.0, "location": "", "num_files": 0, "num_bytes": 0}
    return repr(dataclasses.replace(report, **varying))


def verify_in_parts(path):
    journal = path.with_name("journal")
    shutil.rmtree(journal, ignore_errors=True)
    (task,) = tasks.verify(path, journal=journal, num_tasks=1)
    return of_report(task.run().report)


def reshard(path):
    target = path.with_name("resharded")
    shutil.rmtree(target, ignore_errors=True)
    distckpt.reshard(path, target, num_ranks=2)
    return as_lists(distckpt.open(target).read_tensors())


def consolidate(path):
    target = path.with_name("exported")
    shutil.rmtree(target, ignore_errors=True)
    distckpt.consolidate(path, target)
    return as_lists(safetensors.numpy.load_file(target / "model.safetensors"))


def diff(path):
    report = distckpt.diff(path.with_name("first"), path)
    return [repr(each) for each in report.tensors], list(report.only_in_b)


def command(*arguments):
    """Return a verb of the command line; an error that it prints is one that it was meant to."""

    def run(path):
        shown, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            code = main([arguments[0], str(path), *arguments[1:]])
        if code or not shown.getvalue():
            raise CheckpointingException(errors.getvalue())
        found = json.loads(shown.getvalue())
        about_files = ("location", "files", "writers", "num_files", "saved_at", "format")
        return {name: found[name] for name in found if name not in about_files}

    return run


VERBS = {
    "open": lambda path: {key: repr(each) for key, each in distckpt.open(path).tensors.items()},
    "load": load,
    **{f"read {key}": read(key) for key in SHAPES},
    "read_tensors": lambda path: as_lists(distckpt.open(path).read_tensors()),
    "common_state": lambda path: repr(distckpt.open(path).common_state),
    "verify": lambda path: of_report(distckpt.verify(path)),
    "verify fast": lambda path: of_report(distckpt.verify(path, "fast")),
    "verify live": lambda path: of_report(distckpt.verify(path, live=state())),
    "verify in parts": verify_in_parts,
    "reshard": reshard,
    "consolidate": consolidate,
    "diff": diff,
    "inspect": command("inspect", "--tree", "--json"),
    "inspect key": command("inspect", "--key", "e", "--json"),
    "fingerprints": lambda path: repr(distckpt.open(path).fingerprints()),
    "stored fingerprints": lambda path: repr(distckpt.open(path).fingerprints(stored=True)),
    "stats": command("stats", "--json"),
    "computed stats": command("stats", "--recompute", "--json"),
}


# --- Changes --------------------------------------------------------------------------------------


def read_table(file):
    columns = safetensors.numpy.load(file.read_bytes())
    return json.loads(columns.pop("json").tobytes()), columns


def table_bytes(fields, columns):
    text = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save({**arrays, "json": text})


def change_column(columns, random):
    name = random.choice(sorted(columns))
    column = widened(columns[name]) if columns[name].dtype.kind in "iu" else columns[name].copy()
    how = random.choice(["number", "number", "fewer rows", "more rows", "other dtype", "order"])
    if how == "number" and column.size:
        flat, place = column.reshape(-1), random.integers(column.size)
        before = flat[place]
        chosen = [before + 1, before - 1, 2 * before, flat[random.integers(column.size)], *NUMBERS]
        with np.errstate(over="ignore"):
            flat[place] = np.array(chosen[random.integers(len(chosen))]).astype(column.dtype)
    elif how == "other dtype":
        column = column.astype(DTYPES[random.integers(len(DTYPES))])
    elif how == "order":
        column = column[random.permutation(len(column))]
    else:
        column = column[:-1] if how == "fewer rows" else np.concatenate([column, column[-1:]])
    columns[name] = column
    return f"{how} of {name}"


def change_field(fields, random):
    """Change or remove a value somewhere inside of JSON."""
    place = random.choice(sorted(fields)) if isinstance(fields, dict) else len(fields) - 1
    inside = fields[place]
    if isinstance(inside, dict | list) and inside and random.integers(3):
        return f"{place} {change_field(inside, random)}"
    if not random.integers(6):
        del fields[place]
        return f"{place} removed"
    fields[place] = FIELDS[random.integers(len(FIELDS))]
    return f"{place} is {fields[place]!r}"


def change_size(content, random):
    choices = [content[:-1], content[:-8], content + bytes(8), b""]
    return choices[random.integers(len(choices))]


def forge(path, random):
    """Change something that the manifest says, and all hashes of it; return what."""
    fields, columns = read_table(path / "manifest.safetensors")
    names = [file[0] for file in files_in(fields, columns)]
    kinds = ["part", "part", "part field", "column", "file column", "field", "checksums"]
    kind = random.choice(kinds)
    if kind in ("column", "field"):
        changed = change_column(columns, random) if kind == "column" else ""
        changed = changed or change_field(fields, random)
    elif kind == "file column":
        of_files = {name: columns[name] for name in columns if name.startswith("file_")}
        changed = change_column(of_files, random)
        columns |= of_files
    else:
        word = ".checksums" if kind == "checksums" else "/chunks-"
        number = random.choice([i for i, name in enumerate(names) if word in name])
        content, changed = change_file(path / names[number], kind, random)
        (path / names[number]).write_bytes(content)
        for name in ("file_bytes", "file_header_bytes"):
            columns[name] = widened(columns[name])
            columns[name][number] = len(content)
        columns["file_checksums"][number] = xxhash.xxh3_64_intdigest(content)
    write_manifest(path, table_bytes(fields, columns), {})
    return f"{kind}: {changed}"


def change_file(file, kind, random):
    if kind == "checksums":
        return change_size(file.read_bytes(), random), f"size of {file.name}"
    fields, columns = read_table(file)
    changed = change_column(columns, random) if kind == "part" else change_field(fields, random)
    return table_bytes(fields, columns), f"{file.name}, {changed}"


def write_manifest(path, data, changes):
    (path / "manifest.safetensors").write_bytes(data)
    digest = f"{xxhash.xxh3_64_intdigest(data):016x}"
    marker = marker_of(path) | changes
    marker["manifest"].update(bytes=len(data), checksum=digest)
    write_marker(path, marker)


def without_parts(path, target):
    """Write the same checkpoint with all chunks, and their checksums, in the manifest itself."""
    stored = open_undisturbed(Ranks.alone(), str(path))
    found = with_checksums(stored)
    files = list(found.files)
    kept = [
        number
        for number, file in enumerate(files)
        if "/chunks-" not in file.name and not file.holds_checksums
    ]
    numbers = np.full(len(files), -1)
    numbers[kept] = np.arange(len(kept))
    chunks = found.chunks._replace(
        files=[files[number] for number in kept], file_ids=numbers[found.chunks.file_ids]
    )
    shutil.copytree(path, target)
    write_manifest(
        target,
        found.replaced(chunks=chunks).to_bytes(),
        {"format_version": 3, "min_reader_version": 3},
    )


# --- Both together --------------------------------------------------------------------------------


def outcome(verb, path):
    """Return a result as a text; None for an error that is meant for users."""
    try:
        return json.dumps(verb(path))
    except CheckpointingException:
        return None


def outcome_without_parts(verb, path):
    target = path.with_name("undivided")
    shutil.rmtree(target, ignore_errors=True)
    try:
        without_parts(path, target)
    except CheckpointingException:
        return None
    return outcome(verb, target)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of three ranks, every key of which has a part, and files of checksums."""
    set_limits(monkeypatch)
    distckpt.save(state(), tmp_path / "first", fingerprint=True, stats=True)
    grids = {"a": (3, 1), "e": (2, 2)}
    distckpt.reshard(tmp_path / "first", tmp_path / "saved", num_ranks=3, grids=grids)
    assert [*tmp_path.glob("saved/objects/*.checksums")]
    assert len([*tmp_path.glob("saved/objects/chunks-*")]) > len(SHAPES)
    return tmp_path


def check(folder: Path, seeds):
    saved = {name: outcome(verb, folder / "saved") for name, verb in VERBS.items()}
    assert None not in saved.values(), saved
    num_refused = 0
    for seed in seeds:
        path = folder / "forged"
        shutil.copytree(folder / "saved", path)
        changed = forge(path, np.random.default_rng(seed))
        for name, verb in VERBS.items():
            found = outcome(verb, path)
            num_refused += found is None
            if found not in (None, saved[name]):
                assert found == outcome_without_parts(verb, path), (seed, changed, name)
        shutil.rmtree(path)
    assert num_refused > len(seeds)


def test_results_of_forged_manifests(folder):
    check(folder, range(5))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_results_of_400_forged_manifests(folder):
    check(folder, range(400))
