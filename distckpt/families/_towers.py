"""Vision towers of Megatron Bridge and Megatron Core.

They accompany text models of known families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt.families._blocks import Config, joined_experts
from distckpt.rules._pieces import Concat, Split, Unstack
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Rename, Transpose

_LAYER = "vision_model.decoder.layers.*."


class Composed(NamedTuple):
    """The parts of a model with a tower.

    They are the family of its text part (None if the configuration names it), and the rules that
    come after the rules of that family.
    """

    text: str | None
    tower: Callable[[Config], list[Rule]]


def text_part(config: Config, model_type: str | None) -> Config:
    """Return the configuration of the text part.

    Older configurations do not separate it.
    """
    values = config.values.get("text_config") or config.values
    tied = config("tie_word_embeddings", default=model_type == "gemma3_text")
    settings = {**values, "tie_word_embeddings": tied}
    if model_type:
        settings["model_type"] = model_type
    return Config(settings)


def _qwen2_5(config: Config) -> list[Rule]:
    depth = Config(config("vision_config")).number_of("depth")
    return [Rename("visual.**", "visual.{0}", count=12 * depth + 6)]


def _qwen3(config: Config) -> list[Rule]:
    vision = Config(config("vision_config"))
    depth = vision.number_of("depth")
    heads = vision.number_of("num_heads")
    num_mergers = len(vision("deepstack_visual_indexes", default=()))
    tower = "model.visual."
    return [
        Rename("model.**", "model.language_model.{0}"),
        *_qwen3_blocks(depth, heads),
        *_qwen3_mergers(num_mergers),
        Rename("vision_model.merger.patch_norm.*", f"{tower}merger.norm.{{0}}", count=2),
        Rename("vision_model.**", f"{tower}{{0}}", count=7),
    ]


def _qwen3_blocks(depth: int, heads: int) -> list[Rule]:
    new = "model.visual.blocks."
    names = {
        "self_attention.linear_proj": "attn.proj",
        "input_layernorm": "norm1",
        "pre_mlp_layernorm": "norm2",
    }
    rules = _blocks(f"{new}{{0}}.", "attn.{}", names, depth, heads)
    for kind in ("weight", "bias"):
        pieces = tuple(f"{new}*.attn.{name}.{kind}" for name in "qkv")
        rules.append(Concat(pieces, f"{new}{{0}}.attn.qkv.{kind}", count=depth))
    rules.append(Rename(f"{_LAYER}mlp.**", f"{new}{{0}}.mlp.{{1}}", count=4 * depth))
    return rules


def _blocks(
    new: str, attention: str, names: Mapping[str, str], depth: int, heads: int
) -> list[Rule]:
    """Return the rules for a tower's attention, and layers of `names`."""
    rules: list[Rule] = []
    for kind in ("weight", "bias"):
        pieces = tuple(f"{new}{attention.format(name)}.{kind}" for name in "qkv")
        fused = f"{_LAYER}self_attention.linear_qkv.{kind}"
        rules.append(Split(fused, pieces, groups=heads, count=depth))
    for old, name in names.items():
        rules.append(Rename(f"{_LAYER}{old}.*", f"{new}{name}.{{1}}", count=2 * depth))
    return rules


def _qwen3_mergers(count: int) -> list[Rule]:
    if not count:
        return []
    old = "vision_model.decoder.deepstack_merger_list."
    new = "model.visual.deepstack_merger_list."
    return [
        Rename(f"{old}*.patch_norm.*", f"{new}{{0}}.norm.{{1}}", count=2 * count),
        Rename(f"{old}**", f"{new}{{0}}", count=4 * count),
    ]


def _qwen3_moe(config: Config) -> list[Rule]:
    text = text_part(config, "qwen3_moe")
    return [
        *joined_experts("model.layers.*.mlp", text.number_of("num_experts", "num_local_experts")),
        *_qwen3(config),
    ]


def _gemma3(config: Config) -> list[Rule]:
    """Return the rules for SigLIP with the names of transformers.

    The projection is Megatron's, which multiplies from the other side.
    """
    depth = Config(config("vision_config")).number_of("num_hidden_layers")
    projector = "multi_modal_projector."
    return [
        Rename("model.**", "language_model.model.{0}"),
        Rename("vision_tower.**", "vision_tower.{0}", count=16 * depth + 5),
        Rename(
            f"{projector}mm_soft_embed_norm.weight", f"{projector}mm_soft_emb_norm.weight", count=1
        ),
        Transpose(f"{projector}proj.weight", f"{projector}mm_input_projection_weight", count=1),
    ]


def _llava(config: Config) -> list[Rule]:
    """Return the rules for Megatron Core's CLIP."""
    heads = Config(config("vision_config")).number_of("num_attention_heads")
    depth = _llava_depth(config)
    num_biases = 1 + bool(config("multimodal_projector_bias", default=True))
    return [
        Rename("model.**", "language_model.model.{0}"),
        Rename("lm_head.weight", "language_model.lm_head.weight", optional=True),
        Rename("vision_model.ln_pre.*", "vision_tower.pre_layrnorm.{0}", count=2),
        *_llava_layers(depth, heads),
        *_llava_embeddings(),
        *(
            Rename(
                f"vision_projection.encoder.linear_fc{number}.*",
                f"multi_modal_projector.linear_{number}.{{0}}",
                count=num_biases,
            )
            for number in "12"
        ),
    ]


def _llava_depth(config: Config) -> int:
    """Return the number of layers of Megatron Core's CLIP.

    It ends with the layer whose output the projector gets; later layers are not used.
    """
    vision = Config(config("vision_config"))
    feature_layer = config("vision_feature_layer", default=-2)
    num = vision.number_of("num_hidden_layers")
    depth = feature_layer
    if type(feature_layer) is int and feature_layer < 0:
        depth = num + 1 + feature_layer
    is_possible = type(depth) is int and 0 < depth <= num
    if not is_possible or vision("model_type") != "clip_vision_model":
        raise CheckpointingException(
            f"Megatron Core has no LLaVA with vision_feature_layer {feature_layer!r} of {num} "
            f"layers of a {vision('model_type')!r:.99}: its projector gets the output of the last "
            "layer of a clip_vision_model."
        )
    return int(depth)


def _llava_layers(depth: int, heads: int) -> list[Rule]:
    names = {
        "self_attention.linear_proj": "self_attn.out_proj",
        "input_layernorm": "layer_norm1",
        "pre_mlp_layernorm": "layer_norm2",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
    }
    return _blocks("vision_tower.encoder.layers.{0}.", "self_attn.{}_proj", names, depth, heads)


def _llava_embeddings() -> list[Rule]:
    token = "vision_model.class_token"
    names = {
        f"{token}.0.0": "class_embedding",
        "vision_model.conv1.weight": "patch_embedding.weight",
        "vision_model.position_embeddings.weight": "position_embedding.weight",
    }
    return [
        Unstack(token, f"{token}.{{i}}", size=1),
        Unstack(f"{token}.0", f"{token}.0.{{i}}", size=1),
        *(Rename(old, f"vision_tower.embeddings.{new}", count=1) for old, new in names.items()),
    ]


COMPOSED = {
    "gemma3": Composed("gemma3_text", _gemma3),
    "llava": Composed(None, _llava),
    "qwen2_5_vl": Composed("qwen2", _qwen2_5),
    "qwen3_5": Composed("qwen3_5_text", _qwen3),
    "qwen3_5_moe": Composed("qwen3_5_moe_text", _qwen3),
    "qwen3_vl": Composed("qwen3", _qwen3),
    "qwen3_vl_moe": Composed("qwen3_moe", _qwen3_moe),
}
