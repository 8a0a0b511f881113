"""The FSDP2 example, run the way its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distckpt

REPOSITORY = Path(__file__).parents[2]


def test_fsdp2_saves_on_four_ranks_resumes_on_two_and_one_and_exports(tmp_path):
    search_path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "fsdp2.py"), "--work-dir", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    for size in (4, 2, 1):
        assert f"On {size}: 40 tensors, all equal;" in done.stdout, done.stdout
    assert "Exported 13 tensors for Hugging Face, all equal." in done.stdout, done.stdout

    losses = {size: json.loads((tmp_path / f"losses_of_{size}.json").read_text()) for size in (4, 2, 1)}
    assert losses[4][-1] < losses[4][4] < losses[4][0], "the model did not learn, so equal losses would say little"
    assert losses[2] == pytest.approx(losses[4][4:], rel=1e-4)
    assert losses[1] == pytest.approx(losses[4][4:], rel=1e-4)

    by_four, by_one = (distckpt.load_plain_tensors(tmp_path / f"saved_by_{size}") for size in (4, 1))
    moments = [key for key in by_four if key.startswith("optimizer.state.exp_avg_sq.")]
    assert len(moments) == 13
    assert all(torch.equal(by_one[key], by_four[key]) and by_four[key].count_nonzero() for key in moments)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["0.weight"], by_four["model.3.weight"])
