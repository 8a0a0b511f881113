"""The ways to save and load that are compared, behind one interface.

A state is a dict of `Part`s: what one rank holds of each tensor. All contestants save it into an empty directory so
that it is on disk when they return, and load it into tensors that are there already.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import distckpt
from distckpt import _io

REQUEST_BYTES = 16 << 20


class Part(NamedTuple):
    """What a rank holds of a tensor: `axis` is the one that is divided evenly over the ranks, None for a copy."""

    local: torch.Tensor
    axis: int | None

    @property
    def num_bytes(self) -> int:
        """The size of the local tensor."""
        return self.local.numel() * self.local.element_size()


State = Mapping[str, Part]


class Contestant(NamedTuple):
    """A way to save and load.

    `prepare(state)` makes what `save(prepared, folder)` and `load(prepared, folder)` take; it is not timed.
    """

    name: str
    prepare: Callable[[State], Any]
    save: Callable[[Any, str], object]
    load: Callable[[Any, str], object]
    is_checkpoint: bool = True


def local_bytes(state: State) -> int:
    """Return how many bytes one rank has to write when replicated tensors are spread evenly."""
    num_ranks = dist.get_world_size()
    return sum(part.num_bytes if part.axis is not None else -(-part.num_bytes // num_ranks) for part in state.values())


def contestants() -> Iterator[Contestant]:
    """Yield every contestant that works here; say which one does not."""
    yield Contestant("distckpt", _sharded(distckpt.ShardedTensor), distckpt.save, distckpt.load)
    yield Contestant("DCP FileSystemWriter", _dtensors, _save_dcp, _load_dcp)
    yield Contestant("DCP HuggingFaceStorageWriter", _dtensors, _save_hugging_face, _load_hugging_face)
    yield Contestant("safetensors save_file per rank", _local_tensors, _save_file, _load_file)
    try:
        yield _megatron()
    except ImportError as error:
        print(f"megatron-core is left out: {error}") if dist.get_rank() == 0 else None
    yield Contestant("raw write, O_DIRECT", dict, _write_direct, _read_raw, is_checkpoint=False)
    yield Contestant("raw write, buffered", dict, _write_buffered, _read_raw, is_checkpoint=False)


# --- distckpt and Megatron: the same description, under the same names ------------------------------------------------


def _sharded(sharded_tensor: Any) -> Callable[[State], dict[str, Any]]:
    def prepare(state: State) -> dict[str, Any]:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return {
            key: sharded_tensor.from_rank_offsets(key, part.local, replica_id=rank)
            if part.axis is None
            else sharded_tensor.from_rank_offsets(key, part.local, (part.axis, rank, num_ranks))
            for key, part in state.items()
        }

    return prepare


def _megatron() -> Contestant:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # It asks for a GPU in passing, also where all tensors are on the CPU.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

    def save(sharded: dict[str, Any], folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())
        dist_checkpointing.save(sharded, folder, strategy)

    prepare = _sharded(dist_checkpointing.ShardedTensor)
    return Contestant("Megatron Core fully parallel", prepare, save, dist_checkpointing.load)


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _dtensors(state: State) -> dict[str, torch.Tensor]:
    if dist.get_world_size() == 1:
        return {key: part.local for key, part in state.items()}
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {
        key: DTensor.from_local(
            part.local, mesh, [Replicate() if part.axis is None else Shard(part.axis)], run_check=False
        )
        for key, part in state.items()
    }


def _save_dcp(tensors: dict[str, torch.Tensor], folder: str) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))


def _load_dcp(tensors: dict[str, torch.Tensor], folder: str) -> None:
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))


def _save_hugging_face(tensors: dict[str, torch.Tensor], folder: str) -> None:
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    for name in os.listdir(folder):
        if name.startswith(f"shard-{dist.get_rank() + 1:05d}-"):
            _sync(f"{folder}/{name}")
    _sync(folder)


def _load_hugging_face(tensors: dict[str, torch.Tensor], folder: str) -> None:
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder))


# --- safetensors alone ------------------------------------------------------------------------------------------------


def _local_tensors(state: State) -> dict[str, torch.Tensor]:
    return {key: part.local for key, part in state.items()}


def _save_file(tensors: dict[str, torch.Tensor], folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    location = _own_file(folder)
    safetensors.torch.save_file(tensors, location)
    _sync(location)
    _sync(folder)


def _load_file(tensors: dict[str, torch.Tensor], folder: str) -> None:
    with safetensors.safe_open(_own_file(folder), framework="pt") as file:
        for key, tensor in tensors.items():
            tensor.copy_(file.get_tensor(key))


# --- As many bytes and nothing else: what the disk and the memory allow -----------------------------------------------


def _write_direct(state: State, folder: str) -> None:
    _write_raw(state, folder, os.O_DIRECT)


def _write_buffered(state: State, folder: str) -> None:
    _write_raw(state, folder, 0)


def _write_raw(state: State, folder: str, flags: int) -> None:
    num_bytes = local_bytes(state)
    os.makedirs(folder, exist_ok=True)
    fd = os.open(_own_file(folder), os.O_CREAT | os.O_WRONLY | flags, 0o666)
    try:
        if not flags:
            _io.allocate(fd, num_bytes)
        buffer = _aligned_buffer()
        for position in range(0, num_bytes, REQUEST_BYTES):
            # Direct requests are whole pages; what is too much is cut off below.
            wanted = min(REQUEST_BYTES, -(-(num_bytes - position) // 4096) * 4096)
            assert os.pwrite(fd, buffer[:wanted], position) == wanted
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    _sync(folder)


def _aligned_buffer() -> np.ndarray:
    memory = np.empty(REQUEST_BYTES + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    aligned = memory[start : start + REQUEST_BYTES]
    aligned[:] = np.arange(REQUEST_BYTES, dtype=np.uint32) * np.uint32(2654435761) >> 24
    return aligned


def _read_raw(state: State, folder: str) -> None:
    """Fill the tensors with the bytes of the file, whatever they mean; copies are filled from its beginning."""
    fd = os.open(_own_file(folder), os.O_RDONLY)
    try:
        end = 0
        for part in state.values():
            memory = _io.tensor_bytes(part.local)
            first = 0 if part.axis is None else end
            end += 0 if part.axis is None else len(memory)
            for start in range(0, len(memory), REQUEST_BYTES):
                request = memory[start : start + REQUEST_BYTES]
                assert os.preadv(fd, [request], first + start) == len(request)
    finally:
        os.close(fd)


def _own_file(folder: str) -> str:
    return f"{folder}/rank-{dist.get_rank()}.safetensors"


def _sync(location: str) -> None:
    fd = os.open(location, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
