"""Train on a cluster: on SIGTERM all ranks save the same step and stop; the next job resumes.

    torchrun --standalone --nproc-per-node 2 --shutdown-timeout 300 \
        examples/cluster/train.py --run-dir /tmp/run

`slurm.sbatch` and `kubernetes.yaml` start it on several nodes. The exit code is 75 when it was
stopped, so that the scheduler starts it again; that of a torchrun that got the signal is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distckpt import CheckpointManager, PreemptionGuard

STOPPED = 75  # EX_TEMPFAIL: try again


def train(run_dir: Path, num_steps: int, save_every: int) -> int:
    """Train from the newest checkpoint; return 0 at the end, `STOPPED` when a signal stopped it."""
    model = DistributedDataParallel(nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with PreemptionGuard() as guard, CheckpointManager(run_dir, keep_last=2) as manager:
        if manager.steps():
            manager.load(state)
        say(f"from step {state['step']}")
        for step in range(state["step"] + 1, num_steps + 1):
            loss = train_step(model, optimizer, step)
            state["step"] = step
            if guard.should_stop():
                manager.save(step, state).result()
                say(f"stopped: saved step {step}")
                return STOPPED
            if step % save_every == 0:
                manager.save(step, state)  # in the background
                say(f"step {step} loss {loss:.4f}")
    say(f"done: step {num_steps}")
    return 0


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take a step with data that depend on the step and the rank only."""
    seed = step * dist.get_world_size() + dist.get_rank()
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def say(text: str) -> None:
    """Print on one rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", required=True, type=Path, help="shared by all nodes")
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # "nccl" with GPUs
    code = train(arguments.run_dir, arguments.num_steps, arguments.save_every)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
