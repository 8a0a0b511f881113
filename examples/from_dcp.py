"""A program of torch.distributed.checkpoint changes one import and resumes from old checkpoints.

    python examples/from_dcp.py --work-dir /tmp/from_dcp

Trains an FSDP2 model with AdamW on 4 gloo processes, with the `Stateful` AppState of PyTorch's
recipe. Saves once with `torch.distributed.checkpoint` and once, asynchronously, with
`distckpt.dcp`, and continues. Then 2 processes resume from each checkpoint through `distckpt.dcp`:
both must reproduce the losses of the first run, up to the order of additions, and end with bitwise
equal models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import distckpt
import distckpt.dcp as dcp  # was: import torch.distributed.checkpoint as dcp

VOCAB, WIDTH, NUM_STEPS, SAVE_AT = 101, 30, 8, 4  # FSDP2 divides 101 and 30 unevenly among 4


class AppState(Stateful):
    """Model, optimizer and progress as one checkpointable value; it does not depend on distckpt."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        self.step = state["step"]


def build(seed: int) -> AppState:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(VOCAB, WIDTH),
        nn.Linear(WIDTH, 64),
        nn.GELU(),
        nn.Linear(64, WIDTH),
        nn.Linear(WIDTH, VOCAB),
    )
    fully_shard(model)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def train_step(app: AppState, rank: int, size: int) -> float:
    """Train on this process's part of a batch; return the mean loss over all processes."""
    tokens = torch.randint(VOCAB, (128,), generator=torch.Generator().manual_seed(app.step))[
        rank::size
    ]
    app.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(app.model(tokens), (3 * tokens + 1) % VOCAB)
    loss.backward()
    app.optimizer.step()
    app.step += 1
    total = loss.detach() / size
    dist.all_reduce(total)
    return total.item()


def train(rank: int, size: int, rendezvous: str, work_dir: Path, resume_from: str | None) -> None:
    """Train from the start and save, or resume from a checkpoint; store the losses and the final
    model.
    """
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    app, losses, saving = (
        build(seed=size),
        [],
        None,
    )  # another seed, so that nothing is right before loading
    if resume_from:
        dcp.load({"app": app}, checkpoint_id=work_dir / resume_from)
    while app.step < NUM_STEPS:
        if app.step == SAVE_AT and not resume_from:
            torch_dcp.save({"app": app}, checkpoint_id=work_dir / "by_torch")
            saving = dcp.async_save({"app": app}, checkpoint_id=work_dir / "by_distckpt")
        losses.append(train_step(app, rank, size))
    if saving:
        saving.result()
    dcp.save({"app": app}, checkpoint_id=work_dir / f"end_{resume_from}")
    if rank == 0:
        (work_dir / f"losses_{resume_from}.json").write_text(json.dumps(losses))
    dist.barrier()  # no rank destroys the group while another still uses it
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the checkpoints")
    work_dir: Path = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    runs = [(4, None), (2, "by_torch"), (2, "by_distckpt")]
    for size, resume_from in runs:
        with tempfile.TemporaryDirectory() as folder:
            args = (size, f"{folder}/rendezvous", work_dir, resume_from)
            torch.multiprocessing.spawn(train, args, nprocs=size)
    first, *resumed = (
        json.loads((work_dir / f"losses_{name}.json").read_text()) for _, name in runs
    )
    is_ok = True
    for (size, name), losses in zip(runs[1:], resumed, strict=True):
        off = max(abs(a - b) / b for a, b in zip(losses, first[SAVE_AT:], strict=True))  # relative
        print(f"Resumed on {size} from what was saved {name}: losses off by {off:.0e} at most")
        is_ok &= off < 1e-4
    ends = [distckpt.open(work_dir / f"end_{name}").read_tensors() for _, name in runs[1:]]
    equal = ends[0].keys() == ends[1].keys() and all(
        torch.equal(ends[0][key], ends[1][key]) for key in ends[0]
    )
    print(f"Both ended with {len(ends[0])} tensors, {'all' if equal else 'NOT'} equal.")
    sys.exit(0 if is_ok and equal else 1)


if __name__ == "__main__":
    main()
