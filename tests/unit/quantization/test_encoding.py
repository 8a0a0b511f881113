"""Exports to quantised formats: codes, scales and config.json, checked against definitions written
out here.
"""

from __future__ import annotations

import json

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, ShardedTensor
from distckpt.rules import Rename
from tests.support.cli_command import call, call_usage_error
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.quantized_models import MODELS, repeated
from tests.support.reference import forms, needs_dtypes

# Format -> shapes of the weights it takes, the endings of its names, the size of a block.
CASES = {
    "fp8-block": ((300, 200), ("weight", "weight_scale_inv"), (128, 128)),
    "fp8-block-ue8m0": ((300, 200), ("weight", "weight_scale_inv"), (128, 128)),
    "fp8-tensor": ((60, 90), ("weight", "weight_scale"), (60, 90)),
    "fp8-channel": ((60, 90), ("weight", "weight_scale"), (1, 90)),
    "int8-channel": ((60, 90), ("weight", "weight_scale"), (1, 90)),
    "mxfp4-packed": ((40, 96), ("weight", "scale"), (1, 32)),
    "int4": ((40, 96), ("weight_packed", "weight_scale", "weight_shape"), (1, 32)),
    "nvfp4": ((40, 96), ("weight_packed", "weight_scale", "weight_global_scale"), (1, 16)),
}


def source(tmp_path, shape, dtype=torch.float32):
    torch.manual_seed(1)
    tensors = {
        "l.up.weight": torch.randn(shape).to(dtype),
        "l.norm.weight": torch.ones(7, dtype=dtype),
        "model.embed_tokens.weight": torch.randn(32, 64).to(dtype),
        "l.mlp.gate.weight": torch.randn(8, 64).to(dtype),
    }
    tensors["l.up.weight"][0, :64] = 0
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()},
        tmp_path / "checkpoint",
    )
    return tensors


def values_of(folder, tensors, dtype=torch.float32):
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(t.shape, dtype=dtype))
        for key, t in tensors.items()
    }
    return distckpt.load(state, folder)


def largest_of_blocks(values, block):
    bands = [band.split(block[1], 1) for band in values.split(block[0])]
    return torch.stack([torch.stack([piece.abs().max() for piece in band]) for band in bands])


@pytest.mark.parametrize("name", forms(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantised_is_near_what_was_saved(tmp_path, name, dtype):
    shape, endings, block = CASES[name]
    tensors = source(tmp_path, shape, dtype)
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", quantize=name)
    found = read_export(tmp_path / "export")
    kept = {key: tensor for key, tensor in tensors.items() if key != "l.up.weight"}
    assert found.keys() == kept.keys() | {f"l.up.{ending}" for ending in endings}
    assert same_bytes({key: found[key] for key in kept}, kept)
    values = values_of(tmp_path / "export", {"l.up.weight": tensors["l.up.weight"]})["l.up.weight"]
    exact = tensors["l.up.weight"].float()
    largest = repeated(largest_of_blocks(exact, block), block, shape)
    # Half a step of the number format: of the largest magnitude in the block for integers, else of
    # the value itself.
    steps = {
        "int8-channel": 1 / 254,
        "int4": 1 / 14 + 0.01,
        "mxfp4-packed": 1 / 4,
        "nvfp4": 1 / 6 + 0.08,
    }
    allowed = largest * steps[name] if name in steps else exact.abs() / 16 + largest / 2**14
    assert ((values - exact).abs() <= allowed * 1.00001 + 1e-12).all()
    assert (values[0, :64] == 0).all()
    assert values.isfinite().all()


@pytest.mark.parametrize("name", forms(CASES))
def test_a_model_of_any_size_is_cut_into_pieces_without_a_trace(tmp_path, name, monkeypatch):
    """Pieces of one cell give the same bytes as one piece."""
    shape, _, _ = CASES[name]
    source(tmp_path, shape)
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "whole", quantize=name)
    monkeypatch.setattr("distckpt._compute.encoded_source._ENCODED_AT_ONCE", 200)
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "pieces", quantize=name)
    assert same_bytes(read_export(tmp_path / "whole"), read_export(tmp_path / "pieces"))


