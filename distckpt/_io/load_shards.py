"""The engine of loads: read exactly the requested regions of tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distckpt._base.memory import Copier, in_huge_pages, may_overlap
from distckpt._base.options import LoadOptions
from distckpt._base.progress import ProgressCounter
from distckpt._base.threads import (
    NUM_DIRECT_THREADS,
    NUM_THREADS,
    num_requests_within,
    num_threads_within,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import covering
from distckpt._io import aliases
from distckpt._io.direct_reads import files_to_read_directly
from distckpt._io.read_values import read_apart, read_values, warn_of_overflows
from distckpt._io.shared_read import MIN_REQUESTED_BYTES, Sharing, read_sharing
from distckpt._mapping.wrappers import ShardedTensor
from distckpt._plan.decoded import decoded, name_in_view
from distckpt._plan.load import Copy, Request, check_dtype, check_keys, plan_load
from distckpt._plan.translate import translate
from distckpt._ranks import exchanges
from distckpt._ranks.collectives import Ranks
from distckpt._rules.rules import Rule
from distckpt._state.shards import region_view, shard_regions
from distckpt._storage import locations
from distckpt._storage.open_files import MIN_DIRECT_BYTES, OpenFiles


@dataclass(frozen=True)
class ReadSettings:
    """How tensors are read.

    Attributes:
        options: of the caller.
        rules: how the requested tensors are made from the stored ones.
        exchange_group: process group whose ranks may share reads; None for all ranks.
    """

    options: LoadOptions
    rules: Sequence[Rule] = ()
    exchange_group: Any = None


@dataclass(frozen=True)
class _Requests:
    """What is read into which tensors.

    Attributes:
        shards: with their tensors, which are allocated where the caller gave none.
        requests: regions of the checkpoint, one for each target.
        targets: views of the tensors of the shards.
        copies: what to read from which chunk; nothing yet for requests whose elements lie apart.
        additions: what to add to targets when they are read.
    """

    shards: list[ShardedTensor]
    requests: list[Request]
    targets: Sequence[torch.Tensor]
    copies: list[Copy]
    additions: list[tuple[torch.Tensor, float]]


def load_tensors(
    ranks: Ranks,
    stored: StoredCheckpoint,
    shards: Sequence[ShardedTensor],
    settings: ReadSettings,
) -> list[torch.Tensor | None]:
    """Fill the tensors of shards, and return them; allocate those that have none.

    Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: a key, shape or dtype is not stored as requested.
        CorruptCheckpointError: files contradict the manifest or their checksums.
    """
    options = settings.options
    with ranks.phase("plan the reads") as vote:
        stored = decoded(stored)
        planned = _plan_requests(stored, shards, settings)
        separated = aliases.separate(stored, planned.requests, planned.copies, planned.targets)
        group = exchanges.group_number(settings.exchange_group)
        num_bytes = sum(target.nbytes for target in separated.targets)
        vote.number = num_bytes
    counter = ProgressCounter(options.progress, num_bytes)
    # Some of what follows is copied by other threads, whose streams know nothing of this thread's.
    Copier(separated.targets).wait_for_queued()
    reading = _Reading(ranks, stored, options, group, counter)
    reading.read(planned.copies, separated.targets, most_bytes=vote.largest)
    reading.read_apart(planned.requests, planned.targets)
    aliases.join(planned.requests, separated, stored.location)
    warn_of_overflows(stored, planned.requests, planned.targets)
    _add(planned.additions)
    counter.finish()
    return [
        None if shard.data is None else aliases.settled(given, shard.data)
        for given, shard in zip(shards, planned.shards, strict=True)
    ]


@dataclass(frozen=True)
class _Reading:
    """The reads of one call."""

    ranks: Ranks
    stored: StoredCheckpoint
    options: LoadOptions
    group: int
    counter: ProgressCounter

    @property
    def is_local(self) -> bool:
        return locations.is_local(self.stored.location)

    def read(
        self, copies: Sequence[Copy], targets: Sequence[torch.Tensor], most_bytes: int
    ) -> None:
        """Fill targets; no rank requests more than `most_bytes`."""
        limit = self.options.max_inflight_bytes
        is_little = self.options.parallel_load == "auto" and most_bytes < MIN_REQUESTED_BYTES
        mode = "off" if is_little else self.options.parallel_load
        sharing = Sharing(self.ranks, mode, self.group, self.is_local, limit)
        direct: frozenset[str] = frozenset()
        if self.is_local and most_bytes >= MIN_DIRECT_BYTES:
            direct = files_to_read_directly(self.ranks, self.stored, copies)
        num_threads = num_requests_within(limit)
        if self.is_local:
            num_threads = num_threads_within(limit, NUM_DIRECT_THREADS if direct else NUM_THREADS)
        with OpenFiles(direct=direct) as files:
            kept = self.stored.with_files(files)

            def read_share(share: Sequence[Copy]) -> None:
                read_values(kept, share, targets, num_threads, self.counter.add)

            read_sharing(sharing, kept.manifest, copies, targets, read_share)

    def read_apart(self, requests: Sequence[Request], targets: Sequence[torch.Tensor]) -> None:
        """Fill the targets whose elements lie apart in the checkpoint."""
        apart = [pair for pair in zip(requests, targets, strict=True) if pair[0].step]
        limit = self.options.max_inflight_bytes
        num_threads = num_threads_within(limit) if self.is_local else num_requests_within(limit)
        read_apart(self.stored, apart, num_threads, self.counter.add)


def _plan_requests(
    stored: StoredCheckpoint, shards: Sequence[ShardedTensor], settings: ReadSettings
) -> _Requests:
    """Find out what to read into which tensors; `stored` is a view, see `decoded`."""
    options, rules = settings.options, settings.rules
    pieces = [(number, region) for number, s in enumerate(shards) for region in shard_regions(s)]
    requests = [_request_of(shards[number], region) for number, region in pieces]
    copies: list[Copy] = []
    additions: list[tuple[torch.Tensor, float]] = []
    if not rules:
        # Before memory is allocated: what is not stored may be of any size.
        requested = [shards[number] for number, _ in pieces]
        dtypes = [shard.dtype if shard.data is None else shard.data.dtype for shard in requested]
        requests, copies = _plan_copies(stored, requests, dtypes, options, by_rules=False)
    filled = [_with_memory(shard) for shard in shards]
    targets: Sequence[torch.Tensor] = [
        region_view(filled[number], region) for number, region in pieces
    ]
    if rules:
        requests, targets, values = translate(rules, requests, targets)
        dtypes = [target.dtype for target in targets]
        requests, copies = _plan_copies(stored, requests, dtypes, options, by_rules=True)
        additions = [pair for pair in zip(targets, values, strict=False) if pair[1]]
    for request, target in zip(requests, targets, strict=True):
        if request.allow_shape_mismatch:
            target.zero_()
    return _Requests(filled, requests, targets, copies, additions)


def _request_of(shard: ShardedTensor, region: Any) -> Request:
    return Request(shard.key, tuple(shard.global_shape), region, shard.allow_shape_mismatch)


def _with_memory(shard: ShardedTensor) -> ShardedTensor:
    """Return a shard whose tensor can be filled in place."""
    if shard.data is not None and not may_overlap(shard.data):
        return shard
    filled = shard.without_data()
    device = "cpu" if shard.data is None else shard.data.device
    filled.init_data(device, lambda *a, **k: in_huge_pages(torch.empty(*a, **k)))
    return filled


def _plan_copies(
    stored: StoredCheckpoint,
    requests: list[Request],
    dtypes: Sequence[torch.dtype],
    options: LoadOptions,
    by_rules: bool,
) -> tuple[list[Request], list[Copy]]:
    """Find what fills the requests, whose targets have the given dtypes."""
    if stored.quantized:
        requests = [
            request._replace(key=name_in_view(stored, request.key, dtype))
            for request, dtype in zip(requests, dtypes, strict=True)
        ]
    keys = [request.key for request in requests]
    check_keys(stored, keys, by_rules)
    for key, dtype in dict.fromkeys(zip(keys, dtypes, strict=True)):
        check_dtype(stored, key, dtype, options.allow_dtype_cast)
    dense = [
        request._replace(region=covering(request.region, request.step), step=())
        for request in requests
    ]
    copies = [copy for copy in plan_load(stored, dense) if not requests[copy.request].step]
    return requests, copies


def _add(additions: Sequence[tuple[torch.Tensor, float]]) -> None:
    """Add values to targets, once where several of them are one piece of memory."""
    places = {(t.data_ptr(), t.shape, t.stride()): (t, value) for t, value in additions}
    with torch.no_grad():
        for target, value in places.values():
            target.add_(value)
