"""Train on 4 processes, lose one, go on with 3, and then with 6, without a checkpoint on the way.

    torchrun --standalone --nproc-per-node 6 examples/elastic.py --work-dir /tmp/elastic

The model is sharded by `fully_shard` and trained by AdamW: on 4 processes in two replicas of two
shards each, so that no value is lost with the fourth. `redistribute` fills the model and optimizer
of each new layout from the memories of the processes that are left; a process that only gives, or
only takes, passes an empty dict. The losses are those of a run on one process that nothing happens
to. What is trained in the end is saved, to look at it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import distckpt

VOCAB, WIDTH, NUM_STEPS = 101, 30, 4  # steps on each number of processes
LAYOUTS = {4: [[0, 1], [2, 3]], 3: [0, 1, 2], 6: [0, 1, 2, 3, 4, 5]}
AXES = {4: ("replicate", "shard")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Trainer:
    """A model that predicts a token from the one before, its optimizer, and the number of steps
    done.
    """

    def __init__(self, mesh: DeviceMesh | None, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB, bias=False)
        )
        if mesh is not None:
            for block in self.model[1:3]:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, until: int, rank: int = 0, size: int = 1, group: object = None) -> list[float]:
        """Train on this process's part of each batch; return the mean losses over all processes."""
        losses = []
        while self.state["step"] < until:
            rng = torch.Generator().manual_seed(self.state["step"])
            tokens = torch.randint(VOCAB, (12, 16), generator=rng)[rank::size]
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                self.model(tokens).flatten(0, 1), (3 * tokens + 1).flatten() % VOCAB
            )
            loss.backward()
            self.optimizer.step()
            self.state["step"] += 1
            total = loss.detach() / size
            if size > 1:
                dist.all_reduce(total, group=group)
            losses.append(total.item())
        return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to save the end")
    work_dir: Path = parser.parse_args().work_dir
    dist.init_process_group("gloo")
    rank, trainer, losses = dist.get_rank(), None, []
    for size, layout in LAYOUTS.items():
        mesh = DeviceMesh("cpu", layout, mesh_dim_names=AXES.get(size, ("shard",)))
        group = dist.new_group(range(size))
        # Another seed, so that nothing is right before it is moved.
        joined = Trainer(mesh, seed=size) if rank < size else None
        old, trainer = trainer, joined
        if size != 4:
            is_lost = size == 3 and rank == 3
            old_state = {} if old is None or is_lost else old.state
            report = distckpt.redistribute(old_state, joined.state if joined else {})
            if rank == 0:
                print(f"{report.num_bytes} bytes moved to {size} processes")
        if trainer is not None:
            until = NUM_STEPS * (1 + list(LAYOUTS).index(size))
            losses += trainer.train(until, rank, size, group)
    distckpt.save(trainer.state, work_dir / "end", overwrite=True)
    is_ok = True
    if rank == 0:
        alone = Trainer(None, seed=4).train(NUM_STEPS * len(LAYOUTS))
        off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        is_ok = off < 1e-4
        print(f"loss {losses[0]:.4f} on 4, {losses[NUM_STEPS]:.4f} on 3, {losses[-1]:.4f} on 6")
        print(f"losses off by {off:.0e} at most")
    dist.destroy_process_group()
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
