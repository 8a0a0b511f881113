"""Lists of rules for models that are trained with Megatron and used from Hugging Face directories.

Each function makes the rules from the few numbers that names and shapes do not tell. `apply_rules` with them leads from
Megatron's tensors to those of Hugging Face, `invert` back. The keys are those that Megatron Core's
`sharded_state_dict` gives. If yours have a prefix, put `Rename("model.**", "{0}")` in front of the list.

Rules move numbers and never compute any: models trained with `rotary_interleaved` or with
`layernorm_zero_centered_gamma` have other numbers than Hugging Face expects, which these rules do not change.
"""

from __future__ import annotations

from typing import NamedTuple

from distckpt.rules import Concat, Rename, Rule, Split, SplitQKV, Trim, Unstack

__all__ = ["megatron_gpt_to_llama", "megatron_gpt_to_mixtral"]

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_EXPERTS = "mlp.experts.experts."
_HF_LAYER = "model.layers.{0}."
_ANY_HF_LAYER = "model.layers.*."


def megatron_gpt_to_llama(
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    stacked: bool = True,
    tied: bool = False,
    vocab_size: int | None = None,
) -> list[Rule]:
    """Make the rules for dense models: Llama, Mistral, and Qwen2 with its biases of query, key and value.

    Args:
        num_layers: number of transformer layers.
        num_heads: query heads of the model (`num_attention_heads`).
        num_kv_heads: key-value heads of the model (`num_query_groups`); `num_heads` without grouped queries.
        head_dim: size of a head (`kv_channels`).
        stacked: whether layers share keys and are stacked along axis 0 (`decoder.layers.mlp...`); otherwise each has
            keys of its own (`decoder.layers.0.mlp...`).
        tied: whether the embedding is the output layer, too; then there is no `lm_head.weight`.
        vocab_size: rows of the embedding and of the output layer without padding. Nothing is cut off when left out.
    """
    layers = _Layers(num_layers, stacked)
    rules = [*_outside_layers(tied, vocab_size), *_attention_and_norms(layers, num_heads, num_kv_heads, head_dim)]
    rules.append(layers.join_glu("mlp.linear_fc1"))
    for kind in ("weight", "bias"):
        optional = kind == "bias"
        pieces = tuple(f"{_HF_LAYER}mlp.{name}_proj.{kind}" for name in ("gate", "up"))
        rules += [
            layers.move(f"mlp.linear_fc1.{kind}", f"mlp.gate_up_proj.{kind}", optional=optional),
            Split(f"{_ANY_HF_LAYER}mlp.gate_up_proj.{kind}", to=pieces, count=num_layers, optional=optional),
            layers.move(f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}", optional=optional),
        ]
    return rules


def megatron_gpt_to_mixtral(
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_experts: int,
    *,
    stacked: bool = True,
    experts_stacked: bool = True,
    tied: bool = False,
    vocab_size: int | None = None,
) -> list[Rule]:
    """Make the rules for Mixtral: every layer has a router and experts.

    Args:
        num_layers: number of transformer layers.
        num_heads: query heads of the model (`num_attention_heads`).
        num_kv_heads: key-value heads of the model (`num_query_groups`); `num_heads` without grouped queries.
        head_dim: size of a head (`kv_channels`).
        num_experts: experts of a layer (`num_moe_experts`).
        stacked: whether layers share keys and are stacked along axis 0.
        experts_stacked: whether the experts of a layer share keys and are stacked along the axis after that of the
            layers (Megatron's grouped and sequential experts alike); otherwise each has keys of its own
            (`...experts.experts.0.linear_fc1.weight`).
        tied: whether the embedding is the output layer, too; then there is no `lm_head.weight`.
        vocab_size: rows of the embedding and of the output layer without padding. Nothing is cut off when left out.
    """
    layers = _Layers(num_layers, stacked)
    rules = [*_outside_layers(tied, vocab_size), *_attention_and_norms(layers, num_heads, num_kv_heads, head_dim)]
    rules.append(layers.move("mlp.router.weight", "block_sparse_moe.gate.weight"))
    if not experts_stacked:
        rules.append(layers.join_glu(f"{_EXPERTS}*.linear_fc1"))
    expert, any_expert = "block_sparse_moe.experts.{1}.", "block_sparse_moe.experts.*."
    for megatron, fused in (("linear_fc1", "w13"), ("linear_fc2", "w2")):
        if experts_stacked:
            in_layer = f"block_sparse_moe.experts.{fused}"
            one = f"{_HF_LAYER}block_sparse_moe.experts.{{i}}.{fused}.weight"
            rules.append(layers.move(f"{_EXPERTS}{megatron}.weight", in_layer))
            rules.append(Unstack(_ANY_HF_LAYER + in_layer, one, size=num_experts, count=num_layers))
        else:
            rules.append(
                layers.move(f"{_EXPERTS}*.{megatron}.weight", f"{expert}{fused}.weight", num_experts=num_experts)
            )
    pieces = tuple(f"{_HF_LAYER}{expert}{name}.weight" for name in ("w1", "w3"))
    rules.append(Split(f"{_ANY_HF_LAYER}{any_expert}w13.weight", to=pieces, count=num_layers * num_experts))
    return rules


