"""Save a mixture of experts at expert parallel 4, load it at expert parallel 2 x tensor parallel 2.

    torchrun --standalone --nproc-per-node 4 examples/moe.py --work-dir /tmp/moe

Each of the 4 ranks trains 2 of the 8 experts of a layer. After loading, 2 ranks each train one half
of 4 experts, and the other 2 ranks the halves of the other 4. This works because a checkpoint
numbers the experts globally and stores the parts of a fused SwiGLU weight separately: see `MoE` and
`SwiGLU` in `_tiny_experts.py`. After loading, all values, including Adam's moments, must be bitwise
equal, and the losses equal up to the order of additions.
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
    """A model, its optimizer, and the number of steps done. Experts are distributed over the data
    parallel ranks.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, make_model(layout, seed, NUM_EXPERTS), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def sharded_state_dict(self) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        return {
            "model": model,
            "optimizer": sharded_optimizer_state_dict(self.optimizer, model),
            "step": self.step,
        }

    def save(self, path: Path) -> None:
        distckpt.save(self.sharded_state_dict(), path, overwrite=True)

    def load(self, path: Path) -> None:
        state = distckpt.load(self.sharded_state_dict(), path)
        # The model's tensors were loaded in place; restore the rest.
        load_sharded_optimizer_state_dict(self.optimizer, state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, *make_batch(self.step))
        for name, p in self.model.named_parameters():
            if ".experts." not in name:  # an expert has processed the tokens of all ranks
                all_reduce(p.grad, self.layout.dp)
        self.optimizer.step()
        self.step += 1
        return loss


def main() -> None:
    work_dir = start(__doc__)
    first = Trainer(make_layout(tp=1, pp=1, dp=4), seed=1)
    second = Trainer(
        make_layout(tp=2, pp=1, dp=2), seed=2
    )  # another seed, so that nothing is right before loading
    train_and_resume(first, second, [work_dir / "ep4", work_dir / "ep2-tp2"])


if __name__ == "__main__":
    main()
