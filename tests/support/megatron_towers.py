"""Models with vision towers as Megatron Bridge makes them: Megatron's GPT, and a tower of
transformers or Megatron.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from distckpt import ShardedTensor
from tests.support.megatron_families import ZeroCenteredNorm, make_megatron
from tests.support.megatron_gpt import megatron

FAMILIES = (
    "gemma3",
    "llava",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""All families of models with towers."""


class WithTower(torch.nn.Module):
    """A text model and a tower, whose blocks compute without positions."""

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model

    def sharded_state_dict(self, metadata=None):
        own = ("language_model.", "vision_model.decoder.layers.")
        plain = {
            key: tensor
            for key, tensor in self.state_dict().items()
            if tensor is not None and not key.startswith(own)
        }
        state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in plain.items()}
        state |= self.language_model.sharded_state_dict(prefix="language_model.", metadata=metadata)
        if hasattr(self, "vision_model"):
            state |= self.vision_model.decoder.sharded_state_dict(
                "vision_model.decoder.", metadata=metadata
            )
        return {key: state[key] for key in state if state[key].key.split(".")[-1] != "_extra_state"}


_TEXT_TYPES = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


class _GemmaProjector(torch.nn.Module):
    """What Megatron Bridge puts between tower and text of Gemma 3, without the pooling."""

    def __init__(self, c):
        super().__init__()
        sizes = c.vision_config.hidden_size, c.text_config.hidden_size
        self.mm_soft_embed_norm = ZeroCenteredNorm(sizes[0], eps=c.vision_config.layer_norm_eps)
        config = megatron(".transformer.transformer_config").TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        linear = megatron(".tensor_parallel.layers").ColumnParallelLinear
        self.proj = linear(
            *sizes, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=True
        )

    def forward(self, values):
        return self.proj(self.mm_soft_embed_norm(values))[0]


def make_with_tower(model, mtp_layers=None):
    """Make the model that Megatron trains in the place of one of transformers."""
    text = copy.deepcopy(model.config.text_config)
    text.model_type = _TEXT_TYPES.get(model.config.model_type, text.model_type)
    text.tie_word_embeddings = model.config.tie_word_embeddings
    made = WithTower(make_megatron(text, mtp_layers))
    if model.config.model_type == "llava":
        return _make_llava(model.config, made.language_model)
    if text.model_type == "qwen2":
        made.visual = copy.deepcopy(model.model.visual)
        return made
    if text.model_type == "gemma3_text":
        made.vision_tower = copy.deepcopy(model.model.vision_tower)
        made.multi_modal_projector = _GemmaProjector(model.config)
        return made.eval()
    made.vision_model = copy.deepcopy(model.model.visual)
    made.vision_model.merger.patch_norm = made.vision_model.merger.norm
    mergers = made.vision_model.__dict__["_modules"].pop(
        "deepstack_merger_list", torch.nn.ModuleList()
    )
    for part in (made.vision_model.merger, *mergers):
        part.patch_norm = part.norm
        del part.norm
    del made.vision_model.blocks
    made.vision_model.decoder = _make_block(model.config.vision_config)
    made.vision_model.decoder.deepstack_merger_list = mergers
    return made.eval()


class _Norm(torch.nn.LayerNorm):
    """Transformer Engine's norm; torch's own knows no configuration."""

    def __init__(self, hidden_size, config, eps):
        super().__init__(hidden_size, eps)


