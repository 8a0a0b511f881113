"""Targets of a load that share memory: if they were read together, one would be overwritten while
its checksum is computed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import as_integers, flat_bytes
from distckpt._base.errors import LoadMismatchError
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._plan.load import Copy, Request

logger = logging.getLogger(__name__)


class Separated(NamedTuple):
    """The targets to read into, those that were given, and the pairs of them (first, second) of
    which the second has elements of the first, an earlier one.

    While it is read, the second of a pair has memory of its own.
    """

    targets: list[torch.Tensor]
    given: Sequence[torch.Tensor]
    pairs: list[tuple[int, int]]


def separate(
    stored: StoredCheckpoint,
    requests: Sequence[Request],
    copies: Sequence[Copy],
    targets: Sequence[torch.Tensor],
) -> Separated:
    """Give memory of its own to each target that has elements of an earlier one, unless both are
    stored in the same place.
    """
    shared = sorted((second, first) for first, second in overlapping(targets))
    if not shared:
        return Separated(list(targets), targets, [])
    concerned = {number for pair in shared for number in pair}
    sources = _sources_of(stored, copies, concerned)
    places = {n: (targets[n].dtype, _as_array(targets[n]).__array_interface__) for n in concerned}

    def is_same(first: int, second: int) -> bool:
        return (sources[first], places[first]) == (sources[second], places[second])

    pairs = [(first, second) for second, first in shared if not is_same(first, second)]
    separated = list(targets)
    for second in {second for _, second in pairs}:
        separated[second] = _own_memory(requests[second], targets[second])
    return Separated(separated, targets, pairs)


def _own_memory(request: Request, target: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    return memory.zero_() if request.allow_shape_mismatch else memory


def _sources_of(
    stored: StoredCheckpoint, copies: Sequence[Copy], requests: set[int]
) -> dict[int, set[Any]]:
    """Return where what fills some requests is stored, by request."""
    sources: dict[int, set[Any]] = defaultdict(set)
    for copy in copies:
        if copy.request in requests:
            place = stored.path_of(copy.chunk), int(stored.manifest.first_bytes[copy.chunk])
            sources[copy.request].add((*place, copy.source, copy.target))
    return sources


def join(requests: Sequence[Request], separated: Separated, location: str) -> set[str]:
    """Give shared memory the value that was read last, and warn if it differs from the one read
    before; return the keys of those that are lost.
    """
    lost = set()
    for first, second in separated.pairs:
        target, value = separated.given[first].detach(), separated.targets[second]
        before = target.clone()
        with torch.no_grad():
            separated.given[second].copy_(value)
        if not torch.equal(flat_bytes(before), flat_bytes(target)):
            lost.add(requests[first].key)
            logger.warning(
                "%r and %r of %s have different values, and were to be loaded into one tensor: "
                "it has that of %r now. Request one of them, or untie the tensors.",
                requests[first].key,
                requests[second].key,
                location,
                requests[second].key,
            )
    return lost


def overlapping(targets: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of targets that have elements in common, in the order of the targets."""
    starts = np.fromiter((target.data_ptr() for target in targets), np.int64, len(targets))
    ends = starts + np.fromiter(map(_num_bytes_spanned, targets), np.int64, len(targets))
    order = np.argsort(starts, kind="stable")
    order = order[(starts != 0)[order] & (ends != starts)[order]]
    if (starts[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all():
        return
    earlier: list[int] = []
    for number in order.tolist():
        earlier = [other for other in earlier if ends[other] > starts[number]]
        for other in earlier:
            same_device = targets[other].device == targets[number].device
            if same_device and np.shares_memory(
                _as_array(targets[other]), _as_array(targets[number])
            ):
                yield min(other, number), max(other, number)
        earlier.append(number)


def _num_bytes_spanned(target: torch.Tensor) -> int:
    if target.is_contiguous() or not target.numel():
        return target.nbytes
    steps = sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
    return (steps + 1) * target.element_size()


def _as_array(target: torch.Tensor) -> Any:
    """Return an array at the addresses of a tensor on any device, which must not be read."""
    size = target.element_size()
    strides = tuple(step * size for step in target.stride())
    place = {"version": 3, "shape": tuple(target.shape), "typestr": f"|V{size}", "strides": strides}
    return np.asarray(
        SimpleNamespace(__array_interface__={**place, "data": (target.data_ptr(), False)})
    )


def settled(shard: ShardedTensor, loaded: torch.Tensor) -> torch.Tensor:
    """Give a tensor the values that were loaded elsewhere because several of its elements are one
    place in memory.
    """
    target = shard.data
    if target is None or target is loaded:
        return loaded
    with torch.no_grad():
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
        target[once].copy_(loaded[once])
        if not torch.equal(as_integers(target.resolve_conj().resolve_neg()), as_integers(loaded)):
            raise LoadMismatchError(
                f"Key {shard.key!r}: several elements of the tensor are one place in memory "
                f"(strides {target.stride()}), but have different values in the checkpoint. Give "
                "it memory of its own: clone() it before loading.",
                unexpected=[shard.key],
            )
    return target
