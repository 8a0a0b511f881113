"""Plans that are made of a manifest: right, or none, whatever the manifest says."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from distckpt._base.errors import CheckpointingException
from distckpt._format import manifest_parts
from distckpt._format.columns import pack, unpack
from distckpt._format.file_table import FileTable
from distckpt._format.manifest import Manifest
from distckpt._format.planned_manifest import planned_manifest, report_of
from distckpt._mapping.wrappers import ShardedObject
from distckpt._plan import layout, stored_plan
from distckpt._plan.layout import (
    chunk_table,
    lay_out_files,
    lay_out_object_file,
    manifest_of_keys,
    open_object_file,
    structure_of_all,
)
from distckpt._plan.save import find_aliases, plan_owners
from distckpt._state.shards import merge_tables, region_view, shard_table
from distckpt._state.validation import num_replicated, replica_factors, stride_of
from distckpt.mapping import ShardedTensor

NUM_RANKS = 3
NUM_CHANGES = 300
WHOLE = {
    "rows": np.arange(60, dtype=np.float32).reshape(10, 6),
    "blocks": np.arange(100, 172, dtype=np.float32).reshape(6, 12),
    "copied": np.arange(200, 4400, dtype=np.float32).reshape(300, 14),
    "flat": np.arange(5000, 5035, dtype=np.float32).reshape(5, 7),
}


def shards_of(rank):
    copied = torch.from_numpy(WHOLE["copied"].copy())
    first, last = rank * 35 // NUM_RANKS, (rank + 1) * 35 // NUM_RANKS
    flat = torch.from_numpy(WHOLE["flat"].reshape(-1)[first:last].copy())
    shards = [
        ShardedTensor.from_rank_offsets("copied", copied, replica_id=rank),
        ShardedTensor.from_rank_offsets("tie", copied, replica_id=rank),
        ShardedTensor(
            "flat",
            flat,
            flat.dtype,
            (5, 7),
            (5, 7),
            (0, 0),
            None,
            flattened_range=slice(first, last),
        ),
        ShardedObject("objects", b"object", (NUM_RANKS,), (rank,)),
    ]
    for key, axis in (("rows", 0), ("blocks", 1)):
        parts = np.array_split(WHOLE[key], NUM_RANKS, axis)
        offset = [0, 0]
        offset[axis] = sum(part.shape[axis] for part in parts[:rank])
        part = torch.from_numpy(parts[rank].copy())
        shape = tuple(part.shape)
        shards.append(
            ShardedTensor(key, part, part.dtype, shape, WHOLE[key].shape, tuple(offset), None)
        )
    return shards


SHARDS = [shards_of(rank) for rank in range(NUM_RANKS)]
TABLES = [shard_table(shards) for shards in SHARDS]
STRUCTURE = structure_of_all(table.description() for table in TABLES)


def saved_manifest():
    """Return the manifest of a save by the ranks, as it is read."""
    merged = merge_tables(TABLES)
    aliases = find_aliases(merged)
    owned = plan_owners(merged, NUM_RANKS, aliases)
    factors = replica_factors(merged)
    ends = np.cumsum([len(table.key_ids) for table in TABLES])[:-1]
    manifest = manifest_of_keys(merged, aliases)
    encoded = [stored_plan.factors_to_bytes(each) for each in np.split(factors, ends)]
    manifest.plan = stored_plan.note_of_plan(STRUCTURE, stride_of(num_replicated(factors)), encoded)
    tables, reports = [], []
    for rank, (table, pieces) in enumerate(zip(TABLES, owned, strict=True)):
        files, objects = lay_out_files(rank, table, pieces)
        tables.append(chunk_table([*files, open_object_file(rank, objects)]))
        written = chunk_table([lay_out_object_file(rank, objects, {"objects": 6})])
        # No chunk is longer than a block.
        checksums = np.arange(sum(len(file.chunks) for file in files) + 1, dtype=np.uint64)
        reports.append(report_of(written.files, written.num_bytes, checksums))
    planned = planned_manifest(manifest, tables)
    return planned.manifest.to_bytes(planned.completed(reports))


SAVED = saved_manifest()


def plans_from(data):
    """Return the plans of all ranks that a manifest tells of; None where there is none."""
    plans = []
    for rank, table in enumerate(TABLES):
        layout.loaded_plans.clear()
        stored_plan.remember(rank, NUM_RANKS, Manifest.from_bytes(data, "manifest"), "ab" * 8)
        if not layout.loaded_plans:
            return None
        found = stored_plan.restored(layout.loaded_plans[0], table, table.description())
        if found is None:
            return None
        plans.append(found)
    structure = plans[0].plan.manifest.manifest.plan["structure"]
    return plans if structure == STRUCTURE.hex() else None


def are_compared(plans):
    """Tell whether equal replicas count as equal, and others do not."""
    total = 0
    for found, shards in zip(plans, SHARDS, strict=True):
        plan = found.with_all_replicas
        for (shard_id, region), weight in zip(plan.replicas or (), plan.weights, strict=True):
            total += int(weight) * (1 + int(region_view(shards[shard_id], region).sum()))
    return total % 2**64 == 0 and any(len(found.with_all_replicas.weights) for found in plans)


def check(plans):
    """Check that what the ranks would write is everything, once, and where the manifest says."""
    filled = {key: np.full(whole.shape, np.nan, np.float32) for key, whole in WHOLE.items()}
    written, objects = {}, []
    for found, shards in zip(plans, SHARDS, strict=True):
        plan = found.plan
        for file in plan.files:
            position = len(file.header)
            for chunk in file.chunks:
                parts = [region_view(shards[i], region) for i, region in chunk.pieces]
                content = torch.cat([part.reshape(-1) for part in parts]).numpy()
                place = filled[chunk.key][chunk.region.slices()]
                assert np.isnan(place).all()
                place[...] = content.reshape(chunk.region.shape)
                written[file.name, position] = (chunk.key, chunk.region, chunk.num_bytes)
                position += chunk.num_bytes
        objects += [chunk.region.offset for chunk in plan.objects]
    for key, whole in WHOLE.items():
        np.testing.assert_array_equal(filled[key], whole, key)
    assert sorted(objects) == [(rank,) for rank in range(NUM_RANKS)]
    planned = plans[0].plan.manifest
    chunks = planned.chunks
    assert planned.manifest.aliases == {"tie": "copied"}
    listed = {}
    for row in range(len(chunks.key_ids)):
        key = planned.manifest.keys[chunks.key_ids[row]]
        if key == "objects":
            continue
        place = chunks.files[chunks.file_ids[row]].name, int(chunks.first_bytes[row])
        shape = tuple(chunks.shapes[row].tolist())
        listed[place] = (
            key,
            (tuple(chunks.offsets[row].tolist()), shape),
            int(chunks.num_bytes[row]),
        )
    assert listed == written
    # The checksums of the ranks, which are all different, come to the places of their chunks.
    again = planned.completed(
        [
            report_of(
                [layout.ShardFile("", 4102, 4096, 1)],
                np.array([6]),
                np.arange(sum(len(f.chunks) for f in found.plan.files) + 1, dtype=np.uint64),
            )
            for found in plans
        ]
    )
    return planned.manifest.to_bytes(again)


def opened_in_parts(folder, damaged_ranks):
    """Divide the manifest of the save, and move the chunks of some ranks out of their files."""
    saved = Manifest.from_bytes(SAVED, "saved")
    names = [f"{rank + 1:05d}" for rank in damaged_ranks]
    is_damaged = np.array([any(name in file.name[8:22] for name in names) for file in saved.files])
    first_bytes = saved.chunks.first_bytes + (is_damaged[saved.chunks.file_ids] << 40)
    rest, parts = manifest_parts.divided(saved.chunks._replace(first_bytes=first_bytes))
    (folder / "objects").mkdir()
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    data = saved.to_bytes(rest._replace(files=FileTable.of(rest.files)))
    return Manifest.from_bytes(manifest_parts.joined(data, str(folder)), str(folder))


@pytest.mark.parametrize(("damaged_ranks", "is_usable"), [([], True), ([2], False), ([1], False)])
def test_rank_0_looks_at_the_parts_of_others_when_it_saves(
    damaged_ranks, is_usable, tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest_parts, "PART_ROWS", 1)
    opened = opened_in_parts(tmp_path, damaged_ranks)
    layout.loaded_plans.clear()
    stored_plan.remember(0, NUM_RANKS, opened, "ab" * 8)
    found = stored_plan.restored(layout.loaded_plans[0], TABLES[0], TABLES[0].description())
    assert (found is not None) == is_usable
    if not is_usable:
        with pytest.raises(CheckpointingException, match="outside its file"):
            _ = opened.chunks


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_parts_that_are_damaged_where_nobody_has_read_leave_no_plan(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_parts, "PART_ROWS", 1)
    opened = opened_in_parts(tmp_path, range(NUM_RANKS))
    layout.loaded_plans.clear()
    stored_plan.remember(rank, NUM_RANKS, opened, "ab" * 8)
    assert not layout.loaded_plans
    with pytest.raises(CheckpointingException, match="outside its file"):
        _ = opened.chunks


def test_the_plan_is_the_one_that_was_made():
    plans = plans_from(SAVED)
    again, saved = Manifest.from_bytes(check(plans), "again"), Manifest.from_bytes(SAVED, "saved")
    for name, column in saved.chunks.columns().items():
        np.testing.assert_array_equal(again.chunks.columns()[name], column, name)
    assert again.plan == saved.plan
    assert are_compared(plans)


def flipped(data, generator):
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 1, 2, 8])):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def change_column(fields, columns, generator):
    name = generator.choice([n for n in columns if columns[n].size and n != "key_ndims"])
    column = columns[name].reshape(-1)
    i, j = generator.randrange(column.size), generator.randrange(column.size)
    if generator.random() < 0.5:
        column[i] ^= column.dtype.type(1 << generator.randrange(8))
    else:
        column[[i, j]] = column[[j, i]]


def change_file(fields, columns, generator):
    first, second = (generator.choice(fields["files"]) for _ in range(2))
    part = generator.choice([slice(0, 1), slice(1, 4), slice(0, 4)])
    first[part], second[part] = second[part], first[part]


def change_note(fields, columns, generator):
    changed = flipped(json.dumps(fields["plan"]).encode(), generator)
    try:
        fields["plan"] = json.loads(changed)
    except ValueError:
        fields["plan"] = generator.choice([None, 1, "plan", [], {"ranks": 3}])


def drop_chunk(fields, columns, generator):
    number = generator.randrange(len(columns["key_ids"]))
    for name in columns.keys() - {"key_shapes", "key_ndims"}:
        columns[name] = np.delete(columns[name], number, axis=0)


def change_keys(fields, columns, generator):
    i, j = (generator.randrange(len(fields["keys"])) for _ in range(2))
    fields["keys"][i], fields["keys"][j] = fields["keys"][j], fields["keys"][i]


def change_aliases(fields, columns, generator):
    fields["aliases"] = generator.choice([{}, {"tie": "rows"}, {"other": "copied"}])


CHANGES = [change_column, change_file, change_note, drop_chunk, change_keys, change_aliases]


def rewritten(data, generator):
    """Change numbers and names of a manifest, so that it is still one."""
    fields, columns = unpack(data)
    columns = {name: column.copy() for name, column in columns.items()}
    for _ in range(generator.choice([1, 1, 2, 3])):
        change = generator.choice(CHANGES)
        # What was changed before may have left nothing to change.
        if isinstance(fields["plan"], dict) or change is not change_note:
            change(fields, columns, generator)
    return pack(fields, columns)


@pytest.mark.parametrize("change", [flipped, rewritten])
def test_whatever_is_changed_the_plan_is_right_or_none(change):
    generator = random.Random(change.__name__)
    num_used = 0
    for _ in range(NUM_CHANGES):
        data = change(SAVED, generator)
        try:
            plans = plans_from(data)
        except CheckpointingException:
            # Loading it fails.
            continue
        if plans is not None:
            num_used += 1
            try:
                check(plans)
            except AssertionError as error:
                fields, _ = unpack(data)
                raise AssertionError(json.dumps(fields)) from error
    assert num_used < NUM_CHANGES
