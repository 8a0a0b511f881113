"""The page that compares libraries task by task: its programs run, and its figures are counted."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.common_tasks import COMMON, TASKS, num_lines
from tests.support.reference import needs_torchs_hugging_face

PAGE = Path(__file__).parents[2] / "docs" / "compared.md"
NEEDS = {"accelerate": "accelerate", "Fabric": "lightning_fabric", "Orbax": "orbax"}


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(library, marks=needs_torchs_hugging_face if library == "DCP" else ())
        for library in COMMON
    ],
)
def test_the_programs_run(library, tmp_path, monkeypatch):
    if importlib.util.find_spec(NEEDS.get(library, "torch")) is None:
        pytest.skip(f"{library} is not installed")
    if library == "Orbax":
        # jax starts threads, and other tests fork this process.
        program = [sys.executable, "-W", "ignore", "-c", _ORBAX]
        environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
        done = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    else:
        monkeypatch.chdir(tmp_path)
        run_programs(library)


_ORBAX = "from tests.release.test_common_tasks import run_programs; run_programs('Orbax')"


def run_programs(library):
    """Run the programs of a library one after the other, in the current directory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    Path("hf").mkdir()
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "hf/model.safetensors",
    )
    names = {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    names["step"] = 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other libraries, such as that there is one process
        exec(COMMON[library], names)
        for task, programs in TASKS.items():
            if library in programs:
                exec(compile(programs[library], task, "exec"), names)
        if "guard" in names:
            names["guard"].__exit__(None, None, None)
            names["handle"].result()
        if "best" in names:
            names["manager"].close()
            names["best"].close()
        if "background" in names:
            names["background"].close()


def test_the_table_has_the_lines_of_the_programs():
    rows = re.findall(r"^\| (.+?) \|$", PAGE.read_text(), re.M)
    table = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert table[0] == ["lines for", *COMMON]
    expected = [
        [task, *(num_lines(programs.get(library)) for library in COMMON)]
        for task, programs in TASKS.items()
    ]
    assert table[1:] == expected