@pytest.mark.parametrize("name", forms(["fp8-block-ue8m0", "mxfp4-packed", "int4", "mxfp4"]))
def test_values_are_quantised_to_the_same_bytes_again(tmp_path, name):
    """Where scales follow from the largest values without rounding."""
    if name == "mxfp4":
        torch.manual_seed(0)
        key, stack = "m.experts.gate_up_proj", torch.randn(3, 64, 96)
        distckpt.save({key: ShardedTensor.from_rank_offsets(key, stack)}, tmp_path / "checkpoint")
        values = {key: stack}
    else:
        values = source(tmp_path, CASES[name][0])
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "first", quantize=name)
    (tmp_path / "names.json").write_text("{}")
    state = values_of(tmp_path / "first", values)
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in state.items()}, tmp_path / "values"
    )
    distckpt.consolidate(tmp_path / "values", tmp_path / "second", quantize=name)
    assert same_bytes(read_export(tmp_path / "second"), read_export(tmp_path / "first"))
    # And straight from the quantised directory.
    distckpt.consolidate(tmp_path / "first", tmp_path / "third", dtype=torch.float32, quantize=name)
    assert same_bytes(read_export(tmp_path / "third"), read_export(tmp_path / "first"))


def test_experts_of_gpt_oss(tmp_path):
    """Stored with the axes of transformers in memory, written with those of the model on the
    hub.
    """
    torch.manual_seed(0)
    key = "model.layers.0.mlp.experts.down_proj"
    stack = torch.randn(3, 64, 64)
    distckpt.save(
        {
            k: ShardedTensor.from_rank_offsets(k, t)
            for k, t in {key: stack, f"{key}_bias": stack[0]}.items()
        },
        tmp_path / "checkpoint",
    )
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", quantize="mxfp4")
    found = read_export(tmp_path / "export")
    assert {k: tuple(t.shape) for k, t in found.items()} == {
        f"{key}_blocks": (3, 64, 2, 16),
        f"{key}_scales": (3, 64, 2),
        f"{key}_bias": (64, 64),
    }
    assert (
        json.loads((tmp_path / "export/config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        == "mxfp4"
    )
    values = values_of(tmp_path / "export", {key: stack})[key]
    assert (values - stack).norm() < 0.15 * stack.norm()
    assert (values.transpose(1, 2) - stack).norm() > stack.norm()


def test_scales_of_blocks_are_the_largest_values_over_448(tmp_path):
    tensors = source(tmp_path, (300, 200))
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", quantize="fp8-block")
    found = read_export(tmp_path / "export")
    expected = largest_of_blocks(tensors["l.up.weight"], (128, 128)) / 448
    assert torch.equal(found["l.up.weight_scale_inv"], expected)
    scaled = tensors["l.up.weight"] / repeated(expected, (128, 128), (300, 200))
    assert torch.equal(found["l.up.weight"].float(), scaled.to(torch.float8_e4m3fn).float())


@needs_dtypes("float8_e8m0fnu")
def test_powers_of_two_are_rounded_up(tmp_path):
    tensors = source(tmp_path, (300, 200))
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", quantize="fp8-block-ue8m0")
    found = read_export(tmp_path / "export")
    scales = largest_of_blocks(tensors["l.up.weight"], (128, 128)) / 448
    assert torch.equal(found["l.up.weight_scale_inv"].float(), torch.exp2(scales.log2().ceil()))


@pytest.mark.parametrize("name", forms(CASES))
def test_the_config_names_what_was_kept(tmp_path, name):
    source(tmp_path, CASES[name][0])
    (tmp_path / "model").mkdir()
    before = {
        "model_type": "llama",
        "torch_dtype": "float32",
        "quantization_config": {"quant_method": "gptq"},
    }
    (tmp_path / "model/config.json").write_text(json.dumps(before))
    (tmp_path / "model/hf_quant_config.json").write_text("{}")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    distckpt.consolidate(
        tmp_path / "checkpoint",
        tmp_path / "export",
        quantize=name,
        extra_files_from=tmp_path / "model",
        dtype=torch.bfloat16,
    )
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")
    quantization = config["quantization_config"]
    kept = quantization.get("ignore", quantization.get("modules_to_not_convert"))
    assert kept == ["l.mlp.gate", "model.embed_tokens"]
    assert quantization["quant_method"] == (
        "fp8" if name.startswith(("fp8-block", "mxfp4")) else "compressed-tensors"
    )
    assert quantization.get("scale_fmt") == (
        "ue8m0" if name in ("fp8-block-ue8m0", "mxfp4-packed") else None
    )


def test_the_config_of_values_says_nothing_of_codes(tmp_path):
    model = MODELS["fp8_block"]()
    vision = {"vision_config": {"dtype": "bfloat16", "depth": 2}}
    model._replace(config={**model.config, "llm_config": {**model.config, **vision}}).write(
        tmp_path / "model"
    )
    options = {"extra_files_from": tmp_path / "model", "overwrite": True}
    for dtype in (torch.float32, {"*": torch.float32}):
        distckpt.consolidate(tmp_path / "model", tmp_path / "export", dtype=dtype, **options)
        config = json.loads((tmp_path / "export/config.json").read_text())
        inside = {"torch_dtype": "float32", "vision_config": {"dtype": "float32", "depth": 2}}
        assert config == {"torch_dtype": "float32", "llm_config": inside}
    distckpt.consolidate(tmp_path / "model", tmp_path / "copy", extra_files_from=tmp_path / "model")
    assert (tmp_path / "copy/config.json").read_bytes() == (
        tmp_path / "model/config.json"
    ).read_bytes()


def test_a_model_says_which_weights_are_quantised(tmp_path):
    tensors = source(tmp_path, (300, 200))
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "like", quantize={"*.gate.weight": "fp8-block"}
    )
    assert "l.mlp.gate.weight_scale_inv" in read_export(tmp_path / "like")
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "export", quantize="fp8-block", like=tmp_path / "like"
    )
    assert same_bytes(read_export(tmp_path / "export"), read_export(tmp_path / "like"))
    assert tensors


