"""Megatron Core's own models beside those of transformers: the same weights, through rules, give
the same logits.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, ShardedTensor
from distckpt.cli import main
from distckpt.rules import Rename
from tests.support import megatron_towers
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.megatron_families import SETTINGS, logits_of, make_megatron, one_process
from tests.support.megatron_gpt import needs_megatron
from tests.support.rule_mutants import mutants, survivors_of
from tests.support.sampling import one_in
from tests.support.tiny_models import VARIANTS, make_config, make_model

pytestmark = needs_megatron

TOKENS = torch.tensor([[3, 1, 39, 7, 20, 11, 0, 5]])
FORMS = [{}, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]
"""What a checkpoint of Megatron says of its form: layers stacked or apart, experts and the halves
of a GLU apart.
"""


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with one_process(tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a function that makes a model of transformers, once: its directory, its configuration,
    its logits.
    """

    @functools.cache
    def make(family):
        model, saved = make_model(make_config(family)), tmp_path_factory.mktemp(family) / "saved"
        model.save_pretrained(saved)
        with torch.no_grad():
            return saved, model.config, model(TOKENS).logits

    return make


def computes(trained, config, expected):
    found = logits_of(trained, TOKENS, config.vocab_size)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


CASES = sorted([*SETTINGS, *VARIANTS])


def test_every_family_is_proved_here():
    """Kimi's models are those of DeepSeek under another name, those with towers have tests of their
    own.
    """
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    with pytest.raises(CheckpointingException, match="Supported are") as caught:
        distckpt.families.rules({"model_type": "of nobody"}, source="megatron")
    (listed,) = re.findall(r"Supported are (.+?): start", str(caught.value))
    supported = listed.split(", ")
    assert [name for name in supported if f"`{name}`" not in page] == []
    assert {*supported} == {"kimi_k2", *megatron_towers.FAMILIES, *SETTINGS}


@pytest.mark.parametrize("family", CASES)
def test_megatron_computes_what_transformers_does_and_the_export_is_the_same(
    family, pretrained, tmp_path
):
    saved, config, expected = pretrained(family)
    trained = make_megatron(config)
    trained.load_state_dict(distckpt.load(trained.sharded_state_dict(), saved, family="auto"))
    assert computes(trained, config, expected)

    for number, form in enumerate(FORMS):
        checkpoint, exported = tmp_path / f"checkpoint_{number}", tmp_path / f"exported_{number}"
        distckpt.save(trained.sharded_state_dict(metadata=form), checkpoint)
        distckpt.consolidate(checkpoint, exported, family="auto", like=saved)
        assert same_bytes(read_export(exported), read_export(saved)), form


@pytest.mark.parametrize("family", one_in(2, CASES))
def test_one_mistake_in_a_family_is_found(family, pretrained, tmp_path):
    saved, config, expected = pretrained(family)
    values = json.loads((saved / "config.json").read_text())
    rules = distckpt.families.rules(values | {"num_nextn_predict_layers": 0}, "megatron")
    trained = make_megatron(config)
    checkpoint = tmp_path / "checkpoint"
    distckpt.save(trained.sharded_state_dict(), checkpoint)
    survivors = survivors_of(
        mutants(rules),
        rules,
        trained,
        saved,
        checkpoint,
        lambda: computes(trained, config, expected),
    )
    assert not survivors, "\n".join(survivors)


def test_a_dry_run_says_what_is_added(pretrained, tmp_path, capsys):
    saved, config, _ = pretrained("qwen3_next")
    distckpt.save(make_megatron(config).sharded_state_dict(), tmp_path / "checkpoint")
    assert (
        main(
            [
                "consolidate",
                str(tmp_path / "checkpoint"),
                "out",
                "--family",
                str(saved),
                "--dry-run",
            ]
        )
        == 0
    )
    key = "decoder.layers.0.self_attention.out_norm.weight"
    assert (
        f"model.layers.0.linear_attn.norm.weight  F32 8  <- {key} [0:8] + 1\n"
        in capsys.readouterr().out
    )


