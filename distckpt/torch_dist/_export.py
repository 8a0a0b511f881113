"""The export of a checkpoint to `torch_dist`, by any number of ranks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import check_is_unchanged, open_undisturbed
from distckpt._checkpoint.stored_values import load_common_state, load_objects
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings, new_output
from distckpt._foreign.torch_dist.reader import COMMON_NAME, METADATA_NAME
from distckpt._format.marker import CONFIG_FNAME
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read import read_in_pieces
from distckpt._ranks.collectives import Ranks, collective
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.mapping._wrappers import ShardedObject
from distckpt.torch_dist._encode import (
    Call,
    Global,
    Pairs,
    TensorRecord,
    encode_pickle,
    record,
    refuse_formless,
    write_archive,
)

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata"
_MARKER = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_PIECE_BYTES = 64 << 20
"""Bytes of a chunk in memory at a time."""
_OTHER_COMMON_STATE = (
    "\nOr leave these values out: distckpt.reshard(checkpoint, another, common_state={...}) makes "
    "a checkpoint with another common state, which can be exported."
)

Place = tuple[Any, str, int, int]
"""The identity of an object, and the file, first byte and size of its archive."""
TensorEntry = tuple[torch.dtype, tuple[int, ...], list[Region]]
"""The dtype, shape and stored regions of a tensor."""


@collective()
def export(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint as Megatron Core's `torch_dist`.

    `torch.distributed.checkpoint.load` reads it as well.

        torch_dist.export("checkpoints/iter_0001000", "megatron/iter_0001000")

    Tensors, objects and common state (as `common.pt`) keep their names, and each stored chunk
    becomes one of the result. Takes any number of ranks: each reads its share, one chunk at a time,
    and writes one file. Neither Megatron nor `torch.distributed.checkpoint` is used. The directory
    appears when it is complete.

    Collective operation: all ranks of the process group must call it.

    Args:
        checkpoint_dir: a path or URL of any checkpoint that `distckpt.load` reads.
        output_dir: a path; it must hold no checkpoint.
        overwrite: replace a checkpoint that is there.
        process_group: the ranks that export together; None for the default group, or for this
            process alone.
        progress: called with the bytes of tensors this rank has written so far and those it will
            have written.

    Raises:
        CheckpointingException: `output_dir` is a URL.
        CorruptCheckpointError: the checkpoint is damaged.
        UnsupportedObjectError: an object, or a value in the common state, has no form in files of
            torch; the message names its path and class.
        RankFailedError: raised on all ranks when any rank failed; nothing is left then.
    """
    ranks = Ranks(process_group)
    with ranks.phase("check the arguments", decision=True):
        location, target = find_places(checkpoint_dir, output_dir)
        if ranks.is_coordinator:
            posix.check_target(target, overwrite, os.fspath(output_dir))
    stored = open_undisturbed(ranks, location)
    with reading(ranks, [stored]):
        _write(ranks, stored, target, overwrite, progress)


def _write(
    ranks: Ranks,
    stored: StoredCheckpoint,
    target: str,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    with ranks.phase("read the common state", decision=True):
        common = {}
        if ranks.is_coordinator:
            common = common_state_to_write(stored)
    chunks = chunks_to_write(stored)
    sizes = [int(stored.manifest.num_bytes[chunk]) for chunk in chunks]
    share = share_of(sizes, ranks.rank, ranks.size)
    settings = OutputSettings(num_bytes=sum(sizes[share]), overwrite=overwrite)

    write = partial(write_chunks, stored, chunks[share], progress=progress)
    complete = partial(write_metadata, stored, common)
    write_together(ranks, stored, target, settings, write, complete)


def write_together(
    ranks: Ranks,
    stored: StoredCheckpoint,
    target: str,
    settings: OutputSettings,
    write: Callable[[str, str], list[Any]],
    complete: Callable[[list[list[Any]], str], None],
) -> None:
    """Write a directory of torch's files, one of each rank.

    Args:
        ranks: all that write.
        stored: the source.
        target: where the directory appears.
        settings: of the output.
        write: writes this rank's file, given directory and name; the result is for `complete`.
        complete: writes the other files on the coordinator, given the results of all ranks.
    """
    with new_output(ranks, target, settings) as output, output.being_written():
        with ranks.telling("write the export") as messages:
            output.check_is_seen()
            written = write(output.location, f"__{ranks.rank}_0.distcp")
            messages.payload = json.dumps(written).encode()
        with ranks.answering(messages, "commit the export"):
            if ranks.is_coordinator:
                complete([json.loads(payload) for payload in messages.payloads], output.location)
                if not stored.manifest.has_checksums:
                    check_is_unchanged(stored)
                output.commit(None)


def find_places(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str]
) -> tuple[str, str]:
    """Return the locations of source and target, after checking them."""
    location = locations.normalize(checkpoint_dir)
    target = posix.resolve(output_dir)
    check_place(location, target)
    return location, target


