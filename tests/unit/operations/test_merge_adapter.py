"""Adapters of PEFT merged into an export: by numpy's products, and by PEFT itself where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import random

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointNotFoundError, LoadMismatchError
from distckpt.megatron.core import CheckpointingException
from distckpt.rules import Split
from tests.support.cli_command import call_error, call_json
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.quantized_models import fp8_block
from tests.support.reference import needs_dtypes
from tests.support.states import save_checkpoint

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "init_lora_weights": True}


def write_adapter(path, tensors, **config):
    """Write what PEFT's `save_pretrained` writes."""
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    write_plain(path / "adapter_model.safetensors", named)
    (path / "adapter_config.json").write_text(json.dumps({**LORA, **config}))
    return path


def matrices(module, shape, rank=4, dtype=torch.float32):
    """Make matrices whose product has a shape."""
    return {
        f"{module}.lora_A.weight": torch.randn(rank, shape[1]).to(dtype),
        f"{module}.lora_B.weight": torch.randn(shape[0], rank).to(dtype),
    }


def added(adapter, module, scaling):
    a, b = (adapter[f"{module}.lora_{letter}.weight"].double().numpy() for letter in "AB")
    return torch.from_numpy(scaling * (b @ a))


def test_products_by_region_with_the_scaling_of_each_module(tmp_path):
    base = {
        "model.0.up.weight": torch.randn(2001, 1203),  # windows end inside of rows
        "model.0.q.weight": torch.randn(6, 8),
        "model.1.q.weight": torch.randn(6, 8).double(),
        "model.1.up.weight": torch.randn(7, 9).bfloat16(),
        "model.norm.weight": torch.randn(8),
    }
    save_checkpoint(tmp_path / "base", base, axis=1)
    adapter = {}
    for name, tensor in base.items():
        if tensor.ndim == 2:
            adapter |= matrices(
                name.removesuffix(".weight"), tensor.shape, 2 if ".q." in name else 4
            )
    config = {"alpha_pattern": {"1.q": 5, "up": 7}, "rank_pattern": {"q": 2}}
    write_adapter(tmp_path / "plain", adapter, **config)
    write_adapter(tmp_path / "roots", adapter, **config, use_rslora=True)
    for name, power in (("plain", 1), ("roots", 0.5)):
        report = distckpt.consolidate(
            tmp_path / "base", tmp_path / f"{name} out", merge_adapter=tmp_path / name
        )
        assert report.num_tensors == len(base)
        found = read_export(tmp_path / f"{name} out")
        for module, alpha, rank in (("0.up", 7, 4), ("0.q", 6, 2), ("1.q", 5, 2), ("1.up", 7, 4)):
            before = base[f"model.{module}.weight"]
            total = before.double() + added(adapter, f"model.{module}", alpha / rank**power)
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2**-8}[
                before.dtype
            ]
            assert found[f"model.{module}.weight"].dtype == before.dtype
            assert torch.allclose(
                found[f"model.{module}.weight"].double(), total, rtol=tolerance, atol=tolerance
            )
        assert torch.equal(found["model.norm.weight"], base["model.norm.weight"])


def test_embeddings_transposed_layers_and_modules_that_were_saved(tmp_path):
    base = {
        "embed.weight": torch.randn(10, 6),
        "conv.weight": torch.randn(6, 9),
        "head.weight": torch.randn(10, 6),
    }
    base["head.bias"] = torch.randn(10)
    write_plain(tmp_path / "base" / "model.safetensors", base)
    conv = matrices("conv", (9, 6))
    a, b, other = torch.randn(4, 10), torch.randn(6, 4), torch.randn(10, 6)
    embedding = {
        "embed.lora_embedding_A": a,
        "embed.lora_embedding_B": b,
        "embed.base_layer.weight": other,
    }
    head = {"head.weight": torch.randn(10, 6), "head.bias": torch.randn(10)}
    write_adapter(tmp_path / "adapter", conv | embedding | head, fan_in_fan_out=True)
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    found = read_export(tmp_path / "out")
    assert torch.allclose(
        found["conv.weight"], base["conv.weight"] + added(conv, "conv", 1.5).T.float(), atol=1e-5
    )
    assert torch.allclose(found["embed.weight"], other + 1.5 * (b @ a).T, atol=1e-5)
    assert same_bytes({key: found[key] for key in head}, head)


