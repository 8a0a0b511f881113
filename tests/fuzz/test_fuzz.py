"""A short run of what `tests/fuzz/run.py` does for hours: the corpus again, structured changes,
random ones.
"""

from __future__ import annotations

import json
import os
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.run import CORPUS, corpus_of
from tests.fuzz.targets import JSON_VALUES, NASTY, TARGETS, edit_manifest, use_manifest
from tests.support.programs import run_program

SLOW = {"dcp_directory": 40, "manifest_fields": 60, "hf_file": 120}
"""Random inputs for targets that take long; the others get more."""


@pytest.fixture(params=TARGETS)
def prepared(request, tmp_path):
    seeds, run = TARGETS[request.param].prepare(tmp_path)
    return request.param, seeds, run


def test_valid_inputs_and_the_corpus(prepared):
    name, seeds, run = prepared
    for data in [*seeds, *(file.read_bytes() for file in corpus_of(name))]:
        run(data)


def test_the_corpus_is_small_and_of_known_targets():
    files = [file for file in CORPUS.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} <= set(TARGETS)
    assert sum(file.stat().st_size for file in files) < 200_000


def mutated(data, source):
    """Change some bytes: flip, replace by telling ones, delete, repeat."""
    data = bytearray(data)
    for _ in range(source.choice([1, 1, 2, 4])):
        if not data:
            break
        place = source.randrange(len(data))
        kind = source.randrange(5)
        if kind == 0:
            data[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            data[place] = source.choice(b'\0\x7f\x80\xff09-[{"$')
        elif kind == 2:
            del data[place : place + source.randrange(1, 9)]
        elif kind == 3:
            data[place:place] = data[source.randrange(len(data)) :][: source.randrange(1, 20)]
        else:
            data[place : place + 8] = (source.choice(NASTY) % 2**64).to_bytes(8, "little")
    return bytes(data)


def test_random_changes(prepared):
    name, seeds, run = prepared
    source = random.Random(name)
    known = [*seeds, *(file.read_bytes() for file in corpus_of(name))]
    for _ in range(SLOW.get(name, 500)):
        run(mutated(source.choice(known), source))


NUMBER = re.compile(rb"-?[0-9]+|null|true|false|\"[^\"\\]*\"")


@pytest.mark.parametrize("name", ["marker", "hf_index", "codec_tree", "shard_header", "hf_file"])
def test_json_values_of_another_kind(name, tmp_path):
    # Bytes changed at random seldom make another value.
    seeds, run = TARGETS[name].prepare(tmp_path)

    @settings(max_examples=60, database=None)
    @given(st.data())
    def check(data):
        seed = data.draw(st.sampled_from(seeds))
        places = list(NUMBER.finditer(seed))
        if not places:
            return
        place = data.draw(st.sampled_from(places))
        value = json.dumps(
            data.draw(st.sampled_from(JSON_VALUES) | st.integers() | st.text(max_size=5))
        ).encode()
        run(fitted(seed, seed[: place.start()] + value + seed[place.end() :], name))

    check()


def fitted(before, after, name):
    """Correct the length in front of a header whose text has changed, so that it is read at all."""
    if name not in ("shard_header", "hf_file"):
        return after
    length = int.from_bytes(before[:8], "little") + len(after) - len(before)
    return length.to_bytes(8, "little") + after[8:]


@settings(max_examples=80, database=None)
@given(st.lists(st.integers(0, 255), max_size=32).map(bytes))
def test_edits_of_a_manifest(edits):
    use_manifest(edit_manifest(edits))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("atheris") is None, reason="atheris is not installed (wheels for some Pythons only)"
)
def test_the_long_form_runs(tmp_path):
    # In a copy of the tree's corpus: a test leaves nothing behind.
    root = Path(__file__).parents[2]
    environment = {**os.environ, "DISTCKPT_FUZZ_CORPUS": str(tmp_path)}
    arguments = ["-m", "tests.fuzz.run", "shard_header", "--runs", "500", "--seed", "1"]
    done = run_program(arguments, environment, root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shard_header: 500 executions" in done.stdout
    assert " 0 findings" in done.stdout
    assert list((tmp_path / "shard_header").iterdir())
