"""Reads that must come out right or not at all, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.scenarios import (
    NEW,
    OLD,
    check_same,
    checkpoint_of_torch,
    old_checkpoint,
    scenario_state,
    source_and_old_export,
    tensors_of,
)


class Reading(NamedTuple):
    """Something that is read: `run`, on every rank, compares what it gets with what it should."""

    name: str
    prepare: Callable[[Path], object]
    run: Callable[[Path, int, int], object]
    max_ranks: int = 2


def load_all(folder: Path, rank: int, num_ranks: int) -> None:
    """Load under the layout of the ranks, from one that one process has saved."""
    state = {key: part for key, part in scenario_state(0, rank, num_ranks).items() if key != "rng"}
    loaded = distckpt.load(state, folder / "checkpoint")
    expected = scenario_state(OLD, rank, num_ranks)
    assert loaded["value"] == OLD
    check_same(
        {key: loaded[key] for key in tensors_of(OLD)},
        {key: expected[key].data for key in tensors_of(OLD)},
    )


def verify_all(folder: Path, rank: int, num_ranks: int) -> None:
    """Verify; damage is reported, and raised here."""
    report = distckpt.verify(folder / "checkpoint", num_threads=1)
    if not report.is_whole:
        raise distckpt.CorruptCheckpointError(str(report.problems))


def wide_checkpoint(folder: Path) -> None:
    distckpt.save({"wide": ShardedTensor.from_rank_offsets("wide", wide())}, folder / "checkpoint")


def wide() -> torch.Tensor:
    """Return a tensor whose rows are so long that parts of them are read one by one."""
    return torch.arange(8 * 8192).view(8, 8192)


def load_columns(folder: Path, rank: int, num_ranks: int) -> None:
    part = wide().chunk(2, 1)[rank]
    target = ShardedTensor.from_rank_offsets("wide", torch.zeros_like(part), (1, rank, 2))
    options = {"verify": False, "validate_access_integrity": num_ranks == 2}
    assert torch.equal(
        distckpt.load({"wide": target}, folder / "checkpoint", **options)["wide"], part
    )


def load_exported(folder: Path, rank: int, num_ranks: int) -> None:
    rows = tensors_of(OLD)["rows"].chunk(num_ranks)[rank]
    target = ShardedTensor.from_rank_offsets("rows", torch.zeros_like(rows), (0, rank, num_ranks))
    assert torch.equal(distckpt.load({"rows": target}, folder / "export")["rows"], rows)


def load_from_torch(folder: Path, rank: int, num_ranks: int) -> None:
    rows = tensors_of(NEW)["rows"].chunk(num_ranks)[rank]
    target = ShardedTensor.from_rank_offsets("rows", torch.zeros_like(rows), (0, rank, num_ranks))
    assert torch.equal(distckpt.load({"rows": target}, folder / "dcp")["rows"], rows)


READINGS = {
    reading.name: reading
    for reading in [
        Reading("load", old_checkpoint, load_all),
        Reading("load_sparse", wide_checkpoint, load_columns),
        Reading("load_export", source_and_old_export, load_exported),
        Reading("load_from_torch", checkpoint_of_torch, load_from_torch),
        Reading("verify", old_checkpoint, verify_all, max_ranks=1),
    ]
}
"""All that must come out right or not at all, by name."""
