"""README and docs: what is shown of the shell.

Commands of distckpt run, and print what is shown; of others the files, extras and options are
there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import (
    CheckpointManager,
    ShardedObject,
    ShardedTensor,
    cli,
)
from tests.support.command_line import VERB_NAMES, parser_of
from tests.support.docs_pages import PAGES, ROOT, Block, blocks, commands_in, lines_of, name_of
from tests.support.example_programs import command_of
from tests.support.harness import run
from tests.support.made_once import made_once

# --- Commands of distckpt, beside what the page speaks of -----------------------------------------

LAYER = {
    "attn.qkv.weight": ((384, 128), 0),
    "attn.out.weight": ((128, 128), 1),
    "mlp.up.weight": ((512, 128), 0),
    "mlp.down.weight": ((128, 512), 1),
}
"""Shape of each tensor, and the axis along which tensor parallel ranks divide it."""


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values that float32 and bfloat16 hold exactly, the same on every machine."""
    return ((torch.arange(torch.Size(shape).numel()) * 37 % 101 - 50) / 64).to(dtype).view(shape)


def save_steps(rank: int, directory: Path) -> None:
    """Save step 100 of a small model at TP 2 x DP 2, and step 200, which differs a little."""
    tp_rank, dp_rank = rank % 2, rank // 2

    def divided(key: str, whole: torch.Tensor, axis: int) -> ShardedTensor:
        part = whole.chunk(2, axis)[tp_rank].contiguous()
        return ShardedTensor.from_rank_offsets(key, part, (axis, tp_rank, 2), replica_id=dp_rank)

    for step in (100, 200):
        key = "model.embed.weight"
        state: dict[str, object] = {key: divided(key, values((1000, 128), torch.bfloat16), 0)}
        for layer, (name, (shape, axis)) in itertools.product(range(4), LAYER.items()):
            key, whole = f"model.layers.{layer}.{name}", values(shape)
            if step == 200 and key == "model.layers.1.mlp.up.weight":
                whole[17, 5:9] += 0.25
            state[key] = divided(key, whole, axis)
        for key in [f"model.layers.{layer}.norm.weight" for layer in range(4)]:
            state[key] = ShardedTensor.from_rank_offsets(key, values((128,)), replica_id=rank)
        state["rng"] = ShardedObject("rng", {"seed": rank}, (4,), (rank,))
        args = {"lr": 0.0003 if step == 100 else 0.0001, "optimizer": "adamw"}
        distckpt.save({**state, "step": step, "args": args}, directory / f"checkpoints/step_{step}")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with all that docs/command-line.md speaks of."""
    return made_once(tmp_path_factory, "command_line", make_places)


def make_places(directory: Path) -> None:
    run(save_steps, 4, directory)
    damaged = shutil.copytree(
        directory / "checkpoints/step_100", directory / "checkpoints/step_300"
    )
    shard = damaged / "tensors" / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    distckpt.consolidate(
        directory / "checkpoints/step_100",
        directory / "exports/step_100",
        keys="model.",
        rename={"model.": ""},
    )
    with CheckpointManager(directory / "runs/a", async_save=False) as manager:
        for step in (100, 200, 300, 400, 500):
            manager.save(step, {"step": step}, metrics={"loss": 300 / step}, pinned=step == 200)
    (directory / "runs/b").mkdir()
    identity = {"run": "0123456789abcdef", "root": str(directory / "runs/b")}
    (directory / "runs/b/run.json").write_text(json.dumps(identity))
    with CheckpointManager(
        directory / "runs/b", local=directory / "nvme", upload_every=3, async_save=False
    ) as manager:
        for step in (100, 200, 300):
            manager.save(step, {"step": step})
            manager.wait(uploaded=True)
    interrupted = directory / "runs/a/.step_00000450.tmp-0123456789abcdef"
    interrupted.mkdir()
    os.utime(interrupted, (0, 0))
    for rank in range(2):
        (directory / f"journal-{rank}.jsonl").touch()
    with zipfile.ZipFile(ROOT / "tests/data/megatron_core_0_14.zip") as archive:
        archive.extractall(directory / "megatron/iter_0001000")


def run_lines(rank: int, directory: Path, lines: list[str]) -> list[str]:
    """Run lines of a shell that hold commands of distckpt and `echo $?`; return what each
    printed.
    """
    os.chdir(directory)
    warnings.simplefilter("ignore")  # Megatron, which `--megatron-types` imports, warns of much
    return [output_of(line) for line in lines]


def output_of(line: str) -> str:
    code, printed = 0, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for command in commands_in(line):
            if command == ["echo", "$?"]:
                print(code)
                code = 0
            else:
                assert command[0] == "distckpt"
                code = cli.main(command[1:])
    assert code == 0, f"{line} ended with {code}: {printed.getvalue()}"
    return printed.getvalue()


def timeless(text: str) -> str:
    """Return a text without the times of one run."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d( UTC([+-]\d{4})?)?", "DATE", text)
    text = re.sub(r"\d+(\.\d+)? [kMGT]?B/s", "RATE", text)
    return re.sub(r"\d+\.\d+ s\b", "TIME", text)


COMMAND_LINE = [*blocks("sh", "console", page="command-line"), *blocks("sh", page="quantized")]


