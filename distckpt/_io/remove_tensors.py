"""Removing tensors from a checkpoint: a new checkpoint of what remains, put in the place of the old
one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._commit import posix
from distckpt._commit.target import prepare_to_replace
from distckpt._format.manifest import MANIFEST_NAME, OBJECT, Manifest, ShardFile, marker_fields
from distckpt._format.marker import CheckpointingConfig, save_config
from distckpt._geometry.region import IntArray
from distckpt._io.write import WriteSettings, file_of_tensors, write_files
from distckpt._plan.layout import PlannedChunk, chunk_table, lay_out_tensor_file
from distckpt._storage import locations


def remove_tensors(
    location: str, manifest: Manifest, key_prefix: str, config: CheckpointingConfig
) -> list[str]:
    """Remove the tensors whose keys begin with a prefix; returns the removed keys, and changes
    nothing without any.

    Files without such tensors are linked, the others written anew, verified while they are copied:
    when one has a checksum mismatch the checkpoint stays as it was.
    """
    is_tensor = {
        key: manifest.dtypes[key_id] != OBJECT for key, key_id in manifest.key_index.items()
    }
    removed = [key for key in is_tensor if is_tensor[key] and key.startswith(key_prefix)]
    if not removed:
        return []
    if not locations.is_local(location):
        raise CheckpointingException(
            f"Tensors can be removed on local file systems only, not from {location!r}."
        )
    names, aliases = _remaining_names(manifest, set(removed))
    staging = posix.staging_location(location, secrets.token_hex(8))
    try:
        # Of a checkpoint that was copied from an object store the folders have names of their own.
        folders = {
            locations.split(locations.join(staging, file.name))[0] for file in manifest.files
        }
        for folder in folders:
            locations.make_directories(folder, durable=False)
        prepare_to_replace(location, staging)
        posix.prepare(staging)
        remaining = _write_remaining(location, staging, manifest, names, aliases)
        data = remaining.to_bytes()
        locations.write_bytes(locations.join(staging, MANIFEST_NAME), data)
        for folder in folders:
            locations.sync_directory(folder)
        posix.sync(staging)
        save_config(config, staging, extra=marker_fields(data))
        posix.commit(staging, location, overwrite=True)
    except BaseException:
        posix.abandon(staging)
        raise
    return removed


def _remaining_names(
    manifest: Manifest, removed: set[str]
) -> tuple[list[str | None], dict[str, str]]:
    """Return the new name of each stored key, None when it goes, and the aliases that stay.

    A tied tensor stays under the name of its first alias when its own goes.
    """
    aliases: dict[str, str] = {}
    names: list[str | None] = []
    for key in manifest.keys:
        tied = [key, *(alias for alias, target in manifest.aliases.items() if target == key)]
        kept = [name for name in tied if name not in removed]
        names.append(kept[0] if kept else None)
        aliases.update((alias, kept[0]) for alias in kept[1:])
    return names, aliases


def _write_remaining(
    location: str,
    staging: str,
    manifest: Manifest,
    names: list[str | None],
    aliases: Mapping[str, str],
) -> Manifest:
    first_bytes = manifest.first_bytes.copy()
    files: list[ShardFile] = []
    new_file_id = np.full(len(manifest.files), -1, np.int64)
    stays = np.array([name is not None for name in names], np.bool_)[manifest.key_ids]
    is_renamed = np.array(
        [name != key for name, key in zip(names, manifest.keys, strict=True)], np.bool_
    )
    for file_id, file in enumerate(manifest.files):
        rows = np.flatnonzero(manifest.file_ids == file_id)
        if not stays[rows].any():
            continue
        new_file_id[file_id] = len(files)
        if is_renamed[manifest.key_ids[rows]].any():
            in_file = rows[stays[rows]]
            written, first_bytes[in_file] = _rewrite(
                location, staging, manifest, file, in_file, names
            )
            files.append(written)
        else:
            locations.link_tree(
                locations.join(location, file.name), locations.join(staging, file.name)
            )
            files.append(file)
    kept_keys = [key_id for key_id, name in enumerate(names) if name is not None]
    new_key_id = np.full(len(names), -1, np.int64)
    new_key_id[kept_keys] = np.arange(len(kept_keys))
    kept = manifest.chunks._replace(first_bytes=first_bytes).take(
        np.flatnonzero(stays), manifest.block_bytes
    )
    return Manifest(
        keys=[name for name in names if name is not None],
        dtypes=[manifest.dtypes[i] for i in kept_keys],
        global_shapes=[manifest.global_shapes[i] for i in kept_keys],
        chunks=kept._replace(
            files=files, key_ids=new_key_id[kept.key_ids], file_ids=new_file_id[kept.file_ids]
        ),
        aliases=aliases,
        block_bytes=manifest.block_bytes,
    )


def _rewrite(
    location: str,
    staging: str,
    manifest: Manifest,
    file: ShardFile,
    rows: IntArray,
    names: list[str | None],
) -> tuple[ShardFile, IntArray]:
    """Write a file with some of its chunks; returns also where each of `rows`, which ascend, begins
    in it.
    """
    source = np.memmap(locations.join(location, file.name), np.uint8, mode="c")
    chunks, shapes = [], {}
    row_of: dict[str, int] = {}
    for row in rows.tolist():
        key_id = int(manifest.key_ids[row])
        name = names[key_id]
        assert name is not None
        region, num_bytes = manifest.chunk_region(row), int(manifest.num_bytes[row])
        chunks.append(PlannedChunk(key_id, name, manifest.dtypes[key_id], region, num_bytes))
        row_of[name] = row
        shapes[name] = manifest.global_shapes[key_id]
    planned = lay_out_tensor_file(file.name, chunks, shapes)
    ordered = np.array([row_of[chunk.key] for chunk in planned.chunks], np.int64)
    starts, sizes = manifest.first_bytes[ordered], manifest.num_bytes[ordered]
    contents = [
        [torch.from_numpy(source[start : start + size])]
        for start, size in zip(starts, sizes, strict=True)
    ]
    new_file = file_of_tensors(planned.name, planned.header, contents).below(staging)
    checksums = write_files([new_file], WriteSettings(block_bytes=manifest.block_bytes))
    if not np.array_equal(
        manifest.chunks.take(ordered, manifest.block_bytes).block_checksums, checksums
    ):
        raise CorruptCheckpointError(
            f"{file.name!r} has a checksum mismatch: nothing was removed. Restore it from a copy."
        )
    written = chunk_table([planned])
    return written.files[0], written.first_bytes[np.argsort(ordered)]
