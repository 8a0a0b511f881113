"""Managers with local directories on imitated hosts.

Ranks with different local directories are on different hosts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from distckpt import CheckpointManager, ShardedTensor
from tests.support.harness import run
from tests.support.s3_server import reached_at

ROWS = 3 << 10
"""Of 64 elements and 4 bytes each."""


def table(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64) + step


def state_of(rank: int, num_ranks: int, step: int | None) -> dict:
    values = torch.zeros(ROWS, 64) if step is None else table(step)
    rows = values.chunk(num_ranks)[rank].clone()
    copied = torch.zeros(999) if step is None else torch.full((999,), float(step))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)),
        "copied": ShardedTensor.from_rank_offsets("copied", copied, replica_id=rank),
        "step": -1 if step is None else step,
    }


def manager_of(rank: int, base: str, per_host: int, **settings) -> CheckpointManager:
    root = settings.pop("root", f"{base}/root")
    settings = {"durable": False, **settings}
    return CheckpointManager(root, local=f"{base}/host{rank // per_host}", **settings)


def at_store(settings: dict) -> contextlib.AbstractContextManager[None]:
    """Let this rank find S3, if a server is among the settings."""
    server = settings.pop("server", None)
    return contextlib.nullcontext() if server is None else reached_at(server)


def save_steps(rank, num_ranks, base, per_host, steps, settings):
    with at_store(settings), manager_of(rank, base, per_host, **settings) as manager:
        for step in steps:
            manager.save(step, state_of(rank, num_ranks, step)).result()
            manager.wait(uploaded=True)
        return {step: dict(vars(state)) for step, state in manager.states.items()}


def load_newest(rank, num_ranks, base, per_host, settings):
    """Return the step that was loaded, after comparing all its values, and what was skipped."""
    with at_store(settings), manager_of(rank, base, per_host, **settings) as manager:
        found = manager.steps(), manager.latest()
        state = state_of(rank, num_ranks, None)
        loaded = manager.load(state)
        step = loaded["step"]
        assert torch.equal(loaded["rows"], table(step).chunk(num_ranks)[rank])
        assert torch.equal(loaded["copied"], torch.full((999,), float(step)))
        return step, found, manager.skipped


def saved(base: Path, num_ranks: int, per_host: int, steps, **settings) -> list[dict]:
    return run(save_steps, num_ranks, num_ranks, str(base), per_host, steps, settings)


def loaded(base: Path, num_ranks: int, per_host: int, **settings) -> int:
    results = run(load_newest, num_ranks, num_ranks, str(base), per_host, settings)
    assert all(result == results[0] for result in results)
    return results[0][0]


def directories(base: Path, host: int) -> list[str]:
    (of_run,) = (base / f"host{host}").glob("run-*")
    return sorted(path.name for path in of_run.iterdir() if path.is_dir())


def files_of_step(base: Path, host: int, step: int) -> list[Path]:
    return sorted((base / f"host{host}").glob(f"run-*/step_{step:08d}/*/*"))