@needs_dtypes("float8_e8m0fnu")
@pytest.mark.parametrize("name", ["fp8-block", "int4", "mxfp4-packed"])
def test_shapes_are_compared_as_those_of_values(tmp_path, name):
    """Codes may have the name of the values and another shape."""
    source(tmp_path, (40, 96))
    checkpoint, options = tmp_path / "checkpoint", {"l.up.weight": name}
    distckpt.consolidate(checkpoint, tmp_path / "values")
    distckpt.consolidate(checkpoint, tmp_path / "codes", quantize=options)
    distckpt.consolidate(checkpoint, tmp_path / "again", quantize=options, like=tmp_path / "values")
    distckpt.consolidate(tmp_path / "codes", tmp_path / "copy", like=tmp_path / "codes")
    distckpt.consolidate(
        checkpoint, tmp_path / "plain", like=tmp_path / "codes", dtype=torch.float32
    )
    for result, expected in (("again", "codes"), ("copy", "codes"), ("plain", "values")):
        assert same_bytes(read_export(tmp_path / result), read_export(tmp_path / expected))
    write_plain(tmp_path / "other/model.safetensors", {"l.up.weight": torch.zeros(40, 48)})
    for like in ("values", "codes"):
        refuse(
            "'l.up.weight' would be exported with shape",
            tmp_path / "other",
            tmp_path / "out",
            like=tmp_path / like,
        )


