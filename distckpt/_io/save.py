"""Saving on one rank: plan together with the others, make files of shards, complete the manifest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, UnsupportedObjectError
from distckpt._format import codec
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import MANIFEST_NAME, ChunkTable, Manifest, marker_fields
from distckpt._io.write import NewFile, file_of_tensors, in_folder
from distckpt._mapping.base import OpenReplicaId
from distckpt._plan.cache import SavePlan
from distckpt._plan.layout import (
    PlannedChunk,
    PlannedFile,
    chunk_table,
    lay_out_files,
    lay_out_object_file,
    manifest_of_keys,
)
from distckpt._plan.save import Pieces, find_aliases, plan_owners
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import object_text
from distckpt._state.shards import Shard, ShardTable, merge_tables, region_view
from distckpt._state.validation import replica_weights, validate_shards
from distckpt._storage import locations
from distckpt.mapping import ShardedObject, ShardedTensor, is_main_replica


def ready_to_save(shard: Shard, encode_copies: bool) -> Shard:
    """Check that a tensor can be read; replace the value of a main object (and of copies) by its encoding."""
    if isinstance(shard, ShardedTensor):
        _check_tensor(shard)
        return shard
    if not (encode_copies or is_main_replica(shard.replica_id) or isinstance(shard.replica_id, OpenReplicaId)):
        return shard
    try:
        return replace(shard, data=codec.encode(shard.data))
    except UnsupportedObjectError as error:
        raise UnsupportedObjectError(f"{object_text(shard.key)} cannot be saved: {error}") from error


def _check_tensor(shard: ShardedTensor) -> None:
    data = shard.data
    if data is None:
        raise CheckpointingException(
            f"Key {shard.key!r} at offset {shard.global_offset} has no data, and needs its tensor to be saved."
        )
    if data.dtype != shard.dtype or data.shape != shard.local_shape:
        # A flat shard, or one that has been given another tensor since it was made.
        shard.validate_metadata_integrity()


def make_plan(ranks: Ranks, table: ShardTable, allow_gaps: bool) -> SavePlan:
    """Plan a save together; `allow_gaps` permits elements that no rank holds.

    Collective operation: all ranks must call it. Descriptions of shards go to the coordinator, pieces to write come
    back, tables of chunks go to it.
    """
    messages = ranks.gather_once(table.to_messages())
    manifests: list[Manifest] = []

    def plan_for_all() -> list[bytes]:
        described = ShardTable.all_from_messages(*messages)
        groups = [each.exchange_group for each in described]
        ends = np.cumsum([len(each.key_ids) for each in described])[:-1]
        merged = merge_tables(described)
        # As large as what is made of them.
        messages.clear()
        described.clear()
        validate_shards(merged, allow_gaps=allow_gaps)
        aliases = find_aliases(merged)
        manifests.append(manifest_of_keys(merged, aliases))
        owned = plan_owners(merged, ranks.size, aliases, groups)
        weights = replica_weights(merged)
        fields = [1 + secrets.randbits(61), bool(weights.any())]
        pairs = zip(np.split(weights, ends), owned, strict=True)
        return [pack(fields, {"weights": w, **p._asdict()}) for w, p in pairs]

    (number, has_replicas), columns = unpack(ranks.decide_each("plan", plan_for_all))
    weights = columns.pop("weights")
    error, own_table = None, b""
    try:
        files, objects = lay_out_files(ranks.rank, table, Pieces(**columns))
        own_table = chunk_table(files).to_bytes()
    except Exception as caught:
        error = caught
    gathered = ranks.gather(own_table)
    with ranks.phase("lay out files", decision=True):
        if error is not None:
            raise error
        tables = [ChunkTable.from_bytes(data) for data in gathered if data]
        for manifest in manifests:
            manifest.check_size(tables)
    rows = np.flatnonzero(weights)
    replicas = [(int(table.shard_ids[row]), table.row_region(row)) for row in rows.tolist()] if has_replicas else None
    return SavePlan(number, files, objects, next(iter(manifests), None), tables, replicas, weights[rows])


def tensor_files_of(files: Sequence[PlannedFile], shards: Sequence[Shard]) -> Callable[[], list[NewFile]]:
    """Look up the tensors that files consist of. The files themselves are made when the result is called."""
    contents = [[_tensors_of(chunk, shards) for chunk in file.chunks] for file in files]
    return lambda: [
        file_of_tensors(file.name, file.header, tensors) for file, tensors in zip(files, contents, strict=True)
    ]


def encoded_objects(objects: Sequence[PlannedChunk], shards: Sequence[Shard]) -> dict[str, bytes]:
    """Return the encodings of the objects that a rank writes, by unique key."""
    held = [shards[chunk.pieces[0][0]] for chunk in objects]
    return {shard.unique_key: shard.data for shard in held if isinstance(shard, ShardedObject)}


def object_file_of(
    rank: int, objects: Sequence[PlannedChunk], encoded: Mapping[str, bytes]
) -> tuple[PlannedFile, NewFile]:
    """Lay out the file of the encoded objects of one rank, and make it."""
    planned = lay_out_object_file(rank, objects, {key: len(data) for key, data in encoded.items()})
    contents = [[torch.frombuffer(bytearray(data), dtype=torch.uint8)] for data in encoded.values()]
    return planned, file_of_tensors(planned.name, planned.header, contents)


def write_manifest(
    checkpoint_dir: str, manifest: Manifest, tables: Sequence[ChunkTable], suffix: str, durable: bool
) -> tuple[Mapping[str, Any], list[tuple[str, int]]]:
    """Complete a manifest with the chunks that were written, and write it.

    Returns the marker fields that name it, and the names and sizes of all files, its own included. On an object store
    no manifest is ever replaced, since a marker may name it: it gets another name where there is one.
    """
    written = manifest.with_chunks(tables)
    written.files[:] = [file._replace(name=in_folder(file.name, suffix)) for file in written.files]
    data = written.to_bytes()
    name = MANIFEST_NAME
    if not locations.create_bytes(locations.join(checkpoint_dir, name), data, durable):
        name = f"manifest{suffix or '-' + secrets.token_hex(8)}.safetensors"
        locations.write_bytes(locations.join(checkpoint_dir, name), data, durable)
    return marker_fields(data, name), [*((file.name, file.num_bytes) for file in written.files), (name, len(data))]


def _tensors_of(chunk: PlannedChunk, shards: Sequence[Shard]) -> list[torch.Tensor]:
    tensors = []
    for shard_id, region in chunk.pieces:
        shard = shards[shard_id]
        assert isinstance(shard, ShardedTensor)
        tensors.append(region_view(shard, region))
    return tensors
