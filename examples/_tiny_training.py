"""What the examples of resuming in another layout share: a batch, the loss of the language model, and the verdict."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _tiny_lm import CONTEXT, Layout, TinyLM, all_reduce, cross_entropy
from torch import Tensor

import distckpt

NUM_STEPS, SAVE_AT = 6, 3
NUM_MICROBATCHES = 4  # of each step, over all processes; every layout sees the same ones
TOLERANCE = 1e-5  # relative; another layout adds up float32 numbers in another order


def start(doc: str) -> Path:
    """Start this process of a program with that docstring; return where its user wants the checkpoints."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoints")
    work_dir: Path = parser.parse_args().work_dir
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit("run this with torchrun --nproc-per-node 4")
    return work_dir


def forward_backward(model: TinyLM, layout: Layout, step: int) -> float:
    """Compute the gradients of this process's microbatches; return the mean loss over all processes."""
    total = torch.zeros(())
    model.zero_grad()
    for i in range(layout.dp.rank, NUM_MICROBATCHES, layout.dp.size):
        tokens = _make_microbatch(NUM_MICROBATCHES * step + i)
        logits = model(tokens[:, :-1], 1000 * (NUM_MICROBATCHES * step + i))
        loss = cross_entropy(logits, tokens[:, 1:], layout.tp) / NUM_MICROBATCHES
        loss.backward()
        total += loss.detach()
    return all_reduce(total, layout.dp).item()


def _make_microbatch(seed: int) -> Tensor:
    """Make something to learn, [4, CONTEXT + 1]: bytes that go up, in each row by an increment of its own."""
    rng = torch.Generator().manual_seed(seed)
    first, increment = torch.randint(256, (4, 1), generator=rng), torch.randint(1, 5, (4, 1), generator=rng)
    return (first + increment * torch.arange(CONTEXT + 1)) % 256


def report(paths: Sequence[Path], losses: Sequence[float], resumed: Sequence[float]) -> None:
    """Print whether two checkpoints hold the same values, and two runs have the same losses; end with an error if not.

    Args:
        paths: the checkpoint of the first layout, and the one saved by the second layout after loading the first.
        losses: of the uninterrupted run.
        resumed: of the steps after loading.
    """
    first, second = (distckpt.load_plain_tensors(path) for path in paths)
    wrong = sorted(key for key in first.keys() | second.keys() if not _is_equal(first.get(key), second.get(key)))
    expected = losses[len(losses) - len(resumed) :]
    differences = [abs(a - b) / b for a, b in zip(resumed, expected, strict=True)]
    is_close = all(difference <= TOLERANCE for difference in differences)  # also false for NaN
    if dist.get_rank() == 0:
        num_values = sum(tensor.numel() for tensor in first.values())
        verdict = f"NOT equal: {wrong}" if wrong else "all equal, bit by bit"
        print(f"Loaded and saved again: {len(first)} tensors, {num_values} values, {verdict}.")
        print(f"Loss: {losses[0]:.6f} at the start, {expected[0]:.6f} when saved, {expected[-1]:.6f} at the end.")
        print(f"Loss after loading: {resumed[0]:.6f} to {resumed[-1]:.6f}.")
        verdict = "continues with the same loss" if is_close else "does NOT continue with the same loss"
        print(f"Training {verdict}, largest relative difference {max(differences):.1e}.")
    dist.barrier()
    dist.destroy_process_group()
    if wrong or not is_close:
        sys.exit(1)


def _is_equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and first.dtype == second.dtype and torch.equal(first, second)
