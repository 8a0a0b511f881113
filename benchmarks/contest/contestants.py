"""The ways to save and load that are compared, behind one interface, and those for local file
systems.

All contestants save a `State` into an empty directory so that it is on disk when they return, and
load it into tensors that are there already. What is not installed is left out. `stores` has those
for object stores.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from measure import sync_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import distckpt
from contest.state import State, local_bytes

# Its names are not all declared for type checkers.
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

REQUEST_BYTES = 16 << 20
RAW_THREADS = 4

SAVE, SAVE_UNSYNCED, WARM, COLD, ACROSS, ALONE = (
    "save",
    "save_unsynced",
    "warm_load",
    "cold_load",
    "reshard_axis",
    "reshard_one",
)
"""The cases: what is measured."""
CASES = (SAVE, SAVE_UNSYNCED, WARM, COLD, ACROSS, ALONE)

Tensors = dict[str, torch.Tensor]


class Contestant(NamedTuple):
    """A way to save and load.

    Attributes:
        name: as it is shown.
        prepare: makes of a state what `save` and `load` take; it is not timed.
        save: takes what was prepared, and a location: a directory or a URL.
        load: the same, filling the tensors of the state.
        is_checkpoint: False for raw bytes, whose meaning does not count.
        cases: in which it is measured. The first is how it saves.
        load_alone: fills whole tensors in rank 0: takes them by key, the location, and a group of
            rank 0 alone.
    """

    name: str
    prepare: Callable[[State], Any]
    save: Callable[[Any, str], object]
    load: Callable[[Any, str], object]
    is_checkpoint: bool = True
    cases: tuple[str, ...] = (SAVE, WARM, COLD, ACROSS)
    load_alone: Callable[[Tensors, str, Any], object] | None = None


def contestants(left_out: dict[str, str] | None = None) -> Iterator[Contestant]:
    """Yield every contestant that works on a local file system here.

    Args:
        left_out: gets the names of the others, and why they do not.
    """
    reasons = {} if left_out is None else left_out
    yield from ours()
    yield torch_contestant("DCP FileSystemWriter", dcp.FileSystemWriter, dcp.FileSystemReader)
    if hasattr(dcp, "HuggingFaceStorageWriter"):
        yield Contestant(
            "DCP HuggingFaceStorageWriter",
            dtensors,
            _save_hugging_face,
            _load_hugging_face,
            load_alone=_load_hugging_face_alone,
        )
    else:
        reasons["DCP HuggingFaceStorageWriter"] = f"torch {torch.__version__} has none"
    yield Contestant(
        "safetensors save_file per rank",
        _local_tensors,
        _save_file,
        _load_file,
        cases=(SAVE, WARM, COLD),
    )
    yield Contestant(
        "safetensors save_file, no fsync",
        _local_tensors,
        _save_file_unsynced,
        _load_file,
        cases=(SAVE_UNSYNCED,),
    )
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        try:
            yield _megatron()
        except Exception as error:  # what it needs beside itself, it finds missing in many ways
            reasons["Megatron Core fully parallel"] = (
                f"cannot be imported: {type(error).__name__}: {error}"
            )
    else:
        reasons["Megatron Core fully parallel"] = "megatron-core is not installed"
    yield Contestant("raw O_DIRECT", dict, _write_direct, _read_direct, False, (SAVE, COLD))
    yield Contestant(
        "raw buffered",
        dict,
        _write_buffered,
        _read_raw,
        False,
        (SAVE, WARM, COLD, ACROSS),
        _read_raw_alone,
    )
    yield Contestant(
        "raw buffered, no fsync", dict, _write_unsynced, _read_raw, False, (SAVE_UNSYNCED,)
    )


# --- distckpt and Megatron: the same description, under the same names ----------------------------


def ours() -> Iterator[Contestant]:
    """Yield the ways of distckpt, which are the same for paths and URLs."""
    prepare = _sharded(distckpt.ShardedTensor)
    yield Contestant("distckpt", prepare, distckpt.save, distckpt.load, load_alone=_load_alone)
    yield Contestant(
        "distckpt, verify=none",
        prepare,
        distckpt.save,
        _load_unverified,
        True,
        (WARM, COLD, ACROSS),
        _load_alone_unverified,
    )
    yield Contestant(
        "distckpt, durable=False",
        prepare,
        _save_unsynced,
        distckpt.load,
        cases=(SAVE_UNSYNCED,),
    )


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


def _save_unsynced(sharded: dict[str, Any], folder: str) -> None:
    options: dict[str, Any] = {"durable": False}
    distckpt.save(sharded, folder, **options)


def _load_unverified(sharded: dict[str, Any], folder: str) -> None:
    distckpt.load(sharded, folder, verify=False)


def _load_alone(tensors: Tensors, folder: str, group: Any) -> None:
    distckpt.load(_whole(tensors), folder, process_group=group)


def _load_alone_unverified(tensors: Tensors, folder: str, group: Any) -> None:
    distckpt.load(_whole(tensors), folder, process_group=group, verify=False)


def _whole(tensors: Tensors) -> dict[str, Any]:
    return {
        key: distckpt.ShardedTensor.from_rank_offsets(key, tensor)
        for key, tensor in tensors.items()
    }


def _megatron() -> Contestant:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = "megatron.core.dist_checkpointing"
        dist_checkpointing = importlib.import_module(package)
        serialization = importlib.import_module(f"{package}.serialization")
        fully_parallel = importlib.import_module(f"{package}.strategies.fully_parallel")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        # It asks for a GPU in passing, also where all tensors are on the CPU.
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

    def save(sharded: dict[str, Any], folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(
            serialization.get_default_save_sharded_strategy()
        )
        dist_checkpointing.save(sharded, folder, strategy)

    prepare = _sharded(dist_checkpointing.ShardedTensor)
    return Contestant("Megatron Core fully parallel", prepare, save, dist_checkpointing.load)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def dtensors(state: State) -> Tensors:
    """Describe a state as torch does."""
    if dist.get_world_size() == 1:
        return {key: part.local for key, part in state.items()}
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {
        key: DTensor.from_local(
            part.local,
            mesh,
            [Replicate() if part.axis is None else Shard(part.axis)],
            run_check=False,
        )
        for key, part in state.items()
    }


def torch_contestant(
    name: str, writer: Callable[[str], Any], reader: Callable[[str], Any]
) -> Contestant:
    """Return how PyTorch saves and loads through one of its storage writers and the reader of that
    name.
    """

    def save(tensors: Tensors, location: str) -> None:
        dcp.save(tensors, storage_writer=writer(location))

    def load(tensors: Tensors, location: str) -> None:
        dcp.load(tensors, storage_reader=reader(location))

    def load_alone(tensors: Tensors, location: str, group: Any) -> None:
        dcp.load(tensors, storage_reader=reader(location), no_dist=True)

    return Contestant(name, dtensors, save, load, load_alone=load_alone)


def _save_hugging_face(tensors: Tensors, folder: str) -> None:
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    for name in os.listdir(folder):
        if name.startswith(f"shard-{dist.get_rank() + 1:05d}-"):
            sync_file(f"{folder}/{name}")
    sync_file(folder)


def _load_hugging_face(tensors: Tensors, folder: str) -> None:
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder))


def _load_hugging_face_alone(tensors: Tensors, folder: str, group: Any) -> None:
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)


# --- safetensors alone ----------------------------------------------------------------------------


def _local_tensors(state: State) -> Tensors:
    return {key: part.local for key, part in state.items()}


def _save_file(tensors: Tensors, folder: str) -> None:
    _save_file_unsynced(tensors, folder)
    sync_file(_own_file(folder))
    sync_file(folder)


def _save_file_unsynced(tensors: Tensors, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    safetensors.torch.save_file(tensors, _own_file(folder))


def _load_file(tensors: Tensors, folder: str) -> None:
    with safetensors.safe_open(_own_file(folder), framework="pt") as file:
        for key, tensor in tensors.items():
            tensor.copy_(file.get_tensor(key))


# --- As many bytes and nothing else: what the disk and the memory allow ---------------------------


def _write_direct(state: State, folder: str) -> None:
    _write_raw(state, folder, os.O_DIRECT, is_durable=True)


def _write_buffered(state: State, folder: str) -> None:
    _write_raw(state, folder, 0, is_durable=True)


def _write_unsynced(state: State, folder: str) -> None:
    _write_raw(state, folder, 0, is_durable=False)


def _write_raw(state: State, folder: str, flags: int, is_durable: bool) -> None:
    num_bytes = local_bytes(state)
    os.makedirs(folder, exist_ok=True)
    fd = os.open(_own_file(folder), os.O_CREAT | os.O_WRONLY | flags, 0o666)
    try:
        if is_durable and not flags:
            os.posix_fallocate(fd, 0, num_bytes)  # faster when the blocks are written at once
        buffer = random_bytes()
        for position in range(0, num_bytes, REQUEST_BYTES):
            # Direct requests are whole pages; what is too much is cut off below.
            wanted = min(REQUEST_BYTES, -(-(num_bytes - position) // 4096) * 4096)
            _complete(os.pwrite(fd, buffer[:wanted], position), wanted)
        os.ftruncate(fd, num_bytes)
        if is_durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    if is_durable:
        sync_file(folder)


@functools.cache
def random_bytes() -> npt.NDArray[np.uint8]:
    """Return what is written: bytes that no storage can compress. Made once, in the round that does
    not count.
    """
    buffer = _aligned_buffer()
    buffer[:] = np.arange(REQUEST_BYTES, dtype=np.uint32) * np.uint32(2654435761) >> 24
    return buffer


def _aligned_buffer() -> npt.NDArray[np.uint8]:
    memory = np.empty(REQUEST_BYTES + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + REQUEST_BYTES]


def _read_direct(state: State, folder: str) -> None:
    """Read as many bytes as the rank has written past the page cache, which needs memory of its own
    alignment.
    """
    num_bytes = local_bytes(state)
    fd = os.open(_own_file(folder), os.O_RDONLY | os.O_DIRECT)

    def read(thread: int) -> None:
        buffer = _aligned_buffer()
        for position in range(thread * REQUEST_BYTES, num_bytes, RAW_THREADS * REQUEST_BYTES):
            _complete(os.preadv(fd, [buffer], position), min(REQUEST_BYTES, num_bytes - position))

    try:
        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(read, range(RAW_THREADS)))
    finally:
        os.close(fd)


def _read_raw(state: State, folder: str) -> None:
    """Fill the tensors with the bytes of the file, whatever they mean; copies are filled from its
    beginning.
    """
    fd = os.open(_own_file(folder), os.O_RDONLY)
    try:
        end = 0
        for part in state.values():
            first = 0 if part.axis is None else end
            end += 0 if part.axis is None else part.num_bytes
            _fill(fd, first, part.local)
    finally:
        os.close(fd)


def _read_raw_alone(tensors: Tensors, folder: str, group: Any) -> None:
    """Fill whole tensors with bytes of all ranks' files in turn."""
    fds = [os.open(f"{folder}/{name}", os.O_RDONLY) for name in sorted(os.listdir(folder))]
    sizes = [os.fstat(fd).st_size for fd in fds]
    try:
        index = position = 0
        for tensor in sorted(tensors.values(), key=lambda t: -t.numel()):
            for piece in tensor.view(-1).chunk(len(fds)):
                num_bytes = piece.numel() * piece.element_size()
                if position + num_bytes > sizes[index] and index + 1 < len(fds):
                    index, position = index + 1, 0
                _fill(fds[index], min(position, max(0, sizes[index] - num_bytes)), piece)
                position += num_bytes
    finally:
        for fd in fds:
            os.close(fd)


