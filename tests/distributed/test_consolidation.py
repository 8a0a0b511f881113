"""Consolidation and import by several ranks: folders that torch really wrote, work divided,
failures that reach all.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distckpt
from distckpt import CheckpointExistsError, CorruptCheckpointError, RankFailedError, ShardedTensor
from distckpt.hf import consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank
from tests.support.disk import flip, header_of, tree_of
from tests.support.harness import ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.hf_folders import read_export, same_bytes, shard_name, write_folder, write_plain
from tests.support.hooked_store import hooked_reads
from tests.support.read_counts import counted_reads
from tests.support.reference import needs_torchs_hugging_face
from tests.support.states import numbered

# ---- folders that torch wrote

WEIGHTS = {
    "rows.weight": (numbered(12, 5), [Shard(0)]),
    "columns.weight": (numbered(6, 24, dtype=torch.bfloat16), [Shard(1)]),
    "uneven.rows": (numbered(7, 3), [Shard(0)]),
    "uneven.columns": (numbered(3, 2, 7, dtype=torch.float64), [Shard(2)]),
    "fewer.than.ranks": (numbered(1, 4), [Shard(0)]),
    "copied.norm": (numbered(9), [Replicate()]),
    "ids": (numbered(8, dtype=torch.int64), [Shard(0)]),
    "mask": (torch.arange(8) % 3 == 0, [Replicate()]),
    "scalar": (torch.tensor(2.5), [Replicate()]),
}
GRID = {
    "both.axes": (numbered(8, 6), [Shard(0), Shard(1)]),
    "only.inner": (numbered(5, 7), [Replicate(), Shard(1)]),
}
ALL = {key: tensor for key, (tensor, _) in (WEIGHTS | GRID).items()}


def save_with_torch(path, mapping=None):
    """Save with torch's writer, as its users do."""
    num_ranks = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = init_device_mesh("cpu", (num_ranks,))
        state = {
            key: distribute_tensor(tensor, line, places)
            for key, (tensor, places) in WEIGHTS.items()
        }
        if num_ranks == 4:
            grid = init_device_mesh("cpu", (2, 2))
            state |= {
                key: distribute_tensor(tensor, grid, places)
                for key, (tensor, places) in GRID.items()
            }
        state = {key: tensor for key, tensor in state.items() if mapping is None or key in mapping}
        writer = dcp.HuggingFaceStorageWriter(
            path, save_distributed=True, fqn_to_index_mapping=mapping
        )
        dcp.save(state, storage_writer=writer)


def column_parts(tensors, rank, num_ranks):
    """Ask for the rank's share of the last axis of every tensor, cut as unevenly as it is."""
    state, expected = {}, {}
    for key, tensor in tensors.items():
        if tensor.ndim == 0:
            continue
        size = tensor.shape[-1]
        low, high = rank * size // num_ranks, (rank + 1) * size // num_ranks
        expected[key] = tensor[..., low:high]
        local_shape = tuple(expected[key].shape)
        offset = (*(0,) * (tensor.ndim - 1), low)
        target = torch.zeros(local_shape, dtype=tensor.dtype)
        state[key] = ShardedTensor(
            key, target, tensor.dtype, local_shape, tuple(tensor.shape), offset, None
        )
    return state, expected


MAPPING = {
    key: 1 + index % 3 for index, key in enumerate(sorted(ALL)) if key not in ("scalar", "mask")
}
MAPPINGS = {"one file": None, "three files": MAPPING}


def expected_of(num_ranks, mapping):
    weights = ALL if num_ranks == 4 else {key: ALL[key] for key in WEIGHTS}
    return {key: tensor for key, tensor in weights.items() if mapping is None or key in mapping}


