"""LoRA of Megatron Bridge, exported under PEFT's names and merged: beside models of transformers,
and PEFT itself.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import CheckpointingException, LoadMismatchError
from tests.support.hf_folders import read_export, write_plain
from tests.support.states import save_checkpoint
from tests.support.tiny_models import TOKENS, logits_with, make_config, make_model

RANK, SCALING = 3, 1.5
PEFT = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": RANK * SCALING,
    "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "init_lora_weights": True,
    "peft_version": "0.21.2",
}
FC1, FC2 = (
    "decoder.layers.mlp.experts.experts.linear_fc1.adapter.",
    "decoder.layers.mlp.experts.experts.linear_fc2.adapter.",
)


def random(*shape):
    return torch.randn(shape) * 0.3


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model, its directory, the matrices of an adapter for its experts as Bridge stores them, and
    what they add.
    """
    folder = tmp_path_factory.mktemp("experts")
    model = make_model(make_config("qwen3_moe"))
    model.save_pretrained(folder / "saved")
    torch.manual_seed(0)
    lora = {
        f"{FC1}linear_in.weight": random(2, 4, RANK, 32),
        f"{FC1}linear_out.weight": random(2, 4, 32, RANK),
        f"{FC2}linear_in.weight": random(2, 4, RANK, 16),
        f"{FC2}linear_out.weight": random(2, 4, 32, RANK),
    }
    save_checkpoint(folder / "lora", lora)
    distckpt.consolidate(
        folder / "lora", folder / "adapter", family=folder / "saved", keys="*.adapter.*"
    )
    (folder / "adapter/model.safetensors").rename(folder / "adapter/adapter_model.safetensors")
    (folder / "adapter/adapter_config.json").write_text(json.dumps(PEFT))
    added = {}
    for name, key in (("gate_up_proj", FC1), ("down_proj", FC2)):
        products = lora[f"{key}linear_out.weight"] @ lora[f"{key}linear_in.weight"]
        added |= {
            f"model.layers.{layer}.mlp.experts.{name}": SCALING * products[layer]
            for layer in range(2)
        }
    return model, folder, added


def test_matrices_of_experts_have_the_layout_of_peft(experts):
    _, folder, added = experts
    found = load_file(folder / "adapter/adapter_model.safetensors")
    assert len(found) == 8
    for name, delta in added.items():
        module = (
            f"base_model.model.{name.rpartition('.')[0]}"
            f"{'.base_layer' * name.endswith('gate_up_proj')}"
        )
        a, b = (found[f"{module}.lora_{letter}.weight"] for letter in "AB")
        a, b = a.reshape(4, RANK, -1), b.reshape(-1, RANK, 4)
        torch.testing.assert_close(SCALING * torch.einsum("ore,eri->eoi", b, a), delta)


@pytest.mark.filterwarnings("ignore")
def test_peft_opens_an_adapter_of_experts(experts):
    peft = pytest.importorskip("peft")
    model, folder, added = experts
    expected = logits_with(model, added)
    opened = peft.PeftModel.from_pretrained(
        type(model).from_pretrained(folder / "saved"), folder / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base", ["names on disk", "names in memory"])
def test_an_adapter_of_experts_is_merged(experts, base, tmp_path):
    model, folder, added = experts
    options = {"merge_adapter": folder / "adapter"}
    stored = folder / "saved"
    if base == "names in memory":
        stored, options["family"], options["like"] = tmp_path / "model", "auto", folder / "saved"
        distckpt.save({"model": model}, stored)
    distckpt.consolidate(stored, tmp_path / "merged", extra_files_from=folder / "saved", **options)
    merged = type(model).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(
            merged(TOKENS).logits, logits_with(model, added), rtol=1e-4, atol=1e-4
        )
    names = read_export(folder / "saved").keys()
    assert read_export(tmp_path / "merged").keys() == names


def test_an_adapter_of_other_experts_is_refused(experts, tmp_path):
    _, folder, _ = experts
    tensors = load_file(folder / "adapter/adapter_model.safetensors")
    rank_2 = {
        name: tensor[:8] if "lora_A" in name else tensor[:, :8].contiguous()
        for name, tensor in tensors.items()
    }
    cases = [
        (tensors, {"r": RANK + 1}, "rank 3"),
        (rank_2, {}, "rank 2"),
        ({name: tensor[:-1] for name, tensor in tensors.items()}, {}, "of other shapes"),
        (tensors, {"peft_version": "0.18.1"}, "0.19 or newer"),
        (tensors, {"peft_version": None}, "0.19 or newer"),
        (
            {name: tensor for name, tensor in tensors.items() if "base_layer" in name},
            {},
            "down_proj.*not complete",
        ),
        (tensors, {"target_parameters": []}, "rank 12"),
    ]
    for number, (changed, settings, message) in enumerate(cases):
        adapter = tmp_path / str(number)
        write_plain(adapter / "adapter_model.safetensors", changed)
        (adapter / "adapter_config.json").write_text(json.dumps({**PEFT, **settings}))
        with pytest.raises(CheckpointingException, match=message):
            distckpt.consolidate(folder / "saved", tmp_path / "out", merge_adapter=adapter)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_size": 16,
    "vocab_size": 8,
}
QKV, MLP = (
    "decoder.layers.0.self_attention.linear_qkv.adapter.",
    "decoder.layers.0.mlp.linear_fc1.adapter.",
)


