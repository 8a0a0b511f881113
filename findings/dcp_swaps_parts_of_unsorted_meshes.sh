#!/usr/bin/env bash
# PyTorch 2.13.0: DTensors on a mesh whose ranks do not ascend are stored by
# torch.distributed.checkpoint with their parts exchanged, and `src_data_rank=None` exchanges them
# in memory.
#
# Expected: a checkpoint holds the values of `full_tensor()`, for every DeviceMesh; and
# `distribute_tensor(tensor, mesh, placements, src_data_rank=None)`, with equal tensors on all ranks,
# gives a DTensor whose `full_tensor()` is that tensor, as with the default.
# Seen, with DeviceMesh("cpu", [1, 0]) and Shard(0): `distribute_tensor` scatters, and `full_tensor`
# gathers, in the order of the process group, which is 0, 1. The checkpoint's metadata, and
# `distribute_tensor` without a source rank, go by the coordinate in the mesh. So the rows 0, 1, 2, 3
# are stored as 2, 3, 0, 1, without an error, and `full_tensor` without a source rank gives the same.
# Source: torch/distributed/tensor/_utils.py (offsets by mesh coordinate), and
# torch/distributed/tensor/placement_types.py (scatter and gather by rank in the group).
# Matters to: programs that lay out their ranks by topology, and load such checkpoints under another
# mesh, or without one.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
cat > swap.py <<'PYTHON'
import os
import warnings

warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

dist.init_process_group("gloo")
rows = torch.arange(4.0)
mesh = DeviceMesh("cpu", [1, 0])
scattered = distribute_tensor(rows, mesh, [Shard(0)])
in_memory = scattered.full_tensor()
dcp.save({"rows": scattered}, checkpoint_id="saved")
local = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None).full_tensor()
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    stored = {"rows": torch.zeros(4)}
    dcp.load(stored, checkpoint_id="saved", no_dist=True)
    print("full_tensor", in_memory.tolist())
    print("checkpoint", stored["rows"].tolist())
    print("full_tensor without a source rank", local.tolist())
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 swap.py 2>/dev/null | tee seen
diff seen - <<'SEEN'
full_tensor [0.0, 1.0, 2.0, 3.0]
checkpoint [2.0, 3.0, 0.0, 1.0]
full_tensor without a source rank [2.0, 3.0, 0.0, 1.0]
SEEN
