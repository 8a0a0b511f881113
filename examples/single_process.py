"""Train in one process, save model and optimizer, and resume: no process group, no launcher.

    python examples/single_process.py --work-dir /tmp/single_process

Saves halfway, trains to the end, and resumes a new model from the checkpoint: the losses are equal.
Then inspects the checkpoint without the model, and damages it to show that the damage is detected.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distckpt

NUM_STEPS, SAVE_AT = 20, 10


class Trainer:
    """A small network that learns to add up its inputs."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.optimizer, self.step = torch.optim.AdamW(self.model.parameters(), lr=0.01), 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def load(self, path: Path) -> None:
        self.step = distckpt.load(self.state(), path)["step"]

    def train_step(self) -> float:
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(self.step))
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()


def print_size(report: distckpt.SaveReport) -> None:
    print(f"saved {report.num_bytes} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoint")
    path: Path = parser.parse_args().work_dir / f"step_{SAVE_AT}"

    trainer, losses = Trainer(seed=1), []
    for step in range(NUM_STEPS):
        if step == SAVE_AT:
            distckpt.save(trainer.state(), path, overwrite=True, on_report=print_size)
        losses.append(trainer.train_step())

    resumed = Trainer(seed=2)  # another seed, so that nothing is right before loading
    resumed.load(path)
    again = [resumed.train_step() for _ in range(resumed.step, NUM_STEPS)]
    print(
        f"loss {losses[0]:.4f} at the start, {losses[SAVE_AT]:.4f} when saved, {losses[-1]:.4f} at "
        "the end"
    )
    print(
        f"resumed: {again[0]:.4f} to {again[-1]:.4f}, "
        f"{'equal' if again == losses[SAVE_AT:] else 'NOT EQUAL'}"
    )

    tensors = distckpt.open(path).tensors  # no model needed
    print(f"{len(tensors)} tensors, 0.weight {tensors['0.weight'].shape}")
    shard_file = next(iter(sorted((path / "tensors").glob("*.safetensors"))))
    content = bytearray(shard_file.read_bytes())
    content[-1] ^= 1
    shard_file.write_bytes(content)
    print(f"one bit changed: {distckpt.verify(path).problems[0].message}")


if __name__ == "__main__":
    main()
