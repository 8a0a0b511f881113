"""README and docs: Python blocks run, explained messages are in the code, links lead somewhere.

What is shown of the shell is in test_docs_commands.py.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import distckpt
from distckpt import cli
from tests.data.make_deepspeed import make_model
from tests.support import command_line, megatron_gpt
from tests.support.docs_pages import (
    BLOCKS,
    PAGES,
    ROOT,
    Block,
    blocks,
    commands_in,
    lines_of,
    name_of,
)
from tests.support.reference import needs_torchs_hugging_face

COVERED = {
    "python": "run here",
    "sh": "test_docs_commands.py checks every command",
    "console": "test_docs_commands.py runs the commands and compares what they print",
    "text": "compared on the pages below",
}
TEXT_PAGES = {
    "examples": "with what the examples print, by distributed/test_examples.py",
    "format": "with the files of a checkpoint, here",
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_in_a_language_that_a_test_covers(page: Path) -> None:
    own = [block for block in BLOCKS if block.page == name_of(page)]
    assert [(block.name, block.language) for block in own if block.language not in COVERED] == []
    assert name_of(page) in TEXT_PAGES or not [
        block.name for block in own if block.language == "text"
    ]
    fences = re.findall(r"^\s*(?:>\s*)*(?:[-*+]\s+|\d+[.)]\s+)?(?:```|~~~)", page.read_text(), re.M)
    assert len(fences) == 2 * len(own), "a fence that is not understood"


# --- Python ---------------------------------------------------------------------------------------

FOR_MEGATRON = blocks("python", "sh", page="migrating-from-megatron")
FOR_ANYBODY = [block for block in blocks("python") if block not in FOR_MEGATRON]


def runnable(block: Block) -> Any:
    needs_writer = "HuggingFaceStorageWriter" in block.text
    marks = [needs_torchs_hugging_face] if needs_writer else []
    return pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("block", [runnable(block) for block in FOR_ANYBODY])
def test_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    if "import lightning" in block.text:
        warnings.simplefilter("ignore")  # of a Trainer about small data, and at its import
        pytest.importorskip("lightning", reason="lightning is not installed")
    if "orbax.checkpoint" in block.text:
        pytest.importorskip("orbax.checkpoint.v1", reason="Orbax is not installed")
    if "orbax/run" in block.text:
        with tarfile.open(ROOT / "tests/data/orbax_0_12.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        (tmp_path / "orbax/run").mkdir(parents=True)
        (tmp_path / "v1").rename(tmp_path / "orbax/run/1000")
    if "deepspeed/" in block.text:
        with zipfile.ZipFile(ROOT / "tests/data/deepspeed_0_19.zip") as archive:
            archive.extractall(tmp_path)
        (tmp_path / "deepspeed").mkdir()
        (tmp_path / "zero3").rename(tmp_path / "deepspeed/run")
        model, optimizer = make_model()
        names |= {"model": model, "optimizer": optimizer}
    exec(compile(block.text, block.name, "exec"), names)
    logging.getLogger("distckpt.events").setLevel(logging.NOTSET)


def run_blocks_for_megatron(rank: int, directories: list[Path]) -> None:
    """Run each block in a directory of its own; in a process that has imported Megatron, which
    takes seconds.
    """
    warnings.simplefilter("ignore")  # Megatron, when it is imported
    for block, directory in zip(FOR_MEGATRON, directories, strict=True):
        os.chdir(directory)
        run_for_megatron(block)


def run_for_megatron(block: Block) -> None:
    """Run a block, with the model that the page speaks of."""
    if block.language == "python":
        names = {"gpt_model": megatron_gpt.make_model(1, 1)} if "gpt_model" in block.text else {}
        exec(compile(block.text, block.name, "exec"), {"__name__": "__main__", **names})
        return
    for line in lines_of(block.text):
        ((program, *arguments),) = commands_in(line)
        assert (program, cli.main(arguments)) == ("distckpt", 0)


@megatron_gpt.needs_megatron
def test_blocks_for_megatron_run(run: Callable[..., list], tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    source = str(tmp_path / "megatron" / "iter_0001000")
    run(megatron_gpt.save_with_megatron, 2, source, group_timeout=megatron_gpt.TIMEOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        torch.distributed.checkpoint.save(
            {"w": torch.ones(4)}, checkpoint_id=str(tmp_path / "fsdp" / "step_1000")
        )
    with zipfile.ZipFile(ROOT / "tests/data/megatron_fsdp_0_16.zip") as archive:
        archive.extractall(tmp_path / "golden")
    directories = [tmp_path / block.name for block in FOR_MEGATRON]
    for directory in directories:
        directory.mkdir()
        for name in ("megatron", "fsdp"):
            (directory / name).symlink_to(tmp_path / name)
        (directory / "core").mkdir()
        (directory / "core" / "iter_0001000").symlink_to(tmp_path / "golden" / "torch_dist")
    run(run_blocks_for_megatron, 1, directories, group_timeout=megatron_gpt.TIMEOUT)


# --- Text -----------------------------------------------------------------------------------------


def test_the_files_of_a_checkpoint_are_those_of_the_format(tmp_path: Path) -> None:
    (tree,) = blocks("text", page="format")
    checkpoint = tmp_path / "step_1000"
    distckpt.save(
        {"w": distckpt.ShardedTensor.from_rank_offsets("w", torch.ones(4)), "step": 1}, checkpoint
    )
    files = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*.*")}
    first, *shown = tree.text.splitlines()
    assert first == "step_1000/"
    # Large checkpoints have these as well.
    of_large_ones = {"objects/chunks-#.safetensors", "objects/rank-#.checksums"}
    assert {re.sub(r"\d+", "#", line.split()[0]) for line in shown} - of_large_ones == {
        re.sub(r"\d+", "#", file) for file in files
    }


def test_the_options_of_the_command_line_are_those_of_its_parser() -> None:
    page = command_line.PAGE.read_text()
    named = {match[1] for match in command_line.BLOCK.finditer(page)}
    assert named == set(command_line.make_tables())
    assert page == command_line.with_tables(page), "run python -m tests.support.command_line"


# --- Links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


# --- Messages -------------------------------------------------------------------------------------


@functools.cache
def texts_of_the_package() -> list[str]:
    """Return all texts in the code, with `…` in the place of what is filled in."""
    texts = []
    for file in (ROOT / "distckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[srd]", "…", node.value))
    return texts


MESSAGES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


def test_many_messages_are_explained() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 20


def holds_in_order(text: str, parts: list[str]) -> bool:
    position = 0
    for part in parts:
        position = text.find(part, position) + len(part)
        if position < len(part):
            return False
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_an_explained_message_is_one_of_the_code(message: str) -> None:
    # What is filled in may stand between quotes in the code.
    parts = [part.strip() for part in message.split("…")]
    assert [text for text in texts_of_the_package() if holds_in_order(text, parts)], message
