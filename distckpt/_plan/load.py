"""Planning of loads: checks of requests, and the chunks that fill them.

All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._base.errors import CorruptCheckpointError, LoadMismatchError
from distckpt._base.lazy import torch
from distckpt._base.messages import did_you_mean, other_prefix, summarize_keys, without_numbers
from distckpt._format.foreign_formats import TORCH_DIST, is_export
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import (
    IntArray,
    Region,
    TilingFault,
    covering,
    find_tiling_faults,
    intersect_many,
    regions_to_arrays,
)
from distckpt._plan.codes import check_cast, check_integers, undecoded
from distckpt.mapping._wrappers import ShardedObject

if TYPE_CHECKING:
    # It imports torch, which reading a table of contents does not need.
    from distckpt.mapping._sharded_tensor import ShardedTensor

MAX_PAIRS = 1 << 18
"""Pairs of request and chunk that are compared at a time: about 50 MB."""


class Copy(NamedTuple):
    """A read: a region of a chunk, and its place in a request."""

    chunk: int
    source: Region
    request: int
    target: Region


class Request(NamedTuple):
    """A region of a key to load.

    With `allow_shape_mismatch`, the global shape may differ from the stored one, and values that
    are not stored stay unread. With `step`, the elements lie that far apart along the axes.
    """

    key: str
    global_shape: tuple[int, ...]
    region: Region
    allow_shape_mismatch: bool = False
    step: tuple[int, ...] = ()


def request_of(shard: ShardedTensor, region: Region) -> Request:
    """Request a region of a shard's tensor."""
    return Request(shard.key, tuple(shard.global_shape), region, shard.allow_shape_mismatch)


# --- Keys, dtypes and objects ---------------------------------------------------------------------


def check_keys(
    stored: StoredCheckpoint,
    keys: Iterable[str],
    has_rules: bool = False,
) -> None:
    """Refuse keys that are not stored."""
    known = stored.manifest.key_index
    absent = sorted({key for key in keys if key not in known})
    if not absent:
        return
    hint, advice = _advice(stored, absent, has_rules)
    text = f"Not in the checkpoint {stored.location!r}: {summarize_keys(absent)}{hint}. {advice}"
    raise LoadMismatchError(text, unexpected=absent)


_OF_DCP = (
    " If torch.distributed.checkpoint wrote it, distckpt.dcp.load takes the state dict that was "
    "saved."
)


_OF_TRAINERS = (
    " The optimizer.bin of accelerate and the optimizer.pt of transformers are pickles: give what "
    "torch.load(..., weights_only=True) returns to optimizer.load_state_dict."
)


def _advice(
    stored: StoredCheckpoint,
    absent: Sequence[str],
    has_rules: bool,
) -> tuple[str, str]:
    """Return a reason why keys are absent, and advice."""
    known = stored.manifest.key_index
    if about_these := _stored_otherwise(stored, absent):
        return "", about_these
    foreign_format = (stored.manifest.origin or {}).get("format")
    if _lack_optimizer(absent, known):
        return "", _optimizer_advice(absent, known) + _OF_TRAINERS * is_export(foreign_format)
    if prefix := other_prefix(absent, known):
        return prefix, (
            "Correct the prefix: a module at 'model' of the state dict has none, one at another "
            "place its path." + _OF_DCP * (foreign_format == TORCH_DIST.name)
        )
    hint = _smaller_model(absent, known) or did_you_mean(absent[0], known)
    if not (hint or has_rules) and is_export(foreign_format):
        return "", (
            "Names of another program need rules=, or family='auto' for those of Megatron Core "
            "and transformers."
        )
    if has_rules:
        return hint, (
            "Correct the keys or the rules, or leave such keys out of the state dict. A model of "
            "transformers without its head is `model.base_model`: fill that."
        )
    return hint, (
        "Correct the keys, or leave such keys out with strict='report' ('log_all' in "
        "distckpt.megatron)."
    )


def _stored_otherwise(stored: StoredCheckpoint, absent: Sequence[str]) -> str:
    """Explain keys in forgotten files or codes, and removed ones."""
    about_codes = filter(None, (undecoded(stored, key) for key in absent))
    about_files = forgotten(stored, absent) or next(about_codes, "")
    return about_files or _states_removed(absent, stored.manifest.key_index)


