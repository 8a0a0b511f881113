"""What importing the package, and its parts, makes Python load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules_loaded_by(code):
    command = [sys.executable, "-W", "error", "-c", f"import sys; {code}; print(*sys.modules)"]
    return set(
        subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.split()
    )


def test_importing_loads_nothing_before_it_is_used():
    new = modules_loaded_by("import distckpt") - modules_loaded_by("import importlib, typing")
    assert {name for name in new if name not in sys.stdlib_module_names} == {"distckpt"}


def test_help_and_completion_of_the_command_line_load_no_library():
    parse = "from distckpt._cli.parser import make_parser; make_parser().format_help()"
    new = modules_loaded_by(f"import distckpt.__main__, distckpt.cli; {parse}") - modules_loaded_by(
        "pass"
    )
    assert {name.partition(".")[0] for name in new} - sys.stdlib_module_names == {"distckpt"}


def test_saving_and_loading_need_little():
    """No part of torch that is not needed, nothing that is not a dependency, no client of an object
    store.
    """
    loaded = modules_loaded_by(
        "import distckpt; distckpt.save, distckpt.load, distckpt.CheckpointManager"
    )
    assert "distckpt._operations.load" in loaded
    loaded -= modules_loaded_by("import torch, torch.distributed, numpy")
    unwanted = (
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "safetensors.torch",
        "aiohttp",
        "s3fs",
        "obstore",
        "boto3",
        "multiprocessing",
        "psutil",
        "megatron",
        "transformers",
        "pandas",
    )
    assert {
        name for name in loaded if f"{name}.".startswith(tuple(f"{start}." for start in unwanted))
    } == set()


def test_the_module_for_users_of_dcp_imports_nothing_of_it():
    loaded = modules_loaded_by("import distckpt; distckpt.dcp.save")
    assert "distckpt.dcp" in loaded
    assert "torch.distributed.checkpoint" not in loaded