def test_the_adapter_has_the_names_of_the_export(tmp_path, capsys):
    fused = torch.randn(12, 5).bfloat16()
    save_checkpoint(tmp_path / "base", {"fc1.weight": fused})
    rules = [Split("fc1.weight", ("gate.weight", "up.weight"))]
    adapter = matrices("m.up", (6, 5))
    write_adapter(tmp_path / "adapter", adapter)
    options = {"rules": rules, "rename": {"up": "m.up"}, "merge_adapter": tmp_path / "adapter"}
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", dtype=torch.float32, **options)
    found = read_export(tmp_path / "out")
    assert torch.equal(found["gate.weight"], fused[:6].float())
    total = fused[6:].double() + added(adapter, "m.up", 1.5)
    assert torch.allclose(found["m.up.weight"].double(), total, rtol=1e-5, atol=1e-5)
    # Quantised afterwards, and added to an average.
    distckpt.consolidate(tmp_path / "base", tmp_path / "codes", quantize="int8-channel", **options)
    distckpt.consolidate(tmp_path / "out", tmp_path / "of values", quantize="int8-channel")
    codes, others = read_export(tmp_path / "codes"), read_export(tmp_path / "of values")
    assert torch.equal(codes["m.up.weight"], others["m.up.weight"])
    distckpt.merge([tmp_path / "base"] * 2, tmp_path / "merged", dtype=torch.float32, **options)
    assert torch.allclose(
        read_export(tmp_path / "merged")["m.up.weight"].double(), total, rtol=1e-6
    )
    write_adapter(tmp_path / "whole", matrices("fc1", (12, 5)))
    command = (
        "consolidate",
        tmp_path / "base",
        tmp_path / "by command",
        "--merge-adapter",
        tmp_path / "whole",
    )
    (planned,) = call_json(capsys, *command, "--dry-run")["tensors"]
    assert planned["sources"][0].startswith("fc1.weight ")
    keys = [f"base_model.model.fc1.lora_{letter}.weight of the adapter" for letter in "AB"]
    assert planned["sources"][1:] == keys
    error = call_error(capsys, *command[:-1], tmp_path / "adapter", "--dry-run")
    assert "'m.up.weight', not tensors of the export" in error
    assert call_json(capsys, *command)["num_tensors"] == 1


def test_products_that_overflow_are_counted(tmp_path):
    write_plain(tmp_path / "base" / "model.safetensors", {"up.weight": torch.zeros(6, 8)})
    ones = {name: torch.ones_like(tensor) for name, tensor in matrices("up", (6, 8)).items()}
    for large, dtype in ((1e25, None), (1e25, torch.float16), (1e3, torch.float16), (1e3, None)):
        write_adapter(tmp_path / "adapter", {name: large * tensor for name, tensor in ones.items()})
        options = {"merge_adapter": tmp_path / "adapter", "dtype": dtype, "overwrite": True}
        report = distckpt.consolidate(tmp_path / "base", tmp_path / "out", **options)
        assert report.overflows == ({} if (large, dtype) == (1e3, None) else {"up.weight": 48})
    base = torch.full((6, 8), torch.finfo(torch.float64).max, dtype=torch.float64)
    base[0, 0] = torch.inf
    write_plain(tmp_path / "base" / "model.safetensors", {"up.weight": base})
    write_adapter(
        tmp_path / "adapter", {name: 1e150 * tensor.double() for name, tensor in ones.items()}
    )
    report = distckpt.consolidate(
        tmp_path / "base", tmp_path / "out64", merge_adapter=tmp_path / "adapter"
    )
    assert report.overflows == {"up.weight": 47}


def test_a_quantised_base_becomes_values(tmp_path):
    base = fp8_block()
    base.write(tmp_path / "base")
    adapter = matrices("l.up", base.values["l.up.weight"].shape)
    write_adapter(tmp_path / "adapter", adapter)
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    found = read_export(tmp_path / "out")
    total = base.values["l.up.weight"].double() + added(adapter, "l.up", 1.5)
    assert found.keys() == base.values.keys()
    assert torch.allclose(found["l.up.weight"].double(), total, rtol=2**-7, atol=2**-7)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_size": 16,
    "vocab_size": 8,
}
SHAPES = {
    "self_attention.linear_qkv": (32, 16),
    "self_attention.linear_proj": (16, 16),
    "mlp.linear_fc1": (12, 16),
    "mlp.linear_fc2": (16, 6),
}


