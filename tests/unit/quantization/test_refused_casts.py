"""Codes of quantised tensors are never converted without their scales: real directories, through
every verb.
"""

from __future__ import annotations

import json

import pytest
import torch

import distckpt
from distckpt import LoadMismatchError, ShardedTensor
from tests.support.hf_folders import same_bytes, write_plain
from tests.support.quantized_models import int4
from tests.support.reference import needs_dtypes

E4M3 = torch.float8_e4m3fn
CODES = torch.randn(4, 8).to(E4M3)
BYTES = torch.randint(-128, 128, (4, 8), dtype=torch.int8)
WORDS = torch.zeros(1, 8, dtype=torch.int32)
SCALES = torch.rand(1, 1)
ROWS = torch.rand(4, 1)


def quark(dtype, **more):
    """Return what AMD Quark writes beside what it has packed."""
    weight = {"dtype": dtype, "qscheme": "per_channel", "symmetric": True}
    export = {"pack_method": "reorder", "weight_format": "real_quantized"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": export}
    config |= more
    return {"config.json": {"quantization_config": config}}


# Tensors, config beside them, the key of codes, and what the error must name.
DIRECTORIES = {
    "modelopt": (
        {"l.weight": CODES, "norm": torch.rand(8)},
        {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
        "l.weight",
        "hf_quant_config.json",
    ),
    "bitsandbytes": ({"l.weight": BYTES, "l.SCB": torch.rand(4)}, {}, "l.weight", "'l.SCB'"),
    "gptq": (
        {"l.qweight": WORDS, "l.scales": torch.rand(1, 8).half()},
        {"config.json": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        "l.qweight",
        "'l.scales'",
    ),
    "hqq": (
        {"l.W_q": torch.zeros(4, 8, dtype=torch.uint8), "norm": torch.rand(8)},
        {
            "config.json": {
                "text_config": {"quantization_config": {"quant_method": "hqq"}},
                "limit": float("inf"),
            }
        },
        "l.W_q",
        "config.json",
    ),
    "hqq without a config": (
        {"l.W_q": BYTES.view(torch.uint8), "l.zero": torch.rand(4)},
        {},
        "l.W_q",
        "'l.W_q'",
    ),
    "awq without a config": (
        {"l.qweight": WORDS, "l.scales": torch.rand(1, 8).half()},
        {},
        "l.qweight",
        "'l.scales'",
    ),
    "awq without scales": (
        {"l.qweight": WORDS, "norm": torch.rand(8)},
        {},
        "l.qweight",
        "'l.qweight'",
    ),
    "mistral": (
        {"l.weight": CODES, "l.qscale_weight": torch.rand(1)},
        {},
        "l.weight",
        "'l.qscale_weight'",
    ),
    "quanto": (
        {"l.weight._data": BYTES, "l.weight._scale": torch.rand(4, 1)},
        {},
        "l.weight._data",
        "._scale'",
    ),
    "torchao": (
        {"l._weight_qdata": BYTES, "l._weight_scale": torch.rand(4, 1)},
        {},
        "l._weight_qdata",
        "'l._weight_scale'",
    ),
    "without its scale": (
        {"l.weight": CODES, "k.weight": CODES.clone(), "k.weight_scale": SCALES},
        {},
        "l.weight",
        "'k.weight_scale'",
    ),
    "of a tower": (
        {"l.weight": CODES},
        {"config.json": {"llm_config": {"quantization_config": {"quant_method": "fp8"}}}},
        "l.weight",
        "config.json",
    ),
    "rotated": (
        {"l.weight": CODES, "l.weight_scale": SCALES},
        {
            "config.json": {
                "quantization_config": {
                    "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}
                }
            }
        },
        "l.weight",
        "transform_config",
    ),
    "quark, reordered": (
        {"l.weight": torch.arange(32, dtype=torch.int32).reshape(4, 8), "l.weight_scale": ROWS},
        quark("int4"),
        "l.weight",
        "'l.weight_scale'",
    ),
    "quark without a config": (
        {"l.weight": torch.arange(32, dtype=torch.int32).reshape(4, 8), "l.weight_scale": ROWS},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "bytes beside float scales": (
        {"l.weight": BYTES.view(torch.uint8), "l.weight_scale": ROWS},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "bytes beside bytes": (
        {
            "l.weight": torch.zeros(4, 16, dtype=torch.uint8),
            "l.weight_scale": torch.zeros(4, 1, dtype=torch.uint8),
        },
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "ComfyUI": (
        {"l.weight": CODES, "l.scale_weight": torch.rand(()), "scaled_fp8": CODES[:0, 0].clone()},
        {},
        "l.weight",
        "'l.scale_weight'",
    ),
    "ComfyUI without scales": (
        {"l.weight": CODES, "scaled_fp8": CODES[:0, 0].clone()},
        {},
        "l.weight",
        "'scaled_fp8'",
    ),
    "scales of the module": ({"l.weight": CODES, "l.scale_inv": SCALES}, {}, "l.weight", "beside"),
    "scales in a quantizer": (
        {"l.weight": CODES, "l.weight_quantizer._scale": SCALES},
        {},
        "l.weight",
        "'l.weight_quantizer._scale'",
    ),
    "ranges in place of scales": (
        {"l.weight": CODES, "l.weight_quantizer._amax": SCALES},
        {},
        "l.weight",
        "_amax'",
    ),
    "scales in a part of their own": (
        {"l.weight": CODES, "scales.l.weight": SCALES},
        {},
        "l.weight",
        "'scales.l.weight'",
    ),
    "scales of experts": ({"e.w1": CODES, "e.w1_weight_scale": SCALES}, {}, "e.w1", "w1_weight"),
    "smoothed": (
        {"l.weight": BYTES, "l.weight_scale": ROWS, "l.smooth_factor": torch.rand(8)},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "outliers apart": (
        {"l.weight": CODES, "l.weight_scale": SCALES, "l.weight_outlier": torch.rand(8)},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "integers with scales of scales": (
        {"l.weight": BYTES, "l.weight_scale": ROWS, "l.weight_scale_2": torch.rand(())},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "groups of rows of integers": (
        {"l.weight": BYTES.repeat(16, 8), "l.weight_scale": torch.rand(2, 64)},
        {},
        "l.weight",
        "'l.weight_scale'",
    ),
    "a method that is not known": (
        {"l.weight": BYTES, "l.weight_scale": ROWS},
        {"config.json": {"quantization_config": {"quant_method": "quip"}}},
        "l.weight",
        "config.json says quant_method: quip",
    ),
    "rotated by quark": (
        {"l.weight": CODES, "l.weight_scale": SCALES},
        quark("fp8_e4m3", algo_config=[{"name": "rotation", "online_r1_rotation": True}]),
        "l.weight",
        "config.json says algo_config: rotation",
    ),
    "nunchaku": (
        {"l.qweight": BYTES, "l.wscales": torch.rand(1, 4), "l.smooth_factor": torch.rand(8)},
        {},
        "l.qweight",
        "'l.wscales'",
    ),
    "compressed to 2 of 4": (
        {"l.compressed": CODES, "l.bitmask": torch.ones(4, 1).byte(), "l.weight_scale": ROWS},
        {},
        "l.compressed",
        "'l.weight_scale'",
    ),
    "absmax": (
        {"l.weight": BYTES.view(torch.uint8), "l.weight.absmax": torch.rand(1)},
        {},
        "l.weight",
        "absmax",
    ),
}


@pytest.fixture(params=DIRECTORIES)
def directory(request, tmp_path):
    tensors, files, key, named = DIRECTORIES[request.param]
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
    return tmp_path / "model", tensors, key, named


def request(key, tensor, dtype):
    return {"it": ShardedTensor.from_rank_offsets(key, torch.full(tensor.shape, 7, dtype=dtype))}


def refused(function, *names):
    with pytest.raises(LoadMismatchError) as caught:
        function()
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_load_refuses(directory, dtype, allow):
    path, tensors, key, named = directory
    state = request(key, tensors[key], dtype)
    refused(
        lambda: distckpt.load(state, path, allow_dtype_cast=allow),
        repr(key),
        str(tensors[key].dtype),
        str(dtype),
        named,
    )
    assert (state["it"].data == 7).all()


def test_load_through_rules_refuses(directory):
    path, tensors, key, named = directory
    state = request("mine", tensors[key], torch.float32)
    refused(
        lambda: distckpt.load(state, path, rules=[distckpt.rules.Rename("mine", key)]),
        repr(key),
        named,
    )


def test_loads_into_the_interface_of_torch_refuse(directory):
    path, tensors, key, named = directory
    state = {key: torch.zeros(tensors[key].shape)}
    refused(lambda: distckpt.dcp.load(state, checkpoint_id=path), repr(key), named)


def test_exports_and_imports_refuse(directory, tmp_path):
    path, _, key, named = directory
    for verb in (distckpt.consolidate, distckpt.reshard):
        refused(
            lambda verb=verb: verb(path, tmp_path / "out", dtype={key: torch.float32}),
            repr(key),
            named,
        )
        assert not (tmp_path / "out").exists()


def test_what_is_stored_can_be_had_as_it_is(directory, tmp_path):
    path, tensors, _, _ = directory
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty_like(tensor))
        for key, tensor in tensors.items()
    }
    assert same_bytes(distckpt.load(state, path), tensors)
    distckpt.reshard(path, tmp_path / "imported")
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "imported"), tensors)
    distckpt.consolidate(tmp_path / "imported", tmp_path / "exported")
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "exported"), tensors)


def test_scales_beside_codes_are_not_converted_alone(tmp_path):
    write_plain(
        tmp_path / "model" / "model.safetensors", {"l.weight": BYTES, "l.SCB": torch.rand(4)}
    )
    refused(
        lambda: distckpt.consolidate(tmp_path / "model", tmp_path / "out", dtype=torch.bfloat16),
        "'l.SCB'",
    )


def test_a_checkpoint_of_distckpt_with_scales_refuses_too(tmp_path):
    tensors = {"l.weight": BYTES, "l.SCB": torch.rand(4)}
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()},
        tmp_path / "checkpoint",
    )
    refused(
        lambda: distckpt.load(request("l.weight", BYTES, torch.bfloat16), tmp_path / "checkpoint"),
        "'l.weight'",
        "SCB",
    )


@needs_dtypes("float8_e4m3fn")
def test_floats_that_are_no_codes_are_converted_as_ever(tmp_path):
    """Without scales and configuration an 8-bit float is what it says, whatever CLIP has beside."""
    tensors = {"projection": CODES, "l.weight": CODES.clone(), "logit_scale": torch.tensor(2.0)}
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    for key in ("projection", "l.weight"):
        loaded = distckpt.load(request(key, CODES, torch.float32), tmp_path / "model")["it"]
        assert torch.equal(loaded, CODES.float())


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_integers_in_the_place_of_weights_are_refused(tmp_path, dtype, allow):
    """Nothing else is stored: these are codes that were parted from their scales."""
    write_plain(tmp_path / "model" / "model.safetensors", {"l.weight": BYTES.to(dtype)})
    for wanted in (torch.bfloat16, torch.float32):
        state = request("l.weight", BYTES, wanted)
        refused(
            lambda state=state: distckpt.load(state, tmp_path / "model", allow_dtype_cast=allow),
            "'l.weight'",
            str(dtype),
            str(wanted),
        )
        assert (state["it"].data == 7).all()
    loaded = distckpt.load(request("l.weight", BYTES, dtype), tmp_path / "model")["it"]
    assert torch.equal(loaded, BYTES.to(dtype))


def test_matrices_of_integers_under_other_names_are_refused_too(tmp_path):
    tensors = {"experts.up": BYTES.to(torch.int32), "lengths": torch.arange(4, dtype=torch.int32)}
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    state = request("experts.up", BYTES, torch.float32)
    refused(lambda: distckpt.load(state, tmp_path / "model", allow_dtype_cast=True), "experts.up")
    state = request("lengths", tensors["lengths"], torch.float64)
    assert distckpt.load(state, tmp_path / "model")["it"].tolist() == [0, 1, 2, 3]


def test_counters_and_masks_are_converted_as_ever(tmp_path):
    """To wider integers, and wide ones to floating point: no codes have 64 bits, or are bool."""
    tensors = {"count": torch.arange(8), "mask": torch.ones(4, 8, dtype=torch.bool)}
    tensors["table"] = BYTES.clone()
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    for key, dtype in (("count", torch.float64), ("mask", torch.float32), ("table", torch.int64)):
        state = request(key, tensors[key], dtype)
        loaded = distckpt.load(state, tmp_path / "model", allow_dtype_cast=True)["it"]
        assert torch.equal(loaded, tensors[key].to(dtype))


def test_integers_beside_quantised_tensors_are_integers(tmp_path):
    tensors = {"mask": BYTES.view(torch.uint8), "l.weight": CODES, "l.weight_scale": SCALES}
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    loaded = distckpt.load(request("mask", BYTES, torch.int64), tmp_path / "model")["it"]
    assert torch.equal(loaded, tensors["mask"].long())


def test_a_damaged_config_is_named(tmp_path):
    write_plain(tmp_path / "model" / "model.safetensors", {"count": BYTES})
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(distckpt.CorruptCheckpointError, match=r"config\.json"):
        distckpt.load(request("count", BYTES, torch.int8), tmp_path / "model")


@needs_dtypes("float8_e4m3fn")
@pytest.mark.parametrize("scales", ["l.weight_global_scale", "l.weight_scale"])
def test_no_kind_of_scales_beside_unknown_codes_is_converted(tmp_path, scales):
    tensors = {
        "l.weight_packed": BYTES,
        "l.weight_scale": torch.ones(4, 3).to(E4M3),
        scales: torch.rand(7),
    }
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    refused(
        lambda: distckpt.consolidate(tmp_path / "model", tmp_path / "out", dtype=torch.bfloat16),
        repr(scales),
    )


def test_codes_of_a_known_form_are_not_converted_by_their_own_key(tmp_path):
    int4().write(tmp_path / "model")
    state = request("e.0.up_proj.weight_packed", torch.empty(40, 12), torch.int64)
    refused(
        lambda: distckpt.load(state, tmp_path / "model"), "weight_packed'", "request its values"
    )
    state = request("e.0.up_proj.weight_shape", torch.empty(2), torch.int64)
    assert distckpt.load(state, tmp_path / "model")["it"].tolist() == [40, 96]


@pytest.mark.parametrize("change", [{"keys": "*.weight"}, {"rename": {"l.weight_": "scales."}}])
@pytest.mark.parametrize(
    "scales",
    [{"l.weight_scale": SCALES}, {"l.weight_scale": SCALES, "l.weight_scale_2": torch.rand(1)}],
)
def test_codes_are_not_written_without_their_scales(tmp_path, scales, change):
    tensors = {"l.weight": BYTES, **scales}
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    for verb in (distckpt.consolidate, distckpt.reshard):
        refused(
            lambda verb=verb: verb(tmp_path / "model", tmp_path / "out", **change),
            "'l.weight'",
            "'l.weight_scale'",
        )
        assert not (tmp_path / "out").exists()
    distckpt.consolidate(tmp_path / "model", tmp_path / "out", keys="l.", rename={"l.": "m."})
    expected = {f"m.{key[2:]}": tensor for key, tensor in tensors.items()}
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "out"), expected)


