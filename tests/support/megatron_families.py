"""Megatron Core's models for configurations of transformers, in this process, on CPU."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron_gpt import megatron
from tests.support.megatron_mamba import WholeLinear, make_hybrid


@contextlib.contextmanager
def one_process(path):
    """A process group of this process alone, and Megatron's; its models compute on CPU."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    state = megatron(".parallel_state")
    try:
        state.initialize_model_parallel()
        tracker = megatron(".tensor_parallel.random").CudaRNGStatesTracker
        with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
            patch.setattr(
                megatron(".transformer.moe.moe_utils"), "te_general_gemm", None, raising=False
            )
            patch.setattr(megatron(".transformer.multi_latent_attention"), "HAVE_TE", False)
            patch.setattr(
                megatron(".fusions.fused_softmax"), "get_sliding_window_causal_mask", _window_mask
            )
            delta_net = megatron(".ssm.gated_delta_net")
            patch.setattr(delta_net, "HAVE_FLA", True)
            indexer = megatron(".transformer.experimental_attention_variant.dsa")
            patch.setattr(indexer, "rotate_activation", lambda values: values)
            patch.setattr(delta_net, "l2norm", _l2norm, raising=False)
            patch.setattr(tracker, "fork", lambda *_: contextlib.nullcontext())
            yield
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


def _window_mask(num_queries, num_keys, window_size):
    """Megatron's function, which makes its mask on a GPU."""
    seen = (
        torch.ones(num_queries, num_keys, dtype=torch.bool)
        .triu(-window_size[0])
        .tril(window_size[1])
    )
    return ~seen


def _l2norm(values):
    """The function of flash-linear-attention, which needs a GPU."""
    return values * (values.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class LatentCoreAttention(torch.nn.Module):
    """What Transformer Engine computes on a GPU; Megatron's own attention has one size of heads
    only.
    """

    def __init__(self, softmax_scale, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, mask, **_):
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


class ZeroCenteredNorm(torch.nn.Module):
    """What Transformer Engine computes with layernorm_zero_centered_gamma; Megatron's own norm
    cannot.
    """

    def __init__(self, hidden_size, config=None, eps=1e-5):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, values):
        return torch.nn.functional.rms_norm(values, self.weight.shape, 1 + self.weight, self.eps)


def _count_norms_from_1(spec):
    """Put another norm in the place of all norms of a block."""
    spec.layer_norm = ZeroCenteredNorm
    for layer in spec.layer_specs:
        own, attention = layer.submodules, layer.submodules.self_attention.submodules
        own.input_layernorm = own.pre_mlp_layernorm = ZeroCenteredNorm
        attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm


def _with_linear_attention(spec, c):
    """Make layers with Megatron's gated delta net of those of linear attention."""
    _count_norms_from_1(spec)
    delta_net, layers = megatron(".ssm.gated_delta_net"), megatron(".tensor_parallel.layers")
    parts = delta_net.GatedDeltaNetSubmodules(
        layers.ColumnParallelLinear, ZeroCenteredNorm, layers.RowParallelLinear
    )
    for layer, kind in zip(spec.layer_specs, c.layer_types, strict=True):
        if kind == "linear_attention":
            layer.submodules.self_attention = megatron(".transformer.spec_utils").ModuleSpec(
                delta_net.GatedDeltaNet, submodules=parts
            )


def _with_indexer(spec, c):
    """Select the keys that attention sees by Megatron's indexer, which rotates what later versions
    do.
    """
    dsa, module = (
        megatron(".transformer.experimental_attention_variant.dsa"),
        megatron(".transformer.spec_utils"),
    )

    class Norm(torch.nn.LayerNorm):
        def __init__(self, hidden_size, **_):
            super().__init__(hidden_size, eps=1e-6)

    class Indexer(dsa.DSAIndexer):
        def _apply_rope(self, values, *arguments):
            size = self.qk_pos_emb_head_dim
            rotated = super()._apply_rope(
                torch.cat([values[..., size:], values[..., :size]], -1), *arguments
            )
            return torch.cat([rotated[..., -size:], rotated[..., :-size]], -1)

    indexer = module.ModuleSpec(
        Indexer, submodules=dsa.DSAIndexerSubmodules(WholeLinear, WholeLinear, Norm, WholeLinear)
    )
    core_attention = module.ModuleSpec(
        dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer)
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = core_attention


