"""Removal of tensors from a checkpoint.

A new checkpoint of the remaining tensors replaces the old one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings, new_output
from distckpt._format.chunk_table import NO_CHECKSUMS, blocks_of
from distckpt._format.manifest import (
    Manifest,
    marker_fields,
    needs_checksum_files,
    take_figures,
)
from distckpt._format.marker import read_marker, replaced
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint, fetch_checksums
from distckpt._geometry.region import IntArray
from distckpt._io.save_shards import put_manifest
from distckpt._io.write import WriteSettings, file_of_tensors, in_folder, write_files
from distckpt._plan.layout import (
    PlannedChunk,
    checksum_file_name,
    chunk_table,
    lay_out_tensor_file,
)
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations


def remove_tensors(
    stored: StoredCheckpoint, removed: Collection[str], notes: Mapping[str, Any] | None = None
) -> None:
    """Remove tensors by their keys.

    Files without such tensors are linked, or stay where they are on an object store. Other files
    are written anew and verified while they are copied: on a checksum mismatch the checkpoint
    stays as it was.

    Args:
        stored: the checkpoint.
        removed: keys of tensors.
        notes: fields of the marker to change.

    Raises:
        CheckpointingException: another program has replaced the checkpoint; or on an object store,
            a file holds both tensors that are removed and others.
    """
    location = stored.location
    manifest = stored.manifest
    names, aliases = _names_after(manifest, set(removed))
    # A checkpoint that was copied from an object store has folders of its own names.
    folders = {file.name.rpartition("/")[0] for file in manifest.files} - {""}
    folders.update(posix.SUBDIRECTORIES)
    settings = OutputSettings(
        folders=sorted(folders), overwrite=True, has_marker=True, has_own_folders=True
    )
    with new_output(Ranks.alone(), location, settings) as output:
        with output.being_written():
            complete = with_checksums(stored)
            remaining = _write_remaining(location, output.location, complete, names, aliases)
            fields, files = _write_manifest(output, remaining)
            output.sync()
        if read_marker(location) != stored.marker:
            raise replaced(location)
        output.commit({**stored.marker, **(notes or {}), **fields}, files)


def _write_manifest(
    output: Output, remaining: Manifest
) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Write a manifest; return fields of the marker, and names and sizes of all files."""
    suffix = output.folder_suffix
    if needs_checksum_files(len(remaining.block_checksums)):
        # In a file of their own.
        name = in_folder(checksum_file_name(0), suffix)
        chunks = remaining.all_chunks
        blocks = blocks_of(chunks.file_order, chunks.num_bytes, remaining.block_bytes)
        content = chunks.block_checksums[blocks].astype("<u8").tobytes()
        locations.write_bytes(locations.join(output.location, name), content)
        files = [*remaining.files, ShardFile.of(name, content)]
        chunks = chunks._replace(files=files, block_checksums=NO_CHECKSUMS)
        remaining = remaining.replaced(chunks=chunks)
    data = remaining.to_bytes()
    name = put_manifest(output.location, data, suffix)
    sizes = [(file.name, file.num_bytes) for file in remaining.files]
    return marker_fields(data, name), [*sizes, (name, len(data))]


def _names_after(manifest: Manifest, removed: set[str]) -> tuple[list[str | None], dict[str, str]]:
    """Return the new names of stored keys, and the aliases that stay.

    The name of a key that is removed is None. A tied tensor whose own name is removed gets the name
    of its first alias.
    """
    tied: dict[str, list[str]] = {key: [key] for key in manifest.keys}
    for alias, target in manifest.aliases.items():
        tied[target].append(alias)
    aliases: dict[str, str] = {}
    names: list[str | None] = []
    for group in tied.values():
        first = None
        for name in group:
            if name in removed:
                continue
            if first is None:
                first = name
            else:
                aliases[name] = first
        names.append(first)
    return names, aliases


