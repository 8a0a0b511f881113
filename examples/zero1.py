"""Save the flattened, bucketed shards of a distributed optimizer (ZeRO-1), and load them under another layout.

    torchrun --standalone --nproc-per-node 4 examples/zero1.py --work-dir /tmp/zero1

Trains at tensor parallel 2 x data parallel 2, saves, and continues; then loads at tensor parallel 1 x data parallel 4
and resumes. Each data parallel rank holds an equal part of every bucket: a range of elements that may begin and end
anywhere in the parameters, even inside a fused SwiGLU weight. `flattened_range` specifies the range. After loading, all
values must be bitwise equal, and the losses equal up to the order of additions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _tiny_experts import make_model
from _tiny_lm import Axis, Layout, all_reduce, make_layout
from _tiny_training import forward_backward, make_batch, start, train_and_resume
from torch import Tensor, nn

import distckpt
from distckpt.optimizer import get_param_id_to_sharded_param_map

BUCKET_SIZE, LEARNING_RATE, BETAS = 20_000, 3e-3, (0.9, 0.95)


class Bucket:
    """Parameters concatenated in one padded flat tensor, of which this rank holds an equal part."""

    def __init__(self, params: list[nn.Parameter], dp: Axis) -> None:
        self.params, self.dp = params, dp
        self.share = -(-sum(p.numel() for p in params) // dp.size)
        self.first = dp.rank * self.share
        own = self._own_part([p.detach() for p in params]).clone()
        self.state = {"param": own, "exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}

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

    def sharded_state_dict(self, shards: list[Any]) -> list[Any]:
        """Describe this rank's part. `shards` are those of the parameters; padding is not saved."""
        described, start = [], 0
        for param, shard in zip(self.params, shards, strict=True):
            low, high = max(self.first, start), min(self.first + self.share, start + param.numel())
            own, run = slice(low - self.first, high - self.first), slice(low - start, high - start)
            # Only tensor parallel ranks hold replicas: data parallel ranks have different elements.
            flat = {"flattened_range": run, "replica_id": (shard.replica_id[0], 0)}
            for name, values in self.state.items() if low < high else ():
                described.append(replace(shard, key=f"optimizer.{name}.{shard.key}", data=values[own], **flat))
            start += param.numel()
        return described


class Trainer:
    """A model, its optimizer, and the number of steps done."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, make_model(layout, seed), 0
        self.params, self.buckets, members = list(self.model.parameters()), [], []
        for param in self.params:
            members.append(param)
            if param is self.params[-1] or sum(p.numel() for p in members) > BUCKET_SIZE:
                self.buckets.append(Bucket(members, layout.dp))
                members = []

    def sharded_state_dict(self) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        by_number = get_param_id_to_sharded_param_map(model, self.params)
        shards = iter([by_number[number] for number in range(len(self.params))])
        optimizer = [bucket.sharded_state_dict([next(shards) for _ in bucket.params]) for bucket in self.buckets]
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def save(self, path: Path) -> None:
        distckpt.save(self.sharded_state_dict(), path, overwrite=True)

    def load(self, path: Path) -> None:
        # Tensors, including flattened ones, are loaded in place; only the step is restored here.
        self.step = distckpt.load(self.sharded_state_dict(), path)["step"]

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, *make_batch(self.step))
        self.step += 1
        for bucket in self.buckets:
            bucket.update(self.step)
        return loss


def main() -> None:
    work_dir = start(__doc__)
    first = Trainer(make_layout(tp=2, pp=1, dp=2), seed=1)
    second = Trainer(make_layout(tp=1, pp=1, dp=4), seed=2)  # another seed, so that nothing is right before loading
    train_and_resume(first, second, [work_dir / "tp2-dp2", work_dir / "tp1-dp4"])


if __name__ == "__main__":
    main()