@pytest.mark.parametrize("stacked", [False, True])
def test_lora_of_megatron_becomes_that_of_peft(tmp_path, stacked):
    """Both ways lead to the same export: products added to Megatron's weights, and by way of an
    adapter of PEFT.
    """
    base, merged, lora = {}, {}, {}
    for layer in range(2):
        for name, (rows, columns) in SHAPES.items():
            weight, a, b = torch.randn(rows, columns), torch.randn(4, columns), torch.randn(rows, 4)
            base[f"{layer}.{name}.weight"], merged[f"{layer}.{name}.weight"] = (
                weight,
                weight + 1.5 * b @ a,
            )
            lora[f"{layer}.{name}.adapter.linear_in.weight"] = a
            lora[f"{layer}.{name}.adapter.linear_out.weight"] = b
        for norm in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            base[f"{layer}.{norm}.layer_norm_weight"] = merged[
                f"{layer}.{norm}.layer_norm_weight"
            ] = torch.ones(16)
    others = {
        "embedding.word_embeddings.weight": torch.randn(8, 16),
        "output_layer.weight": torch.randn(8, 16),
    }
    others["decoder.final_layernorm.weight"] = torch.randn(16)
    for name, layers in (("base", base), ("merged", merged), ("lora", lora)):
        if stacked:
            layers = {
                key[2:]: torch.stack([layers[f"{i}.{key[2:]}"] for i in range(2)]) for key in layers
            }
        tensors = {f"decoder.layers.{key}": tensor for key, tensor in layers.items()}
        save_checkpoint(tmp_path / name, tensors | others, axis=1)
    family = tmp_path / "config.json"
    family.write_text(json.dumps(LLAMA))
    distckpt.consolidate(tmp_path / "merged", tmp_path / "expected", family=family)
    distckpt.consolidate(tmp_path / "lora", tmp_path / "adapter", family=family, keys="*.adapter.*")
    adapter = read_export(tmp_path / "adapter")
    modules = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    layers = [
        f"base_model.model.model.layers.{layer}.{module}"
        for layer in range(2)
        for module in modules
    ]
    assert adapter.keys() == {f"{name}.lora_{letter}.weight" for name in layers for letter in "AB"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(LORA))
    options = {"family": family, "merge_adapter": tmp_path / "adapter"}
    distckpt.consolidate(tmp_path / "base", tmp_path / "found", **options)
    found, expected = read_export(tmp_path / "found"), read_export(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(found[key], tensor, rtol=1e-5, atol=1e-5), key
    lora["0.mlp.linear_fc1.adapter.linear_in.weight"] = torch.ones(3, 16)
    save_checkpoint(
        tmp_path / "ranks", {f"decoder.layers.{key}": tensor for key, tensor in lora.items()}
    )
    with pytest.raises(
        LoadMismatchError,
        match=r"ranks of .*layers\.0\.mlp\.linear_fc1\.adapter\.linear_out\.weight",
    ):
        distckpt.consolidate(tmp_path / "ranks", tmp_path / "half", family=family)
    with pytest.raises(LoadMismatchError):
        distckpt.consolidate(
            tmp_path / "lora", tmp_path / "half", family=family, keys="*.linear_out.*"
        )
    keys = ["*.adapter.*", "!*linear_fc2.adapter.linear_in.*"]
    with pytest.raises(LoadMismatchError, match=r"linear_fc2\.adapter\.linear_out\.weight"):
        distckpt.consolidate(tmp_path / "lora", tmp_path / "half", family=family, keys=keys)


def test_nothing_is_added_to_codes(tmp_path):
    codes = torch.randn(6, 8).to(torch.float8_e4m3fn)
    write_plain(
        tmp_path / "base" / "model.safetensors",
        {"up.weight": codes, "up.weight_scales": torch.ones(3, 5)},
    )
    write_adapter(tmp_path / "adapter", matrices("up", (6, 8)))
    with pytest.raises(LoadMismatchError, match=r"'up\.weight'.* codes"):
        distckpt.consolidate(
            tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter"
        )


@needs_dtypes("float8_e4m3fn")
def test_a_base_of_8_bit_floats_without_scales(tmp_path):
    """They are what they say: the sum is computed in float32 and rounded once."""
    base = torch.randint(-4, 5, (6, 8)).to(torch.float8_e4m3fn)
    adapter = {name: tensor.round() for name, tensor in matrices("up", (6, 8)).items()}
    write_plain(tmp_path / "base/model.safetensors", {"up.weight": base})
    write_adapter(tmp_path / "adapter", adapter, r=4, lora_alpha=8)
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    expected = base.float() + added(adapter, "up", 2.0).float()
    assert same_bytes(read_export(tmp_path / "out"), {"up.weight": expected.to(base.dtype)})


def test_what_cannot_be_merged_is_named(tmp_path):
    write_plain(
        tmp_path / "base" / "model.safetensors",
        {"up.weight": torch.randn(6, 8), "ids": torch.arange(3)},
    )
    plain = matrices("up", (6, 8))
    one = dict([*plain.items()][:1])
    magnitude = {"up.lora_magnitude_vector": torch.ones(6)}
    cases = {
        "elsewhere": (
            matrices("q", (6, 8)),
            {},
            LoadMismatchError,
            r"changes 'q.weight', not tensors of the export",
        ),
        "one of two": (one, {}, LoadMismatchError, r"'up.lora_A.weight', not tensors"),
        "unknown matrix": (plain | magnitude, {}, LoadMismatchError, "lora_magnitude_vector"),
        "shape": (
            matrices("up", (8, 6)),
            {},
            CheckpointingException,
            r"'up.weight' of shape \(8, 6\).*\(6, 8\)",
        ),
        "ranks": (
            one | dict([*matrices("up", (6, 8), 3).items()][1:]),
            {},
            CheckpointingException,
            r"\(6, 3, 4, 8\)",
        ),
        "integers": ({"ids": torch.arange(3)}, {}, CheckpointingException, "I64"),
        "DoRA": (plain, {"use_dora": True}, CheckpointingException, r"\{'use_dora': True\}"),
        "PiSSA": (plain, {"init_lora_weights": "pissa"}, CheckpointingException, "pissa"),
        "rank": (
            plain,
            {"r": 8},
            CheckpointingException,
            "contradicts its matrices of rank 4 for 'up'",
        ),
        "rank of a pattern": (
            plain,
            {"rank_pattern": {"up": 7}},
            CheckpointingException,
            "rank 4 for 'up'",
        ),
        "no rank": (plain, {"r": None}, CheckpointingException, "'up'.*'r': None"),
        "empty": ({}, {}, CheckpointingException, "no tensors for target_modules=None"),
        "targets": (
            plain,
            {"target_modules": ["p", "down"]},
            CheckpointingException,
            r"target_modules=\['p', 'down",
        ),
        "saved": (
            plain,
            {"modules_to_save": ["norm"]},
            CheckpointingException,
            r"modules_to_save=\['norm'\]",
        ),
        "bias": (plain, {"lora_bias": True}, CheckpointingException, r"\{'lora_bias': True\}"),
        "tokens": (
            plain,
            {"trainable_token_indices": [1]},
            CheckpointingException,
            "trainable_token_indices",
        ),
        "NaN": (
            plain,
            {"lora_alpha": float("nan")},
            CheckpointingException,
            "'up'.*'lora_alpha': nan",
        ),
        "no alpha": (
            plain,
            {"lora_alpha": None},
            CheckpointingException,
            "'up'.*'lora_alpha': None",
        ),
        "text": (plain, {"lora_alpha": "4"}, CheckpointingException, "'up'.*'lora_alpha': '4'"),
        "regex": (
            plain,
            {"alpha_pattern": {"(": 3}},
            CheckpointingException,
            r"'alpha_pattern': \{'\('",
        ),
        "list": (plain, {"alpha_pattern": [1]}, CheckpointingException, r"'alpha_pattern': \[1\]"),
        "text for true": (
            plain,
            {"use_rslora": "false"},
            CheckpointingException,
            "use_rslora='false'",
        ),
        "text for false": (
            plain,
            {"fan_in_fan_out": "no"},
            CheckpointingException,
            "fan_in_fan_out='no'",
        ),
        "IA3": (plain, {"peft_type": "IA3"}, CheckpointingException, "IA3"),
    }
    for name, (tensors, config, error, message) in cases.items():
        write_adapter(tmp_path / name, tensors, **config)
        with pytest.raises(error, match=message):
            distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match=r"adapter_config\.json"):
        distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "base")
    (tmp_path / "IA3" / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointingException, match=r"IA3/adapter_config\.json"):
        distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "IA3")
    assert not (tmp_path / "out").exists()


ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")


