"""Large checkpoints of several ranks: each writes the checksums of what it has written."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.manifests import set_limits

WHOLE = torch.arange(6 * 40_000, dtype=torch.float32).reshape(6, 40_000)


def save(rank, path):
    set_limits(pytest.MonkeyPatch())
    rows = ShardedTensor.from_rank_offsets("rows", WHOLE[3 * rank :][:3].clone(), (0, rank, 2))
    # Of these, rank 1 writes nothing but its rows.
    for _ in range(2):
        distckpt.save({"rows": rows, "step": 3}, path, overwrite=True)


def load(rank, path):
    columns = ShardedTensor.from_rank_offsets("rows", torch.zeros(6, 20_000), (1, rank, 2))
    loaded = distckpt.load({"rows": columns, "step": 0}, path)
    return torch.equal(loaded["rows"], WHOLE[:, 20_000 * rank :][:, :20_000]), loaded["step"]


def test_it_is_loaded_under_another_layout(tmp_path, run):
    path = str(tmp_path / "c")
    run(save, 2, path)
    names = sorted(file.name for file in (tmp_path / "c" / "objects").glob("*.checksums"))
    assert names == ["rank-00001.checksums", "rank-00002.checksums"]
    assert distckpt.verify(path).is_whole
    assert run(load, 2, path) == [(True, 3)] * 2
