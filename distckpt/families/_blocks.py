"""Rules of common blocks: from Megatron Core's keys to Hugging Face's names.

`forms` turns Megatron's several forms (layers and experts stacked or not, norms fused or not) into
one: a key for each layer and expert, and norms under their own names. The other rules begin there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt.rules._pieces import Concat, Split, SplitQKV, Stack, Unstack
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Add, Copy, Drop, Rename, Tie, Trim

LAYER = "decoder.layers.*."
HF_LAYER = "model.layers.{0}."
_STACKS = ("self_attention", "mlp", "mixer", "norm", "input_layernorm", "pre_mlp_layernorm")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
MTP_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Names of the number of layers for multi-token prediction."""
_MTP_LAYERS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose layers for multi-token prediction come last on disk."""
_MTP_APART = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that have such a layer under a name of its own."""
_MAX_LAYERS = 10_000
"""Maximum number of layers, since there are rules for each layer."""
_MAX_SIZE = 1 << 32


class IncompleteConfigError(CheckpointingException):
    """A configuration that lacks a value."""


class Config(NamedTuple):
    """The configuration of a model, or of its text part."""

    values: Mapping[str, Any]

    def __call__(self, *names: str, default: Any = None) -> Any:
        """Return the first value of some names that is not null."""
        values = (self.values.get(name) for name in names)
        value = next((value for value in values if value is not None), default)
        if value is None:
            raise IncompleteConfigError(
                f"The configuration of model_type {self.values.get('model_type')!r} does not say "
                f"{names[0]!r}: add it."
            )
        return value

    def number_of(
        self, *names: str, default: int | None = None, least: int = 0, most: int = _MAX_LAYERS
    ) -> int:
        """Return a number in a configuration, from `least` to `most`."""
        value = self(*names, default=default)
        if type(value) is int and least <= value <= most:
            return value
        raise CheckpointingException(
            f"{names[0]} is {value!r:.99} in the configuration, which no model has."
        )

    @property
    def layers(self) -> int:
        """Number of layers, including the ones for multi-token prediction."""
        return self.number_of("num_hidden_layers") + self.mtp_layers

    @property
    def mtp_layers(self) -> int:
        """Number of layers for multi-token prediction, in families that have them."""
        known = self("model_type") in (*_MTP_LAYERS, *_MTP_APART)
        if not known:
            return 0
        return self.number_of(*MTP_NAMES, default=0)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, size of a head."""
        num = self.number_of("num_attention_heads", least=1, most=_MAX_SIZE)
        size = self.values.get("head_dim") or self.number_of("hidden_size", most=_MAX_SIZE) // num
        return (
            num,
            self.number_of("num_key_value_heads", default=num, least=1, most=_MAX_SIZE),
            self.number_of("head_dim", default=size, least=1, most=_MAX_SIZE),
        )


def forms(config: Config, *, has_tower: bool) -> list[Rule]:
    """Turn the forms of a Megatron checkpoint into one, without its optimizer."""
    rules: list[Rule] = [Drop(key, optional=True) for key in ("optimizer.**", "chained_*.**")]
    if has_tower:
        rules.append(Rename("language_model.**", "{0}"))
    rules.append(
        Rename("decoder.final_norm.weight", "decoder.final_layernorm.weight", optional=True)
    )
    if config.mtp_layers:
        number = f"{{0+{config.layers - config.mtp_layers}}}"
        for block in ("transformer_layer", "mtp_model_layer"):
            rules.append(
                Rename(f"mtp.layers.*.{block}.**", f"decoder.layers.{number}.{{1}}", optional=True)
            )
    rules += _single_layers("decoder.layers.", ("weight",))
    if has_tower:
        rules += _single_layers("vision_model.decoder.layers.", ("weight", "bias"))
    return rules + _joined_gates()


def _single_layers(root: str, kinds: tuple[str, ...]) -> list[Rule]:
    """Divide stacks of layers, and separate norms from linear layers.

    Norms may be stored with a linear layer.
    """
    rules: list[Rule] = [
        Unstack(f"{root}{part}.**", f"{root}{{i}}.{part}.{{0}}", optional=True) for part in _STACKS
    ]
    for fused, own in _FUSED_NORMS.items():
        for kind in kinds:
            old = fused.replace("weight", kind)
            new = own.replace("weight", kind)
            rules.append(Rename(f"{root}*.{old}", f"{root}{{0}}.{new}", optional=True))
    return rules


def _joined_gates() -> list[Rule]:
    """Join gate and up projections that are stored apart."""
    rules: list[Rule] = []
    for glu in ("linear_fc1", "shared_experts.linear_fc1", "experts.experts.*.linear_fc1"):
        for kind in ("weight", "bias"):
            pattern = f"{LAYER}mlp.{glu}.{kind}"
            name = f"decoder.layers.{{0}}.mlp.{glu.replace('*', '{1}')}.{kind}"
            rules.append(Concat((f"{pattern}_w", f"{pattern}_v"), name, optional=True))
    return rules


def outside_layers(config: Config, *, tied: bool = False) -> list[Rule]:
    """Return the rules for embedding, last norm and output layer.

    Rows that pad the vocabulary are cut off.
    """
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    embedding, output = names
    size = config.number_of("vocab_size", most=_MAX_SIZE)
    rules: list[Rule] = []
    if config("tie_word_embeddings", default=tied):
        # Files may hold apart the tensors that the configuration ties.
        rules = [
            Tie(output, embedding, optional=True),
            Trim(output, axis=0, size=size, is_vocabulary=True, optional=True),
            Rename(output, names.pop(output), optional=True),
        ]
    rules += [Trim(key, axis=0, size=size, is_vocabulary=True, count=1) for key in names]
    names["decoder.final_layernorm.weight"] = "model.norm.weight"
    return rules + [Rename(key, name, count=1) for key, name in names.items()]


def token_prediction(config: Config) -> list[Rule]:
    """Return the rules for layers of multi-token prediction (MTP).

    They are for the tensors that these have in addition to a usual layer, and place them on disk.
    """
    if not config.mtp_layers:
        return []
    if config("model_type") in _MTP_APART:
        return _token_prediction_apart(config)
    first = config.layers - config.mtp_layers
    names = {name: name for name in ("enorm", "hnorm", "eh_proj")} | {
        "final_layernorm": "shared_head.norm"
    }
    rules: list[Rule] = []
    for old, new in names.items():
        to = f"model.layers.{{0+{first}}}.{new}.weight"
        rules.append(Rename(f"mtp.layers.*.{old}.weight", to, count=config.mtp_layers))
    for layer in range(first, config.layers):
        rules.append(Copy("model.embed_tokens.weight", f"model.layers.{layer}.embed_tokens.weight"))
        rules.append(Copy("lm_head.weight", f"model.layers.{layer}.shared_head.head.weight"))
    return rules


def _token_prediction_apart(config: Config) -> list[Rule]:
    if config.mtp_layers > 1:
        raise CheckpointingException(
            f"The configuration says {config.mtp_layers} layers for multi-token prediction. "
            "Megatron has a projection for each, and on disk there is one, `mtp.fc`: only one "
            "layer is known."
        )
    names = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "final_layernorm": "norm",
    }
    renamed = [
        Rename(f"mtp.layers.0.{old}.weight", f"mtp.{new}.weight", count=1)
        for old, new in names.items()
    ]
    first = config.layers - config.mtp_layers
    return [*renamed, Rename(f"model.layers.{first}.**", "mtp.layers.0.{0}")]


def move(
    count: int, names: Mapping[str, str], shape: tuple[int | None, ...] | None = None
) -> list[Rule]:
    """Rename tensors of `count` layers, each of the given shape."""
    rules: list[Rule] = []
    if count:
        for old, new in names.items():
            rules.append(Rename(LAYER + old, HF_LAYER + new, shape, count=count))
    return rules


def norms(count: int) -> list[Rule]:
    """Return the rules for the norms before attention and MLP."""
    return move(
        count,
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        },
    )


def attention(
    config: Config,
    count: int | None = None,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool | str = False,
) -> list[Rule]:
    """Return the rules for grouped-query attention, in all layers or `count`.

    `qk_norm` tells whether queries and keys have norms: of each head, or "of all heads".
    """
    if count is None:
        count = config.layers
    rules: list[Rule] = []
    kinds = ("weight", "bias") if qkv_bias else ("weight",)
    for kind in kinds:
        query, key, value = (f"{HF_LAYER}self_attn.{name}_proj.{kind}" for name in "qkv")
        old = f"{LAYER}self_attention.linear_qkv.{kind}"
        rules.append(SplitQKV(old, (query, key, value), *config.heads, count=count))
    old = "self_attention."
    new = "self_attn."
    num_heads, num_groups, size = config.heads
    # Wrong numbers of heads may fit the fused projection by chance.
    rules += move(
        count, {f"{old}linear_proj.weight": f"{new}o_proj.weight"}, (None, num_heads * size)
    )
    if out_bias:
        rules += move(count, {f"{old}linear_proj.bias": f"{new}o_proj.bias"})
    widths: dict[str, int] = {}
    if qk_norm:
        widths = {"q": size, "k": size}
    if qk_norm == "of all heads":
        widths = {"q": num_heads * size, "k": num_groups * size}
    for name, width in widths.items():
        rules += move(
            count, {f"{old}{name}_layernorm.weight": f"{new}{name}_norm.weight"}, (width,)
        )
    return rules


def gated_attention(config: Config, count: int) -> list[Rule]:
    """Return the rules for attention with a gated output, in `count` layers.

    Query and gate of a head are neighbors on disk.
    """
    heads, groups, size = config.heads
    own = f"{LAYER}self_attention."
    new = f"{HF_LAYER}self_attn."
    fused = heads // groups * size
    pieces = (f"{new}queries", f"{new}gates", f"{new}k_proj.weight", f"{new}v_proj.weight")
    sizes = (fused, fused, size, size)
    both = tuple(piece.replace("{0}", "*") for piece in pieces[:2])
    rules: list[Rule] = [
        Split(f"{own}linear_qkv.weight", pieces, sizes=sizes, groups=groups, count=count),
        Concat(both, f"{new}q_proj.weight", groups=heads, count=count),
        Rename(
            f"{own}linear_proj.weight", f"{new}o_proj.weight", (None, heads * size), count=count
        ),
    ]
    return rules + [
        Rename(f"{own}{name}_layernorm.weight", f"{new}{name}_norm.weight", (size,), count=count)
        for name in "qk"
    ]


def gated_delta_net(config: Config, count: int, *, by_head: bool) -> list[Rule]:
    """Return the rules for linear attention, in `count` layers.

    On disk all parts of a key head lie together if `by_head`, else all parts of a kind.
    """
    own = f"{LAYER}self_attention."
    new = f"{HF_LAYER}linear_attn."
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "out_proj.weight": "out_proj.weight"}
    fused = {"qkv": ("query", "key", "value"), "z": ("z",), "b": ("beta",), "a": ("alpha",)}
    if by_head:
        fused = {"qkvz": ("query", "key", "value", "z"), "ba": ("beta", "alpha")}
    groups = config.number_of("linear_num_key_heads") if by_head else 1
    rules: list[Rule] = []
    for name, parts in fused.items():
        pieces = tuple(f"{own}in_proj.weight.{part}" for part in parts)
        rules.append(Concat(pieces, f"{new}in_proj_{name}.weight", groups=groups))
    rules.append(
        Concat(
            tuple(f"{own}conv1d.weight.{part}" for part in ("query", "key", "value")),
            f"{new}conv1d.weight",
        )
    )
    # In Megatron either all norms count from 1 or none do, in Hugging Face all but this one.
    rules.append(Add(f"{own}out_norm.weight", 1.0))
    names["out_norm.weight"] = "norm.weight"
    rules += [Rename(own + old, new + name) for old, name in names.items()]
    if not count:
        return []
    return [replace(rule, count=count) for rule in rules]


def gated_mlp(
    count: int,
    old: str = "mlp",
    new: str = "mlp",
    *,
    bias: bool = False,
) -> list[Rule]:
    """Return the rules for an MLP with gate and up projection.

    It is in `count` layers.
    """
    rules: list[Rule] = []
    if not count:
        return []
    kinds = ("weight", "bias") if bias else ("weight",)
    for kind in kinds:
        pieces = tuple(f"{HF_LAYER}{new}.{name}_proj.{kind}" for name in ("gate", "up"))
        rules.append(Split(f"{LAYER}{old}.linear_fc1.{kind}", pieces, count=count))
        rules += move(count, {f"{old}.linear_fc2.{kind}": f"{new}.down_proj.{kind}"})
    return rules


def latent_attention(config: Config) -> list[Rule]:
    """Return the rules for multi-head latent attention (MLA).

    Queries may be of low rank or not.
    """
    names = {
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "kv_layernorm.weight": "kv_a_layernorm.weight",
        "linear_proj.weight": "o_proj.weight",
    }
    if config.values.get("q_lora_rank") is None:
        names["linear_q_proj.weight"] = "q_proj.weight"
    else:
        names |= {
            "linear_q_down_proj.weight": "q_a_proj.weight",
            "linear_q_up_proj.weight": "q_b_proj.weight",
            "q_layernorm.weight": "q_a_layernorm.weight",
        }
    return move(
        config.layers, {f"self_attention.{old}": f"self_attn.{new}" for old, new in names.items()}
    )


def experts(
    count: int,
    num_experts: int,
    block: str = "mlp",
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """Return the rules for router and experts of `count` layers.

    There is one tensor for each expert on disk. With two names, experts have no gate.
    """
    own = "mlp.experts.experts."
    rules: list[Rule] = []
    for part in ("linear_fc1", "linear_fc2"):
        to = f"decoder.layers.{{0}}.{own}{{i}}.{part}.weight"
        rules.append(Unstack(f"{LAYER}{own}{part}.weight", to, size=num_experts, optional=True))
    *into, down = (f"{HF_LAYER}{block}.experts.{{1}}.{name}.weight" for name in names)
    return [
        *rules,
        *move(count, {"mlp.router.weight": f"{block}.gate.weight"}),
        Split(f"{LAYER}{own}*.linear_fc1.weight", tuple(into), count=count * num_experts),
        Rename(f"{LAYER}{own}*.linear_fc2.weight", down, count=count * num_experts),
    ]


def mamba(count: int) -> list[Rule]:
    """Return the rules for Mamba 2, in `count` layers."""
    own = f"{LAYER}mixer."
    new = f"{HF_LAYER}mixer."
    parts = {
        "in_proj.weight": ("z", "x", "B", "C", "dt"),
        "conv1d.weight": ("x", "B", "C"),
        "conv1d.bias": ("x", "B", "C"),
    }
    rules: list[Rule] = [
        Rename(f"{own}conv1d_*.*", "decoder.layers.{0}.mixer.conv1d.{1}.{2}", optional=True)
    ]
    if count:
        for name, pieces in parts.items():
            joined = tuple(f"{own}{name}.{piece}" for piece in pieces)
            rules.append(Concat(joined, new + name, count=count))
    names = ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    return rules + move(count, {f"mixer.{name}": f"mixer.{name}" for name in names})


def stacked_experts(count: int, num_experts: int, names: Mapping[str, str]) -> list[Rule]:
    """Stack the experts of `count` layers, one tensor for each layer.

    Some families have them so on disk.
    """
    own = "mlp.experts.experts."
    rules: list[Rule] = []
    for old, new in names.items():
        stack = f"decoder.layers.{{0}}.{own}{old}"
        rules.append(Stack(f"{LAYER}{own}*.{old}", stack, axis=0, size=num_experts, optional=True))
        rules.append(Rename(f"{LAYER}{own}{old}", HF_LAYER + new, count=count))
    return rules


def joined_experts(block: str, num_experts: int) -> list[Rule]:
    """Join single experts into two tensors for each layer.

    They are gate and up projections, and down projections. `block` is the pattern of their layers
    on disk, with one wildcard.
    """
    own = f"{block}.experts."
    to = f"{block.replace('*', '{0}')}.experts."
    both = (f"{own}*.gate_proj.weight", f"{own}*.up_proj.weight")
    rules: list[Rule] = [Concat(both, f"{to}{{1}}.gate_up_proj.weight", optional=True)]
    for name in ("gate_up_proj", "down_proj"):
        old = f"{own}*.{name}.weight"
        rules.append(Stack(old, to + name, axis=0, size=num_experts, optional=True))
    return rules