def layered(prefix="model.layers", modules=ATTENTION, layers=range(4)):
    return [f"{prefix}.{layer}.{module}" for layer in layers for module in modules]


LAYERS = layered(modules=(*ATTENTION, "mlp.down_proj"))
EXPERTS = layered(modules=(*ATTENTION, *(f"mlp.experts.{number}.down_proj" for number in range(2))))
TOWER = layered("visual.blocks", layers=range(2))
HELD = [name for name in LAYERS if "down" not in name]
EVERY_Q = layered(modules=ATTENTION[:1])
QV, QVD = ["q_proj", "v_proj"], ["q_proj", "v_proj", "down_proj"]
INCOMPLETE, OTHERS = r"has no matrices for .*{}", r"matrices for .*{}.* PEFT would leave them out"
CONFIGURED = {
    # name: the model, what the adapter has, its configuration, and what the message says (None: it
    # is merged)
    "complete": (LAYERS, HELD, {"target_modules": QV}, None),
    "a layer is missing": (
        LAYERS,
        HELD[:6],
        {"target_modules": QV},
        INCOMPLETE.format(r"layers\.3\.self_attn"),
    ),
    "a module of one layer": (
        LAYERS,
        HELD[:-1],
        {"target_modules": QV},
        INCOMPLETE.format(r"'model\.layers\.3.*v_p"),
    ),
    "a listed name": (
        LAYERS,
        EVERY_Q,
        {"target_modules": QV},
        INCOMPLETE.format(r"\{0\.\.3\}\.self_attn\.v_proj"),
    ),
    "a name of a pattern": (
        LAYERS,
        EVERY_Q,
        {"target_modules": r".*\.[qv]_proj"},
        INCOMPLETE.format("v_proj"),
    ),
    "all linear": (
        LAYERS,
        HELD[:6],
        {"target_modules": "all-linear"},
        INCOMPLETE.format(r"layers\.3\.self_attn"),
    ),
    "no targets": (LAYERS, HELD[:6], {}, INCOMPLETE.format(r"layers\.3\.self_attn.*every layer")),
    "all that is linear may be less": (LAYERS, EVERY_Q, {"target_modules": "all-linear"}, None),
    "names that no module has": (LAYERS, HELD, {"target_modules": [*QV, "w1"]}, None),
    "full names": (LAYERS, HELD[:6], {"target_modules": HELD[:6]}, None),
    "a full name": (
        LAYERS,
        HELD[:6],
        {"target_modules": HELD[:7]},
        INCOMPLETE.format(r"layers\.3\.self_attn\.q"),
    ),
    "some layers": (
        LAYERS,
        HELD[:6],
        {"target_modules": QV, "layers_to_transform": [0, 1, 2]},
        None,
    ),
    "one layer": (
        LAYERS,
        HELD[6:],
        {"target_modules": QV, "layers_to_transform": 3, "layers_pattern": "layers"},
        None,
    ),
    "fewer than the layers": (
        LAYERS,
        HELD[:4],
        {"target_modules": QV, "layers_to_transform": [0, 1, 2]},
        INCOMPLETE.format("layers.2"),
    ),
    "other layers": (
        LAYERS,
        HELD,
        {"target_modules": QV, "layers_to_transform": [0, 1, 2]},
        OTHERS.format("layers.3"),
    ),
    "layers of another name": (
        LAYERS,
        HELD,
        {"target_modules": QV, "layers_to_transform": [0, 1, 2, 3], "layers_pattern": ["h"]},
        OTHERS.format(r"'layers_pattern'|layers_pattern=\['h'\]"),
    ),
    "excluded": (
        LAYERS,
        HELD[:6],
        {"target_modules": QV, "exclude_modules": r".*layers\.3\..*"},
        None,
    ),
    "excluded names": (
        LAYERS,
        EVERY_Q,
        {"target_modules": QV, "exclude_modules": ["self_attn.v_proj"]},
        None,
    ),
    "excluded and there": (
        LAYERS,
        HELD,
        {"target_modules": QV, "exclude_modules": ["v_proj"]},
        OTHERS.format("v_p"),
    ),
    "not listed": (
        LAYERS,
        HELD,
        {"target_modules": ["q_proj"]},
        OTHERS.format(r"\{0\.\.3\}\.self_attn\.v_proj"),
    ),
    "not in the pattern": (
        LAYERS,
        HELD,
        {"target_modules": r".*\.q_proj"},
        OTHERS.format("v_proj"),
    ),
    "nothing": (LAYERS, HELD, {"target_modules": []}, OTHERS.format(r"target_modules=\[\]")),
    "a tower": (LAYERS + TOWER, HELD, {"target_modules": QV}, None),
    "half of a tower": (
        LAYERS + TOWER,
        HELD + TOWER[:2],
        {"target_modules": QV},
        INCOMPLETE.format("visual"),
    ),
    "prediction of tokens": (
        [*LAYERS, "mtp.layers.0.self_attn.q_proj", "mtp.fc"],
        HELD,
        {"target_modules": QV},
        None,
    ),
    "prediction in a layer": (
        [*LAYERS, *layered(layers=[4]), "model.layers.4.eh_proj"],
        HELD,
        {"target_modules": QV},
        None,
    ),
    "experts in memory": (EXPERTS, HELD, {"target_modules": QVD}, None),
    "experts one by one": (EXPERTS, EXPERTS, {"target_modules": QVD}, None),
    "an expert is missing": (
        EXPERTS,
        EXPERTS[:-1],
        {"target_modules": QVD},
        INCOMPLETE.format(r"experts\.1\.down"),
    ),
    "text for a list": (
        LAYERS,
        HELD,
        {"target_modules": 3},
        "says target_modules=3: write a list of str",
    ),
    "no numbers": (
        LAYERS,
        HELD,
        {"layers_to_transform": ["3"]},
        r"layers_to_transform=\['3'\]: write a list of int",
    ),
    "no pattern": (
        LAYERS,
        HELD,
        {"target_modules": "(q"},
        r"pattern that is none .*target_modules='\(q'",
    ),
}


