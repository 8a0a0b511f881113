"""The columns of a manifest that hold statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, ShardedTensor
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest_reading import manifest_from_bytes


@pytest.fixture
def columns(tmp_path):
    distckpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path / "c", stats=True
    )
    return unpack((tmp_path / "c" / "manifest.safetensors").read_bytes())


DAMAGE = {
    "one column alone": lambda found: found.pop("stats_values"),
    "too few keys": lambda found: found.update(stats_values=found["stats_values"][:1]),
    "too few figures": lambda found: found.update(stats_counts=found["stats_counts"][:, :2]),
    "other numbers": lambda found: found.update(
        stats_values=found["stats_values"].astype(np.float32)
    ),
    "negative counts": lambda found: found.update(
        stats_counts=np.full(found["stats_counts"].shape, -1, np.int64)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_columns_that_do_not_fit_are_damage(columns, damage):
    fields, found = columns
    assert "stats_values" in manifest_from_bytes(pack(fields, found), "m").figures
    DAMAGE[damage](found)
    with pytest.raises(CorruptCheckpointError):
        manifest_from_bytes(pack(fields, found), "m")


def test_programs_that_do_not_know_them_read_the_rest(columns):
    fields, found = columns
    without = {name: column for name, column in found.items() if not name.startswith("stats")}
    manifest = manifest_from_bytes(pack(fields, without), "m")
    assert not manifest.figures
    assert "w" in manifest.keys
