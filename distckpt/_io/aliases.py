"""Targets of one load that share their memory: read together, one would be overwritten while its checksum is taken."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.load import Copy, Request

logger = logging.getLogger(__name__)


class Separated(NamedTuple):
    """The targets to read into, and which of them (second) stand for the memory of an earlier one (first)."""

    targets: list[torch.Tensor]
    pairs: list[tuple[int, int]]


def separate(
    stored: StoredCheckpoint, requests: Sequence[Request], copies: Sequence[Copy], targets: Sequence[torch.Tensor]
) -> Separated:
    """Give each target that has the memory of an earlier one, and is stored elsewhere, memory of its own."""
    addresses = [address for target in targets if (address := target.data_ptr())]
    if len(set(addresses)) == len(addresses):
        return Separated(list(targets), [])
    first_of: dict[Any, int] = {}
    shared = [(first_of.setdefault(_memory(target, number), number), number) for number, target in enumerate(targets)]
    shared = [(first, number) for first, number in shared if first != number]
    if not shared:
        return Separated(list(targets), [])
    concerned = {number for pair in shared for number in pair}
    sources: dict[int, set[Any]] = defaultdict(set)
    for copy in copies:
        if copy.request in concerned:
            place = stored.path_of(copy.chunk), int(stored.manifest.first_bytes[copy.chunk])
            sources[copy.request].add((*place, copy.source, copy.target))
    pairs = [(first, second) for first, second in shared if sources[first] != sources[second]]
    separated = list(targets)
    for _, second in pairs:
        separated[second] = torch.empty(targets[second].shape, dtype=targets[second].dtype)
        if requests[second].allow_shape_mismatch:
            separated[second].zero_()
    return Separated(separated, pairs)


def join(requests: Sequence[Request], separated: Separated, location: str) -> None:
    """Give shared memory the value that was read last, and warn where it differs from the one read before."""
    for first, second in separated.pairs:
        target, value = separated.targets[first], separated.targets[second].to(separated.targets[first].device)
        one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (target, value))
        if not torch.equal(one, other):
            logger.warning(
                "%r and %r of %s have different values, and were to be loaded into one tensor: it has that of %r now. "
                "Request one of them, or untie the tensors.",
                requests[first].key, requests[second].key, location, requests[second].key,
            )  # fmt: skip
            with torch.no_grad():
                target.copy_(value)


def _memory(target: torch.Tensor, number: int) -> Any:
    """Return what targets with the same elements have in common."""
    if target.numel() == 0 or target.data_ptr() == 0:
        return number
    layout = None if target.is_contiguous() else (target.shape, target.stride())
    return target.device, target.data_ptr(), target.nbytes, target.dtype, layout or target.shape
