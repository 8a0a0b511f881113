"""Parameters of MaxText's models, made of tensors of Hugging Face directories.

MaxText multiplies from the right, has an axis for heads, and stacks layers along axis 1. Where its
attention has no scale, the weights of the query have it; Llama 3.1 rotates neighbors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

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
_PATTERN = 6
"""Layers in a step of a scan over Gemma 3.

Five have a window, the last has none.
"""
_MAX_SIZE = 1 << 32
_SCALED = ("llama", "mistral", "mixtral")
"""Families whose weights of the query have the scale of attention."""
_NORMED = ("qwen3", "qwen3_moe", "gemma3_text")
"""Families with norms of queries and keys."""
_SPARSE = {
    "mixtral": "MoeBlock_0",
    "qwen3_moe": "moe_block",
    "deepseek_v3": "DeepSeekMoeBlock_0.MoeBlock_0",
}
"""Names of the block of experts."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size",),
    "inner": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "low": ("q_lora_rank",),
    "rank": ("kv_lora_rank",),
    "rotated": ("qk_rope_head_dim",),
    "plain": ("qk_nope_head_dim",),
    "value": ("v_head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""Fields of configurations with the sizes that rows name."""
# Names in MaxText and in the directory, and the sizes of outputs and inputs; "-" for a norm.
_FINAL_NORM = """
decoder.decoder_norm.scale  model.norm  width  -
"""
_LOGITS = """
decoder.logits_dense.kernel  lm_head  rows  width
"""
_NORMS = """
pre_self_attention_layer_norm.scale   input_layernorm           width  -
post_self_attention_layer_norm.scale  post_attention_layernorm  width  -
"""
_GEMMA_NORMS = """
pre_self_attention_norm.scale   input_layernorm             width  -
post_self_attention_norm.scale  post_attention_layernorm    width  -
pre_ffw_norm.scale              pre_feedforward_layernorm   width  -
post_ffw_norm.scale             post_feedforward_layernorm  width  -
"""
_ATTENTION = """
query.kernel  q_proj  heads,size   width
key.kernel    k_proj  groups,size  width
value.kernel  v_proj  groups,size  width
out.kernel    o_proj  width        heads,size
"""
_HEAD_NORMS = """
query_norm.scale  q_norm  size  -
key_norm.scale    k_norm  size  -
"""
_LATENT_ATTENTION = """
wkv_a.kernel   kv_a_proj_with_mqa  rank+rotated       width
kv_norm.scale  kv_a_layernorm      rank               -
wkv_b.kernel   kv_b_proj           heads,plain+value  rank
out.kernel     o_proj              width              heads,value
"""
_LATENT_QUERY = """
query.kernel  q_proj  heads,plain+rotated  width
"""
_LOW_QUERY = """
wq_a.kernel   q_a_proj       low                  width
q_norm.scale  q_a_layernorm  low                  -
wq_b.kernel   q_b_proj       heads,plain+rotated  low
"""
_MLP = """
wi_0.kernel  gate_proj  inner  width
wi_1.kernel  up_proj    inner  width
wo.kernel    down_proj  width  inner
"""
_EXPERTS = """
gate.kernel  gate                 experts  width
wi_0         experts.*.gate_proj  inner    width
wi_1         experts.*.up_proj    inner    width
wo           experts.*.down_proj  width    inner
"""
_MIXTRAL_EXPERTS = """
gate.kernel  gate          experts  width
wi_0         experts.*.w1  inner    width
wi_1         experts.*.w3  inner    width
wo           experts.*.w2  width    inner
"""


class _Weight(NamedTuple):
    """One weight, in a Hugging Face directory and in MaxText.

    Attributes:
        name: its name in the directory, behind the layer's; `*` is the expert.
        shape: its shape in the directory.
        to: its shape in MaxText.
        num_experts: number of experts, along the first axis in MaxText.
        is_rotated: whether halves of the last axis take turns.
        factor: multiplies the elements.
        offset: is added to the elements.
    """

    name: str
    shape: tuple[int, ...]
    to: tuple[int, ...]
    num_experts: int = 0
    is_rotated: bool = False
    factor: float = 1.0
    offset: float = 0.0

    def mapped(self, prefix: str = "", axis: int | None = None) -> MappedTensor:
        """Return MaxText's tensor, with an axis of size 1 for layers."""
        shape = self.to
        if self.num_experts:
            shape = (1, *shape)
        if axis is not None:
            shape = (*shape[:axis], 1, *shape[axis:])
        experts = []
        for expert in range(max(self.num_experts, 1)):
            key = prefix + self.name.replace("*", str(expert))
            tensor = identity(key, TensorSpec(self.shape, "F32"))
            if len(self.shape) == 2 and self.name != "embed_tokens.weight":
                tensor = permute(tensor, (1, 0))
            experts.append(reshape(tensor, shape))
        result = join(experts, 0)
        if self.is_rotated:
            result = interleave(result, len(shape) - 1, 2)
        if self.factor != 1.0:
            parts = [part._replace(factor=self.factor) for part in result.parts]
            result = replace(result, parts=tuple(parts))
        return add(result, self.offset) if self.offset else result


_Weights: TypeAlias = dict[str, _Weight]


class MaxTextModel:
    """The parameters that MaxText has for a configuration of transformers.

    Attributes:
        num_layers: number of layers, without those for multi-token prediction.
        num_extra: number of the latter.
        is_tied: whether there is no output layer of its own.
        vocab_size: rows of the embedding in a Hugging Face directory.
        num_rows: rows of the embedding that both have; MaxText's has `num_stored` rows.
    """

    def __init__(self, values: Mapping[str, Any], num_stored: int = _MAX_SIZE) -> None:
        config = Config(values)
        self._config = config
        self._kind = config("model_type")
        check_supported(config)
        self._width = self._size("hidden_size")
        self._is_gemma = self._kind == "gemma3_text"
        self._is_deepseek = self._kind == "deepseek_v3"
        self.num_layers = config.number_of("num_hidden_layers", least=1)
        self.num_extra = config.number_of("num_nextn_predict_layers", default=0)
        self.is_tied = bool(config("tie_word_embeddings", default=self._is_gemma))
        self.vocab_size = self._size("vocab_size")
        self.num_rows = min(self.vocab_size, num_stored)

    def _size(self, *names: str) -> int:
        return self._config.number_of(*names, least=1, most=_MAX_SIZE)

    def _sizes(self, text: str, known: Mapping[str, int]) -> tuple[int, ...]:
        """Return named sizes: `known` ones, or of the configuration."""
        sizes = []
        for names in text.split(","):
            total = 0
            for name in names.split("+"):
                total += known.get(name) or self._size(*_FIELDS[name])
            sizes.append(total)
        return tuple(sizes)

    def _listed(self, table: str, prefix: str = "", own: str = "", **known: int) -> _Weights:
        """Return the weights in a table by MaxText's names.

        `prefix` and `own` are put before names in MaxText and in the directory.
        """
        weights = {}
        for row in filter(None, table.splitlines()):
            name, key, outputs, inputs = row.split()
            to = self._sizes(outputs, known)
            weight = _Weight(f"{own}{key}.weight", to, to, offset=float(self._is_gemma))
            if inputs != "-":
                others = self._sizes(inputs, known)
                shape = (math.prod(to), math.prod(others))
                weight = _Weight(weight.name, shape, (*others, *to))
            if "*" in key:
                weight = weight._replace(num_experts=self._size(*_FIELDS["experts"]))
            weights[prefix + name] = weight
        return weights

    def tensors(self, *, is_stacked: bool, axis: int = 1) -> dict[str, MappedTensor]:
        """Return all parameters by name, without a prefix.

        Layers are stacked along `axis`, or each has names of its own.
        """
        shape = (self.num_rows, self._width)
        embedding = _Weight("embed_tokens.weight", shape, shape)
        if self._is_gemma:
            # As transformers in bfloat16, and MaxText's own conversion, round it.
            factor = torch.tensor(math.sqrt(self._width)).bfloat16().item()
            embedding = embedding._replace(factor=factor)
        tensors = {EMBEDDING: embedding.mapped("model.")}
        ends = _FINAL_NORM
        if not self.is_tied:
            ends += _LOGITS
        for name, weight in self._listed(ends, rows=self.num_rows).items():
            tensors[name] = weight.mapped()
        for block, numbers, is_stack, is_sparse in self._blocks(is_stacked):
            prefixes = [f"model.layers.{number}." for number in numbers]
            for suffix, weight in self._weights(is_sparse).items():
                layers = [weight.mapped(prefix, axis if is_stack else None) for prefix in prefixes]
                tensors[f"decoder.{block}.{suffix}"] = join(layers, axis) if is_stack else layers[0]
        return tensors

    def _blocks(self, is_stacked: bool) -> Iterator[tuple[str, list[int], bool, bool]]:
        """Yield blocks: name, numbers of layers, and whether stacked and sparse."""
        everything = list(range(self.num_layers))
        runs = {"layers": everything}
        if self._is_deepseek:
            dense = self._config.number_of("first_k_dense_replace")
            runs = {"dense_layers": everything[:dense], "moe_layers": everything[dense:]}
        for name, run in runs.items():
            is_sparse = self._kind in _SPARSE and name != "dense_layers"
            if not is_stacked:
                for place, number in enumerate(run):
                    yield f"{name}_{place}", [number], False, is_sparse
            elif self._is_gemma:
                yield from self._scanned_gemma(run)
            elif run:
                yield name, run, True, is_sparse

    def _scanned_gemma(self, run: list[int]) -> Iterator[tuple[str, list[int], bool, bool]]:
        whole = len(run) // _PATTERN * _PATTERN
        for place in range(min(_PATTERN, whole)):
            yield f"layers.layers_{place}", run[place:whole:_PATTERN], True, False
        for place, number in enumerate(run[whole:]):
            yield f"layers_remainder.layers_{place}", [number], False, False

    def _weights(self, is_sparse: bool) -> _Weights:
        weights = self._listed(_GEMMA_NORMS if self._is_gemma else _NORMS)
        if self._is_deepseek:
            query = _LATENT_QUERY
            if self._config.values.get("q_lora_rank") is not None:
                query = _LOW_QUERY
            weights |= self._listed(_LATENT_ATTENTION + query, "self_attention.", "self_attn.")
        else:
            weights |= self._attention()
        if is_sparse:
            return weights | self._experts()
        return weights | self._listed(_MLP, "mlp.", "mlp.")

    def _attention(self) -> _Weights:
        heads, groups, size = self._config.heads
        rows = _ATTENTION
        if self._kind in _NORMED:
            rows += _HEAD_NORMS
        prefix = "self_attention."
        weights = self._listed(rows, prefix, "self_attn.", heads=heads, groups=groups, size=size)
        if _rope_of(self._config)[0]["rope_type"] == "llama3":
            for name in (f"{prefix}query.kernel", f"{prefix}key.kernel"):
                weights[name] = weights[name]._replace(is_rotated=True)
        if self._kind in _SCALED:
            name = f"{prefix}query.kernel"
            weights[name] = weights[name]._replace(factor=1 / math.sqrt(size))
        return weights

    def _experts(self) -> _Weights:
        block = _SPARSE[self._kind]
        if self._kind == "mixtral":
            return self._listed(_MIXTRAL_EXPERTS, f"{block}.", "block_sparse_moe.")
        size = self._size("moe_intermediate_size")
        weights = self._listed(_EXPERTS, f"{block}.", "mlp.", inner=size)
        if self._is_deepseek:
            num = weights[f"{block}.wo"].num_experts
            bias = "mlp.gate.e_score_correction_bias"
            weights[f"{block}.gate.bias"] = _Weight(bias, (num,), (num,))
            size *= self._size("n_shared_experts")
            prefix = "DeepSeekMoeBlock_0.shared_experts."
            weights |= self._listed(_MLP, prefix, "mlp.shared_experts.", inner=size)
        return weights


_KINDS = ("llama", "mistral", "qwen3", "gemma3_text", *_SPARSE)
_ACTIVATIONS = ("silu", "swish", "relu", "gelu_new", "gelu_pytorch_tanh")
_COMPUTED: dict[str, Container[Any]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "partial_rotary_factor": (1.0,),
    "rope_type": ("default", "linear", "yarn"),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
}
"""Fields of configurations, with the values that MaxText computes."""
_COMPUTED_IN: dict[str, dict[str, Container[Any]]] = {
    "llama": {"rope_type": ("default", "linear", "yarn", "llama3")},
    "qwen3_moe": {"norm_topk_prob": (True,)},
    "gemma3_text": {
        "rope_type": ("default", "linear"),
        "sliding_attention": ("default",),
        "sliding_window_pattern": (_PATTERN,),
        "_sliding_window_pattern": (_PATTERN,),
    },
    # Of the norms of low rank, transformers takes the default.
    "deepseek_v3": {
        "rope_type": ("default", "yarn"),
        "norm_topk_prob": (True,),
        "rms_norm_eps": (1e-6,),
    },
}
_LLAMA_3_1 = {
    "factor": (8.0,),
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    "original_max_position_embeddings": (8192,),
}


def check_supported(config: Config) -> None:
    """Refuse configurations that no model of MaxText has."""
    kind = config("model_type")
    if kind not in _KINDS:
        raise CheckpointingException(
            f"MaxText's names for model_type {kind!r:.99} are not known, but those of "
            f"{', '.join(sorted(_KINDS))}: pass `rules`. For the text model of one with a tower, "
            "give the content of its text_config as the configuration."
        )
    rope, local = _rope_of(config)
    given = {**config.values, **rope, "sliding_attention": local["rope_type"]}
    if kind == "qwen3_moe":
        given["norm_topk_prob"] = config("norm_topk_prob", default=False)
    if kind == "mistral":
        given.setdefault("sliding_window", 4096)
    for name, values in _computed(config, rope).items():
        value = given.get(name)
        if value is not None and value not in values:
            raise CheckpointingException(
                f"The configuration of model_type {kind!r} has {name} {json.dumps(value):.99}, "
                "which MaxText does not have: it would compute something else. To get the tensors "
                "all the same, give a configuration without that as `family`."
            )


def _computed(config: Config, rope: Mapping[str, Any]) -> dict[str, Container[Any]]:
    """Return the fields of a configuration with the values that MaxText computes."""
    kind = config("model_type")
    computed = _COMPUTED | _COMPUTED_IN.get(kind, {})
    if rope["rope_type"] == "llama3":
        computed |= _LLAMA_3_1
    if rope["rope_type"] == "yarn":
        computed["factor"] = range(1, _MAX_SIZE)
        scale = 0.1 * math.log(max(rope.get("factor", 1), 1)) + 1
        computed["attention_factor"] = (1.0, scale)
        computed["mscale_all_dim"] = (0, rope.get("mscale") or rope.get("mscale_all_dim"))
    if kind in ("mistral", "mixtral"):
        longest = config.number_of("max_position_embeddings", default=_MAX_SIZE, most=_MAX_SIZE)
        computed["sliding_window"] = range(longest, _MAX_SIZE)
    if kind == "gemma3_text":
        # MaxText scales by the size of a head; for 27B, by the width for each head.
        heads, _, size = config.heads
        width = config.number_of("hidden_size", most=_MAX_SIZE)
        computed["query_pre_attn_scalar"] = (size, width // heads)
        layers = ["sliding_attention"] * config.number_of("num_hidden_layers", least=1)
        layers[_PATTERN - 1 :: _PATTERN] = ["full_attention"] * (len(layers) // _PATTERN)
        computed["layer_types"] = (layers,)
    return computed


def _rope_of(config: Config) -> list[dict[str, Any]]:
    """Return the parameters of rotation, of layers without and with a window."""
    values = config("rope_scaling", "rope_parameters", default={})
    own = (values.get("full_attention", values), values.get("sliding_attention"))
    ropes = [rope or {} for rope in own]
    return [{"rope_type": rope.get("type", "default"), **rope} for rope in ropes]
