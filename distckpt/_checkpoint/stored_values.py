"""Reads of tensor regions and objects in one process, in any format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._base.errors import CheckpointingException
from distckpt._base.lazy import torch
from distckpt._base.threads import NUM_THREADS
from distckpt._checkpoint.opening import find_reader, naming_reader
from distckpt._checkpoint.stored_pieces import Reader
from distckpt._format import codec
from distckpt._format.stored_checkpoint import (
    StoredCheckpoint,
    checksums_of_blocks,
    fetch_checksums,
)
from distckpt._geometry.region import Region, whole
from distckpt._io.read import read_chunks, read_copies
from distckpt._plan.load import Request, object_chunk, plan_load
from distckpt._state.common_state import COMMON_KEY, object_text
from distckpt.mapping._wrappers import ShardedObject


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that can be read."""

    stored: StoredCheckpoint
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its global shape."""
        return self.stored.global_shape(self.key)

    @property
    def dtype(self) -> str:
        """Return the safetensors name of its dtype."""
        return self.stored.dtype_name(self.key)

    @property
    def num_bytes(self) -> int:
        """Return the size of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, region: Region) -> torch.Tensor:
        """Read a region, and only that."""
        return _read_regions(self.stored, [Request(self.key, self.shape, region)])[0]


def read_tensors(stored: StoredCheckpoint, keys: Sequence[str]) -> list[torch.Tensor]:
    """Read whole tensors, all at once."""
    requests = []
    for key in keys:
        shape = stored.global_shape(key)
        requests.append(Request(key, shape, whole(shape)))
    return _read_regions(stored, requests)


def _read_regions(stored: StoredCheckpoint, requests: Sequence[Request]) -> list[torch.Tensor]:
    values = []
    for request in requests:
        dtype = FROM_NAME[stored.dtype_name(request.key)]
        values.append(torch.empty(request.region.shape, dtype=dtype, device="cpu"))
    read_copies(stored, plan_load(stored, requests), values, NUM_THREADS)
    return values


def load_objects(stored: StoredCheckpoint, shards: Sequence[ShardedObject]) -> list[Any]:
    """Load cells of objects; common state defaults to an empty dict."""
    reader = find_reader(stored)
    if reader is None and COMMON_KEY in stored.manifest.key_index:
        return _load_cells(None, stored, shards)
    others = [shard for shard in shards if shard.key != COMMON_KEY]
    cells = iter(_load_cells(reader, stored, others))
    values = []
    for shard in shards:
        if shard.key == COMMON_KEY:
            values.append(load_common_state(stored))
        else:
            values.append(next(cells))
    return values


def load_common_state(stored: StoredCheckpoint) -> Any:
    """Load the common state, an empty dict if it is not stored."""
    reader = find_reader(stored)
    if reader is not None:
        with naming_reader(reader, stored.location):
            common = reader.load_common_state(stored)
        if not isinstance(common, dict):
            raise CheckpointingException(
                f"The reader of {reader.name!r} returned a {type(common).__name__} for the common "
                f"state of {stored.location!r}: it must be a dict."
            )
        return common
    if COMMON_KEY not in stored.manifest.key_index:
        return {}
    return load_objects(stored, [ShardedObject(COMMON_KEY, None, (1,), (0,))])[0]


def stores_common_state(stored: StoredCheckpoint) -> bool:
    """Return whether there is common state in distckpt's own encoding."""
    return COMMON_KEY in stored.manifest.key_index and find_reader(stored) is None


def holds_objects(stored: StoredCheckpoint) -> bool:
    """Return whether this format holds objects and common state at all."""
    reader = find_reader(stored)
    return reader is None or reader.holds_objects


def object_keys(stored: StoredCheckpoint) -> list[str]:
    """Return the keys of all objects, always including the common state."""
    keys = [key for key in stored.manifest.keys if stored.is_object(key)]
    if COMMON_KEY in keys:
        return keys
    return [COMMON_KEY, *keys]


def has_equal_cells(stored: StoredCheckpoint, key: str) -> bool:
    """Return whether an object has several cells with equal bytes.

    Their checksums tell.
    """
    manifest = stored.manifest
    rows = np.array(stored.chunks_of(key))
    chunks = manifest.chunks.rows(rows)
    if not manifest.has_checksums or len(rows) < 2 or np.ptp(chunks.num_bytes) > 0:
        return False
    fetch_checksums(stored, np.unique(chunks.file_ids))
    order = chunks.file_order
    num_blocks = int(-(-chunks.num_bytes[0] // manifest.block_bytes))
    blocks = manifest.first_blocks[rows[order]].astype(np.int64)[:, None] + np.arange(num_blocks)
    file_ids = np.repeat(chunks.file_ids[order], num_blocks)
    checksums = checksums_of_blocks(manifest, file_ids, blocks.ravel()).reshape(blocks.shape)
    return bool((checksums == checksums[0]).all())


def read_encoded(stored: StoredCheckpoint, key: str) -> dict[tuple[int, ...], bytes]:
    """Read the cells of an object by offset, encoded for `codec.decode`."""
    reader = find_reader(stored)
    if key == COMMON_KEY and (reader is not None or key not in stored.manifest.key_index):
        return {(0,): codec.encode(load_common_state(stored))}
    chunks = stored.chunks_of(key)
    offsets = [stored.manifest.chunk_region(chunk).offset for chunk in chunks]
    if reader is None:
        return dict(zip(offsets, read_chunks(stored, chunks), strict=True))
    values = _values_of_reader(reader, stored, chunks)
    return dict(zip(offsets, map(codec.encode, values), strict=True))


def _load_cells(
    reader: Reader | None, stored: StoredCheckpoint, shards: Sequence[ShardedObject]
) -> list[Any]:
    chunks = [object_chunk(stored, shard) for shard in shards]
    if reader is not None:
        return _values_of_reader(reader, stored, chunks)
    blobs = read_chunks(stored, chunks)
    return [_decode(stored, chunk, blob) for chunk, blob in zip(chunks, blobs, strict=True)]


def _values_of_reader(
    reader: Reader,
    stored: StoredCheckpoint,
    chunks: Sequence[int],
) -> list[Any]:
    """Let a reader load cells of objects."""
    with naming_reader(reader, stored.location):
        values = list(reader.load_objects(stored, chunks))
    if len(values) != len(chunks):
        raise CheckpointingException(
            f"The reader of {reader.name!r} returned {len(values)} values for {len(chunks)} parts "
            f"of objects in {stored.location!r}."
        )
    return values


def decode_common_state(stored: StoredCheckpoint, blob: bytes) -> Any:
    """Decode the common state, perhaps from another rank's `read_encoded`."""
    return _decode(stored, int(stored.chunks_of(COMMON_KEY)[0]), blob)


def _decode(stored: StoredCheckpoint, chunk: int, blob: bytes) -> Any:
    try:
        # Common state is read whole: objects in it that no one requests must not be in the way.
        return codec.decode(blob, placeholders=stored.key_of(chunk) == COMMON_KEY)
    except CheckpointingException as error:
        where = f"{object_text(stored.key_of(chunk))} in {stored.path_of(chunk)!r}"
        raise type(error)(f"{where}: {error}") from error
