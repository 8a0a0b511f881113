"""Megatron Core's hybrid models of Mamba 2, attention and experts, with the arithmetic of the GPU
kernels in torch.
"""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.megatron_gpt import megatron


class WholeLinear(torch.nn.Linear):
    """Transformer Engine's layer that all ranks have whole."""

    def __init__(self, num_in, num_out, **_):
        super().__init__(num_in, num_out, bias=False)

    def forward(self, values):
        return super().forward(values), None


class GatedNorm(torch.nn.Module):
    """What mamba-ssm computes on a GPU: the norm of each group, of values times the activated
    gate.
    """

    def __init__(self, size, group_size):
        super().__init__()
        self.weight, self.group_size = torch.nn.Parameter(torch.ones(size)), group_size

    def forward(self, values, gate):
        values = (values * torch.nn.functional.silu(gate)).unflatten(-1, (-1, self.group_size))
        return (
            torch.nn.functional.rms_norm(values, (self.group_size,), eps=1e-5).flatten(-2)
            * self.weight
        )


def _scan(mixer, values):
    """Compute the state after each token from the one before, as the definition of Mamba 2 says."""
    inner, groups, size = mixer.d_inner, mixer.ngroups, mixer.d_state
    gate, values, steps = values.split([inner, inner + 2 * groups * size, mixer.nheads], -1)
    convolved = mixer.conv1d(values.permute(1, 2, 0))[..., : len(values)].permute(2, 0, 1)
    x, b, c = torch.nn.functional.silu(convolved).split([inner, groups * size, groups * size], -1)
    x = x.unflatten(-1, (mixer.nheads, -1))
    b, c = (
        part.unflatten(-1, (groups, size)).repeat_interleave(mixer.nheads // groups, -2)
        for part in (b, c)
    )
    steps = torch.nn.functional.softplus(steps + mixer.dt_bias).unsqueeze(-1)
    state, results = 0, []
    for token in range(len(x)):
        decay = torch.exp(steps[token] * -mixer.A_log.exp().unsqueeze(-1)).unsqueeze(-1)
        state = state * decay + (steps[token] * x[token]).unsqueeze(-1) * b[token].unsqueeze(-2)
        results.append((state * c[token].unsqueeze(-2)).sum(-1) + mixer.D.unsqueeze(-1) * x[token])
    return mixer.norm(torch.stack(results).flatten(-2), gate)


def _modules():
    """Import Megatron's modules, which import triton even where they do not use it."""
    stubs = [name for name in ("triton", "triton.language") if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in stubs})
    try:
        return (
            megatron(".ssm.mamba_mixer"),
            megatron(".ssm.mamba_block"),
            megatron(".models.mamba.mamba_model"),
        )
    finally:
        for name in stubs:
            del sys.modules[name]


def make_hybrid(c, config, spec):
    """Make the model whose layers of attention and experts are those of a block of Megatron's
    GPT.
    """
    mixers, block, model = _modules()
    layer, specs = megatron(".ssm.mamba_layer"), megatron(".transformer.spec_utils")
    layers, base = megatron(".tensor_parallel.layers"), megatron(".transformer.transformer_layer")
    norm, add = spec.layer_norm, megatron(".fusions.fused_bias_dropout").get_bias_dropout_add

    class Norm(GatedNorm):
        def __init__(self, size, group_size, **_):
            super().__init__(size, group_size)

    class Mixer(mixers.MambaMixer):
        def forward(self, hidden_states, *_, **__):
            return self.out_proj(_scan(self, self.in_proj(hidden_states)[0]))

    gpt = spec.layer_specs[0].submodules
    parts = base.TransformerLayerSubmodules
    mamba = layer.MambaLayerSubmodules(
        norm=norm,
        mixer=specs.ModuleSpec(
            Mixer,
            submodules=mixers.MambaMixerSubmodules(
                layers.ColumnParallelLinear, layers.RowParallelLinear
            ),
        ),
        mamba_bda=add,
    )
    attention = parts(input_layernorm=norm, self_attention=gpt.self_attention, self_attn_bda=add)
    experts = parts(pre_mlp_layernorm=norm, mlp=gpt.mlp, mlp_bda=add)
    dense = parts(
        pre_mlp_layernorm=norm,
        mlp=megatron(".models.gpt.gpt_layer_specs").get_mlp_module_spec(False),
        mlp_bda=add,
    )
    stack = block.MambaStackSubmodules(
        mamba_layer=specs.ModuleSpec(layer.MambaLayer, submodules=mamba),
        attention_layer=specs.ModuleSpec(base.TransformerLayer, submodules=attention),
        mlp_layer=specs.ModuleSpec(megatron(".ssm.mlp_layer").MLPLayer, submodules=dense),
        moe_layer=specs.ModuleSpec(base.TransformerLayer, submodules=experts),
    )
    symbols = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixers, "HAVE_MAMBA_SSM", True)
        for module in (mixers, megatron(".ssm.mamba_context_parallel")):
            patch.setattr(module, "HAVE_EINOPS", True)
        patch.setattr(mixers, "ExtendedRMSNorm", Norm)
        patch.setattr(block, "TENorm", norm)
        patch.setattr(megatron(".transformer.moe.moe_layer"), "HAVE_TE", True)
        patch.setattr(
            megatron(".transformer.moe.moe_layer"), "TELinear", WholeLinear, raising=False
        )
        return model.MambaModel(
            config,
            specs.ModuleSpec(block.MambaStack, submodules=stack),
            c.vocab_size + 8,
            64,
            hybrid_override_pattern="".join(symbols[kind] for kind in c.layers_block_type),
            share_embeddings_and_output_weights=c.tie_word_embeddings,
        )