def check_place(location: str, target: str) -> None:
    """Refuse a target that is a URL, or the source."""
    if not locations.is_local(target):
        raise CheckpointingException(
            f"{target!r} is a URL: export to a local path, and copy the directory."
        )
    if target == posix.resolve(location):
        raise CheckpointingException(f"The export cannot replace its own source {location!r}.")


def chunks_to_write(stored: StoredCheckpoint) -> list[int]:
    """Return the chunks of tensors and objects, by key."""
    chunks: list[int] = []
    for key in stored.manifest.key_index:
        if key != COMMON_KEY:
            chunks.extend(stored.chunks_of(key))
    return chunks


def share_of(sizes: Sequence[int], rank: int, num_ranks: int) -> slice:
    """Return the share of one rank: a run with an equal part of the bytes."""
    ends = np.cumsum([size + 1 for size in sizes])
    shares = (ends - 1) * num_ranks // max(1, int(ends[-1]) if sizes else 1)
    first, last = np.searchsorted(shares, (rank, rank + 1)).tolist()
    return slice(first, last)


# ---- writing


def write_chunks(
    stored: StoredCheckpoint,
    chunks: Sequence[int],
    directory: str,
    name: str,
    progress: Progress | None,
) -> list[Place]:
    """Write chunks into one file; return their numbers and places."""
    with OpenFiles.for_many_reads() as files:
        objects = _objects_in(stored.with_files(files), chunks, progress)
        return write_archives(objects, directory, name)


def _objects_in(
    stored: StoredCheckpoint, chunks: Sequence[int], progress: Progress | None
) -> Iterator[tuple[int, Any]]:
    """Yield each chunk with the object to archive."""
    num_bytes = {}
    for chunk in chunks:
        if not stored.is_object(stored.key_of(chunk)):
            num_bytes[chunk] = int(stored.manifest.num_bytes[chunk])
    counter = ProgressCounter(progress, sum(num_bytes.values()))
    for chunk in chunks:
        key = stored.key_of(chunk)
        region = stored.manifest.chunk_region(chunk)
        if chunk in num_bytes:
            content = read_in_pieces(stored, chunk, _PIECE_BYTES)
            yield chunk, TensorRecord(stored.dtype_of(chunk), region.shape, content)
            counter.add(num_bytes[chunk])
            continue
        shard = ShardedObject(key, None, stored.global_shape(key), region.offset)
        # Megatron stores a list of the objects that share a name, of which there is one.
        (value,) = objects = load_objects(stored, [shard])
        refuse_formless(value, f"the object {key!r}")
        yield chunk, objects


def write_archives(objects: Iterable[tuple[Any, Any]], directory: str, name: str) -> list[Place]:
    """Write objects into one file, each as an archive of torch.

    Each comes with its identity, which its place begins with.
    """
    path = locations.join(directory, name)
    places = []
    start = 0
    with locations.naming(path), open(path, "w+b") as file:
        for identity, obj in objects:
            num_bytes = write_archive(file, obj)
            places.append((identity, name, start, num_bytes))
            start += num_bytes
        file.flush()
        os.fsync(file.fileno())
    return places


