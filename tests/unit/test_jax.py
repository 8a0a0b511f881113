"""Exports between the names of Hugging Face directories and of MaxText, with numpy as oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import distckpt
from distckpt import CheckpointingException, InvalidShardingError, ShardedTensor, cli
from distckpt.rules import Concat, Split, Stack, Transpose
from tests.support.llama_folder import (
    CONFIG,
    GROUPS,
    HEADS,
    LAYERS,
    SHAPES,
    SIZE,
    WIDTH,
    write_llama,
)
from tests.support.read_counts import counted_reads


@pytest.fixture
def weights(tmp_path):
    """The tensors of a directory `hf`."""
    return write_llama(tmp_path / "hf")


def expected(weights):
    """Return the parameters of MaxText."""

    def stack(name, heads=0, *, takes_turns=False, factor=1.0):
        layers = []
        for layer in range(LAYERS):
            value = weights[f"model.layers.{layer}.{name}.weight"]
            if heads:
                value = value.T.reshape(WIDTH, heads, SIZE)
            if takes_turns:
                halves = value.reshape(WIDTH, heads, 2, SIZE // 2)
                value = np.stack([halves[:, :, 0], halves[:, :, 1]], -1).reshape(value.shape)
            layers.append(value if heads or value.ndim == 1 else value.T)
        return np.stack(layers, 1) * np.float32(factor)

    attention = "params.decoder.layers.self_attention"
    mlp = "params.decoder.layers.mlp"
    norm = "params.decoder.layers"
    query = stack("self_attn.q_proj", HEADS, takes_turns=True, factor=SIZE**-0.5)
    out = np.moveaxis(stack("self_attn.o_proj"), 1, 0).reshape(LAYERS, HEADS, SIZE, WIDTH)
    return {
        "params.token_embedder.embedding": weights["model.embed_tokens.weight"],
        "params.decoder.decoder_norm.scale": weights["model.norm.weight"],
        f"{norm}.pre_self_attention_layer_norm.scale": stack("input_layernorm"),
        f"{norm}.post_self_attention_layer_norm.scale": stack("post_attention_layernorm"),
        f"{attention}.query.kernel": query,
        f"{attention}.key.kernel": stack("self_attn.k_proj", GROUPS, takes_turns=True),
        f"{attention}.value.kernel": stack("self_attn.v_proj", GROUPS),
        f"{attention}.out.kernel": out.transpose(1, 0, 2, 3),
        f"{mlp}.wi_0.kernel": stack("mlp.gate_proj"),
        f"{mlp}.wi_1.kernel": stack("mlp.up_proj"),
        f"{mlp}.wo.kernel": stack("mlp.down_proj"),
    }


def export(tmp_path, source, output, **options):
    options = {"family": tmp_path / "hf"} | options
    distckpt.consolidate(tmp_path / source, tmp_path / output, **options)
    return load_file(tmp_path / output / "model.safetensors")


def test_both_directions_move_and_multiply_every_element(weights, tmp_path):
    found = export(tmp_path, "hf", "jax", layout="jax")
    wanted = expected(weights)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)

    back = export(tmp_path, "jax", "back")
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(back[name], value, rtol=2e-7, err_msg=name)


def test_other_dtypes_are_rounded_from_what_is_computed(weights, tmp_path):
    export(tmp_path, "hf", "jax", layout="jax", dtype=torch.float64)
    query = "params.decoder.layers.self_attention.query.kernel"
    found = load_file(tmp_path / "jax/model.safetensors")[query]
    exact = expected({k: v.astype(np.float64) for k, v in weights.items()})[query]
    np.testing.assert_allclose(found, exact, rtol=1e-7)


def test_the_command_line_shows_factors_and_exports(weights, tmp_path, capsys):
    arguments = ["consolidate", str(tmp_path / "hf"), str(tmp_path / "jax")]
    arguments += ["--layout", "jax", "--family", str(tmp_path / "hf")]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert " * 0.353553" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    wanted = expected(weights)
    found = load_file(tmp_path / "jax/model.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())


def test_a_merge_of_elements_that_lie_apart_is_refused(weights, tmp_path):
    export(tmp_path, "hf", "jax", layout="jax")
    with pytest.raises(CheckpointingException, match="merge exports"):
        distckpt.merge(
            [tmp_path / "jax"] * 2, tmp_path / "mean", weights=[0.5, 0.5], family=tmp_path / "hf"
        )
    assert not (tmp_path / "mean").exists()


def test_a_merge_into_the_form_of_maxtext_multiplies_the_mean(weights, tmp_path):
    distckpt.merge(
        [tmp_path / "hf"] * 2,
        tmp_path / "mean",
        weights=[0.25, 0.25],
        family=tmp_path / "hf",
        layout="jax",
    )
    found = load_file(tmp_path / "mean/model.safetensors")
    for name, value in expected(weights).items():
        np.testing.assert_allclose(found[name], value / 2, rtol=2e-7, err_msg=name)


def test_rules_before_the_ones_of_the_family_change_its_sources(weights, tmp_path):
    params = export(tmp_path, "hf", "jax", layout="jax")
    query = "params.decoder.layers.self_attention.query.kernel"
    value = "params.decoder.layers.self_attention.value.kernel"
    changed = {key: torch.from_numpy(tensor) for key, tensor in params.items()}
    changed["turned"] = changed.pop(value).transpose(0, 1).contiguous()
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in changed.items()},
        tmp_path / "step",
    )
    turn = Transpose("turned", value, (1, 0, 2, 3))
    back = export(tmp_path, "step", "back", rules=[turn])
    for name, tensor in weights.items():
        np.testing.assert_allclose(back[name], tensor, rtol=2e-7, err_msg=name)

    # Elements that lie apart, of a tensor that is made of others, would need a plan for each.
    cut = [Split(query, ("a", "b"), axis=2), Concat(("a", "b"), query, axis=2)]
    with pytest.raises(InvalidShardingError, match="lie apart"):
        export(tmp_path, "jax", "cut", rules=cut)


def test_a_checkpoint_of_megatron_becomes_one_of_maxtext(weights, tmp_path):
    names = {
        "input_layernorm": "input_layernorm.weight",
        "post_attention_layernorm": "pre_mlp_layernorm.weight",
        "self_attn.o_proj": "self_attention.linear_proj.weight",
        "mlp.down_proj": "mlp.linear_fc2.weight",
    }
    tensors = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    for layer in range(LAYERS):
        own = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in SHAPES}
        parts = [own[f"self_attn.{name}_proj"].reshape(GROUPS, -1, SIZE, WIDTH) for name in "qkv"]
        fused = np.concatenate(parts, 1).reshape(-1, WIDTH)
        gated = np.concatenate([own["mlp.gate_proj"], own["mlp.up_proj"]])
        prefix = f"decoder.layers.{layer}."
        tensors |= {prefix + new: own[old] for old, new in names.items()}
        tensors[f"{prefix}self_attention.linear_qkv.weight"] = fused
        tensors[f"{prefix}mlp.linear_fc1.weight"] = gated
    whole = {
        key: ShardedTensor.from_rank_offsets(key, torch.from_numpy(tensor))
        for key, tensor in tensors.items()
    }
    distckpt.save(whole, tmp_path / "megatron")
    found = export(tmp_path, "megatron", "jax", layout="jax")
    for name, value in expected(weights).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_configuration_that_lacks_a_value_is_an_error_with_its_name(weights, tmp_path):
    values = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    (tmp_path / "hf/config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointingException, match="vocab_size"):
        export(tmp_path, "hf", "jax", layout="jax")


@pytest.mark.parametrize("max_bytes", [1_000_000, 50_000_000, 125_000_000, 256_000_000])
def test_bands_of_any_size_give_the_same_stack_of_transposed_tensors(tmp_path, max_bytes):
    generator = np.random.default_rng(0)
    layers = generator.integers(0, 256, (3, 2200, 1500, 4), np.uint8).view(np.int32)[..., 0]
    tensors = {f"layers.{number}": layer for number, layer in enumerate(layers)}
    save_file(tensors, tmp_path / "model.safetensors")
    rules = [
        Stack("layers.*", "stack", axis=0, size=3),
        Transpose("stack", "turned", order=(2, 0, 1)),
    ]
    with counted_reads() as counts:
        distckpt.consolidate(tmp_path, tmp_path / "out", rules=rules, max_inflight_bytes=max_bytes)
    found = load_file(tmp_path / "out/model.safetensors")["turned"]
    np.testing.assert_array_equal(found, layers.transpose(2, 0, 1))
    # Five times without bands, which have a fifth of the memory.
    assert (counts.num_bytes < 1.5 * layers.nbytes) == (max_bytes == 256_000_000)
