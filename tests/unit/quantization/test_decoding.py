"""Quantised directories are loaded as values: whole and by slices, through rules, and as they are
stored.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import distckpt
from distckpt import CorruptCheckpointError, LoadMismatchError, ShardedTensor
from distckpt._format.lazy_columns import LazyColumn
from distckpt.rules import Rename, Split, Transpose
from tests.support.hf_folders import INDEX, same_bytes, write_indexed
from tests.support.manifests import set_limits
from tests.support.quantized_models import (
    E2M1,
    MODELS,
    Model,
    fp8_block,
    fp8_tensor,
    halves,
    int4,
    int4_padded,
    int8_channel,
    mxfp4,
    nvfp4,
    repeated,
)
from tests.support.reference import forms

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


def request(key, shape, dtype=torch.bfloat16):
    return ShardedTensor.from_rank_offsets(key, torch.full(tuple(shape), 7, dtype=dtype))


def part(key, shape, offset, extent, dtype=torch.float32):
    data = torch.full(extent, torch.nan, dtype=dtype)
    return ShardedTensor(key, data, dtype, extent, tuple(shape), offset, None)


@pytest.fixture(params=forms(MODELS))
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture
def folder(model, tmp_path):
    name = "hf_quant_config.json" if "quantization" in model.config else "config.json"
    return model.write(tmp_path / "model", name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_tensors(model, folder, dtype):
    state = {key: request(key, values.shape, dtype) for key, values in model.values.items()}
    loaded = distckpt.load(state, folder)
    assert same_bytes(loaded, {key: values.to(dtype) for key, values in model.values.items()})


def check_slices(model, folder, count):
    """Compare random slices with the same ones of the values."""
    chance = np.random.default_rng(0)
    keys = sorted(model.values)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = {}
        for index in range(count // 2):
            shape = model.values[key := keys[index % len(keys)]].shape
            offset = tuple(int(chance.integers(0, size)) for size in shape)
            extent = tuple(
                int(chance.integers(1, size - at + 1))
                for size, at in zip(shape, offset, strict=True)
            )
            wanted[str(index)] = part(key, shape, offset, extent, dtype)
        loaded = distckpt.load(dict(wanted), folder, validate_access_integrity=False)
        for name, shard in wanted.items():
            where = tuple(
                slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape, strict=True)
            )
            assert torch.equal(loaded[name], model.values[shard.key][where].to(dtype)), (
                shard.key,
                where,
            )


def test_random_slices(model, folder):
    check_slices(model, folder, 100)


@pytest.mark.slow
def test_ten_thousand_slices(model, folder):
    check_slices(model, folder, 10_000)


def test_what_is_stored_can_still_be_had(model, folder):
    state = {key: request(key, tensor.shape, tensor.dtype) for key, tensor in model.tensors.items()}
    assert same_bytes(distckpt.load(state, folder), model.tensors)
    assert same_bytes(distckpt.megatron.load_plain_tensors(folder), model.tensors)


def test_an_imported_checkpoint_is_loaded_the_same(model, folder, tmp_path):
    """Names and shapes are enough, and checksums are compared."""
    distckpt.reshard(folder, tmp_path / "checkpoint")
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "checkpoint"), model.tensors)
    state = {key: request(key, values.shape, torch.float32) for key, values in model.values.items()}
    assert same_bytes(distckpt.load(state, tmp_path / "checkpoint"), model.values)


def test_exports_and_imports_of_values(model, folder, tmp_path):
    dtype, expected = torch.float32, model.values
    distckpt.consolidate(folder, tmp_path / "export", dtype=dtype)
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "export"), expected)
    distckpt.reshard(folder, tmp_path / "checkpoint", dtype=dtype, num_ranks=2)
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "checkpoint"), expected)


def test_padded_columns_are_known_under_new_names(tmp_path):
    model = int4_padded()
    model.write(tmp_path / "model")
    distckpt.reshard(tmp_path / "model", tmp_path / "checkpoint", rename={"l.": "m."})
    state = {"m.weight": request("m.weight", (40, 52), torch.float32)}
    loaded = distckpt.load(state, tmp_path / "checkpoint")
    assert same_bytes(loaded, {"m.weight": model.values["l.weight"]})


def test_a_shape_that_does_not_fit_the_packed_codes_is_refused(tmp_path):
    model = int4_padded()
    for shape in ([40, 60], [40, 48], [39, 52], [-40, 52], [0, 0]):
        model.tensors["l.weight_shape"] = torch.tensor(shape)
        model.write(tmp_path / "model")
        with pytest.raises(LoadMismatchError, match="codes of a form"):
            distckpt.load({"x": request("l.weight", (40, 52))}, tmp_path / "model")


def test_exports_as_stored(model, folder, tmp_path):
    distckpt.consolidate(folder, tmp_path / "export")
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "export"), model.tensors)


def test_rules_of_an_export_apply_to_values(tmp_path):
    model = mxfp4()
    model.write(tmp_path / "model")
    rules = [Transpose("m.experts.*", "e.{0}", (0, 2, 1))]
    distckpt.consolidate(tmp_path / "model", tmp_path / "export", rules=rules)
    expected = model.values["m.experts.down_proj"].transpose(1, 2).bfloat16()
    assert torch.equal(
        distckpt.megatron.load_plain_tensors(tmp_path / "export")["e.down_proj"], expected
    )


def test_tied_keys_of_a_checkpoint_keep_together(tmp_path):
    """The second key of a tied tensor has neither codes nor scales of its own."""
    model = fp8_tensor()
    state = {
        key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in model.tensors.items()
    }
    state["tied"] = ShardedTensor.from_rank_offsets("head.weight", model.tensors["l.weight"])
    distckpt.save(state, tmp_path / "checkpoint")
    values = model.values["l.weight"]
    loaded = distckpt.load(
        {"x": request("head.weight", (60, 90), torch.float32)}, tmp_path / "checkpoint"
    )["x"]
    assert torch.equal(loaded, values)
    loaded = distckpt.load(
        {"x": request("head.weight", (60, 90), values_dtype := torch.float8_e4m3fn)},
        tmp_path / "checkpoint",
    )
    assert loaded["x"].dtype == values_dtype
    distckpt.reshard(tmp_path / "checkpoint", tmp_path / "values", dtype=torch.float32)
    assert same_bytes(
        distckpt.megatron.load_plain_tensors(tmp_path / "values"),
        {"l.weight": values, "head.weight": values},
    )


def test_the_interface_of_torch(model, folder):
    state = {key: torch.zeros(values.shape) for key, values in model.values.items()}
    distckpt.dcp.load(state, checkpoint_id=folder)
    assert same_bytes(state, model.values)


def test_strict_loads_miss_neither_scales_nor_codes(model, folder):
    state = {key: request(key, values.shape) for key, values in model.values.items()}
    _, missing, unexpected = distckpt.megatron.load(dict(state), folder, strict="return_all")
    assert (missing, unexpected) == (set(), set())
    key, _ = state.popitem()
    _, missing, unexpected = distckpt.megatron.load(
        {**state, "x": request("x", (1,))}, folder, strict="return_all"
    )
    assert missing
    assert all(name.startswith(key.removesuffix("weight")) for name in missing)
    assert unexpected == {"x"}


class Codes(torch.nn.Module):
    """A layer with the codes of FP8 blocks, and no scales."""

    def __init__(self, shape):
        super().__init__()
        weight = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def test_codes_whose_scales_a_module_lacks_are_refused_or_named(tmp_path, caplog):
    folder = tmp_path / "model"
    weight = torch.randn(128, 256)
    distckpt.save({"model": {"up.weight": request("up.weight", weight.shape)}}, tmp_path / "saved")
    distckpt.consolidate(tmp_path / "saved", folder, quantize="fp8-block")
    model = torch.nn.ModuleDict({"up": Codes(weight.shape)})
    with pytest.raises(
        LoadMismatchError, match=r"'up\.weight_scale_inv', which the objects of the"
    ):
        distckpt.load({"model": model}, folder)
    distckpt.load({"model": model}, folder, rules=[Rename("up.weight", "up.weight")])
    assert "holds 'up.weight_scale_inv', which no module of the state dict has" in caplog.text
    model.up.weight_scale_inv = torch.nn.Parameter(torch.zeros(1, 2))
    distckpt.load({"model": model}, folder)
    assert (model.up.weight_scale_inv > 0).all()


def test_a_store_is_read_by_slices(model, memory):
    """Objects of a store are read by ranges."""
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        for file in Path(folder).iterdir():
            name = (
                "hf_quant_config.json"
                if "quantization" in model.config and file.suffix == ".json"
                else file.name
            )
            fsspec.filesystem("memory").pipe(f"{memory}model/{name}", file.read_bytes())
    check_slices(model, f"{memory}model", 10)


def test_damage_is_found_in_codes_and_in_scales(tmp_path):
    model = fp8_block()
    model.write(tmp_path / "model")
    distckpt.reshard(tmp_path / "model", tmp_path / "checkpoint")
    for key in ("l.up.weight", "l.up.weight_scale_inv"):
        (found,) = [
            p for p in (tmp_path / "checkpoint").rglob("shard*") if model.tensors[key].numel()
        ]
        content = found.read_bytes()
        at = content.find(model.tensors[key].view(torch.uint8).numpy().tobytes())
        found.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match=rf"{key} \(as stored\)'"):
            distckpt.load(
                {"x": part("l.up.weight", (300, 200), (0, 0), (1, 1))}, tmp_path / "checkpoint"
            )
        found.write_bytes(content)


def test_the_not_a_number_of_codes_stays_one(tmp_path):
    model = fp8_block()
    model.tensors["l.up.weight"].view(torch.uint8)[5, 7] = 0x7F
    model.write(tmp_path / "model")
    loaded = distckpt.load({"x": request("l.up.weight", (300, 200))}, tmp_path / "model")["x"]
    assert loaded.isnan().nonzero().tolist() == [[5, 7]]


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-110, 2.0**110, 0.0])
@pytest.mark.parametrize(("make", "ending"), [(int4, "_packed"), (fp8_tensor, "")])
def test_scales_near_the_limits_of_float32(tmp_path, make, ending, scale):
    model = make()
    (key,) = model.values
    codes = model.tensors[key + ending]
    numbers = (halves(codes.view(torch.uint8)) - 8 if ending else codes).float()
    model.tensors[f"{key}_scale"].fill_(scale)
    model.write(tmp_path / "model")
    loaded = distckpt.load({key: request(key, numbers.shape, torch.float32)}, tmp_path / "model")
    assert same_bytes(loaded, {key: numbers * scale})


def test_tensors_with_one_axis(tmp_path):
    codes = fp8_tensor().tensors["l.weight"].flatten()[:300].clone()
    Model({"l.weight": codes, "l.weight_scale": torch.tensor(0.5)}, {}, {}).write(
        tmp_path / "model"
    )
    loaded = distckpt.load({"x": part("l.weight", (300,), (7,), (200,))}, tmp_path / "model")["x"]
    assert torch.equal(loaded, codes[7:207].float() * 0.5)


def test_rules_apply_to_values(tmp_path):
    model = mxfp4()
    model.write(tmp_path / "model")
    down = model.values["m.experts.down_proj"]
    rules = [Transpose("mine", "m.experts.down_proj", (0, 2, 1))]
    loaded = distckpt.load(
        {"mine": part("mine", down.shape, (1, 3, 0), (2, 9, 64))}, tmp_path / "model", rules=rules
    )
    assert torch.equal(loaded["mine"], down.transpose(1, 2)[1:, 3:12])


def test_fused_halves_come_from_two_quantised_tensors(tmp_path):
    first, second = fp8_block(200, 130), fp8_block(100, 130)
    tensors = {f"a.{key}": value for key, value in first.tensors.items()}
    tensors |= {f"b.{key}": value for key, value in second.tensors.items()}
    first._replace(tensors=tensors).write(tmp_path / "model")
    fused = torch.cat([first.values["l.up.weight"], second.values["l.up.weight"]])
    rules = [Split("fc1", ("a.l.up.weight", "b.l.up.weight"), sizes=(200, 100))]
    loaded = distckpt.load(
        {"x": part("fc1", (300, 130), (150, 60), (150, 70))}, tmp_path / "model", rules=rules
    )["x"]
    assert torch.equal(loaded, fused[150:, 60:])


def test_a_conversion_that_loses_values_is_refused_as_ever(tmp_path):
    fp8_tensor().write(tmp_path / "model")
    state = {"x": request("l.weight", (60, 90), torch.float16)}
    with pytest.raises(LoadMismatchError, match=r"bfloat16.*float16.*allow_dtype_cast"):
        distckpt.load(state, tmp_path / "model")
    loaded = distckpt.load(state, tmp_path / "model", allow_dtype_cast=True)["x"]
    assert torch.equal(loaded, fp8_values(tmp_path / "model").half())


def fp8_values(folder):
    state = {"x": request("l.weight", (60, 90), torch.float32)}
    return distckpt.load(state, folder)["x"]


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        # Zero points: values are more than codes times scales.
        (int4, {"e.0.up_proj.weight_zero_point": torch.zeros(5, 3, dtype=torch.int32)}),
        (int8_channel, {"l.weight_offset": torch.ones(40, 1)}),
        (int8_channel, {"l.zero_point": torch.ones(40, 1)}),
        # Factors of the inputs, by which the columns of the weight would have to be multiplied.
        (fp8_tensor, {"l.pre_quant_scale": torch.rand(8)}),
        # Two kinds of scales, one of which divides.
        (fp8_tensor, {"l.weight_scale_inv": torch.tensor(2.0)}),
        # Integers of 8 bits with a scale that is a power of two, not numbers of 4 bits.
        (int8_channel, {"l.weight_scale": torch.full((60, 1), 127, dtype=torch.uint8).view(E8M0)}),
        # Scales that fit no block that is known.
        (fp8_block, {"l.up.weight_scale_inv": torch.rand(7, 9)}),
        (nvfp4, {"l.weight_scale": torch.rand(40, 6)}),
    ],
)
def test_forms_that_are_not_known_are_refused(tmp_path, model, changed):
    made = model()
    key = next(iter(made.values))
    made.tensors.update(changed)
    made.write(tmp_path / "model")
    codes = next(iter(made.tensors))
    with pytest.raises(
        LoadMismatchError, match=r"codes of a quantized tensor|Not in the checkpoint"
    ):
        distckpt.load({"x": request(key, made.tensors[codes].shape)}, tmp_path / "model")


@pytest.mark.parametrize(("model", "bits"), [(int4, 4), (int8_channel, 8)])
def test_codes_without_the_zero_points_of_the_configuration_are_refused(tmp_path, model, bits):
    made = model()
    weights = {"num_bits": bits, "type": "int", "symmetric": False}
    made = made._replace(
        config={"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    )
    made.write(tmp_path / "model")
    key = next(iter(made.values))
    with pytest.raises(
        LoadMismatchError, match=r"codes of a quantized tensor|Not in the checkpoint"
    ):
        distckpt.load({key: request(key, made.values[key].shape)}, tmp_path / "model")


def test_an_export_in_another_dtype_warns_of_what_stays_codes(tmp_path, caplog):
    made = int4()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 64}
    made = made._replace(
        config={"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    )
    made.write(tmp_path / "model")
    distckpt.consolidate(tmp_path / "model", tmp_path / "same")
    assert "no values in" not in caplog.text
    distckpt.consolidate(tmp_path / "model", tmp_path / "out", dtype=torch.bfloat16)
    assert "no values in torch.bfloat16 are made of codes" in caplog.text
    assert "up_proj.weight_packed" in caplog.text


def test_blocks_of_the_configuration_that_do_not_fit_the_scales_are_not_passed_over(tmp_path):
    made = fp8_block(130, 130)
    made.config["quantization_config"]["weight_block_size"] = [64, 64]
    made.write(tmp_path / "model")
    with pytest.raises(LoadMismatchError, match=r"codes of a quantized tensor"):
        distckpt.load({"x": request("l.up.weight", (130, 130))}, tmp_path / "model")


def test_blocks_of_another_size_are_not_guessed(tmp_path):
    """Blocks of 100 give as many scales of 290 rows as blocks of 128: only the configuration
    knows.
    """
    rows, columns, block = 290, 200, [100, 100]
    codes, scales = fp8_block(rows, columns).tensors["l.up.weight"], torch.rand(3, 2) + 0.1
    tensors = {"l.up.weight": codes, "l.up.weight_scale_inv": scales}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    values = {"l.up.weight": codes.float() * repeated(scales, block, (rows, columns))}
    Model(tensors, config, values).write(tmp_path / "model")
    Model(tensors, {}, {}).write(tmp_path / "copy")
    distckpt.reshard(tmp_path / "model", tmp_path / "checkpoint", num_ranks=2)
    distckpt.reshard(tmp_path / "checkpoint", tmp_path / "again")
    state = {"l.up.weight": request("l.up.weight", (rows, columns), torch.float32)}
    for path in ("model", "checkpoint", "again"):
        assert same_bytes(distckpt.load(state, tmp_path / path), values), path
    distckpt.reshard(tmp_path / "copy", tmp_path / "bare")
    for path in ("copy", "bare"):
        with pytest.raises(LoadMismatchError, match="codes of a quantized tensor"):
            distckpt.load(state, tmp_path / path)


def test_configurations_that_contradict_each_other_are_refused_where_both_fit(tmp_path):
    made = fp8_block(130, 130)
    made.write(tmp_path / "model")
    other = {"quantization": {"weight_block_size": [100, 128]}}
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(other))
    with pytest.raises(LoadMismatchError, match=r"codes of a quantized tensor"):
        distckpt.load({"x": request("l.up.weight", (130, 130))}, tmp_path / "model")
    made.values.pop("l.gate.weight")
    other["quantization"]["weight_block_size"] = [64, 128]
    (tmp_path / "model/hf_quant_config.json").write_text(json.dumps(other))
    loaded = distckpt.load(
        {"l.up.weight": request("l.up.weight", (130, 130), torch.float32)}, tmp_path / "model"
    )
    assert same_bytes(loaded, made.values)


@pytest.mark.parametrize("field", ["llm_config", "language_config", "thinker"])
def test_the_configuration_of_a_part_of_the_model_counts(tmp_path, field):
    made = fp8_block(130, 130)
    made.config["quantization_config"]["weight_block_size"] = [64, 64]
    made.config["torch_dtype"] = "float16"
    inside = {"text_config": made.config} if field == "thinker" else made.config
    made._replace(config={field: inside}).write(tmp_path / "model")
    with pytest.raises(LoadMismatchError, match=r"codes of a quantized tensor"):
        distckpt.load({"x": request("l.up.weight", (130, 130))}, tmp_path / "model")
    made.tensors["l.up.weight_scale_inv"] = torch.ones(3, 3)
    made._replace(config={field: inside}).write(tmp_path / "model")
    loaded = distckpt.load(
        {"x": request("l.up.weight", (130, 130), torch.float16)}, tmp_path / "model"
    )["x"]
    assert torch.equal(loaded, made.tensors["l.up.weight"].half())


def test_scales_with_fewer_axes_are_for_rows_or_refused(tmp_path):
    """Of a square matrix, only a configuration says that scales are for channels, which are
    rows.
    """
    codes = int8_channel().tensors["l.weight"]
    for rows, columns, scale, config, is_known in [
        (60, 90, torch.rand(60), {}, True),
        (60, 90, torch.rand(90), {}, False),
        (60, 2, torch.rand(2), {}, False),
        (60, 60, torch.rand(60), {}, False),
        (60, 60, torch.rand(60), {"quantization_config": {"weight_block_size": [128, 128]}}, False),
        (
            60,
            60,
            torch.rand(60),
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            True,
        ),
    ]:
        stored = codes[:rows, :columns].contiguous()
        values = {"l.weight": stored.float() * scale[:, None]} if is_known else {}
        Model({"l.weight": stored, "l.weight_scale": scale}, config, values).write(
            tmp_path / "model"
        )
        state = {"l.weight": request("l.weight", (rows, columns), torch.float32)}
        if is_known:
            assert same_bytes(distckpt.load(state, tmp_path / "model"), values)
            continue
        with pytest.raises(LoadMismatchError, match=r"codes of a quantized tensor"):
            distckpt.load(state, tmp_path / "model")


def test_scales_of_many_axes_are_refused_at_once(tmp_path):
    codes, scales = torch.zeros(*[1] * 50, 2, dtype=torch.int8), torch.rand(*[1] * 25, 2)
    Model({"l.weight": codes, "l.weight_scale": scales}, {}, {}).write(tmp_path / "model")
    with pytest.raises(LoadMismatchError, match=r"codes of a quantized tensor"):
        distckpt.load({"l.weight": request("l.weight", codes.shape)}, tmp_path / "model")


def test_a_tensor_that_is_stored_as_values_too_is_that_tensor(tmp_path):
    made = int4()
    made.tensors["e.0.up_proj.weight"] = torch.ones(40, 96, dtype=torch.bfloat16)
    made.write(tmp_path / "model")
    loaded = distckpt.load({"x": request("e.0.up_proj.weight", (40, 96))}, tmp_path / "model")["x"]
    assert torch.equal(loaded, torch.ones(40, 96, dtype=torch.bfloat16))


def test_a_stored_shape_that_contradicts_the_codes_is_named(tmp_path):
    made = int4()
    made.tensors["e.0.up_proj.weight_shape"][1] = 95
    made.write(tmp_path / "model")
    with pytest.raises(CorruptCheckpointError, match=r"weight_packed.*\(40, 96\).*\[40, 95\]"):
        distckpt.load({"x": request("e.0.up_proj.weight", (40, 96))}, tmp_path / "model")


def read_with_torch(folder, key, shape):
    storage = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    assert key in names
    state = {key: torch.zeros(shape)}
    reader = storage.QuantizedHuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state[key]


def indexed(model, folder):
    write_indexed(folder, {"model-00001-of-00001.safetensors": model.tensors})
    return folder


def test_torchs_reader_of_fp8_agrees(tmp_path):
    model = fp8_block(256, 384)
    found = read_with_torch(indexed(model, tmp_path / "model"), "l.up.weight", (256, 384))
    assert torch.equal(found, model.values["l.up.weight"])


def test_every_number_of_mxfp4_with_every_scale(tmp_path):
    """Torch's reader fills as many columns as there are groups, and knows no scale that is not a
    number.
    """
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    expected = (E2M1.double()[halves(blocks)].flatten(-2) * powers).float()
    expected[:, 255] = torch.nan
    tensors = {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scales}
    folder = indexed(Model(tensors, {}, {}), tmp_path / "model")
    loaded = distckpt.load(
        {"x": request("m.experts.down_proj", (1, 512, 256), torch.float32)}, folder
    )["x"]
    assert torch.equal(loaded.transpose(1, 2).nan_to_num(7), expected.nan_to_num(7))
    found = read_with_torch(folder, "m.experts.down_proj_blocks", (1, 256, 512))
    assert torch.equal(found[:, :255, :16], expected[:, :255, :16])


@pytest.mark.parametrize("max_blocks", [0, 1 << 16])
def test_values_of_a_checkpoint_whose_manifest_has_parts(
    model, folder, max_blocks, tmp_path, monkeypatch
):
    """The view with values computes no column of the whole table."""
    set_limits(monkeypatch, max_blocks)
    distckpt.reshard(folder, tmp_path / "checkpoint", num_ranks=3)
    assert any((tmp_path / "checkpoint" / "objects").glob("chunks-*"))
    monkeypatch.delattr(LazyColumn, "whole")
    state = {key: request(key, values.shape, torch.float32) for key, values in model.values.items()}
    assert same_bytes(distckpt.load(state, tmp_path / "checkpoint"), model.values)
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "export", dtype=torch.float32)
    assert same_bytes(distckpt.megatron.load_plain_tensors(tmp_path / "export"), model.values)
