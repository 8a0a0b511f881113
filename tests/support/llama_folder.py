"""A directory of a tiny Llama 3.1, written without transformers."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

WIDTH, HEADS, GROUPS, SIZE, LAYERS, INNER, ROWS = 6, 4, 2, 8, 3, 10, 12
CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "vocab_size": ROWS,
    "rope_scaling": {"rope_type": "llama3"},
    "tie_word_embeddings": True,
}
SHAPES = {
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
    "self_attn.q_proj": (HEADS * SIZE, WIDTH),
    "self_attn.k_proj": (GROUPS * SIZE, WIDTH),
    "self_attn.v_proj": (GROUPS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def write_llama(folder):
    """Write configuration and random weights; return the weights."""
    generator = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (ROWS, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {
        f"{name}.weight": generator.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights
