"""Megatron Core's models for configurations of transformers, in this process, on CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron_gpt import megatron


@contextlib.contextmanager
def one_process(path):
    """A process group of this process alone, and Megatron's; its models compute on CPU."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    state = megatron(".parallel_state")
    try:
        state.initialize_model_parallel()
        tracker = megatron(".tensor_parallel.random").CudaRNGStatesTracker
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
            patch.setattr(megatron(".transformer.moe.moe_utils"), "te_general_gemm", None, raising=False)
            patch.setattr(tracker, "fork", lambda *_: contextlib.nullcontext())
            yield
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


def make_megatron(config):
    """Make the model that a configuration of transformers describes, without sensible values."""
    c = config
    settings = {
        "num_layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads, "kv_channels": c.head_dim, "ffn_hidden_size": c.intermediate_size,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "normalization": "RMSNorm", "layernorm_epsilon": c.rms_norm_eps, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "masked_softmax_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False, "perform_initialization": False, "persist_layer_norm": False,
    }  # fmt: skip
    extra, options = SETTINGS[c.model_type](c)
    transformer_config = megatron(".transformer.transformer_config")
    made = transformer_config.MLATransformerConfig if "kv_lora_rank" in extra else transformer_config.TransformerConfig
    megatron_config = made(**settings | extra)
    specs = megatron(".models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_decoder_block_spec(
        megatron_config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False
    )
    model = megatron(".models.gpt.gpt_model").GPTModel(
        megatron_config, spec, vocab_size=c.vocab_size + 8, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=c.tie_word_embeddings,
        **{"rotary_base": c.rope_parameters["rope_theta"]} | options,
    )  # fmt: skip
    return model.eval()


def _dense(c):
    return {}, {}


def _qwen2(c):
    return {"add_qkv_bias": True}, {}


def _qwen3(c):
    return {"qk_layernorm": True}, {}


def _moe(c):
    return {
        "num_moe_experts": c.num_local_experts, "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": c.intermediate_size, "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
    }, {}  # fmt: skip


def _qwen3_moe(c):
    return _moe(c)[0] | {"qk_layernorm": True, "moe_ffn_hidden_size": c.moe_intermediate_size}, {}


SETTINGS = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _moe,
    "qwen3_moe": _qwen3_moe,
}


def logits_of(model, tokens, vocab_size):
    """Run Megatron's model."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length)[None].expand_as(tokens), mask)[..., :vocab_size]
