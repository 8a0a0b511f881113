"""Models of transformers under the layouts of Megatron, imported and exported: the same bytes and
the same logits.
"""

from __future__ import annotations

import os
import re
import warnings

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt.rules import Rename, Trim
from tests.support.hf_folders import INDEX, read_export, same_bytes

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, FFN, HEADS, GROUPS, EXPERTS, VOCABULARY = 2, 32, 48, 4, 2, 4, 40
HEAD_DIM = HIDDEN // HEADS


def megatron_state(rank, num_ranks, has_bias=False, tied=False, moe=False):
    """Describe a rank's tensors as Megatron does: layers stacked, gate and up halves in one
    tensor.
    """
    mine = (rank, num_ranks)
    words = VOCABULARY // num_ranks, HIDDEN
    shards = [sharded("embedding.word_embeddings.weight", words, (0, *mine))]
    if not tied:
        shards.append(sharded("output_layer.weight", words, (0, *mine)))
    if rank == 0:
        shards.append(sharded("decoder.final_layernorm.weight", (HIDDEN,)))
    for layer in range(LAYERS):
        shards += attention(layer, rank, num_ranks, has_bias)
        shards += experts(layer, rank, num_ranks) if moe else mlp(layer, rank, num_ranks)
    return {f"rank {rank}, shard {number}": shard for number, shard in enumerate(shards)}


def sharded(key, shape, *cuts, prepended=0):
    return ShardedTensor.from_rank_offsets(
        key, torch.full(shape, torch.nan), *cuts, prepend_axis_num=prepended
    )


def in_layer(layer, name, shape, *cuts, prepended=1):
    """Describe a part of a layer's tensor; axis 0 of the global tensor is that of the layers."""
    return sharded(f"decoder.layers.{name}", shape, (0, layer, LAYERS), *cuts, prepended=prepended)


