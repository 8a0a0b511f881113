"""What is built of this repository, and that it works where nothing else of the repository is."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import distckpt

ROOT = Path(__file__).parents[1]
SOURCES = ["CHANGELOG.md", "LICENSE", "README.md", "distckpt", "docs", "examples", "pyproject.toml", "tests"]


def run(*command: object, cwd: Path) -> str:
    """Run a program to its end, away from this repository; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    texts = [str(part) for part in command]
    done = subprocess.run(texts, cwd=cwd, env=clean, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a source distribution, and with the wheel that was built of it."""
    folder = tmp_path_factory.mktemp("packaging")
    copy, output = folder / "copy", folder / "dist"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
        else:
            shutil.copy(source, copy / name)
    # What lies about where people work must not get in.
    (copy / "distckpt/__pycache__").mkdir(exist_ok=True)
    (copy / "distckpt/__pycache__/core.pyc").touch()
    (copy / "tests/__pycache__").mkdir(exist_ok=True)
    (copy / "tests/__pycache__/test_core.pyc").touch()
    for rubbish in (".venv/pyvenv.cfg", ".mypy_cache/x", "build/site/index.html", "checkpoints/metadata.json"):
        (copy / rubbish).parent.mkdir(parents=True)
        (copy / rubbish).touch()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, copy, cwd=folder)
    return output


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """Return the interpreter of an environment that has the wheel, and the dependencies that this environment has."""
    folder = built.parent / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-warn-script-location", wheel, cwd=built)
    (own,) = folder.glob("lib/python*/site-packages")
    # Not as a .pth file, which would bring the editable distckpt of this environment along.
    for path in map(Path, sys.path):
        for part in path.glob("*") if path.name == "site-packages" else []:
            if not part.name.startswith(("distckpt", "__editable__")) and part.suffix != ".pth":
                target = own / part.name
                if not target.exists():
                    target.symlink_to(part)
    return python


def files_in(archive: Path) -> set[str]:
    """Return the names of the files in an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as source:
        return {member.name for member in source.getmembers() if member.isfile()}


def sources(*folders: str) -> set[str]:
    """Return the files below folders of the repository, without what Python puts beside them."""
    files = {file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()}
    return {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}


def test_a_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    about = f"distckpt-{distckpt.__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert files_in(wheel) == sources("distckpt") | {f"{about}/{name}" for name in names}
    assert "distckpt/py.typed" in files_in(wheel)


def test_a_source_distribution_holds_all_sources_and_nothing_else(built):
    (archive,) = built.glob("*.tar.gz")
    top = f"distckpt-{distckpt.__version__}"
    files = sources("distckpt", "docs", "examples", "tests")
    files |= {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
    assert files_in(archive) == {f"{top}/{file}" for file in files}
    assert archive.stat().st_size < 3_000_000


def test_the_installed_package_saves_and_loads(installed, tmp_path):
    program = """
import distckpt, torch
assert "venv" in distckpt.__file__, distckpt.__file__
distckpt.save({"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 3}, "checkpoint")
state = {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
state = distckpt.load(state, "checkpoint")
print(state["step"], state["w"].tolist(), distckpt.__version__)
"""
    assert run(installed, "-c", program, cwd=tmp_path) == f"3 [0.0, 1.0, 2.0, 3.0] {distckpt.__version__}\n"
    command = installed.with_name("distckpt")
    assert "1 tensors, 4 elements" in run(command, "inspect", "checkpoint", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).strip() == f"distckpt {distckpt.__version__}"


PROGRAM = """
import torch
import distckpt
from distckpt import ShardedTensor
from distckpt.modules import sharded_state_dict

shard: ShardedTensor = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 1))
report: distckpt.SaveReport | None = None
loaded = distckpt.load({"w": shard, **sharded_state_dict(torch.nn.Linear(2, 2))}, "checkpoint")
reveal_type(distckpt.CheckpointManager("checkpoints").latest())
distckpt.sav({}, "checkpoint")
distckpt.save({})
"""


def test_type_checkers_know_the_installed_package(installed, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed), "program.py"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPY"))}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200, check=False)
    findings = re.findall(r"^program.py:(\d+): (?:error|note): (.*)$", done.stdout, re.M)
    assert [(int(line), text.split("  [")[0]) for line, text in findings] == [
        (10, 'Revealed type is "int | None"'),
        (11, 'Module has no attribute "sav"; maybe "save"?'),
        (12, 'Missing positional argument "checkpoint_dir" in call to "save"'),
    ], done.stdout


def test_the_version_is_the_same_everywhere():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert distckpt.__version__ == declared == importlib.metadata.version("distckpt")
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    # Until the first release, all changes stand under Unreleased.
    assert released[:1] in ([], [declared])
