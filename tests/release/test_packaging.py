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
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import distckpt
from tests.support.made_once import made_once

ROOT = Path(__file__).parents[2]
SOURCES = [
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "benchmarks",
    "distckpt",
    "docs",
    "examples",
    "pyproject.toml",
    "tests",
]


def ended(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, away from this repository."""
    foreign = ("PYTHON", "PYTEST", "MYPY", "PIP_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    texts = [str(part) for part in command]
    return subprocess.run(
        texts, cwd=cwd, env=clean, capture_output=True, text=True, timeout=200, check=False
    )


def run(*command: object, cwd: Path) -> str:
    """Run a program that succeeds; return what it printed."""
    done = ended(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_pip(python: Path, *arguments: object) -> str:
    """Let the pip of this environment work on another one, without a network."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=python.parent)


def with_requirements(requirements: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions of this environment that pip would install for these
    requirements.
    """
    found = {}
    waiting = [
        (text, "") for text in requirements
    ]  # with the extra of the distribution that has the requirement
    seen = set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if (text, extra) in seen or (
            requirement.marker and not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        seen.add((text, extra))
        found[requirement.name] = distribution = importlib.metadata.distribution(requirement.name)
        waiting += [
            (more, wanted)
            for more in distribution.requires or []
            for wanted in ("", *requirement.extras)
        ]
    return found


def link(python: Path, requirements: Iterable[str]) -> None:
    """Put what pip would install for these requirements into an environment, as links to what this
    one has.
    """
    (site_packages,) = python.parents[1].glob("lib/python*/site-packages")
    for distribution in with_requirements(requirements).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            target = site_packages / top
            if not target.exists():
                target.symlink_to(distribution.locate_file(top))


def install(folder: Path, what: Path, *build_requirements: str) -> Path:
    """Make an environment that has what pip installs, and nothing but its requirements; return the
    interpreter.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    link(python, build_requirements)
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-warn-script-location",
    ]
    run_pip(python, "install", *options, what)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(name="distckpt", path=[str(site_packages)])
    link(python, own.requires or [])
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a source distribution, and with the wheel that was built of it."""
    return made_once(tmp_path_factory, "packaging", build) / "dist"


def build(folder: Path) -> None:
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
    for rubbish in (
        ".venv/pyvenv.cfg",
        ".mypy_cache/x",
        "build/site/index.html",
        "checkpoints/metadata.json",
    ):
        (copy / rubbish).parent.mkdir(parents=True)
        (copy / rubbish).touch()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, copy, cwd=folder)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment that has the wheel and what the wheel declares that
    it needs.
    """
    (wheel,) = built.glob("*.whl")
    return (
        made_once(tmp_path_factory, "venv", lambda folder: install(folder, wheel))
        / "bin"
        / "python"
    )


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
    files = sources("benchmarks", "distckpt", "docs", "examples", "tests")
    files |= {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
    assert files_in(archive) == {f"{top}/{file}" for file in files}
    assert archive.stat().st_size < 3_000_000


def readme_in(project: Path, folder: Path) -> str:
    """Build a wheel of a project; return the README in it."""
    run(sys.executable, "-m", "build", "-w", "--no-isolation", "-o", folder, project, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return readme_of(wheel)


def readme_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        headers, _, text = archive.read(about).decode().partition("\n\n")
    assert "\nDescription-Content-Type: text/markdown" in headers
    return text


def test_the_readme_of_the_package_leads_to_the_repository_once_its_address_is_known(
    built, tmp_path
):
    links = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
    written = (ROOT / "README.md").read_text()
    assert len(links.findall(written)) > 20
    settings = (ROOT / "pyproject.toml").read_text()
    has_address = "\n[project.urls]\n" in settings
    (wheel,) = built.glob("*.whl")
    assert (readme_of(wheel).rstrip() == written.rstrip()) != has_address
    project = shutil.copytree(built.parent / "copy", tmp_path / "project")
    if not has_address:
        urls = '\n[project.urls]\nRepository = "https://example.org/us/distckpt/"\n'
        (project / "pyproject.toml").write_text(settings + urls)
    made = readme_in(project, tmp_path)
    assert links.findall(made) == []
    for link in links.findall(written):
        view = "raw" if link.endswith((".svg", ".png")) else "blob"
        assert f"/distckpt/{view}/v{distckpt.__version__}/{link})" in made
    assert re.sub(r"https://\S+/distckpt/(raw|blob)/v[^/]+/", "", made).rstrip() == written.rstrip()


PROGRAM_THAT_SAVES = """
import distckpt, torch
assert "venv" in distckpt.__file__, distckpt.__file__
distckpt.save(
    {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 3},
    "checkpoint",
)
state = {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
state = distckpt.load(state, "checkpoint")
print(state["step"], state["w"].tolist(), distckpt.__version__)
"""


def test_the_installed_package_saves_and_loads(installed, tmp_path):
    assert (
        run(installed, "-c", PROGRAM_THAT_SAVES, cwd=tmp_path)
        == f"3 [0.0, 1.0, 2.0, 3.0] {distckpt.__version__}\n"
    )


def test_what_the_wheel_declares_is_all_that_its_modules_need(installed, built, tmp_path):
    assert "No broken requirements" in run_pip(installed, "check")
    program = """
import importlib, importlib.util, sys
assert not any(
    map(importlib.util.find_spec, ("shtab", "obstore", "psutil", "pytest"))
), "more than it declares"
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    (wheel,) = built.glob("*.whl")
    paths = [file.removesuffix(".py") for file in files_in(wheel) if file.endswith(".py")]
    modules = {path.removesuffix("/__init__").replace("/", ".") for path in paths} - {
        "distckpt.__main__"
    }
    # Each needs the library of its trainer.
    modules = {name for name in modules if not name.startswith("distckpt.integrations.")}
    assert {"distckpt", "distckpt.cli._bench", "distckpt.megatron.interop"} <= modules
    run(installed, "-c", program, *sorted(modules), cwd=tmp_path)


def test_the_command_line_needs_no_extra(installed, tmp_path):
    shard = distckpt.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    distckpt.save({"w": shard}, tmp_path / "checkpoint")
    command = installed.with_name("distckpt")
    assert "1 tensor, 4 elements" in run(command, "inspect", "checkpoint", cwd=tmp_path)
    for arguments, extra in (
        (["completion", "bash"], "cli"),
        (["inspect", "s3://bucket/checkpoint"], "s3"),
    ):
        done = ended(command, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"pip install 'distckpt[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_pip_installs_the_sources_as_the_wheel(built, tmp_path, kind):
    (archive,) = built.glob("*.tar.gz")
    python = install(
        tmp_path / "venv", built.parent / "copy" if kind == "folder" else archive, "flit_core>=3.11"
    )
    assert run(python, "-c", PROGRAM_THAT_SAVES, cwd=tmp_path).endswith(
        f" {distckpt.__version__}\n"
    )
    (site_packages,) = python.parents[1].glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(name="distckpt", path=[str(site_packages)])
    files = {str(file) for file in own.files or [] if "__pycache__" not in file.parts}
    of_pip = {
        f"distckpt-{distckpt.__version__}.dist-info/{name}"
        for name in ("INSTALLER", "REQUESTED", "direct_url.json")
    }
    (wheel,) = built.glob("*.whl")
    assert files - of_pip - {"../../../bin/distckpt"} == files_in(wheel)


@pytest.mark.slow
def test_a_source_distribution_runs_its_own_tests(built, tmp_path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path)
    (top,) = tmp_path.iterdir()
    (top / "tests/test_where.py").write_text(
        "import distckpt\n\ndef test_where():\n    assert distckpt.__file__ == "
        f"{str(top / 'distckpt/__init__.py')!r}\n"
    )
    tests = [
        "tests/test_where.py",
        "tests/unit/format/test_golden.py",
        "tests/distributed/test_plan_cache.py",
    ]
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", "-n", "0", *tests, cwd=top)


PROGRAM = """
import torch
import distckpt
from distckpt import ShardedTensor
from distckpt.modules import sharded_state_dict

shard: ShardedTensor = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 1))
report: distckpt.SaveReport | None = None
loaded = distckpt.load({"w": shard, **sharded_state_dict(torch.nn.Linear(2, 2))}, "checkpoint")
reveal_type(distckpt.CheckpointManager("checkpoints").latest())
reveal_type(loaded)
reveal_type(distckpt.open("checkpoint").tensors["w"].shape)
distckpt.sav({}, "checkpoint")
distckpt.save({})
"""


def test_type_checkers_know_the_installed_package(installed, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    # Torch itself takes half a minute to check.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(installed),
        "program.py",
    ]
    done = ended(*command, cwd=tmp_path)
    findings = re.findall(r"^program.py:(\d+): (?:error|note): (.*)$", done.stdout, re.M)
    assert [(int(line), text.split("  [")[0]) for line, text in findings] == [
        (10, 'Revealed type is "int | None"'),
        (11, 'Revealed type is "dict[str, Any]"'),
        (12, 'Revealed type is "tuple[int, ...]"'),
        (13, 'Module has no attribute "sav"; maybe "save"?'),
        (14, 'Missing positional argument "path" in call to "save"'),
    ], done.stdout


def test_the_version_is_the_same_everywhere():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert distckpt.__version__ == declared == importlib.metadata.version("distckpt")
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    # Until the first release, all changes stand under Unreleased.
    assert released[:1] in ([], [declared])
