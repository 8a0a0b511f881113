"""Checkpoints of one model that Megatron Core and Megatron-FSDP wrote, converted to one another.

Those in `tests/data/megatron_fsdp_0_16.zip` are by the programs themselves, see
`tests/data/make_megatron_fsdp.py`; others are small and stand for models they have no room for.
"""

from __future__ import annotations

import argparse
import pathlib
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import cli, torch_dist
from distckpt.rules import Drop, Rename

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "megatron_fsdp_0_16.zip"
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
GROUPS = [{"wd_mult": 1.0, "lr": 0.1, "step": 3}, {"wd_mult": 0.0, "lr": 0.1, "step": 3}]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(folder)
    return folder


def differences(a, b):
    report = distckpt.diff(a, b)
    objects = [o.key for o in report.objects if "_extra_state" not in o.key]
    return report.only_in_a, report.only_in_b, [t.key for t in report.tensors], objects


def test_what_core_wrote_becomes_what_fsdp_wrote(golden, tmp_path):
    path = tmp_path / "converted"
    torch_dist.convert_fsdp_dtensor(
        golden / "torch_dist", path, "fsdp_dtensor", gated=True, rename=NORMS
    )
    assert differences(golden / "fsdp_dtensor", path) == ((), (), [], [])
    # The paths of torch's own planner, too.
    mine = dcp.FileSystemReader(path).read_metadata().planner_data
    assert mine == dcp.FileSystemReader(golden / "fsdp_dtensor").read_metadata().planner_data
    assert not (path / "metadata.json").exists()


def test_what_fsdp_wrote_becomes_what_core_wrote(golden, tmp_path):
    path = tmp_path / "converted"
    torch_dist.convert_fsdp_dtensor(
        golden / "fsdp_dtensor", path, "torch_dist", rename=NORMS, dtype=torch.bfloat16
    )
    assert differences(golden / "torch_dist", path) == ((), (), [], [])


def test_the_command_line_converts_by_way_of_a_checkpoint_of_its_own(golden, tmp_path, capsys):
    rename = []
    for old, new in NORMS.items():
        rename += ["--rename", f"{old}={new}"]
    own = str(tmp_path / "own")
    back = str(tmp_path / "back")
    core = str(tmp_path / "core")
    source = str(golden / "fsdp_dtensor")
    assert cli.main(["convert", source, own, "--from", "fsdp_dtensor", *rename]) == 0
    assert distckpt.verify(own).problems == ()
    assert cli.main(["convert", own, back, "--to", "fsdp_dtensor", "--gated", *rename]) == 0
    assert differences(source, back) == ((), (), [], [])
    to_core = ["--from", "fsdp_dtensor", "--to", "torch_dist", "--without-optimizer", *rename]
    assert cli.main(["convert", source, core, *to_core]) == 0
    keys = distckpt.open(core).tensors
    assert len(keys) == 13
    assert not any(key.startswith("optimizer.") for key in keys)
    assert cli.main(["convert", own, core, "--to", "fsdp_dtensor", "--overwrite"]) == 1
    assert "does not tell whether MLPs are gated" in capsys.readouterr().err
    assert cli.main(["convert", own, core, "--to", "fsdp_dtensor", "--part", "0/2"]) == 1


@pytest.mark.parametrize(
    "option", [["--no-gated"], ["--rename", "a=b"], ["--fuse"], ["--without-optimizer"]]
)
@pytest.mark.parametrize("to", ["distckpt", "torch_dist"])
def test_options_of_fsdp_are_refused_for_other_conversions(golden, tmp_path, capsys, to, option):
    source = str(golden / "torch_dist")
    assert cli.main(["convert", source, str(tmp_path / "out"), "--to", to, *option]) == 1
    assert f"{option[0].replace('no-', '')} is for fsdp_dtensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_weights_are_not_the_rounded_ones(golden, tmp_path):
    path = tmp_path / "converted"
    torch_dist.convert_fsdp_dtensor(
        golden / "torch_dist", path, "fsdp_dtensor", gated=True, with_optimizer=False
    )
    weights = distckpt.open(path).read_tensors()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert len(weights) == 23
    value = weights["model.module.output_layer.weight"]
    stored = distckpt.open(golden / "torch_dist").read("optimizer.state.param.output_layer.weight")
    assert torch.equal(value, stored)


