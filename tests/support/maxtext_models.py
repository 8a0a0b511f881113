"""Logits of MaxText's models in numpy, from parameters under MaxText's names.

It knows what MaxText computes, and nothing of names or shapes of other programs. All in float64.
"""

from __future__ import annotations

import re

import numpy as np


def unstacked(params, axis=1):
    """Return one tree of names for each layer, in order, and the tensors outside of layers."""
    params = {re.sub(r"^(params\.)+", "", name): value for name, value in params.items()}
    layers = {}
    outside = {}
    for name, value in params.items():
        value = np.asarray(value, np.float64)
        if match := re.fullmatch(r"decoder\.layers\.layers_(\d+)\.(.+)", name):
            for n, part in enumerate(np.moveaxis(value, axis, 0)):
                layers.setdefault((0, n * 6 + int(match[1])), {})[match[2]] = part
        elif match := re.fullmatch(r"decoder\.layers_remainder\.layers_(\d+)\.(.+)", name):
            layers.setdefault((1, int(match[1])), {})[match[2]] = value
        elif match := re.fullmatch(r"decoder\.(|dense_|moe_)layers_(\d+)\.(.+)", name):
            layers.setdefault((match[1] == "moe_", int(match[2])), {})[match[3]] = value
        elif match := re.fullmatch(r"decoder\.(|dense_|moe_)layers\.(.+)", name):
            for n, part in enumerate(np.moveaxis(value, axis, 0)):
                layers.setdefault((match[1] == "moe_", n), {})[match[2]] = part
        else:
            outside[name] = value
    return [layers[place] for place in sorted(layers)], outside


def logits(params, config, tokens, frequencies, axis=1):
    """Return the logits of one sequence.

    `frequencies` has the inverse frequencies of the rotary embedding of each layer.
    """
    layers, outside = unstacked(params, axis)
    kind = config.model_type
    eps = config.rms_norm_eps
    values = outside["token_embedder.embedding"][tokens]
    for number, layer in enumerate(layers):
        values = _layer(layer, config, values, frequencies[number], number)
    values = _norm(values, outside["decoder.decoder_norm.scale"], eps)
    if "decoder.logits_dense.kernel" in outside:
        return values @ outside["decoder.logits_dense.kernel"]
    result = values @ outside["token_embedder.embedding"].T
    # normalize_embedding_logits, which the models of Qwen3 switch off
    return result / np.sqrt(values.shape[-1]) if kind == "gemma3_text" else result


def _layer(layer, config, values, inverse, number):
    eps = config.rms_norm_eps
    attend = _latent_attention if config.model_type == "deepseek_v3" else _attention
    if config.model_type == "gemma3_text":
        normed = _norm(values, layer["pre_self_attention_norm.scale"], eps)
        result = attend(layer, config, normed, inverse, number)
        values = values + _norm(result, layer["post_self_attention_norm.scale"], eps)
        result = _mlp(layer, "mlp", _norm(values, layer["pre_ffw_norm.scale"], eps), _gelu)
        return values + _norm(result, layer["post_ffw_norm.scale"], eps)
    normed = _norm(values, layer["pre_self_attention_layer_norm.scale"], eps)
    values = values + attend(layer, config, normed, inverse, number)
    normed = _norm(values, layer["post_self_attention_layer_norm.scale"], eps)
    if "mlp.wi_0.kernel" in layer:
        return values + _mlp(layer, "mlp", normed, _silu)
    return values + _experts(layer, config, normed)


def _norm(values, scale, eps):
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + eps) * scale


def _silu(values):
    return values / (1 + np.exp(-values))


def _gelu(values):
    return values / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))


def _softmax(values):
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _mlp(layer, name, values, activation):
    gate = activation(values @ layer[f"{name}.wi_0.kernel"])
    return gate * (values @ layer[f"{name}.wi_1.kernel"]) @ layer[f"{name}.wo.kernel"]


def _rotated(values, inverse, by_pairs):
    """Rotate positions (axis 0) of heads: neighbors, or halves."""
    angles = np.arange(len(values))[:, None, None] * inverse
    cos, sin = np.cos(angles), np.sin(angles)
    half = values.shape[-1] // 2
    one, other = values[..., :half], values[..., half:]
    if by_pairs:
        one, other = values[..., ::2], values[..., 1::2]
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def _attend(query, key, value, window=None):
    places = np.arange(len(query))
    hidden = places[None, :] > places[:, None]
    if window is not None:
        hidden |= places[None, :] <= places[:, None] - window
    repeats = query.shape[1] // key.shape[1]
    scores = np.einsum("qhd,khd->hqk", query, key.repeat(repeats, 1))
    weights = _softmax(np.where(hidden, -np.inf, scores))
    return np.einsum("hqk,khd->qhd", weights, value.repeat(repeats, 1))


