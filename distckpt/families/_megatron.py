"""Families whose Megatron Core keys are known, by their `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt.families._blocks import (
    Config,
    attention,
    experts,
    forms,
    gated_attention,
    gated_delta_net,
    gated_mlp,
    latent_attention,
    mamba,
    move,
    norms,
    outside_layers,
    stacked_experts,
    token_prediction,
)
from distckpt.families._towers import COMPOSED, text_part
from distckpt.rules._pieces import Interleave
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Rename, Transpose

_UNKNOWN = {
    "jamba": "Megatron Core has no Mamba 1",
    "llava_next": "no model of Megatron has its image_newline",
    "llava_onevision": "no model of Megatron has its image_newline",
    "qwen2_vl": "neither Megatron Core nor Megatron Bridge has its tower",
}
"""Families without a model to compare with."""


def megatron_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Return the rules from Megatron Core's keys to Hugging Face's names."""
    values = Config(config)
    model_type = values("model_type")
    composed = COMPOSED.get(model_type)
    if why := _UNKNOWN.get(model_type):
        raise CheckpointingException(
            f"The Megatron keys of model_type {model_type!r} are not known: {why}."
        )
    try:
        text = values
        if composed:
            text = text_part(values, composed.text)
        family = FAMILIES.get(text("model_type"))
        if family is None:
            raise CheckpointingException(
                f"The Megatron keys of model_type {text('model_type')!r:.99} are not supported. "
                f"Supported are {', '.join(sorted([*FAMILIES, *COMPOSED]))}: start from the rules "
                "of the closest one, and pass yours as `rules`."
            )
        rules = [
            *forms(text, has_tower=composed is not None),
            *family(text),
            *token_prediction(text),
        ]
        if composed:
            rules += composed.tower(values)
        return rules
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise CheckpointingException(
            f"No model has this configuration of model_type {model_type!r}: {error!s:.300}"
        ) from error


def _usual(
    config: Config,
    mlps: list[Rule],
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool | str = False,
) -> list[Rule]:
    """Return the rules for layers of norms, grouped-query attention and MLPs."""
    return [
        *outside_layers(config),
        *norms(config.layers),
        *attention(config, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm),
        *mlps,
    ]


def _llama(config: Config) -> list[Rule]:
    bias = _all_biases(config)
    mlps = gated_mlp(config.layers, bias=bias)
    is_normed = config("model_type") == "qwen3"
    return _usual(config, mlps, qkv_bias=bias, out_bias=bias, qk_norm=is_normed)


def _all_biases(config: Config) -> bool:
    """Return whether all linear layers have biases.

    Megatron has no models in which only attention has them.
    """
    in_attention, in_mlp = (config(name, default=False) for name in ("attention_bias", "mlp_bias"))
    if in_attention != in_mlp:
        raise CheckpointingException(
            f"attention_bias is {in_attention} and mlp_bias {in_mlp}: no model of Megatron Core "
            "has biases in one only."
        )
    return bool(in_attention)


def _qwen2(config: Config) -> list[Rule]:
    return _usual(config, gated_mlp(config.layers), qkv_bias=True)


def _mixtral(config: Config) -> list[Rule]:
    num_experts = config.number_of("num_local_experts")
    return _usual(config, _sparse_block(config.layers, num_experts))


def _sparse_block(count: int, num_experts: int) -> list[Rule]:
    return experts(count, num_experts, "block_sparse_moe", ("w1", "w3", "w2"))


def _num_sparse(config: Config) -> int:
    dense = frozenset(config("mlp_only_layers", default=()))
    step = config("decoder_sparse_step", default=1)
    return sum(n not in dense and (n + 1) % step == 0 for n in range(config.layers))


def _qwen3_moe(config: Config) -> list[Rule]:
    _all_biases(config)
    num_sparse = _num_sparse(config)
    mlps = [
        *gated_mlp(config.layers - num_sparse),
        *experts(num_sparse, config.number_of("num_experts", "num_local_experts")),
    ]
    return _usual(config, mlps, qk_norm=True)


def _qwen2_moe(config: Config) -> list[Rule]:
    bias = config("qkv_bias", default=True)
    return _usual(config, _with_gated_shared_expert(config), qkv_bias=bias)


def _qwen3_next(config: Config) -> list[Rule]:
    """Return the rules for models trained with layernorm_zero_centered_gamma.

    Hugging Face has their norms so.
    """
    every = config.number_of("full_attention_interval", default=4)
    num = config.number_of("num_hidden_layers")
    num_linear = num - num // every
    kinds = config("layer_types", default=None)
    if kinds is not None:
        num_linear = kinds.count("linear_attention")
    is_dense = config("model_type") == "qwen3_5_text"
    mlps = gated_mlp(config.layers) if is_dense else _with_gated_shared_expert(config)
    return [
        *outside_layers(config),
        *norms(config.layers),
        *gated_attention(config, config.layers - num_linear),
        *gated_delta_net(config, num_linear, by_head=config("model_type") == "qwen3_next"),
        *mlps,
    ]