# --- Models of other kinds ------------------------------------------------------------------------


def numbered(*shape, dtype=torch.float32):
    return torch.from_numpy(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)).to(dtype)


def core(tmp_path, tensors, groups=GROUPS, **common):
    """Save tensors under Megatron Core's names, with states of an optimizer for each."""
    state = {}
    for name, value in tensors.items():
        state[name] = value.bfloat16()
        if not name.endswith("expert_bias"):
            state[f"optimizer.state.fp32_param.{name}"] = value + 0.125
            state[f"optimizer.state.exp_avg.{name}"] = -value
    shards = {}
    for name, value in state.items():
        shards[name] = distckpt.ShardedTensor.from_rank_offsets(name, value)
    optimizer = {"optimizer": {"param_groups": groups}}
    path = tmp_path / "core"
    distckpt.save({**shards, "optimizer": optimizer, "iteration": 7, **common}, path)
    return path


def round_trip(tmp_path, source, back=None, **options):
    to = tmp_path / "fsdp"
    torch_dist.convert_fsdp_dtensor(source, to, "fsdp_dtensor", **options)
    again = tmp_path / "again"
    torch_dist.convert_fsdp_dtensor(to, again, "torch_dist", **(back or {}))
    return distckpt.open(to).read_tensors(), distckpt.open(again)


def test_grouped_experts_of_layers_and_their_options(tmp_path):
    fc1 = numbered(2, 3, 4, 5)
    tensors = {
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": fc1,
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": numbered(2, 3, 5, 2),
        "decoder.layers.mlp.shared_experts.linear_fc1.weight": numbered(2, 4, 5),
        "decoder.layers.mlp.router.expert_bias": numbered(2, 3),
        "decoder.layers.mlp.router.weight": numbered(2, 3, 5),
        "decoder.final_layernorm.weight": numbered(5),
    }
    experts = {**GROUPS[0], "is_expert_parallel": True}
    dense = [{**group, "is_expert_parallel": False} for group in GROUPS]
    source = core(tmp_path, tensors, groups=[*dense, experts])
    found, again = round_trip(tmp_path, source, {"expert_parallel": True}, gated=True)
    key = "model.module.decoder.layers.1.mlp.experts.linear_fc1.weight2"
    assert torch.equal(found[f"{key}_w"], fc1[1, 2, :2] + 0.125)
    assert torch.equal(found[f"{key}_v"], fc1[1, 2, 2:] + 0.125)
    state = "optimizer.state.module.module.module.decoder.layers.0.mlp.experts.linear_fc1.weight1"
    assert torch.equal(found[f"{state}_v.exp_avg"], -fc1[0, 1, 2:])
    assert f"{key.replace('fc1', 'fc2')}_w" not in found
    assert "model.module.decoder.layers.1.mlp.router.expert_bias" in found
    options = distckpt.open(tmp_path / "fsdp").common_state["optimizer"]["param_to_group_meta"]
    prefix = "module.module.module.decoder."
    assert options[f"{prefix}final_layernorm.weight"]["wd_mult"] == 0.0
    # Megatron-FSDP's parameters do not know it, and its loads refuse groups that differ in it.
    assert {group["is_expert_parallel"] for group in options.values()} == {False}
    assert not any(name.endswith("expert_bias") for name in options)
    for name, value in tensors.items():
        expected = value.bfloat16().float() if name.endswith("expert_bias") else value + 0.125
        assert torch.equal(again.read(name).float(), expected)
    assert again.common_state["optimizer"][0]["optimizer"]["param_groups"] == dense
    assert again.common_state["optimizer"][1]["optimizer"]["param_groups"] == [experts]


