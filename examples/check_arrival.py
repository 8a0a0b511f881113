"""Find the weights that an engine holds wrongly after an update that something else has made.

    python examples/check_arrival.py --work-dir /tmp/check_arrival

New versions of the weights are broadcast, as reinforcement learning does over NCCL, to the two
processes of an engine at tensor parallel 2, and exported. The processes compare their memory with
the export. In the second version, one process takes the values of k for those of v; in the third,
the other one skips the norm.

In vLLM the class `ArrivalChecks` is a worker extension, in SGLang `sglang_check` a custom weight
loader. Here they are called as these engines do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor, nn

import distckpt

SHAPES = {"q_proj": (16, 8), "k_proj": (16, 8), "v_proj": (16, 8), "norm": (8,), "A_log": (4,)}


class Attention(nn.Module):
    """Half of the heads: q, k and v in one parameter, and a norm that is kept as float32."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(24, 8, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.decay = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's part of each stored tensor."""
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "A_log":
                self.decay.data.copy_(-torch.exp(tensor.chunk(2)[self.rank].float()))
            else:
                place = self.qkv.data.narrow(0, "qkv".index(name[0]) * 8, 8)
                place.copy_(tensor.chunk(2)[self.rank])


def check(model: Any, path: str) -> str:
    """Compare a model with a directory, on all ranks; return the differences as a table."""
    if not hasattr(model, "recorded"):
        tensors = distckpt.open(path, as_stored=True).tensors
        # A loader that computes cannot be recorded: the report names these tensors.
        plain = {name: info for name, info in tensors.items() if not name.endswith("A_log")}
        model.recorded = distckpt.record_loader(model.load_weights, plain, module=model)
    return distckpt.verify(path, live=model.recorded).table()


class ArrivalChecks:
    """vLLM: `LLM(..., worker_extension_cls="check_arrival.ArrivalChecks")`, and then
    `llm.collective_rpc("check_arrival", args=(path,))`.
    """

    model_runner: Any

    def check_arrival(self, path: str) -> str:
        return check(self.model_runner.model, path)


def sglang_check(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """SGLang: `--custom-weight-loader check_arrival.sglang_check`, and then
    `engine.update_weights_from_tensor(message(path), load_format="check_arrival.sglang_check")`.
    """
    ((_, text),) = named_tensors
    table = check(model, bytes(text.tolist()).decode())
    if dist.get_rank() == 0:
        print(table, flush=True)


def message(path: str) -> list[tuple[str, Tensor]]:
    """Return the path as a tensor, the only thing that SGLang passes on."""
    return [("path", torch.frombuffer(bytearray(path.encode()), dtype=torch.uint8))]


def damaged(version: int, rank: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a process takes in a version: weights that are wrong twice."""
    if (version, rank) == (1, 1):
        return {**weights, "v_proj": weights["k_proj"]}
    if (version, rank) == (2, 0):
        del weights["norm"]
    return weights


def run_process(rank: int, work_dir: Path, store: str) -> None:
    """Run a process of the engine; the first one is the trainer, too."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    worker = ArrivalChecks()
    worker.model_runner = SimpleNamespace(model=Attention(rank))
    for version in range(3):
        weights = {name: torch.empty(shape).bfloat16() for name, shape in SHAPES.items()}
        generator = torch.Generator().manual_seed(version)
        for tensor in weights.values():
            tensor.normal_(generator=generator)
            dist.broadcast(tensor, src=0)
        path = work_dir / f"version_{version}"
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_file(weights, path / "model.safetensors")
        dist.barrier()
        worker.model_runner.model.load_weights(damaged(version, rank, weights).items())
        table = worker.check_arrival(str(path))
        if rank == 0:
            print(f"version {version}\n{table}\n", flush=True)
    if rank == 0:
        print("the last one, as SGLang asks", flush=True)
    sglang_check(worker.model_runner.model, message(str(path)))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, type=Path, help="where to put the files")
    work_dir: Path = parser.parse_args().work_dir
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(run_process, (work_dir, f"{store}/store"), nprocs=2)


if __name__ == "__main__":
    main()