def _attention(layer, config, values, inverse, number):
    query, key, value = (
        np.einsum("te,ehd->thd", values, layer[f"self_attention.{name}.kernel"])
        for name in ("query", "key", "value")
    )
    if "self_attention.query_norm.scale" in layer:
        query = _norm(query, layer["self_attention.query_norm.scale"], config.rms_norm_eps)
        key = _norm(key, layer["self_attention.key_norm.scale"], config.rms_norm_eps)
    by_pairs = config.model_type == "llama" and config.rope_parameters["rope_type"] == "llama3"
    query, key = _rotated(query, inverse, by_pairs), _rotated(key, inverse, by_pairs)
    # query_pre_attn_scalar; other models have the scale in the weights
    if config.model_type.startswith("qwen3"):
        query = query * query.shape[-1] ** -0.5
    window = None
    if config.model_type == "gemma3_text":
        query = query * config.query_pre_attn_scalar**-0.5
        window = config.sliding_window if (number + 1) % 6 else None
    heads = _attend(query, key, value, window)
    return np.einsum("thd,hde->te", heads, layer["self_attention.out.kernel"])


def _latent_attention(layer, config, values, inverse, number):
    plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    eps = 1e-6

    def weight(name):
        return layer[f"self_attention.{name}"]

    if "self_attention.query.kernel" in layer:
        query = np.einsum("te,ehd->thd", values, weight("query.kernel"))
    else:
        low = _norm(values @ weight("wq_a.kernel"), weight("q_norm.scale"), eps)
        query = np.einsum("tr,rhd->thd", low, weight("wq_b.kernel"))
    low, turned = np.split(values @ weight("wkv_a.kernel"), [config.kv_lora_rank], -1)
    low = _norm(low, weight("kv_norm.scale"), eps)
    key, value = np.split(np.einsum("tr,rhd->thd", low, weight("wkv_b.kernel")), [plain], -1)
    turned = _rotated(turned[:, None], inverse, True).repeat(key.shape[1], 1)
    query = (
        np.concatenate([query[..., :plain], _rotated(query[..., plain:], inverse, True)], -1)
        * (plain + rotated) ** -0.5
    )
    heads = _attend(query, np.concatenate([key, turned], -1), value)
    return np.einsum("thd,hde->te", heads, weight("out.kernel"))


def _experts(layer, config, values):
    block = {
        "mixtral": "MoeBlock_0",
        "qwen3_moe": "moe_block",
        "deepseek_v3": "DeepSeekMoeBlock_0.MoeBlock_0",
    }[config.model_type]
    chosen, weights = _route(layer, block, config, values)
    result = np.zeros_like(values)
    for token, value in enumerate(values):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate = _silu(value @ layer[f"{block}.wi_0"][expert])
            inner = gate * (value @ layer[f"{block}.wi_1"][expert])
            result[token] += weight * (inner @ layer[f"{block}.wo"][expert])
    if config.model_type == "deepseek_v3":
        result += _mlp(layer, "DeepSeekMoeBlock_0.shared_experts", values, _silu)
    return result


def _route(layer, block, config, values):
    scores = values @ layer[f"{block}.gate.kernel"]
    num = config.num_experts_per_tok
    if config.model_type != "deepseek_v3":
        chosen = np.argsort(-scores, -1)[:, :num]
        return chosen, _softmax(np.take_along_axis(scores, chosen, -1))
    scores = 1 / (1 + np.exp(-scores))
    biased = scores + layer[f"{block}.gate.bias"]
    groups = biased.reshape(len(values), config.n_group, -1)
    best = np.sort(groups, -1)[..., -2:].sum(-1)
    allowed = np.argsort(-best, -1)[:, : config.topk_group]
    masked = np.full_like(groups, -np.inf)
    for token, picked in enumerate(allowed):
        masked[token, picked] = groups[token, picked]
    chosen = np.argsort(-masked.reshape(biased.shape), -1)[:, :num]
    weights = np.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) * config.routed_scaling_factor
    return chosen, weights
