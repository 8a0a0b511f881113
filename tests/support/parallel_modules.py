"""Ways to divide a module over the ranks of a job; its layers `up` and `down` are those of an
MLP.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def plain(net: torch.nn.Module) -> None:
    """Leave the module as it is."""


def fsdp(net: torch.nn.Module) -> None:
    """Apply FSDP2 to `up`, to `expert` if there is one, and to the rest."""
    for name in ("up", "expert"):
        if hasattr(net, name):
            fully_shard(getattr(net, name))
    fully_shard(net)


def hsdp(net: torch.nn.Module) -> None:
    """Apply FSDP2 in each half of four ranks."""
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tp(net: torch.nn.Module) -> None:
    """Apply tensor parallelism over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp_over_tp(net: torch.nn.Module) -> None:
    """Apply tensor parallelism in each half of the ranks, and FSDP2 across the halves."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
