"""Models with vision towers: from Megatron's keys to the directory of transformers and back, and what they compute."""

from __future__ import annotations

import json

import pytest
import torch

import distckpt
from distckpt import CheckpointingException
from tests.support.hf_folders import read_export, same_bytes
from tests.support.megatron_families import logits_of, one_process
from tests.support.megatron_gpt import needs_megatron
from tests.support.megatron_towers import make_with_tower, tower_of
from tests.support.rule_mutants import mutants, survivors_of
from tests.support.tiny_models import make_config, make_model

pytestmark = needs_megatron

TOKENS = torch.tensor([[3, 1, 39, 7, 20, 11, 0, 5]])
PATCHES = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with one_process(tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def model(request):
    return make_model(make_config(request.param))


def agrees(trained, model):
    """Tell whether both compute the same, and have the same other tensors in their towers."""
    with torch.no_grad():
        pairs = [(logits_of(trained, TOKENS, 40), model(TOKENS).logits)]
        pairs.append((tower_of(trained, PATCHES), tower_of(model, PATCHES)))
    visual = model.model.visual.state_dict()
    other = {
        name.replace("norm.", "patch_norm.") if hasattr(trained, "vision_model") else name: name for name in visual
    }
    own = {key.split(".", 1)[1].removeprefix("decoder."): t for key, t in trained.state_dict().items()}
    pairs += [(own[key], visual[name]) for key, name in other.items() if key in own and not key.startswith("layers.")]
    assert len(pairs) >= 10
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


def test_both_compute_the_same_and_the_export_is_the_same(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    trained = make_with_tower(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    distckpt.load(trained.sharded_state_dict(), tmp_path / "saved", family="auto")
    assert agrees(trained, model)
    for number, form in enumerate([{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]):
        checkpoint, exported = tmp_path / f"checkpoint_{number}", tmp_path / f"exported_{number}"
        distckpt.save(trained.sharded_state_dict(metadata=form), checkpoint)
        distckpt.consolidate(checkpoint, exported, family="auto", like=tmp_path / "saved")
        assert same_bytes(read_export(exported), read_export(tmp_path / "saved")), form


def test_one_mistake_is_found(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    rules = distckpt.families.rules(json.loads((tmp_path / "saved/config.json").read_text()), "megatron")
    trained = make_with_tower(model)
    distckpt.save(trained.sharded_state_dict(), tmp_path / "checkpoint")
    prefix = "" if model.config.model_type == "qwen2_5_vl" else "model."
    survivors = survivors_of(
        mutants(rules, f"{prefix}visual.blocks.*.attn.proj.weight"),
        rules, trained, tmp_path / "saved", tmp_path / "checkpoint", lambda: agrees(trained, model),
    )  # fmt: skip
    assert not survivors, "\n".join(survivors)


def test_an_incomplete_tower_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    state = make_with_tower(model).sharded_state_dict()
    left_out = next(key for key in state if key.endswith("patch_embed.proj.weight"))
    distckpt.save({key: shard for key, shard in state.items() if key != left_out}, tmp_path / "checkpoint")
    with pytest.raises(CheckpointingException, match=r"should match \d+ times"):
        distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "out", family="auto", like=tmp_path / "saved")