def _with_gated_shared_expert(config: Config) -> list[Rule]:
    num_sparse = _num_sparse(config)
    return [
        *gated_mlp(config.layers - num_sparse),
        *experts(num_sparse, config.number_of("num_experts", "num_local_experts")),
        *gated_mlp(num_sparse, "mlp.shared_experts", "mlp.shared_expert"),
        *move(num_sparse, {"mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"}),
    ]


def _after_dense(config: Config) -> list[Rule]:
    """Return the rules for MLPs of models whose first layers are dense.

    The other layers have shared experts and a bias of the router.
    """
    kinds = config("mlp_layer_types", default=())
    num_dense = kinds.count("dense")
    if not kinds:
        num_dense = config.number_of("first_k_dense_replace", default=0)
    num_sparse = config.layers - num_dense
    shared: list[Rule] = []
    if config("n_shared_experts"):
        shared = gated_mlp(num_sparse, "mlp.shared_experts", "mlp.shared_experts")
    return [
        *gated_mlp(num_dense),
        *experts(num_sparse, config.number_of("n_routed_experts", "num_local_experts")),
        *move(num_sparse, {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}),
        *shared,
    ]


def _deepseek_v3(config: Config) -> list[Rule]:
    return [
        *outside_layers(config),
        *norms(config.layers),
        *latent_attention(config),
        *_after_dense(config),
    ]


def _glm5(config: Config) -> list[Rule]:
    """Return the rules for DeepSeek's layers with an indexer.

    The layer that selects keys rotates the first numbers of a head, as in Megatron Core since 0.17.
    """
    kinds = list(config("indexer_types", default=()))
    num = kinds.count("full") + config.layers - len(kinds)
    indexer = {f"linear_{name}.weight": f"{name}.weight" for name in ("wq_b", "wk", "weights_proj")}
    indexer |= {f"k_norm.{kind}": f"k_norm.{kind}" for kind in ("weight", "bias")}
    own = "self_attention.core_attention.indexer."
    new = "self_attn.indexer."
    return [
        *_deepseek_v3(config),
        *move(num, {own + old: new + name for old, name in indexer.items()}),
    ]


def _glm4_moe(config: Config) -> list[Rule]:
    bias = config("attention_bias", default=False)
    qk_norm = config("use_qk_norm", default=False)
    return _usual(config, _after_dense(config), qkv_bias=bias, qk_norm=qk_norm)


def _gemma3(config: Config) -> list[Rule]:
    """Return the rules for models trained with layernorm_zero_centered_gamma.

    Hugging Face has their norms so.
    """
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
    }
    return [
        *outside_layers(config, tied=True),
        *attention(config, qk_norm=True),
        *gated_mlp(config.layers),
        *move(config.layers, names),
    ]


def _minimax_m2(config: Config) -> list[Rule]:
    count = config.layers
    bias = {"mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"}
    num_experts = config.number_of("num_local_experts", "num_experts")
    mlps = [*_sparse_block(count, num_experts), *move(count, bias)]
    return _usual(config, mlps, qk_norm="of all heads")


def _olmoe(config: Config) -> list[Rule]:
    mlps = experts(config.layers, config.number_of("num_experts", "num_local_experts"))
    return _usual(config, mlps, qk_norm="of all heads")


def _gpt_oss(config: Config) -> list[Rule]:
    names = {
        "linear_fc1.weight": "mlp.experts.gate_then_up",
        "linear_fc1.bias": "mlp.experts.gate_then_up_bias",
        "linear_fc2.weight": "mlp.experts.down_proj_rows",
        "linear_fc2.bias": "mlp.experts.down_proj_bias",
    }
    own = "model.layers.*.mlp.experts."
    new = "model.layers.{0}.mlp.experts."
    count = config.layers
    mlps = [
        *move(
            count,
            {"self_attention.core_attention.softmax_offset": "self_attn.sinks"},
            config.heads[:1],
        ),
        *move(count, {f"mlp.router.{kind}": f"mlp.router.{kind}" for kind in ("weight", "bias")}),
        *stacked_experts(count, config.number_of("num_local_experts", "num_experts"), names),
        Transpose(f"{own}gate_then_up", f"{new}gate_then_up_columns", order=(0, 2, 1), count=count),
        Interleave(f"{own}gate_then_up_columns", f"{new}gate_up_proj", axis=2, count=count),
        Interleave(f"{own}gate_then_up_bias", f"{new}gate_up_proj_bias", axis=1, count=count),
        Transpose(f"{own}down_proj_rows", f"{new}down_proj", order=(0, 2, 1), count=count),
    ]
    return _usual(config, mlps, qkv_bias=True, out_bias=True)


