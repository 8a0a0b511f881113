"""Train a language model on 4 processes, save it, train on from the checkpoint in three other layouts, export it.

    torchrun --standalone --nproc-per-node 4 examples/train_reshard_resume.py --work-dir /tmp/reshard

1. Train at tensor parallel 2 x pipeline parallel 2; save halfway, and go on to the end.
2. Load at tensor parallel 4, train on.
3. Load at data parallel 2, on two of the processes, train on.
4. Load in one plain process without any process group, train on.
5. Export the weights, without the optimizer, as a Hugging Face style safetensors file.

The losses after loading must be those of the first run. For that everything has to come back: the weights and both
moments of Adam, divided among the processes in another way, the decayed learning rate, the step, and the state of the
random number generator. Runs on CPU in under a minute; the text to learn is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _tiny_lm import CONTEXT, WIDTH, Layout, TinyLM, all_reduce, cross_entropy, make_layout
from torch import Tensor

import distckpt
from distckpt.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from distckpt.rules import Unstack

NUM_STEPS, SAVE_AT = 40, 20
NUM_MICROBATCHES, MICROBATCH = 4, 4  # of each step, over all processes; every layout sees the same ones
TOLERANCE = 1e-5  # relative; another layout adds up float32 numbers in another order


class Trainer:
    """The state of one training run, and how it is saved and loaded."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.model = TinyLM(layout, seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.rng = torch.Generator().manual_seed(seed)  # draws the batches and what dropout drops
        self.step = 0

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe everything to save, or to load into. What is not sharded must be equal on all ranks."""
        model, optimizer = self.model.sharded_state_dict(), self.optimizer.state_dict()
        # The moments are divided as the parameters are. Adam counts steps per parameter; ours are all equal.
        parameters = get_param_id_to_sharded_param_map(model, self.model.parameters())
        optim_state_to_sharding_state(optimizer, parameters, exclude_keys=("step",))
        return {"model": model, "optimizer": optimizer, "step": self.step, "rng": self.rng.get_state()}

    def save(self, path: str) -> None:
        # Replace what an earlier run of this program left here.
        distckpt.save(self.sharded_state_dict(), path, process_group=self.layout.world.group, overwrite=True)

    def load(self, path: str) -> None:
        for p in self.model.parameters():  # Adam allocates its state at its first step, which is too late here
            self.optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state = distckpt.load(self.sharded_state_dict(), path, process_group=self.layout.world.group)
        # The model's tensors were loaded in place; the rest has to be handed over.
        self.step = state["step"]
        self.rng.set_state(state["rng"])
        for moments in state["optimizer"]["state"].values():
            moments["step"] = torch.tensor(float(self.step))
        self.optimizer.load_state_dict(state["optimizer"])

    def train_step(self, text: Tensor) -> float:
        """Train on one batch; return its loss, the mean over all processes."""
        starts = torch.randint(len(text) - CONTEXT, (NUM_MICROBATCHES, MICROBATCH), generator=self.rng)
        seed = int(torch.randint(2**60, (), generator=self.rng))
        windows = text[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)].long()

        self.optimizer.zero_grad()
        loss = self._forward_backward(windows, seed)
        for p in self.model.parameters():
            all_reduce(p.grad, self.layout.dp)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.98
        self.step += 1
        return all_reduce(loss, self.layout.world).item()

    def _forward_backward(self, windows: Tensor, seed: int) -> Tensor:
        """Run this process's microbatches through its pipeline stage: all of them forward, then all backward.

        Args:
            windows: tokens, [NUM_MICROBATCHES, MICROBATCH, CONTEXT + 1].
            seed: decides with the number of the microbatch what dropout drops.

        Returns:
            This process's contribution to the loss.
        """
        dp, pp, tp = self.layout.dp, self.layout.pp, self.layout.tp
        is_first, is_last = pp.rank == 0, pp.rank == pp.size - 1
        total, passed = torch.zeros(()), []
        for i in range(dp.rank, NUM_MICROBATCHES, dp.size):
            if is_first:
                x = windows[i, :, :-1]
            else:
                x = torch.empty(MICROBATCH, CONTEXT, WIDTH)
                dist.recv(x, src=pp.ranks[pp.rank - 1])
                x.requires_grad_()
            y = self.model(x, seed + 1000 * i)
            if is_last:
                y = cross_entropy(y, windows[i, :, 1:], tp) / NUM_MICROBATCHES
                total += y.detach() / tp.size  # all of the tensor parallel ranks have it
            else:
                dist.send(y.detach(), dst=pp.ranks[pp.rank + 1])
            passed.append((x, y))
        for x, y in passed:
            gradient = None
            if not is_last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, src=pp.ranks[pp.rank + 1])
            y.backward(gradient)
            if not is_first:
                dist.send(x.grad, dst=pp.ranks[pp.rank - 1])
        return total


def read_text() -> Tensor:
    """Return the source of the standard library's top-level modules as bytes, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def train_and_save(layout: Layout, path: str) -> list[float]:
    """Train from the start to the end, saving on the way; return the loss of every step."""
    trainer, text = Trainer(layout, seed=1), read_text()
    losses = []
    for step in range(NUM_STEPS):
        if step == SAVE_AT:
            trainer.save(path)
        losses.append(trainer.train_step(text))
    return losses


