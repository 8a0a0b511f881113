"""A configuration that is that of no model is refused at once, with an error that says so."""

from __future__ import annotations

import json

import pytest

from distckpt import CheckpointingException, families
from distckpt.rules import TensorSpec, Trim, apply_rules

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 16,
    "vocab_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_layers": [1],
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "kv_lora_rank": 4,
    "n_shared_experts": 1,
}
IMPOSSIBLE = [
    {"num_hidden_layers": 10**12},
    {"num_hidden_layers": "many"},
    {"num_attention_heads": "4"},
    {"num_key_value_heads": "2"},
    {"hidden_size": "16"},
    {"head_dim": "4"},
    {"vocab_size": "32"},
    {"model_type": "mixtral", "num_local_experts": "4"},
    {"model_type": "qwen3_moe", "num_experts": "4"},
    {"model_type": "qwen3_moe", "decoder_sparse_step": "1"},
    {"model_type": "deepseek_v3", "n_routed_experts": "4"},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": float("nan")},
    {"num_attention_heads": 0},
    {"num_attention_heads": [1]},
    {"num_key_value_heads": 3},
    {"head_dim": 0},
    {"head_dim": float("inf")},
    {"model_type": "qwen3_moe", "num_hidden_layers": 10**12},
    {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
    {"model_type": "qwen3_moe", "mlp_only_layers": 10**12},
    {"model_type": "qwen3_moe", "num_experts": {}},
    {"model_type": "deepseek_v3", "num_nextn_predict_layers": 10**12},
    {"model_type": "deepseek_v3", "first_k_dense_replace": "x"},
    {"model_type": "deepseek_v3", "mlp_layer_types": 1.5},
    {"model_type": "llama4_text", "moe_layers": True},
    {"model_type": ["llama"]},
    {"model_type": "qwen3_vl"},
    {"model_type": "qwen3_vl", "vision_config": {"depth": 1, "num_heads": 0}},
    {"model_type": "qwen3_vl", "vision_config": {"depth": "1", "num_heads": 1}},
    {"model_type": "qwen3_5", "vision_config": [1]},
    {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, "text_config": [1]},
    {"model_type": "qwen3_next", "full_attention_interval": 0},
    {"model_type": "qwen3_next", "linear_num_key_heads": 0},
    {"model_type": "qwen3_next", "layer_types": 3},
    {"model_type": "nemotron_h", "layers_block_type": 3},
    {"model_type": "nemotron_h"},
    {"model_type": "glm_moe_dsa", "indexer_types": 3},
    {"model_type": "minimax_m2", "num_local_experts": "4"},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(changes):
    with pytest.raises(CheckpointingException, match="onfiguration"):
        families.rules({**MODEL, **changes}, "megatron")


def test_the_model_itself_is_not_refused():
    assert families.rules(MODEL, "megatron")


def megatron_tensors(heads, groups, size, vocabulary=64):
    """Describe the tensors of a Qwen3 with one layer, as Megatron stores them."""
    layer = {
        "self_attention.linear_qkv.weight": ((heads + 2 * groups) * size, 64),
        "self_attention.linear_proj.weight": (64, heads * size),
        "self_attention.q_layernorm.weight": (size,),
        "self_attention.k_layernorm.weight": (size,),
        "input_layernorm.weight": (64,),
        "pre_mlp_layernorm.weight": (64,),
        "mlp.linear_fc1.weight": (256, 64),
        "mlp.linear_fc2.weight": (64, 128),
    }
    shapes = {f"decoder.layers.{key}": (1, *shape) for key, shape in layer.items()}
    shapes |= {
        "embedding.word_embeddings.weight": (vocabulary, 64),
        "decoder.final_layernorm.weight": (64,),
    }
    return {key: TensorSpec(shape, "BF16") for key, shape in shapes.items()}


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 6, "num_key_value_heads": 1},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=str,
)
def test_heads_that_fit_the_fused_projection_by_chance_are_refused(changes):
    assert apply_rules(families.rules(QWEN3, "megatron"), megatron_tensors(4, 2, 16), strict=True)
    with pytest.raises(
        CheckpointingException, match=r"does not fit 'decoder\.layers.*it should have shape"
    ):
        apply_rules(
            families.rules({**QWEN3, **changes}, "megatron"),
            megatron_tensors(4, 2, 16),
            strict=True,
        )


def test_a_vocabulary_loses_no_more_rows_than_padding_has():
    rules = families.rules({**QWEN3, "vocab_size": 1000}, "megatron")
    assert apply_rules(rules, megatron_tensors(4, 2, 16, 1024))[
        "model.embed_tokens.weight"
    ].shape == (1000, 64)
    too_large = megatron_tensors(4, 2, 16, 1024 + 128)
    with pytest.raises(
        CheckpointingException, match=r"fewer than the 152 rows after 1000.*by a Trim before"
    ):
        apply_rules(rules, too_large)
    trim = Trim("embedding.word_embeddings.weight", axis=0, size=1000)
    assert apply_rules([trim, *rules], too_large)["model.embed_tokens.weight"].shape == (1000, 64)


def test_kinds_of_layers_are_named_in_several_ways():
    sizes = {"ssm_state_size": 4, "n_groups": 2, "mamba_num_heads": 4}
    config = {**MODEL, **sizes, "model_type": "nemotron_h", "num_hidden_layers": 4}
    patterns = {
        "hybrid_override_pattern": "M*-E",
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
    }
    first, *others = (
        repr(families.rules({**config, name: kinds}, "megatron"))
        for name, kinds in patterns.items()
    )
    assert others == [first] * 2
    for changes in (
        {"hybrid_override_pattern": "M*-X"},
        {"hybrid_override_pattern": "M", "mlp_bias": True},
    ):
        with pytest.raises(CheckpointingException, match="are not known from Megatron Core"):
            families.rules({**config, **changes}, "megatron")


NO_CONFIGURATIONS = {
    "nesting": "[" * 10**5,
    "a list as number": json.dumps({"a": {"__float__": []}}),
    "a long number": "9" * 5000,
    "nothing": "",
    "a list": "[1]",
}


@pytest.mark.parametrize("text", NO_CONFIGURATIONS.values(), ids=NO_CONFIGURATIONS)
def test_files_that_are_no_configuration_are_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointingException, match=str(tmp_path)):
        families.rules(tmp_path, "megatron")
