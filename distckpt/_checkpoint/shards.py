"""Shards of an opened checkpoint: loads in place of the requested regions, and descriptions."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME, flat_bytes
from distckpt._base.errors import CheckpointingException, add_to_message
from distckpt._base.memory import (
    Copier,
    address_array,
    fill,
    in_huge_pages,
    overlapping,
    repeats_memory,
)
from distckpt._base.options import LoadOptions
from distckpt._base.threads import ProgressCounter, num_requests_within, num_threads_within
from distckpt._checkpoint.stored_values import FoundObjects, decode_objects, find_objects
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read import read_chunks
from distckpt._io.read_values import read_apart, read_copies, warn_of_overflows
from distckpt._io.shared_read import Sharing, read_shared
from distckpt._plan.decoded import decoded, name_in_view
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
from distckpt.rules._mapped import UNCHANGED, change
from distckpt.rules._rule import Rule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadSettings:
    """Settings for reading tensors.

    Attributes:
        options: options of the caller.
        rules: rules that make the requested tensors from the stored ones.
        exchange_group: process group whose ranks may share reads; None for all ranks.
        overwritten: filled with the keys of lost tensors, whose memory holds the values of other
            tensors.
        figures: filled with fields of the `LoadReport` about shared reads.
    """

    options: LoadOptions
    rules: Sequence[Rule] = ()
    exchange_group: Any = None
    overwritten: set[str] = field(default_factory=set)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Requests:
    """The requests of a load, and the tensors that they fill.

    Attributes:
        shards: shards with their tensors, which are allocated if the caller gave none.
        requests: regions of the checkpoint, one for each target.
        targets: views of the tensors of the shards.
        copies: regions to read, by chunk; none for requests whose elements lie apart.
        changes: keys and targets, and how these are changed after reading.
        paddings: memory to fill with zeros before reading.
    """

    shards: list[ShardedTensor]
    requests: list[Request]
    targets: Sequence[torch.Tensor]
    copies: list[Copy]
    changes: list[tuple[str, torch.Tensor, tuple[float, float]]]
    paddings: list[torch.Tensor]


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
    tensors, objects = divide(shards)
    with ranks.phase("plan the reads") as vote:
        view = decoded(stored)
        planned = plan_requests(view, tensors, settings)
        buffers, pairs = _separate(view, planned)
        found = find_objects(stored, objects)
        chunks, chunks_of_coordinator = _chunks_to_read(ranks, stored, found)
        group = groups.group_number(settings.exchange_group)
        vote.number = sum(target.nbytes for target in buffers)
    is_local = locations.is_local(stored.location)
    sharing = Sharing(ranks, settings.options, group, is_local, vote.largest, settings.figures)
    filled = []
    for shard, memory in zip(tensors, planned.shards, strict=True):
        filled.append(memory.data if shard.data is None else shard.data)
    with filling(any(shard.data is not None for shard in tensors)):
        for padding in planned.paddings:
            padding.zero_()
        blobs = _read(sharing, view, planned, buffers, chunks)
        lost = _join(planned, buffers, pairs, view.location)
        _complete(view, planned, settings)
        lost |= _settle(planned.shards, filled, view.location)
        settings.overwritten.update(lost)
        contents = dict(zip(chunks, blobs, strict=True))
        for chunk in chunks_of_coordinator:
            contents[chunk] = _read_by_coordinator(ranks, stored, chunk)
        return in_order(shards, filled, decode_objects(stored, found, contents))


@contextlib.contextmanager
def filling(has_values: bool = True) -> Iterator[None]:
    """Say in errors of the body that tensors may be partly filled.

    They are, unless no tensor `has_values`.
    """
    try:
        yield
    except (CheckpointingException, OSError) as error:
        if has_values:
            add_to_message(error, "Tensors may be partly filled: load again before using them.")
        raise


def _chunks_to_read(
    ranks: Ranks, stored: StoredCheckpoint, found: FoundObjects
) -> tuple[list[int], list[int]]:
    """Return the chunks that each rank reads, and those of the coordinator.

    On an object store, common state is read once.
    """
    if found.reader is not None:
        return [], []
    if ranks.size == 1 or locations.is_local(stored.location):
        return found.stored_chunks, []
    own: list[int] = []
    common: list[int] = []
    for chunk in found.stored_chunks:
        is_common = stored.key_of(chunk) == COMMON_KEY
        (common if is_common else own).append(chunk)
    return own, common


def _read(
    sharing: Sharing,
    view: StoredCheckpoint,
    planned: _Requests,
    targets: Sequence[torch.Tensor],
    chunks: Sequence[int],
) -> list[bytes]:
    """Fill the targets; return the bytes of chunks of objects."""
    options = sharing.options
    counter = ProgressCounter(options.progress, sum(target.nbytes for target in targets))
    # Counting the useful bytes of each piece takes time.
    progress = counter.add if options.progress is not None else None
    # Other threads do some of the following copies, on streams of their own.
    Copier(targets).wait_for_queued()
    num_threads_for = num_threads_within if sharing.is_local else num_requests_within
    with contextlib.nullcontext(view.files) if view.files else OpenFiles() as files:
        opened = view.with_files(files)

        def read(copies: Sequence[Copy], targets: Sequence[torch.Tensor], max_bytes: int) -> None:
            read_copies(opened, copies, targets, num_threads_for(max_bytes), progress)

        left: Sequence[Copy] = planned.copies
        if sharing.ranks.size > 1 and options.share_reads != "off":
            left = read_shared(sharing, view, left, targets, read)
        num_threads = num_threads_for(options.max_inflight_bytes)
        blobs = read_copies(opened, left, targets, num_threads, progress, chunks)
        read_apart(opened, planned.requests, planned.targets, num_threads, progress)
    counter.finish()
    return blobs


def divide(shards: Sequence[Shard]) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    """Divide shards into tensors and objects, see `in_order`."""
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
        else:
            objects.append(shard)
    return tensors, objects


def in_order(shards: Sequence[Shard], tensors: Iterable[Any], objects: Iterable[Any]) -> list[Any]:
    """Return values of tensors and objects in the order of their shards."""
    next_tensors = iter(tensors)
    next_objects = iter(objects)
    values: list[Any] = []
    for shard in shards:
        values.append(next(next_tensors if isinstance(shard, ShardedTensor) else next_objects))
    return values


def _complete(
    view: StoredCheckpoint,
    planned: _Requests,
    settings: ReadSettings,
) -> None:
    """Change the targets as rules say, and warn of overflows."""
    if settings.options.allow_dtype_cast:
        warn_of_overflows(
            (request.key, FROM_NAME[view.dtype_name(request.key)], target)
            for request, target in zip(planned.requests, planned.targets, strict=True)
        )
    # Once per memory.
    places = {(t.data_ptr(), t.shape, t.stride()): (key, t, how) for key, t, how in planned.changes}
    with torch.no_grad():
        for _, target, how in places.values():
            change(target, *how)
    if places:
        # Products may be beyond any dtype's range.
        warn_of_overflows((key, torch.float64, target) for key, target, _ in places.values())


def _read_by_coordinator(ranks: Ranks, stored: StoredCheckpoint, chunk: int) -> bytes:
    """Return common state, which the coordinator reads."""
    with ranks.telling("read the common state") as told:
        pass
    with ranks.answering(told, "read the common state"):
        if ranks.is_coordinator:
            (told.answer,) = read_chunks(stored, [chunk])
    return told.answer


def plan_requests(
    stored: StoredCheckpoint, shards: Sequence[ShardedTensor], settings: ReadSettings
) -> _Requests:
    """Plan the requests and the tensors that they fill. `stored` is a view, see `decoded`."""
    numbers: list[int] = []
    regions: list[Region] = []
    for number, shard in enumerate(shards):
        own = shard_regions(shard)
        regions += own
        numbers += [number] * len(own)
    divided = [shards[number] for number in numbers]
    dtypes = [shard.dtype if shard.data is None else shard.data.dtype for shard in divided]
    requests = list(map(request_of, divided, regions))
    copies: list[Copy] = []
    if not settings.rules:
        # Before memory is allocated: a tensor that is not stored may be of any size.
        requests, copies = _plan_copies(stored, requests, dtypes, settings)
    filled = list(map(_with_memory, shards))
    views = list(map(region_view, [filled[number] for number in numbers], regions))
    planned = _Requests(filled, requests, views, copies, [], [])
    if settings.rules:
        planned = _translated(stored, planned, settings)
    for request, target in zip(planned.requests, planned.targets, strict=True):
        if request.allow_shape_mismatch:
            planned.paddings.append(target)
    return planned


def _translated(
    stored: StoredCheckpoint,
    planned: _Requests,
    settings: ReadSettings,
) -> _Requests:
    """Request the tensors that the rules read."""
    translated = translate(settings.rules, planned.requests, planned.targets)
    dtypes = [view.dtype for view in translated.views]
    requests, copies = _plan_copies(stored, translated.requests, dtypes, settings)
    changes = []
    keys = [request.key for request in requests]
    for changed in zip(keys, translated.views, translated.changes, strict=True):
        if changed[2] != UNCHANGED:
            changes.append(changed)
    paddings = list(translated.padding)
    return _Requests(planned.shards, requests, translated.views, copies, changes, paddings)


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
    return requests, plan_load(stored, requests)


# --- Shared memory --------------------------------------------------------------------------------
# If targets that share memory were read together, one would be overwritten while its checksum is
# computed.


def _separate(
    stored: StoredCheckpoint, planned: _Requests
) -> tuple[Sequence[torch.Tensor], list[tuple[int, int]]]:
    """Give each target that overlaps an earlier one memory of its own.

    Targets that are stored in the same place keep their memory. Return the targets to read into,
    and the (first, second) targets where `second` has elements of `first`, an earlier one.
    """
    targets = planned.targets
    shared = sorted((second, first) for first, second in overlapping(targets))
    if not shared:
        return targets, []
    concerned: set[int] = set()
    for pair in shared:
        concerned.update(pair)
    sources = _sources_of(stored, planned.copies, concerned)
    places = {}
    for n in concerned:
        places[n] = (targets[n].dtype, address_array(targets[n]).__array_interface__)

    def is_same(first: int, second: int) -> bool:
        return (sources[first], places[first]) == (sources[second], places[second])

    pairs = [(first, second) for second, first in shared if not is_same(first, second)]
    separated = list(targets)
    for second in {second for _, second in pairs}:
        target = targets[second]
        # Values that are not stored stay 0.
        separated[second] = torch.zeros(target.shape, dtype=target.dtype, device="cpu")
    return separated, pairs


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


def _join(
    planned: _Requests,
    buffers: Sequence[torch.Tensor],
    pairs: Sequence[tuple[int, int]],
    location: str,
) -> set[str]:
    """Give shared memory the value that was read last.

    Warn if it differs from the value that was read before, and return the keys of lost values.
    """
    earlier: dict[int, list[int]] = defaultdict(list)
    for first, second in pairs:
        earlier[second].append(first)
    lost: set[str] = set()
    for second, firsts in earlier.items():
        values = buffers[second]
        others = [(planned.requests[n].key, planned.targets[n]) for n in firsts]
        key = planned.requests[second].key
        lost |= _put(key, planned.targets[second], values, others, location)
    return lost


def _settle(shards: Sequence[ShardedTensor], targets: Sequence[Any], location: str) -> set[str]:
    """Fill tensors that share memory from the tensors loaded instead of them.

    Return the keys of other tensors that have lost values by this.

    Raises:
        LoadMismatchError: elements that are one place have different values.
    """
    apart: dict[int, Any] = {}
    for number, shard in enumerate(shards):
        if shard.data is not targets[number]:
            apart[number] = shard.data
    if not apart:
        return set()
    neighbors: dict[int, list[int]] = defaultdict(list)
    for first, second in overlapping(targets):
        neighbors[first].append(second)
        neighbors[second].append(first)
    lost: set[str] = set()
    for number, values in apart.items():
        others = []
        for n in neighbors[number]:
            if n < number or n not in apart:
                others.append((shards[n].key, targets[n]))
        lost |= _put(shards[number].key, targets[number], values, others, location)
    return lost


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


# --- Descriptions ---------------------------------------------------------------------------------


def describe_tensors(stored: StoredCheckpoint) -> dict[str, ShardedTensor]:
    """Describe every stored tensor as one shard without data, by key."""
    shards = {}
    for key in stored.manifest.key_index:
        if not stored.is_object(key):
            dtype = FROM_NAME[stored.dtype_name(key)]
            shape = stored.global_shape(key)
            offset = (0,) * len(shape)
            grid = (1,) * len(shape)
            shards[key] = ShardedTensor(key, None, dtype, shape, shape, offset, grid)
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