@pytest.mark.parametrize("block", COMMAND_LINE, ids=[block.name for block in COMMAND_LINE])
def test_commands_of_the_command_line_page(block: Block, places: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(places, tmp_path / "data")
    if block.language == "sh":
        # A benchmark of this size takes minutes; test_bench.py runs small ones.
        lines = [line for line in lines_of(block.text) if not line.startswith("distckpt bench ")]
        run(run_lines, 1, directory, lines, backend=None)
        return
    parts = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M)
    assert "".join(f"$ {line}\n{output}" for line, output in parts) == block.text
    (printed,) = run(run_lines, 1, directory, [line for line, _ in parts], backend=None)
    shown = "".join(f"$ {line}\n{output}" for line, output in parts)
    actual = "".join(
        f"$ {line}\n{output}" for (line, _), output in zip(parts, printed, strict=True)
    )
    assert timeless(actual.replace(str(tmp_path), "")) == timeless(shown)


@pytest.mark.parametrize(
    ("page", "place"),
    [("quickstart", '"looked_into"'), ("which-call", '"cheat/'), ("offline-parts", '"run/')],
)
def test_commands_about_what_a_page_has_saved(
    page: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [block for block in blocks("python", page=page) if place in block.text]
    lines = [line for block in blocks("sh", page=page) for line in lines_of(block.text)]
    monkeypatch.chdir(tmp_path)
    exec(compile(code.text, code.name, "exec"), {"__name__": "__main__"})
    run(
        run_lines,
        1,
        tmp_path,
        [line for line in lines if line.startswith("distckpt ")],
        backend=None,
    )


def test_blocks_with_commands_of_distckpt_are_on_pages_whose_commands_run() -> None:
    pages = {
        block.page
        for block in blocks("sh", "console")
        if re.search(r"^(\$ )?distckpt ", block.text, re.M)
    }
    # The last in test_docs.py; those for a store in test_bench.py and test_permissions.py.
    assert pages == {
        "command-line",
        "object-storage",
        "offline-parts",
        "quickstart",
        "which-call",
        "quantized",
        "migrating-from-megatron",
    }


# --- All commands ---------------------------------------------------------------------------------


@functools.cache
def help_of(*module: str) -> str:
    command = [sys.executable, "-m", *module, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def check_options(words: list[str], known: str) -> None:
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    assert [
        option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", known)
    ] == []


def check_distckpt(words: list[str]) -> None:
    assert words[0] in VERB_NAMES
    if len(words) > 1:
        parser_of(words[0]).parse_args(words[1:])


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    check_options(words[1:], help_of("pip", "install"))
    extras = {
        extra
        for word in words
        for group in re.findall(r"\[(.+)\]", word)
        for extra in group.split(",")
    }
    assert extras <= set(importlib.metadata.metadata("distckpt").get_all("Provides-Extra") or [])


def check_python(words: list[str]) -> None:
    """Check `python FILE ...` and `python -m MODULE ...`, by the text of the program."""
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None
        program, arguments = Path(spec.origin or ""), words[2:]
    else:
        program, arguments = ROOT / words[0], words[1:]
    check_options(arguments, program.read_text())


def check_torchrun(words: list[str]) -> None:
    """Check `torchrun ... FILE ...`; train.py is a program of the reader's, others are as their
    docstring says.
    """
    (at,) = [i for i, word in enumerate(words) if word.endswith(".py")]
    with_torch_2_12 = "--shutdown-timeout" if torch.__version__ < "2.12" else ""
    check_options(words[:at], help_of("torch.distributed.run") + with_torch_2_12)
    if words[at:] != ["train.py"]:
        (documented,) = commands_in(command_of(words[at].removeprefix("examples/")))
        assert ["torchrun", *words[:-1]] == documented[:-1]  # the last one is a directory


CHECKS = {
    "distckpt": check_distckpt,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "srun": lambda words: check(
        [word for word in words if not word.startswith("--ntasks-per-node=")]
    ),
    "pytest": lambda words: check_options(words, help_of("pytest")),
    "mkdocs": lambda words: check_options(words[1:], help_of("mkdocs", words[0])),
    "echo": lambda words: None,
    "export": lambda words: None,
}


def check(command: list[str]) -> None:
    """Check that a command is one of these, its options exist, and the files of the repository that
    it names.
    """
    CHECKS[Path(command[0]).name](command[1:])
    ours = [word for word in command if word.startswith(("tests/", "examples/", "docs/"))]
    assert [word for word in ours if not (ROOT / word).exists()] == []


SHELL = blocks("sh", "console")


@pytest.mark.parametrize("block", SHELL, ids=[block.name for block in SHELL])
def test_commands_in_blocks(block: Block) -> None:
    lines = lines_of(block.text)
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    commands = [command for line in lines for command in commands_in(line)]
    assert commands
    for command in commands:
        check(command)
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)


def spans_of(page: Path) -> list[str]:
    """Return what stands as code in the sentences and tables of a page."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences(page: Path) -> None:
    for span in spans_of(page):
        if span.split(" ")[0] in CHECKS and " " in span and "..." not in span:
            for command in commands_in(span):
                check(command)


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the source distribution has no .ci")
def test_the_commands_of_the_readme_are_those_of_the_checks_before_a_change_lands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "export OMP_NUM_THREADS=1\n" in script
    *_, tests = blocks("sh", page="README")
    install, command = tests.text.rstrip().rsplit(" && OMP_NUM_THREADS=1 ", 1)
    assert f"\n{install}\n" in script
    assert f"\n{command}\n" in script
