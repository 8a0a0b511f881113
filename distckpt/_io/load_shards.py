"""The engine of loads: reads exactly the requested regions, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier, in_huge_pages, repeats_memory
from distckpt._base.options import LoadOptions
from distckpt._base.threads import (
    ProgressCounter,
    num_requests_within,
    num_threads_within,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io import aliases
from distckpt._io.read_values import read_apart, read_values, warn_of_overflows
from distckpt._io.shared_read import Sharing, read_shared
from distckpt._plan.decoded import decoded, name_in_view
from distckpt._plan.load import (
    Copy,
    Request,
    check_dtypes,
    check_keys,
    plan_load,
    request_of,
)
from distckpt._plan.translate import translate
from distckpt._ranks import groups
from distckpt._ranks.collectives import Ranks
from distckpt._state.shards import region_view, shard_regions
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.rules._rule import Rule


@dataclass(frozen=True)
class ReadSettings:
    """Settings for reading tensors.

    Attributes:
        options: options of the caller.
        rules: rules that make the requested tensors from the stored ones.
        exchange_group: process group whose ranks may share reads; None for all ranks.
        overwritten: filled with the keys of lost tensors, whose memory holds the values of other
            tensors.
    """

    options: LoadOptions
    rules: Sequence[Rule] = ()
    exchange_group: Any = None
    overwritten: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Requests:
    """The requests of a load, and the tensors that they fill.

    Attributes:
        shards: shards with their tensors, which are allocated if the caller gave none.
        requests: regions of the checkpoint, one for each target.
        targets: views of the tensors of the shards.
        copies: regions to read, by chunk; none for requests whose elements lie apart.
        additions: values to add to targets after reading.
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
    """Fill the tensors of shards, and return them; allocate missing tensors.

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
        group = groups.group_number(settings.exchange_group)
        num_bytes = sum(target.nbytes for target in separated.targets)
        vote.number = num_bytes
    counter = ProgressCounter(options.progress, num_bytes)
    # Counting the useful bytes of each piece takes time.
    progress = counter.add if options.progress is not None else None
    # Other threads do some of the following copies, on streams of their own.
    Copier(separated.targets).wait_for_queued()
    sharing = Sharing(
        ranks=ranks,
        mode=options.parallel_load,
        group=group,
        is_local=locations.is_local(stored.location),
        most_bytes=vote.largest,
        max_inflight_bytes=options.max_inflight_bytes,
    )
    with OpenFiles() as files:
        opened = stored.with_files(files)

        def read(copies: Sequence[Copy], targets: Sequence[torch.Tensor], max_bytes: int) -> None:
            read_values(opened, copies, targets, _num_threads(stored, max_bytes), progress)

        left = read_shared(sharing, stored, planned.copies, separated.targets, read)
        read(left, separated.targets, options.max_inflight_bytes)
    apart = []
    for pair in zip(planned.requests, planned.targets, strict=True):
        if pair[0].step:
            apart.append(pair)
    read_apart(stored, apart, _num_threads(stored, options.max_inflight_bytes), progress)
    settings.overwritten.update(aliases.join(planned.requests, separated, stored.location))
    key_index = stored.manifest.key_index
    dtypes = [FROM_NAME.get(name) for name in stored.manifest.dtypes]
    warn_of_overflows(
        (request.key, dtypes[key_index[request.key]], target)
        for request, target in zip(planned.requests, planned.targets, strict=True)
    )
    _add(planned.additions)
    counter.finish()
    settings.overwritten.update(aliases.settle(shards, planned.shards, stored.location))
    tensors = []
    for shard, filled in zip(shards, planned.shards, strict=True):
        tensors.append(filled.data if shard.data is None else shard.data)
    return tensors


def _num_threads(stored: StoredCheckpoint, max_bytes: int) -> int:
    """Return the number of threads that a memory limit allows."""
    if locations.is_local(stored.location):
        return num_threads_within(max_bytes)
    return num_requests_within(max_bytes)


def _plan_requests(
    stored: StoredCheckpoint, shards: Sequence[ShardedTensor], settings: ReadSettings
) -> _Requests:
    """Plan the requests and the tensors that they fill. `stored` is a view, see `decoded`."""
    pieces = _pieces_of(shards)
    requests = [request_of(shards[number], region) for number, region in pieces]
    copies: list[Copy] = []
    if not settings.rules:
        # Before memory is allocated: a tensor that is not stored may be of any size.
        dtypes = [_dtype_of(shards[number]) for number, _ in pieces]
        requests, copies = _plan_copies(stored, requests, dtypes, settings)
    filled = [_with_memory(shard) for shard in shards]
    views = [region_view(filled[number], region) for number, region in pieces]
    planned = _Requests(filled, requests, views, copies, [])
    if settings.rules:
        planned = _translated(stored, planned, settings)
    for request, target in zip(planned.requests, planned.targets, strict=True):
        if request.allow_shape_mismatch:
            target.zero_()
    return planned


def _pieces_of(shards: Sequence[ShardedTensor]) -> list[tuple[int, Region]]:
    """Return the regions of shards, each with its shard's number."""
    pieces = []
    for number, shard in enumerate(shards):
        for region in shard_regions(shard):
            pieces.append((number, region))
    return pieces


def _translated(
    stored: StoredCheckpoint,
    planned: _Requests,
    settings: ReadSettings,
) -> _Requests:
    """Request the tensors that the rules read."""
    translated = translate(settings.rules, planned.requests, planned.targets)
    for padding in translated.padding:
        padding.zero_()
    dtypes = [view.dtype for view in translated.views]
    requests, copies = _plan_copies(stored, translated.requests, dtypes, settings)
    additions = []
    for pair in zip(translated.views, translated.adds, strict=True):
        if pair[1]:
            additions.append(pair)
    return _Requests(planned.shards, requests, translated.views, copies, additions)


def _dtype_of(shard: ShardedTensor) -> torch.dtype:
    if shard.data is None:
        return shard.dtype
    return shard.data.dtype


def _with_memory(shard: ShardedTensor) -> ShardedTensor:
    """Return a shard whose tensor can be filled in place."""
    if shard.data is not None and not repeats_memory(shard.data):
        return shard
    filled = shard.without_data()
    device = "cpu" if shard.data is None else shard.data.device
    filled.init_data(device, lambda *a, **k: in_huge_pages(torch.empty(*a, **k)))
    return filled


def _plan_copies(
    stored: StoredCheckpoint,
    requests: list[Request],
    dtypes: Sequence[torch.dtype],
    settings: ReadSettings,
) -> tuple[list[Request], list[Copy]]:
    """Find the copies that fill the requests, given the targets' dtypes.

    Requests get the names that the view has.
    """
    if stored.quantized:
        named = []
        for request, dtype in zip(requests, dtypes, strict=True):
            key = name_in_view(stored, request.key, dtype)
            named.append(request._replace(key=key))
        requests = named
    keys = [request.key for request in requests]
    check_keys(stored, keys, has_rules=bool(settings.rules))
    check_dtypes(stored, keys, dtypes, settings.options.allow_dtype_cast)
    if not any(request.step for request in requests):
        return requests, plan_load(stored, requests)
    dense = []
    for request in requests:
        dense.append(request.covered() if request.step else request)
    return requests, [copy for copy in plan_load(stored, dense) if not requests[copy.request].step]


def _add(additions: Sequence[tuple[torch.Tensor, float]]) -> None:
    """Add values to targets, once per memory."""
    places = {(t.data_ptr(), t.shape, t.stride()): (t, value) for t, value in additions}
    with torch.no_grad():
        for target, value in places.values():
            target.add_(value)