def resume(layout: Layout, path: str) -> list[float]:
    """Load and train to the end; return the losses after loading."""
    trainer, text = Trainer(layout, seed=2), read_text()  # another seed: nothing is right before it is loaded
    trainer.load(path)
    return [trainer.train_step(text) for _ in range(trainer.step, NUM_STEPS)]


def resume_in_plain_process(work_dir: str) -> list[float]:
    """Start this program once more, as a process that knows nothing of torchrun."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        clean.pop(name, None)
    command = [sys.executable, __file__, "--work-dir", work_dir, "--plain"]
    return json.loads(subprocess.run(command, env=clean, stdout=subprocess.PIPE, check=True, text=True).stdout)


def export(path: str, output_dir: str) -> distckpt.ExportReport:
    """Merge the shards of the weights, each layer under names of its own; the model is not built for it."""
    weights = ("embedding.", "decoder.", "head.")  # the rest is the optimizer's
    rules = [Unstack("decoder.layers.**", "decoder.layers.{i}.{0}")]
    # The rule is for the layers; the others keep their names.
    return distckpt.consolidate(path, output_dir, keys=weights, rules=rules, unmatched="keep", overwrite=True)


def report(expected: list[float], resumed: dict[tuple[str, int], list[float]]) -> bool:
    """Print how the losses of the resumed runs compare with the uninterrupted one; return whether all agree."""
    print(f"Trained {NUM_STEPS} steps on the standard library's source, loss {expected[0]:.4f} to {expected[-1]:.4f}.")
    print(f"Saved after step {SAVE_AT}, and trained on from there:")
    print(f"  {'layout':<27}{'ranks':<7}{'first loss':<12}{'last loss':<12}max difference (relative)")
    expected = expected[SAVE_AT:]
    print(f"  {'TP2 x PP2 x DP1':<27}{4:<7}{expected[0]:<12.6f}{expected[-1]:<12.6f}the uninterrupted run")
    all_ok = True
    for (name, num_ranks), losses in resumed.items():
        differences = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
        ok = all(difference <= TOLERANCE for difference in differences)  # also false for NaN
        row = f"  {name:<27}{num_ranks:<7}{losses[0]:<12.6f}{losses[-1]:<12.6f}{max(differences):.1e}"
        print(row, "ok" if ok else "WRONG")
        all_ok = all_ok and ok
    print(f"{'All agree' if all_ok else 'NOT all agree'} within {TOLERANCE}.")
    return all_ok


def main() -> None:
    """Run all five parts, on every rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, help="where to put the checkpoint")
    parser.add_argument("--plain", action="store_true", help="only load and train on in this one process")
    arguments = parser.parse_args()
    path = str(Path(arguments.work_dir, f"step_{SAVE_AT}"))
    torch.set_num_threads(1)
    if arguments.plain:
        print(json.dumps(resume(Layout(), path)))
        return

    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit("run this with torchrun --nproc-per-node 4")
    layout = make_layout(tp=2, pp=2, dp=1)
    assert layout is not None  # all ranks are in it
    expected = train_and_save(layout, path)
    resumed = {}
    for tp, pp, dp in ((4, 1, 1), (1, 1, 2)):
        layout = make_layout(tp, pp, dp)
        if layout is not None:
            resumed[f"TP{tp} x PP{pp} x DP{dp}", layout.world.size] = resume(layout, path)
    exported = export(path, str(Path(arguments.work_dir, "exported")))
    is_ok = True
    if dist.get_rank() == 0:
        resumed["no process group", 1] = resume_in_plain_process(arguments.work_dir)
        is_ok = report(expected, resumed)
        size = f"{exported.num_tensors} tensors, {exported.num_bytes / 1e6:.1f} MB"
        print(f"Exported the weights ({size}) to {arguments.work_dir}/exported/{exported.files[0]}.")
    dist.barrier()
    dist.destroy_process_group()
    if not is_ok:
        sys.exit(1)


if __name__ == "__main__":
    main()