@pytest.mark.parametrize("case", CONFIGURED)
def test_the_matrices_are_those_of_the_configuration(tmp_path, case):
    modules, adapted, config, message = CONFIGURED[case]
    base = {f"{module}.weight": torch.randn(3, 5) for module in modules}
    write_plain(tmp_path / "base" / "model.safetensors", base)
    tensors = {
        name: tensor for module in adapted for name, tensor in matrices(module, (3, 5)).items()
    }
    write_adapter(tmp_path / "adapter", tensors, **config)
    options = {"merge_adapter": tmp_path / "adapter"}
    if message is None:
        distckpt.consolidate(tmp_path / "base", tmp_path / "out", **options)
        found = read_export(tmp_path / "out")
        assert {name for name in base if not torch.equal(found[name], base[name])} == {
            f"{a}.weight" for a in adapted
        }
    else:
        with pytest.raises(CheckpointingException, match=message):
            distckpt.consolidate(tmp_path / "base", tmp_path / "out", **options)


def test_shared_keys_and_values_have_no_matrices(tmp_path):
    """Published files hold them, and no model that is trained."""
    write_plain(
        tmp_path / "base" / "model.safetensors",
        {f"{module}.weight": torch.randn(3, 5) for module in LAYERS},
    )
    adapted = [
        module for module in HELD if module not in ("model.layers.2.self_attn.v_proj", HELD[-1])
    ]
    tensors = {
        name: tensor for module in adapted for name, tensor in matrices(module, (3, 5)).items()
    }
    write_adapter(tmp_path / "adapter", tensors, target_modules=QV)
    for shared in (2, 1):
        config = {
            "model_type": "gemma3n",
            "text_config": {"num_hidden_layers": 4, "num_kv_shared_layers": shared},
        }
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        options = {"merge_adapter": tmp_path / "adapter"}
        if shared == 2:
            distckpt.consolidate(tmp_path / "base", tmp_path / "out", **options)
            continue
        with pytest.raises(
            LoadMismatchError, match=r"no matrices for 'model\.layers\.2\.self_attn\.v_proj', which"
        ):
            distckpt.consolidate(tmp_path / "base", tmp_path / "out2", **options)


