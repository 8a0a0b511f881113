"""What importing the package, and its parts, makes Python load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from tests.support.hf_folders import write_plain
from tests.support.sampling import one_in

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
    parse = "from distckpt.cli._parser import make_parser; make_parser().format_help()"
    new = modules_loaded_by(f"import distckpt.__main__, distckpt.cli; {parse}") - modules_loaded_by(
        "pass"
    )
    assert {name.partition(".")[0] for name in new} - sys.stdlib_module_names == {"distckpt"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "run"],
        ["ls", "run", "--json"],
        ["ls", "run", "--html", "page.html"],
        ["inspect", "run/step_00000001"],
        ["inspect", "run/step_00000001", "--json"],
        ["inspect", "run/step_00000001", "--key", "up.weight"],
        ["inspect", "run/step_00000001", "--html", "page.html"],
        ["inspect", "exported"],
    ],
    ids=" ".join,
)
def test_listing_and_inspecting_do_not_wait_for_torch(tmp_path, arguments):
    weight = torch.ones(8, 4, dtype=torch.bfloat16)
    state = {"up.weight": ShardedTensor.from_rank_offsets("up.weight", weight)}
    state |= {"step": 1, "schedule": {"rates": (1e-3, 2e-3), "warmup": np.arange(3)}}
    with CheckpointManager(tmp_path / "run", async_save=False) as manager:
        manager.save(1, state, metrics={"loss": 0.5})
    # The readers of all formats look at what is no checkpoint.
    (tmp_path / "run/logs").mkdir()
    (tmp_path / "run/notes.txt").write_text("warm\n")
    write_plain(tmp_path / "exported/model.safetensors", {"up.weight": weight})
    loaded = modules_loaded_by(
        f"import distckpt.cli, os; os.chdir({str(tmp_path)!r}); distckpt.cli.main({arguments})"
    )
    assert "distckpt._format.manifest" in loaded
    assert "torch" not in loaded


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


SELDOM = {
    "quantize='int8-channel'": {
        "_compute.formats",
        "_compute.encoded_source",
    },
    "merge_adapter='adapter'": {
        "_compute.adapter",
        "_compute.peft_names",
        "_compute.adapted_source",
    },
    "like='like'": {"_foreign.hugging_face"},
}
"""What an option of an export needs, and no other export of a checkpoint."""


@pytest.mark.parametrize("option", one_in(2, ["", *SELDOM]))
def test_an_export_imports_what_it_is_asked_for(tmp_path, option):
    weight = torch.ones(8, 4)
    state = {"up.weight": ShardedTensor.from_rank_offsets("up.weight", weight)}
    distckpt.save(state, tmp_path / "checkpoint")
    write_plain(tmp_path / "like" / "model.safetensors", {"up.weight": weight})
    matrices = {"up.lora_A.weight": torch.ones(2, 4), "up.lora_B.weight": torch.ones(8, 2)}
    adapter = {f"base_model.model.{name}": matrix for name, matrix in matrices.items()}
    write_plain(tmp_path / "adapter" / "adapter_model.safetensors", adapter)
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2}'
    )
    of_merging = {"_compute.summed_source", "_compute.merge"}
    seldom = set().union(*SELDOM.values(), of_merging)
    call = f"distckpt.consolidate('checkpoint', 'out', {option})"
    loaded = modules_loaded_by(f"import distckpt, os; os.chdir({str(tmp_path)!r}); {call}")
    found = {name.removeprefix("distckpt.") for name in loaded} & seldom
    if "adapter" in option:
        # An adapter of PEFT is a Hugging Face directory.
        found.remove("_foreign.hugging_face")
    assert found == SELDOM.get(option, set())
