"""Tiny models of transformers, one for each family."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}

_DEEPSEEK = {
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

_QWEN3_5 = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN3_NEXT = _QWEN3_5 | {"num_experts": 4, "shared_expert_intermediate_size": 24}

OVERRIDES = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "norm_topk_prob": True, "shared_expert_intermediate_size": 24},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "deepseek_v3": _DEEPSEEK,
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "glm4_moe_lite": _DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 40,
        "moe_layers": [1],
        "no_rope_layers": [1, 1],
        "intermediate_size": 16,
        "num_experts_per_tok": 1,
        "attn_temperature_tuning": False,
    },
    "ministral": {},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm_moe_dsa": _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "gpt_oss": {
        "num_local_experts": 4,
        "intermediate_size": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 6,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "minimax_m2": {"num_local_experts": 4},
    "granitemoe": {
        "num_local_experts": 4,
        "attention_multiplier": 8**-0.5,
        "tie_word_embeddings": True,
    },
    "olmoe": {"num_experts": 4},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_intermediate_size": 16,
    },
    "jamba": {
        "num_experts": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
}
"""What the configuration of each family says besides its sizes."""

VARIANTS = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None}),
    "glm4_moe-plain": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2},
    ),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 24}),
    "qwen3_moe-dense-first": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
"""Other models of a family: which one, and what else their configurations say."""


_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_ROTATED_BY_PLACE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}

COMPOSED = {
    "llava": (
        "llama",
        {"vision_config": {"model_type": "clip_vision_model"} | _CLIP, "image_token_index": 38},
    ),
    "llava_next": ("llama", {"vision_config": {"model_type": "clip_vision_model"} | _CLIP}),
    "llava_onevision": (
        "qwen2",
        {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | _CLIP},
    ),
    "qwen2_vl": (
        "qwen2",
        {"vision_config": _VISION | {"embed_dim": 32}, "text": _ROTATED_BY_PLACE},
    ),
    "qwen2_5_vl": (
        "qwen2",
        {"vision_config": _VISION, "text": _ROTATED_BY_PLACE},
    ),
    "qwen3_vl": (
        "qwen3",
        {"vision_config": _VISION | {"depth": 2, "deepstack_visual_indexes": [0]}},
    ),
    "qwen3_vl_moe": (
        "qwen3_moe",
        {
            "vision_config": _VISION | {"deepstack_visual_indexes": [0]},
            "text": {"moe_intermediate_size": 24},
        },
    ),
    "qwen3_5": ("qwen3_5_text", {"vision_config": _VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"vision_config": _VISION}),
    "gemma3": (
        "gemma3_text",
        {
            "vision_config": {
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
                "hidden_act": "gelu_pytorch_tanh",
            }
            | _CLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "vision_config": _CLIP
            | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
        },
    ),
}
"""Models with towers: the family whose sizes their text part has, and the other parts."""


_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40}
_ENCODER = {
    name: size for name, size in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")
}
_ENCODER_DECODER = {
    "vocab_size": 40,
    "d_model": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
_BOTH_TOWERS = {"text_config": _ENCODER, "vision_config": _CLIP | {"hidden_size": 32}}

OTHERS = {
    "albert": ("MaskedLM", _ENCODER | {"embedding_size": 16}),
    "bamba": ("CausalLM", _SIZES | _MAMBA_2 | {"attn_layer_indices": [1]}),
    "bart": ("Seq2SeqLM", _ENCODER_DECODER),
    "beit": ("ImageClassification", _CLIP | {"use_relative_position_bias": True}),
    "bert": ("MaskedLM", _ENCODER),
    "bloom": ("CausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40}),
    "clip": ("ZeroShotImageClassification", _BOTH_TOWERS),
    "cohere2": ("CausalLM", _SIZES),
    "convnext": (
        "ImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "deepseek_v2": ("CausalLM", _SIZES | _DEEPSEEK),
    "dinov2": ("ImageClassification", _CLIP),
    "falcon": ("CausalLM", _ENCODER | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_h1": ("CausalLM", _SIZES | _MAMBA_2 | {"mamba_d_ssm": 64}),
    "gemma2": ("CausalLM", _SIZES),
    "gemma3n_text": (
        "CausalLM",
        _SIZES
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 40,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "altup_num_inputs": 2,
        },
    ),
    "glm4": ("CausalLM", _SIZES),
    "gpt2": ("CausalLM", _GPT),
    "gpt_neox": ("CausalLM", _ENCODER),
    "gptj": ("CausalLM", _GPT | {"rotary_dim": 4}),
    "granitemoehybrid": (
        "CausalLM",
        _SIZES
        | _MAMBA_2
        | {
            "layers_block_type": ["mamba", "attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 16,
        },
    ),
    "internvl": (
        "ImageTextToText",
        {
            "text_config": {"model_type": "qwen2"} | _SIZES,
            "vision_config": _CLIP | {"image_size": [28, 28], "patch_size": [14, 14]},
        },
    ),
    "lfm2": (
        "CausalLM",
        _SIZES | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    ),
    "lfm2_moe": (
        "CausalLM",
        _SIZES
        | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    ),
    "mamba": (
        "CausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4},
    ),
    "mamba2": (
        "CausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "mllama": (
        "ImageTextToText",
        {
            "text_config": _SIZES
            | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default"}},
            "vision_config": _CLIP
            | {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32}
            | {"intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1]]}
            | {"max_num_tiles": 1},
        },
    ),
    "modernbert": ("MaskedLM", _ENCODER | {"cls_token_id": 1, "sep_token_id": 2}),
    "mpt": (
        "CausalLM",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 40, "max_seq_len": 64},
    ),
    "olmo2": ("CausalLM", _SIZES),
    "opt": ("CausalLM", _ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi3": ("CausalLM", _SIZES),
    "phimoe": ("CausalLM", _SIZES | {"num_local_experts": 4}),
    "recurrent_gemma": (
        "CausalLM",
        _SIZES | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    ),
    "resnet": (
        "ImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "siglip": ("ZeroShotImageClassification", _BOTH_TOWERS),
    "swin": (
        "ImageClassification",
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
        | {"image_size": 32, "patch_size": 4},
    ),
    "t5": (
        "Seq2SeqLM",
        _ENCODER_DECODER | {"d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ("ImageClassification", _CLIP),
    "wav2vec2": (
        "CTC",
        _ENCODER
        | {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2]}
        | {"num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    ),
    "whisper": (
        "SpeechSeq2Seq",
        _ENCODER_DECODER
        | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "zamba2": (
        "CausalLM",
        _SIZES
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
        | {"mamba_d_state": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1}
        | {"chunk_size": 4, "num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 4},
    ),
}
"""Models that only transformers has: what they are for, and their configurations."""


def make_config(name):
    """Make the configuration of a tiny model of a family or variant."""
    if name in OTHERS:
        return transformers.AutoConfig.for_model(name, **copy.deepcopy(OTHERS[name][1]))
    if name in COMPOSED:
        family, parts = COMPOSED[name]
        text = _SIZES | OVERRIDES.get(family, {}) | parts.get("text", {})
        if name.startswith("llava"):
            text["model_type"] = family
        return transformers.AutoConfig.for_model(
            name, text_config=text, **{key: part for key, part in parts.items() if key != "text"}
        )
    family, overrides = VARIANTS.get(name, (name, {}))
    return transformers.AutoConfig.for_model(family, **(_SIZES | OVERRIDES[family] | overrides))


def auto_class(config):
    """Return the class of transformers that makes models of a configuration."""
    task = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    if config.model_type in OTHERS:
        task = OTHERS[config.model_type][0]
    return getattr(transformers, f"AutoModelFor{task}")


def make_model(config, seed=0):
    """Make a model with random numbers in all of its tensors, norms and biases included."""
    warnings.simplefilter("ignore")
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.ndim == 1)
                )
    return model


TOKENS = torch.tensor([[3, 1, 39, 7, 20]])


def logits_with(model, added):
    """Compute what a model does with numbers added to its parameters."""
    state = {name: tensor + added.get(name, 0) for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        return torch.func.functional_call(model, state, (TOKENS,), tie_weights=False).logits
