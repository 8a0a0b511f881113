"""Names and shapes of MaxText's parameters, made of the ones in Hugging Face directories.

MaxText multiplies from the right, has an axis for heads, and stacks layers along axis 1. Models
without a scale in attention have it in the weights of the query; Llama 3.1 rotates neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distckpt._base.errors import CheckpointingException
from distckpt.families._blocks import Config
from distckpt.rules._mapped import (
    MappedTensor,
    TensorSpec,
    add,
    identity,
    interleave,
    join,
    permute,
    reshape,
)

EMBEDDING = "token_embedder.embedding"
LOGITS = "decoder.logits_dense.kernel"
GEMMA_PATTERN = 6
"""Layers in one step of a scan over Gemma 3: five with a window, and one without."""
_MAX_SIZE = 1 << 32


class _Weight(NamedTuple):
    """A weight of one layer, or one that is not of a layer.

    Attributes:
        name: its name in a Hugging Face directory, behind the layer's; `*` is the expert.
        shape: its shape there.
        to: its shape in MaxText.
        is_transposed: whether axes change places before the reshape.
        num_experts: number of experts, along the first axis in MaxText.
        is_rotated: whether halves of the last axis take turns.
        factor: multiplies the elements.
        add: is added to the elements.
    """

    name: str
    shape: tuple[int, ...]
    to: tuple[int, ...]
    is_transposed: bool = False
    num_experts: int = 0
    is_rotated: bool = False
    factor: float = 1.0
    add: float = 0.0

    def mapped(self, prefix: str, axis: int | None = None) -> MappedTensor:
        """Return the tensor of MaxText, with an axis of size 1 for the layers."""
        shape = self.to
        if self.num_experts:
            shape = (1, *shape)
        if axis is not None:
            shape = (*shape[:axis], 1, *shape[axis:])
        experts = []
        for expert in range(max(self.num_experts, 1)):
            key = prefix + self.name.replace("*", str(expert))
            tensor = identity(key, TensorSpec(self.shape, "F32"))
            if self.is_transposed:
                tensor = permute(tensor, (1, 0))
            experts.append(reshape(tensor, shape))
        result = join(experts, 0)
        if self.is_rotated:
            result = interleave(result, len(result.shape) - 1, 2)
        if self.factor != 1.0:
            scaled = [part._replace(factor=self.factor) for part in result.parts]
            result = replace(result, parts=tuple(scaled))
        return add(result, self.add) if self.add else result


def _kernel(name: str, wide: int, deep: int, num_experts: int = 0) -> _Weight:
    return _Weight(name, (wide, deep), (deep, wide), True, num_experts)


def _to_heads(name: str, heads: int, size: int, deep: int) -> _Weight:
    return _Weight(name, (heads * size, deep), (deep, heads, size), True)


def _from_heads(name: str, heads: int, size: int, wide: int) -> _Weight:
    return _Weight(name, (wide, heads * size), (heads, size, wide), True)


_Weights = dict[str, _Weight]


class _Family(NamedTuple):
    """A family of models.

    Attributes:
        norms: names of norms in MaxText -> in Hugging Face.
        scales_query: whether the weights of the query have the scale of attention.
        has_head_norms: whether queries and keys have norms.
        sparse: name of the block with experts, None without.
        experts: names of that block and of its matrices in Hugging Face.
        offset: what MaxText's norms have more.
    """

    norms: Mapping[str, str]
    scales_query: bool = False
    has_head_norms: bool = False
    sparse: str | None = None
    experts: tuple[str, tuple[str, str, str]] = ("mlp", ("gate_proj", "up_proj", "down_proj"))
    offset: float = 0.0


_NORMS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
_GEMMA_NORMS = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILIES = {
    "llama": _Family(_NORMS, scales_query=True),
    "mistral": _Family(_NORMS, scales_query=True),
    "mixtral": _Family(
        _NORMS,
        scales_query=True,
        sparse="MoeBlock_0",
        experts=("block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "qwen3": _Family(_NORMS, has_head_norms=True),
    "qwen3_moe": _Family(_NORMS, has_head_norms=True, sparse="moe_block"),
    "gemma3_text": _Family(_GEMMA_NORMS, has_head_norms=True, offset=1.0),
    "deepseek_v3": _Family(_NORMS, sparse="DeepSeekMoeBlock_0.MoeBlock_0"),
}


class MaxTextModel:
    """The parameters that MaxText has for a configuration of transformers.

    Attributes:
        num_layers: number of layers, without those for multi-token prediction.
        is_tied: whether there is no output layer of its own.
        num_rows: rows of the embedding.
    """

    def __init__(self, values: Mapping[str, Any], num_rows: int | None = None) -> None:
        config = Config(values)
        kind = config("model_type")
        family = _FAMILIES.get(kind)
        if family is None:
            raise CheckpointingException(
                f"MaxText's names for model_type {kind!r:.99} are not known, but those of "
                f"{', '.join(sorted(_FAMILIES))}: pass `rules`. For a text model with a tower, "
                "give the text_config as the configuration."
            )
        self._config = config
        self._kind = kind
        self._family = family
        self._width = self._size("hidden_size")
        self.num_layers = config.number_of("num_hidden_layers")
        self.is_tied = bool(config("tie_word_embeddings", default=kind == "gemma3_text"))
        self.num_rows = num_rows or self._size("vocab_size")
        self._check_supported()

    def _size(self, *names: str) -> int:
        return self._config.number_of(*names, most=_MAX_SIZE)

    def _check_supported(self) -> None:
        config = self._config
        why = None
        if config("attention_bias", "mlp_bias", default=False):
            why = "biases"
        if self._kind == "qwen3_moe":
            if config("mlp_only_layers", default=[]) or config("decoder_sparse_step", default=1) > 1:
                why = "dense layers among sparse ones"
        if self._kind == "gemma3_text":
            every = config("sliding_window_pattern", "_sliding_window_pattern", default=6)
            kinds = config("layer_types", default=[])
            wide = [number for number, name in enumerate(kinds, 1) if name == "full_attention"]
            expected = list(range(every, len(kinds) + 1, every))
            if every != GEMMA_PATTERN or wide != expected:
                why = "another order of layers than five with a window and one without"
        if why:
            raise CheckpointingException(
                f"The configuration of model_type {self._kind!r} asks for {why}, which MaxText's "
                "model does not have."
            )

    def tensors(self, *, is_stacked: bool, axis: int = 1) -> dict[str, MappedTensor]:
        """Return all parameters, made of tensors of a Hugging Face directory.

        Layers are stacked along `axis`, or each has names of its own.
        """
        width = self._width
        factor = 1.0
        if self._kind == "gemma3_text":
            # MaxText's embedding has the factor of transformers, which that rounds to bfloat16.
            factor = torch.tensor(math.sqrt(width)).bfloat16().item()
        shape = (self.num_rows, width)
        embedding = _Weight("embed_tokens.weight", shape, shape, factor=factor)
        tensors = {
            EMBEDDING: embedding.mapped("model."),
            "decoder.decoder_norm.scale": self._norm("norm.weight").mapped("model."),
        }
        if not self.is_tied:
            tensors[LOGITS] = _kernel("lm_head.weight", self.num_rows, width).mapped("")
        for block, numbers, weights in self._blocks(is_stacked):
            for suffix, weight in weights.items():
                name = f"decoder.{block}.{suffix}"
                prefixes = [f"model.layers.{number}." for number in numbers]
                if is_stacked and "remainder" not in block:
                    stack = [weight.mapped(prefix, axis) for prefix in prefixes]
                    tensors[name] = join(stack, axis)
                else:
                    tensors[name] = weight.mapped(prefixes[0])
        return tensors

    def _blocks(self, is_stacked: bool) -> Iterator[tuple[str, list[int], _Weights]]:
        """Yield the blocks of layers: name, numbers of the layers, and weights."""
        num_dense = 0
        if self._kind == "deepseek_v3":
            num_dense = min(self._config.number_of("first_k_dense_replace"), self.num_layers)
        runs = [("layers", range(self.num_layers), self._family.sparse is not None)]
        if self._kind == "deepseek_v3":
            runs = [
                ("dense_layers", range(num_dense), False),
                ("moe_layers", range(num_dense, self.num_layers), True),
            ]
        for name, run, is_sparse in runs:
            weights = self._weights(is_sparse)
            if not is_stacked:
                for place, number in enumerate(run):
                    yield f"{name}_{place}", [number], weights
            elif self._kind == "gemma3_text":
                whole = self.num_layers // GEMMA_PATTERN * GEMMA_PATTERN
                for place in range(GEMMA_PATTERN if whole else 0):
                    yield f"layers.layers_{place}", [*range(place, whole, GEMMA_PATTERN)], weights
                for number in range(whole, self.num_layers):
                    yield f"layers_remainder.layers_{number - whole}", [number], weights
            elif run:
                yield name, list(run), weights

    def _weights(self, is_sparse: bool) -> _Weights:
        weights = {}
        for name, own in self._family.norms.items():
            weights[f"{name}.scale"] = self._norm(f"{own}.weight")
        attention = self._attention()
        if self._kind == "deepseek_v3":
            attention = self._latent_attention()
        for name, weight in attention.items():
            weights[f"self_attention.{name}"] = weight._replace(name=f"self_attn.{weight.name}")
        if is_sparse:
            return weights | self._sparse_mlp()
        return weights | self._gated_mlp("mlp", "mlp", self._size("intermediate_size"))

    def _norm(self, name: str, size: int | None = None) -> _Weight:
        shape = (size or self._width,)
        return _Weight(name, shape, shape, add=self._family.offset)

    def _attention(self) -> _Weights:
        heads, groups, size = self._config.heads
        scaling = self._config("rope_scaling", "rope_parameters", default={})
        kind = scaling.get("rope_type", scaling.get("type"))
        is_rotated = self._kind == "llama" and kind == "llama3"
        query = _to_heads("q_proj.weight", heads, size, self._width)
        if self._family.scales_query:
            query = query._replace(factor=1 / math.sqrt(size))
        key = _to_heads("k_proj.weight", groups, size, self._width)
        weights = {
            "query.kernel": query._replace(is_rotated=is_rotated),
            "key.kernel": key._replace(is_rotated=is_rotated),
            "value.kernel": _to_heads("v_proj.weight", groups, size, self._width),
            "out.kernel": _from_heads("o_proj.weight", heads, size, self._width),
        }
        if self._family.has_head_norms:
            weights["query_norm.scale"] = self._norm("q_norm.weight", size)
            weights["key_norm.scale"] = self._norm("k_norm.weight", size)
        return weights

    def _latent_attention(self) -> _Weights:
        heads = self._size("num_attention_heads")
        rank = self._size("kv_lora_rank")
        rotated = self._size("qk_rope_head_dim")
        plain = self._size("qk_nope_head_dim")
        value = self._size("v_head_dim")
        weights = {
            "wkv_a.kernel": _kernel("kv_a_proj_with_mqa.weight", rank + rotated, self._width),
            "kv_norm.scale": self._norm("kv_a_layernorm.weight", rank),
            "wkv_b.kernel": _to_heads("kv_b_proj.weight", heads, plain + value, rank),
            "out.kernel": _from_heads("o_proj.weight", heads, value, self._width),
        }
        low = self._config.values.get("q_lora_rank")
        if low is None:
            query = _to_heads("q_proj.weight", heads, plain + rotated, self._width)
            return weights | {"query.kernel": query}
        weights["wq_a.kernel"] = _kernel("q_a_proj.weight", low, self._width)
        weights["q_norm.scale"] = self._norm("q_a_layernorm.weight", low)
        weights["wq_b.kernel"] = _to_heads("q_b_proj.weight", heads, plain + rotated, low)
        return weights

    def _gated_mlp(self, name: str, own: str, size: int) -> _Weights:
        return {
            f"{name}.wi_0.kernel": _kernel(f"{own}.gate_proj.weight", size, self._width),
            f"{name}.wi_1.kernel": _kernel(f"{own}.up_proj.weight", size, self._width),
            f"{name}.wo.kernel": _kernel(f"{own}.down_proj.weight", self._width, size),
        }

    def _sparse_mlp(self) -> _Weights:
        block = self._family.sparse
        own, (gate, up, down) = self._family.experts
        num = self._size("num_local_experts", "num_experts", "n_routed_experts")
        # All experts of Mixtral are of the usual size.
        is_usual = self._kind == "mixtral"
        size = self._size("intermediate_size" if is_usual else "moe_intermediate_size")
        experts = f"{own}.experts.*"
        weights = {
            f"{block}.gate.kernel": _kernel(f"{own}.gate.weight", num, self._width),
            f"{block}.wi_0": _kernel(f"{experts}.{gate}.weight", size, self._width, num),
            f"{block}.wi_1": _kernel(f"{experts}.{up}.weight", size, self._width, num),
            f"{block}.wo": _kernel(f"{experts}.{down}.weight", self._width, size, num),
        }
        if self._kind == "deepseek_v3":
            bias = f"{own}.gate.e_score_correction_bias"
            weights[f"{block}.gate.bias"] = _Weight(bias, (num,), (num,))
            if shared := self._config("n_shared_experts", default=0):
                name = "DeepSeekMoeBlock_0.shared_experts"
                weights |= self._gated_mlp(name, f"{own}.shared_experts", shared * size)
        return weights
