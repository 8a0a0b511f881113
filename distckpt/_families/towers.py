"""Vision towers as Megatron Bridge has them, beside text models of families that are known without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from distckpt._families.blocks import Config, joined_experts
from distckpt.rules import Concat, Rename, Rule, Split, Transpose


class Composed(NamedTuple):
    """What a model with a tower is made of: the family of its text part, and the rules that come after that."""

    text: str
    tower: Callable[[Config], list[Rule]]


def text_part(config: Config, model_type: str) -> Config:
    """Return the configuration of the text part, which older configurations do not separate."""
    values = config.values.get("text_config") or config.values
    tied = config("tie_word_embeddings", default=model_type == "gemma3_text")
    return Config({**values, "model_type": model_type, "tie_word_embeddings": tied})


def _qwen2_5(config: Config) -> list[Rule]:
    depth = Config(config("vision_config")).number_of("depth")
    return [Rename("visual.**", "visual.{0}", count=12 * depth + 6)]


def _qwen3(config: Config) -> list[Rule]:
    vision = Config(config("vision_config"))
    depth, heads, mergers = vision.number_of("depth"), vision.number_of("num_heads"), "deepstack_merger_list"
    num = len(vision("deepstack_visual_indexes", default=()))
    own, new, tower = "vision_model.decoder.layers.*.", "model.visual.blocks.{0}.", "model.visual."
    rules: list[Rule] = []
    for kind in ("weight", "bias"):
        pieces = tuple(f"{new}attn.{name}.{kind}" for name in "qkv")
        rules.append(Split(f"{own}self_attention.linear_qkv.{kind}", pieces, groups=heads, count=depth))
        every = tuple(piece.replace("{0}", "*") for piece in pieces)
        rules.append(Concat(every, f"{new}attn.qkv.{kind}", count=depth))
    names = {"self_attention.linear_proj": "attn.proj", "input_layernorm": "norm1", "pre_mlp_layernorm": "norm2"}
    rules += [Rename(f"{own}{old}.*", f"{new}{name}.{{1}}", count=2 * depth) for old, name in names.items()]
    rules.append(Rename(f"{own}mlp.**", f"{new}mlp.{{1}}", count=4 * depth))
    if num:
        merger = f"vision_model.decoder.{mergers}."
        rules.append(Rename(f"{merger}*.patch_norm.*", f"{tower}{mergers}.{{0}}.norm.{{1}}", count=2 * num))
        rules.append(Rename(f"{merger}**", f"{tower}{mergers}.{{0}}", count=4 * num))
    return [
        Rename("model.**", "model.language_model.{0}"),
        *rules,
        Rename("vision_model.merger.patch_norm.*", f"{tower}merger.norm.{{0}}", count=2),
        Rename("vision_model.**", f"{tower}{{0}}", count=7),
    ]


def _qwen3_moe(config: Config) -> list[Rule]:
    text = text_part(config, "qwen3_moe")
    return [*joined_experts("model.layers.*.mlp", text.number_of("num_experts", "num_local_experts")), *_qwen3(config)]


def _gemma3(config: Config) -> list[Rule]:
    """SigLIP with the names of transformers; the projection is Megatron's, which multiplies from the other side."""
    depth = Config(config("vision_config")).number_of("num_hidden_layers")
    projector = "multi_modal_projector."
    return [
        Rename("model.**", "language_model.model.{0}"),
        Rename("vision_tower.**", "vision_tower.{0}", count=16 * depth + 5),
        Rename(f"{projector}mm_soft_embed_norm.weight", f"{projector}mm_soft_emb_norm.weight", count=1),
        Transpose(f"{projector}proj.weight", f"{projector}mm_input_projection_weight", count=1),
    ]


COMPOSED = {
    "gemma3": Composed("gemma3_text", _gemma3),
    "qwen2_5_vl": Composed("qwen2", _qwen2_5),
    "qwen3_5": Composed("qwen3_5_text", _qwen3),
    "qwen3_5_moe": Composed("qwen3_5_moe_text", _qwen3),
    "qwen3_vl": Composed("qwen3", _qwen3),
    "qwen3_vl_moe": Composed("qwen3_moe", _qwen3_moe),
}
