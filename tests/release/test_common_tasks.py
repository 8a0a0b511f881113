"""The page that compares libraries task by task: its programs run, and its figures are counted."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.common_tasks import COMMON, TASKS, num_lines

PAGE = Path(__file__).parents[2] / "docs" / "compared.md"
NEEDS = {"accelerate": "accelerate", "Fabric": "lightning_fabric"}


@pytest.mark.parametrize("library", COMMON)
def test_the_programs_run(library, tmp_path, monkeypatch):
    if importlib.util.find_spec(NEEDS.get(library, "torch")) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
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
            names["manager"].close()
            names["best"].close()
            names["handle"].result()


def test_the_table_has_the_lines_of_the_programs():
    rows = re.findall(r"^\| (.+?) \|$", PAGE.read_text(), re.M)
    table = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert table[0] == ["lines for", *COMMON]
    expected = [
        [task, *(num_lines(programs.get(library)) for library in COMMON)]
        for task, programs in TASKS.items()
    ]
    assert table[1:] == expected
