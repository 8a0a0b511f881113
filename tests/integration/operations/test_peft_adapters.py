"""Adapters with the names and layout of PEFT for models of transformers, merged into directories of
these models.
"""

from __future__ import annotations

import json

import pytest
import torch

import distckpt
from distckpt import CheckpointingException
from tests.support.hf_folders import read_export, write_plain
from tests.support.tiny_models import TOKENS, logits_with, make_config, make_model

RANK, ALPHA = 3, 6
SETTINGS = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "init_lora_weights": True,
    "peft_version": "0.21.2",
}


def write_adapter(path, tensors, **config):
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    write_plain(path / "adapter_model.safetensors", named)
    (path / "adapter_config.json").write_text(json.dumps(SETTINGS | config))


def matrices(module, rows, columns, rank=RANK):
    shapes = {"A": (rank, columns), "B": (rows, rank)}
    return {
        f"{module}.lora_{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()
    }


def products(tensors, scaling=ALPHA / RANK):
    """Return what the matrices of modules add to their weights."""
    modules = {name.partition(".lora_")[0] for name in tensors}
    pairs = {
        module: [tensors[f"{module}.lora_{name}.weight"] for name in "BA"] for module in modules
    }
    return {f"{module}.weight": scaling * b @ a for module, (b, a) in pairs.items()}


def of_modules(model, leaves, rank=RANK):
    """Return matrices for all linear layers of these names."""
    weights = {
        name.removesuffix(".weight"): w.shape
        for name, w in model.state_dict().items()
        if w.ndim == 2
    }
    chosen = {
        module: shape for module, shape in weights.items() if module.rpartition(".")[2] in leaves
    }
    return {
        key: tensor
        for name, shape in chosen.items()
        for key, tensor in matrices(name, *shape, rank).items()
    }


def of_experts(model):
    """Return matrices for the experts of all layers as PEFT stores them, and what they add to the
    parameters.
    """
    tensors, added = {}, {}
    for name, parameter in model.state_dict().items():
        block, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj") and parameter.ndim == 3:
            num, rows, columns = parameter.shape
            module = block + ".base_layer" * (leaf == "gate_up_proj")
            pair = matrices(module, rows, columns, num * RANK)
            tensors |= pair
            b, a = (pair[f"{module}.lora_{kind}.weight"] for kind in "BA")
            each = torch.einsum(
                "ore,eri->eoi", b.reshape(rows, RANK, num), a.reshape(num, RANK, columns)
            )
            added[name] = each * ALPHA / RANK
    return tensors, added


def merged_logits(model, base, adapter, output):
    distckpt.consolidate(base, output, merge_adapter=adapter, extra_files_from=base)
    assert read_export(output).keys() == read_export(base).keys()
    with torch.no_grad():
        return type(model).from_pretrained(output, attn_implementation="eager")(TOKENS).logits


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl", "qwen2_vl"])
def test_modules_have_the_names_of_the_model_in_memory(family, tmp_path):
    model = make_model(make_config(family))
    model.save_pretrained(tmp_path / "base")
    tensors = of_modules(model, ["q_proj", "v_proj"])
    tensors = {name: tensor for name, tensor in tensors.items() if "language_model" in name}
    assert len(tensors) == 8
    write_adapter(
        tmp_path / "adapter", tensors, target_modules=r".*language_model.*(q_proj|v_proj)"
    )
    found = merged_logits(model, tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(found, logits_with(model, products(tensors)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_directory_as_it_was_published(family, tmp_path):
    """The tower has other names there, and PEFT takes the modules of these names in the tower as
    well.
    """
    model = make_model(make_config(family))
    model.save_pretrained(tmp_path / "base")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in read_export(tmp_path / "base").items()
    }
    write_plain(tmp_path / "base/model.safetensors", published)
    tensors = of_modules(model, ["q_proj", "v_proj"])
    write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj", "v_proj"])
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    added = products(tensors)
    towers = {name: added[name] for name in added if name.startswith("model.vision_tower.")}
    assert len(towers) == 4
    found = read_export(tmp_path / "out")
    for name, product in towers.items():
        name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        torch.testing.assert_close(found[name], published[name] + product)
    found = merged_logits(model, tmp_path / "base", tmp_path / "adapter", tmp_path / "again")
    torch.testing.assert_close(found, logits_with(model, added), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_all_that_is_linear_in_a_model_with_experts(family, tmp_path):
    """PEFT names the router by its parameter, and gives it a rank and scaling of its own by that
    name.
    """
    model = make_model(make_config(family))
    model.save_pretrained(tmp_path / "base")
    experts, added = of_experts(model)
    router, attention = of_modules(model, ["gate"], rank=2), of_modules(model, ["o_proj"])
    assert all((experts, router, attention))
    config = {
        "target_modules": ["o_proj"],
        "target_parameters": ["gate_up_proj", "gate.weight", "down_proj"],
        "rank_pattern": {"gate.weight": 2},
        "alpha_pattern": {"gate.weight": 5, "gate": 7},
    }
    write_adapter(tmp_path / "adapter", experts | router | attention, **config)
    found = merged_logits(model, tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    added |= products(attention) | products(router, 5 / 2)
    torch.testing.assert_close(found, logits_with(model, added), rtol=1e-4, atol=1e-4)
    write_adapter(tmp_path / "less", experts | attention, **config)
    with pytest.raises(
        CheckpointingException, match=r"no tensors for 'gate\.weight', of target_parameters"
    ):
        distckpt.consolidate(tmp_path / "base", tmp_path / "out2", merge_adapter=tmp_path / "less")


def test_experts_that_the_export_has_in_one_tensor(tmp_path):
    model = make_model(make_config("gpt_oss"))
    model.save_pretrained(tmp_path / "base")
    write_adapter(
        tmp_path / "adapter",
        of_experts(model)[0],
        target_modules=[],
        target_parameters=["gate_up_proj"],
    )
    with pytest.raises(
        CheckpointingException, match="no gate_proj, up_proj and down_proj of each expert"
    ):
        distckpt.consolidate(
            tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter"
        )


def test_an_embedding_that_is_no_longer_the_output_layer(tmp_path):
    """PEFT trains a copy of it, and the output layer stays as it was."""
    model = make_model(make_config("qwen3"))
    model.save_pretrained(tmp_path / "base")
    own = torch.randn(40, 32)
    write_adapter(
        tmp_path / "adapter", {"model.embed_tokens.weight": own}, modules_to_save=["embed_tokens"]
    )
    options = {"merge_adapter": tmp_path / "adapter"}
    distckpt.save({"model": model}, tmp_path / "checkpoint")
    for source in ("base", "checkpoint"):
        with pytest.raises(
            CheckpointingException,
            match=r"'model.embed_tokens.weight' of its own.*output layer, too",
        ):
            distckpt.consolidate(tmp_path / source, tmp_path / "out", **options)
    options |= {"tied": "write", "extra_files_from": tmp_path / "base"}
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "out", **options)
    opened = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.weight = torch.nn.Parameter(own)
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, model(TOKENS).logits)

    untied = make_model(make_config("llama"))
    untied.save_pretrained(tmp_path / "untied")
    distckpt.consolidate(tmp_path / "untied", tmp_path / "out2", merge_adapter=tmp_path / "adapter")
    assert torch.equal(read_export(tmp_path / "out2")["model.embed_tokens.weight"], own)