def _with_norms_behind_layers(spec, c):
    """Put a norm behind attention and MLP, as Megatron Bridge has them for Gemma 3."""
    layers = megatron(".tensor_parallel.layers")

    class RowParallelLinearWithNorm(layers.RowParallelLinear):
        def __init__(self, *sizes, **options):
            super().__init__(*sizes, **options)
            self.post_layernorm = ZeroCenteredNorm(c.hidden_size, eps=c.rms_norm_eps)

        def forward(self, values):
            result, bias = super().forward(values)
            return self.post_layernorm(result), bias

    _count_norms_from_1(spec)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.linear_proj = RowParallelLinearWithNorm
        layer.submodules.mlp.submodules.linear_fc2 = RowParallelLinearWithNorm


def _with_norms_of_all_heads(spec, c):
    """Put norms of all queries and of all keys in the place of those of each head, as Megatron
    Bridge for MiniMax.
    """

    def norm_of(num_heads):
        class NormOfAllHeads(torch.nn.RMSNorm):
            def __init__(self, hidden_size, config, eps):
                super().__init__(num_heads * hidden_size, eps)

            def forward(self, values):
                return super().forward(values.flatten(2)).view(values.shape)

        return NormOfAllHeads

    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = map(
            norm_of, (c.num_attention_heads, c.num_key_value_heads)
        )


SPECS = {
    "gemma3_text": _with_norms_behind_layers,
    "glm_moe_dsa": _with_indexer,
    "minimax_m2": _with_norms_of_all_heads,
    "olmoe": _with_norms_of_all_heads,
    "qwen3_5_moe_text": _with_linear_attention,
    "qwen3_5_text": _with_linear_attention,
    "qwen3_next": _with_linear_attention,
}
"""Changes of the layers that Megatron makes without Transformer Engine."""


def make_megatron(config, mtp_layers=None):
    """Make the model that a configuration of transformers describes, without sensible values."""
    c = config
    settings = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "kv_channels": c.head_dim,
        "ffn_hidden_size": getattr(c, "intermediate_size", None) or c.moe_intermediate_size,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "perform_initialization": False,
        "persist_layer_norm": False,
    }
    settings["layernorm_epsilon"] = (
        c.layer_norm_epsilon if c.model_type == "nemotron_h" else c.rms_norm_eps
    )
    extra, options = SETTINGS[c.model_type](c)
    settings["mtp_num_layers"] = mtp_layers
    transformer_config = megatron(".transformer.transformer_config")
    made = (
        transformer_config.MLATransformerConfig
        if "kv_lora_rank" in extra
        else transformer_config.TransformerConfig
    )
    megatron_config = made(**settings | extra)
    specs = megatron(".models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_decoder_block_spec(
        megatron_config,
        use_transformer_engine=False,
        normalization="RMSNorm",
        qk_l2_norm=megatron_config.qk_l2_norm,
    )
    if megatron_config.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    if c.model_type == "nemotron_h":
        return make_hybrid(c, megatron_config, spec).eval()
    if c.model_type in SPECS:
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        SPECS[c.model_type](spec, c)
    if mtp_layers:
        mtp_spec = specs.get_gpt_mtp_block_spec(megatron_config, spec, False)
        if SPECS.get(c.model_type) is _with_linear_attention:
            for own in (layer.submodules for layer in mtp_spec.layer_specs):
                own.enorm = own.hnorm = own.layer_norm = ZeroCenteredNorm
        options = options | {"mtp_block_spec": mtp_spec}
    model = megatron(".models.gpt.gpt_model").GPTModel(
        megatron_config,
        spec,
        vocab_size=c.vocab_size + 8,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=c.tie_word_embeddings,
        **(
            {"rotary_base": c.rope_parameters["rope_theta"]}
            if "rope_theta" in c.rope_parameters
            else {}
        )
        | options,
    )
    if c.model_type == "gemma3_text":
        model.embedding.register_forward_hook(
            lambda module, given, result: result * c.hidden_size**0.5
        )
    return model.eval()


def _dense(c):
    return {"add_bias_linear": getattr(c, "mlp_bias", False)}, {}


def _gpt_oss(c):
    return _moe(c)[0] | {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (c.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in c.layer_types],
        "activation_func": megatron(".fusions.fused_bias_geglu").quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    }, {}


def _qwen2(c):
    return {"add_qkv_bias": True}, {}


def _gemma3(c):
    return {
        "qk_layernorm": True,
        "activation_func": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "window_size": (c.sliding_window - 1, 0),
        "softmax_scale": c.query_pre_attn_scalar**-0.5,
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in c.layer_types],
    }, {"rotary_base": c.rope_parameters["full_attention"]["rope_theta"]}


def _olmoe(c):
    return _moe(c)[0] | {"qk_layernorm": True, "moe_router_pre_softmax": not c.norm_topk_prob}, {}


def _minimax_m2(c):
    return _moe(c)[0] | {
        "qk_layernorm": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }, {"rotary_percent": c.rope_parameters.get("partial_rotary_factor", 1.0)}


