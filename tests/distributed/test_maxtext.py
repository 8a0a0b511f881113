"""Exports to MaxText's form and back by several ranks, and in parts."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor, cli
from tests.support.harness import run
from tests.support.hf_folders import read_export, same_bytes
from tests.support.llama_folder import write_llama


def export_both_ways(rank, folder):
    options = {"family": folder / "hf", "max_file_bytes": 600}
    distckpt.consolidate(folder / "hf", folder / "jax", layout="jax", **options)
    distckpt.consolidate(folder / "jax", folder / "back", **options)


def test_several_ranks_write_what_one_writes(tmp_path):
    write_llama(tmp_path / "hf")
    run(export_both_ways, 2, tmp_path)
    options = {"family": tmp_path / "hf"}
    distckpt.consolidate(tmp_path / "hf", tmp_path / "alone", layout="jax", **options)
    assert same_bytes(read_export(tmp_path / "jax"), read_export(tmp_path / "alone"))
    assert len(list((tmp_path / "jax").glob("*.safetensors"))) > 2
    distckpt.consolidate(tmp_path / "jax", tmp_path / "again", **options)
    assert same_bytes(read_export(tmp_path / "back"), read_export(tmp_path / "again"))


def test_layouts_that_differ_between_ranks_are_refused(tmp_path):
    write_llama(tmp_path / "hf")
    run(export_differently, 2, tmp_path)
    assert not (tmp_path / "jax").exists()


def export_differently(rank, folder):
    layout = ["jax", "jax-layers"][rank]
    with pytest.raises(distckpt.CheckpointingException, match="layout"):
        distckpt.consolidate(folder / "hf", folder / "jax", layout=layout, family=folder / "hf")


def test_parts_write_what_one_call_writes(tmp_path):
    write_llama(tmp_path / "hf")
    arguments = ["consolidate", str(tmp_path / "hf"), str(tmp_path / "jax"), "--layout", "jax"]
    arguments += ["--family", str(tmp_path / "hf"), "--max-file-bytes", "600"]
    for part in range(3):
        assert cli.main([*arguments, "--part", f"{part}/3"]) == 0
    assert cli.main([*arguments, "--finish"]) == 0
    options = {"family": tmp_path / "hf", "layout": "jax"}
    distckpt.consolidate(tmp_path / "hf", tmp_path / "alone", **options)
    assert same_bytes(read_export(tmp_path / "jax"), read_export(tmp_path / "alone"))


def load_rows(rank, folder):
    options = {"family": folder / "hf"}
    halves = {}
    for key, value in read_export(folder / "hf").items():
        rows = value.chunk(2)[rank]
        halves[key] = ShardedTensor.from_rank_offsets(key, torch.zeros_like(rows), (0, rank, 2))
    distckpt.load(halves, folder / "jax", **options)
    for key, value in read_export(folder / "hf").items():
        torch.testing.assert_close(halves[key].data, value.chunk(2)[rank], rtol=2e-7, atol=0)


def test_each_rank_loads_its_rows(tmp_path):
    write_llama(tmp_path / "hf")
    distckpt.consolidate(tmp_path / "hf", tmp_path / "jax", layout="jax", family=tmp_path / "hf")
    run(load_rows, 2, tmp_path)


def load_own_layers(rank, folder):
    own = {}
    for key, value in read_export(folder / "hf").items():
        if f"layers.{rank}." in key:
            own[key] = ShardedTensor.from_rank_offsets(key, torch.zeros_like(value))
    with pytest.raises(distckpt.CheckpointingException, match="needs an export under their names"):
        distckpt.load(own, folder / "jax", family=folder / "hf")
    distckpt.consolidate(folder / "jax", folder / "back", family=folder / "hf")
    distckpt.load(own, folder / "back")
    back = read_export(folder / "back")
    for key, shard in own.items():
        assert torch.equal(shard.data, back[key])


def test_ranks_with_some_layers_of_a_stack_load_an_export(tmp_path):
    write_llama(tmp_path / "hf")
    distckpt.consolidate(tmp_path / "hf", tmp_path / "jax", layout="jax", family=tmp_path / "hf")
    run(load_own_layers, 2, tmp_path)