def export_lora(tmp_path, lora, config=LLAMA, **options):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_checkpoint(tmp_path / "lora", lora)
    distckpt.consolidate(
        tmp_path / "lora", tmp_path / "out", family=tmp_path / "config.json", **options
    )
    return read_export(tmp_path / "out")


@pytest.mark.parametrize(
    "parts",
    [{"q": 16, "k": 8, "v": 8}, {"q": 16, "v": 8}, {"k": 8}, {"gate": 12, "up": 12}, {"up": 12}],
)
def test_adapters_of_parts_of_fused_projections(parts, tmp_path):
    start, module = (MLP, "mlp") if "up" in parts else (QKV, "self_attn")
    lora, expected = {}, {}
    for part, rows in parts.items():
        a, b = random(RANK, 16), random(rows, RANK)
        lora |= {
            f"{start}adapter_{part}.linear_in.weight": a,
            f"{start}adapter_{part}.linear_out.weight": b,
        }
        stem = f"base_model.model.model.layers.0.{module}.{part}_proj.lora_"
        expected |= {f"{stem}A.weight": a, f"{stem}B.weight": b}
    found = export_lora(tmp_path, lora)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (
            {f"{QKV}linear_in.weight": (RANK, 24), f"{QKV}linear_out.weight": (32, RANK)},
            "hidden_size 16",
        ),
        (
            {f"{MLP}linear_in.weight": (RANK, 8), f"{MLP}linear_out.weight": (24, RANK)},
            "hidden_size 16",
        ),
        (
            {
                f"{QKV}adapter_q.linear_in.weight": (RANK, 16),
                f"{QKV}adapter_q.linear_out.weight": (8, RANK),
            },
            "has 8 rows",
        ),
        (
            {
                f"{QKV}adapter_q.linear_in.weight": (RANK + 1, 16),
                f"{QKV}adapter_q.linear_out.weight": (16, RANK),
            },
            "ranks",
        ),
    ],
)
def test_matrices_of_another_model_are_refused(matrices, message, tmp_path):
    with pytest.raises(LoadMismatchError, match=message):
        export_lora(tmp_path, {key: random(*shape) for key, shape in matrices.items()})


def test_nothing_of_an_adapter_is_lost(tmp_path):
    whole = {
        f"{QKV}linear_in.weight": random(RANK, 16),
        f"{QKV}linear_out.weight": random(32, RANK),
    }
    part = {
        f"{QKV}adapter_q.linear_in.weight": random(RANK, 16),
        f"{QKV}adapter_q.linear_out.weight": random(16, RANK),
    }
    other = {key.replace("linear_qkv", "linear_proj"): tensor for key, tensor in part.items()}
    for lora in (whole | part, other):
        with pytest.raises(CheckpointingException, match=r"adapter_q.* would be lost"):
            export_lora(tmp_path, lora)
        shutil.rmtree(tmp_path / "lora")


@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe", "mixtral"])
def test_adapters_of_experts_without_a_known_layout_are_refused(model_type, tmp_path):
    config = make_config(model_type).to_dict()
    lora = {
        f"{FC1}linear_in.weight": random(2, 4, RANK, 32),
        f"{FC1}linear_out.weight": random(2, 4, 64, RANK),
    }
    with pytest.raises(CheckpointingException, match="layout"):
        export_lora(tmp_path, lora, config)


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl", "qwen3_vl"])
def test_adapters_of_models_with_towers_have_the_names_in_memory(family, tmp_path):
    model = make_model(make_config(family))
    model.save_pretrained(tmp_path / "saved")
    key = "language_model.decoder.layers.self_attention.linear_proj.adapter."
    lora = {
        f"{key}linear_in.weight": random(2, RANK, 32),
        f"{key}linear_out.weight": random(2, 32, RANK),
    }
    save_checkpoint(tmp_path / "lora", lora)
    distckpt.consolidate(tmp_path / "lora", tmp_path / "adapter", family=tmp_path / "saved")
    (tmp_path / "adapter/model.safetensors").rename(tmp_path / "adapter/adapter_model.safetensors")
    config = PEFT | {"target_modules": r".*language_model.*\.o_proj", "target_parameters": None}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    added = {
        f"model.language_model.layers.{layer}.self_attn.o_proj.weight": layer for layer in range(2)
    }
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {
        key.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for key in found
    } == set(added)
    products = SCALING * lora[f"{key}linear_out.weight"] @ lora[f"{key}linear_in.weight"]
    expected = logits_with(model, {name: products[layer] for name, layer in added.items()})
    options = {"merge_adapter": tmp_path / "adapter", "extra_files_from": tmp_path / "saved"}
    distckpt.consolidate(tmp_path / "saved", tmp_path / "merged", **options)
    with torch.no_grad():
        merged = (
            type(model)
            .from_pretrained(tmp_path / "merged", attn_implementation="eager")(TOKENS)
            .logits
        )
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
