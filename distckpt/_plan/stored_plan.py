"""Plans that outlive the job: a manifest says which rank has written what, and where.

A save notes in its manifest what else a plan consists of: a digest of the shards of all ranks, and
which of them are replicas (`note_of_plan`). A job that loads the checkpoint remembers the chunks of
its own rank (`remember`). When it saves, these become a plan (`restored`), which is used if the
ranks find the digest to be that of their own shards.

A manifest is not trusted: the files of each rank must be those that its shards fill, to the header,
and those of all ranks must fill every tensor. Otherwise there is no plan, and the ranks make one.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.columns import narrow, require
from distckpt._format.manifest import OBJECT, ChunkTable, Files, LazyChunks, Manifest
from distckpt._format.manifest_parts import part_of, parts_by_name
from distckpt._format.planned_manifest import PlannedManifest, planned_in_order
from distckpt._format.safetensors_file import ShardFile, shard_file_name
from distckpt._geometry.region import IntArray, Region, intersect, stacked
from distckpt._plan.layout import (
    LoadedPlan,
    PlannedChunk,
    PlannedFile,
    SavePlan,
    checksum_file_name,
    coalesced,
    compared_replicas,
    forget_loaded_plan,
    lay_out_tensor_file,
    loaded_plans,
    object_file_of_rank,
)
from distckpt._state.shards import GlobalTable, ShardTable
from distckpt._state.validation import validate_shards

_FILE = re.compile(
    r"(tensors|objects)(?:-[0-9a-f]{16})?/"
    r"((?:shard-(\d+)-model-\d+-of-\d+|rank-(\d+))\.(?:safetensors|checksums))"
)
_PART = re.compile(r"objects(?:-[0-9a-f]{16})?/chunks-\d+\.safetensors")
_FACTOR = np.dtype("<i4")


def note_of_plan(structure: bytes, stride: int, factors: Sequence[bytes]) -> dict[str, Any]:
    """Return what a manifest notes of a plan.

    Args:
        structure: digest of the shards of all ranks.
        stride: see `replica_weights`; 0 if there are no replicas.
        factors: of the shards of each rank, from `factors_to_bytes`.
    """
    note: dict[str, Any] = {"structure": structure.hex(), "ranks": len(factors)}
    if stride:
        # Most ranks have the same.
        numbers = {each: number for number, each in enumerate(dict.fromkeys(factors))}
        note["stride"] = stride
        note["factors"] = [base64.b64encode(each).decode() for each in numbers]
        note["factors_of_ranks"] = [numbers[each] for each in factors]
    return note


def factors_to_bytes(factors: IntArray) -> bytes:
    """Encode the factors of the shards of one rank, see `replica_factors`."""
    return zlib.compress(factors.astype(_FACTOR).tobytes())


def remember(rank: int, num_ranks: int, manifest: Manifest, manifest_checksum: str) -> None:
    """Note what the manifest of a loaded checkpoint says of its plan, if this process can use it.

    Args:
        rank: of this process.
        num_ranks: that have loaded the checkpoint.
        manifest: of the checkpoint.
        manifest_checksum: from the marker.
    """
    note = manifest.plan
    is_usable = isinstance(note, Mapping) and note.get("ranks") == num_ranks
    if not is_usable or manifest.block_bytes != BLOCK_BYTES:
        return
    # Not 0, which stands for no plan.
    number = 1 + (int(manifest_checksum, 16) >> 3)
    try:
        own = _with_chunks(manifest, _chunks_of_rank(manifest, rank))
        of_all = _kept(manifest.table) if rank == 0 else None
    except CorruptCheckpointError:
        # The load did not need what is damaged.
        return
    forget_loaded_plan(number)
    loaded_plans.appendleft(LoadedPlan(number, rank, num_ranks, own, of_all))


def _chunks_of_rank(manifest: Manifest, rank: int) -> ChunkTable:
    file_ids = _files_of_rank(manifest.files, rank)
    rows = manifest.rows_in_files(file_ids)
    manifest.check_rows(rows)
    return manifest.rows(rows)._replace(
        files=[manifest.files[file_id] for file_id in file_ids.tolist()],
        file_ids=np.searchsorted(file_ids, manifest.file_ids[rows]),
    )


def _files_of_rank(files: Files, rank: int) -> IntArray:
    names = f"/shard-{rank + 1:05d}-model-", f"/rank-{rank + 1:05d}."
    if isinstance(files, list):
        return np.flatnonzero([names[0] in file.name or names[1] in file.name for file in files])
    return np.union1d(files.containing(names[0]), files.containing(names[1]))


def _kept(table: ChunkTable | LazyChunks) -> ChunkTable | LazyChunks:
    """Return chunks in the form in which they take little memory."""
    if isinstance(table, LazyChunks):
        return table
    table = table._replace(block_checksums=np.zeros(0, np.uint64))
    return ChunkTable(table.files, *map(narrow, table.columns().values()))


def _with_chunks(manifest: Manifest, chunks: ChunkTable | LazyChunks) -> Manifest:
    return Manifest(
        manifest.keys,
        manifest.dtypes,
        manifest.global_shapes,
        chunks,
        manifest.aliases,
        plan=manifest.plan,
    )


class RestoredPlan(NamedTuple):
    """A plan of an earlier job for this rank.

    Attributes:
        plan: to be kept.
        with_all_replicas: the same, with all replicas to compare: so many are compared when a job
            saves for the first time.
    """

    plan: SavePlan
    with_all_replicas: SavePlan


def restored(loaded: LoadedPlan, table: ShardTable, description: bytes) -> RestoredPlan | None:
    """Return the plan for the shards of this rank that a loaded checkpoint tells of; None if it is
    none for them.

    The other ranks may still describe other shards than when it was made.
    """
    try:
        plan = _restored(loaded, table, description)
        factors, stride = _factors_in(loaded, table)
        plan = _with_replicas(plan, table, factors, stride)
        is_all = stride <= 1
        return RestoredPlan(plan, plan if is_all else _with_replicas(plan, table, factors, 1))
    except (
        CheckpointingException,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        zlib.error,
    ):
        # Whatever is wrong with it, a new plan is right.
        return None


def _restored(loaded: LoadedPlan, table: ShardTable, description: bytes) -> SavePlan:
    require(isinstance(_note_in(loaded)["structure"], str), "it says of no shards")
    _check_keys(loaded.own, table)
    files: list[PlannedFile] = []
    objects: list[PlannedChunk] = []
    holders = _Holders(table)
    names, checksum_file = _names_of_files(loaded)
    for file_id, name in enumerate(names):
        chunks = list(_chunks_of_file(loaded.own, file_id, holders))
        are_objects = {chunk.dtype == OBJECT for chunk in chunks}
        require(are_objects == {name.startswith("objects/")}, "a file has chunks of another kind")
        if are_objects == {True}:
            objects += chunks
        else:
            files.append(_laid_out(loaded.own.files[file_id], name, chunks, table))
    manifest = None if loaded.of_all is None else _planned_manifest(loaded)
    return SavePlan(
        loaded.number,
        files,
        objects,
        manifest,
        checksum_file=checksum_file,
        description=description,
    )


def _note_in(loaded: LoadedPlan) -> Mapping[str, Any]:
    assert loaded.own.plan is not None
    return loaded.own.plan


def _names_of_files(loaded: LoadedPlan) -> tuple[list[str], str | None]:
    """Return the names that the files of this rank have without nonces, those with chunks first,
    and that of its file of checksums.
    """
    names = [_plain_name(file.name)[0] for file in loaded.own.files]
    num_files = sum(name.startswith("tensors/") for name in names)
    expected = [
        "tensors/" + shard_file_name(loaded.rank, number, num_files) for number in range(num_files)
    ]
    checksum_file = checksum_file_name(loaded.rank)
    has_checksums = checksum_file in names
    if object_file_of_rank(loaded.rank) in names:
        expected.append(object_file_of_rank(loaded.rank))
    require(names == expected + [checksum_file] * has_checksums, "the files have other names")
    return expected, checksum_file if has_checksums else None


def _plain_name(name: str) -> tuple[str, int]:
    """Return the name of a file without a nonce, and the rank that has written it."""
    found = _FILE.fullmatch(name)
    if found is None:
        raise ValueError(f"the file {name!r:.99} is of no rank")
    folder, file, *numbers = found.groups()
    return f"{folder}/{file}", int(next(filter(None, numbers))) - 1


def _check_keys(manifest: Manifest, table: ShardTable) -> None:
    """Check that everything of this rank is stored, or tied to what is stored."""
    numbers = [manifest.key_index[key] for key in table.keys]
    are_same = table.dtypes == [manifest.dtypes[number] for number in numbers]
    shapes = [manifest.global_shapes[number] for number in numbers]
    require(are_same and table.global_shapes == shapes, "a tensor is another one")
    if manifest.aliases:
        _check_ties(manifest, table)


def _check_ties(manifest: Manifest, table: ShardTable) -> None:
    is_alias = np.array([key in manifest.aliases for key in table.keys], bool)
    may_be_main = table.is_main | (table.open_ranks > 0)
    is_held = (table.shapes > 0).all(axis=1)
    key_of_shard = dict(zip(table.shard_ids.tolist(), table.key_ids.tolist(), strict=True))
    for row in np.flatnonzero(is_alias[table.key_ids] & may_be_main & is_held).tolist():
        tied = table.keys[key_of_shard[int(table.tie_ids[row])]]
        require(manifest.aliases[table.keys[table.key_ids[row]]] == tied, "it is tied no longer")


def _chunks_of_file(manifest: Manifest, file_id: int, holders: _Holders) -> Iterator[PlannedChunk]:
    """Yield the chunks of a file in the order of their bytes."""
    rows = np.flatnonzero(manifest.file_ids == file_id)
    rows = rows[np.lexsort((manifest.num_bytes[rows], manifest.first_bytes[rows]))]
    file, sizes = manifest.files[file_id], manifest.num_bytes[rows]
    ends = file.header_bytes + np.cumsum(sizes)
    follow = bool((manifest.first_bytes[rows] == ends - sizes).all())
    require(follow and file.num_bytes == file.header_bytes + sizes.sum(), "a file has gaps")
    columns = manifest.key_ids, manifest.num_bytes, manifest.offsets, manifest.shapes
    of_chunks = zip(*(column[rows].tolist() for column in columns), strict=True)
    for key_id, size, offset, shape in of_chunks:
        key, dtype = manifest.keys[key_id], manifest.dtypes[key_id]
        num_bytes = 0 if dtype == OBJECT else size
        ndim = len(manifest.global_shapes[key_id])
        region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
        yield PlannedChunk(
            key_id, key, dtype, region, num_bytes, holders.pieces(key, dtype, region)
        )


def _laid_out(
    file: ShardFile, name: str, chunks: Sequence[PlannedChunk], table: ShardTable
) -> PlannedFile:
    shapes = dict(zip(table.keys, table.global_shapes, strict=True))
    planned = lay_out_tensor_file(name, chunks, shapes)
    is_same = (len(planned.header), checksum(planned.header)) == tuple(file[2:])
    require(is_same and planned.chunks == chunks, f"{file.name!r:.99} is laid out otherwise")
    return planned


class _Holders:
    """Which shards of this rank hold which regions."""

    def __init__(self, table: ShardTable) -> None:
        self._table = table
        self._shard_ids = table.shard_ids.tolist()
        self._rows: dict[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]], int] = {}
        ndims = [len(shape) for shape in table.global_shapes]
        columns = table.key_ids.tolist(), table.offsets.tolist(), table.shapes.tolist()
        for row, (key_id, offset, shape) in enumerate(zip(*columns, strict=True)):
            ndim = ndims[key_id]
            place = table.keys[key_id], (tuple(offset[:ndim]), tuple(shape[:ndim]))
            first = self._rows.setdefault(place, row)
            if first != row and table.tie_ids[first] != table.tie_ids[row]:
                raise ValueError(f"{place} is held twice")

    def pieces(self, key: str, dtype: str, region: Region) -> tuple[tuple[int, Region], ...]:
        """Return the parts of shards that make up a chunk, one after the other."""
        row = self._rows.get((key, region))
        if row is None:
            return self._joined_pieces(key, region)
        if dtype == OBJECT:
            is_main = self._table.is_main[row] or self._table.open_ranks[row]
            require(bool(is_main), "an object is a copy")
        return ((self._shard_ids[row], region),)

    def _joined_pieces(self, key: str, region: Region) -> tuple[tuple[int, Region], ...]:
        parts = []
        for row in self._rows_of_keys.get(key, ()):
            common = intersect(self._table.row_region(row), region)
            if common is not None:
                parts.append(PlannedChunk(0, key, "", common, 0, ((self._shard_ids[row], common),)))
        merged = coalesced(parts) if parts else []
        require([each.region for each in merged] == [region], "a chunk is not here")
        return merged[0].pieces

    @functools.cached_property
    def _rows_of_keys(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for (key, _), row in self._rows.items():
            rows.setdefault(key, []).append(row)
        return rows


# --- Replicas -------------------------------------------------------------------------------------


def _factors_in(loaded: LoadedPlan, table: ShardTable) -> tuple[IntArray, int]:
    """Return the factors of the shards of this rank, and the stride."""
    note = _note_in(loaded)
    num_rows = len(table.key_ids)
    if "stride" not in note:
        return np.zeros(num_rows, np.int64), 0
    encoded = note["factors"][note["factors_of_ranks"][loaded.rank]]
    num_bytes = _FACTOR.itemsize * num_rows
    # No more than is expected: it might be made to fill the memory.
    data = zlib.decompressobj().decompress(base64.b64decode(encoded), num_bytes + 1)
    factors = np.frombuffer(data, _FACTOR).astype(np.int64)
    is_object = np.array([dtype == OBJECT for dtype in table.dtypes], bool)
    fits = len(factors) == num_rows and not factors[is_object[table.key_ids]].any()
    require(fits and 0 < int(note["stride"]) < 1 << 62, "the factors are of other shards")
    return factors, int(note["stride"])


def _with_replicas(plan: SavePlan, table: ShardTable, factors: IntArray, stride: int) -> SavePlan:
    replicas, weights = compared_replicas(table, factors, stride)
    return plan._replace(replicas=replicas, weights=weights)


# --- The coordinator ------------------------------------------------------------------------------


class _PlannedFiles(NamedTuple):
    """The files of a plan.

    Attributes:
        files: with the names that they have in all saves; those of objects, which may have other
            sizes now, are not laid out.
        of_ranks: how many of them are those of each rank.
        are_open: for each, whether it is one of objects.
    """

    files: list[ShardFile]
    of_ranks: list[int]
    are_open: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, saved: Files, num_ranks: int) -> _PlannedFiles:
        """Return the files of a checkpoint, without the parts of its manifest."""
        files, ranks, are_open = [], [], []
        for file in itertools.takewhile(lambda file: not _PART.fullmatch(file.name), saved):
            name, rank = _plain_name(file.name)
            is_open = name.startswith("objects/")
            files.append(ShardFile(name, 0, 0, 0) if is_open else file._replace(name=name))
            ranks.append(rank)
            are_open.append(is_open)
        of_ranks = np.bincount(ranks, minlength=num_ranks)
        require(ranks == sorted(ranks) and len(of_ranks) == num_ranks, "a file is of no rank")
        return cls(files, of_ranks.tolist(), np.array(are_open, bool))


def _planned_manifest(loaded: LoadedPlan) -> PlannedManifest:
    """Return the manifest of what all ranks are going to write, if that is everything."""
    assert loaded.of_all is not None
    manifest = _with_chunks(loaded.own, loaded.of_all)
    files = _PlannedFiles.of(manifest.files, loaded.num_ranks)
    is_object = np.array([dtype == OBJECT for dtype in manifest.dtypes], bool)
    parts: dict[str, bytes] = {}
    if _keeps_parts(manifest, is_object):
        rest, parts = _planned_in_parts(manifest, files, is_object)
    else:
        rest = manifest.chunks
        _check_part(manifest, rest, files, is_object, slice(None))
    order = np.empty(len(rest.key_ids), np.int64)
    in_files = np.lexsort((rest.num_bytes, rest.first_bytes, rest.file_ids))
    order[in_files] = np.arange(len(order))
    is_open = files.are_open[rest.file_ids]
    rest = rest._replace(
        files=files.files,
        first_bytes=np.where(is_open, 0, rest.first_bytes),
        num_bytes=np.where(is_open, 0, rest.num_bytes),
        block_checksums=np.zeros(0, np.uint64),
    )
    without_chunks = _with_chunks(loaded.own, ChunkTable.empty())
    return planned_in_order(without_chunks, rest, order, files.of_ranks, parts)


def _keeps_parts(manifest: Manifest, is_object: npt.NDArray[np.bool_]) -> bool:
    """Tell whether the chunks of tensors, which are laid out, are in parts of the manifest by
    themselves, and come before all others, as where planners make parts. Then the checksums are in
    files.
    """
    if not isinstance(manifest.table, LazyChunks) or not len(manifest.checksum_files):
        return False
    num_chunks = np.diff(manifest.key_starts)
    first = _first_of_objects(manifest, is_object)
    are_last = (manifest.key_starts[:-1][is_object & (num_chunks > 0)] >= first).all()
    return bool(first and are_last and first in manifest.table.key_ids.starts)


def _first_of_objects(manifest: Manifest, is_object: npt.NDArray[np.bool_]) -> int:
    """Return the first row of objects if their chunks come after all others."""
    num_chunks = np.diff(manifest.key_starts)
    return int(num_chunks[~is_object].sum())


def _planned_in_parts(
    manifest: Manifest, files: _PlannedFiles, is_object: npt.NDArray[np.bool_]
) -> tuple[ChunkTable, dict[str, bytes]]:
    """Return the chunks of objects, and parts of the manifest with all others; only one part is
    decoded at a time.
    """
    table = manifest.table
    assert isinstance(table, LazyChunks)
    starts = table.key_ids.starts
    keys = np.searchsorted(manifest.key_starts, starts)
    require(bool((manifest.key_starts[keys] == starts).all()), "a key is in two parts")
    keys[-1] = len(manifest.keys)
    first = _first_of_objects(manifest, is_object)
    parts = []
    places = zip(starts.tolist(), itertools.pairwise(keys.tolist()), strict=False)
    for chunks, (start, edges) in zip(manifest.parts(), places, strict=True):
        _check_part(manifest, chunks, files, is_object, slice(*edges))
        if start < first:
            parts.append(part_of(chunks, slice(None)))
    return table.rows(np.arange(first, len(table.key_ids))), parts_by_name(parts)


def _check_part(
    manifest: Manifest,
    chunks: ChunkTable,
    files: _PlannedFiles,
    is_object: npt.NDArray[np.bool_],
    keys: slice,
) -> None:
    """Check that all chunks of some keys are in files of their kind, fill every tensor, and hold no
    element twice.
    """
    are_apart = bool((files.are_open[chunks.file_ids] == is_object[chunks.key_ids]).all())
    require(are_apart, "a file has chunks of another kind")
    num_chunks, ndim = chunks.offsets.shape
    numbers, global_shapes = np.arange(num_chunks), manifest.global_shapes[keys]
    first, _, _ = keys.indices(len(manifest.keys))
    validate_shards(
        GlobalTable(
            keys=manifest.keys[keys],
            dtypes=manifest.dtypes[keys],
            global_shapes=stacked(global_shapes, ndim, 1),
            ndims=np.array([len(shape) for shape in global_shapes], np.int64),
            ranks=np.zeros(num_chunks, np.int64),
            key_ids=chunks.key_ids.astype(np.int64) - first,
            shard_ids=numbers,
            tie_ids=numbers,
            is_main=np.ones(num_chunks, bool),
            is_buffer=np.zeros(num_chunks, bool),
            digests=np.zeros(num_chunks, np.uint64),
            offsets=chunks.offsets.astype(np.int64),
            shapes=chunks.shapes.astype(np.int64),
        )
    )
