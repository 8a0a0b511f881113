"""Exports to MaxText's names and back: logits of both forms, computed by different programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import CheckpointingException, InvalidShardingError, LoadMismatchError
from distckpt.jax import from_maxtext, to_maxtext
from tests.support.hf_folders import read_export, same_bytes
from tests.support.maxtext_models import logits, unstacked
from tests.support.tiny_models import make_config, transformers

TOKENS = [3, 7, 1, 0, 22, 9, 9, 31]
GEMMA_LAYERS = 8
KINDS = {
    "llama": {},
    "llama3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {},
    "mixtral": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma3_text": {
        "hidden_size": 64,  # the factor of its embedding is not rounded
        "num_hidden_layers": GEMMA_LAYERS,
        "layer_types": [
            "sliding_attention" if (number + 1) % 6 else "full_attention"
            for number in range(GEMMA_LAYERS)
        ],
    },
    "deepseek_v3": {},
}


def make_model(kind, folder):
    """Save a tiny model whose norms and biases are not trivial; return it."""
    config = make_config("llama" if kind == "llama3.1" else kind)
    for name, value in KINDS[kind].items():
        setattr(config, name, value)
    config.tie_word_embeddings = kind in ("qwen3", "gemma3_text")
    config.sliding_window = 4 if kind == "gemma3_text" else None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model


def frequencies_of(model):
    """Return the inverse frequencies of each layer."""
    rotary = model.model.rotary_emb
    kinds = getattr(model.config, "layer_types", None) or [None] * len(model.model.layers)
    return [
        getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None)).double().numpy()
        for kind in kinds
    ]


def values_of(folder):
    return {name: value.double().numpy() for name, value in read_export(folder).items()}


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    return make_model(request.param, tmp_path / "hf")


@pytest.mark.parametrize("layout", ["jax", "jax-layers"])
def test_both_forms_have_the_same_logits_and_the_way_back_the_same_values(
    model, layout, tmp_path
):
    config = model.config
    distckpt.consolidate(tmp_path / "hf", tmp_path / "jax", layout=layout, family=tmp_path / "hf")
    params = values_of(tmp_path / "jax")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    found = logits(params, config, TOKENS, frequencies_of(model))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    is_stacked = any(name.startswith("params.decoder.layers.") for name in params)
    is_stacked |= "params.decoder.moe_layers.self_attention.out.kernel" in params
    assert is_stacked == (layout == "jax")

    distckpt.consolidate(tmp_path / "jax", tmp_path / "back", family="auto", like=tmp_path / "hf")
    back = read_export(tmp_path / "back")
    original = read_export(tmp_path / "hf")
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        torch.testing.assert_close(back[name], tensor, rtol=2e-7, atol=1e-7)