def forgotten(stored: StoredCheckpoint, absent: Collection[str]) -> str:
    """Name the file with absent keys that its directory's index omits."""
    by_file = (stored.manifest.origin or {}).get("forgotten", {})
    for name, keys in by_file.items():
        matching = []
        for key in keys:
            if key in absent:
                matching.append(key)
        if matching:
            return (
                f"The index does not name {summarize_keys(matching)}, in {name!r}: add to its "
                "weight_map what belongs to the model."
            )
    return ""


def _lack_optimizer(absent: Sequence[str], known: Iterable[str]) -> bool:
    """Whether absent keys belong to an optimizer of which nothing is stored."""
    are_of_optimizer = all(key.endswith(".settings") or ".state." in key for key in absent)
    return are_of_optimizer and not any(key.endswith(".settings") for key in known)


def _states_removed(absent: Sequence[str], known: Collection[str]) -> str:
    """Name optimizers of which the settings are stored, and no tensor."""
    names = {key.partition(".state.")[0] for key in absent}
    for name in names:
        if f"{name}.settings" not in known:
            return ""
        if any(key.startswith(f"{name}.state.") for key in known):
            return ""
    return (
        f"The settings of {summarize_keys(sorted(names))} are stored, and none of its tensors: "
        "they were removed (keep_optimizer), or it had made no step. Load another step, or leave "
        "the optimizer out of the state dict."
    )


def _optimizer_advice(absent: Sequence[str], known: Iterable[str]) -> str:
    """Explain where states like an optimizer's are stored, if they are."""
    places = sorted({key.partition(".state.")[0] for key in known if ".state." in key})
    if not places:
        return (
            "No state of an optimizer is read from there: leave the optimizer out of the state "
            "dict."
        )
    asked = {key.removesuffix(".settings").partition(".state.")[0] for key in absent}
    if asked.issubset(places):
        return (
            f"States like an optimizer's are stored at {summarize_keys(places)} without the "
            "parameter groups that tell whose they are: load the checkpoint that this one was made "
            "of, or leave the optimizer out."
        )
    return (
        f"States like an optimizer's are stored at {summarize_keys(places)}: put the optimizer at "
        "that place of the state dict, or leave it out."
    )


def _smaller_model(absent: Sequence[str], known: Iterable[str]) -> str:
    """Describe absent keys that differ from stored ones in numbers only."""
    patterns = {without_numbers(key) for key in known}
    absent_patterns = {without_numbers(key) for key in absent}
    if not absent_patterns <= patterns or any(len(pattern) == 1 for pattern in absent_patterns):
        return ""
    return " (the checkpoint has such keys with other numbers: was a smaller model saved?)"


def check_dtypes(
    stored: StoredCheckpoint,
    keys: Sequence[str],
    requested: Sequence[torch.dtype],
    allow_cast: bool,
) -> None:
    """Refuse objects, and tensors whose values a requested dtype would change.

    `requested` has one dtype for each key.
    """
    manifest = stored.manifest
    stored_dtypes = [FROM_NAME.get(manifest.dtypes[manifest.key_index[key]]) for key in keys]
    triples = zip(keys, stored_dtypes, requested, strict=True)
    differing = []
    for key, stored_dtype, dtype in triples:
        if stored_dtype != dtype:
            differing.append((key, dtype))
    for key, dtype in dict.fromkeys(differing):
        _check_dtype(stored, key, dtype, allow_cast)


def _check_dtype(
    stored: StoredCheckpoint, key: str, requested: torch.dtype, allow_cast: bool
) -> None:
    """Refuse an object, or a tensor whose values would change."""
    if stored.is_object(key):
        raise LoadMismatchError(
            f"Key {key!r} is an object in {stored.location!r} and was requested as a tensor.",
            unexpected=[key],
        )
    check_cast(stored, key, requested)
    check_integers(stored, key, requested)
    dtype = FROM_NAME[stored.dtype_name(key)]
    if not (allow_cast or is_lossless_cast(dtype, requested)):
        raise LoadMismatchError(
            f"Key {key!r} is stored in {stored.location!r} as {dtype} and was requested as "
            f"{requested}, which would change values. Request the stored dtype or a wider one, or "
            "pass allow_dtype_cast=True.",
            unexpected=[key],
        )


