"""Moving tensors from rows to columns: `redistribute`, beside a checkpoint in memory, torch's
DTensors, and where it is installed the refit of Megatron Core over gloo.

    python benchmarks/moving.py [--ranks 2] [--gb 0.5] [--tensors 16] [--runs 5] [--dir DIR]

All ways fill the same tensors, by turns, in processes of this machine. The last two are the floor:
each rank copies what it gets into memory that ranks share, and out of it again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import time_together
from report import Cell, Report, median, parser_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import distckpt
from distckpt import ShardedTensor
from distckpt._move.host_memory import share_memory
from distckpt._ranks.collectives import Ranks
from distckpt.cli._processes import run_ranks

WIDTH = 1024


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--tensors", type=int, default=16)
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{arguments.ranks} ranks move {arguments.gb:g} GB in {arguments.tensors} tensors from "
        "rows to columns."
    )
    with tempfile.TemporaryDirectory(dir=arguments.dir or "/dev/shm") as folder:
        rows = run_ranks(compare, arguments.ranks, arguments, f"{folder}/checkpoint")
    report.add(["way", "seconds", "times redistribute"], rows)
    report.finish()


def compare(rank: int, arguments: argparse.Namespace, folder: str) -> list[list[Cell]]:
    """Move by all ways by turns; return rows of medians, and of ratios within rounds."""
    ways = make_ways(rank, dist.get_world_size(), arguments, folder)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.runs + 1):
        for name, way in ways.items():
            took = time_together(way)
            # The first round warms up.
            if number:
                seconds[name].append(took)
    first = seconds["redistribute"]
    return [
        [
            name,
            median(took, "{:.3f}"),
            median([a / b for a, b in zip(took, first, strict=True)]),
        ]
        for name, took in seconds.items()
    ]


def make_ways(
    rank: int, size: int, arguments: argparse.Namespace, folder: str
) -> dict[str, Callable[[], Any]]:
    """Return the ways to move, by name."""
    rows = round(arguments.gb * 1e9 / 4 / WIDTH / arguments.tensors / size) * size
    keys = [f"layers.{number}.weight" for number in range(arguments.tensors)]
    parts = {key: torch.randn(rows // size, WIDTH) for key in keys}
    filled = {key: torch.zeros(rows, WIDTH // size) for key in keys}
    old = {
        key: ShardedTensor.from_rank_offsets(key, part, (0, rank, size))
        for key, part in parts.items()
    }
    new = {
        key: ShardedTensor.from_rank_offsets(key, part, (1, rank, size))
        for key, part in filled.items()
    }
    mesh = init_device_mesh("cpu", (size,))
    tensors = {key: DTensor.from_local(part, mesh, [Shard(0)]) for key, part in parts.items()}
    ranks = Ranks()
    num_bytes = max(part.nbytes for part in filled.values())
    memory = share_memory(ranks, num_bytes)

    def save_and_load() -> None:
        distckpt.save(old, folder, overwrite=True, durable=False)
        distckpt.load(new, folder)

    def gather() -> None:
        for key, tensor in tensors.items():
            filled[key].copy_(tensor.full_tensor().chunk(size, 1)[rank])

    def redistribute_dtensor() -> None:
        for key, tensor in tensors.items():
            filled[key].copy_(tensor.redistribute(mesh, [Shard(1)]).to_local())

    def copy_through_shared_memory() -> None:
        for part in filled.values():
            shared = memory.buffer(rank, False, 0)[: part.nbytes].view(part.dtype).view(part.shape)
            shared.copy_(part)
            part.copy_(shared)

    megatron = megatron_refit(rank, size, parts, filled)
    return {
        "redistribute": lambda: distckpt.redistribute(old, new),
        "redistribute, atomic": lambda: distckpt.redistribute(old, new, atomic=True),
        "save and load": save_and_load,
        "full_tensor": gather,
        "DTensor.redistribute": redistribute_dtensor,
        **({} if megatron is None else {"Megatron's refit over gloo": megatron}),
        "shared memory, first run": copy_through_shared_memory,
        "shared memory, second run": copy_through_shared_memory,
    }


def megatron_refit(
    rank: int, size: int, parts: dict[str, torch.Tensor], filled: dict[str, torch.Tensor]
) -> Callable[[], Any] | None:
    """Return the execution of a plan of Megatron Core for the same move; None without it."""
    try:
        from megatron.core.resharding import execution, utils
        from megatron.core.resharding.copy_services import gloo_copy_service
    except ImportError:
        return None

    class Service(gloo_copy_service.GlooCopyService):
        def __init__(self) -> None:
            # As its own, without a stream of CUDA.
            self.rank, self.world_size = rank, size
            self.gloo_pg = dist.new_group(backend="gloo")
            self.send_ops, self.recv_ops, self._copy_stream = [], [], None

    def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
        named = {key.replace(".", "_"): tensor for key, tensor in tensors.items()}
        return torch.nn.ParameterDict(
            {key: torch.nn.Parameter(tensor, requires_grad=False) for key, tensor in named.items()}
        )

    source, target = module_of(parts), module_of(filled)
    rows, width = next(iter(parts.values())).shape[0], WIDTH // size
    plan = utils.ReshardPlan([], [])
    for number, key in enumerate(source.keys()):
        for peer in range(size):
            columns = (slice(None), slice(peer * width, (peer + 1) * width))
            place = (slice(peer * rows, (peer + 1) * rows), slice(None))
            sent, got = ((number * size + a) * size + b for a, b in ((rank, peer), (peer, rank)))
            plan.send_ops.append(utils.TransferOp(key, peer, True, columns, place, sent))
            plan.recv_ops.append(utils.TransferOp(key, peer, False, place, columns, got))
    service = Service()
    return lambda: execution.execute_reshard_plan(plan, source, target, service)


if __name__ == "__main__":
    main()
