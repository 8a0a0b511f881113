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
from _tiny_training import NUM_STEPS, SAVE_AT, forward_backward, report, start

import distckpt
from distckpt.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state

NUM_EXPERTS = 8


class Trainer:
    """A model, its optimizer, and the number of steps done. The data parallel ranks share out the experts."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, make_model(layout, seed, NUM_EXPERTS), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def sharded_state_dict(self) -> dict[str, Any]:
        model, optimizer = self.model.sharded_state_dict(), self.optimizer.state_dict()
        shards = get_param_id_to_sharded_param_map(model, self.model.parameters())
        # Adam counts steps per parameter; ours are all equal.
        optim_state_to_sharding_state(optimizer, shards, exclude_keys="step")
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load(self, path: Path) -> None:
        for p in self.model.parameters():  # Adam allocates its state at its first step, which is too late here
            self.optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state = distckpt.load(self.sharded_state_dict(), path)
        # The tensors were loaded in place; the rest has to be handed over.
        self.step = state["step"]
        for moments in state["optimizer"]["state"].values():
            moments["step"] = torch.tensor(float(self.step))
        self.optimizer.load_state_dict(state["optimizer"])

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, self.step)
        for name, p in self.model.named_parameters():
            if ".experts." not in name:  # an expert has seen the tokens of all ranks
                all_reduce(p.grad, self.layout.dp)
        self.optimizer.step()
        self.step += 1
        return loss


def main() -> None:
    work_dir = start(__doc__)
    trainer, losses = Trainer(make_layout(tp=1, pp=1, dp=4), seed=1), []
    for step in range(NUM_STEPS):
        if step == SAVE_AT:
            distckpt.save(trainer.sharded_state_dict(), work_dir / "ep4", overwrite=True)
        losses.append(trainer.train_step())

    trainer = Trainer(make_layout(tp=2, pp=1, dp=2), seed=2)  # another seed: nothing is right before it is loaded
    trainer.load(work_dir / "ep4")
    distckpt.save(trainer.sharded_state_dict(), work_dir / "ep2-tp2", overwrite=True)
    resumed = [trainer.train_step() for _ in range(trainer.step, NUM_STEPS)]
    report([work_dir / "ep4", work_dir / "ep2-tp2"], losses, resumed)


if __name__ == "__main__":
    main()
