"""Functions that handle one tensor at a time, with bounded memory.

They measure, divide, move, gather and broadcast tensors. Everything here works without a process
group. DTensors are recognized by their methods, so nothing here depends on `torch.distributed`.
"""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from distckpt._base.dtypes import as_torch_dtype, estimate_array_nbytes
from distckpt._base.interrupts import operation
from distckpt._base.memory import is_plain_memory, tensor_bytes
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._base.tree import Position, leaves, map_leaves, new_like
from distckpt._geometry.region import whole
from distckpt._geometry.units import cut_region
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

TensorFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns a tensor placed, gathered or otherwise changed."""

_GCS_SCHEME = "gs://"


class TensorSource(Protocol):
    """Source of tensors by key, such as an open safetensors file."""

    def get_tensor(self, name: str, /) -> torch.Tensor:
        """Return a tensor."""


def chunk_tensor_by_memory(tensor: torch.Tensor, memory_limit: int) -> list[torch.Tensor]:
    """Divide a tensor into views of at most `memory_limit` bytes.

    The tensor may have any strides and be on any device. The views have the same number of axes as
    `tensor`, and are in row-major order: their flattened values, one after the other, are the
    flattened tensor. They are runs of rows; rows larger than the limit are divided along later
    axes.

    Raises:
        ValueError: the limit is smaller than one element.
    """
    if memory_limit < max(1, tensor.element_size()):
        raise ValueError(
            f"a memory limit of {memory_limit} bytes is less than one element of {tensor.dtype} "
            f"({tensor.element_size()} bytes)"
        )
    if estimate_array_nbytes(tensor) <= memory_limit:
        return [tensor]
    pieces = cut_region(whole(tuple(tensor.shape)), memory_limit // tensor.element_size())
    return [tensor[piece.slices()] for piece in pieces]


def to_plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with plain CPU memory: itself, or a copy."""
    if is_plain_memory(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def to_host(
    x: torch.Tensor,
    float_dtype: torch.dtype | str | np.dtype[Any] | None = None,
    mesh: Any = None,
    cpu_offload: bool = True,
) -> torch.Tensor:
    """Cast a tensor, gather it, then move it to the CPU.

    Collective operation for a DTensor: all ranks of its mesh must call it.

    Args:
        float_dtype: to cast to, None to keep the dtype. Integers, bools, complex numbers and floats
            of 8 bits or fewer, whose scale is stored elsewhere, keep their dtype in any case.
        mesh: accepted because its counterpart in eformer has it, and not used: a DTensor is
            gathered whole on every rank of its mesh.
        cpu_offload: whether to move to CPU memory.

    Returns:
        The tensor without autograd history. It shares memory with `x` if there was nothing to do.

    Raises:
        ValueError: `float_dtype` is not a floating dtype.
    """
    del mesh
    x = _cast_floats(x.detach(), float_dtype)
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    if cpu_offload:
        return x.cpu()
    return x


def reshard(x: torch.Tensor, target_sharding: Any) -> torch.Tensor:
    """Change how a tensor is distributed.

    Collective operation: all ranks of the mesh must call it.

    Args:
        x: a DTensor, or a plain tensor that all ranks hold, which becomes one.
        target_sharding: placements, one for each axis of the mesh, or `(mesh, placements)`, or None
            to return `x` as it is.

    Raises:
        TypeError: `x` is a plain tensor, and no mesh is given.
    """
    if target_sharding is None:
        return x
    has_mesh = len(target_sharding) == 2 and isinstance(target_sharding[1], (list, tuple))
    mesh, placements = target_sharding if has_mesh else (None, target_sharding)
    if not hasattr(x, "redistribute"):
        if mesh is None:
            raise TypeError(
                f"a plain tensor of shape {tuple(x.shape)} has no mesh to be resharded to "
                f"{target_sharding} on: give (mesh, placements), or a DTensor"
            )
        return torch.distributed.tensor.distribute_tensor(x, mesh, placements)
    return x.redistribute(mesh, placements)  # type: ignore[no-any-return]


def _cast_floats(
    tensor: torch.Tensor, dtype: torch.dtype | str | np.dtype[Any] | None
) -> torch.Tensor:
    if dtype is None:
        return tensor
    target = as_torch_dtype(dtype)
    if not target.is_floating_point:
        raise ValueError(f"floating tensors are not cast to {target}: give a floating dtype")
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.to(target)
    return tensor


def read_process_array(
    key: str,
    shard_fns: Mapping[str, TensorFunction | None] | None,
    mismatch_allowed: bool,
    manager: TensorSource | Mapping[str, torch.Tensor],
    callback: Callable[[torch.Tensor, str], torch.Tensor] | None = None,
    dtype: torch.dtype | str | np.dtype[Any] | None = None,
) -> tuple[str, torch.Tensor, int]:
    """Read one tensor, then place, process and cast it, in this order.

    Args:
        key: of the tensor.
        shard_fns: key -> function that places a tensor (on a device, or as its shard); None places
            nothing.
        mismatch_allowed: whether a tensor may lack a function in `shard_fns`; then it stays where
            it is.
        manager: gives the tensor: an open safetensors file, or a mapping.
        callback: called with the placed tensor and its key; returns the tensor to go on with.
        dtype: to cast to; only floating tensors are cast, as in `to_host`.

    Returns:
        `(key, tensor, mismatch_count)`; the count is 1 if the tensor lacked a function, else 0.

    Raises:
        ValueError: there is no function for the key, and that is not allowed.
    """
    num_mismatches = 0
    tensor = manager[key] if isinstance(manager, Mapping) else manager.get_tensor(key)
    if shard_fns is not None:
        place = shard_fns.get(key)
        if place is not None:
            tensor = place(tensor)
        elif mismatch_allowed:
            num_mismatches = 1
        else:
            raise ValueError(
                f"shard_fns has no function for {key!r}{did_you_mean(key, shard_fns)}: add one, or "
                "allow mismatches"
            )
    if callback is not None:
        tensor = callback(tensor, key)
    return key, _cast_floats(tensor, dtype), num_mismatches


def flatten_for_broadcast(state: Mapping[Any, Any]) -> dict[Position, Any]:
    """Flatten nested dicts and lists, in the same order on all ranks.

    Returns:
        Position (the tuple of dict keys and list indices that leads to a leaf) -> leaf, in the
        order of `state`. `unflatten_from_broadcast` is the inverse.
    """
    return dict(leaves(state, _is_nested))


def unflatten_from_broadcast(
    flat: Mapping[Position, Any], like: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Put leaves into new nested dicts and lists structured like `like`.

    Raises:
        ValueError: `like` has leaves at other positions.
    """
    positions = flatten_for_broadcast(like)
    _check_same(
        flat, positions, "the flat state and the nested one it is put into have different leaves"
    )
    nested: dict[Any, Any] = map_leaves(
        lambda position, _: flat[position], like, _is_nested, join=new_like
    )
    return nested


def apply_gather_functions(
    state: Mapping[Any, Any],
    gather_fns: Mapping[Any, Any] | bool,
    mismatch_allowed: bool,
    verbose: bool,
) -> dict[Any, Any]:
    """Gather the tensors of a state, one after the other.

    Collective operation if the functions are: then all ranks must call it, with a state in the same
    order.

    Args:
        state: nested dicts and lists; they are not changed.
        gather_fns: True gathers every DTensor whole (`full_tensor()`), False nothing. Otherwise the
            functions, nested as in `state` or by position (see `flatten_for_broadcast`).
        mismatch_allowed: whether leaves may lack a function (then they stay as they are), and
            functions a leaf.
        verbose: whether to log the number of gathered leaves.

    Returns:
        A state of the same nesting.

    Raises:
        ValueError: leaves and functions do not match, and that is not allowed.
    """
    flat = flatten_for_broadcast(state)
    functions = _functions_by_position(flat, gather_fns)
    if not (mismatch_allowed or isinstance(gather_fns, bool)):
        _check_same(
            functions, flat, "gather functions and leaves do not match (mismatches can be allowed)"
        )
    gathered = {}
    for position, leaf in flat.items():
        if position in functions:
            gathered[position] = functions[position](leaf)
    if verbose:
        logger.info("gathered %d of %d leaves", len(gathered), len(flat))
    return unflatten_from_broadcast(flat | gathered, state)


def _functions_by_position(
    flat: Mapping[Position, Any], gather_fns: Mapping[Any, Any] | bool
) -> dict[Position, Callable[[Any], Any]]:
    if isinstance(gather_fns, bool):
        gather = operator.methodcaller("full_tensor")
        leaves_to_gather = flat if gather_fns else {}
        functions: dict[Position, Callable[[Any], Any]] = {}
        for place, leaf in leaves_to_gather.items():
            if hasattr(leaf, "full_tensor"):
                functions[place] = gather
        return functions
    is_flat = any(isinstance(key, tuple) for key in gather_fns)
    by_position = gather_fns
    if not is_flat:
        by_position = flatten_for_broadcast(gather_fns)
    functions = {}
    for place, function in by_position.items():
        if function is not None:
            functions[place] = function
    return functions


def _is_nested(node: Any) -> bool:
    return isinstance(node, Mapping | list)


def _check_same(
    actual: Iterable[Position],
    expected: Iterable[Position],
    problem: str,
) -> None:
    lacking = set(expected) - set(actual)
    extra = set(actual) - set(expected)
    if lacking or extra:
        names = []
        for side in (lacking, extra):
            names.append(summarize_keys(".".join(map(str, position)) for position in side))
        raise ValueError(
            f"{problem}: lacking {names[0] or 'none'}, unexpected {names[1] or 'none'}"
        )


@operation
def broadcast_tensor(
    tensor: torch.Tensor,
    memory_limit_bytes: int,
    target_sharding: Any = None,
    *,
    src: int = 0,
    process_group: Any = None,
) -> torch.Tensor:
    """Give every rank the values of one rank's tensor, piece by piece.

    Collective operation: all ranks of the group must call it. They exchange descriptions and the
    values, through CPU memory.

    Args:
        tensor: of the same shape and dtype on every rank, on any device and with any strides. It is
            overwritten except on `src`.
        memory_limit_bytes: the most memory that a rank may use on top of the tensor. The smallest
            limit of all ranks counts.
        target_sharding: how to distribute the result, see `reshard`; None leaves it whole on every
            rank.
        src: the rank in the group that has the values.
        process_group: a `torch.distributed` group; None is the default group, or this process alone
            if there is none.

    Returns:
        `tensor`, or the DTensor made of it.

    Raises:
        RankFailedError: ranks disagree, or an argument is wrong on some of them.
        ValueError: an argument is wrong, with a single rank.
    """
    ranks = Ranks(process_group)
    with ranks.phase("describe the tensor to broadcast"):
        mine = [str(tensor.dtype), list(tensor.shape), src]
        description = json.dumps([mine, int(memory_limit_bytes)]).encode()
    everyone = [json.loads(text) for text in ranks.all_gather(description)]
    with ranks.phase("prepare a broadcast"):
        for rank, (other, _) in enumerate(everyone):
            if other != mine:
                raise ValueError(
                    f"[dtype, shape, src] of the tensor to broadcast are {mine}, on rank {rank} "
                    f"{other}"
                )
        if not 0 <= src < ranks.size:
            raise ValueError(f"src is {src}, but the group has {ranks.size} ranks, counted from 0")
        chunks = chunk_tensor_by_memory(tensor.detach(), min(limit for _, limit in everyone))
    if ranks.size == 1:
        return reshard(tensor, target_sharding)
    for chunk in chunks:
        plain = to_plain_memory(chunk)
        ranks.broadcast_into(tensor_bytes(plain), src)
        if ranks.rank != src and plain is not chunk:
            chunk.copy_(plain)
    return reshard(tensor, target_sharding)


def is_gcs_path(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in Google Cloud Storage (`gs://...`)."""
    return str(path).startswith(_GCS_SCHEME)


def parse_gcs_path(gcs_path: str | os.PathLike[str]) -> tuple[str, str]:
    """Divide `gs://bucket/blob` into `(bucket, blob)`.

    Raises:
        ValueError: the path is not of this form.
    """
    bucket, _, blob = str(gcs_path).removeprefix(_GCS_SCHEME).partition("/")
    if not is_gcs_path(gcs_path) or not bucket or not blob:
        raise ValueError(f"{str(gcs_path)!r} is not of the form gs://bucket/blob")
    return bucket, blob


# --- Available memory -----------------------------------------------------------------------------


def estimate_available_memory(*, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Estimate the host memory in bytes that this process can still take.

    More would make the machine swap, or the process be killed. The estimate is the smaller of the
    machine's available memory and the memory left by the limits of this process's control groups
    (of containers and batch jobs; version 1 and 2). File cache that the kernel drops on demand
    counts as available.

    Args:
        proc: directory of the proc file system.
        cgroups: directory of the control groups.
    """
    free = [*_machine_memory(proc), *_cgroup_memory(proc, cgroups)]
    if not free:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min(free))


def _machine_memory(proc: str) -> Iterator[int]:
    for line in _lines(os.path.join(proc, "meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroup_memory(proc: str, cgroups: str) -> Iterator[int]:
    """Yield the memory that each applicable limit leaves.

    The limits of the groups around its own bind a process, too.
    """
    for line in _lines(os.path.join(proc, "self", "cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            for root in (cgroups, os.path.join(cgroups, "unified")):
                yield from _memory_upward(root, path, *names)
        elif "memory" in controllers.split(","):
            root = os.path.join(cgroups, "memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _memory_upward(root, path, *names)


def _memory_upward(
    root: str, path: str, limit_name: str, usage_name: str, cache_name: str
) -> Iterator[int]:
    # In a container the root may be the group itself, and the path one that is visible outside
    # only.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = os.path.join(root, *parts[:depth])
        limit = "".join(_lines(os.path.join(group, limit_name)))
        usage = "".join(_lines(os.path.join(group, usage_name)))
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split(" ", 1) for line in _lines(os.path.join(group, "memory.stat")))
            yield int(limit) - int(usage) + int(stat.get(cache_name, 0))


def _lines(path: str) -> Sequence[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return ()
