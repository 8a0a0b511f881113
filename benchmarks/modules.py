"""Describe a module of very many parameters, and its optimizer: CPU time, without saving anything.

    python benchmarks/modules.py [--tensors 10000] [--runs 5]

In one process, with plain parameters and with DTensors on a mesh of one rank; the work does not
depend on the size of the mesh. The least of several runs counts. Ends with an error when describing
the module takes 0.5 s or more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import Report, parser_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distckpt.modules import load_sharded_state_dict, sharded_state_dict
from distckpt.optimizer import sharded_optimizer_state_dict

LIMIT_SECONDS = 0.5


def main() -> None:
    """Print one table."""
    parser = parser_of(__doc__, has_files=False)
    parser.add_argument("--tensors", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(arguments)
    report.about = (
        f"Seconds of CPU time for {arguments.tensors:,} parameters, "
        f"the least of {arguments.runs} runs."
    )

    rows, slowest = [], 0.0
    module = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(arguments.tensors // 2)])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for kind in ("plain", "DTensor"):
        if kind == "DTensor":
            make_dtensors(module)
        seconds, state = least(arguments.runs, sharded_state_dict, module)
        slowest = max(slowest, seconds)
        values = {name: shard.data for name, shard in state.items()}
        loading, _ = least(arguments.runs, load_sharded_state_dict, module, values)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for param in module.parameters():
            param.grad = torch.zeros_like(param)
        fresh, _ = least(1, sharded_optimizer_state_dict, optimizer, state)
        optimizer.step()
        used, _ = least(arguments.runs, sharded_optimizer_state_dict, optimizer, state)
        rows.append([kind, *(f"{value:.3f}" for value in (seconds, loading, used, fresh))])
    dist.destroy_process_group()

    report.add(
        ["parameters", "sharded_state_dict", "load_sharded_state_dict", "AdamW", "new AdamW"], rows
    )
    report.finish()
    if slowest >= LIMIT_SECONDS:
        sys.exit(f"sharded_state_dict took {slowest:.2f} s, not less than {LIMIT_SECONDS} s")


def make_dtensors(module: torch.nn.Module) -> None:
    """Replace all parameters by DTensors."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in module.modules():
        for name, param in layer.named_parameters(recurse=False):
            setattr(
                layer, name, torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
            )


def least(runs: int, function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Return the least CPU time of several calls, in seconds, and what the last returned."""
    times, result = [], None
    for _ in range(runs):
        start = time.process_time()
        result = function(*args)
        times.append(time.process_time() - start)
    return min(times), result


if __name__ == "__main__":
    main()
