"""A configuration that is that of no model is refused at once, with an error that says so."""

from __future__ import annotations

import json

import pytest

from distckpt import CheckpointingException, families

MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "vocab_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_layers": [1], "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "kv_lora_rank": 4, "n_shared_experts": 1,
}  # fmt: skip
IMPOSSIBLE = [
    {"num_hidden_layers": 10**12},
    {"num_hidden_layers": "many"},
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
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(changes):
    with pytest.raises(CheckpointingException, match="onfiguration"):
        families.rules({**MODEL, **changes}, "megatron")


def test_the_model_itself_is_not_refused():
    assert families.rules(MODEL, "megatron")


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
