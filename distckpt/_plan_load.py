"""Planning a load: which part of which chunk goes where in each requested region. Pure functions over the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt import core
from distckpt._manifest import Manifest
from distckpt._region import Region, intersect_many


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
    """
    copies: list[Copy] = []
    for index, request in enumerate(requests):
        key_id = manifest.key_index[request.key]
        stored_shape = manifest.global_shapes[key_id]
        _check_shape(request, stored_shape, location)
        rows = manifest.chunk_rows(key_id)
        ndim = len(stored_shape)
        offsets, shapes = manifest.offsets[rows, :ndim], manifest.shapes[rows, :ndim]
        hits, hit_offsets, hit_shapes = intersect_many(request.region, offsets, shapes)
        wanted = request.region.num_elements
        if request.allow_shape_mismatch:
            spans = zip(request.region.offset, request.region.shape, stored_shape, strict=True)
            wanted = int(np.prod([max(min(o + n, size) - o, 0) for o, n, size in spans], dtype=np.int64))
        if int(np.prod(hit_shapes, axis=1).sum()) != wanted:
            raise core.LoadMismatchError(
                f"Region {request.region} of key {request.key!r} is not stored completely in {location!r}: it was "
                "saved with gaps (validate_access_integrity=False). Ask for a region that was saved.",
                unexpected=[request.key],
            )
        source = (hit_offsets - offsets[hits]).tolist()
        target = (hit_offsets - np.array(request.region.offset, np.int64)).tolist()
        first = rows.start
        copies.extend(
            Copy(first + row, Region(tuple(src), tuple(shape)), index, Region(tuple(dst), tuple(shape)))
            for row, src, dst, shape in zip(hits.tolist(), source, target, hit_shapes.tolist(), strict=True)
        )
    return copies


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