def attention(layer, rank, num_ranks, has_bias):
    mine, qkv_rows = (rank, num_ranks), (HEADS + 2 * GROUPS) * HEAD_DIM // num_ranks
    yield in_layer(layer, "self_attention.linear_qkv.weight", (qkv_rows, HIDDEN), (1, *mine))
    yield in_layer(
        layer, "self_attention.linear_proj.weight", (HIDDEN, HIDDEN // num_ranks), (2, *mine)
    )
    if has_bias:
        yield in_layer(layer, "self_attention.linear_qkv.bias", (qkv_rows,), (1, *mine))
    if rank == 0:
        yield in_layer(layer, "self_attention.linear_qkv.layer_norm_weight", (HIDDEN,))


def mlp(layer, rank, num_ranks):
    for half in range(2):
        cut = (1, half * num_ranks + rank, 2 * num_ranks)
        yield in_layer(layer, "mlp.linear_fc1.weight", (FFN // num_ranks, HIDDEN), cut)
    yield in_layer(layer, "mlp.linear_fc2.weight", (HIDDEN, FFN // num_ranks), (2, rank, num_ranks))
    if rank == 0:
        yield in_layer(layer, "mlp.linear_fc1.layer_norm_weight", (HIDDEN,))


def experts(layer, rank, num_ranks):
    for expert in range(rank * EXPERTS // num_ranks, (rank + 1) * EXPERTS // num_ranks):
        cut = (1, expert, EXPERTS)
        yield in_layer(
            layer, "mlp.experts.experts.linear_fc1.weight", (2 * FFN, HIDDEN), cut, prepended=2
        )
        yield in_layer(
            layer, "mlp.experts.experts.linear_fc2.weight", (HIDDEN, FFN), cut, prepended=2
        )
    if rank == 0:
        yield in_layer(layer, "mlp.router.weight", (EXPERTS, HIDDEN))
        yield in_layer(layer, "pre_mlp_layernorm.weight", (HIDDEN,))


def megatron_tensors(hf, moe=False):
    """Compute what Megatron's tensors are, from those of a Hugging Face model."""
    hf = {key: tensor.numpy() for key, tensor in hf.items()}
    tensors = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        tensors["output_layer.weight"] = hf["lm_head.weight"]
    per_layer = {}
    for layer in range(LAYERS):
        one = {
            key.removeprefix(f"model.layers.{layer}."): array
            for key, array in hf.items()
            if key.startswith(f"model.layers.{layer}.")
        }
        mine = {
            "self_attention.linear_proj.weight": one["self_attn.o_proj.weight"],
            "self_attention.linear_qkv.layer_norm_weight": one["input_layernorm.weight"],
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in one:
                q, k, v = (one[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                inner = q.shape[1:]
                grouped = [a.reshape(GROUPS, -1, HEAD_DIM, *inner) for a in (q, k, v)]
                mine[f"self_attention.linear_qkv.{kind}"] = np.concatenate(grouped, axis=1).reshape(
                    -1, *inner
                )
        if moe:
            expert = "block_sparse_moe.experts.{}.{}.weight"
            mine["pre_mlp_layernorm.weight"] = one["post_attention_layernorm.weight"]
            mine["mlp.router.weight"] = one["block_sparse_moe.gate.weight"]
            mine["mlp.experts.experts.linear_fc1.weight"] = np.stack(
                [
                    np.concatenate([one[expert.format(e, name)] for name in ("w1", "w3")])
                    for e in range(EXPERTS)
                ]
            )
            mine["mlp.experts.experts.linear_fc2.weight"] = np.stack(
                [one[expert.format(e, "w2")] for e in range(EXPERTS)]
            )
        else:
            mine["mlp.linear_fc1.layer_norm_weight"] = one["post_attention_layernorm.weight"]
            mine["mlp.linear_fc1.weight"] = np.concatenate(
                [one[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
            )
            mine["mlp.linear_fc2.weight"] = one["mlp.down_proj.weight"]
        for key, array in mine.items():
            per_layer.setdefault(f"decoder.layers.{key}", []).append(array)
    return tensors | {key: np.stack(arrays) for key, arrays in per_layer.items()}


def tiny(kind, tied=False):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": tied,
    }
    sizes |= {"num_local_experts": EXPERTS} if kind == "Mixtral" else {}
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes)
    )
    with torch.no_grad():
        # Norms and biases are constants at first, which would hide that they were mixed up.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10)).logits


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


MODELS = {
    "Llama": {},
    "Llama, tied": {"tied": True},
    "Qwen2": {"has_bias": True},
    "Mixtral": {"moe": True},
}


@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"], ids=["several files", "one file"])
@pytest.mark.parametrize(("kind", "options"), MODELS.items(), ids=MODELS.keys())
def test_a_model_is_imported_under_megatrons_layout_and_exported_again(
    tmp_path, kind, options, max_shard_size
):
    model = tiny(kind.split(",")[0], options.get("tied", False))
    model.save_pretrained(tmp_path / "hf", max_shard_size=max_shard_size)
    original = read_export(tmp_path / "hf")
    rules = distckpt.families.rules(tmp_path / "hf", "megatron")
    state = {**megatron_state(0, 2, **options), **megatron_state(1, 2, **options)}
    distckpt.load(state, tmp_path / "hf", rules=rules)
    expected = megatron_tensors(original, options.get("moe", False))
    assert {shard.key for shard in state.values()} == expected.keys()
    for shard in state.values():
        assert np.array_equal(shard.data.numpy(), expected[shard.key][shard.global_slice()]), (
            shard.key
        )

    distckpt.save(state, tmp_path / "checkpoint")
    distckpt.consolidate(
        tmp_path / "checkpoint",
        tmp_path / "out",
        rules=rules,
        like=tmp_path / "hf",
        extra_files_from=tmp_path / "hf",
    )
    assert same_bytes(read_export(tmp_path / "out"), original)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "hf"))
    if max_shard_size == "20KB":
        assert len(os.listdir(tmp_path / "out")) > 4
        assert (tmp_path / "out" / INDEX).read_bytes() == (tmp_path / "hf" / INDEX).read_bytes()
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True
    )
    assert torch.equal(logits(exported), logits(model))


def test_transformers_loads_what_is_split_by_size(tmp_path):
    model = tiny("Llama")
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in model.state_dict().items()}
    distckpt.save({**state, "step": 3}, tmp_path / "checkpoint")
    model.config.save_pretrained(tmp_path / "config")
    report = distckpt.consolidate(
        tmp_path / "checkpoint",
        tmp_path / "out",
        max_file_bytes=20_000,
        extra_files_from=tmp_path / "config",
    )
    assert len(report.files) > 3
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    assert torch.equal(logits(exported), logits(model))


def test_tied_weights_are_dropped_as_transformers_expects(tmp_path):
    model = tiny("Llama", tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in model.state_dict().items()}
    distckpt.save(state, tmp_path / "checkpoint")
    model.config.save_pretrained(tmp_path / "config")
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "out", extra_files_from=tmp_path / "config"
    )
    assert "lm_head.weight" not in read_export(tmp_path / "out")
    distckpt.consolidate(
        tmp_path / "checkpoint",
        tmp_path / "both",
        tied="write",
        extra_files_from=tmp_path / "config",
    )
    assert "lm_head.weight" in read_export(tmp_path / "both")
    for place in ("out", "both"):
        exported, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / place, output_loading_info=True
        )
        assert not any(info.values())
        assert torch.equal(logits(exported), logits(model))


def layers_apart(layers, tp, num_ranks, experts=()):
    """Describe a pipeline stage in which every layer has keys of its own."""
    state = {}
    for layer in layers:
        prefix = f"decoder.layers.{layer}."
        qkv = torch.zeros((HEADS + 2 * GROUPS) * HEAD_DIM // num_ranks, HIDDEN)
        shards = [
            ShardedTensor.from_rank_offsets(
                prefix + "self_attention.linear_qkv.weight", qkv, (0, tp, num_ranks)
            ),
            ShardedTensor.from_rank_offsets(
                prefix + "self_attention.linear_qkv.layer_norm_weight", torch.zeros(HIDDEN)
            ),
        ]
        for expert in experts:
            key = f"{prefix}mlp.experts.experts.{expert}.linear_fc1.weight"
            shards.append(ShardedTensor.from_rank_offsets(key, torch.zeros(2 * FFN, HIDDEN)))
        state |= {shard.key: shard for shard in shards}
    return state


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]], ids=str)
def test_a_pipeline_stage_asks_for_its_layers_only(tmp_path, layers):
    model = tiny("Llama")
    model.save_pretrained(tmp_path / "hf")
    expected = megatron_tensors(read_export(tmp_path / "hf"))
    rules = distckpt.families.rules(tmp_path / "hf", "megatron")
    state = layers_apart(layers, 1, 2)
    distckpt.load(state, tmp_path / "hf", rules=rules)
    for key, shard in state.items():
        layer, name = re.fullmatch(r"decoder\.layers\.(\d)\.(.*)", key).groups()
        assert np.array_equal(
            shard.data, expected[f"decoder.layers.{name}"][int(layer)][shard.global_slice()]
        )


