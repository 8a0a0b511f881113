"""The kernel works without its wings: they are deleted from a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distckpt
from tests.support.rooms import KERNEL, WINGS

PACKAGE = Path(distckpt.__file__).parent

VERBS = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import distckpt

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
distckpt.save({"model": model, "optimizer": optimizer, "step": 7}, "checkpoint")

with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = distckpt.load({"model": model, "optimizer": optimizer, "step": 0}, "checkpoint")
assert state["step"] == 7
assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())

distckpt.consolidate("checkpoint", "exported")
files = [load_file(file) for file in Path("exported").glob("*.safetensors")]
exported = {name: tensor for file in files for name, tensor in file.items()}
assert exported.keys() == saved.keys()
assert all(torch.equal(exported[name], saved[name]) for name in saved)

assert not distckpt.verify("checkpoint").problems
print(Path(distckpt.__file__).parent, *(n for n in sys.modules if n.startswith("distckpt.")))
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A copy of the package without its wings."""
    copy = tmp_path_factory.mktemp("kernel") / "distckpt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for wing in WINGS:
        shutil.rmtree(copy / wing)
    return copy


def test_the_verbs_work_without_wings(kernel, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(kernel.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", VERBS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    package, *modules = done.stdout.split()
    assert Path(package) == kernel
    assert {name.split(".")[1] for name in modules} <= set(KERNEL)


def test_every_folder_is_of_the_kernel_or_a_wing():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {*KERNEL, *WINGS}
