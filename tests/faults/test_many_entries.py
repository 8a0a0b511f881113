"""Files that describe very many small things: they are read in memory and time in proportion, or
refused.
"""

from __future__ import annotations

import json
import resource

import numpy as np
import pytest
import safetensors.torch
import torch

from distckpt import CheckpointingException
from tests.fuzz.contained import VERBS, limit_memory
from tests.fuzz.targets import save_example
from tests.support.forged_files import entry, file_of, forge, object_of, with_object
from tests.support.harness import run

MEMORY_BYTES = 2 << 30
CPU_SECONDS = 120
"""For one verb, with 10^6 entries."""
READING = [
    "load",
    "load_common_state_dict",
    "load_sharded_metadata",
    "verify --fast",
    "verify",
    "inspect",
]


def a_header_of_tensors(path, count):
    path.mkdir()
    header = {f"layers.{i}.weight": entry([1], 4 * i, 4 * i + 4) for i in range(count)}
    (path / "model.safetensors").write_bytes(file_of(header, bytes(4 * count)))


def an_index_of_keys(path, count):
    path.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, path / "model.safetensors")
    index = {"weight_map": {f"layers.{i}.weight": "model.safetensors" for i in range(count)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def a_manifest_of_keys(path, count):
    def change(fields, columns):
        fields["keys"] += [f"layers.{i}.{'x' * 20}" for i in range(count)]
        fields["dtypes"] += ["F32"] * count
        columns["key_shapes"] = np.concatenate(
            [columns["key_shapes"], np.ones((count, 2), np.int64)]
        )
        columns["key_ndims"] = np.concatenate([columns["key_ndims"], np.full(count, 2)])

    save_example(path)
    forge(path, change)


def an_object_of_objects(path, count):
    save_example(path)
    with_object(path, object_of('{"a":[' + ",".join(['{"b":[]}'] * count) + "]}"))


MAKERS = [a_header_of_tensors, an_index_of_keys, a_manifest_of_keys, an_object_of_objects]


def read_within_limits(rank, verb, path):
    """Return the text of the error that a verb raises, None when it reads what is there."""
    del rank
    limit_memory(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        VERBS[verb](path)
    except CheckpointingException as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(10**6, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_very_many_entries(make, count, tmp_path):
    path = tmp_path / "c"
    make(path, count)
    for verb in READING:
        # A process that takes more time is killed, which fails the test; so does any other error.
        (error,) = run(read_within_limits, 1, verb, str(path), backend=None)
        assert error is None or str(path) in error, f"{verb}: {error}"
        assert error is None or len(error) < 5000
