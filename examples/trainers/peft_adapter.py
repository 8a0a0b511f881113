"""Save and resume the adapter of a PEFT model, and export it for `PeftModel.from_pretrained`.

    torchrun --standalone --nproc-per-node 2 examples/trainers/peft_adapter.py \
        --work-dir /tmp/adapter

The checkpoint has the adapter and its optimizer only. At the end the exported adapter is opened
with PEFT, and must give what the trained model gives.
"""

import os

import torch
import torch.distributed as dist
from _common import WIDTH, arguments, loss_of, make_model, report
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel

import distckpt
from distckpt.modules import sharded_state_dict
from distckpt.rules import Rename

options = arguments()
dist.init_process_group("gloo")
peft_model = get_peft_model(
    make_model(), LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
)
model = DistributedDataParallel(peft_model)
optimizer = torch.optim.AdamW(
    [param for param in model.parameters() if param.requires_grad], lr=0.01
)
adapter = {key: shard for key, shard in sharded_state_dict(peft_model).items() if "lora_" in key}
state = {"adapter": adapter, "optimizer": optimizer, "step": 0}

with distckpt.CheckpointManager(options.work_dir) as manager:
    if manager.steps():
        state["step"] = manager.load(state)["step"]
    for step in range(state["step"], options.until):
        loss = loss_of(model, step, dist.get_rank(), dist.get_world_size())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        manager.save(step + 1, {**state, "step": step + 1})

newest, exported = manager.location(options.until), f"{options.work_dir}/exported"
rename = Rename("**.*.default.weight", "{0}.{1}.weight")
distckpt.consolidate(newest, exported, keys="base_model.", rules=[rename], overwrite=True)
if dist.get_rank() == 0:
    os.replace(f"{exported}/model.safetensors", f"{exported}/adapter_model.safetensors")
    peft_model.peft_config["default"].save_pretrained(exported)
    opened = PeftModel.from_pretrained(make_model(), exported)
    rows = torch.randn(4, WIDTH)
    print("exported adapter opens:", torch.equal(opened(rows), peft_model(rows)))
dist.destroy_process_group()
