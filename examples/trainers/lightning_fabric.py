"""Resume Lightning Fabric with any number of processes.

    torchrun --standalone --nproc-per-node 2 examples/trainers/lightning_fabric.py \
        --work-dir /tmp/fabric

Fabric's wrappers of the model and the optimizer are passed as they are.
"""

import os

import torch
from _common import arguments, loss_of, make_model, report
from lightning.fabric import Fabric

import distckpt

options = arguments()
fabric = Fabric(
    accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp"
)
fabric.launch()
model = make_model()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
state = {"model": model, "optimizer": optimizer, "step": 0}

with distckpt.CheckpointManager(options.work_dir) as manager:
    if manager.steps():
        manager.load(state)
    for step in range(state["step"], options.until):
        loss = loss_of(model, step, fabric.global_rank, fabric.world_size)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        manager.save(step + 1, {**state, "step": step + 1})