@needs_dtypes("float8_e8m0fnu")
def test_patterns_choose_formats_under_new_names(tmp_path):
    source(tmp_path, (40, 96))
    distckpt.consolidate(
        tmp_path / "checkpoint",
        tmp_path / "export",
        rules=[Rename("l.up.weight", "e.0.weight")],
        unmatched="keep",
        quantize={"e.*": "mxfp4-packed", "*.gate.weight": "fp8-block-ue8m0"},
    )
    found = read_export(tmp_path / "export")
    assert {"e.0.scale", "l.mlp.gate.weight_scale_inv"} < found.keys()
    config = json.loads((tmp_path / "export/config.json").read_text())["quantization_config"]
    assert (config["expert_dtype"], config["weight_block_size"]) == ("fp4", [128, 128])


def test_the_command_line(tmp_path, capsys):
    source(tmp_path, (40, 96))
    call(capsys, "consolidate", tmp_path / "checkpoint", tmp_path / "export", "--quantize", "int4")
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "same", quantize="int4")
    assert same_bytes(read_export(tmp_path / "export"), read_export(tmp_path / "same"))
    patterns = ["--quantize", "*.gate.weight=fp8-block", "--quantize", "l.up.*=fp8-block"]
    call(capsys, "consolidate", tmp_path / "checkpoint", tmp_path / "both", *patterns)
    assert {"l.mlp.gate.weight_scale_inv", "l.up.weight_scale_inv"} < read_export(
        tmp_path / "both"
    ).keys()
    assert "'fp9' is no format" in call_usage_error(
        capsys, "consolidate", "a", "b", "--quantize", "fp9"
    )


def test_quantised_to_another_format(tmp_path):
    model = MODELS["fp8_block"]()
    model.write(tmp_path / "model")
    distckpt.consolidate(tmp_path / "model", tmp_path / "export", quantize="int8-channel")
    values = values_of(tmp_path / "export", model.values)
    exact = model.values["l.up.weight"]
    assert (values["l.up.weight"] - exact).abs().max() <= exact.abs().max() / 200
    assert not any(key.endswith("scale_inv") for key in read_export(tmp_path / "export"))


def refuse(match, *arguments, **options):
    with pytest.raises(CheckpointingException, match=match):
        distckpt.consolidate(*arguments, **options)


@pytest.mark.skipif(
    hasattr(torch, "float8_e8m0fnu"), reason="torch has every dtype of these formats"
)
@pytest.mark.parametrize("name", ["fp8-block-ue8m0", "mxfp4-packed"])
def test_formats_that_torch_cannot_hold(tmp_path, name):
    source(tmp_path, CASES[name][0])
    with pytest.raises(ValueError, match=r"needs the dtype F8_E8M0, which torch .* lacks"):
        distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", quantize=name)


def test_refusals(tmp_path):
    source(tmp_path, (300, 200))
    paths = tmp_path / "checkpoint", tmp_path / "export"
    with pytest.raises(ValueError, match=r"quantize.*fp9"):
        distckpt.consolidate(*paths, quantize="fp9")
    refuse("No tensor can be quantized to .*mxfp4", *paths, quantize="mxfp4")
    refuse("No tensor can be quantized to .*int4", *paths, quantize={"l.up.weight": "int4"})
    refuse(
        "No config.json can describe",
        *paths,
        quantize={"l.up.*": "fp8-block", "*.gate.weight": "int4"},
    )
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", forms(CASES))
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_values_that_no_scale_fits_are_named(tmp_path, name, bad):
    tensor = torch.randn(CASES[name][0])
    tensor[3, 5] = bad
    write_plain(tmp_path / "model/model.safetensors", {"l.up.weight": tensor})
    refuse(
        r"'l\.up\..*infinite or not a number",
        tmp_path / "model",
        tmp_path / "export",
        quantize=name,
    )
    assert not (tmp_path / "export").exists()
