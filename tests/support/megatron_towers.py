"""Models with vision towers as Megatron Bridge makes them: Megatron's GPT, and a tower of transformers or Megatron."""

from __future__ import annotations

import copy
import functools

import torch

from distckpt import ShardedTensor
from tests.support.megatron_families import ZeroCenteredNorm, make_megatron
from tests.support.megatron_gpt import megatron


class WithTower(torch.nn.Module):
    """A text model and a tower, whose blocks compute without positions."""

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model

    def forward(self, *arguments):
        return self.language_model(*arguments)

    def sharded_state_dict(self, metadata=None):
        own = ("language_model.", "vision_model.decoder.layers.")
        plain = {
            key: tensor for key, tensor in self.state_dict().items() if tensor is not None and not key.startswith(own)
        }
        state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in plain.items()}
        state |= self.language_model.sharded_state_dict(prefix="language_model.", metadata=metadata)
        if hasattr(self, "vision_model"):
            state |= self.vision_model.decoder.sharded_state_dict("vision_model.decoder.", metadata=metadata)
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
        self.proj = linear(*sizes, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=True)

    def forward(self, values):
        return self.proj(self.mm_soft_embed_norm(values))[0]


def make_with_tower(model, mtp_layers=None):
    """Make the model that Megatron trains in the place of one of transformers."""
    text = copy.deepcopy(model.config.text_config)
    text.model_type = _TEXT_TYPES.get(model.config.model_type, text.model_type)
    text.tie_word_embeddings = model.config.tie_word_embeddings
    made = WithTower(make_megatron(text, mtp_layers))
    if text.model_type == "qwen2":
        made.visual = copy.deepcopy(model.model.visual)
        return made
    if text.model_type == "gemma3_text":
        made.vision_tower = copy.deepcopy(model.model.vision_tower)
        made.multi_modal_projector = _GemmaProjector(model.config)
        return made.eval()
    made.vision_model = copy.deepcopy(model.model.visual)
    made.vision_model.merger.patch_norm = made.vision_model.merger.norm
    mergers = made.vision_model.__dict__["_modules"].pop("deepstack_merger_list", torch.nn.ModuleList())
    for part in (made.vision_model.merger, *mergers):
        part.patch_norm = part.norm
        del part.norm
    del made.vision_model.blocks
    made.vision_model.decoder = _make_block(model.config.vision_config)
    made.vision_model.decoder.deepstack_merger_list = mergers
    return made.eval()


def _make_block(c):
    """Make Megatron's layers of a vision tower, in which every token sees all."""
    config = megatron(".transformer.transformer_config").TransformerConfig(
        num_layers=c.depth, hidden_size=c.hidden_size, num_attention_heads=c.num_heads, layernorm_epsilon=1e-6,
        ffn_hidden_size=c.intermediate_size, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        activation_func=functools.partial(torch.nn.functional.gelu, approximate="tanh"), bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, perform_initialization=False,
    )  # fmt: skip
    spec = megatron(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    spec.submodules.self_attention.params = {"attn_mask_type": megatron(".transformer.enums").AttnMaskType.no_mask}
    block = megatron(".transformer.transformer_block")
    return block.TransformerBlock(config, spec, post_layer_norm=False).eval()


def tower_of(model, values):
    """Compute what the blocks of a tower make of values, without positions; of Gemma's, what its projector does."""
    owner = getattr(model, "model", model)
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


def other_tensors(trained, model):
    """Return pairs of tensors that the tower has beside its blocks, in both models."""
    own = {key.split(".", 1)[1].removeprefix("decoder."): t for key, t in trained.state_dict().items()}
    if hasattr(trained, "vision_tower"):
        return [(own[key], tensor) for key, tensor in model.model.vision_tower.state_dict().items()]
    visual = model.model.visual.state_dict()
    patch_norm = "patch_norm." if hasattr(trained, "vision_model") else "norm."
    named = {name.replace("norm.", patch_norm): tensor for name, tensor in visual.items()}
    return [(own[key], tensor) for key, tensor in named.items() if key in own and not key.startswith("layers.")]