def _qwen3(c):
    return {"qk_layernorm": True}, {}


def _moe(c):
    return {
        "num_moe_experts": getattr(c, "num_local_experts", None) or c.num_experts,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(c, "intermediate_size", 0),
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }, {}


def _qwen3_moe(c):
    frequency = [int(n not in c.mlp_only_layers) for n in range(c.num_hidden_layers)]
    extra = {"qk_layernorm": True, "moe_ffn_hidden_size": c.moe_intermediate_size}
    return _moe(c)[0] | extra | ({} if all(frequency) else {"moe_layer_freq": frequency}), {}


def _qwen2_moe(c):
    return _moe(c)[0] | {
        "add_qkv_bias": True,
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": c.shared_expert_intermediate_size,
    }, {}


def _qwen3_next(c):
    kinds = [int(kind == "linear_attention") for kind in c.layer_types]
    sparse = {} if c.model_type == "qwen3_5_text" else _qwen2_moe(c)[0]
    return sparse | {
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "deterministic_mode": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": kinds,
        "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
        "hetereogenous_dist_checkpoint": True,
    }, {"rotary_percent": c.rope_parameters["partial_rotary_factor"]}


def _after_dense(c):
    kinds = getattr(c, "mlp_layer_types", [])
    num_dense = kinds.count("dense") if kinds else c.first_k_dense_replace
    return _moe(c)[0] | {
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_router_score_function": "sigmoid",
        "moe_layer_freq": [0] * num_dense + [1] * (c.num_hidden_layers - num_dense),
        "moe_shared_expert_intermediate_size": c.moe_intermediate_size * c.n_shared_experts,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": c.n_group,
        "moe_router_group_topk": c.topk_group,
        "moe_router_topk_scaling_factor": c.routed_scaling_factor,
    }


def _deepseek_v3(c):
    return _after_dense(c) | {
        "multi_latent_attention": True,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_head_dim": c.qk_nope_head_dim,
        "qk_pos_emb_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "rope_type": "rope",
        "rotary_base": c.rope_parameters["rope_theta"],
        "qk_layernorm": True,
    }, {}


def _nemotron_h(c):
    return _moe(c)[0] | {
        "gated_linear_unit": False,
        "activation_func": megatron(".activations").squared_relu,
        "is_hybrid_model": True,
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": c.moe_shared_expert_intermediate_size,
        "moe_latent_size": c.moe_latent_size,
        "moe_router_enable_expert_bias": True,
        "mamba_state_dim": c.ssm_state_size,
        "mamba_head_dim": c.mamba_head_dim,
        "mamba_num_groups": c.n_groups,
        "mamba_num_heads": c.mamba_num_heads,
        "use_mamba_mem_eff_path": False,
    }, {}


def _glm5(c):
    extra, options = _deepseek_v3(c)
    return extra | {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": c.index_n_heads,
        "dsa_indexer_head_dim": c.index_head_dim,
        "dsa_indexer_topk": c.index_topk,
    }, options


def _dots1(c):
    return _after_dense(c) | {"qk_layernorm": True}, {}


def _llama4(c):
    return _moe(c)[0] | {
        "ffn_hidden_size": c.intermediate_size_mlp,
        "moe_ffn_hidden_size": c.intermediate_size,
        "qk_l2_norm": True,
        "moe_layer_freq": [int(n in c.moe_layers) for n in range(c.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": c.intermediate_size,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "rotary_interleaved": True,
        "no_rope_freq": _no_rope(c),
    }, {}


def _no_rope(c):
    return [int(not uses_rope) for uses_rope in c.no_rope_layers]


def _smollm3(c):
    return {"no_rope_freq": _no_rope(c)}, {}


def _glm4_moe(c):
    extra = {"add_qkv_bias": c.attention_bias, "qk_layernorm": c.use_qk_norm}
    return _after_dense(c) | extra, {"rotary_percent": c.rope_parameters["partial_rotary_factor"]}


SETTINGS = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek_v3,
    "glm_moe_dsa": _glm5,
    "llama4_text": _llama4,
    "olmoe": _olmoe,
    "nemotron_h": _nemotron_h,
    "ministral": _dense,
    "ministral3": _dense,
    "seed_oss": _qwen2,
    "smollm3": _smollm3,
    "gpt_oss": _gpt_oss,
    "granitemoe": _moe,
    "gemma3_text": _gemma3,
    "minimax_m2": _minimax_m2,
    "mixtral": _moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
}


def logits_of(model, tokens, vocab_size):
    """Run Megatron's model."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length)[None].expand_as(tokens), mask)[..., :vocab_size]