def export_what_torch_wrote(rank, root):
    num_ranks, reports = dist.get_world_size(), []
    for name, mapping in MAPPINGS.items():
        folder = f"{root}/{name}"
        save_with_torch(f"{folder}/sharded", mapping)
        dist.barrier()
        report = distckpt.consolidate(
            f"{folder}/sharded", f"{folder}/out", fqn_to_index_mapping=mapping
        )
        reports.append((report.files, report.num_tensors))
        numbers = mapping and {key: mapping[key] for key in expected_of(num_ranks, mapping)}
        consolidate_safetensors_files_on_every_rank(f"{folder}/sharded", f"{folder}/every", numbers)
        if rank == 1:
            # The other ranks do not call: no exchange may be involved.
            consolidate_safetensors_files(f"{folder}/sharded", f"{folder}/alone", numbers)
        dist.barrier()
        for place in ("sharded", "out"):
            state, parts = column_parts(expected_of(num_ranks, mapping), rank, num_ranks)
            assert same_bytes(distckpt.load(state, f"{folder}/{place}"), parts)
    return reports


@needs_torchs_hugging_face
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_torch_wrote_is_exported_and_loaded(num_ranks, tmp_path):
    first, *others = run(export_what_torch_wrote, num_ranks, str(tmp_path))
    assert all(reports == first for reports in others), "every rank gets the same report"
    for (name, mapping), (files, num_tensors) in zip(MAPPINGS.items(), first, strict=True):
        expected = expected_of(num_ranks, mapping)
        assert num_tensors == len(expected)
        assert len(files) == (1 if mapping is None else 3)
        for place in ("out", "every", "alone"):
            assert same_bytes(read_export(tmp_path / name / place), expected)
        assert same_bytes(distckpt.open(tmp_path / name / "sharded").read_tensors(), expected)


def save_twice_with_torch(rank, folder):
    save_with_torch(folder)
    dist.barrier()
    save_with_torch(folder, {key: 1 + (key == "ids") for key in ALL})
    dist.barrier()
    return error_of(distckpt.consolidate, folder, f"{folder}-out")


@needs_torchs_hugging_face
def test_what_torch_left_of_an_earlier_save_is_noticed(tmp_path):
    for error in run(save_twice_with_torch, 2, str(tmp_path / "sharded")):
        assert isinstance(error, CorruptCheckpointError)
        assert re.search(r"'\S+' .*is stored several times.*-model-00001-of-00001\.", str(error))
        assert re.search(r"-model-0000\d-of-00002\.", str(error))
    assert os.listdir(tmp_path) == ["sharded"]


# ---- the work is divided


def io_count(field):
    return int(re.search(rf"^{field}: (\d+)$", Path("/proc/self/io").read_text(), re.M)[1])


SIZES = {f"layers.{i}.w": (64 + 32 * (i % 3), 512) for i in range(12)}


def tp_state(rank, num_ranks):
    state = {}
    for key, shape in SIZES.items():
        part = numbered(*shape).chunk(num_ranks, 1)[rank].contiguous()
        state[key] = ShardedTensor.from_rank_offsets(key, part, (1, rank, num_ranks))
    return state


def save_and_export(rank, folder, num_ranks):
    distckpt.save(tp_state(rank, num_ranks), f"{folder}/in")
    before = io_count("wchar")
    report = distckpt.consolidate(f"{folder}/in", f"{folder}/out", max_file_bytes=400_000)
    return io_count("wchar") - before, report


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_writes_its_share_of_the_bytes(run, num_ranks, tmp_path):
    values = run(save_and_export, num_ranks, str(tmp_path), num_ranks)
    tensors = {key: numbered(*shape) for key, shape in SIZES.items()}
    assert same_bytes(read_export(tmp_path / "out"), tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    largest = max(path.stat().st_size for path in (tmp_path / "out").iterdir())
    for written, report in values:
        assert total / num_ranks - largest < written < total / num_ranks + largest
        assert (report.num_tensors, report.num_bytes) == (len(tensors), total)
    assert sum(written for written, _ in values) < total * 1.1


def merge_both(rank, folder):
    paths = [f"{folder}/1", f"{folder}/2"]
    distckpt.merge(paths, f"{folder}/out", weights=(3, -1), max_file_bytes=400_000)
    return error_of(distckpt.merge, [*paths, f"{folder}/none"], f"{folder}/other")


def test_merging_on_two_ranks(run, tmp_path):
    for number in (1, 2):
        tensors = {key: number * numbered(*shape) for key, shape in SIZES.items()}
        write_folder(tmp_path / f"{number}", tensors, 0, number)
    for error in run(merge_both, 2, str(tmp_path)):
        assert "none" in str(error)
    assert same_bytes(
        read_export(tmp_path / "out"), {key: numbered(*shape) for key, shape in SIZES.items()}
    )
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "out"]


