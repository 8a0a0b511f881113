"""Ranks load a sealed checkpoint of torch in parts: all of them compare what they read."""

from __future__ import annotations

import pathlib
import tarfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import ShardedTensor
from tests.support.disk import flip
from tests.support.harness import error_of, run

ORBAX = pathlib.Path(__file__).parents[1] / "data" / "orbax_0_12.tar.xz"

TABLE = torch.arange(400_000.0).view(800, 500)


def save_with_torch(rank, path):
    dcp.save({"table": TABLE, "step": 3}, checkpoint_id=path)


def load_columns(rank, path):
    part = ShardedTensor.from_rank_offsets("table", torch.zeros(800, 250), (1, rank, 2))
    found = distckpt.load({"table": part}, path)
    return torch.equal(found["table"], TABLE.chunk(2, 1)[rank])


def load_rows_and_fail(rank, path):
    part = ShardedTensor.from_rank_offsets("table", torch.zeros(400, 500), (0, rank, 2))
    return error_of(lambda: distckpt.load({"table": part}, path))


@pytest.mark.parametrize("damaged", ["block", "metadata", "seal"])
def test_ranks_compare_what_they_read(tmp_path, damaged):
    path = tmp_path / "step"
    run(save_with_torch, 2, path)
    distckpt.seal(path)
    assert run(load_columns, 2, path) == [True, True]
    row = TABLE[700].numpy().tobytes()
    data = next(file for file in path.glob("*.distcp") if row in file.read_bytes())
    place = {"block": data, "metadata": path / ".metadata", "seal": path / "distckpt.seal"}[damaged]
    content = bytearray(place.read_bytes())
    start = content.index(row) if damaged == "block" else len(content) // 2
    content[start] ^= 8
    place.write_bytes(content)
    for error in run(load_rows_and_fail, 2, path):
        assert "seal" in str(error)


def load_rows_of_orbax(rank, path):
    part = torch.zeros(24, 24, dtype=torch.bfloat16)
    shard = ShardedTensor.from_rank_offsets("params.embed", part, (0, rank, 2))
    return error_of(lambda: distckpt.load({"embed": shard}, path))


def test_each_rank_compares_the_chunks_that_it_decodes(tmp_path):
    pytest.importorskip("tensorstore")
    with tarfile.open(ORBAX) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "zarr3"
    distckpt.seal(path)
    assert run(load_rows_of_orbax, 2, path) == [None, None]
    data = max(path.glob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    flip(data, 300)
    for error in run(load_rows_of_orbax, 2, path):
        assert "seal" in str(error)
        assert data.name in str(error)