def object_chunk(stored: StoredCheckpoint, shard: ShardedObject) -> int:
    """Find the chunk that holds a part of an object."""
    if not stored.is_object(shard.key):
        raise LoadMismatchError(
            f"Key {shard.key!r} is a tensor in {stored.location!r} and was requested as an object.",
            unexpected=[shard.key],
        )
    stored_shape = stored.global_shape(shard.key)
    if stored_shape != tuple(shard.global_shape):
        raise LoadMismatchError(
            f"The object {shard.key!r} was saved in {stored_shape} parts and is requested in "
            f"{shard.global_shape} (checkpoint {stored.location!r}): objects cannot be resharded. "
            "Such per-rank state (RNG, data loader position) belongs to the number of ranks it "
            "was saved with: leave the key out, or load all stored parts (see "
            "load_sharded_metadata) and merge them yourself.",
            unexpected=[shard.unique_key],
        )
    chunks = stored.chunks_of(shard.key)
    offsets = stored.manifest.offsets[chunks.start : chunks.stop, : len(stored_shape)]
    hits = np.flatnonzero((offsets == np.array(shard.global_offset, np.int64)).all(axis=1))
    if len(hits):
        stored.manifest.chunks.check_rows(chunks.start + hits[:1])
        return chunks[int(hits[0])]
    raise LoadMismatchError(
        f"Part {shard.global_offset} of the object {shard.key!r} is not in {stored.location!r}.",
        unexpected=[shard.unique_key],
    )


# --- Regions of tensors ---------------------------------------------------------------------------


def plan_load(stored: StoredCheckpoint, requests: Sequence[Request]) -> list[Copy]:
    """Find the parts of chunks that make up the requested regions.

    The keys of the requests are all stored.

    Returns:
        Copies grouped by request. Their targets cover each request exactly. Requests with a `step`,
        whose elements must be stored as well, have none, see `read_apart`.

    Raises:
        LoadMismatchError: a request has another global shape than the stored tensor, or is not
            stored completely.
    """
    manifest = stored.manifest
    key_ids = [manifest.key_index[request.key] for request in requests]
    for request, key_id in zip(requests, key_ids, strict=True):
        if request.global_shape != manifest.global_shapes[key_id]:
            _check_shape(stored, request)
    regions = _covered(requests)
    offsets, shapes = regions_to_arrays(regions, manifest.offsets.shape[1])
    common = _intersect_chunks(manifest, np.array(key_ids, np.int64), offsets, shapes)
    manifest.chunks.check_rows(common.chunks)
    fault = _find_fault(common, _stored_extents(stored, requests, regions, shapes))
    if fault is not None:
        request = requests[fault.tensor]
        region = regions[fault.tensor]
        if fault.num_covers > 1:
            raise CorruptCheckpointError(
                f"Some of region {region} of key {request.key!r} is stored twice in "
                f"{stored.location!r}, which no save does: the manifest is damaged. Load another "
                "checkpoint."
            )
        raise LoadMismatchError(
            f"Region {region} of key {request.key!r} is not stored completely in "
            f"{stored.location!r}: it was saved with gaps (validate_access_integrity=False). "
            "Request a region that was saved.",
            unexpected=[request.key],
        )
    return _to_copies(common, requests)


def _covered(requests: Sequence[Request]) -> list[Region]:
    """Return the region around the elements of each request."""
    regions = []
    for request in requests:
        region = request.region
        if request.step:
            region = covering(region, request.step)
        regions.append(region)
    return regions


class _Intersections(NamedTuple):
    """The intersections of requests with chunks, as rows of arrays.

    They are sorted by request and chunk. `chunks` and `requests` have shape (n,). `in_chunks` and
    `in_requests` are the offsets inside of each; these and `shapes` have shape (n, ndim).
    """

    chunks: IntArray
    requests: IntArray
    in_chunks: IntArray
    in_requests: IntArray
    shapes: IntArray


