"""Models of transformers under its own plans, made on the meta device and filled from a directory:
each rank has the part that `from_pretrained` under the same plan gives it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distckpt
from tests.support.harness import run
from tests.support.hf_folders import same_bytes
from tests.support.tiny_models import TOKENS, auto_class, make_config, make_model, transformers

distributed = pytest.importorskip("transformers.distributed")
no_tie_weights = pytest.importorskip("transformers.initialization").no_tie_weights

PLANS = {
    "tensor parallel": {"tp_size": 4, "tp_plan": "auto"},
    "FSDP2 x tensor parallel": {"fsdp_size": 2, "tp_size": 2},
    "FSDP2 x experts over ranks": {"fsdp_size": 4, "ep_size": 2},
    "stages": {"pp_size": 4},
}


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_tensors(model):
    """Return this rank's parts of parameters, and buffers of both kinds."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    return {name: local(tensor) for name, tensor in tensors.items()}


def logits_of(model):
    with torch.no_grad():
        return local(model(TOKENS).logits)


def start(rank: int, path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(path)
    kind = auto_class(config)
    whole = kind.from_pretrained(path).state_dict()
    for name, plan in PLANS.items():
        options = distributed.DistributedConfig(**plan)
        # A plan names both of two tied tensors.
        with torch.device("meta"), no_tie_weights():
            model = kind.from_config(config).eval()
        options, _, mesh = model.prepare_distribute_model(options)
        model = model.maybe_distribute_model(model, options, mesh)
        distckpt.load({"model": model}, path, family="auto", materialize="cpu")
        if "pp_size" not in plan:
            model.tie_weights()
        expected = kind.from_pretrained(
            path, distributed_config=distributed.DistributedConfig(**plan)
        )
        assert same_bytes(own_tensors(model), own_tensors(expected)), name
        assert torch.equal(logits_of(model), logits_of(expected.eval())), name
        for key, tensor in model.state_dict().items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(full, whole[key]), (name, key)


def test_plans_of_transformers(tmp_path):
    config = make_config("qwen3_moe")
    config.tie_word_embeddings = True
    config.num_key_value_heads = 4
    config.num_hidden_layers = 4
    make_model(config).save_pretrained(tmp_path)
    run(start, 4, tmp_path)


def start_stage(rank: int, path: Path) -> None:
    """A stage without the modules of others, as in torchtitan: layers are in a dict."""
    config = transformers.AutoConfig.from_pretrained(path)
    kind = auto_class(config)
    expected = kind.from_pretrained(path)
    with torch.device("meta"):
        model = kind.from_config(config)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleDict({str(rank): layers[rank]})
    if rank == 0:
        model.lm_head = model.model.norm = None
    else:
        model.model.embed_tokens = None
    distckpt.load({"model": model}, path, family="auto", materialize="cpu")
    own = own_tensors(model)
    assert same_bytes(own, {name: own_tensors(expected)[name] for name in own})
    names = [None, None]
    dist.all_gather_object(names, set(own))
    assert set.union(*names) == own_tensors(expected).keys()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_stages_that_hold_a_part_of_the_layers(family, tmp_path):
    config = make_config(family)
    config.num_hidden_layers = 2
    make_model(config).save_pretrained(tmp_path)
    run(start_stage, 2, tmp_path)
