"""The examples with training libraries: saved by 2 processes and resumed by 1, they go on as if
never stopped.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.example_programs import ROOT, run_preloaded

PAGE = (ROOT / "docs" / "examples.md").read_text()
LIBRARIES = {
    "accelerate_loop": "accelerate",
    "ddp_zero_redundancy": "torch",
    "fsdp2_tensor_parallel": "torch",
    "lightning_fabric": "lightning",
    "lightning_trainer": "lightning",
    "peft_adapter": "peft",
    "torchtitan_manager": "torchtitan",
    "transformers_trainer": "transformers",
}


def losses_of(
    name: str, work_dir: Path, num_ranks: int, until: int
) -> dict[int, tuple[float, ...]]:
    """Run an example; return the numbers of each step that it prints, the loss first."""
    output = run_preloaded(f"trainers/{name}.py", work_dir, num_ranks, ["--until", str(until)])
    lines = re.findall(r"^step (\d+): (.*)", output, re.M)
    return {int(step): tuple(map(float, re.findall(r"\d+\.\d+", rest))) for step, rest in lines}


def test_every_example_is_tested_and_on_the_page():
    assert {file.stem for file in (ROOT / "examples" / "trainers").glob("[!_]*.py")} == set(
        LIBRARIES
    )
    for name in LIBRARIES:
        assert f"](../examples/trainers/{name}.py)" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_another_number_of_processes_goes_on_with_the_same_losses(name, tmp_path):
    if importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{LIBRARIES[name]} is not installed")
    whole = losses_of(name, tmp_path / "whole", 2, 6)
    assert whole[5][0] < whole[1][0], "the model learns"
    before = losses_of(name, tmp_path / "stopped", 2, 3)
    after = losses_of(name, tmp_path / "stopped", 1, 6)
    assert set(after) >= {3, 4, 5}
    for step, expected in whole.items():
        assert (before if step < 3 else after)[step] == pytest.approx(expected, rel=1e-5)
    if name == "peft_adapter":
        exported = tmp_path / "stopped" / "exported"
        names = {
            name.split(".", 2)[2] for name in load_file(exported / "adapter_model.safetensors")
        }
        assert names == {f"{layer}.lora_{part}.weight" for layer in (0, 2) for part in "AB"}
        assert json.loads((exported / "adapter_config.json").read_text())["peft_type"] == "LORA"
