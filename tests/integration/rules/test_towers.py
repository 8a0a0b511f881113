"""Models with vision towers: from Megatron's keys to the directory of transformers and back, and
what they compute.
"""

from __future__ import annotations

import json

import pytest
import torch

import distckpt
from distckpt import CheckpointingException
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.megatron_families import logits_of, one_process
from tests.support.megatron_gpt import needs_megatron
from tests.support.megatron_towers import FAMILIES, make_with_tower, other_tensors, tower_of
from tests.support.rule_mutants import mutants, survivors_of
from tests.support.tiny_models import make_config, make_model

pytestmark = needs_megatron

TOKENS = torch.tensor([[3, 1, 39, 7, 20, 11, 0, 5]])
SQUARES = {
    "gemma3": "vision_tower.encoder.layers.*.self_attn.out_proj.weight",
    "llava": "vision_tower.encoder.layers.*.self_attn.out_proj.weight",
    "qwen2_5_vl": "visual.blocks.*.attn.proj.weight",
}
PATCHES = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with one_process(tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(params=FAMILIES)
def model(request):
    return make_model(make_config(request.param))


def agrees(trained, model):
    """Tell whether both compute the same, and have the same other tensors in their towers."""
    with torch.no_grad():
        pairs = [(logits_of(trained.language_model, TOKENS, 40), model(TOKENS).logits)]
        pairs.append((tower_of(trained, PATCHES), tower_of(model, PATCHES)))
    pairs += other_tensors(trained, model)
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
    for number, form in enumerate(
        [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]
    ):
        checkpoint, exported = tmp_path / f"checkpoint_{number}", tmp_path / f"exported_{number}"
        distckpt.save(trained.sharded_state_dict(metadata=form), checkpoint)
        distckpt.consolidate(checkpoint, exported, family="auto", like=tmp_path / "saved")
        assert same_bytes(read_export(exported), used(read_export(tmp_path / "saved"))), form
    again = type(model).from_pretrained(exported, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(tower_of(again, PATCHES), tower_of(model, PATCHES))


def used(tensors):
    """Leave out what LLaVA's tower has behind the layer whose output is projected, which Megatron
    has not.
    """
    unused = ("vision_tower.post_layernorm.", "vision_tower.encoder.layers.1.")
    is_llava = any("pre_layrnorm" in name for name in tensors)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (is_llava and name.replace("vision_model.", "").startswith(unused))
    }


def test_one_mistake_is_found(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    rules = distckpt.families.rules(
        json.loads((tmp_path / "saved/config.json").read_text()), "megatron"
    )
    trained = make_with_tower(model)
    distckpt.save(trained.sharded_state_dict(), tmp_path / "checkpoint")
    square = SQUARES.get(model.config.model_type, "model.visual.blocks.*.attn.proj.weight")
    survivors = survivors_of(
        mutants(rules, square),
        rules,
        trained,
        tmp_path / "saved",
        tmp_path / "checkpoint",
        lambda: agrees(trained, model),
    )
    assert not survivors, "\n".join(survivors)


def test_an_incomplete_tower_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    state = make_with_tower(model).sharded_state_dict()
    left_out = next(
        key for key in state if ("patch_embed" in key or "ln_pre" in key) and key.endswith("weight")
    )
    distckpt.save(
        {key: shard for key, shard in state.items() if key != left_out}, tmp_path / "checkpoint"
    )
    with pytest.raises(CheckpointingException, match=r"should match \d+ times"):
        distckpt.consolidate(
            tmp_path / "checkpoint", tmp_path / "out", family="auto", like=tmp_path / "saved"
        )


def as_published(model_type, tensors):
    """Return tensors as the first release of a model has them, not as `save_pretrained` writes
    them.
    """
    if model_type in ("gemma3", "llava"):
        return {
            name.replace("vision_tower.", "vision_tower.vision_model."): t
            for name, t in tensors.items()
        }
    if model_type == "qwen3_vl_moe":
        return {
            n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()
        }
    published = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        block = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{block}{n}.{name}_proj.weight"] for n in range(4)])
            for name in ("gate", "up", "down")
        )
        published |= {f"{block}gate_up_proj": torch.cat([gate, up], 1), f"{block}down_proj": down}
    return published


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen3_5_moe", "qwen3_vl_moe"])
def test_directories_as_they_were_published(name, tmp_path):
    model, empty = make_model(make_config(name)), make_model(make_config(name), seed=1)
    model.save_pretrained(tmp_path / "saved")
    published = as_published(name, read_export(tmp_path / "saved"))
    write_plain(tmp_path / "hub" / "model.safetensors", published)
    (tmp_path / "hub/config.json").write_text((tmp_path / "saved/config.json").read_text())
    opened = type(model).from_pretrained(tmp_path / "hub").state_dict()
    assert same_bytes(opened, model.state_dict())

    distckpt.load({"model": empty}, tmp_path / "hub", family="auto")
    assert same_bytes(empty.state_dict(), model.state_dict())
    trained = make_with_tower(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    distckpt.load(trained.sharded_state_dict(), tmp_path / "hub", family="auto")
    assert agrees(trained, model)
    for source, state in (
        ("transformers", {"model": model}),
        ("megatron", trained.sharded_state_dict()),
    ):
        distckpt.save(state, tmp_path / source)
        distckpt.consolidate(
            tmp_path / source, tmp_path / f"{source}_out", family="auto", like=tmp_path / "hub"
        )
        expected = used(published) if source == "megatron" else published
        assert same_bytes(read_export(tmp_path / f"{source}_out"), expected)


@pytest.mark.parametrize("layer", [1, -1, -2])
def test_llava_ends_with_the_layer_that_is_chosen(layer, tmp_path):
    config = make_config("llava")
    config.vision_feature_layer = layer
    model = make_model(config)
    model.save_pretrained(tmp_path / "saved")
    trained = make_with_tower(model)
    distckpt.load(trained.sharded_state_dict(), tmp_path / "saved", family="auto")
    assert agrees(trained, model)


@pytest.mark.parametrize(
    "changed",
    [
        {"vision_feature_layer": [-2, -1]},
        {"vision_feature_layer": -3},
        {"vision_feature_layer": 0},
        {"vision_config": {"model_type": "siglip_vision_model"}},
    ],
)
def test_other_llavas_are_refused(changed):
    config = make_config("llava").to_dict()
    config["vision_config"] |= changed.pop("vision_config", {})
    with pytest.raises(
        CheckpointingException, match="Megatron Core has no LLaVA with vision_feature_layer"
    ):
        distckpt.families.rules(config | changed, "megatron")
    config["text_config"]["model_type"] = "opt"
    with pytest.raises(CheckpointingException, match="model_type 'opt' are not supported"):
        distckpt.families.rules(config, "megatron")


def test_a_layer_for_multi_token_prediction_beside_a_tower(tmp_path):
    model = make_model(make_config("qwen3_5"))
    model.save_pretrained(tmp_path / "saved")
    values = json.loads((tmp_path / "saved/config.json").read_text())
    values["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    trained = make_with_tower(model, mtp_layers=1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_()
    distckpt.save(trained.sharded_state_dict(), tmp_path / "checkpoint")
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "out", family=tmp_path / "config.json")
    exported = read_export(tmp_path / "out")
    last, own = "model.language_model.layers.1.", "mtp.layers.0."
    names = {name.replace(last, own) for name in exported if name.startswith(last)}
    names |= {
        f"mtp.{name}.weight"
        for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    assert {name for name in exported if name.startswith("mtp.")} == names
    layer = trained.language_model.mtp.layers[0]
    assert torch.equal(exported["mtp.fc.weight"], layer.eh_proj.weight)
    assert torch.equal(exported["mtp.norm.weight"], layer.final_layernorm.weight)
    values["text_config"]["mtp_num_hidden_layers"] = 2
    with pytest.raises(CheckpointingException, match=r"mtp\.fc"):
        distckpt.families.rules(values, "megatron")