def packed(**weights):
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int", **weights}}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


PACKED = {
    "l.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
    "l.weight_scale": torch.rand(4, 2),
}
NOT_DECODED = {
    "zero points": (
        {**PACKED, "l.weight_zero_point": WORDS},
        packed(symmetric=False),
        [
            "'l.weight_packed' with 'l.weight_scale', 'l.weight_zero_point'",
            "config.json says symmetric: false and num",
        ],
    ),
    "other bits": (PACKED, packed(num_bits=3), ["'l.weight_packed'", "num_bits: 3"]),
    "AWQ": (
        {"l.qweight": WORDS, "l.scales": torch.rand(1, 8)},
        {},
        ["'l.qweight' with 'l.scales': codes of a form"],
    ),
}


@pytest.mark.parametrize("form", NOT_DECODED)
def test_values_of_codes_that_are_not_decoded_are_not_just_absent(tmp_path, form):
    tensors, config, named = NOT_DECODED[form]
    write_plain(tmp_path / "model" / "model.safetensors", {**tensors, "norm": torch.rand(8)})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    state = request("l.weight", torch.empty(4, 64), torch.bfloat16)
    refused(
        lambda: distckpt.load(state, tmp_path / "model"),
        "Not in the checkpoint",
        "'l.weight' is stored",
        *named,
    )


@needs_dtypes("float8_e4m3fn")
def test_a_module_for_which_there_are_codes(tmp_path):
    """What is not taken are the scales: the message says so."""
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(8, 4, bias=False)})
    before = model["l"].weight.detach().clone()
    tensors = {"l.weight": CODES, "l.scale_weight": torch.rand(())}
    write_plain(tmp_path / "model" / "model.safetensors", tensors)
    state = {"model": model}
    refused(lambda: distckpt.load(state, tmp_path / "model"), "a quantized one", "'l.scale_weight'")
    refused(lambda: distckpt.load(state, tmp_path / "model", strict="report"), "named like a scale")
    assert torch.equal(model["l"].weight, before)