def test_gated_delta_nets_apart_and_fused(tmp_path):
    block = "decoder.layers.self_attention."
    rows = {"query": 2, "key": 2, "value": 4, "z": 4, "beta": 1, "alpha": 1}
    tensors = {}
    for number, (part, size) in enumerate(rows.items()):
        tensors[f"{block}in_proj.weight.{part}"] = numbered(2, size, 3) + 100 * number
    for part in ("query", "key", "value"):
        tensors[f"{block}conv1d.weight.{part}"] = numbered(2, rows[part], 1, 4)
    source = core(tmp_path, tensors)
    found, again = round_trip(tmp_path, source, gated=False)
    key = "model.module.decoder.layers.1.self_attention.in_proj.weight"
    assert torch.equal(found[f"{key}.z"], tensors[f"{block}in_proj.weight.z"][1] + 0.125)
    for name, value in tensors.items():
        assert torch.equal(again.read(name), value + 0.125)
    fused = tmp_path / "fused"
    torch_dist.convert_fsdp_dtensor(source, fused, "fsdp_dtensor", gated=False, fuse=True)
    parts = [tensors[f"{block}in_proj.weight.{part}"][1] + 0.125 for part in rows]
    assert torch.equal(distckpt.open(fused).read(key), torch.cat(parts))
    back = tmp_path / "back"
    with pytest.raises(distckpt.CheckpointingException, match="holds several projections"):
        torch_dist.convert_fsdp_dtensor(fused, back, "torch_dist")
    sizes = {"in_proj.weight": rows, "conv1d.weight": {"query": 2, "key": 2, "value": 4}}
    torch_dist.convert_fsdp_dtensor(fused, back, "torch_dist", sizes=sizes)
    for name, value in tensors.items():
        assert torch.equal(distckpt.open(back).read(name), value + 0.125)
    sizes["in_proj.weight"] = {"query": 3}
    with pytest.raises(distckpt.CheckpointingException, match=r"14 rows, and the sizes .* 3"):
        torch_dist.convert_fsdp_dtensor(fused, back, "torch_dist", sizes=sizes, overwrite=True)


def test_layers_of_several_kinds_keep_their_numbers(tmp_path):
    tensors = {
        "decoder.layers.0.mlp.linear_fc1.weight": numbered(4, 3),
        "decoder.layers.1.mlp.router.weight": numbered(2, 3),
        "vision_model.decoder.layers.mlp.linear_fc1.weight": numbered(2, 4, 3),
        "mtp.layers.0.eh_proj.weight": numbered(3, 6),
    }
    source = core(tmp_path, tensors)
    found, again = round_trip(tmp_path, source, gated=["decoder"])
    assert "model.module.decoder.layers.0.mlp.linear_fc1.weight_w" in found
    assert "model.module.vision_model.decoder.layers.1.mlp.linear_fc1.weight" in found
    assert {name for name in again.tensors if not name.startswith("optimizer.")} == set(tensors)


