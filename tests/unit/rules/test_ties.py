"""Names of one tensor, by the configuration, beside files that hold one or two."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import ShardedTensor
from distckpt.rules import Rename, Tie
from tests.support.hf_folders import read_export

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 6,
    "tie_word_embeddings": True,
}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = {
    "self_attention.linear_qkv.weight": (24, 8),
    "self_attention.linear_proj.weight": (8, 8),
    "self_attention.linear_qkv.layer_norm_weight": (8,),
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "self_attention.q_layernorm.weight": (8,),
    "self_attention.k_layernorm.weight": (8,),
    "mlp.linear_fc1.weight": (8, 8),
    "mlp.linear_fc2.weight": (8, 4),
}
REST = {f"decoder.layers.{key}": (1, *shape) for key, shape in LAYER.items()}
REST["decoder.final_layernorm.weight"] = (8,)
NAMES = {EMBEDDING: "model.embed_tokens.weight", OUTPUT: "lm_head.weight"}


def directory(path, names):
    """Write a directory of a small part of a model; the vocabulary is not padded there."""
    tensors = {name: torch.randn(6, 8) for name in names}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.randn(8, 4)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return tensors


@pytest.mark.parametrize("names", [[EMBEDDING, OUTPUT], [EMBEDDING], [OUTPUT]])
@pytest.mark.parametrize("asked", [[EMBEDDING, OUTPUT], [OUTPUT], [EMBEDDING]])
def test_a_model_of_megatron_has_what_the_files_hold(names, asked, tmp_path):
    tensors = directory(tmp_path / "saved", [NAMES[key] for key in names])
    state = {key: ShardedTensor.from_rank_offsets(key, torch.full((8, 8), 7.0)) for key in asked}
    layer = "decoder.layers.0.mlp.linear_fc2.weight"
    state[layer] = ShardedTensor.from_rank_offsets(layer, torch.zeros(8, 4))
    distckpt.load(state, tmp_path / "saved", family="auto")
    for key in asked:
        stored = tensors[NAMES[key if key in names else names[0]]]
        assert torch.equal(state[key].data, torch.cat([stored, torch.zeros(2, 8)]))


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("difference", [0, 1])
def test_an_output_layer_of_megatron_is_exported_if_it_is_not_the_embedding(
    prefix, difference, tmp_path, caplog
):
    state = {key: torch.randn(shape) for key, shape in REST.items()}
    state[EMBEDDING] = torch.randn(8, 8)
    state[OUTPUT] = state[EMBEDDING] + difference
    shards = {
        key: ShardedTensor.from_rank_offsets(f"{prefix}{key}", tensor)
        for key, tensor in state.items()
    }
    distckpt.save(shards, tmp_path / "checkpoint")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rules = [Rename("module.**", "{0}")] if prefix else []
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "out", family=tmp_path, rules=rules)
    exported = read_export(tmp_path / "out")
    assert torch.equal(exported[NAMES[EMBEDDING]], state[EMBEDDING][:6])
    assert (NAMES[OUTPUT] in exported) == bool(difference)
    if difference:
        assert torch.equal(exported[NAMES[OUTPUT]], state[OUTPUT][:6])
        assert "says that 'output_layer.weight' is tied" in caplog.text


def test_rules_of_the_user_decide(tmp_path):
    tensors = directory(tmp_path / "saved", NAMES.values())
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(6, 8)) for key in NAMES.values()}
    distckpt.load(state, tmp_path / "saved", rules=[Tie("lm_head.weight", NAMES[EMBEDDING])])
    assert torch.equal(state["lm_head.weight"].data, tensors[NAMES[EMBEDDING]])


def test_memory_that_is_shared_takes_the_one_tensor_that_is_stored(tmp_path):
    directory(tmp_path / "saved", [NAMES[OUTPUT]])
    model = torch.nn.ModuleDict(
        {"wte": torch.nn.Embedding(6, 8), "head": torch.nn.Linear(8, 6, bias=False)}
    )
    model.wte.weight = model.head.weight
    rules = [Rename("head.weight", NAMES[OUTPUT]), Rename("wte.weight", NAMES[EMBEDDING])]
    distckpt.load({"model": model}, tmp_path / "saved", rules=rules)
    assert torch.equal(model.wte.weight, distckpt.open(tmp_path / "saved").read(NAMES[OUTPUT]))


def test_a_tie_that_fills_a_tensor_is_not_called_useless(tmp_path, caplog):
    distckpt.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "saved")
    request = {"copy": ShardedTensor.from_rank_offsets("copy", torch.zeros(2, 2))}
    ties = [Tie("copy", "weight"), Tie("nobody", "bias")]
    distckpt.load(request, tmp_path / "saved", rules=ties)
    stored = distckpt.open(tmp_path / "saved").read_tensors()
    assert torch.equal(request["copy"].data, stored["weight"])
    (warning,) = caplog.messages
    assert "Tie(key='nobody', to='bias') matches no tensor" in warning