@pytest.mark.parametrize("experts", [[0, 1], [3]], ids=str)
def test_an_expert_parallel_rank_asks_for_its_experts_only(tmp_path, experts):
    model = tiny("Mixtral")
    model.save_pretrained(tmp_path / "hf")
    expected = megatron_tensors(read_export(tmp_path / "hf"), moe=True)
    rules = distckpt.families.rules(tmp_path / "hf", "megatron")
    state = layers_apart([1], 0, 1, experts)
    distckpt.load(state, tmp_path / "hf", rules=rules)
    for expert in experts:
        loaded = state[f"decoder.layers.1.mlp.experts.experts.{expert}.linear_fc1.weight"].data
        assert np.array_equal(
            loaded, expected["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1][expert]
        )


def test_a_padded_vocabulary_is_filled_with_zeros_and_cut_off_again(tmp_path):
    model = tiny("Llama", tied=True)
    model.save_pretrained(tmp_path / "hf")
    original = read_export(tmp_path / "hf")
    rules = [
        Trim("embedding.word_embeddings.weight", axis=0, size=VOCABULARY),
        Rename("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ]
    parts = {
        str(i): ShardedTensor.from_rank_offsets(
            "embedding.word_embeddings.weight", torch.full((16, HIDDEN), torch.nan), (0, i, 4)
        )
        for i in range(4)
    }
    distckpt.load(parts, tmp_path / "hf", rules=rules)
    words = original["model.embed_tokens.weight"]
    loaded = torch.cat([shard.data for shard in parts.values()])
    assert torch.equal(loaded, torch.cat([words, torch.zeros(64 - VOCABULARY, HIDDEN)]))
    distckpt.save(parts, tmp_path / "checkpoint")
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "out", rules=rules)
    assert same_bytes(read_export(tmp_path / "out"), {"model.embed_tokens.weight": words})
