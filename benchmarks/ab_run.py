"""One rank of one run of `ab.py`, which starts it with a version of distckpt on the path.

    python benchmarks/ab_run.py prepare|measure WORKLOAD SIZE CHECKPOINT SCRATCH RANK

To prepare is to write the checkpoint that runs read. To measure is to print the seconds of the
call, until the last rank is done. Only calls that every version of distckpt has are made here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ab_workloads import BY_NAME, Workload
from contest.state import Part, State, empty_like, llama_sizes, llama_state
from measure import fill_cache, time_together
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import distckpt

SMALL_SHAPE = (64, 64)
TINY_SHAPE = (16, 64)


def main() -> None:
    """Do what the command line says, as a rank of a group."""
    _, what, name, size, checkpoint, scratch, rank = sys.argv
    workload = BY_NAME[name]
    num_ranks = workload.writers if what == "prepare" else workload.ranks
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{scratch}/rendezvous", rank=int(rank), world_size=num_ranks
    )
    if what == "prepare":
        prepare(workload, float(size), checkpoint)
    else:
        print(measure(workload, float(size), checkpoint, scratch))
    dist.destroy_process_group()


def prepare(workload: Workload, size: float, checkpoint: str) -> None:
    """Write what the workload reads."""
    state = state_of(workload, size)
    if workload.state == "shards":
        save_shards(state, checkpoint)
    else:
        distckpt.save(sharded(state), checkpoint)


def measure(workload: Workload, size: float, checkpoint: str, scratch: str) -> float:
    """Return the seconds of the call."""
    if not workload.is_first:
        warm_up(workload.verb, f"{scratch}/warm")
    call = call_of(workload, size, checkpoint, scratch)
    if dist.get_rank() == 0 and os.path.isdir(checkpoint):
        fill_cache(checkpoint)
    dist.barrier()
    return processor_time(call) if workload.is_processor_time else time_together(call)


def call_of(workload: Workload, size: float, checkpoint: str, scratch: str) -> Callable[[], object]:
    """Return what is measured, with its state in memory."""
    if workload.verb == "consolidate":
        return lambda: distckpt.consolidate(checkpoint, f"{scratch}/consolidated")
    state = state_of(workload, size)
    if workload.verb == "load":
        target = sharded(empty_like(state))
        return lambda: distckpt.load(target, checkpoint)
    saved = sharded(state)
    return lambda: distckpt.save(saved, f"{scratch}/saved")


def warm_up(verb: str, path: str) -> None:
    """Have everything imported that the call needs."""
    state = sharded({"weight": Part(torch.ones(SMALL_SHAPE), 0)})
    distckpt.save(state, path)
    distckpt.load(state, path)
    if verb == "consolidate":
        distckpt.consolidate(path, f"{path}-consolidated")


def processor_time(call: Callable[[], object]) -> float:
    """Return the seconds of processor time that all threads of this process take."""
    start = time.process_time()
    call()
    return time.process_time() - start


# --- States ---------------------------------------------------------------------------------------


def state_of(workload: Workload, size: float) -> State:
    """Make this rank's part of the state of a workload."""
    if workload.state == "llama":
        return llama_state(llama_sizes(size))
    shape = SMALL_SHAPE if workload.state == "small" else TINY_SHAPE
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        f"layers.{i // 10}.weight_{i % 10}": Part(
            torch.empty(shape).normal_(generator=generator), 0
        )
        for i in range(int(size))
    }


def sharded(state: State) -> dict[str, Any]:
    """Describe a state as distckpt does."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    describe = distckpt.ShardedTensor.from_rank_offsets
    return {
        key: describe(key, part.local, replica_id=rank)
        if part.axis is None
        else describe(key, part.local, (part.axis, rank, num_ranks))
        for key, part in state.items()
    }


def save_shards(state: State, folder: str) -> None:
    """Write a file of shards on each rank, as torch does for Hugging Face."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    tensors = {
        key: DTensor.from_local(part.local, mesh, [Shard(0)], run_check=False)
        for key, part in state.items()
    }
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(tensors, storage_writer=writer)


if __name__ == "__main__":
    main()