def _intersect_chunks(
    manifest: Manifest, key_ids: IntArray, offsets: IntArray, shapes: IntArray
) -> _Intersections:
    """Intersect requested regions with chunks, many pairs at a time."""
    key_starts = manifest.key_starts
    first_chunks, stops = manifest.chunks.rows_near(key_ids, offsets, shapes, key_starts)
    counts = stops - first_chunks
    ends = np.cumsum(counts)
    batches: list[_Intersections] = []
    start = 0
    while start < len(key_ids):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + MAX_PAIRS, "right")))
        rows = np.repeat(np.arange(start, stop), counts[start:stop])
        chunks = first_chunks[rows] + np.arange(done, int(ends[stop - 1])) - (ends - counts)[rows]
        stored_offsets = manifest.offsets[chunks]
        requested = offsets[rows]
        hits, low, extent = intersect_many(
            stored_offsets, manifest.shapes[chunks], requested, shapes[rows]
        )
        batches.append(
            _Intersections(
                chunks[hits], rows[hits], low - stored_offsets[hits], low - requested[hits], extent
            )
        )
        start = stop
    if not batches:
        none = np.zeros(0, np.int64)
        return _Intersections(none, none, offsets, offsets, shapes)
    if len(batches) > 1:
        return _Intersections(*map(np.concatenate, zip(*batches, strict=True)))
    return batches[0]


def _to_copies(common: _Intersections, requests: Sequence[Request]) -> list[Copy]:
    ndims = [len(request.region.shape) for request in requests]
    apart = {number for number, request in enumerate(requests) if request.step}
    columns = [common.chunks.tolist(), common.requests.tolist()]
    for rows in (common.in_chunks, common.in_requests, common.shapes):
        columns.append(list(map(tuple, rows.tolist())))
    copies = []
    most = common.shapes.shape[1]
    for chunk, request, in_chunk, in_request, shape in zip(*columns, strict=True):
        if request in apart:
            continue
        ndim = ndims[request]
        if ndim < most:
            in_chunk, in_request, shape = in_chunk[:ndim], in_request[:ndim], shape[:ndim]
        source = target = Region(in_chunk, shape)
        if in_request != in_chunk:
            target = Region(in_request, shape)
        copies.append(Copy(chunk, source, request, target))
    return copies


def _find_fault(common: _Intersections, extents: IntArray) -> TilingFault | None:
    """Find a request that the intersections do not cover exactly once.

    The `tensor` of the fault is the index of the request. `extents` are the shapes that they should
    cover.
    """
    num_found = np.zeros(len(extents), np.int64)
    np.add.at(num_found, common.requests, np.prod(common.shapes, axis=1))
    is_divided = np.bincount(common.requests, minlength=len(extents)) > 1
    # A single intersection of the right size is the whole request.
    is_suspect = is_divided | (num_found != np.prod(extents, axis=1))
    if not is_suspect.any():
        return None
    suspects = np.flatnonzero(is_suspect)
    rows = np.flatnonzero(is_suspect[common.requests])
    faults = find_tiling_faults(
        np.searchsorted(suspects, common.requests[rows]),
        common.in_requests[rows],
        common.shapes[rows],
        extents[suspects],
    )
    if faults:
        return faults[0]._replace(tensor=int(suspects[faults[0].tensor]))
    return None


def _stored_extents(
    stored: StoredCheckpoint,
    requests: Sequence[Request],
    regions: Sequence[Region],
    shapes: IntArray,
) -> IntArray:
    """Return the shapes of requested regions, cut to the stored tensors.

    `shapes` are those of the regions.
    """
    extents = shapes
    for row, (request, region) in enumerate(zip(requests, regions, strict=True)):
        if request.allow_shape_mismatch:
            if extents is shapes:
                extents = shapes.copy()
            spans = zip(*region, stored.global_shape(request.key), strict=True)
            inside = [max(min(o + n, size) - o, 0) for o, n, size in spans]
            extents[row, : len(inside)] = inside
    return extents


def _check_shape(stored: StoredCheckpoint, request: Request) -> None:
    shape = stored.global_shape(request.key)
    if len(request.global_shape) != len(shape):
        difference = "number of axes"
    elif request.global_shape != shape and not request.allow_shape_mismatch:
        difference = "global shape"
    else:
        return
    raise LoadMismatchError(
        f"Key {request.key!r} is stored in {stored.location!r} with global shape {shape} and was "
        f"requested with {request.global_shape}: the {difference} differs. Correct the sharded "
        "state dict, or set allow_shape_mismatch=True on the ShardedTensor if it is padded (a "
        "vocabulary, say).",
        unexpected=[request.key],
    )
