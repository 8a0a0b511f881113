"""Engines of several processes against the source of their weights, by `verify(live=...)`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from tests.support.engine_loaders import DeepSeek, Llama, stored_values
from tests.support.harness import kept_ranks


@pytest.fixture(scope="module")
def run():
    with kept_ranks() as run_ranks:
        yield run_ranks


def report_of(folder, model, specs=None, damage=None):
    specs = specs or model.specs
    values = stored_values(model.specs)
    target = distckpt.record_loader(model.load_weights, specs)
    model.load_weights((name, values[name]) for name in specs)
    if damage is not None:
        name, element = damage
        model.state_dict()[name].view(torch.int16).view(-1)[element] ^= 1
    return distckpt.verify(folder, live=target)


@pytest.fixture
def folder(tmp_path):
    save_file(stored_values(Llama().specs), tmp_path / "model.safetensors")
    return str(tmp_path)


def tensor_parallel(rank, folder, damaged):
    damage = ("attn|qkv_proj|weight", 7) if rank in damaged else None
    report = report_of(folder, Llama(rank, 4), damage=damage)
    return [(p.key, p.rank, p.message) for p in report.problems], report.not_compared


@pytest.mark.parametrize("damaged", [(), (3,), (0, 3)])
def test_each_rank_compares_its_part(run, folder, damaged):
    for problems, not_compared in run(tensor_parallel, 4, folder, damaged):
        assert [key for key, _, _ in problems] == ["attn.q_proj.weight"] * len(damaged)
        assert [rank for _, rank, _ in problems] == list(damaged)
        for rank, (_, _, message) in zip(damaged, problems, strict=True):
            assert f"the first at [{4 * rank}, 7], in the model's 'attn|qkv_proj|weight'" in message
            assert f"(rank {rank})" in message
        assert [p.key for p in not_compared] == ["attn.rotary_emb.inv_freq"]


def pipeline_parallel(rank, folder):
    """Rank 1 skips the attention, and rank 0 the rest; the last one holds nothing."""
    model = Llama()
    specs = {}
    for name, spec in model.specs.items():
        if rank < 2 and name.startswith("attn") == (rank == 0):
            specs[name] = spec
    if rank == 2:
        return distckpt.verify(folder, live={})
    return report_of(folder, model, specs, ("norm|weight", 3) if rank == 1 else None)


def test_ranks_that_hold_nothing_of_a_tensor_leave_it_to_others(run, folder):
    for report in run(pipeline_parallel, 3, folder):
        assert [(p.key, p.rank, p.num_differing) for p in report.problems] == [
            ("norm.weight", 1, 1)
        ]
        assert report.num_tensors == len(Llama().specs) - 1
        stored = [p.key for p in report.not_compared if p.key in Llama().specs]
        assert stored == ["attn.rotary_emb.inv_freq"]


def skips_a_stage(rank, folder):
    model = DeepSeek(0, 2)  # on both ranks: the second half of the heads is on none
    return report_of(folder, model)


def test_elements_that_no_rank_holds_are_a_problem_though_others_are_held_twice(run, tmp_path):
    save_file(stored_values(DeepSeek().specs), tmp_path / "model.safetensors")
    for report in run(skips_a_stage, 2, str(tmp_path)):
        assert [p.key for p in report.problems] == ["kv_b"]
        assert "the ranks hold 36 of 72 elements" in report.problems[0].message
