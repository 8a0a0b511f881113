"""Runs the programs in examples/ by the commands in their docstrings."""

from __future__ import annotations

import ast
import functools
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.harness import run

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(
    filter(None, (str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")))
)
# Without buffers the lines of ranks that print at once would be mixed.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1"}


def docstring_of(name: str) -> str:
    """Return the docstring of an example."""
    return ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""


def command_of(name: str) -> str:
    """Return the command that the docstring of an example shows."""
    (command,) = re.findall(r"^    ((?:python|torchrun) .*)$", docstring_of(name), re.M)
    # A long one goes on in a second, indented line of the source.
    return " ".join(command.split())


def run_command(name: str, work_dir: Path) -> str:
    """Run the command of an example, with another directory for its files; return what it
    prints.
    """
    launcher, *arguments = shlex.split(command_of(name))
    arguments[-1] = str(work_dir)
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[launcher]
    process = subprocess.Popen(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output + errors
    return output


def run_preloaded(
    name: str, work_dir: Path, num_ranks: int = 0, options: Sequence[str] = ()
) -> str:
    """Run an example as `run_command` does, but in processes that have torch already; return what
    it prints.

    `num_ranks` takes the place of the number of processes in the command, and `options` come after
    its arguments.
    """
    launcher, *arguments = shlex.split(command_of(name))
    in_command = (
        int(arguments[arguments.index("--nproc-per-node") + 1]) if launcher == "torchrun" else 1
    )
    num_ranks = num_ranks or in_command
    program_arguments = [
        *arguments[arguments.index(f"examples/{name}") + 1 : -1],
        str(work_dir),
        *options,
    ]
    output = work_dir.with_name(f"{work_dir.name}.output")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port if launcher == "torchrun" else None
    codes = run(
        _run_program, num_ranks, num_ranks, name, program_arguments, port, str(output), backend=None
    )
    del store
    text = output.read_text()
    assert not any(codes), text
    return text


def _run_program(
    rank: int, num_ranks: int, name: str, arguments: list[str], port: int | None, output: str
) -> int | str | None:
    """Run an example as one rank, or as the only process without a port; return the status it exits
    with.
    """
    if port is not None:
        # As torchrun sets them, whose agent has the store.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    warnings.resetwarnings()
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Some start processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.multiprocessing.spawn = functools.partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    os.chdir(ROOT)
    program = ROOT / "examples" / name
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0
