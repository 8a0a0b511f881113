"""The examples of work in parts: programs run, scripts are what shells and schedulers take."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

import distckpt
from tests.support.example_programs import ROOT, docstring_of, run_command

FOLDER = ROOT / "examples" / "parts"
PAGE = (ROOT / "docs" / "offline-parts.md").read_text()


def test_every_example_is_on_the_page():
    files = [file for file in FOLDER.iterdir() if file.is_file()]
    assert all(f"../examples/parts/{file.name}" in PAGE for file in files)
    for file in FOLDER.glob("*.py"):
        assert f"python examples/parts/{file.name} --work-dir" in docstring_of(file)


@pytest.mark.parametrize(
    ("name", "library"),
    [("in_processes", "concurrent"), ("with_dask", "distributed"), ("with_ray", "ray")],
)
def test_program(name, library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert "8 pieces were written now" in run_command(f"parts/{name}.py", tmp_path)
    assert distckpt.diff(tmp_path / "step_1", tmp_path / "export").is_same


def test_slurm_script():
    script = FOLDER / "slurm_array.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    line = next(line for line in script.read_text().splitlines() if line.startswith("srun"))
    assert "--part auto" in line
