"""Operations that must stay atomic whatever happens to them, and the checks of their results.

A scenario has a folder in which something is there already, an operation that every rank calls, and
a judge that reads the folder afterwards, as users do and with the reference library: it finds what
was there before, or what the operation makes, or raises. Add one to `SCENARIOS`, and the sweeps
over crashes and over failing disks take it along.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import distckpt
from distckpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    ShardedObject,
    ShardedTensor,
)
from distckpt._storage import locations
from distckpt.streaming import save_safetensors_streaming, save_safetensors_streaming_sharded
from tests.support.hf_folders import read_export

OLD, NEW = 1, 2
"""What distinguishes the states before and after."""
GROUP_TIMEOUT = 15.0
"""Seconds that ranks wait for each other: short, since survivors wait it out; a busy machine takes
some to connect.
"""
LEFT = "shard-00009-model-00001-of-00001.safetensors"
"""A file that a save of more ranks has left."""
MAX_FILE_BYTES = 200
"""Small enough for exports of several files."""

Verdict = Literal["absent", "old", "new"]


class Scenario(NamedTuple):
    """Something to be interrupted.

    Attributes:
        name: of the test.
        prepare: makes in an empty folder what is there before; one process calls.
        run: the operation, given the folder, rank and number of ranks.
        judge: looks into the folder; one process calls.
        before: the verdict on what `prepare` has made.
        retry: what is called after an interruption; `run` itself when None. It leaves no threads.
        clears: whether `retry` removes everything that an interruption has left.
        max_ranks: that may take part.
    """

    name: str
    prepare: Callable[[Path], object]
    run: Callable[[Path, int, int], object]
    judge: Callable[[Path], Verdict]
    before: Verdict
    retry: Callable[[Path, int, int], object] | None = None
    clears: bool = False
    max_ranks: int = 4

    def run_again(self, folder: Path, rank: int, num_ranks: int) -> None:
        (self.retry or self.run)(folder, rank, num_ranks)


# --- States ---------------------------------------------------------------------------------------


def tensors_of(value: int) -> dict[str, torch.Tensor]:
    """Return the global tensors of a state; no two elements of the states are equal."""
    return {
        "rows": torch.arange(72, dtype=torch.float32).view(12, 6) + 1000 * value,
        "columns": torch.arange(36).view(3, 12) + 10_000 * value,
        "shared": torch.arange(24, dtype=torch.float64).view(4, 6) + 100_000 * value,
    }


def scenario_state(value: int, rank: int = 0, num_ranks: int = 1) -> dict[str, object]:
    """Return a rank's part of a state: rows, columns, a replica, an object and common state."""
    tensors = tensors_of(value)
    rows, columns = (
        tensors["rows"].chunk(num_ranks)[rank],
        tensors["columns"].chunk(num_ranks, 1)[rank],
    )
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows.clone(), (0, rank, num_ranks)),
        "columns": ShardedTensor.from_rank_offsets(
            "columns", columns.clone(), (1, rank, num_ranks)
        ),
        "shared": ShardedTensor.from_rank_offsets("shared", tensors["shared"], replica_id=rank),
        "rng": ShardedObject("rng", {"value": value, "rank": rank}, (num_ranks,), (rank,)),
        "value": value,
    }


# --- Judges ---------------------------------------------------------------------------------------


def verdict_on(path: Path, without: tuple[str, ...] = ()) -> Verdict:
    """Judge a checkpoint by checksums, by a load, and by the reference library; `without` some of
    its keys.
    """
    if not path.exists():
        assert not distckpt.megatron.check_is_distributed_checkpoint(path)
        return "absent"
    report = distckpt.verify(path)
    assert report.is_whole, report.problems
    objects = {
        name: o
        for name, o in distckpt.megatron.serialization.load_sharded_metadata(path).items()
        if o.key == "rng"
    }
    loaded = distckpt.load({**objects}, path)
    value = loaded.pop("value")
    assert all(rng["value"] == value for rng in loaded.values()), "objects of another save"
    expected = {key: tensor for key, tensor in tensors_of(value).items() if key not in without}
    check_same(distckpt.open(path).read_tensors(), expected)
    check_same(assembled(path), expected)
    return {OLD: "old", NEW: "new"}[value]