def common_state_to_write(stored: StoredCheckpoint) -> dict[Any, Any]:
    """Return the common state of a checkpoint, if it can be written.

    Raises:
        UnsupportedObjectError: it holds values that have no form in files of torch.
    """
    common = load_common_state(stored)
    if not isinstance(common, dict):
        raise CorruptCheckpointError(
            f"The common state of {stored.location!r} is a {type(common).__name__}, not a dict."
        )
    refuse_formless(common, f"the common state of {stored.location!r}", _OTHER_COMMON_STATE)
    return common


def write_metadata(
    stored: StoredCheckpoint,
    common: dict[Any, Any],
    written: Sequence[Sequence[Place]],
    directory: str,
) -> None:
    """Write everything other than chunks, the marker last."""
    write_common_state(common, directory)
    places = {}
    for chunk, file, start, size in itertools.chain.from_iterable(written):
        places[chunk] = file, start, size
    tensors: dict[str, TensorEntry] = {}
    pieces: list[Place] = []
    for key in stored.manifest.key_index:
        if key == COMMON_KEY:
            continue
        shape = stored.global_shape(key)
        regions = []
        for chunk in stored.chunks_of(key):
            region = stored.manifest.chunk_region(chunk)
            identity: tuple[str, Sequence[int] | None] = (key, region.offset)
            if stored.is_object(key):
                cell = ShardedObject(key, None, shape, region.offset)
                identity = (cell.unique_key, None)
            regions.append(region)
            pieces.append((identity, *places[chunk]))
        if not stored.is_object(key):
            tensors[key] = FROM_NAME[stored.dtype_name(key)], shape, regions
    write_index(tensors, {}, pieces, directory, is_megatron=True)


def write_common_state(common: dict[Any, Any], directory: str) -> None:
    """Write `common.pt`."""
    write_archives([(None, common)], directory, COMMON_NAME)


def write_index(
    tensors: Mapping[str, TensorEntry],
    paths: Mapping[str, tuple[Any, ...]],
    places: Iterable[Place],
    directory: str,
    *,
    is_megatron: bool,
) -> None:
    """Write `.metadata`, and for Megatron Core its marker.

    Args:
        tensors: dtype, shape and stored regions, by name.
        paths: where names are not paths of one step.
        places: of all stored pieces. Each is known by its name, and the offset of a tensor's or
            None for an object.
        directory: where files lie.
        is_megatron: whether Megatron Core is to recognize the directory.
    """
    entries: dict[str, Call] = {}
    for name, (dtype, shape, regions) in tensors.items():
        entries[name] = _tensor_entry(dtype, shape, regions)
    storage = []
    for (name, first), file, start, size in places:
        offset = None
        if first is None:
            entries[name] = record(_METADATA, "BytesStorageMetadata")
        else:
            offset = torch.Size(first)
        index = record(_METADATA, "MetadataIndex", fqn=name, offset=offset, index=None)
        info = {"relative_path": file, "offset": start, "length": size}
        storage.append((index, record(f"{_DCP}.filesystem", "_StorageInfo", **info)))
    content = record(
        _METADATA,
        "Metadata",
        state_dict_metadata=entries,
        planner_data={name: paths.get(name, (name,)) for name in entries},
        storage_data=Pairs(storage),
        storage_meta=None,
    )
    data, _ = encode_pickle(content)
    locations.write_bytes(locations.join(directory, METADATA_NAME), data)
    if is_megatron:
        marker = json.dumps(_MARKER).encode()
        locations.write_bytes(locations.join(directory, CONFIG_FNAME), marker)
    locations.sync_directory(directory)


def _tensor_entry(dtype: torch.dtype, shape: tuple[int, ...], regions: Iterable[Region]) -> Call:
    chunks = []
    for region in regions:
        offsets, sizes = map(torch.Size, region)
        chunks.append(record(_METADATA, "ChunkStorageMetadata", offsets=offsets, sizes=sizes))
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (dtype, layout, False, contiguous, False)
    return record(
        _METADATA,
        "TensorStorageMetadata",
        properties=Call(Global(_METADATA, "TensorProperties"), (), state, is_new=True),
        size=torch.Size(shape),
        chunks=chunks,
    )
