"""Save an FSDP2 model and its optimizer on 4 processes, resume on 2 and on 1, and export it.

    python examples/fsdp2.py --work-dir /tmp/fsdp2

Trains with `fully_shard` and AdamW on 4 gloo processes, saves, and continues. Then loads on 2
processes, and in a single process without a process group and without FSDP, and resumes training.
After loading, all values must be bitwise equal, and the losses equal up to the order of additions.
distckpt derives the sharding of each tensor from the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distckpt

VOCAB, WIDTH, NUM_STEPS, SAVE_AT = 101, 30, 8, 4  # FSDP2 divides 101 and 30 unevenly among 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Trainer:
    """A model that predicts a token from the one before, its optimizer, and the number of steps
    done.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB, bias=False)
        )
        self.model[3].weight = self.model[0].weight  # tied
        nn.init.normal_(self.model[0].weight, std=0.1)
        if dist.is_initialized():
            for block in self.model[1:3]:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer, self.step = torch.optim.AdamW(self.model.parameters(), lr=0.01), 0

    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def load(self, path: Path) -> None:
        self.step = distckpt.load(self.state(), path)["step"]

    def train_step(self, rank: int, size: int) -> float:
        """Train on this process's part of a batch; return the mean loss over all processes."""
        tokens = torch.randint(VOCAB, (8, 16), generator=torch.Generator().manual_seed(self.step))[
            rank::size
        ]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            self.model(tokens).flatten(0, 1), (3 * tokens + 1).flatten() % VOCAB
        )
        loss.backward()
        self.optimizer.step()
        self.step += 1
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        return total.item()


def train(rank: int, size: int, rendezvous: str, work_dir: Path) -> None:
    """Train from the start on 4 processes, or resume on fewer; store a checkpoint and the
    losses.
    """
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
        )
    trainer, losses = (
        Trainer(seed=size),
        [],
    )  # another seed, so that nothing is right before loading
    if size < 4:
        trainer.load(work_dir / "saved_by_4")
    while trainer.step < NUM_STEPS:
        if trainer.step == SAVE_AT:
            distckpt.save(trainer.state(), work_dir / f"saved_by_{size}", overwrite=True)
        losses.append(trainer.train_step(rank, size))
    if rank == 0:
        (work_dir / f"losses_of_{size}.json").write_text(json.dumps(losses))
    if size > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoints")
    work_dir: Path = parser.parse_args().work_dir
    is_ok = True
    for size in (4, 2, 1):
        with tempfile.TemporaryDirectory() as folder:
            args = (size, f"{folder}/rendezvous", work_dir)
            torch.multiprocessing.spawn(train, args, nprocs=size) if size > 1 else train(0, *args)
        saved, again = (distckpt.open(work_dir / f"saved_by_{n}").read_tensors() for n in (4, size))
        equal = saved.keys() == again.keys() and all(
            torch.equal(again[key], saved[key]) for key in saved
        )
        first, losses = (
            json.loads((work_dir / f"losses_of_{n}.json").read_text()) for n in (4, size)
        )
        off = max(
            abs(a - b) / b for a, b in zip(losses[-SAVE_AT:], first[-SAVE_AT:], strict=True)
        )  # relative
        print(
            f"On {size}: {len(again)} tensors, {'all' if equal else 'NOT'} equal; losses off by "
            f"{off:.0e} at most"
        )
        is_ok &= equal and off < 1e-4
    source, target = work_dir / "saved_by_4", work_dir / "exported"
    distckpt.consolidate(source, target, overwrite=True)
    exported = load_file(target / "model.safetensors")
    equal = len(exported) > 0 and all(torch.equal(exported[name], saved[name]) for name in exported)
    print(f"Exported {len(exported)} tensors for Hugging Face, {'all' if equal else 'NOT'} equal.")
    sys.exit(0 if is_ok and equal else 1)


if __name__ == "__main__":
    main()