class _Layers(NamedTuple):
    """The form of the layers in a Megatron checkpoint."""

    num_layers: int
    stacked: bool

    def move(self, suffix: str, to: str, *, num_experts: int = 1, optional: bool = False) -> Rule:
        """Give a tensor of every layer, or of every expert in every layer, its own key below `model.layers`.

        In `to`, {1} is the first wildcard of `suffix`, as {0} is that of the layer.
        """
        if self.stacked:
            to = "model.layers.{i}." + to.replace("{1}", "{0}")
            size = self.num_layers
            return Unstack(f"decoder.layers.{suffix}", to, size=size, count=num_experts, optional=optional)
        count = self.num_layers * num_experts
        return Rename(f"decoder.layers.*.{suffix}", _HF_LAYER + to, count=count, optional=optional)

    def rename(self, suffix: str, to: str) -> Rule:
        """Rename a tensor inside Megatron's layers, where it is there."""
        old, new = (
            ("decoder.layers.", "decoder.layers.") if self.stacked else ("decoder.layers.*.", "decoder.layers.{0}.")
        )
        return Rename(old + suffix, new + to, optional=True)

    def join_glu(self, suffix: str) -> Rule:
        """Fuse gate and up projection where Megatron stored them apart (`singleton_local_shards`)."""
        pattern = f"decoder.layers.{suffix}.weight" if self.stacked else f"decoder.layers.*.{suffix}.weight"
        to = pattern
        for number in range(pattern.count("*")):
            to = to.replace("*", f"{{{number}}}", 1)
        return Concat((f"{pattern}_w", f"{pattern}_v"), to, axis=1 if self.stacked else 0, optional=True)


def _outside_layers(tied: bool, vocab_size: int | None) -> list[Rule]:
    rules: list[Rule] = []
    if vocab_size is not None:
        rules += [Trim(key, axis=0, size=vocab_size) for key in ([_EMBEDDING] if tied else [_EMBEDDING, _OUTPUT])]
    rules += [
        Rename(_EMBEDDING, "model.embed_tokens.weight"),
        Rename("decoder.final_layernorm.weight", "model.norm.weight"),
    ]
    return rules if tied else [*rules, Rename(_OUTPUT, "lm_head.weight")]


def _attention_and_norms(layers: _Layers, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Rule]:
    # Megatron names a norm after the linear layer that it is fused with, or by itself: one name first, then one rule.
    rules = [
        layers.rename("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        layers.rename("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        layers.move("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        layers.move("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ]
    for kind in ("weight", "bias"):
        optional = kind == "bias"
        fused, count = f"self_attn.qkv_proj.{kind}", layers.num_layers
        query, key, value = (f"{_HF_LAYER}self_attn.{name}_proj.{kind}" for name in "qkv")
        heads = (num_heads, num_kv_heads, head_dim)
        rules += [
            layers.move(f"self_attention.linear_qkv.{kind}", fused, optional=optional),
            SplitQKV(_ANY_HF_LAYER + fused, (query, key, value), *heads, count=count, optional=optional),
            layers.move(f"self_attention.linear_proj.{kind}", f"self_attn.o_proj.{kind}", optional=optional),
        ]
    return rules
