"""Train a language model on 4 processes, save it, resume under three other layouts, and export it.

    torchrun --standalone --nproc-per-node 4 examples/train_reshard_resume.py \
        --work-dir /tmp/reshard

1. Train at tensor parallel 2 x pipeline parallel 2; save halfway, and continue to the end.
2. Load at tensor parallel 4 and resume.
3. Load at data parallel 2, on two of the processes, and resume.
4. Load in one plain process without a process group and resume.
5. Export the weights, without the optimizer, as a Hugging Face style safetensors file.

The losses after loading must be those of the first run. This requires all state to be restored: the
weights and both moments of Adam, sharded differently, the decayed learning rate, the step, and the
state of the random number generator. Runs on CPU in under a minute; the training text is the source
of Python's standard library. `_tiny_lm.py` shows how each layer describes its shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _tiny_lm import Layout, TinyLM, all_reduce, make_layout
from _tiny_training import (
    draw_batch,
    finish,
    forward_backward,
    in_plain_process,
    report_layouts,
    start,
    train,
)

import distckpt
from distckpt.optimizer import load_sharded_optimizer_state_dict, sharded_optimizer_state_dict
from distckpt.rules import Unstack

NUM_STEPS, SAVE_AT = 20, 10


class Trainer:
    """The state of one training run, and how it is saved and loaded."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.model, self.step = layout, TinyLM(layout, seed), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.rng = torch.Generator().manual_seed(seed)  # draws batches and dropout masks

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe everything to save, or to load into. What is not sharded must be equal on all
        ranks.
        """
        model = self.model.sharded_state_dict()
        # The moments are sharded like the parameters.
        optimizer = sharded_optimizer_state_dict(
            self.optimizer, model, process_group=self.layout.world.group
        )
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "rng": self.rng.get_state(),
        }

    def save(self, path: Path) -> None:
        # Replace the checkpoint of an earlier run of this program.
        distckpt.save(
            self.sharded_state_dict(), path, process_group=self.layout.world.group, overwrite=True
        )

    def load(self, path: Path) -> None:
        state = distckpt.load(
            self.sharded_state_dict(), path, process_group=self.layout.world.group
        )
        # The model's tensors were loaded in place; restore the rest.
        load_sharded_optimizer_state_dict(self.optimizer, state["optimizer"])
        self.step = state["step"]
        self.rng.set_state(state["rng"])

    def train_step(self) -> float:
        loss = forward_backward(self.model, self.layout, *draw_batch(self.rng))
        for p in self.model.parameters():
            all_reduce(p.grad, self.layout.dp)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.98
        self.step += 1
        return loss


def resume(layout: Layout, path: Path) -> list[float]:
    """Load and train to the end; return the losses after loading."""
    trainer = Trainer(layout, seed=2)  # another seed, so that nothing is right before loading
    trainer.load(path)
    return train(trainer, until=NUM_STEPS)


def export(path: Path, output_dir: Path) -> distckpt.ExportReport:
    """Merge the shards of the weights, with separate names for each layer, without building the
    model.
    """
    weights = ("embedding.", "decoder.", "head.")  # the rest is the optimizer's
    rules = [Unstack("decoder.layers.**", "decoder.layers.{i}.{0}")]
    # The rule applies to the layers; other tensors keep their names.
    return distckpt.consolidate(
        path, output_dir, keys=weights, rules=rules, unmatched="keep", overwrite=True
    )


def main() -> None:
    """Run all five parts, on every rank."""
    work_dir = start(__doc__)
    path = work_dir / f"step_{SAVE_AT}"
    trainer = Trainer(make_layout(tp=2, pp=2, dp=1), seed=1)
    losses = train(trainer, until=SAVE_AT)
    trainer.save(path)
    losses += train(trainer, until=NUM_STEPS)

    resumed = {}
    for tp, pp, dp in ((4, 1, 1), (1, 1, 2)):
        layout = make_layout(tp, pp, dp)
        if layout is not None:  # this rank is part of it
            resumed[f"TP{tp} x PP{pp} x DP{dp}", layout.world.size] = resume(layout, path)
    exported = export(path, work_dir / "exported")
    is_ok = True
    if dist.get_rank() == 0:
        resumed["no process group", 1] = in_plain_process(resume, Layout(), path)
        print(
            f"Trained {NUM_STEPS} steps on the standard library's source, loss {losses[0]:.4f} to "
            f"{losses[-1]:.4f}."
        )
        print(f"Saved after step {SAVE_AT}, and trained on from there:")
        is_ok = report_layouts(losses[SAVE_AT:], resumed)
        size = f"{exported.num_tensors} tensors, {exported.num_bytes / 1e6:.1f} MB"
        print(f"Exported the weights ({size}) to {work_dir}/exported/{exported.files[0]}.")
    finish(is_ok)


if __name__ == "__main__":
    main()
