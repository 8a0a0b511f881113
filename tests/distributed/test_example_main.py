"""The example that trains, saves, and resumes in other layouts, run the way its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "train_reshard_resume.py"


def run_example(work_dir: Path) -> tuple[int, str]:
    """Run the example on four ranks; return its exit code and what it printed."""
    search_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    process = subprocess.Popen(
        [*launcher, str(EXAMPLE), "--work-dir", str(work_dir)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.terminate()  # after a timeout; the launcher ends its ranks
        process.wait()
    return process.returncode, output


def check_export(work_dir: Path) -> None:
    """Compare the exported file with the shards, both read by the reference library."""
    exported = load_file(work_dir / "exported" / "model.safetensors")
    assert not [name for name in exported if name.startswith("optimizer")]
    # Pipeline stages hold layers 0, 1 and 2, 3; the output projection of attention is divided along its last axis.
    shards = [load_file(file) for file in sorted((work_dir / "step_20" / "tensors").glob("*.safetensors"))]
    parts = [shard["decoder.layers.attention.out.weight"] for shard in shards if "embedding.tokens" in shard]
    together = torch.cat(parts, dim=2)
    for number in (0, 1):
        assert torch.equal(exported[f"decoder.layers.{number}.attention.out.weight"], together[number])


def test_losses_after_resuming_in_other_layouts_are_those_of_the_uninterrupted_run(tmp_path):
    exit_code, output = run_example(tmp_path)
    assert exit_code == 0, output

    before = re.search(r"loss (\d+\.\d+) to (\d+\.\d+)", output)
    assert before, output
    assert float(before[2]) < 0.6 * float(before[1]), "the model did not learn, so equal losses would say little"

    rows = re.findall(r"^  (\S.*?)\s+(\d)\s+(\d\.\d+)\s+(\d\.\d+)\s+(.+) (ok|WRONG|run)$", output, re.M)
    assert [(layout, int(num_ranks)) for layout, num_ranks, *_ in rows] == [
        ("TP2 x PP2 x DP1", 4),
        ("TP4 x PP1 x DP1", 4),
        ("TP1 x PP1 x DP2", 2),
        ("no process group", 1),
    ], output
    uninterrupted, *resumed = rows
    for _, _, first, last, _, verdict in resumed:
        assert float(first) == pytest.approx(float(uninterrupted[2]), rel=1e-5)
        assert float(last) == pytest.approx(float(uninterrupted[3]), rel=1e-5)
        assert verdict == "ok"
    assert "All agree within 1e-05." in output, output
    check_export(tmp_path)
    assert (tmp_path / "step_20" / "metadata.json").is_file()


def test_a_difference_is_reported():
    code = (
        "from train_reshard_resume import SAVE_AT, report\n"
        "expected = [4.0] * SAVE_AT + [3.0, 2.0]\n"
        "resumed = {('right', 1): [3.0, 2.0], ('off', 2): [3.0, 2.001], ('broken', 4): [3.0, float('nan')]}\n"
        "print(report(expected, resumed))\n"
    )
    search_path = os.pathsep.join((str(REPOSITORY), str(EXAMPLE.parent)))
    environment = {**os.environ, "PYTHONPATH": search_path}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.findall(r"^  (right|off|broken) .* (ok|WRONG)$", output, re.M) == [
        ("right", "ok"),
        ("off", "WRONG"),
        ("broken", "WRONG"),
    ], output
    assert output.endswith("NOT all agree within 1e-05.\nFalse\n")
