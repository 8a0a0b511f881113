"""The programs that define the formats read the same values: transformers, and compressed-tensors
where installed.
"""

from __future__ import annotations

import json
import types

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.quantized_models import (
    WRITTEN_FORMATS,
    Model,
    fp8_block,
    fp8_ue8m0,
    int4,
    mxfp4,
    mxfp4_packed,
    nvfp4_packed,
)
from tests.support.reference import needs_dtypes

pytestmark = [pytest.mark.slow, needs_dtypes("float8_e8m0fnu")]


def load(model: Model, folder, dtype=torch.bfloat16):
    model.write(folder)
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(values.shape, dtype=dtype))
        for key, values in model.values.items()
    }
    return distckpt.load(state, folder)


def fp8_of_transformers(model, dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    expected = {}
    for key in model.values:
        stem = key.removesuffix("weight")
        scales = next(
            (
                model.tensors[stem + n]
                for n in ("weight_scale_inv", "scale")
                if stem + n in model.tensors
            ),
            None,
        )
        codes = model.tensors[key]
        expected[key] = (
            codes
            if scales is None
            else fp8.Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
        )
    return expected


@pytest.mark.parametrize("make", [lambda: fp8_block(384, 256), mxfp4_packed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_and_packed_mxfp4_of_transformers(tmp_path, make, dtype):
    model = make()
    expected = {key: value.to(dtype) for key, value in fp8_of_transformers(model, dtype).items()}
    assert same_bytes(load(model, tmp_path / "model", dtype), expected)


def test_powers_of_two_of_transformers(tmp_path):
    """Whole blocks only: transformers takes the size of a block from the scales."""
    model = fp8_ue8m0()
    cut = {
        "l.weight": model.tensors["l.weight"][:128, :256],
        "l.weight_scale_inv": model.tensors["l.weight_scale_inv"][:1, :2],
    }
    whole = Model(
        {k: t.contiguous() for k, t in cut.items()},
        model.config,
        {"l.weight": model.values["l.weight"][:128, :256]},
    )
    assert same_bytes(load(whole, tmp_path / "model"), fp8_of_transformers(whole, torch.bfloat16))


def test_mxfp4_of_transformers(tmp_path):
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    model = mxfp4()
    key = "m.experts.down_proj"
    expected = convert(model.tensors[f"{key}_blocks"], model.tensors[f"{key}_scales"])
    assert torch.equal(load(model, tmp_path / "model")[key], expected)


def decompressed(name, tensors, **settings):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    local = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
    return BaseCompressor.get_value_from_registry(name).decompress(local, scheme)["weight"]


def test_int4_of_compressed_tensors(tmp_path):
    model = int4()
    expected = decompressed(
        "pack-quantized", model.tensors, num_bits=4, strategy="group", group_size=32
    )
    assert torch.equal(load(model, tmp_path / "model")["e.0.up_proj.weight"], expected)


@pytest.mark.parametrize("group_size", [4, 10, 20, None])
def test_padded_int4_of_compressed_tensors(tmp_path, group_size):
    """What its writer pads, 24 x 20 to 24 x 24."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    settings = {"num_bits": 4, "strategy": "group" if group_size else "channel"}
    settings |= {"group_size": group_size} if group_size else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    writer = BaseCompressor.get_value_from_registry("pack-quantized")
    weight = torch.randn(24, 20)
    scale = weight.view(24, -1, group_size or 20).abs().amax(-1) / 7
    tensors = dict(writer.compress({"weight": weight, "weight_scale": scale}, scheme))
    assert tensors["weight_packed"].shape == (24, 3)
    expected = writer.decompress(dict(tensors), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": settings}}}
    named = {f"l.{name}": tensor for name, tensor in tensors.items()}
    model = Model(named, {"quantization_config": config}, {"l.weight": expected})
    assert same_bytes(load(model, tmp_path / "model", torch.float32), {"l.weight": expected})


def test_nvfp4_of_compressed_tensors(tmp_path):
    """It computes in bfloat16, so that values differ by the rounding of a scale; a power of two is
    not rounded.
    """
    model = nvfp4_packed()
    model.tensors["l.weight_global_scale"][0] = 512.0
    expected = decompressed(
        "nvfp4-pack-quantized",
        model.tensors,
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
    )
    assert torch.equal(load(model, tmp_path / "model")["l.weight"], expected)


def exported(tmp_path, name, tensor):
    write_plain(tmp_path / "source/model.safetensors", {"l.weight": tensor})
    distckpt.consolidate(tmp_path / "source", tmp_path / "export", quantize=name)
    return read_export(tmp_path / "export")


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-ue8m0"])
def test_codes_of_fp8_of_transformers(tmp_path, name):
    """Scales may differ in the last bit: it divides twice. Powers of two are the same."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers.utils.quantization_config import FineGrainedFP8Config

    torch.manual_seed(0)
    tensor = torch.randn(256, 384)
    config = FineGrainedFP8Config(scale_fmt="ue8m0" if name.endswith("ue8m0") else "float")
    quantizer = types.SimpleNamespace(quantization_config=config)
    expected = fp8.Fp8Quantize(quantizer)._quantize_one("l.weight", tensor)
    found = exported(tmp_path, name, tensor)
    if name.endswith("ue8m0"):
        assert same_bytes(found, expected)
        return
    assert torch.allclose(
        found["l.weight_scale_inv"], expected["l.weight_scale_inv"], rtol=2e-7, atol=0
    )
    assert (
        found["l.weight"].view(torch.uint8) != expected["l.weight"].view(torch.uint8)
    ).float().mean() < 1e-3


def compressed(name, tensor, scale, **settings):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    return BaseCompressor.get_value_from_registry(name).compress(
        {"weight": tensor, **scale}, scheme
    )


def test_codes_of_compressed_tensors(tmp_path):
    """With our scales it finds our codes, and with its own rule for them our scales of MXFP4 and
    NVFP4.
    """
    torch.manual_seed(0)
    tensor = torch.randn(32, 256)
    int4 = exported(tmp_path / "int4", "int4", tensor)
    scale = {"weight_scale": int4["l.weight_scale"].float()}
    expected = compressed(
        "pack-quantized", tensor, scale, num_bits=4, strategy="group", group_size=32
    )
    assert torch.equal(int4["l.weight_packed"], expected["weight_packed"])

    int8 = exported(tmp_path / "int8", "int8-channel", tensor)
    scale = {"weight_scale": int8["l.weight_scale"]}
    expected = compressed("int-quantized", tensor, scale, num_bits=8, strategy="channel")
    assert torch.equal(int8["l.weight"], expected["weight"])

    nvfp4 = exported(tmp_path / "nvfp4", "nvfp4", tensor)
    factor = nvfp4["l.weight_global_scale"]
    scale = {"weight_scale": nvfp4["l.weight_scale"].float(), "weight_global_scale": factor}
    settings = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    expected = compressed("nvfp4-pack-quantized", tensor, scale, **settings)
    assert torch.equal(nvfp4["l.weight_packed"], expected["weight_packed"])

    from compressed_tensors.quantization.utils import generate_gparam
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    assert torch.equal(factor, generate_gparam(tensor.min(), tensor.max()))
    mxfp4 = exported(tmp_path / "mxfp4", "mxfp4-packed", tensor)
    maxima = tensor.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert torch.equal(
        mxfp4["l.scale"].view(torch.uint8), generate_mx_scales(maxima).to(torch.uint8)
    )


@pytest.mark.parametrize("name", WRITTEN_FORMATS)
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
def test_transformers_opens_exports(tmp_path, name):
    """It has the values that `load` returns, under all of its names."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "dtype": "bfloat16",
    }
    kind = transformers.GptOssConfig if name == "mxfp4" else transformers.LlamaConfig
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**size, num_attention_heads=2, num_key_value_heads=2)
    )
    model.save_pretrained(tmp_path / "model")
    distckpt.consolidate(
        tmp_path / "model", tmp_path / "export", quantize=name, extra_files_from=tmp_path / "model"
    )
    config = json.loads((tmp_path / "export/config.json").read_text())["quantization_config"]
    settings = {
        "fp8": lambda: transformers.FineGrainedFP8Config(dequantize=True),
        "mxfp4": lambda: transformers.Mxfp4Config(dequantize=True),
        "compressed-tensors": lambda: transformers.CompressedTensorsConfig(run_compressed=False),
    }[config["quant_method"]]()
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", quantization_config=settings
    )
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    distckpt.load(model, tmp_path / "export")
    changed = {
        key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])
    }
    assert len(changed) == (2 if name == "mxfp4" else 7)
    found = {key: tensor for key, tensor in opened.state_dict().items() if key in before}
    assert same_bytes(found, model.state_dict())
