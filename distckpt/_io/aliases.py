"""Separation of load targets that share memory.

If they were read together, one would be overwritten while its checksum is computed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import flat_bytes
from distckpt._base.memory import address_array, fill, overlapping
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.load import Copy, Request
from distckpt.mapping._sharded_tensor import ShardedTensor

logger = logging.getLogger(__name__)


class Separated(NamedTuple):
    """Targets to read into, without shared memory.

    `pairs` are the (first, second) targets where `second` has elements of `first`, an earlier one.
    While it is read, the second of a pair has memory of its own in `targets`; `given` has the
    original targets.
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
    """Give each target that overlaps an earlier one memory of its own.

    Targets that are stored in the same place keep their memory.
    """
    shared = sorted((second, first) for first, second in overlapping(targets))
    if not shared:
        return Separated(list(targets), targets, [])
    concerned: set[int] = set()
    for pair in shared:
        concerned.update(pair)
    sources = _sources_of(stored, copies, concerned)
    places = {}
    for n in concerned:
        places[n] = (targets[n].dtype, address_array(targets[n]).__array_interface__)

    def is_same(first: int, second: int) -> bool:
        return (sources[first], places[first]) == (sources[second], places[second])

    pairs = [(first, second) for second, first in shared if not is_same(first, second)]
    separated = list(targets)
    for second in {second for _, second in pairs}:
        separated[second] = _own_memory(requests[second], targets[second])
    return Separated(separated, targets, pairs)


def _own_memory(request: Request, target: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    if request.allow_shape_mismatch:
        return memory.zero_()
    return memory


def _sources_of(
    stored: StoredCheckpoint, copies: Sequence[Copy], requests: set[int]
) -> dict[int, set[Any]]:
    """Return the stored places that fill some requests, by request."""
    sources: dict[int, set[Any]] = defaultdict(set)
    for copy in copies:
        if copy.request in requests:
            place = stored.path_of(copy.chunk), int(stored.manifest.first_bytes[copy.chunk])
            sources[copy.request].add((*place, copy.source, copy.target))
    return sources


def join(requests: Sequence[Request], separated: Separated, location: str) -> set[str]:
    """Give shared memory the value that was read last.

    Warn if it differs from the value that was read before, and return the keys of lost values.
    """
    earlier: dict[int, list[int]] = defaultdict(list)
    for first, second in separated.pairs:
        earlier[second].append(first)
    lost: set[str] = set()
    for second, firsts in earlier.items():
        target = separated.given[second]
        values = separated.targets[second]
        others = [(requests[n].key, separated.given[n]) for n in firsts]
        lost |= _put(requests[second].key, target, values, others, location)
    return lost


def settle(
    given: Sequence[ShardedTensor], filled: Sequence[ShardedTensor], location: str
) -> set[str]:
    """Fill tensors that share memory from the tensors loaded instead of them.

    Return the keys of other tensors that have lost values by this.

    Raises:
        LoadMismatchError: elements that are one place have different values.
    """
    pairs = zip(given, filled, strict=True)
    targets: list[Any] = []
    for one, other in pairs:
        targets.append(other.data if one.data is None else one.data)
    apart: dict[int, Any] = {}
    for number, shard in enumerate(filled):
        if shard.data is not targets[number]:
            apart[number] = shard.data
    if not apart:
        return set()
    neighbors = _neighbors(targets)
    lost: set[str] = set()
    for number, values in apart.items():
        others = []
        for n in neighbors[number]:
            if n < number or n not in apart:
                others.append((given[n].key, targets[n]))
        lost |= _put(given[number].key, targets[number], values, others, location)
    return lost


def _neighbors(targets: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """Return for each target the other targets that share memory with it."""
    neighbors: dict[int, list[int]] = defaultdict(list)
    for first, second in overlapping(targets):
        neighbors[first].append(second)
        neighbors[second].append(first)
    return neighbors


def _put(
    key: str,
    target: torch.Tensor,
    values: torch.Tensor,
    others: Sequence[tuple[str, torch.Tensor]],
    location: str,
) -> set[str]:
    """Fill a target, and warn if this changes other tensors. Return the keys of those tensors."""
    before = [flat_bytes(other.clone()) for _, other in others]
    fill(key, target, values)
    lost = set()
    for (name, other), bits in zip(others, before, strict=True):
        if not torch.equal(bits, flat_bytes(other)):
            lost.add(name)
            logger.warning(
                "%r and %r of %s have different values, and were to be loaded into one tensor: "
                "it has that of %r now. Request one of them, or untie the tensors.",
                name,
                key,
                location,
                key,
            )
    return lost
