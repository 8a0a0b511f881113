"""Save a mixture of experts at expert parallel 4, and load it at expert parallel 2 x tensor parallel 2.

    torchrun --standalone --nproc-per-node 4 examples/moe.py --work-dir /tmp/moe

Each of the 4 ranks trains 2 of the 8 experts of a layer. After loading, 2 ranks train the halves of 4 experts, and 2
ranks the halves of the others. That works because a checkpoint numbers the experts over the whole model, and has a
place for each part of a fused SwiGLU weight: see `MoE` and `SwiGLU` in `_tiny_experts.py`. All values, those of
Adam's moments too, must be equal bit by bit after loading, and the losses up to the order of additions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _tiny_experts import make_model
from _tiny_lm import Layout, all_reduce, make_layout
from _tiny_training import forward_backward, make_batch, start, train_and_resume

import distckpt
from distckpt.optimizer import load_sharded_optimizer_state_dict, sharded_optimizer_state_dict

NUM_EXPERTS = 8


class Trainer:
    """A model, its optimizer, and the number of steps done. The data parallel ranks share out the experts."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, make_model(layout, seed, NUM_EXPERTS), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def sharded_state_dict(self) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        return {"model": model, "optimizer": sharded_optimizer_state_dict(self.optimizer, model), "step": self.step}

    def save(self, path: Path) -> None:
        distckpt.save(self.sharded_state_dict(), path, overwrite=True)

    def load(self, path: Path) -> None:
        state = distckpt.load(self.sharded_state_dict(), path)
        # The model's tensors were loaded in place; the rest has to be handed over.
        load_sharded_optimizer_state_dict(self.optimizer, state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, *make_batch(self.step))
        for name, p in self.model.named_parameters():
            if ".experts." not in name:  # an expert has seen the tokens of all ranks
                all_reduce(p.grad, self.layout.dp)
        self.optimizer.step()
        self.step += 1
        return loss


def main() -> None:
    work_dir = start(__doc__)
    first = Trainer(make_layout(tp=1, pp=1, dp=4), seed=1)
    second = Trainer(make_layout(tp=2, pp=1, dp=2), seed=2)  # another seed: nothing is right before it is loaded
    train_and_resume(first, second, [work_dir / "ep4", work_dir / "ep2-tp2"])


if __name__ == "__main__":
    main()