def assembled(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's tensors together from its files, without distckpt."""
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for path in sorted((checkpoint / "tensors").iterdir()):
        with safe_open(path, "pt") as file:
            info = file.metadata()
            shapes, offsets = (
                json.loads(info["distckpt_global_shapes"]),
                json.loads(info["DCP_SHARDING_INFO"]),
            )
            for key in file.keys():  # noqa: SIM118
                piece = file.get_tensor(key)
                whole = tensors.setdefault(key, torch.zeros(shapes[key], dtype=piece.dtype))
                place = zip(offsets[key]["saved_offsets"], piece.shape, strict=True)
                whole[tuple(slice(first, first + count) for first, count in place)] = piece
                filled[key] = filled.get(key, 0) + piece.numel()
    assert filled == {key: tensor.numel() for key, tensor in tensors.items()}
    return tensors


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert np.array_equal(found[key].numpy(), tensor.numpy()), f"{key!r} is a mixture"


def verdict_on_tensors(found: dict[str, torch.Tensor]) -> Verdict:
    value = OLD if float(found["rows"][0, 0]) == 1000 * OLD else NEW
    check_same(found, tensors_of(value))
    return "old" if value == OLD else "new"


# --- Saves ----------------------------------------------------------------------------------------


def save(folder: Path, rank: int, num_ranks: int, *, overwrite: bool = False) -> None:
    distckpt.save(scenario_state(NEW, rank, num_ranks), folder / "checkpoint", overwrite=overwrite)


def save_in_background(folder: Path, rank: int, num_ranks: int, *, overwrite: bool = False) -> None:
    state = scenario_state(NEW, rank, num_ranks)
    distckpt.async_save(
        state, folder / "checkpoint", overwrite=overwrite, timeout=GROUP_TIMEOUT
    ).result(200)


@contextlib.contextmanager
def without_exchange() -> Iterator[None]:
    """Let the system be one that cannot swap directories, such as some network file systems."""
    exchange, locations.exchange = locations.exchange, lambda *arguments: False
    try:
        yield
    finally:
        locations.exchange = exchange


def save_without_exchange(folder: Path, rank: int, num_ranks: int) -> None:
    with without_exchange():
        save(folder, rank, num_ranks, overwrite=True)


def remove_columns(folder: Path, rank: int, num_ranks: int) -> None:
    distckpt.megatron.remove_sharded_tensors(folder / "checkpoint", "columns")


def nothing(folder: Path) -> None:
    """Leave the folder empty."""


def old_checkpoint(folder: Path) -> None:
    distckpt.save(scenario_state(OLD), folder / "checkpoint")


def unfinished(folder: Path) -> None:
    (folder / "checkpoint" / "tensors").mkdir(parents=True)
    (folder / "checkpoint" / "tensors" / LEFT).write_bytes(b"of a save that did not finish")


def unfinished_among_others(folder: Path) -> None:
    """Files of others are there as well, which stay."""
    unfinished(folder)
    (folder / "checkpoint" / "notes" / "deep").mkdir(parents=True)
    (folder / "checkpoint" / "notes" / "deep" / "readme.txt").write_text("mine")
    (folder / "checkpoint" / "mine.txt").write_text("mine")


def judge_checkpoint(folder: Path) -> Verdict:
    return verdict_on(folder / "checkpoint")


def judge_unfinished(folder: Path) -> Verdict:
    """What an unfinished save has left is in one of two places."""
    (part,) = folder.rglob(LEFT)
    assert part.read_bytes() == b"of a save that did not finish"
    return "absent" if part.is_relative_to(folder / "checkpoint") else judge_checkpoint(folder)


def judge_among_others(folder: Path) -> Verdict:
    assert (folder / "checkpoint" / "notes" / "deep" / "readme.txt").read_text() == "mine"
    assert (folder / "checkpoint" / "mine.txt").read_text() == "mine"
    is_there = (folder / "checkpoint" / "metadata.json").exists()
    return judge_checkpoint(folder) if is_there else judge_unfinished(folder)


def judge_without_exchange(folder: Path) -> Verdict:
    """Where the old checkpoint has no name for a moment, whoever looks for it is told where it
    is.
    """
    verdict = judge_checkpoint(folder)
    if verdict != "absent":
        return verdict
    (aside,) = folder.glob(".checkpoint.old-*")
    with pytest.raises(CheckpointNotFoundError, match=str(aside)):
        distckpt.load({}, folder / "checkpoint")
    return verdict_on(aside)


def judge_removal(folder: Path) -> Verdict:
    has_columns = "columns" in distckpt.open(folder / "checkpoint").tensors
    assert verdict_on(folder / "checkpoint", () if has_columns else ("columns",)) == "old"
    return "old" if has_columns else "new"


# --- Conversion -----------------------------------------------------------------------------------


def checkpoint_of_torch(folder: Path) -> None:
    with warnings.catch_warnings():
        # It warns that one process saves alone.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({**tensors_of(NEW), "value": NEW}, checkpoint_id=str(folder / "dcp"))


def convert(folder: Path, rank: int, num_ranks: int, *, overwrite: bool = False) -> None:
    common = {"value": NEW}
    distckpt.reshard(
        folder / "dcp", folder / "checkpoint", common_state=common, overwrite=overwrite
    )


# --- Exports --------------------------------------------------------------------------------------


def source_of_export(folder: Path) -> None:
    distckpt.save(scenario_state(NEW), folder / "source")
    (folder / "reference").mkdir()
    (folder / "reference" / "config.json").write_text("{}")


def source_and_old_export(folder: Path) -> None:
    """An earlier export, of another number of files, in a directory that holds files of others."""
    source_of_export(folder)
    distckpt.save(scenario_state(OLD), folder / "old")
    distckpt.consolidate(folder / "old", folder / "export")
    (folder / "export" / "notes" / "deep").mkdir(parents=True)
    (folder / "export" / "notes" / "deep" / "readme.txt").write_text("mine")
    (folder / "export" / "mine.txt").write_text("mine")


def export(folder: Path, rank: int, num_ranks: int, *, overwrite: bool = False) -> None:
    options = {"max_file_bytes": MAX_FILE_BYTES, "extra_files_from": folder / "reference"}
    distckpt.consolidate(folder / "source", folder / "export", overwrite=overwrite, **options)


def judge_export(folder: Path) -> Verdict:
    if not (folder / "export").exists():
        return "absent"
    return verdict_on_tensors(read_export(folder / "export"))


def judge_export_over_another(folder: Path) -> Verdict:
    assert (folder / "export" / "notes" / "deep" / "readme.txt").read_text() == "mine"
    assert (folder / "export" / "mine.txt").read_text() == "mine"
    return judge_export(folder)


def stream_file(folder: Path, rank: int, num_ranks: int, *, value: int = NEW) -> None:
    tensors = tensors_of(value)
    meta = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    save_safetensors_streaming(tensors.items(), folder / "model.safetensors", meta)


def judge_file(folder: Path) -> Verdict:
    return verdict_on_tensors(load_file(folder / "model.safetensors"))


def old_file(folder: Path) -> None:
    stream_file(folder, 0, 1, value=OLD)


def stream_folder(folder: Path, rank: int, num_ranks: int) -> None:
    tensors = tensors_of(NEW)
    meta = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    save_safetensors_streaming_sharded(
        tensors.items(), folder / "export", meta, max_file_bytes=MAX_FILE_BYTES
    )


# --- Managers -------------------------------------------------------------------------------------


def two_steps(folder: Path) -> None:
    with CheckpointManager(folder, keep_last=2, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, scenario_state(OLD))
    (folder / "notes.txt").write_text("mine")


def save_step(
    folder: Path, rank: int, num_ranks: int, *, in_background: bool = False, overwrite: bool = False
) -> None:
    manager = CheckpointManager(
        folder, keep_last=2, async_save=in_background, timeout=GROUP_TIMEOUT
    )
    manager.save(3, scenario_state(NEW, rank, num_ranks), overwrite=overwrite).result(200)


def judge_steps(folder: Path) -> Verdict:
    """Every step that is there is whole; the oldest is removed only when the newest is there."""
    manager = CheckpointManager(folder)
    latest, steps = manager.latest(), manager.steps()
    assert (latest, manager.skipped) == (steps[-1], {})
    assert steps in ([1, 2], [1, 2, 3], [2, 3])
    verdicts = {step: verdict_on(Path(manager.location(step))) for step in steps}
    assert verdicts == {step: "new" if step == 3 else "old" for step in steps}
    assert manager.load({})["value"] == (NEW if latest == 3 else OLD)
    assert (folder / "notes.txt").read_text() == "mine"
    return verdicts[latest]


# --- All ------------------------------------------------------------------------------------------

_overwrite = partial(save, overwrite=True)
_step_again = partial(save_step, overwrite=True)

_SCENARIOS = [
    Scenario("save", nothing, save, judge_checkpoint, "absent", _overwrite),
    Scenario("overwrite", old_checkpoint, _overwrite, judge_checkpoint, "old"),
    Scenario(
        "overwrite_without_exchange",
        old_checkpoint,
        save_without_exchange,
        judge_without_exchange,
        "old",
    ),
    Scenario("save_over_unfinished", unfinished, save, judge_unfinished, "absent", _overwrite),
    Scenario(
        "save_among_others", unfinished_among_others, save, judge_among_others, "absent", _overwrite
    ),
    Scenario("async_save", nothing, save_in_background, judge_checkpoint, "absent", _overwrite),
    Scenario(
        "async_overwrite",
        old_checkpoint,
        partial(save_in_background, overwrite=True),
        judge_checkpoint,
        "old",
        _overwrite,
    ),
    Scenario("manager", two_steps, save_step, judge_steps, "old", _step_again, clears=True),
    Scenario(
        "async_manager",
        two_steps,
        partial(save_step, in_background=True),
        judge_steps,
        "old",
        _step_again,
        clears=True,
    ),
    Scenario("remove_tensors", old_checkpoint, remove_columns, judge_removal, "old", max_ranks=1),
    Scenario(
        "convert",
        checkpoint_of_torch,
        convert,
        judge_checkpoint,
        "absent",
        partial(convert, overwrite=True),
    ),
    Scenario(
        "export", source_of_export, export, judge_export, "absent", partial(export, overwrite=True)
    ),
    Scenario(
        "export_over_another",
        source_and_old_export,
        partial(export, overwrite=True),
        judge_export_over_another,
        "old",
    ),
    Scenario(
        "stream_folder",
        source_and_old_export,
        stream_folder,
        judge_export_over_another,
        "old",
        max_ranks=1,
    ),
    Scenario("stream_file", old_file, stream_file, judge_file, "old", max_ranks=1),
]

SCENARIOS = {scenario.name: scenario for scenario in _SCENARIOS}
"""All operations that must be atomic, by name."""
