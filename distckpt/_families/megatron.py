"""The families whose Megatron Core keys are known, by the `model_type` of their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._families.blocks import Config, attention, experts, forms, gated_mlp, norms, outside_layers
from distckpt.rules import Rule


def megatron_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Make the rules from Megatron Core's keys to those of Hugging Face."""
    values = Config(config)
    family = FAMILIES.get(values("model_type"))
    if family is None:
        raise CheckpointingException(
            f"The Megatron keys of model_type {values('model_type')!r} are not supported; those of "
            f"{', '.join(sorted(FAMILIES))} are. Start from the rules of the closest one, and pass yours as `rules`."
        )
    return [*forms(), *family(values)]


def _llama(config: Config) -> list[Rule]:
    bias = config("attention_bias", default=False)
    return [
        *outside_layers(config),
        *norms(config.layers),
        *attention(config, qkv_bias=bias, out_bias=bias, qk_norm=config("model_type") == "qwen3"),
        *gated_mlp(config.layers),
    ]


def _qwen2(config: Config) -> list[Rule]:
    return [
        *outside_layers(config),
        *norms(config.layers),
        *attention(config, qkv_bias=True),
        *gated_mlp(config.layers),
    ]


def _mixtral(config: Config) -> list[Rule]:
    return [
        *outside_layers(config),
        *norms(config.layers),
        *attention(config),
        *experts(config.layers, config("num_local_experts"), "block_sparse_moe", ("w1", "w3", "w2")),
    ]


def _qwen3_moe(config: Config) -> list[Rule]:
    bias = config("attention_bias", default=False)
    dense, step = config("mlp_only_layers", default=()), config("decoder_sparse_step", default=1)
    sparse = [n for n in range(config.layers) if n not in dense and (n + 1) % step == 0]
    return [
        *outside_layers(config),
        *norms(config.layers),
        *attention(config, qkv_bias=bias, out_bias=bias, qk_norm=True),
        *gated_mlp(config.layers - len(sparse)),
        *experts(len(sparse), config("num_experts", "num_local_experts")),
    ]


FAMILIES: dict[str, Callable[[Config], list[Rule]]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _llama,
    "qwen3_moe": _qwen3_moe,
}
