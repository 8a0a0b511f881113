"""`distckpt plan`: figures of small directories that can be counted by hand, and layouts.

`tests/distributed/test_planned_costs.py` compares it with real ranks.
"""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

import distckpt
from tests.support.cli_command import call, call_error, call_json, call_usage_error

LAYER = {
    "self_attn.q_proj.weight": (8, 4),
    "self_attn.o_proj.weight": (4, 8),
    "mlp.router.weight": (2, 4),
    "mlp.experts.0.up_proj.weight": (6, 4),
    "mlp.experts.1.up_proj.weight": (6, 4),
    "norm.weight": (4,),
}
SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    **{
        f"model.layers.{layer}.{name}": shape for layer in range(4) for name, shape in LAYER.items()
    },
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
ENDS = 10 * 4
EXPERT = 6 * 4
SPLIT = 8 * 4 + 4 * 8
WHOLE = 2 * 4 + 4
TOTAL = 2 * ENDS + 4 + 4 * (SPLIT + WHOLE + 2 * EXPERT)


@pytest.fixture
def directory(tmp_path):
    """A model directory, of one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {key: torch.zeros(shape, dtype=torch.uint8) for key, shape in SHAPES.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def read_by_nodes(facts):
    return [node["read_bytes"] for node in facts["load_share_reads_off"]["nodes"]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("tp=1", [TOTAL] * 4),
        ("tp=2", [(TOTAL - 4 - 4 * WHOLE) // 2 + 4 + 4 * WHOLE] * 4),
        ("ep=2", [TOTAL - 4 * EXPERT] * 4),
        ("pp=2,ep=2", [TOTAL // 2 - 2 * EXPERT - 2] * 2 + [TOTAL // 2 - 2 * EXPERT + 2] * 2),
        # The first rank has 3 of 10 rows.
        ("fsdp", None),
    ],
)
def test_each_rank_holds_its_part(capsys, directory, layout, expected):
    words = ("plan", directory, "--ranks", 4, "--nodes", 4, "--layout", layout)
    facts = call_json(capsys, *words)
    held = facts["load_share_reads_off"]["largest_rank"]["tensor_bytes"]
    if expected is None:
        chunks = [torch.zeros(shape).chunk(4)[0].numel() for shape in SHAPES.values()]
        assert held == sum(chunks)
        return
    assert held == max(expected)
    if "tp=2" not in layout:
        assert read_by_nodes(facts) == expected
    assert facts["save"]["bytes"] > TOTAL
    shared = facts["load_share_reads_on"]
    assert shared["read_bytes"] == TOTAL
    assert facts["num_tensors"] == len(SHAPES)


def test_ranks_of_a_node_share_the_cache_of_a_file_system(capsys, directory):
    alone = call_json(capsys, "plan", directory, "--ranks", 4, "--nodes", 2, "--layout", "tp=1")
    load = alone["load_share_reads_off"]
    assert load["read_bytes"] == 4 * TOTAL
    assert load["storage_bytes"] == 2 * TOTAL
    assert load["largest_node"] == {"storage_bytes": TOTAL, "read_bytes": 2 * TOTAL, "requests": 2}


def test_tied_embeddings_are_on_the_first_and_the_last_stage(capsys, tmp_path):
    tensors = {
        key: torch.zeros(shape, dtype=torch.uint8)
        for key, shape in SHAPES.items()
        if key != "lm_head.weight"
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    facts = call_json(capsys, "plan", tmp_path, "--ranks", 2, "--nodes", 2, "--layout", "pp=2")
    assert sum(read_by_nodes(facts)) == TOTAL
    assert facts["load_share_reads_on"]["read_bytes"] == TOTAL - ENDS


def test_time_is_that_of_bytes_or_of_requests(capsys, directory):
    words = ("plan", directory, "--ranks", 1, "--storage")
    facts = call_json(capsys, *words, "100B/s,1us")
    assert facts["load_share_reads_off"]["seconds"] == TOTAL / 100
    assert facts["save"]["seconds"] == facts["save"]["bytes"] / 100
    slow = call_json(capsys, *words, "1GB/s,1s")["load_share_reads_off"]
    assert 0 < slow["seconds"] <= slow["requests"]
    assert "seconds" not in call_json(capsys, *words[:-1])["save"]


def test_quantized_tensors_are_held_as_values(capsys, tmp_path):
    tensors = {
        "model.layers.0.up_proj.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn),
        "model.layers.0.up_proj.weight_scale_inv": torch.ones(2, 1),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = call_json(capsys, "plan", tmp_path, "--ranks", 2, "--layout", "tp=1")
    load = facts["load_share_reads_off"]
    assert facts["num_tensors"] == 1
    assert load["largest_rank"]["tensor_bytes"] == 256 * 128 * 2
    assert load["largest_rank"]["read_bytes"] == 256 * 128 + 2 * 4
    assert load["storage_bytes"] == 256 * 128 + 2 * 4


def test_quantized_tensors_are_shared_out_by_their_stored_bytes(capsys, tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(4096, 1024, dtype=torch.bfloat16),
        "model.layers.0.up_proj.weight": torch.zeros(8192, 1024).to(torch.float8_e4m3fn),
        "model.layers.0.up_proj.weight_scale_inv": torch.ones(64, 8),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", tmp_path, "--ranks", 4, "--nodes", 4, "--layout", "tp=1")
    load = call_json(capsys, *words)["load_share_reads_on"]
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert load["storage_bytes"] == total
    assert load["largest_node"]["storage_bytes"] < 0.26 * total


def test_stacked_experts_of_transformers_are_divided(capsys, tmp_path):
    """Gate and up projection are halves of one axis, of which each rank has parts."""
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 12, 8, dtype=torch.uint8),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8, 6, dtype=torch.uint8),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    total = 4 * 12 * 8 + 4 * 8 * 6
    for layout in ("ep=4", "tp=2", "fsdp,ep=2"):
        facts = call_json(capsys, "plan", tmp_path, "--ranks", 4, "--layout", layout)
        parts = 2 if layout == "tp=2" else 4
        assert facts["load_share_reads_off"]["largest_rank"]["tensor_bytes"] == total // parts
        assert facts["load_share_reads_on"]["read_bytes"] == total
        assert facts["whole"] == []


def test_a_family_gives_the_tensors_in_memory(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=16,
    )
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    words = ("plan", tmp_path / "model", "--ranks", 4, "--layout", "ep=4")
    in_memory = call_json(capsys, *words, "--family", "auto")
    assert in_memory["num_tensors"] == len(model.state_dict())
    stored = call_json(capsys, *words)
    assert stored["num_tensors"] > in_memory["num_tensors"]
    for name in ("load_share_reads_off", "load_share_reads_on"):
        assert stored[name]["read_bytes"] == in_memory[name]["read_bytes"]
        assert stored[name]["largest_rank"] == in_memory[name]["largest_rank"]


def test_table_names_what_each_rank_has_whole(capsys, directory):
    printed = call(capsys, "plan", directory, "--ranks", 8, "--nodes", 2, "--layout", "tp=2,pp=2")
    assert "8 ranks on 2 nodes: tp=2, pp=2, 2 replicas" in printed
    assert "'model.layers.{0..3}.mlp.router.weight' (4 keys)" in printed
    assert "time" not in printed


def test_checkpoints_of_ranks_are_planned_for_others(capsys, directory, tmp_path):
    distckpt.reshard(directory, tmp_path / "checkpoint", num_ranks=3)
    words = ("plan", tmp_path / "checkpoint", "--ranks", 5)
    replicas = call_json(capsys, *words, "--layout", "tp=1")
    # Every rank reads the common state, whose size is not known here.
    common = replicas["load_share_reads_off"]["read_bytes"] - 5 * TOTAL
    assert common > 0
    assert common % 5 == 0
    facts = call_json(capsys, *words)
    assert facts["load_share_reads_off"]["largest_rank"]["tensor_bytes"] == sum(
        torch.zeros(shape).chunk(5)[0].numel() for shape in SHAPES.values()
    )


@pytest.mark.parametrize(
    ("layout", "way_out"),
    [
        ("tp=3", "tp=3 does not divide the 8 ranks of a pipeline stage: use one of 1, 2, 4, 8"),
        ("pp=16", "pp=16 does not divide the 8 ranks: use one of 1, 2, 4, 8"),
        ("tp=2,fsdp=3", "fsdp=3 does not divide the 4 ranks that pp and tp leave: use one of 1, 2"),
        ("fsdp=2,ep=4", "ep=4 does not divide the 2 ranks of tp and fsdp: use one of 1, 2"),
    ],
)
def test_layouts_that_divide_nothing_are_refused(capsys, directory, layout, way_out):
    assert way_out in call_error(capsys, "plan", directory, "--ranks", 8, "--layout", layout)


def test_ranks_fill_nodes(capsys, directory):
    error = call_error(capsys, "plan", directory, "--ranks", 8, "--nodes", 3)
    assert "such as 9 ranks" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--layout", "ddp"),
        ("--layout", "tp=0"),
        ("--layout", "tp"),
        ("--layout", "tp=2,tp=2"),
        ("--storage", "2GB"),
        ("--storage", "2GB/s"),
        ("--storage", "0B/s,1ms"),
        ("--storage", "2GB/s,1"),
    ],
)
def test_words_that_say_nothing_are_refused(capsys, directory, option, value):
    assert "write" in call_usage_error(capsys, "plan", directory, "--ranks", 8, option, value)
