"""Reads of tensor regions and objects in one process, in any format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from distckpt._io.read import read_chunks
from distckpt._plan.load import Request, check_keys, object_chunk
from distckpt._state.common_state import COMMON_KEY, object_text
from distckpt.mapping._wrappers import ShardedObject

COMMON_STATE = ShardedObject(COMMON_KEY, None, (1,), (0,))
"""Request of the common state."""


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
    # Imported when it is needed: a table of contents is read without torch.
    from distckpt._io.read_values import read_requests

    values = []
    for request in requests:
        dtype = FROM_NAME[stored.dtype_name(request.key)]
        values.append(torch.empty(request.region.shape, dtype=dtype, device="cpu"))
    read_requests(stored, requests, values, NUM_THREADS)
    return values


class FoundObjects(NamedTuple):
    """Cells of objects in a checkpoint.

    Attributes:
        reader: the reader that loads them; None for distckpt's own encoding.
        chunks: the chunk of each cell, None for common state that is not in a chunk.
    """

    reader: Reader | None
    chunks: Sequence[int | None]

    @property
    def stored_chunks(self) -> list[int]:
        """Return the chunks of all cells that are in one."""
        return [chunk for chunk in self.chunks if chunk is not None]


def load_objects(stored: StoredCheckpoint, shards: Sequence[ShardedObject]) -> list[Any]:
    """Load cells of objects; common state defaults to an empty dict."""
    found = find_objects(stored, shards)
    contents: dict[int, bytes] = {}
    if found.reader is None:
        chunks = found.stored_chunks
        contents.update(zip(chunks, read_chunks(stored, chunks), strict=True))
    return decode_objects(stored, found, contents)


def find_objects(stored: StoredCheckpoint, shards: Sequence[ShardedObject]) -> FoundObjects:
    """Find cells of objects.

    Raises:
        LoadMismatchError: a cell is not stored.
    """
    names = [shard.key for shard in shards if shard.key != COMMON_KEY]
    if names:
        check_keys(stored, names)
    reader = find_reader(stored)
    is_stored = reader is None and COMMON_KEY in stored.manifest.key_index
    chunks: list[int | None] = []
    for shard in shards:
        chunk = None
        if shard.key != COMMON_KEY or is_stored:
            chunk = object_chunk(stored, shard)
        chunks.append(chunk)
    return FoundObjects(reader, chunks)


def decode_objects(
    stored: StoredCheckpoint, found: FoundObjects, contents: Mapping[int, bytes]
) -> list[Any]:
    """Return the values of objects; `contents` are the bytes of chunks without a reader."""
    reader = found.reader
    chunks = found.stored_chunks
    if reader is not None:
        values = iter(_values_of_reader(reader, stored, chunks))
    else:
        values = iter([_decode(stored, chunk, contents[chunk]) for chunk in chunks])
    loaded = []
    for chunk in found.chunks:
        loaded.append(_common_of_reader(reader, stored) if chunk is None else next(values))
    return loaded


def load_common_state(stored: StoredCheckpoint) -> Any:
    """Load the common state, an empty dict if it is not stored."""
    return load_objects(stored, [COMMON_STATE])[0]


def _common_of_reader(reader: Reader | None, stored: StoredCheckpoint) -> Any:
    if reader is None:
        return {}
    with naming_reader(reader, stored.location):
        common = reader.load_common_state(stored)
    if not isinstance(common, dict):
        raise CheckpointingException(
            f"The reader of {reader.name!r} returned a {type(common).__name__} for the common "
            f"state of {stored.location!r}: it must be a dict."
        )
    return common


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


def _decode(stored: StoredCheckpoint, chunk: int, blob: bytes) -> Any:
    try:
        # Common state is read whole: objects in it that no one requests must not be in the way.
        return codec.decode(blob, placeholders=stored.key_of(chunk) == COMMON_KEY)
    except CheckpointingException as error:
        where = f"{object_text(stored.key_of(chunk))} in {stored.path_of(chunk)!r}"
        raise type(error)(f"{where}: {error}") from error
