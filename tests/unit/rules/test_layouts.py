"""The rules of families beside a conversion that is written from the layouts."""

from __future__ import annotations

import numpy as np
import pytest

from distckpt import families
from distckpt.megatron.core import InvalidShardingError, LoadMismatchError
from distckpt.rules import apply_rules, invert
from tests.support.mapped_arrays import assert_same, infos, materialize_all, numbered_arrays

LAYERS, HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCABULARY, EXPERTS = 3, 6, 2, 4, 8, 5, 11, 4


def rules_of(model_type, **values):
    config = {
        "model_type": model_type,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "num_local_experts": EXPERTS,
    }
    return families.rules(config | values, "megatron")


def assert_converts_both_ways(rules, megatron, model):
    mapped = apply_rules(rules, infos(megatron), strict=True)
    assert_same(materialize_all(mapped, megatron), model)
    assert_same(materialize_all(invert(mapped, infos(megatron)), model), megatron)


def hugging_face_model(mlp_names, has_bias=False, tied=False):
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        attention, rows = f"model.layers.{layer}.self_attn", {"q": HEADS, "k": GROUPS, "v": GROUPS}
        for name, heads in rows.items():
            shapes[f"{attention}.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if has_bias:
                shapes[f"{attention}.{name}_proj.bias"] = (heads * HEAD_DIM,)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {
            f"model.layers.{layer}.{n}_layernorm.weight": (HIDDEN,)
            for n in ("input", "post_attention")
        }
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape for name, shape in mlp_names.items()
        }
    return numbered_arrays(**shapes)


def fused_qkv(model, layer, kind):
    q, k, v = (model[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv")
    rows = HEADS // GROUPS * HEAD_DIM
    pieces = []
    for group in range(GROUPS):
        pieces.append(q[group * rows : (group + 1) * rows])
        pieces += [x[group * HEAD_DIM : (group + 1) * HEAD_DIM] for x in (k, v)]
    return np.concatenate(pieces)


def megatron_layer(model, layer, norms, has_bias):
    prefix = f"model.layers.{layer}."
    tensors = {
        "self_attention.linear_qkv.weight": fused_qkv(model, layer, "weight"),
        "self_attention.linear_proj.weight": model[prefix + "self_attn.o_proj.weight"],
        norms[0]: model[prefix + "input_layernorm.weight"],
        norms[1]: model[prefix + "post_attention_layernorm.weight"],
    }
    if has_bias:
        tensors["self_attention.linear_qkv.bias"] = fused_qkv(model, layer, "bias")
    return tensors


def megatron_model(model, layers, stacked, padded_vocabulary=VOCABULARY):
    def pad(array):
        return np.concatenate([array, np.zeros((padded_vocabulary - VOCABULARY, HIDDEN), np.int64)])

    tensors = {
        "embedding.word_embeddings.weight": pad(model["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": model["model.norm.weight"],
    }
    if "lm_head.weight" in model:
        tensors["output_layer.weight"] = pad(model["lm_head.weight"])
    if stacked:
        return tensors | {
            f"decoder.layers.{key}": np.stack([layer[key] for layer in layers]) for key in layers[0]
        }
    return tensors | {
        f"decoder.layers.{n}.{key}": array
        for n, layer in enumerate(layers)
        for key, array in layer.items()
    }


FUSED_NORMS = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
OWN_NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
LLAMA_MLP = {
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
MIXTRAL_MLP = {"block_sparse_moe.gate": (EXPERTS, HIDDEN)} | {
    f"block_sparse_moe.experts.{e}.{name}": shape
    for e in range(EXPERTS)
    for name, shape in {"w1": (FFN, HIDDEN), "w3": (FFN, HIDDEN), "w2": (HIDDEN, FFN)}.items()
}


@pytest.mark.parametrize("padded", [VOCABULARY, 16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_bias", [False, True], ids=["llama", "qwen2"])
@pytest.mark.parametrize("norms", [FUSED_NORMS, OWN_NORMS], ids=["fused-norms", "own-norms"])
@pytest.mark.parametrize(("stacked", "apart"), [(True, False), (False, False), (False, True)])
def test_megatron_gpt_becomes_llama_and_back(stacked, apart, norms, has_bias, tied, padded):
    model = hugging_face_model(LLAMA_MLP, has_bias, tied)
    layers = [megatron_layer(model, n, norms, has_bias) for n in range(LAYERS)]
    for n, layer in enumerate(layers):
        gate, up, down = (
            model[f"model.layers.{n}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        fc1 = (
            {"weight_w": gate, "weight_v": up} if apart else {"weight": np.concatenate([gate, up])}
        )
        layer |= {f"mlp.linear_fc1.{name}": array for name, array in fc1.items()} | {
            "mlp.linear_fc2.weight": down
        }
    megatron = megatron_model(model, layers, stacked, padded)
    rules = rules_of("qwen2" if has_bias else "llama", tie_word_embeddings=tied)
    assert_converts_both_ways(rules, megatron, model)


@pytest.mark.parametrize(
    "norms", [FUSED_NORMS, (FUSED_NORMS[0], OWN_NORMS[1])], ids=["local-spec", "te-spec"]
)
@pytest.mark.parametrize("experts", ["stacked", "separate", "separate-glu"])
@pytest.mark.parametrize("stacked", [True, False])
def test_megatron_gpt_becomes_mixtral_and_back(stacked, experts, norms):
    model = hugging_face_model(MIXTRAL_MLP)
    layers = [megatron_layer(model, n, norms, False) for n in range(LAYERS)]
    for n, layer in enumerate(layers):
        moe = f"model.layers.{n}.block_sparse_moe."
        w1, w2, w3 = (
            [model[f"{moe}experts.{e}.w{k}.weight"] for e in range(EXPERTS)] for k in (1, 2, 3)
        )
        layer["mlp.router.weight"] = model[moe + "gate.weight"]
        if experts == "stacked":
            layer["mlp.experts.experts.linear_fc1.weight"] = np.concatenate(
                [np.stack(w1), np.stack(w3)], axis=1
            )
            layer["mlp.experts.experts.linear_fc2.weight"] = np.stack(w2)
            continue
        for e in range(EXPERTS):
            expert = f"mlp.experts.experts.{e}."
            layer[expert + "linear_fc2.weight"] = w2[e]
            if experts == "separate-glu":
                layer |= {
                    expert + "linear_fc1.weight_w": w1[e],
                    expert + "linear_fc1.weight_v": w3[e],
                }
            else:
                layer[expert + "linear_fc1.weight"] = np.concatenate([w1[e], w3[e]])
    megatron = megatron_model(model, layers, stacked)
    assert_converts_both_ways(rules_of("mixtral"), megatron, model)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_missing_layer_or_tensor_is_found(stacked):
    model = hugging_face_model(LLAMA_MLP)
    layers = [megatron_layer(model, n, FUSED_NORMS, False) for n in range(LAYERS)]
    for layer in layers:
        layer |= {
            "mlp.linear_fc1.weight": np.zeros((2 * FFN, HIDDEN)),
            "mlp.linear_fc2.weight": np.zeros((HIDDEN, FFN)),
        }
    rules = rules_of("llama")
    with pytest.raises((LoadMismatchError, InvalidShardingError), match=f"should .*{LAYERS}"):
        apply_rules(rules, infos(megatron_model(model, layers[:-1], stacked)))
    for layer in layers:
        del layer["mlp.linear_fc1.layer_norm_weight"]
    with pytest.raises(LoadMismatchError, match=r"pre_mlp_layernorm.*matches no tensor"):
        apply_rules(rules, infos(megatron_model(model, layers, stacked)))
