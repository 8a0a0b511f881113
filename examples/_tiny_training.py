"""Code shared by the examples that resume in another layout, none of it about checkpoints.

Starting and ending processes, batches of data, gradients through pipeline stages, and the
comparison of losses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _tiny_lm import CONTEXT, WIDTH, Layout, TinyLM, all_reduce, cross_entropy
from torch import Tensor

import distckpt

NUM_MICROBATCHES, MICROBATCH = (
    4,
    4,
)  # of each step, over all processes; every layout sees the same ones
TOLERANCE = 1e-5  # relative; another layout adds float32 numbers in another order


# --- Processes ------------------------------------------------------------------------------------


def start(doc: str) -> Path:
    """Parse the arguments and initialize this process; return the directory for checkpoints."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoints")
    work_dir: Path = parser.parse_args().work_dir
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit("run this with torchrun --nproc-per-node 4")
    return work_dir


def finish(is_ok: bool) -> None:
    """Wait for all processes and leave the process group; exit with an error unless `is_ok`."""
    dist.barrier()
    dist.destroy_process_group()
    if not is_ok:
        sys.exit(1)


def in_plain_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process without torchrun's environment and without a process
    group.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _forget_torchrun) as pool:
        return pool.submit(function, *arguments).result()


def _forget_torchrun() -> None:
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(
            ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
        ):
            del os.environ[name]


# --- Batches --------------------------------------------------------------------------------------


def make_batch(step: int) -> tuple[Tensor, int]:
    """Make training data: increasing bytes, with a different increment in each row.

    Returns:
        Tokens, [NUM_MICROBATCHES, MICROBATCH, CONTEXT + 1], and a seed for dropout.
    """
    rngs = [
        torch.Generator().manual_seed(NUM_MICROBATCHES * step + i) for i in range(NUM_MICROBATCHES)
    ]
    drawn = [
        [torch.randint(*bounds, (MICROBATCH, 1), generator=rng) for bounds in ((0, 256), (1, 5))]
        for rng in rngs
    ]
    windows = [(first + increment * torch.arange(CONTEXT + 1)) % 256 for first, increment in drawn]
    return torch.stack(windows), 1000 * NUM_MICROBATCHES * step


def draw_batch(rng: torch.Generator) -> tuple[Tensor, int]:
    """Draw windows of the training text, and a seed, in the form of `make_batch`."""
    text = _read_text()
    starts = torch.randint(len(text) - CONTEXT, (NUM_MICROBATCHES, MICROBATCH), generator=rng)
    seed = int(torch.randint(2**60, (), generator=rng))
    return text[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)].long(), seed


@cache
def _read_text() -> Tensor:
    """Return the source of the standard library's top-level modules as bytes, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


# --- Training -------------------------------------------------------------------------------------


class Trainer(Protocol):
    """The interface that each example implements."""

    step: int

    def save(self, path: Path) -> None:
        """Save everything needed to resume training."""

    def load(self, path: Path) -> None:
        """Load a checkpoint written by `save`, also under another layout."""

    def train_step(self) -> float:
        """Train on one batch; return its loss averaged over all processes."""


def train(trainer: Trainer, until: int) -> list[float]:
    """Train from the trainer's step until another one; return the losses."""
    return [trainer.train_step() for _ in range(trainer.step, until)]


def train_and_resume(first: Trainer, second: Trainer, paths: Sequence[Path]) -> None:
    """Train 6 steps and save halfway; load in another layout, save again, and resume; report on
    both.

    Args:
        first: trains from the start, and saves.
        second: has different weights, and resumes.
        paths: the checkpoints of the first and of the second.
    """
    losses = train(first, until=3)
    first.save(paths[0])
    losses += train(first, until=6)
    second.load(paths[0])
    second.save(paths[1])
    report(paths, losses, train(second, until=6))


