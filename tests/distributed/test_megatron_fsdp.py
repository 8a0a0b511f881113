"""Training that goes on in Megatron-FSDP what Megatron Core has begun, and the other way round.

Both are the library's own code (megatron-core 0.16.1), on gloo and the processor: models, wrappers,
distributed optimizers, state dicts, `dist_checkpointing` and `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distckpt
from distckpt import torch_dist
from tests.support import harness
from tests.support import megatron_fsdp as fsdp
from tests.support.megatron_gpt import TIMEOUT, megatron, needs_megatron

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


class Net(torch.nn.Module):
    """Sizes whose flat buckets end inside of rows."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(5, 7)
        self.down = torch.nn.Linear(7, 3)
        self.norm = torch.nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu()))


def fully_sharded(seed, tp):
    """A module and optimizer of `fully_shard`, and its weights before."""
    library = megatron(".distributed.fsdp.src.megatron_fsdp")
    num_ranks = dist.get_world_size()
    net = Net(seed)
    if tp == 2:
        net = torch.nn.Sequential(torch.nn.Linear(5, 8, bias=False))
    full = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    mesh = init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp == 2:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    # `fully_shard` makes a step, which would shrink weights.
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0)
    module, optimizer = library.fully_shard(
        net,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        calculate_per_token_loss=True,
        device=torch.device("cuda:0"),
    )
    return module, optimizer, full


def train_net(module, optimizer, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = module(torch.randn(4, 5, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def go_on_live(rank, folder, tp):
    start()
    module, optimizer, full = fully_sharded(1, tp)
    distckpt.save({"model": module}, f"{folder}/module")
    distckpt.save({"model": module.state_dict()}, f"{folder}/dict")
    for path, prefix in (("module", "module."), ("dict", "model.module.")):
        stored = distckpt.open(f"{folder}/{path}")
        for name, value in full.items():
            np.testing.assert_array_equal(stored.read(prefix + name).numpy(), value)
    train_net(module, optimizer, range(2))
    distckpt.save({"model": module, "optimizer": optimizer}, f"{folder}/step")
    # The library's own way to go on: the module that was saved adds other gradients up.
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    module, optimizer, _ = fully_sharded(2, tp)
    module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    expected = train_net(module, optimizer, range(2, 4))
    module, optimizer, _ = fully_sharded(3, tp)
    distckpt.load({"model": module, "optimizer": optimizer}, f"{folder}/step")
    assert train_net(module, optimizer, range(2, 4)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 1), (4, 2)])
def test_modules_of_fully_shard_go_on_with_equal_losses(tmp_path, num_ranks, tp):
    harness.run(go_on_live, num_ranks, str(tmp_path), tp, group_timeout=TIMEOUT)


def refuse_live(rank, folder):
    start()
    model, _ = fsdp.wrapped_by_fsdp(fsdp.make_gpt())
    return str(harness.error_of(distckpt.save, {"model": model}, f"{folder}/step"))


@pytest.mark.slow
def test_modules_of_megatron_core_inside_are_refused_by_name(tmp_path):
    for text in harness.run(refuse_live, 2, str(tmp_path), group_timeout=TIMEOUT):
        assert "preprocess_fsdp_dtensor_state_dict" in text
