"""A format that a program brings itself, read by several ranks."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt.readers import register_reader
from tests.support.harness import run
from tests.support.toy_format import SAMPLER, WEIGHT, ToyReader, sampler_shard, write_toy


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path / "toy")


def load_columns(rank, path):
    register_reader(ToyReader())
    shard = distckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 4), (1, rank, 2))
    state = distckpt.load({"w": shard, "sampler": sampler_shard(rank)}, path)
    return torch.equal(state["w"], WEIGHT.chunk(2, 1)[rank]), state["sampler"], state["step"]


def test_load_on_two_ranks(toy):
    assert run(load_columns, 2, str(toy)) == [(True, SAMPLER, 7)] * 2


def load_with_a_reader_on_rank_0(rank, path):
    if rank == 0:
        register_reader(ToyReader())
    with pytest.raises(distckpt.RankFailedError, match="'toy', for which no reader is registered here"):
        distckpt.load({"sampler": sampler_shard(rank)}, path)


def test_a_reader_that_another_rank_lacks_is_named(toy):
    run(load_with_a_reader_on_rank_0, 2, str(toy))