def test_arguments_of_the_run_say_whether_mlps_are_gated(tmp_path):
    tensors = {"decoder.layers.mlp.linear_fc1.weight": numbered(2, 4, 3)}
    source = core(tmp_path, tensors, args=argparse.Namespace(swiglu=True))
    found, again = round_trip(tmp_path, source)
    assert "model.module.decoder.layers.0.mlp.linear_fc1.weight_v" in found
    assert again.common_state["args"].swiglu
    assert again.common_state["iteration"] == 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_empty_tensors_scalars_and_8_bits(tmp_path):
    values = {
        "a": torch.zeros(0, 3),
        "b": torch.tensor(2.0),
        "c": numbered(3).to(torch.float8_e4m3fn),
    }
    shards = {}
    for name, value in values.items():
        shards[name] = distckpt.ShardedTensor.from_rank_offsets(name, value)
    distckpt.save(shards, tmp_path / "core")
    _, again = round_trip(tmp_path, tmp_path / "core", gated=False)
    for name, value in values.items():
        found = again.read(name)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert torch.equal(found.float(), value.float())
    loaded = {"model": {"module.b": torch.zeros(())}}
    dcp.load(loaded, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert loaded["model"]["module.b"] == 2.0


def refusal(error, *args, **options):
    with pytest.raises(error) as caught:
        torch_dist.convert_fsdp_dtensor(*args, **options)
    assert not pathlib.Path(args[1]).exists()
    return str(caught.value)


def test_what_cannot_be_converted_is_refused_by_name(golden, tmp_path):
    out = tmp_path / "out"
    fails = distckpt.CheckpointingException
    fsdp = golden / "fsdp_dtensor"
    assert "already" in refusal(fails, fsdp, out, "fsdp_dtensor", gated=True)
    assert "of Megatron-FSDP" in refusal(fails, golden / "torch_dist", out, "torch_dist")
    odd = core(tmp_path, {"decoder.layers.mlp.linear_fc1.weight": numbered(2, 3, 3)})
    assert "no two halves" in refusal(fails, odd, out, "fsdp_dtensor", gated=True)
    groups = [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 1.0, "lr": 0.2}]
    (tmp_path / "g").mkdir()
    unclear = core(
        tmp_path / "g", {"decoder.layers.mlp.linear_fc2.weight": numbered(2, 3, 3)}, groups
    )
    assert "cannot be told" in refusal(fails, unclear, out, "fsdp_dtensor", gated=True)
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"
    shard = distckpt.ShardedTensor.from_rank_offsets(key, numbered(4))
    weight = distckpt.ShardedTensor.from_rank_offsets("w", numbered(4))
    distckpt.save({"a": shard, "w": weight}, tmp_path / "buckets")
    text = refusal(fails, tmp_path / "buckets", out, "fsdp_dtensor", gated=False)
    assert "fully-reshardable" in text
    torch_dist.convert_fsdp_dtensor(
        tmp_path / "buckets", out, "fsdp_dtensor", gated=False, with_optimizer=False
    )
    assert list(distckpt.open(out).tensors) == ["model.module.w"]


@pytest.mark.parametrize("left_out", ["weight_v", "layers.1"])
def test_an_incomplete_checkpoint_of_fsdp_is_refused(golden, tmp_path, left_out):
    keys = [
        key
        for key in distckpt.open(golden / "fsdp_dtensor").tensors
        if not (left_out in key and "linear_fc1" in key and "model." in key)
    ]
    distckpt.reshard(golden / "fsdp_dtensor", tmp_path / "part", keys=keys)
    if left_out == "weight_v":
        with pytest.raises(distckpt.LoadMismatchError, match=r"linear_fc1\.weight_v"):
            torch_dist.convert_fsdp_dtensor(tmp_path / "part", tmp_path / "out", "torch_dist")
    else:
        with pytest.raises(distckpt.LoadMismatchError, match=r"layers\.1\.mlp\.linear_fc1"):
            torch_dist.convert_fsdp_dtensor(tmp_path / "part", tmp_path / "out", "torch_dist")
        # Layers of several kinds: each keeps its number.
        torch_dist.convert_fsdp_dtensor(
            tmp_path / "part", tmp_path / "out", "torch_dist", with_optimizer=False
        )
        assert "decoder.layers.0.mlp.linear_fc1.weight" in distckpt.open(tmp_path / "out").tensors


