"""Writing the files of a `torch_dist` directory: chunks, their metadata, common state and the
marker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.options import Progress
from distckpt._base.progress import ProgressCounter
from distckpt._checkpoint.stored_values import load_common_state, load_objects
from distckpt._foreign.torch_dist.encode import (
    Call,
    Global,
    Pairs,
    TensorRecord,
    encode_pickle,
    record,
    write_object,
    write_tensor,
)  # fmt: skip
from distckpt._format.marker import CONFIG_FNAME
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.read import read_chunks_into
from distckpt._mapping.wrappers import ShardedObject
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

_METADATA = "torch.distributed.checkpoint.metadata"
_MARKER = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip

Written = tuple[int, str, int, int]
"""A chunk, and the file, first byte and number of bytes of its archive."""


def write_chunks(
    stored: StoredCheckpoint,
    chunks: Sequence[tuple[str, int]],
    directory: str,
    name: str,
    progress: Progress | None,
) -> list[Written]:
    """Write some chunks into one file, each as an archive of torch; return where they are."""
    manifest, written, start = stored.manifest, [], 0
    num_bytes_of = {chunk: int(manifest.num_bytes[chunk]) for _, chunk in chunks}
    of_tensors = [chunk for key, chunk in chunks if not stored.is_object(key)]
    counter = ProgressCounter(progress, sum(num_bytes_of[chunk] for chunk in of_tensors))
    with open(locations.join(directory, name), "w+b") as file:
        for key, chunk in chunks:
            region = manifest.chunk_region(chunk)
            if stored.is_object(key):
                shard = ShardedObject(key, None, stored.global_shape(key), region.offset)
                # Megatron stores a list of the objects that share a name, which is one.
                num_bytes = write_object(file, load_objects(stored, [shard]))
            else:
                content = np.empty(num_bytes_of[chunk], np.uint8)
                read_chunks_into(stored, [chunk], [content])
                tensor = TensorRecord(stored.dtype_of(chunk), region.shape)
                num_bytes = write_tensor(file, tensor, [content])
                counter.add(content.nbytes)
            written.append((chunk, name, start, num_bytes))
            start += num_bytes
        file.flush()
        os.fsync(file.fileno())
    return written


def write_metadata(
    stored: StoredCheckpoint, written: Sequence[Sequence[Written]], directory: str
) -> None:
    """Write what is not chunks; the marker last."""
    common = load_common_state(stored)
    if not isinstance(common, dict):
        raise CorruptCheckpointError(
            f"The common state of {stored.location!r} is a {type(common).__name__}, not a dict."
        )
    with open(locations.join(directory, "common.pt"), "w+b") as file:
        write_object(file, common)
        os.fsync(file.fileno())
    places = {
        chunk: (name, start, size) for entries in written for chunk, name, start, size in entries
    }
    data, _ = encode_pickle(_metadata(stored, places))
    locations.write_bytes(locations.join(directory, ".metadata"), data)
    locations.write_bytes(locations.join(directory, CONFIG_FNAME), json.dumps(_MARKER).encode())
    locations.sync_directory(directory)


def _metadata(stored: StoredCheckpoint, places: dict[int, tuple[str, int, int]]) -> Call:
    described, storage = {}, []
    for key in stored.manifest.key_index:
        if key == COMMON_KEY:
            continue
        chunks = stored.chunks_of(key)
        regions = [stored.manifest.chunk_region(chunk) for chunk in chunks]
        for chunk, region in zip(chunks, regions, strict=True):
            name, offset = key, None
            if stored.is_object(key):
                name = ShardedObject(key, None, stored.global_shape(key), region.offset).unique_key
                described[name] = record(_METADATA, "BytesStorageMetadata")
            else:
                offset = torch.Size(region.offset)
            index = record(_METADATA, "MetadataIndex", fqn=name, offset=offset, index=None)
            path, start, size = places[chunk]
            info = {"relative_path": path, "offset": start, "length": size}
            storage.append(
                (index, record("torch.distributed.checkpoint.filesystem", "_StorageInfo", **info))
            )
        if not stored.is_object(key):
            described[key] = record(
                _METADATA,
                "TensorStorageMetadata",
                properties=_properties(FROM_NAME[stored.dtype_name(key)]),
                size=torch.Size(stored.global_shape(key)),
                chunks=[
                    record(
                        _METADATA,
                        "ChunkStorageMetadata",
                        offsets=torch.Size(r.offset),
                        sizes=torch.Size(r.shape),
                    )
                    for r in regions
                ],
            )
    return record(
        _METADATA,
        "Metadata",
        state_dict_metadata=described,
        planner_data={name: (name,) for name in described},
        storage_data=Pairs(storage),
        storage_meta=None,
    )


def _properties(dtype: torch.dtype) -> Call:
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    return Call(
        Global(_METADATA, "TensorProperties"), (), (dtype, layout, False, contiguous, False), True
    )