def _make_llava(c, language_model):
    """Make Megatron Core's LLaVA, whose tower ends with the layer that the configuration
    chooses.
    """
    v, specs = c.vision_config, megatron(".models.vision.vit_layer_specs")
    tower = _config_of_layers(
        num_layers=range(v.num_hidden_layers + 1)[c.vision_feature_layer],
        hidden_size=v.hidden_size,
        num_attention_heads=v.num_attention_heads,
        ffn_hidden_size=v.intermediate_size,
        layernorm_epsilon=1e-5,
        activation_func=megatron(".fusions.fused_bias_geglu").quick_gelu,
    )
    tower.vision_model_type = "clip"
    layer = specs.get_vit_layer_with_local_spec()
    layer.submodules.self_attention.params = {
        "attn_mask_type": megatron(".transformer.enums").AttnMaskType.no_mask
    }
    size = c.text_config.hidden_size
    projector = _config_of_layers(
        num_layers=1, hidden_size=size, ffn_hidden_size=size, num_attention_heads=1
    )
    text_layer = megatron(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        normalization="RMSNorm"
    )
    clip = functools.partial(
        megatron(".models.vision.clip_vit_model").CLIPViTModel, ln_pre_impl=_Norm
    )
    llava = megatron(".models.multimodal.llava_model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        patch.setattr(llava, "CLIPViTModel", clip)
        made = llava.LLaVAModel(
            language_model.config,
            text_layer,
            language_model.vocab_size,
            64,
            tower,
            layer,
            drop_vision_class_token=True,
            vision_projection_config=projector,
            vision_projection_layer_spec=layer.submodules.mlp.submodules,
            img_h=v.image_size,
            img_w=v.image_size,
            patch_dim=v.patch_size,
            image_token_index=c.image_token_index,
        )
    made.language_model = language_model
    return made.eval()


def _config_of_layers(**settings):
    return megatron(".transformer.transformer_config").TransformerConfig(
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,
        **settings,
    )


def _make_block(c):
    """Make Megatron's layers of a vision tower, in which every token sees all."""
    config = _config_of_layers(
        num_layers=c.depth,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_heads,
        layernorm_epsilon=1e-6,
        ffn_hidden_size=c.intermediate_size,
        activation_func=functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    )
    spec = megatron(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    spec.submodules.self_attention.params = {
        "attn_mask_type": megatron(".transformer.enums").AttnMaskType.no_mask
    }
    block = megatron(".transformer.transformer_block")
    return block.TransformerBlock(config, spec, post_layer_norm=False).eval()


def tower_of(model, values):
    """Compute what the blocks of a tower make of values, without positions; of Gemma's, what its
    projector does.

    Of LLaVA, the logits of a text with an image of these values.
    """
    owner = getattr(model, "model", model)
    if hasattr(owner, "vision_projection") or hasattr(
        getattr(owner, "vision_tower", None), "pre_layrnorm"
    ):
        return _logits_with_image(
            model, values.repeat(13, 1).flatten()[: 3 * 28 * 28].view(1, 3, 28, 28)
        )
    if hasattr(owner, "multi_modal_projector"):
        return owner.multi_modal_projector(values.reshape(3, 4, 16))
    if hasattr(model, "vision_model"):
        return model.vision_model.decoder(values.unsqueeze(1), None).squeeze(1)
    blocks = owner.visual.blocks
    size = values.shape[-1] // blocks[0].attn.num_heads
    nothing = torch.ones(len(values), size), torch.zeros(len(values), size)
    for block in blocks:
        values = block(values, torch.tensor([0, len(values)]), position_embeddings=nothing)
    return values


def _logits_with_image(model, image):
    """Run either LLaVA; that of transformers wants a token for each patch."""
    if hasattr(model, "vision_projection"):
        mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).triu(1)
        return model(image, torch.tensor([[3, 38, 7, 20]]), torch.arange(4)[None], mask)[0][
            ..., :40
        ]
    return model(torch.tensor([[3, *[38] * 4, 7, 20]]), pixel_values=image).logits


def other_tensors(trained, model):
    """Return pairs of tensors that the tower has beside its blocks, in both models."""
    if hasattr(trained, "vision_projection"):
        own, tower, projector = (
            trained.vision_model,
            model.model.vision_tower,
            model.model.multi_modal_projector,
        )
        pairs = [(own.class_token.flatten(), tower.embeddings.class_embedding)]
        for mine, other in (
            (own.conv1, tower.embeddings.patch_embedding),
            (own.position_embeddings, tower.embeddings.position_embedding),
            (own.ln_pre, tower.pre_layrnorm),
            (trained.vision_projection.encoder.linear_fc1, projector.linear_1),
            (trained.vision_projection.encoder.linear_fc2, projector.linear_2),
        ):
            pairs += zip(mine.parameters(), other.parameters(), strict=True)
        return pairs
    own = {
        key.split(".", 1)[1].removeprefix("decoder."): t for key, t in trained.state_dict().items()
    }
    if hasattr(trained, "vision_tower"):
        return [(own[key], tensor) for key, tensor in model.model.vision_tower.state_dict().items()]
    visual = model.model.visual.state_dict()
    patch_norm = "patch_norm." if hasattr(trained, "vision_model") else "norm."
    named = {name.replace("norm.", patch_norm): tensor for name, tensor in visual.items()}
    return [
        (own[key], tensor)
        for key, tensor in named.items()
        if key in own and not key.startswith("layers.")
    ]
