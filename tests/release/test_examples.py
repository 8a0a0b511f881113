"""The examples: they run as their docstrings say, and print what the page shows."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distckpt
from tests.support.example_programs import (
    ENVIRONMENT,
    ROOT,
    command_of,
    docstring_of,
    run_command,
    run_preloaded,
)
from tests.support.programs import run_program
from tests.support.reference import fsdp2_trains, has_routes

PAGE = (ROOT / "docs" / "examples.md").read_text()
# Run by the tests of what they show.
ELSEWHERE = {"object_storage.py", "from_dcp.py"}
EXAMPLES = sorted({file.name for file in (ROOT / "examples").glob("[!_]*.py")} - ELSEWHERE)
# Run by the very command, as test_cluster_examples.py runs torchrun: the start of a process takes
# longer than what most examples do.
BY_COMMAND = {"single_process.py"}


def num_lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def masked(output: str, work_dir: str) -> set[str]:
    """Return the lines of an output without its numbers, which are those of one run."""
    numbers = re.sub(r"\d[\d.e+-]*", "#", output.replace(work_dir, "WORK_DIR"))
    return {re.sub(r"\s+", " ", line) for line in numbers.strip().splitlines()}


def losses_in(pattern: str, output: str) -> list[float]:
    """Return the numbers that stand in the groups of a pattern."""
    found = re.search(pattern, output)
    assert found, output
    return [float(loss) for loss in found.groups()]


def check_resumed(output: str) -> None:
    """Check what zero1.py and moe.py print."""
    first, saved, last = losses_in(r"Loss: (\S+) at .*, (\S+) when saved, (\S+) at the end", output)
    assert last < saved < first, "the model did not learn, so equal losses would say little"
    assert losses_in(r"Loss after loading: (\S+) to (\S+)\.\n", output) == pytest.approx(
        [saved, last], rel=1e-5
    )


def equal_checkpoints(first: Path, second: Path) -> dict[str, torch.Tensor]:
    """Check that two checkpoints hold the same; return it."""
    one, other = distckpt.open(first).read_tensors(), distckpt.open(second).read_tensors()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    return one


def check_single_process(output: str, work_dir: Path) -> None:
    first, saved, last = losses_in(
        r"loss (\S+) at the start, (\S+) when saved, (\S+) at the end", output
    )
    assert last < saved < first
    assert losses_in(r"resumed: (\S+) to (\S+), equal", output) == [saved, last]


def check_tensor_parallel_reshard(output: str, work_dir: Path) -> None:
    tensors = distckpt.open(work_dir / "step_1").read_tensors()
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        "mlp.up.weight": (256, 64),
        "mlp.down.weight": (64, 256),
        "mlp.norm.weight": (64,),
    }


def check_train_reshard_resume(output: str, work_dir: Path) -> None:
    first, last = losses_in(r"loss (\d+\.\d+) to (\d+\.\d+)", output)
    assert last < 0.6 * first, "the model did not learn, so equal losses would say little"
    rows = re.findall(r"^  (\S.*?)\s+(\d)\s+(\d\.\d+)\s+(\d\.\d+)\s+.+ (?:ok|run)$", output, re.M)
    assert [(layout, int(num_ranks)) for layout, num_ranks, *_ in rows] == [
        ("TP2 x PP2 x DP1", 4),
        ("TP4 x PP1 x DP1", 4),
        ("TP1 x PP1 x DP2", 2),
        ("no process group", 1),
    ]
    losses = [[float(loss) for loss in row[2:]] for row in rows]
    assert all(resumed == pytest.approx(losses[0], rel=1e-5) for resumed in losses[1:])
    exported = load_file(work_dir / "exported" / "model.safetensors")
    assert not [name for name in exported if name.startswith("optimizer")]
    # Pipeline stages hold layers 0, 1 and 2, 3; the output projection of attention is divided along
    # its last axis.
    shards = [
        load_file(file) for file in sorted((work_dir / "step_10" / "tensors").glob("*.safetensors"))
    ]
    parts = [
        shard["decoder.layers.attention.out.weight"]
        for shard in shards
        if "embedding.tokens" in shard
    ]
    together = torch.cat(parts, dim=2)
    for number in (0, 1):
        assert torch.equal(
            exported[f"decoder.layers.{number}.attention.out.weight"], together[number]
        )


def check_fsdp2(output: str, work_dir: Path) -> None:
    losses = {
        size: json.loads((work_dir / f"losses_of_{size}.json").read_text()) for size in (4, 2, 1)
    }
    assert losses[4][-1] < losses[4][4] < losses[4][0], (
        "the model did not learn, so equal losses would say little"
    )
    assert losses[2] == pytest.approx(losses[4][4:], rel=1e-4)
    assert losses[1] == pytest.approx(losses[4][4:], rel=1e-4)
    saved = equal_checkpoints(work_dir / "saved_by_4", work_dir / "saved_by_1")
    moments = [key for key in saved if key.startswith("optimizer.state.exp_avg_sq.")]
    assert len(moments) == 13
    assert all(saved[key].count_nonzero() for key in moments)
    exported = load_file(work_dir / "exported" / "model.safetensors")
    assert torch.equal(exported["0.weight"], saved["3.weight"])


def check_zero1(output: str, work_dir: Path) -> None:
    check_resumed(output)
    first, second = work_dir / "tp2-dp2", work_dir / "pp2-dp2"
    saved = equal_checkpoints(first, second)
    assert (
        len(saved) == 4 * 13
    )  # those of the model; the parameters and both moments of the optimizer
    for key in [key for key in saved if not key.startswith("optimizer.")]:
        assert torch.equal(saved[key], saved[f"optimizer.state.param.{key}"])
        assert saved[f"optimizer.state.exp_avg_sq.{key}"].count_nonzero() > 0
    assert not distckpt.diff(
        first, second
    ).objects  # `seen` of both ranks, restored and saved again
    assert {
        f"seen/shard_{i}_2" for i in range(2)
    } <= distckpt.megatron.serialization.load_sharded_metadata(first).keys()


def check_moe(output: str, work_dir: Path) -> None:
    check_resumed(output)
    saved = equal_checkpoints(work_dir / "ep4", work_dir / "ep2-tp2")
    assert len(saved) == 3 * 14
    experts = saved["decoder.layers.mlp.experts.gate_up"]
    assert experts.shape == (4, 8, 128, 64)  # layers, experts, features of gate and up, width
    assert len({tuple(expert[0, :4].tolist()) for layer in experts for expert in layer}) == 32


def check_hugging_face(output: str, work_dir: Path) -> None:
    first, last = losses_in(
        r"loss (\S+) with the weights that were loaded, (\S+) after 20 steps", output
    )
    assert last < 0.6 * first
    divided, whole = losses_in(
        r"on other text: (\S+) with FSDP2, (\S+) with from_pretrained", output
    )
    assert divided == pytest.approx(whole, rel=1e-5)
    before, after = (
        load_file(work_dir / name / "model.safetensors") for name in ("pretrained", "exported")
    )
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: t.shape for name, t in before.items()
    }
    assert not any(torch.equal(after[name], before[name]) for name in before)


def check_async_training(output: str, work_dir: Path) -> None:
    first, _, second = output.partition("a process died")
    (resumed,) = losses_in(r"resumed from step (\d+)", second)
    # Two saves may be on their way at a time: that of step 20 was done before that of step 40
    # began.
    assert resumed in (20, 30, 40)
    losses = [
        dict(re.findall(r"^step +(\d+)   loss (\d+\.\d+)", part, re.M)) for part in (first, second)
    ]
    both = sorted(int(step) for step in losses[0].keys() & losses[1].keys())
    assert both == [step for step in (25, 30, 35, 40, 41) if step > resumed]
    assert [losses[0][str(step)] for step in both] == [losses[1][str(step)] for step in both]
    assert float(losses[1]["60"]) < 0.7 * float(losses[0]["5"]), "the model learns"
    assert first.count("ms stall") == 4
    kept = sorted(
        name for name in os.listdir(work_dir / "checkpoints") if name.startswith(("step", "."))
    )
    assert kept == ["step_00000050", "step_00000060"]


def check_elastic(output: str, work_dir: Path) -> None:
    first, middle, last = losses_in(r"loss (\S+) on 4, (\S+) on 3, (\S+) on 6", output)
    assert last < middle < first
    (off,) = losses_in(r"losses off by (\S+) at most", output)
    assert off < 1e-5
    saved = distckpt.open(work_dir / "end")
    assert saved.common_state["step"] == 12
    assert not any(tensor.isnan().any() for tensor in saved.read_tensors().values())


def check_rl_weight_sync(output: str, work_dir: Path) -> None:
    first, last = losses_in(r"loss (\S+) to (\S+)\n", output)
    assert last < 0.8 * first, "the model did not learn, so equal losses would say little"
    found = [json.loads((work_dir / f"engine at TP{tp}.json").read_text()) for tp in (1, 2)]
    assert [each["results"] for each in found] == [each["expected"] for each in found]
    losses = [[loss for _, loss, _ in each["results"]] for each in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][2] < losses[0][1] < losses[0][0]


def check_check_arrival(output: str, work_dir: Path) -> None:
    tables = [part.splitlines()[2:] for part in output.split("\n\n")]
    found = [[line.split()[2] for line in table if "differ " in line] for table in tables]
    assert found == [[], ["v_proj:"], ["norm:"], ["norm:"]]


def check_preemption(output: str, work_dir: Path) -> None:
    _, whole, first, second = re.split(r"^(?:uninterrupted|preempted):\n", output, flags=re.M)
    losses = [
        dict(re.findall(r"^step +(\d+)   loss (\d+\.\d+)", part, re.M))
        for part in (whole, first, second)
    ]
    assert (sorted(map(int, losses[1])), sorted(map(int, losses[2]))) == ([1, 10, 20], [23, 30, 40])
    for part in losses[1:]:
        assert [part[step] for step in part if step in losses[0]] == [
            losses[0][step] for step in part if step != "23"
        ]
    assert distckpt.CheckpointManager(work_dir / "preempted").steps() == [22, 30]


def check_lose_a_host(output: str, work_dir: Path) -> None:
    before, again = losses_in(
        r"after step 25, loss (\S+)\n(?:.*\n)*.*; step 25, loss (\S+)", output
    )
    assert before == again
    sources = dict(re.findall(r"rank (\d): step 20 was read: \d+ bytes from (.*)", output))
    assert sources == {"0": "this host", "1": "this host", "2": "other hosts", "3": "this host"}
    root = distckpt.CheckpointManager(work_dir / "root")
    assert root.latest() == 30
    assert distckpt.verify(root.location(30)).is_whole


CHECKS = {
    "async_training.py": check_async_training,
    "check_arrival.py": check_check_arrival,
    "elastic.py": check_elastic,
    "fsdp2.py": check_fsdp2,
    "hugging_face.py": check_hugging_face,
    "lose_a_host.py": check_lose_a_host,
    "moe.py": check_moe,
    "preemption.py": check_preemption,
    "rl_weight_sync.py": check_rl_weight_sync,
    "single_process.py": check_single_process,
    "tensor_parallel_reshard.py": check_tensor_parallel_reshard,
    "train_reshard_resume.py": check_train_reshard_resume,
    "zero1.py": check_zero1,
}


NEEDS = {
    "elastic.py": fsdp2_trains,
    "fsdp2.py": fsdp2_trains,
    "hugging_face.py": fsdp2_trains,
    "rl_weight_sync.py": has_routes,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in EXAMPLES]
)
def test_an_example_prints_what_its_page_shows(name, tmp_path):
    work_dir = tmp_path / "work"
    output = (run_command if name in BY_COMMAND else run_preloaded)(name, work_dir)
    form = (
        rf"^## {re.escape(name)}\n\n[^`#]*(?:`[^`\n]+`[^`#]*)*"
        r"```sh\n(.*?)\n```\n\n```text\n(.*?)^```"
    )
    ((command, shown),) = re.findall(form, PAGE, re.M | re.S)
    assert command == command_of(name)
    documented_dir = shlex.split(command)[-1]
    assert masked(output, str(work_dir)) == masked(shown, documented_dir), output
    CHECKS[name](output, work_dir)


@pytest.mark.parametrize("name", sorted({*EXAMPLES, *ELSEWHERE}))
def test_an_example_is_short_and_says_what_it_shows(name):
    assert num_lines_of(ROOT / "examples" / name) < 150
    assert docstring_of(name).splitlines()[0].endswith(".")
    assert f" examples/{name}" in docstring_of(name)
    assert f"](../examples/{name})" in PAGE


def test_what_examples_share_is_short():
    assert [
        file.name for file in (ROOT / "examples").glob("_*.py") if num_lines_of(file) >= 400
    ] == []


def test_a_difference_is_reported_by_the_main_example():
    code = (
        "from _tiny_training import report_layouts\n"
        "resumed = {('right', 1): [3.0, 2.0], ('off', 2): [3.0, 2.001], ('broken', 4): [3.0, "
        "float('nan')]}\nprint(report_layouts([3.0, 2.0], resumed))\n"
    )
    output = run_program(["-c", code], ENVIRONMENT).stdout
    assert re.findall(r"^  (right|off|broken) .* (ok|WRONG)$", output, re.M) == [
        ("right", "ok"),
        ("off", "WRONG"),
        ("broken", "WRONG"),
    ], output
    assert output.endswith("NOT all agree within 1e-05.\nFalse\n")


def test_a_difference_is_reported_by_those_that_share_a_report(tmp_path):
    code = (
        "import sys, torch, torch.distributed as dist, distckpt\n"
        "from distckpt import ShardedTensor\n"
        "from _tiny_training import report\n"
        "paths = [sys.argv[1] + '/a', sys.argv[1] + '/b']\n"
        "for path, value in zip(paths, (1.0, 1.5)):\n"
        "    tensors = {'w': torch.ones(2), 'v': torch.full((3,), value)}\n"
        "    distckpt.save({k: ShardedTensor.from_rank_offsets(k, t) for k, t in "
        "tensors.items()}, path)\ncases = [(paths, 2.0), (paths[:1] * 2, 2.001), (paths[:1] * 2, "
        "float('nan')), (paths[:1] * 2, 2.0)]\nfor compared, last in cases:\n    "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n    "
        "try:\n        report(compared, [4.0, 3.0, 2.0], [3.0, last])\n    except SystemExit as "
        "error:\n        print('exit', error.code)\n"
    )
    process = run_program(["-c", code, str(tmp_path)], ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    verdicts = re.findall(
        r"5 values, (.*)\.$|^Training (.*) with the same loss|^(exit 1)$", process.stdout, re.M
    )
    assert ["".join(verdict) for verdict in verdicts] == [
        *("NOT equal: ['v']", "continues", "exit 1"),
        *("all equal, bit by bit", "does NOT continue", "exit 1"),
        *("all equal, bit by bit", "does NOT continue", "exit 1"),
        *("all equal, bit by bit", "continues"),
    ], process.stdout