@pytest.mark.parametrize("end", [".exp_avg", ".exp_avg_sq"])
def test_a_missing_moment_is_refused(golden, tmp_path, end):
    keys = distckpt.open(golden / "fsdp_dtensor").tensors
    rules = [Drop(max(key for key in keys if key.endswith(end))), Rename("**", "{0}")]
    distckpt.reshard(golden / "fsdp_dtensor", tmp_path / "part", rules=rules)
    with pytest.raises(distckpt.LoadMismatchError, match=rf"{end}' are missing"):
        torch_dist.convert_fsdp_dtensor(tmp_path / "part", tmp_path / "out", "torch_dist")
    torch_dist.convert_fsdp_dtensor(
        tmp_path / "part", tmp_path / "out", "torch_dist", with_optimizer=False
    )
    assert len(distckpt.open(tmp_path / "out").tensors) == 13


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("torch_dist", {"rename": {"linear_fc1": "linear_fc9"}}, "linear_fc9"),
        ("fsdp_dtensor", {"gated": ["encoder"]}, "encoder"),
        ("torch_dist", {"sizes": {"in_proj.weight": {"query": 2}}}, "in_proj"),
    ],
)
def test_names_that_no_parameter_has_are_refused(golden, tmp_path, to, options, message):
    source = golden / ("fsdp_dtensor" if to == "torch_dist" else "torch_dist")
    with pytest.raises(distckpt.LoadMismatchError, match=message):
        torch_dist.convert_fsdp_dtensor(source, tmp_path / "out", to, **options)
    with pytest.raises(TypeError, match="a list of names"):
        torch_dist.convert_fsdp_dtensor(source, tmp_path / "out", to, gated="decoder")


@pytest.mark.parametrize(
    ("to", "option"),
    [
        ("torch_dist", ["--gated"]),
        ("torch_dist", ["--no-gated"]),
        ("distckpt", ["--local-experts"]),
        ("torch_dist", ["--fuse"]),
        ("distckpt", ["--wrappers", "2"]),
        ("fsdp_dtensor", ["--expert-parallel"]),
    ],
)
def test_options_for_the_other_direction_are_refused(golden, tmp_path, capsys, to, option):
    source = str(golden / ("torch_dist" if to == "fsdp_dtensor" else "fsdp_dtensor"))
    begin = [] if to == "fsdp_dtensor" else ["--from", "fsdp_dtensor"]
    assert cli.main(["convert", source, str(tmp_path / "out"), *begin, "--to", to, *option]) == 1
    text = capsys.readouterr().err
    assert f"{option[0].replace('no-', '')}) is for conversions to" in text
    assert "leave it out" in text
    assert not (tmp_path / "out").exists()


def test_sizes_are_for_the_way_back(golden, tmp_path):
    options = {"gated": True, "sizes": {"in_proj.weight": {"query": 2}}}
    text = refusal(
        distckpt.CheckpointingException,
        golden / "torch_dist", tmp_path / "out", "fsdp_dtensor", **options,
    )  # fmt: skip
    assert "`sizes`" in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_by_number_is_refused_with_the_way_out(tmp_path):
    """As `fully_shard` of the package megatron-fsdp has it outside Megatron-LM."""
    moment = {"exp_avg": torch.ones(4, 4)}
    dcp.save(
        {"model": {"module.a": torch.ones(4, 4)}, "optimizer": {"state": {0: moment}}},
        checkpoint_id=tmp_path / "numbered",
        no_dist=True,
    )
    out = tmp_path / "out"
    text = refusal(distckpt.CheckpointingException, tmp_path / "numbered", out, "torch_dist")
    assert "distckpt.load(" in text
    assert "--without-optimizer" in text
    torch_dist.convert_fsdp_dtensor(tmp_path / "numbered", out, "torch_dist", with_optimizer=False)
    assert torch.equal(distckpt.open(out).read("a"), torch.ones(4, 4))


def test_names_behind_a_wrapper_are_refused(tmp_path):
    for prefix in ("module", "model"):
        (tmp_path / prefix).mkdir()
        weights = {f"{prefix}.decoder.layers.mlp.linear_fc2.weight": numbered(2, 4, 4)}
        source = core(tmp_path / prefix, weights)
        with pytest.raises(distckpt.CheckpointingException, match="do not begin with"):
            torch_dist.convert_fsdp_dtensor(source, tmp_path / "out", "fsdp_dtensor", gated=False)


def test_a_truncated_source_leaves_nothing(golden, tmp_path):
    broken = tmp_path / "broken"
    distckpt.reshard(golden / "fsdp_dtensor", broken, rules=[Rename("**", "{0}")])
    file = max(broken.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(distckpt.CorruptCheckpointError):
        torch_dist.convert_fsdp_dtensor(broken, tmp_path / "out", "torch_dist")
    assert not (tmp_path / "out").exists()
