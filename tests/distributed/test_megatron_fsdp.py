"""Training that goes on in Megatron-FSDP what Megatron Core has begun, and the other way round.

Both are the library's own code (megatron-core 0.16.1), on gloo and the processor: models, wrappers,
distributed optimizers, state dicts, `dist_checkpointing` and `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial

import pytest
import torch

import distckpt
from distckpt import torch_dist
from tests.support import harness
from tests.support import megatron_fsdp as fsdp
from tests.support.megatron_gpt import TIMEOUT, needs_megatron

pytestmark = needs_megatron

NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Layers without Transformer Engine have norms as modules of their own."""
MOE = {
    "num_moe_experts": 4,
    "ep": 2,
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 8,
}


def start():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    fsdp.on_cpu()


def train_and_save(rank, folder, options):
    """Train and save in both programs; return the losses of the next steps of each."""
    start()
    num_experts = options.get("num_moe_experts")
    model, optimizer = fsdp.wrapped_by_ddp(fsdp.make_gpt(**options))
    fsdp.train(model, optimizer, 3)
    fsdp.save_torch_dist(f"{folder}/core", model, optimizer)
    in_core = fsdp.train(model, optimizer, 3, first=3)
    model, optimizer = fsdp.wrapped_by_fsdp(fsdp.make_gpt(**options))
    fsdp.train(model, optimizer, 3)
    fsdp.save_fsdp(f"{folder}/fsdp", model, optimizer, num_experts=num_experts)
    return in_core, fsdp.train(model, optimizer, 3, first=3)


def convert_differently(rank, folder):
    text = {}
    for option, value in (
        ("gated", rank == 0),
        ("wrappers", 2 + rank),
        ("with_optimizer", rank == 0),
    ):
        values = {"gated": False, option: value}
        convert = partial(torch_dist.convert_fsdp_dtensor, to="fsdp_dtensor", **values)
        text[option] = str(harness.error_of(convert, f"{folder}/core", f"{folder}/{option}"))
    return text


def test_ranks_that_give_other_facts_are_refused(tmp_path):
    key = "decoder.layers.mlp.linear_fc1.weight"
    weight = distckpt.ShardedTensor.from_rank_offsets(key, torch.ones(2, 4, 4))
    distckpt.save({"weight": weight}, tmp_path / "core")
    for text in harness.run(convert_differently, 2, str(tmp_path)):
        for option, message in text.items():
            assert f"must give the same {option}" in message
    assert [path.name for path in tmp_path.iterdir()] == ["core"]


def convert_both(rank, folder, options):
    is_sparse = "num_moe_experts" in options
    torch_dist.convert_fsdp_dtensor(
        f"{folder}/core",
        f"{folder}/to_fsdp",
        "fsdp_dtensor",
        gated=True,
        rename=NORMS,
        local_experts=is_sparse,
    )
    torch_dist.convert_fsdp_dtensor(
        f"{folder}/fsdp",
        f"{folder}/to_core",
        "torch_dist",
        rename=NORMS,
        expert_parallel=is_sparse,
        dtype=torch.bfloat16,
    )


def go_on(rank, folder, options):
    """Load what was converted into new models; return the losses of the next steps."""
    start()
    num_experts = options.get("num_moe_experts")
    model, optimizer = fsdp.wrapped_by_fsdp(fsdp.make_gpt(**options))
    iteration = fsdp.load_fsdp(f"{folder}/to_fsdp", model, optimizer, num_experts=num_experts)
    in_fsdp = fsdp.train(model, optimizer, 3, first=3)
    model, optimizer = fsdp.wrapped_by_ddp(fsdp.make_gpt(**options))
    assert fsdp.load_torch_dist(f"{folder}/to_core", model, optimizer) == iteration == 7
    return fsdp.train(model, optimizer, 3, first=3), in_fsdp


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, MOE])
def test_training_goes_on_with_equal_losses_in_both_directions(tmp_path, options):
    # New processes: `on_cpu` stays.
    run = harness.run
    folder = str(tmp_path)
    ranks = run(train_and_save, 2, folder, options, group_timeout=TIMEOUT)
    run(convert_both, 2, folder, options, group_timeout=TIMEOUT)
    for after, before in zip(
        run(go_on, 2, folder, options, group_timeout=TIMEOUT), ranks, strict=True
    ):
        in_core, in_fsdp = before
        if not options:
            assert in_core == in_fsdp
            assert after == (in_fsdp, in_core)
            continue
        # The programs add the gradients of experts in another order: each goes on as the other.
        assert after[0] == pytest.approx(in_fsdp, abs=1e-4)
        assert after[1] == pytest.approx(in_core, abs=1e-4)