def _fill(fd: int, first: int, tensor: torch.Tensor) -> None:
    memory = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(memory), REQUEST_BYTES):
        request = memory[start : start + REQUEST_BYTES]
        _complete(os.preadv(fd, [request], first + start), len(request))


def _complete(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise OSError(f"{moved} of {wanted} bytes were read or written at once")


def _own_file(folder: str) -> str:
    return f"{folder}/rank-{dist.get_rank()}.safetensors"


def chosen(every: Iterable[Contestant], names: Sequence[str] | None) -> list[Contestant]:
    """Return those whose name begins with one of some names, or all."""
    return [
        contestant for contestant in every if not names or contestant.name.startswith(tuple(names))
    ]


def has_case(contestant: Contestant, cases: Sequence[str]) -> bool:
    """Tell whether a contestant is measured in any of some cases."""
    alone = (ALONE,) if contestant.load_alone else ()
    return bool({*contestant.cases, *alone}.intersection(cases))


def saving_case(contestant: Contestant) -> str | None:
    """Return the case in which the contestant's save is timed."""
    return next((case for case in contestant.cases if case in (SAVE, SAVE_UNSYNCED)), None)


def loading_cases(contestant: Contestant) -> Mapping[str, bool]:
    """Return the cases in which the contestant's load is timed; the value is whether rank 0 loads
    alone.
    """
    found = {
        case: False
        for case in CASES
        if case in contestant.cases and case not in (SAVE, SAVE_UNSYNCED)
    }
    return {**found, ALONE: True} if contestant.load_alone else found
