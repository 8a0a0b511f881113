"""Save the flattened shards of a distributed optimizer (ZeRO-1), and load them in another layout.

    torchrun --standalone --nproc-per-node 4 examples/zero1.py --work-dir /tmp/zero1

Trains at tensor parallel 2 x data parallel 2, saves, and continues; then loads at pipeline parallel
2 x data parallel 2 and resumes. Each data parallel rank holds an equal part of every bucket: a
range of elements that may begin and end anywhere in the parameters, even inside a fused SwiGLU
weight, which `zero1_shards` describes. After loading, all values must be bitwise equal, and the
losses equal up to the order of additions. What each data parallel rank has of its own (`PerRank`)
is restored, since the number of these ranks is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _tiny_experts import make_model
from _tiny_lm import Axis, Layout, all_reduce, make_layout
from _tiny_training import NUM_MICROBATCHES, forward_backward, make_batch, start, train_and_resume
from torch import Tensor, nn

import distckpt
from distckpt.optimizer import zero1_shards

BUCKET_SIZE, LEARNING_RATE, BETAS = 20_000, 3e-3, (0.9, 0.95)


class Bucket:
    """Parameters concatenated in one padded flat tensor, of which this rank holds an equal part."""

    def __init__(self, params: list[nn.Parameter], dp: Axis) -> None:
        self.params, self.dp = params, dp
        self.share = -(-sum(p.numel() for p in params) // dp.size)
        self.first = dp.rank * self.share
        own = self._own_part([p.detach() for p in params]).clone()
        self.state = {
            "param": own,
            "exp_avg": torch.zeros_like(own),
            "exp_avg_sq": torch.zeros_like(own),
        }

    def _own_part(self, tensors: list[Tensor | None], reduce: bool = False) -> Tensor:
        flat = torch.cat([t.flatten() for t in tensors])
        flat = nn.functional.pad(flat, (0, self.share * self.dp.size - len(flat)))
        return (all_reduce(flat, self.dp) if reduce else flat)[self.first : self.first + self.share]

    def update(self, step: int) -> None:
        """Do a step of Adam on this rank's part, then gather the parameters."""
        gradient = self._own_part([p.grad for p in self.params], reduce=True)
        param, mean, square = self.state.values()
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        scale = (square / (1 - BETAS[1] ** step)).sqrt() + 1e-8
        param.addcdiv_(mean, scale, value=-LEARNING_RATE / (1 - BETAS[0] ** step))
        parts = [torch.empty_like(param) for _ in range(self.dp.size)]
        dist.all_gather(parts, param, group=self.dp.group)
        sizes = [p.numel() for p in self.params]
        for p, values in zip(self.params, torch.cat(parts)[: sum(sizes)].split(sizes), strict=True):
            p.data.copy_(values.view_as(p))

    def sharded_state_dict(self, model: dict[str, Any]) -> list[Any]:
        """Describe this rank's part; padding is not saved."""
        return zero1_shards(self.params, model, self.state, self.first, self.first + self.share)


class Trainer:
    """A model, its optimizer, and the number of steps done."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, make_model(layout, seed), 0
        # Microbatches that this data parallel rank has trained on.
        self.seen = distckpt.PerRank(0, {"dp": (layout.dp.rank, layout.dp.size)})
        self.params, self.buckets, members = list(self.model.parameters()), [], []
        for param in self.params:
            members.append(param)
            if param is self.params[-1] or sum(p.numel() for p in members) > BUCKET_SIZE:
                self.buckets.append(Bucket(members, layout.dp))
                members = []

    def sharded_state_dict(self) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        optimizer = [bucket.sharded_state_dict(model) for bucket in self.buckets]
        return {"model": model, "optimizer": optimizer, "step": self.step, "seen": self.seen}

    def save(self, path: Path) -> None:
        distckpt.save(self.sharded_state_dict(), path, overwrite=True)

    def load(self, path: Path) -> None:
        # Tensors, including flattened ones, and `seen` are loaded in place; only the step is
        # restored here.
        self.step = distckpt.load(self.sharded_state_dict(), path)["step"]

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, *make_batch(self.step))
        self.step += 1
        self.seen.value += NUM_MICROBATCHES // self.layout.dp.size
        for bucket in self.buckets:
            bucket.update(self.step)
        return loss


def main() -> None:
    work_dir = start(__doc__)
    first = Trainer(make_layout(tp=2, pp=1, dp=2), seed=1)
    second = Trainer(
        make_layout(tp=1, pp=2, dp=2), seed=2
    )  # another seed, so that nothing is right before loading
    train_and_resume(first, second, [work_dir / "tp2-dp2", work_dir / "pp2-dp2"])


if __name__ == "__main__":
    main()