def _granitemoe(config: Config) -> list[Rule]:
    block = "block_sparse_moe."
    names = {
        "linear_fc1.weight": f"{block}input_linear.weight",
        "linear_fc2.weight": f"{block}output_linear.weight",
    }
    return [
        *outside_layers(config, tied=True),
        *norms(config.layers),
        *attention(config),
        *move(config.layers, {"mlp.router.weight": f"{block}router.layer.weight"}),
        *stacked_experts(
            config.layers, config.number_of("num_local_experts", "num_experts"), names
        ),
    ]


def _llama4(config: Config) -> list[Rule]:
    num_sparse = len(config("moe_layers"))
    block = "feed_forward."
    own = f"model.layers.*.{block}experts."
    new = f"model.layers.{{0}}.{block}experts."
    names = {
        "linear_fc1.weight": f"{block}experts.gate_up_rows",
        "linear_fc2.weight": f"{block}experts.down_rows",
    }
    mlps = [
        *gated_mlp(config.layers - num_sparse, "mlp", "feed_forward"),
        *gated_mlp(num_sparse, "mlp.shared_experts", f"{block}shared_expert"),
        *move(num_sparse, {"mlp.router.weight": f"{block}router.weight"}),
        *stacked_experts(num_sparse, config.number_of("num_local_experts", "num_experts"), names),
        Transpose(f"{own}gate_up_rows", f"{new}gate_up_proj", order=(0, 2, 1), count=num_sparse),
        Transpose(f"{own}down_rows", f"{new}down_proj", order=(0, 2, 1), count=num_sparse),
    ]
    return _usual(config, mlps)


def _dots1(config: Config) -> list[Rule]:
    return _usual(config, _after_dense(config), qk_norm=True)


_NEMOTRON_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
}


def _nemotron_h(config: Config) -> list[Rule]:
    num_mamba, num_full, num_dense, num_sparse = _nemotron_layers(config)
    plain = {"linear_fc1.weight": "up_proj.weight", "linear_fc2.weight": "down_proj.weight"}
    num_experts = config.number_of("n_routed_experts", "num_local_experts", default=0)
    return [
        *outside_layers(config),
        *attention(config, num_full) * bool(num_full),
        *move(num_dense, {f"mlp.{old}": f"mlp.{new}" for old, new in plain.items()}),
        *experts(num_sparse, num_experts, names=("up_proj", "down_proj")) * bool(num_sparse),
        *_nemotron_sparse(config, num_sparse, plain),
        *mamba(num_mamba),
        *move(num_full, {"input_layernorm.weight": "norm.weight"}),
        *move(num_dense + num_sparse, {"pre_mlp_layernorm.weight": "norm.weight"}),
        *move(num_mamba, {"norm.weight": "norm.weight"}),
        Rename("model.layers.*.self_attn.**", "model.layers.{0}.mixer.{1}"),
        Rename("model.layers.*.mlp.**", "model.layers.{0}.mixer.{1}"),
        Rename("model.layers.**", "backbone.layers.{0}"),
        Rename("model.embed_tokens.weight", "backbone.embeddings.weight"),
        Rename("model.norm.weight", "backbone.norm_f.weight"),
    ]


def _nemotron_layers(config: Config) -> tuple[int, int, int, int]:
    """Return the numbers of Mamba, attention, dense and sparse layers."""
    listed = config("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = [_NEMOTRON_KINDS.get(kind, kind) for kind in listed]
    num_mamba, num_full, num_dense, num_sparse = map(
        kinds.count, ("mamba", "attention", "mlp", "moe")
    )
    biases = [
        name for name in ("use_bias", "attention_bias", "mlp_bias") if config(name, default=False)
    ]
    if biases or num_mamba + num_full + num_dense + num_sparse != len(kinds):
        raise CheckpointingException(
            f"Models with {biases or sorted(set(kinds))} are not known from Megatron Core."
        )
    return num_mamba, num_full, num_dense, num_sparse


def _nemotron_sparse(config: Config, count: int, plain: Mapping[str, str]) -> list[Rule]:
    """Return the rules for sparse layers, without their experts."""
    shared = "mlp.shared_experts."
    names = {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}
    names |= {f"{shared}{old}": f"{shared}{new}" for old, new in plain.items()}
    if config("moe_latent_size", default=0):
        latent = ("mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight")
        names |= dict(zip(latent, latent, strict=True))
    return move(count, names)


FAMILIES: dict[str, Callable[[Config], list[Rule]]] = {
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek_v3,
    "glm_moe_dsa": _glm5,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "ministral": _llama,
    "ministral3": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "olmoe": _olmoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _llama,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "seed_oss": _qwen2,
    "smollm3": _llama,
}
