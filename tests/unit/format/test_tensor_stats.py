"""The columns of a manifest that hold statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, ShardedTensor
from tests.support.cli_command import call_json
from tests.support.forged_files import forge


@pytest.fixture
def path(tmp_path):
    distckpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path / "c", stats=True
    )
    return tmp_path / "c"


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
def test_columns_that_do_not_fit_are_damage(path, damage, capsys):
    forge(path, lambda fields, columns: None)
    assert call_json(capsys, "stats", path)["from_save"]
    forge(path, lambda fields, columns: DAMAGE[damage](columns))
    with pytest.raises(CorruptCheckpointError, match="stats"):
        distckpt.open(path)


def remove_stats(fields, columns):
    for name in ("stats_values", "stats_counts"):
        del columns[name]


def test_programs_that_do_not_know_them_read_the_rest(path, capsys):
    forge(path, remove_stats)
    assert not call_json(capsys, "stats", path)["from_save"]
    assert distckpt.open(path).read("w").tolist() == [1, 1, 1]
