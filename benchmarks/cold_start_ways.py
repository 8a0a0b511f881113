"""Ways to fill a model from a Hugging Face directory, for `cold_start_throttled.py`.

Each is a function of a `Case`, which returns the model. Its parameters are full tensors or DTensors
on the CPU. Libraries are imported where they are used, since some may not be installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distckpt

LAYOUTS = ("whole", "fsdp", "tp")


class Case(NamedTuple):
    """A load of one rank: a directory, and how the model is divided over the `mesh`."""

    folder: str
    layout: str
    mesh: DeviceMesh

    def model(self) -> torch.nn.Module:
        """Make the model on the meta device, under its layout."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self.folder)
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if self.layout == "fsdp":
            for layer in model.model.layers:
                fully_shard(layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        if self.layout == "tp":
            divide_tensors(model, self.mesh)
        return model

    def empty_model(self) -> torch.nn.Module:
        """Make the model in memory that is not filled."""
        return self.model().to_empty(device="cpu")

    def files(self) -> list[str]:
        return sorted(map(str, Path(self.folder).glob("*.safetensors")))


def divide_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Divide every linear layer and the embedding, as tensor parallelism does."""
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
    }
    for name, _ in model.named_modules():
        last = name.rpartition(".")[2]
        if last in rows:
            plan[name] = ColwiseParallel()
        elif last in ("o_proj", "down_proj"):
            plan[name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def local_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[slice, ...]]]:
    """Yield each parameter's name, its memory on this rank, and the slice that belongs there."""
    for name, value in model.named_parameters():
        value = value.detach()
        if not isinstance(value, DTensor):
            yield name, value, (slice(None),) * value.dim()
            continue
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        places = zip(offset, shape, strict=True)
        yield name, value.to_local(), tuple(slice(start, start + size) for start, size in places)


def divided_dim(memory: torch.Tensor, shape: list[int]) -> int | None:
    """Return the dimension along which a tensor is divided, None if it is whole."""
    for dim, size in enumerate(shape):
        if memory.shape[dim] < size:
            return dim
    return None


# --- Ways -----------------------------------------------------------------------------------------


def load_distckpt(case: Case, share_reads: str) -> torch.nn.Module:
    model = case.model()
    distckpt.load(
        {"model": model},
        case.folder,
        family="auto",
        materialize="cpu",
        share_reads=share_reads,
    )
    return model


def load_transformers(case: Case) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    size = dist.get_world_size()
    changes: dict[str, Any] = {}
    if case.layout == "fsdp":
        changes["distributed_config"] = DistributedConfig(fsdp_size=size)
    if case.layout == "tp":
        changes["distributed_config"] = DistributedConfig(tp_size=size, tp_plan="auto")
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        case.folder, dtype="auto", **changes
    )
    return model


def load_safetensors(case: Case) -> torch.nn.Module:
    from safetensors import safe_open

    model = case.empty_model()
    parts = {name: (memory, place) for name, memory, place in local_parts(model)}
    for path in case.files():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                memory, place = parts[name]
                memory.copy_(file.get_slice(name)[place])
    return model


def load_torch(case: Case, thread_count: int = 1) -> torch.nn.Module:
    import torch.distributed.checkpoint as dcp

    model = case.empty_model()
    reader = dcp.HuggingFaceStorageReader(case.folder, thread_count=thread_count)
    dcp.load(dict(model.named_parameters()), storage_reader=reader)
    return model


def load_runai(case: Case, shared: bool) -> torch.nn.Module:
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_DIST"] = "1" if shared else "0"
    os.environ["RUNAI_STREAMER_DIST_GLOBAL"] = "1"
    model = case.empty_model()
    parts = {name: (memory, place) for name, memory, place in local_parts(model)}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(case.files(), device="cpu", is_distributed=shared, owned=False)
        for name, tensor in streamer.get_tensors():
            memory, place = parts[name]
            memory.copy_(tensor[place])
    return model


def load_fastsafetensors(case: Case, shared: bool) -> torch.nn.Module:
    from fastsafetensors import SafeTensorsFileLoader

    model = case.empty_model()
    size = dist.get_world_size() if shared else 1
    group = dist.group.WORLD if shared else None
    loader = SafeTensorsFileLoader(group, "cpu", nogds=True)
    files = case.files()
    loader.add_filenames({rank: files[rank::size] for rank in range(size)})
    buffers = loader.copy_files_to_device()
    for name, memory, place in local_parts(model):
        dim = divided_dim(memory, buffers.get_shape(name))
        if shared and dim is not None:
            memory.copy_(buffers.get_sharded(name, dim))
        else:
            memory.copy_(buffers.get_tensor(name)[place])
    buffers.close()
    loader.close()
    return model


class Way(NamedTuple):
    """A way to load: its name in tables, the package that it needs, and its function."""

    name: str
    package: str
    load: Callable[[Case], torch.nn.Module]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


OURS = "distckpt, auto"

WAYS = (
    Way(OURS, "distckpt", partial(load_distckpt, share_reads="auto")),
    Way("distckpt, on", "distckpt", partial(load_distckpt, share_reads="on")),
    Way("distckpt, off", "distckpt", partial(load_distckpt, share_reads="off")),
    Way("from_pretrained", "transformers", load_transformers),
    Way("safetensors", "safetensors", load_safetensors),
    Way("torch DCP", "torch", load_torch),
    Way("torch DCP, 4 threads", "torch", partial(load_torch, thread_count=4)),
    Way("runai streamer", "runai_model_streamer", partial(load_runai, shared=False)),
    Way("runai streamer, shared", "runai_model_streamer", partial(load_runai, shared=True)),
    Way("fastsafetensors", "fastsafetensors", partial(load_fastsafetensors, shared=False)),
    Way("fastsafetensors, shared", "fastsafetensors", partial(load_fastsafetensors, shared=True)),
)
