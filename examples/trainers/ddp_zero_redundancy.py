"""Resume DistributedDataParallel and ZeroRedundancyOptimizer with any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/trainers/ddp_zero_redundancy.py \
        --work-dir /tmp/ddp

The states of the optimizer are spread over the processes; in a checkpoint they are as if they were
not.
"""

import torch
import torch.distributed as dist
from _common import arguments, loss_of, make_model, report
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import distckpt

options = arguments()
dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
state = {"model": model, "optimizer": optimizer, "rng": distckpt.RngState(), "step": 0}

with distckpt.CheckpointManager(options.work_dir) as manager:
    if manager.steps():
        manager.load(state)
    for step in range(state["step"], options.until):
        loss = loss_of(model, step, dist.get_rank(), dist.get_world_size())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        manager.save(step + 1, {**state, "step": step + 1})
dist.destroy_process_group()
