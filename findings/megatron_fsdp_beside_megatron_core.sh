#!/usr/bin/env bash
# megatron-fsdp 0.6.1 beside megatron-core 0.16.1, the newest of both for Python 3.11: `fully_shard`
# ends in a TypeError for every model.
#
# Expected: megatron-fsdp is a package of its own, which an installed megatron-core does not change.
# Seen: it takes the class of its settings from megatron-core if that is installed, and passes an
# argument that this one does not have: "DistributedDataParallelConfig.__init__() got an unexpected
# keyword argument 'fsdp_db_use_persist_buf_on_alloc_fail'". In the same environment without
# megatron-core, the call goes on, here to the message that there is no GPU.
# Source: the imports of DistributedDataParallelConfig in megatron_fsdp/fully_shard.py.
# Matters to: everybody who uses both, or gets megatron-core with another package.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy packaging einops
"$folder/venv/bin/pip" install -q --no-deps megatron-fsdp==0.6.1
cd "$folder"
cat > shard.py <<'PYTHON'
import warnings

warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
try:
    fully_shard(
        model, optimizer, fsdp_unit_modules=[torch.nn.Linear], device_mesh=mesh,
        dp_shard_dim="dp", tp_dim="tp", zero_dp_strategy=3,
    )
except Exception as error:
    print(f"{type(error).__name__}: {error}")
PYTHON
alone=$("$folder/venv/bin/python" shard.py 2>/dev/null | tail -n 1)
"$folder/venv/bin/pip" install -q --no-deps megatron-core==0.16.1
beside=$("$folder/venv/bin/python" shard.py 2>/dev/null | tail -n 1)
echo "alone: $alone"
echo "beside megatron-core: $beside"
[[ "$alone" != TypeError* && "$beside" == TypeError*unexpected* ]]
