"""Resume a loop with accelerate with any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/trainers/accelerate_loop.py \
        --work-dir /tmp/accelerated

On accelerators the model is divided by FSDP2; on CPUs accelerate has data parallelism only. The
lines that save and load are the same.
"""

import torch
import torch.distributed as dist
from _common import arguments, loss_of, make_model, report
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import distckpt
from distckpt.integrations.accelerate import training_state

options = arguments()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
)
has_accelerator = torch.accelerator.is_available()
accelerator = Accelerator(cpu=not has_accelerator, fsdp_plugin=plugin if has_accelerator else None)
model = make_model()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
state = {**training_state(accelerator), "step": 0}

with distckpt.CheckpointManager(options.work_dir) as manager:
    if manager.steps():
        manager.load(state)
    for step in range(state["step"], options.until):
        loss = loss_of(model, step, accelerator.process_index, accelerator.num_processes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        manager.save(step + 1, {**state, "step": step + 1})
accelerator.end_training()
if dist.is_initialized():
    dist.destroy_process_group()