def test_modules_that_were_to_be_saved_and_are_not_there(tmp_path):
    base = {name: torch.randn(6, 8) for name in ("up.weight", "lm_head.weight", "score.weight")}
    write_plain(tmp_path / "base" / "model.safetensors", base)
    tensors = matrices("up", (6, 8)) | {"score.weight": torch.randn(6, 8)}
    write_adapter(tmp_path / "adapter", tensors, modules_to_save=["classifier", "score"])
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "score"])
    with pytest.raises(
        CheckpointingException, match=r"no tensors for modules_to_save=\['lm_head'\]"
    ):
        distckpt.consolidate(
            tmp_path / "base", tmp_path / "out2", merge_adapter=tmp_path / "adapter"
        )


def test_directories_that_are_no_adapters(tmp_path):
    write_plain(tmp_path / "base" / "model.safetensors", {"up.weight": torch.zeros(6, 8)})
    folder = tmp_path / "adapter"
    folder.mkdir()

    def refusal(location=folder):
        with pytest.raises(CheckpointNotFoundError) as caught:
            distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=location)
        return str(caught.value)

    assert (
        "no adapter_model.safetensors and no adapter_config.json: give the directory that save_pre"
        in refusal()
    )
    write_adapter(folder / "reviewer", matrices("up", (6, 8)))
    assert "give one of the adapters in it, 'reviewer'" in refusal()
    assert "give the directory" in refusal(folder / "reviewer" / "adapter_model.safetensors")
    (folder / "reviewer" / "adapter_model.safetensors").rename(
        folder / "reviewer" / "adapter_model.bin"
    )
    assert "no adapter_model.safetensors: adapter_model.bin is a pickle" in refusal(
        folder / "reviewer"
    )
    assert "does not exist" in refusal(folder / "other")