def _write_remaining(
    location: str,
    directory: str,
    manifest: Manifest,
    names: Sequence[str | None],
    aliases: Mapping[str, str],
) -> Manifest:
    """Write or link the files that remain, and return their manifest."""
    all_chunks = manifest.all_chunks
    first_bytes = all_chunks.first_bytes.copy()
    file_ids = all_chunks.file_ids
    key_ids = [key_id for key_id, name in enumerate(names) if name is not None]
    stays = np.isin(all_chunks.key_ids, key_ids)
    is_renamed = np.array(names, object) != np.array(manifest.keys, object)
    changing = set(file_ids[is_renamed[all_chunks.key_ids]].tolist())
    files: dict[int, ShardFile] = {}
    for file_id in sorted(set(file_ids[stays].tolist())):
        file = manifest.files[file_id]
        if file_id in changing:
            rows = np.flatnonzero((file_ids == file_id) & stays)
            files[file_id], first_bytes[rows] = _rewrite(
                location, directory, manifest, file, rows, names
            )
            continue
        files[file_id] = file
        if directory != location:
            source = locations.join(location, file.name)
            locations.link_tree(source, locations.join(directory, file.name))
    chunks = all_chunks._replace(first_bytes=first_bytes)
    table = chunks.take(np.flatnonzero(stays), manifest.block_bytes)
    return manifest.replaced(
        keys=[name for name in names if name is not None],
        dtypes=[manifest.dtypes[key_id] for key_id in key_ids],
        global_shapes=[manifest.global_shapes[key_id] for key_id in key_ids],
        chunks=table._replace(
            files=list(files.values()),
            key_ids=np.searchsorted(key_ids, table.key_ids),
            file_ids=np.searchsorted(list(files), table.file_ids),
        ),
        aliases=aliases,
        figures=take_figures(manifest.figures, key_ids),
    )


def _rewrite(
    location: str,
    directory: str,
    manifest: Manifest,
    file: ShardFile,
    rows: IntArray,
    names: Sequence[str | None],
) -> tuple[ShardFile, IntArray]:
    """Write a file with some of its chunks.

    Return it, and the first byte of each of `rows`, which ascend.
    """
    if directory == location:
        raise CheckpointingException(
            f"{locations.join(location, file.name)!r} holds tensors that are to be removed and "
            "others, and files on an object store are not rewritten. Nothing was removed. Save "
            "with separate_optimizer=True, or reshard to a local directory and remove them there."
        )
    chunks = []
    shapes = {}
    row_of: dict[str, int] = {}
    for row in rows.tolist():
        key_id = int(manifest.key_ids[row])
        name = names[key_id]
        assert name is not None
        region = manifest.chunk_region(row)
        num_bytes = int(manifest.num_bytes[row])
        chunks.append(PlannedChunk(key_id, name, manifest.dtypes[key_id], region, num_bytes))
        row_of[name] = row
        shapes[name] = manifest.global_shapes[key_id]
    planned = lay_out_tensor_file(file.name, chunks, shapes)
    ordered = np.array([row_of[chunk.key] for chunk in planned.chunks], np.int64)
    source = np.memmap(locations.join(location, file.name), np.uint8, mode="c")
    starts = manifest.first_bytes[ordered]
    stops = starts + manifest.num_bytes[ordered]
    spans = zip(starts.tolist(), stops.tolist(), strict=True)
    contents = [[torch.from_numpy(source[start:stop])] for start, stop in spans]
    new_file = file_of_tensors(planned.name, planned.header, contents).below(directory)
    checksums = write_files([new_file], WriteSettings(block_bytes=manifest.block_bytes))
    expected = manifest.all_chunks.take(ordered, manifest.block_bytes).block_checksums
    if not np.array_equal(expected, checksums):
        raise CorruptCheckpointError(
            f"{file.name!r} has a checksum mismatch: nothing was removed. Restore it from a copy."
        )
    written = chunk_table([planned])
    return written.files[0], written.first_bytes[np.argsort(ordered)]


def with_checksums(stored: StoredCheckpoint) -> Manifest:
    """Return the manifest with the checksums of all blocks in it."""
    manifest = stored.manifest
    if not len(manifest.checksum_files):
        return manifest
    chunks = manifest.all_chunks
    fetch_checksums(stored, chunks.file_ids)
    holders = manifest.checksum_files.tolist()
    known = np.concatenate([manifest.fetched.contents.get(h, NO_CHECKSUMS) for h in holders])
    checksums = np.empty_like(known)
    checksums[blocks_of(chunks.file_order, chunks.num_bytes, manifest.block_bytes)] = known
    return manifest.replaced(chunks=chunks._replace(block_checksums=checksums))
