"""Planning a load: which part of which chunk goes where in each requested region. Pure functions over the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import CorruptCheckpointError, LoadMismatchError
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, Region, find_tiling_faults, intersect_many, regions_to_arrays

MAX_PAIRS = 1 << 18
"""So many pairs of a request and a chunk are compared at a time: some 50 MB."""


class Copy(NamedTuple):
    """The unit of reading: `source` lies in a chunk, `target`, of the same shape, in a requested region."""

    chunk: int
    source: Region
    request: int
    target: Region


class Request(NamedTuple):
    """A region of a key that a rank wants.

    With `allow_shape_mismatch` the global shape may differ from the stored one and what is not stored stays unread.
    """

    key: str
    global_shape: tuple[int, ...]
    region: Region
    allow_shape_mismatch: bool = False


def plan_load(manifest: Manifest, requests: Sequence[Request], location: str) -> list[Copy]:
    """Find the parts of chunks that make up the requested regions.

    Args:
        manifest: what is on disk.
        requests: what this rank wants; every key is in the manifest.
        location: of the checkpoint, for messages.

    Returns:
        Copies, grouped by request. Together the targets cover each request exactly.

    Raises:
        LoadMismatchError: the stored tensor has another global shape, or does not cover a requested region.
        CorruptCheckpointError: an element of a requested region is stored twice.
    """
    key_ids = [manifest.key_index[request.key] for request in requests]
    for request, key_id in zip(requests, key_ids, strict=True):
        _check_shape(request, manifest.global_shapes[key_id], location)
    common = _common_regions(manifest, [request.region for request in requests], np.array(key_ids, np.int64))
    extents = [_stored_extent(manifest, request) for request in requests]
    found = np.zeros(len(requests), np.int64)
    np.add.at(found, common.requests, np.prod(common.shapes, axis=1))
    for request, extent, num_found in zip(requests, extents, found.tolist(), strict=True):
        wanted = math.prod(extent)
        if num_found > wanted:
            raise _stored_twice(request, location)
        if num_found < wanted:
            raise LoadMismatchError(
                f"Region {request.region} of key {request.key!r} is not stored completely in {location!r}: it was "
                "saved with gaps (validate_access_integrity=False). Ask for a region that was saved.",
                unexpected=[request.key],
            )
    # Of as many elements as are wanted, one that is found twice leaves another one unread.
    twice = _find_overlap(common, extents)
    if twice is not None:
        raise _stored_twice(requests[twice], location)
    return _copies_of(common, [len(request.region.shape) for request in requests])


class _CommonRegions(NamedTuple):
    """The regions that requests have in common with chunks, sorted by both: n rows, all padded to as many axes.

    `chunks` and `requests` are (n,); `in_chunks`, `in_requests` (offsets inside of either) and `shapes` (n, ndim).
    """

    chunks: IntArray
    requests: IntArray
    in_chunks: IntArray
    in_requests: IntArray
    shapes: IntArray


def _common_regions(manifest: Manifest, regions: Sequence[Region], key_ids: IntArray) -> _CommonRegions:
    """Intersect regions with the chunks of their keys, many pairs at once."""
    offsets, shapes = regions_to_arrays(regions, manifest.offsets.shape[1])
    first_chunks = manifest.key_starts[key_ids]
    counts = manifest.key_starts[key_ids + 1] - first_chunks
    ends = np.cumsum(counts)
    parts: list[_CommonRegions] = []
    start = 0
    while start < len(regions):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + MAX_PAIRS, "right")))
        requests = np.repeat(np.arange(start, stop), counts[start:stop])
        number = np.arange(done, int(ends[stop - 1])) - (ends - counts)[requests]
        chunks = first_chunks[requests] + number
        begin, wanted = manifest.offsets[chunks], offsets[requests]
        hits, low, extent = intersect_many(begin, manifest.shapes[chunks], wanted, shapes[requests])
        parts.append(_CommonRegions(chunks[hits], requests[hits], low - begin[hits], low - wanted[hits], extent))
        start = stop
    if not parts:
        none = np.zeros(0, np.int64)
        return _CommonRegions(none, none, offsets, offsets, shapes)
    if len(parts) == 1:
        return parts[0]
    return _CommonRegions(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _copies_of(common: _CommonRegions, ndims: Sequence[int]) -> list[Copy]:
    copies = []
    for chunk, request, source, target, shape in zip(*(column.tolist() for column in common), strict=True):
        ndim = ndims[request]
        size = tuple(shape[:ndim])
        copies.append(Copy(chunk, Region(tuple(source[:ndim]), size), request, Region(tuple(target[:ndim]), size)))
    return copies


def _find_overlap(common: _CommonRegions, extents: Sequence[tuple[int, ...]]) -> int | None:
    """Find a request of which an element is stored twice, given regions of as many elements as it has."""
    counts = np.bincount(common.requests, minlength=len(extents))
    divided = np.flatnonzero(counts > 1)
    if not len(divided):
        return None
    rows = np.flatnonzero(counts[common.requests] > 1)
    ndim = common.shapes.shape[1]
    wanted = [extents[index] + (1,) * (ndim - len(extents[index])) for index in divided.tolist()]
    faults = find_tiling_faults(
        np.searchsorted(divided, common.requests[rows]),
        common.in_requests[rows],
        common.shapes[rows],
        np.array(wanted, np.int64).reshape(len(divided), ndim),
    )
    return int(divided[faults[0].tensor]) if faults else None


def _stored_extent(manifest: Manifest, request: Request) -> tuple[int, ...]:
    """Return the shape of that part of a request which lies inside of the stored tensor."""
    if not request.allow_shape_mismatch:
        return request.region.shape
    stored_shape = manifest.global_shapes[manifest.key_index[request.key]]
    spans = zip(request.region.offset, request.region.shape, stored_shape, strict=True)
    return tuple(max(min(o + n, size) - o, 0) for o, n, size in spans)


def _stored_twice(request: Request, location: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"Some of region {request.region} of key {request.key!r} is stored twice in {location!r}, which no save does: "
        "the manifest is damaged. Load another checkpoint."
    )


def _check_shape(request: Request, stored_shape: tuple[int, ...], location: str) -> None:
    if len(request.global_shape) != len(stored_shape):
        difference = "number of axes"
    elif request.global_shape != stored_shape and not request.allow_shape_mismatch:
        difference = "global shape"
    else:
        return
    raise LoadMismatchError(
        f"Key {request.key!r} is stored in {location!r} with global shape {stored_shape} and was asked for with "
        f"{request.global_shape}: the {difference} differs. Correct the sharded state dict, or set "
        "allow_shape_mismatch=True on the ShardedTensor if it is padded (a vocabulary, say).",
        unexpected=[request.key],
    )