@pytest.mark.filterwarnings("ignore")
def test_the_rule_is_that_of_peft():
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    from distckpt._compute.adapter_targets import is_target

    choose = random.Random(0)
    modules = [
        *EXPERTS,
        *TOWER,
        "lm_head",
        "layers.0.q_proj",
        "h.1.layers.2.c.q_proj",
        "model.layers.1.q_proj",
    ]
    names = [*QVD, "self_attn.q_proj", "model.layers.1.q_proj", "lm_head", r"layers", "proj"]
    patterns = [r".*\.[qv]_proj", r"model\.layers\.[12]\..*", "lm_head", r".*visual.*"]

    def some(items):
        return choose.sample(items, choose.randrange(1, 4))

    num_targets = 0
    for _ in range(3000):
        config = {
            "target_modules": choose.choice([choose.choice(patterns), some(names)]),
            "exclude_modules": choose.choice([None, None, choose.choice(patterns), some(names)]),
            "modules_to_save": choose.choice(
                [None, None, some(["lm_head", "self_attn", "visual", "layers.1"])]
            ),
        }
        if isinstance(config["target_modules"], list):
            config["layers_to_transform"] = choose.choice([None, [], 1, [0, 2]])
            if config["layers_to_transform"] is not None:
                config["layers_pattern"] = choose.choice([None, "", [], "layers", ["h", "blocks"]])
        reference, module = peft.LoraConfig(**config), choose.choice(modules)
        expected = check_target_module_exists(reference, module)
        assert is_target(module, config) == bool(expected), (module, config)
        num_targets += bool(expected)
    assert 500 < num_targets < 2500


KINDS = {
    "some modules": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"q_proj": 3, "1.mlp.up_proj": 5},
    },
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "GPT-2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_peft_merges_and_unloads(tmp_path, kind, dtype):
    if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("peft and transformers are not installed")
    import transformers
    from peft import LoraConfig, get_peft_model

    if kind == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4
        )
    else:
        sizes = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        }
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    base = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, **KINDS[kind]))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    distckpt.consolidate(tmp_path / "base", tmp_path / "out", merge_adapter=tmp_path / "adapter")
    found, expected = read_export(tmp_path / "out"), read_export(tmp_path / "merged")
    assert found.keys() == expected.keys()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for key, tensor in expected.items():
        np.testing.assert_allclose(
            found[key].float(), tensor.float(), rtol=tolerance, atol=tolerance, err_msg=key
        )
