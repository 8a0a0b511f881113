"""Shards of an opened checkpoint: loads in place of the requested regions, and descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier, in_huge_pages, repeats_memory
from distckpt._base.options import LoadOptions
from distckpt._base.threads import ProgressCounter, num_requests_within, num_threads_within
from distckpt._checkpoint.stored_values import decode_objects, find_objects
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io import aliases
from distckpt._io.read import read_chunks
from distckpt._io.read_values import read_apart, read_copies, warn_of_overflows
from distckpt._io.shared_read import Sharing, read_shared
from distckpt._plan.decoded import decoded, find, name_in_view
from distckpt._plan.load import Copy, Request, check_dtypes, check_keys, plan_load, request_of
from distckpt._plan.translate import translate
from distckpt._ranks import groups
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard, region_view, shard_regions
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedObject
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


def load_shards(
    ranks: Ranks, stored: StoredCheckpoint, shards: Sequence[Shard], settings: ReadSettings
) -> list[Any]:
    """Fill the tensors of shards, allocate missing ones, and decode objects.

    Both are returned in the order of the shards.

    Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: a key, shape, dtype or object grid is not stored as requested.
        CorruptCheckpointError: files contradict the manifest or their checksums.
    """
    options = settings.options
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
        else:
            objects.append(shard)
    is_local = locations.is_local(stored.location)
    is_shared = ranks.size > 1 and options.parallel_load != "off"
    with ranks.phase("plan the reads") as vote:
        view = decoded(stored)
        planned = _plan_requests(view, tensors, settings)
        separated = aliases.separate(view, planned.requests, planned.copies, planned.targets)
        found = find_objects(stored, objects)
        chunks = [] if found.reader is not None else found.stored_chunks
        own_chunks = chunks
        if ranks.size > 1 and not is_local:
            # The coordinator reads common state, once.
            own_chunks = [chunk for chunk in chunks if stored.key_of(chunk) != COMMON_KEY]
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
        options=options,
        group=group,
        is_local=is_local,
        most_bytes=vote.largest,
    )
    num_threads_for = num_threads_within if is_local else num_requests_within
    with OpenFiles() as files:
        opened = view.with_files(files)

        def read(copies: Sequence[Copy], targets: Sequence[torch.Tensor], max_bytes: int) -> None:
            read_copies(opened, copies, targets, num_threads_for(max_bytes), progress)

        left: Sequence[Copy] = planned.copies
        if is_shared:
            left = read_shared(sharing, view, left, separated.targets, read)
        num_threads = num_threads_for(options.max_inflight_bytes)
        blobs = read_copies(opened, left, separated.targets, num_threads, progress, own_chunks)
        if settings.rules:
            read_apart(opened, planned.requests, planned.targets, num_threads, progress)
    counter.finish()
    _complete(view, planned, separated, tensors, settings)
    contents = dict(zip(own_chunks, blobs, strict=True))
    for chunk in set(chunks).difference(own_chunks):
        contents[chunk] = _read_by_coordinator(ranks, stored, chunk)
    loaded_objects = iter(decode_objects(stored, found, contents))
    filled = iter(planned.shards)
    values: list[Any] = []
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            memory = next(filled).data
            values.append(memory if shard.data is None else shard.data)
        else:
            values.append(next(loaded_objects))
    return values


def _complete(
    view: StoredCheckpoint,
    planned: _Requests,
    separated: aliases.Separated,
    given: Sequence[ShardedTensor],
    settings: ReadSettings,
) -> None:
    """Give shared memory its values, add what rules add, and warn of overflows."""
    lost: set[str] = set()
    if separated.pairs:
        lost = aliases.join(planned.requests, separated, view.location)
    if settings.options.allow_dtype_cast:
        warn_of_overflows(
            (request.key, FROM_NAME[view.dtype_name(request.key)], target)
            for request, target in zip(planned.requests, planned.targets, strict=True)
        )
    # Once per memory.
    places = {(t.data_ptr(), t.shape, t.stride()): (t, value) for t, value in planned.additions}
    with torch.no_grad():
        for target, value in places.values():
            target.add_(value)
    lost |= aliases.settle(given, planned.shards, view.location)
    settings.overwritten.update(lost)


def _read_by_coordinator(ranks: Ranks, stored: StoredCheckpoint, chunk: int) -> bytes:
    """Return common state, which the coordinator reads."""
    with ranks.telling("read the common state") as told:
        pass
    with ranks.answering(told, "read the common state"):
        if ranks.is_coordinator:
            (told.answer,) = read_chunks(stored, [chunk])
    return told.answer


def _plan_requests(
    stored: StoredCheckpoint, shards: Sequence[ShardedTensor], settings: ReadSettings
) -> _Requests:
    """Plan the requests and the tensors that they fill. `stored` is a view, see `decoded`."""
    numbers = []
    regions = []
    requests = []
    for number, shard in enumerate(shards):
        for region in shard_regions(shard):
            numbers.append(number)
            regions.append(region)
            requests.append(request_of(shard, region))
    copies: list[Copy] = []
    if not settings.rules:
        # Before memory is allocated: a tensor that is not stored may be of any size.
        dtypes = []
        for number in numbers:
            shard = shards[number]
            dtypes.append(shard.dtype if shard.data is None else shard.data.dtype)
        requests, copies = _plan_copies(stored, requests, dtypes, settings)
    filled = [_with_memory(shard) for shard in shards]
    views = []
    for number, region in zip(numbers, regions, strict=True):
        views.append(region_view(filled[number], region))
    planned = _Requests(filled, requests, views, copies, [])
    if settings.rules:
        planned = _translated(stored, planned, settings)
    for request, target in zip(planned.requests, planned.targets, strict=True):
        if request.allow_shape_mismatch:
            target.zero_()
    return planned


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


# --- Descriptions ------------------------------------------------------------


def describe_tensors(stored: StoredCheckpoint) -> dict[str, ShardedTensor]:
    """Describe every stored tensor as one shard without data, by key."""
    shards = {}
    for key in stored.manifest.key_index:
        if not stored.is_object(key):
            shards[key] = _unsharded(key, stored.dtype_name(key), stored.global_shape(key))
    return shards


def describe_objects(stored: StoredCheckpoint) -> dict[str, ShardedObject]:
    """Describe every cell of the stored objects, without data, by unique key."""
    shards = {}
    for key in filter(stored.is_object, stored.manifest.keys):
        for chunk in stored.chunks_of(key):
            offset = stored.manifest.chunk_region(chunk).offset
            shard = ShardedObject(key, None, stored.global_shape(key), offset)
            shards[shard.unique_key] = shard
    return shards


def describe_quantized(
    stored: StoredCheckpoint,
) -> dict[str, tuple[ShardedTensor, tuple[str, ...]]]:
    """Describe the tensors stored as codes and scales, by key.

    The description names the codes and scales.
    """
    descriptions = {}
    for key, tensor in find(stored).items():
        shard = _unsharded(key, tensor.dtype, tensor.model_shape)
        descriptions[key] = (shard, tensor.keys)
    return descriptions


def _unsharded(key: str, dtype: str, shape: tuple[int, ...]) -> ShardedTensor:
    num_axes = len(shape)
    return ShardedTensor(
        key, None, FROM_NAME[dtype], shape, shape, (0,) * num_axes, (1,) * num_axes
    )