# ---- failures reach every rank


def export_damaged(rank, folder, options):
    error = error_of(distckpt.consolidate, f"{folder}/in", f"{folder}/out", **options)
    return error, sum_over_ranks(rank + 1)


@pytest.fixture
def two_files(tmp_path):
    """A checkpoint that is exported in two files, of which rank 0 writes the larger, and an earlier
    export.
    """
    state = {
        key: ShardedTensor.from_rank_offsets(key, numbered(rows, 512))
        for key, rows in {"a": 1200, "b": 800}.items()
    }
    distckpt.save(state, tmp_path / "in")
    write_folder(tmp_path / "other", {"old": numbered(3)}, 0, 1)
    distckpt.consolidate(tmp_path / "other", tmp_path / "out")
    return {"fqn_to_index_mapping": {"a": 1, "b": 2}, "overwrite": True}


def flip_last_bit(path):
    flip(path, -1)


def test_a_shard_that_only_one_rank_needs_is_damaged(run, tmp_path, two_files):
    (path,) = (tmp_path / "in" / "tensors").iterdir()
    assert (
        max(header_of(path)[1].items(), key=lambda item: item[1].get("data_offsets", [0])[0])[0]
        == "b"
    )
    flip_last_bit(path)
    before = tree_of(tmp_path / "out")
    for error, total in run(export_damaged, 3, str(tmp_path), two_files):
        assert total == 6, "the process group still works"
        assert isinstance(error, RankFailedError)
        assert list(error.failures) == [1]
        assert isinstance(error.failures[1], CorruptCheckpointError)
        assert path.name in str(error)
        assert "'b'" in str(error)
    assert tree_of(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["in", "other", "out"]


def test_what_the_coordinator_finds_is_raised_everywhere(run, tmp_path, two_files):
    before = tree_of(tmp_path / "out")
    for error, total in run(export_damaged, 3, str(tmp_path), two_files | {"overwrite": False}):
        assert isinstance(error, CheckpointExistsError)
        assert total == 6
    for error, total in run(
        export_damaged, 3, str(tmp_path), two_files | {"extra_files_from": f"{tmp_path}/absent"}
    ):
        assert isinstance(error, FileNotFoundError | RankFailedError)
        assert "absent" in str(error)
        assert total == 6
    assert tree_of(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["in", "other", "out"]


def value_error_on_every_rank(rank, folder):
    error = error_of(consolidate_safetensors_files_on_every_rank, f"{folder}/in", f"{folder}/out")
    return error, sum_over_ranks(1)


def lost_key_on_every_rank(rank, folder):
    mapping = {"w": 1, "lost": 2}
    call = consolidate_safetensors_files_on_every_rank
    error = error_of(call, f"{folder}/in", f"{folder}/out", mapping)
    return error, sum_over_ranks(1)


def test_under_torchs_name_a_key_that_is_lost_is_an_error_on_all_ranks(run, tmp_path):
    write_folder(tmp_path / "in", {"w": numbered(9, 3)}, 0, 3)
    for error, total in run(lost_key_on_every_rank, 2, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert "names 'lost', which no shard" in str(error)
        assert total == 2
    assert os.listdir(tmp_path) == ["in"]


def test_under_torchs_name_all_ranks_raise_a_value_error(run, tmp_path):
    write_folder(tmp_path / "in", {"w": numbered(9, 3)}, 0, 3)[1].unlink()
    for error, total in run(value_error_on_every_rank, 2, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert "'w'" in str(error)
        assert shard_name(3) in str(error)
        assert total == 2
    assert os.listdir(tmp_path) == ["in"]


def export_in_a_group(rank, folder):
    """Ranks 1 and 2 export; rank 0 does not take part."""
    group = dist.new_group([1, 2])
    error = None
    if rank:
        consolidate_safetensors_files_on_every_rank(
            f"{folder}/in", f"{folder}/every", process_group=group
        )
        distckpt.consolidate(f"{folder}/in", f"{folder}/out", process_group=group)
    else:
        error = error_of(distckpt.consolidate, f"{folder}/in", f"{folder}/out", process_group=group)
    return error, sum_over_ranks(1)


def test_a_group_of_the_ranks_exports(run, tmp_path):
    write_folder(tmp_path / "in", {"w": numbered(9, 3)}, 0, 3)
    outcomes = run(export_in_a_group, 3, str(tmp_path))
    assert [total for _, total in outcomes] == [3, 3, 3]
    assert "not a member" in str(outcomes[0][0])
    for place in ("every", "out"):
        assert same_bytes(read_export(tmp_path / place), {"w": numbered(9, 3)})


def export_until_killed(rank, folder, options):
    if rank == 1:
        with hooked_reads(lambda path, first, stop: ask_parent() if first else None):
            return error_of(
                distckpt.consolidate, f"hooked://{folder}/in", f"{folder}/out", **options
            )
    return error_of(distckpt.consolidate, f"hooked://{folder}/in", f"{folder}/out", **options)


def test_a_rank_that_is_killed_does_not_make_the_others_wait(tmp_path, two_files):
    before = tree_of(tmp_path / "out")
    with launched(export_until_killed, 3, str(tmp_path), two_files, group_timeout=30) as launch:
        launch.wait_for_signal(1)
        launch.kill(1)
        outcomes = launch.values()
    for survivor in (0, 2):
        assert isinstance(outcomes[survivor], RankFailedError)
        assert "Lost contact with rank 1 " in str(outcomes[survivor])
    assert tree_of(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["in", "other", "out"]


# ---- what is read


def read_part(rank, directory, shape, axis, num_parts):
    target = torch.zeros([n // num_parts if i == axis else n for i, n in enumerate(shape)])
    asked = {"w": ShardedTensor.from_rank_offsets("w", target, (axis, rank, num_parts))}
    with counted_reads() as counts:
        # With fewer ranks than parts, some parts are asked for by nobody.
        distckpt.load(asked, directory, validate_access_integrity=False)
    assert torch.equal(target, numbered(*shape).chunk(num_parts, axis)[rank])
    return counts.num_bytes, target.nbytes


@pytest.mark.parametrize(
    ("shape", "axis", "num_parts", "limit"),
    [
        pytest.param((4096, 4096), 0, 2, 1.02, id="rows"),
        pytest.param((4096, 4096), 1, 2, 1.02, id="columns"),
        pytest.param((32, 524288), 1, 4, 1.02, id="long columns"),
        pytest.param((8, 1048576), 1, 2, 1.02, id="longer columns"),
        # What lies between short runs is read along: twice as much as is needed.
        pytest.param((8192, 512), 1, 2, 2.02, id="narrow columns"),
    ],
)
def test_a_rank_reads_its_part_only(run, tmp_path, shape, axis, num_parts, limit):
    write_plain(tmp_path / "model.safetensors", {"w": numbered(*shape)})
    # The header, and modules that are imported meanwhile.
    others = 1 << 20
    for read, wanted in run(read_part, 2, str(tmp_path), shape, axis, num_parts):
        assert read <= wanted * limit + others