IS_APART = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families whose layer for multi-token prediction has a name of its own on disk, and norms that
count from 1.
"""


def write_with_token_prediction(family, path):
    """Write a directory whose last layer predicts a further token; return its tensors and what that
    layer computes.
    """
    config = make_config(family)
    if family in IS_APART:
        config.num_hidden_layers, config.layer_types = 3, [*config.layer_types, "full_attention"]
    model = make_model(config)
    model.save_pretrained(path)
    first, size = config.num_hidden_layers - 1, config.hidden_size
    prefix = f"model.layers.{first}."
    generator = torch.Generator().manual_seed(1)
    extra = {
        name: torch.randn(size, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    extra["eh_proj"] = torch.randn(size, 2 * size, generator=generator)
    tensors = read_export(path)
    values = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": first}
    if family in IS_APART:
        tensors = {
            name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()
        }
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
        tensors |= {
            f"mtp.{names.get(name, 'norm')}.weight": tensor for name, tensor in extra.items()
        }
        values["layer_types"] = values["layer_types"][:first]
        if family != "qwen3_next":
            values["mtp_num_hidden_layers"] = 1
    else:
        tensors |= {f"{prefix}{name}.weight": tensor for name, tensor in extra.items()}
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        values["num_nextn_predict_layers"] = 1
    write_plain(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(values))

    def norm(values, name):
        return torch.nn.functional.rms_norm(
            values, (size,), extra[name] + (family in IS_APART), config.rms_norm_eps
        )

    def compute(embedded, hidden):
        joined = (
            torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1) @ extra["eh_proj"].T
        )
        mask = torch.full((hidden.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rope = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        layer = model.model.layers[first](joined, attention_mask=mask, position_embeddings=rope)
        return norm(layer[0] if isinstance(layer, tuple) else layer, "shared_head.norm")

    config.num_hidden_layers = first
    for kinds in ("mlp_layer_types", "layer_types"):
        if getattr(config, kinds, None):
            setattr(config, kinds, getattr(config, kinds)[:first])
    return tensors, config, compute


def exchanged(rules):
    """Yield lists of rules in which two tensors of multi-token prediction take each other's
    place.
    """
    numbers = [
        n
        for n, rule in enumerate(rules)
        if isinstance(rule, Rename) and rule.pattern.endswith("norm.weight")
    ]
    for one, other in itertools.combinations(
        [n for n in numbers if rules[n].pattern.startswith("mtp.layers")], 2
    ):
        swapped = list(rules)
        swapped[one] = replace(rules[one], to=rules[other].to)
        swapped[other] = replace(rules[other], to=rules[one].to)
        yield f"exchanged {rules[one]}, {rules[other]}", swapped


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", *IS_APART]
)
def test_layers_for_multi_token_prediction(family, tmp_path):
    tensors, config, compute = write_with_token_prediction(family, tmp_path / "saved")
    trained = make_megatron(config, mtp_layers=1)
    trained.load_state_dict(
        distckpt.load(trained.sharded_state_dict(), tmp_path / "saved", family="auto")
    )
    embedded, hidden = torch.randn(2, 1, 8, config.hidden_size)
    layer = trained.mtp.layers[0]

    def is_right():
        with torch.no_grad():
            joined = layer._concat_embeddings(hidden.transpose(0, 1), embedded.transpose(0, 1))
            mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
            rope = trained.rotary_pos_emb(8) if hasattr(trained, "rotary_pos_emb") else None
            found, _ = layer.transformer_layer(joined, attention_mask=mask, rotary_pos_emb=rope)
            found = layer.final_layernorm(found).transpose(0, 1)
            return torch.allclose(found, compute(embedded, hidden), rtol=1e-4, atol=1e-4)

    assert is_right()
    for number, form in enumerate(FORMS):
        checkpoint, exported = tmp_path / f"checkpoint_{number}", tmp_path / f"exported_{number}"
        distckpt.save(trained.sharded_state_dict(metadata=form), checkpoint)
        distckpt.consolidate(checkpoint, exported, family="auto", like=tmp_path / "saved")
        assert same_bytes(read_export(exported), tensors), form
    values = json.loads((tmp_path / "saved/config.json").read_text())
    rules = distckpt.families.rules(values | {"num_nextn_predict_layers": 1}, "megatron")
    wrong = list(exchanged(rules))
    assert len(wrong) == 3
    assert not survivors_of(
        wrong, rules, trained, tmp_path / "saved", tmp_path / "checkpoint_0", is_right
    )
    options = {
        "keys": ["*", "!mtp.layers.0.enorm.weight"],
        "family": "auto",
        "like": tmp_path / "saved",
    }
    with pytest.raises(CheckpointingException, match="matches no tensor"):
        distckpt.consolidate(tmp_path / "checkpoint_0", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("family", "quantize", "tolerance"),
    [("deepseek_v3", "fp8-block", 0.06), ("gpt_oss", "mxfp4", 0.3)],
)
def test_quantised_exports_are_divided_as_the_model_and_load_again(
    family, quantize, tolerance, pretrained, tmp_path
):
    saved, config, _ = pretrained(family)
    trained, again = make_megatron(config), make_megatron(config)
    trained.load_state_dict(distckpt.load(trained.sharded_state_dict(), saved, family="auto"))
    distckpt.save(trained.sharded_state_dict(), tmp_path / "checkpoint")
    options = {"family": "auto", "dtype": torch.bfloat16}
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "small", like=saved, quantize=quantize, **options
    )
    distckpt.load(again.sharded_state_dict(), tmp_path / "small", family="auto")
    for (name, expected), found in zip(
        trained.state_dict().items(), again.state_dict().values(), strict=True
    ):
        if torch.is_tensor(expected):
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=name)

    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "values", like=tmp_path / "small", **options
    )
    exported = read_export(tmp_path / "values")
    assert exported.keys() == read_export(saved).keys()
    precise = {name for name, tensor in exported.items() if tensor.dtype != torch.bfloat16}
    assert precise == {name for name in exported if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_rank_asks_for_its_layers_and_experts_only(family, pretrained):
    saved, config, _ = pretrained(family)
    whole, part = make_megatron(config), make_megatron(config)
    distckpt.load(whole.sharded_state_dict(), saved, family="auto")
    for form in FORMS:
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.zero_()
        request = part.sharded_state_dict(metadata=form)
        own = [
            name
            for name in request
            if ".1." in name and not any(f"experts.{n}." in name for n in (0, 1))
        ]
        distckpt.load({name: request[name] for name in own}, saved, family="auto")
        found = part.state_dict()
        for name, expected in whole.state_dict().items():
            if torch.is_tensor(expected) and expected.is_floating_point():
                assert torch.equal(
                    found[name], expected if name in own else torch.zeros_like(expected)
                ), (form, name)


TE_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms in Megatron's local layers, and those of other layers."""


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_norms_of_other_layers_and_keys_with_a_prefix(family, pretrained, tmp_path):
    saved, config, _ = pretrained(family)
    trained = make_megatron(config)
    distckpt.load(trained.sharded_state_dict(), saved, family="auto")
    distckpt.save(trained.sharded_state_dict(), tmp_path / "local")
    state = {}
    for key, tensor in distckpt.megatron.load_plain_tensors(tmp_path / "local").items():
        name = key
        for old, new in TE_NAMES.items():
            is_latent = "layernorm." in old and family == "qwen3"
            name = name if is_latent else name.replace(old, new)
        state[key] = ShardedTensor.from_rank_offsets(f"module.{name}", tensor)
    assert sum(shard.key != f"module.{key}" for key, shard in state.items()) >= 2
    distckpt.save(state, tmp_path / "other")
    rules = [Rename("module.**", "{0}")]
    distckpt.consolidate(
        tmp_path / "other", tmp_path / "exported", rules=rules, family="auto", like=saved
    )
    assert same_bytes(read_export(tmp_path / "exported"), read_export(saved))
