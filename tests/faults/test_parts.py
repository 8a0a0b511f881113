"""Work in parts, whose processes are killed: what comes out is what one process makes, byte for
byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import io
import itertools
import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint

import distckpt
from distckpt import CheckpointingException, ShardedTensor, tasks, torch_dist
from distckpt.cli import main
from distckpt.rules import Rename
from tests.faults.test_crash_points import Point, dying_at, in_child, points_of
from tests.support.calls import Call, recorded, watched
from tests.support.harness import run
from tests.support.hf_folders import write_indexed, write_plain
from tests.support.parts import NUM_PARTS, contents_of, run_in_process, run_killed
from tests.support.sampling import one_in
from tests.support.states import numbered, save_checkpoint

RESHARD = {"num_ranks": 20, "grids": {"layers.*": (3, 2)}}
EXPORT = {"max_file_bytes": 100_000, "dtype": torch.bfloat16}
RULES = [Rename("layers.*.w", "model.layers.{0}.mlp.up_proj.weight")]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
}
MEGATRON = {
    "self_attention.linear_qkv.weight": (128, 64),
    "self_attention.linear_proj.weight": (64, 64),
    "mlp.linear_fc1.weight": (192, 64),
    "mlp.linear_fc2.weight": (64, 96),
    "self_attention.linear_qkv.layer_norm_weight": (64,),
    "mlp.linear_fc1.layer_norm_weight": (64,),
}
"""Shapes of a layer of `LLAMA` in Megatron Core."""
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "init_lora_weights": True}


class Case(NamedTuple):
    """A verb: what one process does, and the tasks of the same.

    Both get a folder with what `folder` makes, and a place for the output, or for the journal
    of a verb that has no output.
    """

    in_one: Callable[[Path, Path], Any]
    in_parts: Callable[..., list[tasks.Task]]
    has_output: bool = True


def of(name: str, function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    """Return a function of a folder and a place, which reads what has a name in the folder.

    Arguments that are functions are called with the folder.
    """

    def call(folder: Path, place: Path, **more: Any) -> Any:
        values = {key: value(folder) if callable(value) else value for key, value in given.items()}
        return function(folder / name, place, **values, **more)

    given = arguments
    return call


def export(name: str = "a", **options: Any) -> Case:
    options = {"max_file_bytes": 100_000, **options}
    return Case(of(name, distckpt.consolidate, **options), of(name, tasks.consolidate, **options))


def rewriting(name: str = "a", **options: Any) -> Case:
    return Case(of(name, distckpt.reshard, **options), of(name, tasks.reshard, **options))


def merge(folder: Path, output: Path) -> Any:
    return distckpt.merge([folder / "a", folder / "b"], output, **EXPORT)


def merge_tasks(folder: Path, output: Path, num_tasks: int) -> list[tasks.Task]:
    return tasks.merge([folder / "a", folder / "b"], output, num_tasks=num_tasks, **EXPORT)


def stats(folder: Path, place: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["stats", str(folder / "a"), "--json"]) == 0
    return json.loads(shown.getvalue())["tensors"]


def stats_tasks(folder: Path, place: Path, num_tasks: int) -> list[tasks.Task]:
    arguments = {"checkpoint_dir": str(folder / "a"), "journal": str(place)}
    return [tasks.Task("stats", arguments, index, num_tasks) for index in range(num_tasks)]


def verifying(name: str) -> Case:
    return Case(
        lambda folder, place: distckpt.verify(folder / name),
        lambda folder, place, num_tasks: tasks.verify(
            folder / name, journal=place, num_tasks=num_tasks
        ),
        has_output=False,
    )


CASES = {
    "consolidate": export(dtype=torch.bfloat16),
    "rules": export(rules=RULES, rename={"model.": "lm."}, extra_files_from=lambda f: f / "extra"),
    "family": export("megatron", family=lambda folder: folder / "config.json"),
    "quantize": export(rules=RULES, quantize="fp8-block", max_file_bytes=30_000),
    "adapter": export(rules=RULES, merge_adapter=lambda folder: folder / "adapter"),
    "merge": Case(merge, merge_tasks),
    "reshard": rewriting(**RESHARD),
    "reshard with rules": rewriting(rules=RULES, dtype=torch.float16, **RESHARD | {"grids": {}}),
    "convert": rewriting("dcp", num_ranks=10),
    "import": rewriting("hf", num_ranks=10),
    "export_torch_dist": Case(of("a", torch_dist.export), of("a", tasks.export_torch_dist)),
    "verify": verifying("a"),
    "verify fingerprints": verifying("fingerprints"),
    "stats": Case(stats, stats_tasks, has_output=False),
    "diff": Case(
        lambda folder, place: distckpt.diff(folder / "a", folder / "b"),
        lambda folder, place, num_tasks: tasks.diff(
            folder / "a", folder / "b", journal=place, num_tasks=num_tasks
        ),
        has_output=False,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two checkpoints of the same tensors, one of torch, an export, a model of Megatron Core, and
    what goes with them.
    """
    made = tmp_path_factory.mktemp("checkpoints")
    names = [f"layers.{i}.w" for i in range(20)]
    for factor, name in ((1.0, "a"), (3.0, "b")):
        tensors = {key: factor * (numbered(60, 500) - i) for i, key in enumerate(names)}
        save_checkpoint(made / name, tensors, args={"lr": factor})
    state = {key: ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}
    distckpt.save(state, made / "fingerprints", fingerprint=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(tensors, checkpoint_id=made / "dcp")
    files = {f"part-{i}.safetensors": {key: tensors[key]} for i, key in enumerate(names)}
    write_indexed(made / "hf", files)
    layers = {
        f"decoder.layers.{i}.{name}": torch.randn(shape)
        for i in range(LLAMA["num_hidden_layers"])
        for name, shape in MEGATRON.items()
    }
    vocabulary = (LLAMA["vocab_size"], LLAMA["hidden_size"])
    others = {
        "embedding.word_embeddings.weight": torch.randn(vocabulary),
        "output_layer.weight": torch.randn(vocabulary),
        "decoder.final_layernorm.weight": torch.randn(vocabulary[1:]),
    }
    save_checkpoint(made / "megatron", layers | others)
    (made / "config.json").write_text(json.dumps(LLAMA))
    (made / "extra").mkdir()
    (made / "extra" / "config.json").write_text('{"torch_dtype": "float32"}')
    write_adapter(made / "adapter", [f"model.layers.{i}.mlp.up_proj" for i in range(20)])
    return made


def write_adapter(path: Path, modules: Sequence[str]) -> None:
    """Write what PEFT does for modules with weights of 60 x 500."""
    sides = {"A": torch.randn(2, 500), "B": torch.randn(60, 2)}
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": matrix.clone()
        for module in modules
        for side, matrix in sides.items()
    }
    write_plain(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(LORA))


