"""Resume FSDP2 over tensor parallelism with any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/trainers/fsdp2_tensor_parallel.py \
        --work-dir /tmp/fsdp2

Saved by two processes, each with a part of every layer, it goes on in one, with the same losses.
"""

import torch
import torch.distributed as dist
from _common import arguments, loss_of, make_model, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distckpt

options = arguments()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
model = parallelize_module(
    make_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
)
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}

with distckpt.CheckpointManager(options.work_dir) as manager:
    if manager.steps():
        manager.load(state)
    for step in range(state["step"], options.until):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(step, loss)
        manager.save(step + 1, {**state, "step": step + 1})
dist.destroy_process_group()
