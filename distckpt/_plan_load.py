"""Planning a load: which part of which chunk goes where in each requested region. Pure functions over the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt import core
from distckpt._manifest import Manifest
from distckpt._region import Region, find_tiling_faults, intersect, intersect_many, whole


class Copy(NamedTuple):
    """The unit of reading: `source` is a box inside a chunk, `target` the equal box inside a requested region."""

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
    copies: list[Copy] = []
    key_ids = [manifest.key_index[request.key] for request in requests]
    for index, (request, key_id, only) in enumerate(
        zip(requests, key_ids, _only_chunks(manifest, key_ids), strict=True)
    ):
        stored_shape = manifest.global_shapes[key_id]
        _check_shape(request, stored_shape, location)
        if only is None:
            found = _copies_of(manifest, request, index, key_id)
        elif only == request.region:
            local = whole(only.shape)
            found = [Copy(int(manifest.key_starts[key_id]), local, index, local)]
        else:
            common = intersect(only, request.region)
            parts = [(common.relative_to(only.offset), common.relative_to(request.region.offset))] if common else []
            found = [Copy(int(manifest.key_starts[key_id]), source, index, target) for source, target in parts]
        wanted = request.region.num_elements
        if request.allow_shape_mismatch:
            wanted = math.prod(_stored_extent(manifest, request))
        num_found = sum(copy.target.num_elements for copy in found)
        if num_found > wanted:
            raise _stored_twice(request, location)
        if num_found < wanted:
            raise core.LoadMismatchError(
                f"Region {request.region} of key {request.key!r} is not stored completely in {location!r}: it was "
                "saved with gaps (validate_access_integrity=False). Ask for a region that was saved.",
                unexpected=[request.key],
            )
        copies.extend(found)
    # Of as many elements as are wanted, one that is found twice leaves another one unread.
    twice = _find_overlap(manifest, requests, copies)
    if twice is not None:
        raise _stored_twice(twice, location)
    return copies


def _find_overlap(manifest: Manifest, requests: Sequence[Request], copies: Sequence[Copy]) -> Request | None:
    """Find a request of which an element is stored twice, given copies of as many elements as it has."""
    counts = np.bincount([copy.request for copy in copies], minlength=len(requests))
    by_ndim: dict[int, list[int]] = {}
    for index in np.flatnonzero(counts > 1).tolist():
        by_ndim.setdefault(len(requests[index].region.shape), []).append(index)
    for ndim, members in by_ndim.items():
        number = {index: i for i, index in enumerate(members)}
        parts = [copy for copy in copies if copy.request in number]
        ids = np.array([number[copy.request] for copy in parts], np.int64)
        offsets = np.array([copy.target.offset for copy in parts], np.int64)
        shapes = np.array([copy.target.shape for copy in parts], np.int64)
        wanted = np.array([_stored_extent(manifest, requests[index]) for index in members], np.int64)
        for fault in find_tiling_faults(ids, offsets, shapes, wanted.reshape(len(members), ndim)):
            return requests[members[fault.tensor]]
    return None


def _stored_extent(manifest: Manifest, request: Request) -> tuple[int, ...]:
    """Return the shape of that part of a request which lies inside of the stored tensor."""
    stored_shape = manifest.global_shapes[manifest.key_index[request.key]]
    spans = zip(request.region.offset, request.region.shape, stored_shape, strict=True)
    return tuple(max(min(o + n, size) - o, 0) for o, n, size in spans)


def _stored_twice(request: Request, location: str) -> core.CorruptCheckpointError:
    return core.CorruptCheckpointError(
        f"Some of region {request.region} of key {request.key!r} is stored twice in {location!r}, which no save does: "
        "the manifest is damaged. Load another checkpoint."
    )


def _only_chunks(manifest: Manifest, key_ids: Sequence[int]) -> list[Region | None]:
    """Return for each key the region of its chunk when it has one only: small tensors are many, and not divided."""
    ids = np.array(key_ids, np.int64)
    rows = manifest.key_starts[ids]
    single = np.flatnonzero(manifest.key_starts[ids + 1] - rows == 1)
    regions: list[Region | None] = [None] * len(ids)
    offsets, shapes = manifest.offsets[rows[single]].tolist(), manifest.shapes[rows[single]].tolist()
    for index, offset, shape in zip(single.tolist(), offsets, shapes, strict=True):
        ndim = len(manifest.global_shapes[key_ids[index]])
        regions[index] = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
    return regions


def _copies_of(manifest: Manifest, request: Request, index: int, key_id: int) -> list[Copy]:
    """Find what a request wants of all chunks of a key."""
    rows = manifest.chunk_rows(key_id)
    ndim = len(manifest.global_shapes[key_id])
    offsets, shapes = manifest.offsets[rows, :ndim], manifest.shapes[rows, :ndim]
    hits, hit_offsets, hit_shapes = intersect_many(request.region, offsets, shapes)
    source = (hit_offsets - offsets[hits]).tolist()
    target = (hit_offsets - np.array(request.region.offset, np.int64)).tolist()
    return [
        Copy(rows.start + row, Region(tuple(src), tuple(shape)), index, Region(tuple(dst), tuple(shape)))
        for row, src, dst, shape in zip(hits.tolist(), source, target, hit_shapes.tolist(), strict=True)
    ]


def _check_shape(request: Request, stored_shape: tuple[int, ...], location: str) -> None:
    if len(request.global_shape) != len(stored_shape):
        difference = "number of axes"
    elif request.global_shape != stored_shape and not request.allow_shape_mismatch:
        difference = "global shape"
    else:
        return
    raise core.LoadMismatchError(
        f"Key {request.key!r} is stored in {location!r} with global shape {stored_shape} and was asked for with "
        f"{request.global_shape}: the {difference} differs. Correct the sharded state dict, or set "
        "allow_shape_mismatch=True on the ShardedTensor if it is padded (a vocabulary, say).",
        unexpected=[request.key],
    )
