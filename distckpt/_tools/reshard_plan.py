"""Planning `reshard`: the content of the new checkpoint, and the files of each of its ranks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_count, check_num_bytes
from distckpt._base.options import check_switch
from distckpt._checkpoint.stored_values import object_keys, read_encoded
from distckpt._commit import posix
from distckpt._format.checksum import BLOCK_BYTES, checksum
from distckpt._format.manifest import OBJECT, Manifest, needs_checksum_files, take_figures
from distckpt._format.marker import (
    names_of_module,
    note_of_objects,
    prefixes_of_modules,
    schedulers_of,
)
from distckpt._format.planned_manifest import planned_manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._io.planned_shards import encoded_objects, ready_to_save
from distckpt._io.save_shards import object_file_of
from distckpt._io.write import NewFile
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.export import OutputTensor, check_codes, is_for_all, plan_tensors
from distckpt._plan.layout import (
    PlannedFile,
    SavePlan,
    checksum_file_name,
    chunk_table,
    lay_out_files,
    manifest_of_keys,
)
from distckpt._plan.save import plan_held
from distckpt._plan.selection import matches, renamed, select_tensors
from distckpt._ranks.collectives import Ranks
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard, merge_tables, shard_table
from distckpt._storage import locations
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import CommonStateDict, ShardedObject
from distckpt.rules._mapped import TensorSpec, identity
from distckpt.rules._rule import Rule
from distckpt.rules._rules import check_rules


@dataclass(frozen=True)
class ReshardRequest:
    """A call of `reshard`: two locations, and its request."""

    source: str
    target: str
    num_ranks: int
    grids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    keys: str | Sequence[str] | None = None
    rules: Sequence[Rule] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    common_state: CommonStateDict | None = None
    overwrite: bool = False
    verify: bool = True
    max_inflight_bytes: int = 256 << 20

    @property
    def is_in_place(self) -> bool:
        """Whether the new checkpoint replaces its source."""
        return self.target == posix.resolve(self.source)

    @property
    def is_of_values(self) -> bool:
        """Whether quantized tensors become values."""
        return bool(self.rules) or is_for_all(self.dtype)

    def of_all_ranks(self) -> dict[str, object]:
        """Return the options that are the same on all ranks."""
        own = ("source", "target", "common_state", "max_inflight_bytes")
        return {name: value for name, value in vars(self).items() if name not in own}

    def check(self) -> None:
        """Check that options have values that they may have.

        Raises:
            TypeError: one is of a wrong type.
            ValueError: a number is not possible.
        """
        check_switch("overwrite", self.overwrite)
        check_switch("verify", self.verify)
        check_num_bytes("max_inflight_bytes", self.max_inflight_bytes)
        check_rules(self.rules)
        check_count("num_ranks", self.num_ranks)
        _check_grids(self.grids)
        if not isinstance(self.common_state, Mapping | None):
            raise TypeError(f"common_state is a dict, or None, got {self.common_state!r:.100}.")


def _check_grids(grids: object) -> None:
    if not isinstance(grids, Mapping):
        raise TypeError(f"grids is a dict of patterns of keys -> grids, got {grids!r:.200}")
    for pattern, grid in grids.items():
        is_listed = isinstance(grid, list | tuple)
        if not is_listed or not all(isinstance(parts, int | np.integer) for parts in grid):
            raise TypeError(
                f"grids has {grid!r:.100} for {pattern!r:.100}: a grid is a tuple with the "
                "number of parts along each axis, such as (4, 1)."
            )


def request_of(
    num_callers: int,
    source_dir: str | os.PathLike[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    num_ranks: int | None = None,
    grids: Mapping[str, Sequence[int]] | None = None,
    rename: Mapping[str, str] | None = None,
    **others: Any,
) -> ReshardRequest:
    """Return the request of a call; by default there are as many ranks as call."""
    return ReshardRequest(
        locations.normalize(source_dir),
        posix.resolve(checkpoint_dir),
        num_ranks=num_callers if num_ranks is None else num_ranks,
        grids=grids or {},
        rename=rename or {},
        **others,
    )


@dataclass(frozen=True)
class ReshardPlan:
    """The new checkpoint as it is planned.

    Attributes:
        stored: the source, or a view of it.
        outputs: its tensors, by name.
        objects: encoded, common state among them.
        layout: their files.
        save: the part of this rank.
        notes: fields of the marker about the content.
    """

    stored: StoredCheckpoint
    outputs: Mapping[str, OutputTensor]
    objects: Sequence[ShardedObject]
    layout: _Layout
    save: SavePlan
    notes: Mapping[str, Any]


def plan_reshard(ranks: Ranks, stored: StoredCheckpoint, request: ReshardRequest) -> ReshardPlan:
    """Plan the same on all ranks, which must all call it."""
    marker = stored.marker
    names: list[str] = []
    prefixes: list[str] = []
    if not (request.rules or request.rename):
        names = names_of_module(marker)
        prefixes = prefixes_of_modules(marker)
    notes = note_of_objects(names, prefixes, schedulers_of(marker))
    with ranks.phase("plan the new checkpoint") as vote:
        if request.is_in_place and stored.manifest.origin is not None:
            # Its files would stay.
            raise CheckpointingException(
                f"A checkpoint of another format cannot be rewritten in its own place "
                f"{stored.location!r}."
            )
        if request.is_of_values:
            stored = decoded(stored)
        outputs = _outputs(stored, request)
        objects = _read_objects(stored, request.common_state)
        layout = _lay_out(stored, outputs, objects, request)
        save = _plan_save(ranks, layout)
        vote.number = layout.digest()
    if not vote.are_equal:
        raise CheckpointingException(
            f"{stored.location!r} was changed while it was read: nothing was written, try again."
        )
    by_name = {output.name: output for output in outputs}
    return ReshardPlan(stored, by_name, objects, layout, save, notes)


# --- Content --------------------------------------------------------------------------------------


def _unchanged(manifest: Manifest, outputs: Sequence[OutputTensor]) -> Mapping[str, int]:
    """Return the tensors that keep the figures that are stored of them."""
    if not manifest.figures:
        return {}
    found = {}
    for output in outputs:
        for part in output.mapped.parts[:1]:
            place = manifest.key_index[part.key]
            spec = TensorSpec(manifest.global_shapes[place], manifest.dtypes[place])
            if output.mapped == identity(part.key, spec) and output.dtype == spec.dtype:
                found[output.name] = place
    return found


def _settings(
    stored: StoredCheckpoint, outputs: Sequence[OutputTensor]
) -> Mapping[str, Any] | None:
    """Return the settings of codes, with the new keys of their shapes."""
    settings = None if stored.quantized else stored.manifest.quantization
    if settings is None or "shapes" not in settings:
        return settings
    names: dict[str, str] = {}
    for output in outputs:
        names.update((part.key, output.name) for part in output.mapped.parts)
    shapes = {names[key]: shape for key, shape in settings["shapes"].items() if key in names}
    return {**settings, "shapes": shapes}


def _outputs(stored: StoredCheckpoint, request: ReshardRequest) -> list[OutputTensor]:
    """Return the tensors of the new checkpoint; one of objects alone has none."""
    manifest = stored.manifest
    rules = request.rules
    if request.keys is None and all(name == OBJECT for name in manifest.dtypes):
        return []
    # Rules may make different tensors of tied ones, which are written one by one then.
    tensors = select_tensors(manifest, request.keys, bool(rules), hidden_keys(stored))
    outputs = plan_tensors(
        tensors,
        rules,
        request.rename,
        request.dtype,
        keep_unmatched=True,
        tied=manifest.aliases,
    )
    check_codes(stored, outputs)
    return outputs


def _aliases(stored: StoredCheckpoint, request: ReshardRequest) -> dict[str, str]:
    """Return the tied keys of the new checkpoint, under their new names."""
    manifest = stored.manifest
    rename = request.rename
    if request.rules or not manifest.aliases:
        return {}
    hidden = hidden_keys(stored)
    chosen = select_tensors(manifest, request.keys, False, hidden)
    names = {manifest.key_index[name]: name for name in chosen}
    left_out = hidden.union(chosen)
    return {
        renamed(alias, rename): renamed(names[manifest.key_index[alias]], rename)
        for alias in manifest.aliases
        if alias not in left_out and (request.keys is None or matches(alias, request.keys))
    }


def _read_objects(
    stored: StoredCheckpoint, common_state: CommonStateDict | None
) -> list[ShardedObject]:
    """Read the encoded objects; there is common state in any case."""
    shards: list[ShardedObject] = []
    keys = object_keys(stored)
    if common_state is not None:
        keys.remove(COMMON_KEY)
        given = ready_to_save(ShardedObject(COMMON_KEY, common_state, (1,), (0,)), False)
        assert isinstance(given, ShardedObject)
        shards.append(given)
    for key in keys:
        shape = (1,) if key == COMMON_KEY else stored.global_shape(key)
        cells = read_encoded(stored, key)
        shards += [ShardedObject(key, data, shape, offset) for offset, data in cells.items()]
    return shards


# --- Division -------------------------------------------------------------------------------------


class _NewShard(NamedTuple):
    """A shard, for a tensor without data, and its new ranks."""

    shard: Shard
    ranks: range


@dataclass(frozen=True)
class _Layout:
    """The files of the new checkpoint.

    Attributes:
        manifest: of the new checkpoint, without chunks.
        files: of each of the new ranks.
        objects: the files of objects among them, by name.
    """

    manifest: Manifest
    files: Sequence[Sequence[PlannedFile]]
    objects: Mapping[str, NewFile]

    @property
    def all_files(self) -> list[PlannedFile]:
        """The files of all new ranks."""
        return list(itertools.chain(*self.files))

    def share(self, rank: int, num_ranks: int) -> list[PlannedFile]:
        """Return the files that one of the ranks that work together writes."""
        return list(itertools.chain(*self.files[rank::num_ranks]))

    def digest(self) -> int:
        """Return a number that is the same for equal plans."""
        content = [(file.name, file.chunk_bytes) for file in self.all_files]
        return checksum(json.dumps([self.manifest.keys, content]).encode()) >> 3


def _lay_out(
    stored: StoredCheckpoint,
    outputs: Sequence[OutputTensor],
    objects: Sequence[ShardedObject],
    request: ReshardRequest,
) -> _Layout:
    """Give every byte an owner and a place in one of its files."""
    new = list(_divide_tensors(outputs, request))
    for index, shard in enumerate(objects):
        # Each object has one rank.
        first = index % request.num_ranks
        new.append(_NewShard(shard, range(first, first + 1)))
    # Each is described once, by the first of its new ranks, and tables list rows by rank.
    new.sort(key=lambda held: held.ranks.start)
    shards = [held.shard for held in new]
    described = shard_table(shards)
    table = merge_tables([described])
    holders = [new[shard_id].ranks for shard_id in table.shard_ids.tolist()]
    ranks = np.array([held.start for held in holders], np.int64)
    table = table._replace(ranks=ranks, is_main=np.ones(len(ranks), bool))
    manifest = manifest_of_keys(table, {})
    unchanged = _unchanged(stored.manifest, outputs)
    places = [unchanged.get(key, -1) for key in manifest.keys]
    manifest = manifest.replaced(
        aliases=_aliases(stored, request),
        quantization=_settings(stored, outputs),
        figures=take_figures(stored.manifest.figures, places),
    )
    files: list[list[PlannedFile]] = []
    object_files: dict[str, NewFile] = {}
    for rank, pieces in enumerate(plan_held(table, request.num_ranks, holders)):
        of_rank, of_objects = lay_out_files(rank, described, pieces)
        if of_objects:
            encoded = encoded_objects(of_objects, shards)
            planned, new_file = object_file_of(rank, of_objects, encoded)
            of_rank.append(planned)
            object_files[planned.name] = new_file
        files.append(of_rank)
    return _Layout(manifest, files, object_files)


def _divide_tensors(
    outputs: Iterable[OutputTensor], request: ReshardRequest
) -> Iterator[_NewShard]:
    """Divide tensors as their grids say."""
    num_ranks = request.num_ranks
    grids = request.grids
    used: set[str] = set()
    for output in outputs:
        shape = output.mapped.shape
        dtype = FROM_NAME[output.dtype]
        pattern = next((p for p in grids if matches(output.name, p)), None)
        regions = [whole(shape)]
        if pattern is not None:
            used.add(pattern)
            regions = _grid_regions(output.name, shape, tuple(grids[pattern]))
        for index, region in enumerate(regions):
            shard = ShardedTensor(
                output.name, None, dtype, region.shape, shape, region.offset, None
            )
            step = min(len(regions), num_ranks)
            yield _NewShard(shard, range(index % num_ranks, num_ranks, step))
    unused = sorted(grids.keys() - used)
    if unused:
        raise CheckpointingException(
            f"The grids for {unused} fit no tensor: no key matches, or an earlier one does."
        )


def _grid_regions(key: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[Region]:
    """Divide a tensor evenly into a grid."""
    if len(grid) != len(shape) or any(
        not 1 <= n <= max(1, size) for n, size in zip(grid, shape, strict=False)
    ):
        raise CheckpointingException(
            f"Key {key!r} of shape {shape} cannot be divided into a grid of {grid}: give one "
            "number of parts for each axis, from 1 to its size."
        )
    axes = []
    for n, size in zip(grid, shape, strict=True):
        edges = [i * size // n for i in range(n + 1)]
        axes.append(list(itertools.pairwise(edges)))
    regions = []
    for cell in itertools.product(*axes):
        offset = tuple(start for start, _ in cell)
        regions.append(Region(offset, tuple(stop - start for start, stop in cell)))
    return regions


def _plan_save(ranks: Ranks, layout: _Layout) -> SavePlan:
    """Plan the manifest of the files that the ranks write."""
    tables = [chunk_table(layout.share(rank, ranks.size)) for rank in range(ranks.size)]
    num_blocks = sum(int((-(-table.num_bytes // BLOCK_BYTES)).sum()) for table in tables)
    names: dict[int, str] = {}
    if needs_checksum_files(num_blocks):
        names = {rank: checksum_file_name(rank) for rank, table in enumerate(tables) if table.files}
    for rank, name in names.items():
        files = [*tables[rank].files, ShardFile(name, 0, 0, 0)]
        tables[rank] = tables[rank]._replace(files=files)
    # On all ranks: it may refuse.
    manifest = planned_manifest(layout.manifest, tables)
    plan = SavePlan(0, [], [], manifest if ranks.is_coordinator else None)
    return plan._replace(checksum_file=names.get(ranks.rank))
