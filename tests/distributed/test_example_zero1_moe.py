"""The examples of a distributed optimizer and of a mixture of experts, run the way their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distckpt

REPOSITORY = Path(__file__).parents[2]
PATHS = os.pathsep.join(filter(None, (str(REPOSITORY), str(REPOSITORY / "examples"), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def run_example(name: str, work_dir: Path) -> str:
    """Run an example on four ranks; return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    process = subprocess.Popen(
        [*launcher, str(REPOSITORY / "examples" / name), "--work-dir", str(work_dir)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        process.terminate()  # after a timeout; the launcher ends its ranks
        process.wait()
    assert process.returncode == 0, output
    return output


def check_output(output: str, num_tensors: int) -> None:
    assert f"Loaded and saved again: {num_tensors} tensors, " in output
    assert "all equal, bit by bit" in output
    first, saved, last = map(
        float, re.search(r"Loss: (\S+) at .*, (\S+) when saved, (\S+) at the end", output).groups()
    )
    assert last < saved < first, "the model did not learn, so equal losses would say little"
    resumed = re.search(r"Loss after loading: (\S+) to (\S+)\.\n", output)
    assert [float(loss) for loss in resumed.groups()] == pytest.approx([saved, last], rel=1e-5)
    assert "Training continues with the same loss" in output


def test_flat_bucketed_optimizer_shards_load_under_another_layout(tmp_path):
    output = run_example("zero1.py", tmp_path)
    # 13 of the model, and the same for the parameters, and both moments, of the optimizer.
    check_output(output, num_tensors=4 * 13)
    first, second = (distckpt.load_plain_tensors(tmp_path / name) for name in ("tp2-dp2", "tp1-dp4"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for key in [key for key in first if not key.startswith("optimizer.")]:
        assert torch.equal(first[key], first[f"optimizer.param.{key}"])
        assert first[f"optimizer.exp_avg_sq.{key}"].count_nonzero() > 0


def test_experts_load_under_another_layout(tmp_path):
    output = run_example("moe.py", tmp_path)
    check_output(output, num_tensors=3 * 14)
    first, second = (distckpt.load_plain_tensors(tmp_path / name) for name in ("ep4", "ep2-tp2"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    experts = first["decoder.layers.mlp.experts.gate_up"]
    assert experts.shape == (4, 8, 128, 64)  # layers, experts, features of gate and up, width
    assert len({tuple(expert[0, :4].tolist()) for layer in experts for expert in layer}) == 32


def test_a_difference_is_reported(tmp_path):
    code = (
        "import sys, torch, torch.distributed as dist, distckpt\n"
        "from distckpt import ShardedTensor\n"
        "from _tiny_training import report\n"
        "paths = [sys.argv[1] + '/a', sys.argv[1] + '/b']\n"
        "for path, value in zip(paths, (1.0, 1.5)):\n"
        "    tensors = {'w': torch.ones(2), 'v': torch.full((3,), value)}\n"
        "    distckpt.save({k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}, path)\n"
        "cases = [(paths, 2.0), (paths[:1] * 2, 2.001), (paths[:1] * 2, float('nan')), (paths[:1] * 2, 2.0)]\n"
        "for compared, last in cases:\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "    try:\n"
        "        report(compared, [4.0, 3.0, 2.0], [3.0, last])\n"
        "    except SystemExit as error:\n"
        "        print('exit', error.code)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=100)
    assert process.returncode == 0, process.stderr
    verdicts = re.findall(r"5 values, (.*)\.$|^Training (.*) with the same loss|^(exit 1)$", process.stdout, re.M)
    assert ["".join(verdict) for verdict in verdicts] == [
        *("NOT equal: ['v']", "continues", "exit 1"),
        *("all equal, bit by bit", "does NOT continue", "exit 1"),
        *("all equal, bit by bit", "does NOT continue", "exit 1"),
        *("all equal, bit by bit", "continues"),
    ], process.stdout
