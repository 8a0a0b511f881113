#!/usr/bin/env bash
# DeepSpeed 0.19.8: with round_robin_gradients, ZeRO-1 and ZeRO-2 tell the weights of parameters under
# the names of others, in Universal checkpoints and in safe_get_full_fp32_param.
#
# Expected: ds_to_universal of a checkpoint gives each parameter its own weights, as zero_to_fp32 does.
# Seen: of three layers on two ranks, the second has the weights of the third, and the third those of
# the second. Neither the program nor a load says anything: shapes come from the model, and the numbers
# of elements agree.
# The optimizer flattens the parameters in the order `round_robin_bit16_groups`; `_link_all_hp_params`
# and with it the `param_slice_mappings` in the files go by `bit16_groups`, the order of the module.
# Source: _link_all_hp_params in deepspeed/runtime/zero/stage_1_and_2.py.
# Matters to: everybody who converts such runs, or exports weights by safe_get_full_fp32_param.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy deepspeed==0.19.8 setuptools ninja
cd "$folder"
cat > train.py <<'PYTHON'
import os

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
sizes = ((5, 9), (9, 5), (5, 9))
model = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.randn(1, 5, dtype=torch.bfloat16)).float().square().mean())
engine.step()
for name, param in engine.module.named_parameters():
    told = safe_get_full_fp32_param(param).to(param.dtype)
    if os.environ["RANK"] == "0":
        print("safe_get_full_fp32_param", name, torch.equal(told.view_as(param), param))
engine.save_checkpoint("zero")
PYTHON
cat > compare.py <<'PYTHON'
import sys

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

model = torch.load("zero/global_step1/mp_rank_00_model_states.pt", weights_only=False)["module"]
right = get_fp32_state_dict_from_zero_checkpoint("zero")
whole = all(torch.equal(right[name].bfloat16(), weight) for name, weight in model.items())
seen = {}
for name in model:
    file = torch.load(f"universal/zero/{name}/fp32.pt", weights_only=False)
    universal = (file["param"] if isinstance(file, dict) else file).flatten().bfloat16()
    seen[name] = [other for other, weight in model.items() if torch.equal(universal, weight.flatten())]
print(f"zero_to_fp32 is right: {whole}; whose weights ds_to_universal gives: {seen}")
swapped = {"0.weight": ["0.weight"], "1.weight": ["2.weight"], "2.weight": ["1.weight"]}
sys.exit(0 if whole and seen == swapped else 1)
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PATH="$folder/venv/bin:$PATH"
{
    torchrun --standalone --nproc-per-node 2 train.py
    python -m deepspeed.checkpoint.ds_to_universal --num_extract_workers 1 --num_merge_workers 1 --inject_missing_state \
        --input_folder zero/global_step1 --output_folder universal
} > log 2>&1 || { cat log; exit 1; }
grep safe_get_full_fp32_param log
python compare.py 2> compare_log | tail -n 1 || { cat log compare_log; echo "the behavior has changed"; exit 1; }