def forward_backward(model: TinyLM, layout: Layout, windows: Tensor, seed: int) -> float:
    """Run this process's microbatches through its pipeline stage: all of them forward, then all
    backward.

    Args:
        model: the stage; its gradients are replaced.
        layout: the layout of the processes.
        windows: tokens, [NUM_MICROBATCHES, MICROBATCH, CONTEXT + 1].
        seed: determines the dropout masks, together with the number of the microbatch.

    Returns:
        The mean loss over all processes.
    """
    dp, pp, tp = layout.dp, layout.pp, layout.tp
    is_first, is_last = pp.rank == 0, pp.rank == pp.size - 1
    total, passed = torch.zeros(()), []
    model.zero_grad()
    for i in range(dp.rank, NUM_MICROBATCHES, dp.size):
        if is_first:
            x = windows[i, :, :-1]
        else:
            x = torch.empty(MICROBATCH, CONTEXT, WIDTH)
            dist.recv(x, src=pp.ranks[pp.rank - 1])
            x.requires_grad_()
        y = model(x, seed + 1000 * i)
        if is_last:
            y = cross_entropy(y, windows[i, :, 1:], tp) / NUM_MICROBATCHES
            total += y.detach() / tp.size  # all tensor parallel ranks have the same loss
        else:
            dist.send(y.detach(), dst=pp.ranks[pp.rank + 1])
        passed.append((x, y))
    for x, y in passed:
        gradient = None
        if not is_last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=pp.ranks[pp.rank + 1])
        y.backward(gradient)
        if not is_first:
            dist.send(x.grad, dst=pp.ranks[pp.rank - 1])
    return all_reduce(total, layout.world).item()


# --- Verdicts -------------------------------------------------------------------------------------


def _largest_difference(losses: Sequence[float], expected: Sequence[float]) -> tuple[float, bool]:
    """Return the largest relative difference, and whether the order of additions explains it."""
    differences = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    # Check each, since the largest may hide a NaN.
    return max(differences), all(difference <= TOLERANCE for difference in differences)


def report_layouts(
    expected: Sequence[float], resumed: Mapping[tuple[str, int], Sequence[float]]
) -> bool:
    """Compare the losses of resumed runs with those of the uninterrupted one; return whether all
    agree.

    Args:
        expected: losses of the uninterrupted run, in the layout of the first row.
        resumed: losses by layout and number of ranks.
    """
    print(
        f"  {'layout':<27}{'ranks':<7}{'first loss':<12}{'last loss':<12}max difference (relative)"
    )
    print(
        f"  {'TP2 x PP2 x DP1':<27}{4:<7}{expected[0]:<12.6f}{expected[-1]:<12.6f}the "
        "uninterrupted run"
    )
    all_ok = True
    for (name, num_ranks), losses in resumed.items():
        difference, is_ok = _largest_difference(losses, expected)
        verdict = f"{difference:.1e} {'ok' if is_ok else 'WRONG'}"
        print(f"  {name:<27}{num_ranks:<7}{losses[0]:<12.6f}{losses[-1]:<12.6f}{verdict}")
        all_ok = all_ok and is_ok
    print(f"{'All agree' if all_ok else 'NOT all agree'} within {TOLERANCE}.")
    return all_ok


def report(paths: Sequence[Path], losses: Sequence[float], resumed: Sequence[float]) -> None:
    """Compare the values of two checkpoints and the losses of two runs; exit with an error if they
    differ.

    Args:
        paths: the checkpoint of the first layout, and the one saved by the second layout after
            loading the first.
        losses: of the uninterrupted run.
        resumed: of the steps after loading.
    """
    first, second = (distckpt.open(path).read_tensors() for path in paths)
    wrong = sorted(
        key
        for key in first.keys() | second.keys()
        if not _is_equal(first.get(key), second.get(key))
    )
    expected = losses[len(losses) - len(resumed) :]
    difference, is_close = _largest_difference(resumed, expected)
    if dist.get_rank() == 0:
        num_values = sum(tensor.numel() for tensor in first.values())
        verdict = f"NOT equal: {wrong}" if wrong else "all equal, bit by bit"
        print(f"Loaded and saved again: {len(first)} tensors, {num_values} values, {verdict}.")
        print(
            f"Loss: {losses[0]:.6f} at the start, {expected[0]:.6f} when saved, {expected[-1]:.6f} "
            "at the end."
        )
        print(f"Loss after loading: {resumed[0]:.6f} to {resumed[-1]:.6f}.")
        verdict = (
            "continues with the same loss" if is_close else "does NOT continue with the same loss"
        )
        print(f"Training {verdict}, largest relative difference {difference:.1e}.")
    finish(is_ok=is_close and not wrong)


def _is_equal(first: Tensor | None, second: Tensor | None) -> bool:
    return (
        first is not None
        and second is not None
        and first.dtype == second.dtype
        and torch.equal(first, second)
    )
