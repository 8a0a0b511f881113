"""Planning beside torch.distributed.checkpoint: the tensors of a public report,
1,024 of shape (1024, 1) divided by rows.

Both plan from what ranks have described, in one process: torch with its functions
`create_default_global_save_plan` and `_validate_global_plan`, as its DefaultSavePlanner does.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from planning_layouts import rows_of_columns
from planning_roles import COORDINATOR, plan_alone
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

NUM_TENSORS, NUM_ROWS = 1024, 1024


def compare(num_ranks: int) -> dict[str, Any]:
    """Plan with both; return the seconds of CPU time of the rank that plans for all."""
    plan = plan_alone(list(rows_of_columns(num_ranks, NUM_TENSORS)))
    plans = [_plan_of_rank(rank, num_ranks) for rank in range(num_ranks)]
    started = time.process_time()
    plans, metadata = create_default_global_save_plan(plans)
    made = time.process_time()
    assert not _validate_global_plan(plans, metadata)
    validated = time.process_time()
    return {
        "distckpt, plan and manifest, s": plan.seconds[COORDINATOR],
        "torch, plan, s": made - started,
        "torch, validate, s": validated - made,
        "torch / distckpt": (validated - started) / plan.seconds[COORDINATOR],
    }


def _plan_of_rank(rank: int, num_ranks: int) -> SavePlan:
    """Return what a rank describes to torch's planner, as for DTensors."""
    rows = -(-NUM_ROWS // num_ranks)
    offsets, sizes = torch.Size((rank * rows, 0)), torch.Size((rows, 1))
    properties = TensorProperties.create_from_tensor(torch.empty(sizes, device="meta"))
    items = [
        WriteItem(
            index=MetadataIndex(f"tensor_{number}", offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=properties,
                size=torch.Size((NUM_ROWS, 1)),
            ),
        )
        for number in range(NUM_TENSORS)
    ]
    return SavePlan(items)