def without_seconds(report: Any) -> Any:
    """Return a report without what differs from one run to the next."""
    if isinstance(report, list):
        return json.loads(json.dumps(report, default=vars))
    changes = {"seconds": 0.0} | ({"location": ""} if hasattr(report, "num_files") else {})
    return None if report is None else dataclasses.replace(report, **changes)


def check_whole(case: Case, folder: Path, place: Path, expected: Any) -> None:
    """The output is that of one process, and running the work again does nothing."""
    output = place / "out"
    (again,) = case.in_parts(folder, output, num_tasks=1)
    report = again.run()
    assert (report.num_pieces, report.is_complete) == (0, True)
    assert without_seconds(report.report) == without_seconds(expected)
    if case.has_output:
        assert contents_of(output) == contents_of(place / "one")


def check_killed(case: Case, folder: Path, place: Path, num_kills: int) -> None:
    expected = case.in_one(folder, place / "one")
    killed, seed = 0, 0
    while killed < num_kills:
        output = place / "out"
        shutil.rmtree(output, ignore_errors=True)
        tasks.abandon(output)
        work = case.in_parts(folder, output, num_tasks=NUM_PARTS)
        killed += run_killed(work, num_kills - killed, 0.3, seed)
        seed += 1
        check_whole(case, folder, place, expected)


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_killed_parts(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_killed_parts_sweep(name, folder, tmp_path):
    check_killed(CASES[name], folder, tmp_path, num_kills=100)


# --- At every call --------------------------------------------------------------------------------


def run_and_die(task: tasks.Task, place: Path, point: Point) -> None:
    with dying_at(point, place):
        task.run()


def record(task: tasks.Task, place: Path) -> list[Any]:
    with recorded(place) as calls:
        task.run()
    return [call._replace(buffers=(), outcome=None) for call in calls]


def sweep(rank: int, name: str, folder: Path, place: Path, chosen: slice) -> int:
    """Kill one process at a time at a call that changes something; another one goes on."""
    case = CASES[name]
    expected = case.in_one(folder, place / "one")
    work = place / "work"
    work.mkdir()
    output = work / "out"
    (task,) = case.in_parts(folder, output, num_tasks=1)
    num_killed, points = 0, points_of(record(task, work), exhaustive=False)[chosen]
    for point in points:
        shutil.rmtree(work)
        work.mkdir()
        # A note of how long something took is longer, or shorter, the next time.
        num_killed += in_child(run_and_die, task, work, point) == -signal.SIGKILL
        report = task.run()
        assert report.is_complete, point
        assert without_seconds(report.report) == without_seconds(expected), point
        if case.has_output:
            assert contents_of(output) == contents_of(place / "one"), point
            left = {name for name in os.listdir(work) if not name.startswith(".out.parts-")}
            assert left == {"out"}, point
    assert num_killed > 0.5 * len(points)
    return num_killed


@pytest.mark.parametrize("name", ["consolidate", "reshard"])
def test_killed_at_some_calls(name, folder, tmp_path):
    assert run(sweep, 1, name, folder, tmp_path, slice(0, None, 40), backend=None)[0] > 2


def test_killed_while_completing(folder, tmp_path):
    assert run(sweep, 1, "rules", folder, tmp_path, slice(-24, None, 2), backend=None)[0] > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_call(name, first, folder, tmp_path):
    chosen = slice(first, None, 8)
    assert run(sweep, 1, name, folder, tmp_path, chosen, backend=None)[0] > 2


# --- Others at the same time ----------------------------------------------------------------------


def refuse_locks(fd: int, operation: int) -> None:
    """Stand for locks of directories where there are none, as on network file systems."""
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def run_without_locks(task: tasks.Task) -> None:
    fcntl.flock = refuse_locks
    task.run()


def recorded_calls(task: tasks.Task, place: Path) -> list[Call]:
    with recorded(place) as calls:
        task.run()
    return calls


def overtaking(name: str, folder: Path, place: Path, *chosen: slice) -> None:
    """Have another process do all of the work in the middle of one that does the same, at one call
    at a time.
    """
    case = CASES[name]
    expected = case.in_one(folder, place / "one")
    work = place / "work"
    work.mkdir()
    (task,) = case.in_parts(folder, work / "out", num_tasks=1)
    calls = recorded_calls(task, work)
    numbers = [call.number for call in calls if call.changes_something]
    for number in itertools.chain.from_iterable(numbers[each] for each in chosen):
        shutil.rmtree(work)
        work.mkdir()

        def overtake(call: Call, moment: str, number: int = number) -> None:
            if (call.number, moment) == (number, "before"):
                process = run_in_process(task, run_without_locks)
                process.join(60)
                assert process.exitcode == 0, call

        with watched(work, overtake):
            report = task.run()
        assert report.is_complete, number
        assert without_seconds(report.report) == without_seconds(expected), number
        if case.has_output:
            assert contents_of(work / "out") == contents_of(place / "one"), number
            assert tasks.status(work / "out")[0].is_complete, number


@pytest.mark.parametrize("name", ["consolidate", "reshard", "export_torch_dist"])
def test_overtaken_at_some_calls(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    # Where its directory is made, and where it appears.
    overtaking(name, folder, tmp_path, slice(6, 13, 3), slice(-5, -30, -12))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", CASES)
def test_overtaken_at_every_call(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    overtaking(name, folder, tmp_path, slice(None))


# --- Damaged notes --------------------------------------------------------------------------------


def damaged(content: bytes, chance: random.Random, how: str) -> bytes | None:
    """Return a note with a flipped bit, or cut; None for one that is lost."""
    if how == "lost":
        return None
    if how == "cut":
        return content[: chance.randrange(len(content))]
    place = chance.randrange(8 * len(content))
    flipped = bytearray(content)
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped)


def notes_in(place: Path) -> dict[str, list[Path]]:
    """Return the files of the only journal below a place, by kind."""
    found: dict[str, list[Path]] = {}
    for path in sorted(place.rglob("*.json")):
        if ".parts-" in path.parent.name:
            found.setdefault(path.name.partition("-")[0], []).append(path)
    return found


def run_until_complete(make: Callable[..., list[tasks.Task]]) -> Any:
    """Run all parts as often as they say that they must be run again; return the last report, or
    the text of the last error.
    """
    for _ in range(3):
        try:
            return [task.run() for task in make(num_tasks=2)][-1]
        except CheckpointingException as error:
            last = str(error)
    return last


def check_damaged(case: Case, folder: Path, top: Path, repeats: int) -> None:
    """Parts find damage to notes, and it costs no more than work: reports and outputs are right."""
    expected, chance = case.in_one(folder, top / "one"), random.Random(7)
    for num_done in (1, 2):
        begun, place = top / f"begun {num_done}", top / "place"
        for task in case.in_parts(folder, begun / "out", num_tasks=2)[:num_done]:
            task.run()
        for kind, how in itertools.product(notes_in(begun), ["flipped", "cut", "lost"] * repeats):
            shutil.copytree(begun, place, symlinks=True)
            note = chance.choice(notes_in(place)[kind])
            content = damaged(note.read_bytes(), chance, how)
            note.unlink() if content is None else note.write_bytes(content)
            found = run_until_complete(functools.partial(case.in_parts, folder, place / "out"))
            where = f"{how} {note.name} after {num_done} parts: {found}"
            if isinstance(found, str):
                # The output had appeared before.
                assert case.has_output, where
                assert (kind, num_done) == ("piece", 2) or (kind, how) == ("done", "lost"), where
                assert "report alone is lost" in found or "was removed from" in found, where
            else:
                assert found.is_complete, where
                assert without_seconds(found.report) == without_seconds(expected), where
            if case.has_output:
                assert contents_of(place / "out") == contents_of(top / "one"), where
            shutil.rmtree(place)


@pytest.mark.parametrize("name", one_in(4, CASES, 2))
def test_damaged_notes(name, folder, tmp_path):
    check_damaged(CASES[name], folder, tmp_path, repeats=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_damaged_notes_sweep(name, folder, tmp_path):
    check_damaged(CASES[name], folder, tmp_path, repeats=10)
