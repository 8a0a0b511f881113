"""Ranks that want the same bytes read each of them once. Expected values are those of numpy
indexing.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distckpt
from benchmarks.measure import peak_memory_bytes
from distckpt import RankFailedError, ShardedTensor
from distckpt.megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from distckpt.strategies.safetensors import SafetensorsLoadStrategy
from tests.support.harness import ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.hf_folders import write_indexed
from tests.support.hooked_store import hooked_reads
from tests.support.layouts import (
    Layout,
    bytes_of,
    even_part,
    flat_part,
    global_bytes,
    irregular_shard,
    tensor_from,
)
from tests.support.machines import on_machine
from tests.support.read_counts import counted_reads

MIB = 1 << 20

# key -> global shape, dtype, axis that tensor parallel ranks divide (None: each has all)
TENSORS = {
    "large": ((3072, 1024), torch.float32, 0),
    "columns": ((700, 1000), torch.bfloat16, 1),
    "odd": ((33, 1001, 7), torch.int16, None),
    "norm": ((10,), torch.float32, None),
    "padded": ((11,), torch.int32, None),
    "steps": ((), torch.int64, None),
    "bytes": ((5,), torch.uint8, None),
    "flags": ((3,), torch.bool, None),
    "eighths": ((16, 3), torch.float8_e4m3fn, 0),
    "none": ((0, 4), torch.float32, None),
}


def content_of(key):
    shape, dtype, _ = TENSORS[key]
    content = global_bytes(key, shape, dtype)
    return content % 2 if dtype == torch.bool else content


def part_of(key, layout, rank):
    """Return the slices of a global tensor that a rank has."""
    shape, _, axis = TENSORS[key]
    slices = [slice(0, size) for size in shape]
    if axis is not None:
        slices[axis] = even_part(shape[axis], layout.tp, layout.position(rank)[0])
    return tuple(slices)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of one process with all tensors, their contents known."""
    path = str(tmp_path_factory.mktemp("shared") / "checkpoint")
    distckpt.save(
        {
            key: ShardedTensor.from_rank_offsets(key, tensor_from(content_of(key), dtype))
            for key, (_, dtype, _) in TENSORS.items()
        },
        path,
    )
    return path


@contextmanager
def reads_of_tensors():
    """Count what is read of tensors from a hooked store: yields a list that gets (file, start,
    stop).
    """
    spans, lock = [], threading.Lock()

    def note(path, start, stop):
        if "/tensors/" in path and start is not None:
            with lock:
                spans.append((os.path.basename(path), start, stop))

    with hooked_reads(note):
        yield spans


def blank_targets(layout, rank):
    state = {}
    for key, (_, dtype, _) in TENSORS.items():
        blank = np.zeros_like(content_of(key))
        state[key] = irregular_shard(
            key, blank, dtype, part_of(key, layout, rank), layout.position(rank)[2]
        )
    return state


def load_counting(rank, layout, path, kwargs):
    """Load, and return the keys that are wrong, what was read, and the number of bytes asked
    for.
    """
    state = blank_targets(layout, rank)
    with reads_of_tensors() as spans:
        loaded = distckpt.load(state, f"hooked://{path}", validate_access_integrity=False, **kwargs)
    wrong = [
        key
        for key in TENSORS
        if not np.array_equal(bytes_of(loaded[key]), content_of(key)[part_of(key, layout, rank)])
        or loaded[key] is not state[key].data
    ]
    return (
        wrong,
        spans,
        sum(tensor.nbytes for tensor in loaded.values() if isinstance(tensor, torch.Tensor)),
    )


def covered_twice(spans):
    """Return how many bytes were read more than once."""
    edges = sorted(
        (file, position, step) for file, a, b in spans for position, step in ((a, 1), (b, -1))
    )
    twice, depth, last = 0, 0, None
    for _, position, step in edges:
        if depth > 1:
            twice += position - last
        depth, last = depth + step, position
    return twice


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replicas_read_each_byte_once(run, num_ranks, checkpoint):
    results = run(load_counting, num_ranks, Layout(dp=num_ranks), checkpoint, {"share_reads": "on"})
    assert [wrong for wrong, _, _ in results] == [[]] * num_ranks
    read = [sum(stop - start for _, start, stop in spans) for _, spans, _ in results]
    assert sum(read) == results[0][2], "once in total"
    assert covered_twice([span for _, spans, _ in results for span in spans]) == 0
    # As evenly as units of 2 MiB allow.
    assert all(abs(num_bytes - sum(read) / num_ranks) <= 2 * MIB for num_bytes in read)
    alone = run(load_counting, num_ranks, Layout(dp=num_ranks), checkpoint, {"share_reads": "off"})
    assert [sum(stop - start for _, start, stop in spans) for _, spans, _ in alone] == [
        results[0][2]
    ] * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "verify"),
    [
        (4, True),
        (4, False),
        (8, True),
        # Along a tree.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(18, True), (32, False)]),
    ],
)
def test_some_ranks_share_some_tensors(run, num_ranks, verify, checkpoint):
    layout = Layout(tp=2, dp=num_ranks // 2)
    kwargs = {"share_reads": "on", "verify": verify}
    results = run(load_counting, num_ranks, layout, checkpoint, kwargs)
    assert [wrong for wrong, _, _ in results] == [[]] * num_ranks
    # Everything once; what is divided between columns lies in blocks that both halves need.
    once = sum(content_of(key).size for key in TENSORS)
    assert (
        sum(b - a for _, spans, _ in results for _, a, b in spans)
        <= once + content_of("columns").size + 48
    )


MANY = 400


def load_many_small(rank, path):
    """Load hundreds of small tensors as replicas, and return how many are right and how many bytes
    were read.
    """
    state = {
        f"t{i}": ShardedTensor.from_rank_offsets(
            f"t{i}", torch.zeros(3 + i % 5, dtype=dtype), replica_id=rank
        )
        for i, dtype in zip(range(MANY), [torch.int8, torch.int64] * MANY, strict=False)
    }
    with reads_of_tensors() as spans:
        loaded = distckpt.load(
            state, f"hooked://{path}", validate_access_integrity=False, share_reads="on"
        )
    return sum(bool((loaded[key] == int(key[1:]) % 100).all()) for key in state), sum(
        b - a for _, a, b in spans
    )


def test_small_tensors_travel_together(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    tensors = {
        f"t{i}": torch.full((3 + i % 5,), i % 100, dtype=dtype)
        for i, dtype in zip(range(MANY), [torch.int8, torch.int64] * MANY, strict=False)
    }
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}, path
    )
    (right_0, read_0), (right_1, read_1) = run(load_many_small, 2, path)
    assert right_0 == right_1 == MANY
    assert read_0 + read_1 == sum(tensor.nbytes for tensor in tensors.values())
    assert abs(read_0 - read_1) < 200


def load_strangely(rank, path):
    """Load into targets that are not plain memory, of several dtypes, twice, padded and in part;
    say what is wrong.
    """
    large, odd = (
        content_of("large").view(np.int32)[..., 0],
        content_of("odd").view(np.int16)[..., 0],
    )
    columns, unpadded = content_of("columns"), content_of("padded").view(np.int32)[..., 0]
    wide = torch.zeros(3072, 2048)
    strided = wide[:, ::2] if rank == 0 else torch.zeros(1024, 3072).t()
    targets = {
        "strided": ("large", strided),
        "again": ("large", torch.zeros(3072, 1024)),
        "cast": ("odd", torch.zeros(odd.shape, dtype=torch.int16 if rank == 0 else torch.int32)),
    }
    state = {
        name: ShardedTensor.from_rank_offsets(key, target, replica_id=rank)
        for name, (key, target) in targets.items()
    }
    part = np.s_[30:633, 900 - rank % 2 :]
    state["part"] = irregular_shard("columns", np.zeros_like(columns), torch.bfloat16, part, rank)
    padded = torch.full((12,), 7, dtype=torch.int32)
    state["padded"] = ShardedTensor.from_rank_offsets(
        "padded", padded, replica_id=rank, allow_shape_mismatch=True
    )
    loaded = distckpt.load(
        state, path, validate_access_integrity=False, share_reads="on", max_inflight_bytes=1
    )
    right = {
        "strided": np.array_equal(strided.contiguous().view(torch.int32).numpy(), large),
        "between": not wide[:, 1::2].any(),
        "again": np.array_equal(loaded["again"].view(torch.int32).numpy(), large),
        "cast": np.array_equal(loaded["cast"].numpy(), odd),
        "part": np.array_equal(bytes_of(loaded["part"]), columns[part]),
        "padded": np.array_equal(padded.numpy(), np.append(unpadded, 0)),
    }
    return [name for name, is_right in right.items() if not is_right]


def test_strange_targets(run, checkpoint):
    assert run(load_strangely, 3, checkpoint) == [[]] * 3


WANTED_BY = {"a": (0, 1, 2), "b": (0, 1, 3), "c": (0, 2, 3)}


def load_overlapping_sets(rank, path):
    """Load what different sets of three ranks want; the others have so much of their own that rank
    0 reads for all.
    """
    sizes = {key: 40000 for key, ranks in WANTED_BY.items() if rank in ranks} | (
        {f"own {rank}": 200000} if rank else {}
    )
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(size), replica_id=rank)
        for key, size in sizes.items()
    }
    with reads_of_tensors() as spans:
        loaded = distckpt.load(
            state, f"hooked://{path}", validate_access_integrity=False, share_reads="on"
        )
    return {key: float(tensor.mean()) for key, tensor in loaded.items()}, sum(
        b - a for _, a, b in spans
    )


def test_a_rank_sends_different_tensors_to_different_ranks(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    values = {"a": 1.0, "b": 2.0, "c": 3.0, "own 1": 4.0, "own 2": 5.0, "own 3": 6.0}
    state = {
        key: ShardedTensor.from_rank_offsets(
            key, torch.full((40000 if key in WANTED_BY else 200000,), value)
        )
        for key, value in values.items()
    }
    distckpt.save(state, path)
    for rank, (loaded, num_bytes) in enumerate(run(load_overlapping_sets, 4, path)):
        expected = {key: values[key] for key, ranks in WANTED_BY.items() if rank in ranks}
        assert loaded == (expected | {f"own {rank}": values[f"own {rank}"]} if rank else expected)
        assert num_bytes == (800000 if rank else 3 * 160000)


NUM_ELEMENTS = 4093


def load_flat(rank, path):
    """Load flattened ranges, as ZeRO-1 holds them: halves, each on two of four ranks."""
    part = flat_part(NUM_ELEMENTS, 2, rank // 2)
    flat = torch.zeros(part.stop - part.start)
    shard = ShardedTensor.from_rank_offsets_flat(
        "w", flat, (1, NUM_ELEMENTS), flattened_range=part, replica_id=rank % 2
    )
    with reads_of_tensors() as spans:
        distckpt.load({"w": shard}, f"hooked://{path}", share_reads="on", verify=False)
    return bool((flat == torch.arange(part.start, part.stop)).all()), sum(
        stop - start for _, start, stop in spans
    )


def test_flattened_ranges(run, tmp_path):
    path = str(tmp_path / "checkpoint")
    values = torch.arange(float(NUM_ELEMENTS)).view(1, NUM_ELEMENTS)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, path)
    results = run(load_flat, 4, path)
    assert [is_right for is_right, _ in results] == [True] * 4
    assert sum(num_bytes for _, num_bytes in results) == 4 * NUM_ELEMENTS


def load_in_groups(rank, path):
    """Four replicas, of which two and two share; ranks of a group must be made by all."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    strategy = FullyParallelLoadStrategyWrapper(SafetensorsLoadStrategy(), groups[rank % 2])
    kwargs = {"strategy": strategy, "share_reads": "on"}
    wrong, spans, _ = load_counting(rank, Layout(dp=4), path, kwargs)
    return wrong, spans


def test_ranks_share_within_the_group_of_the_wrapper(run, checkpoint):
    results = run(load_in_groups, 4, checkpoint)
    assert [wrong for wrong, _ in results] == [[]] * 4
    spans = [spans for _, spans in results]
    assert covered_twice(spans[0] + spans[2]) == covered_twice(spans[1] + spans[3]) == 0
    total = sum(content_of(key).size for key in TENSORS)
    assert sum(stop - start for _, start, stop in spans[0] + spans[2]) == total


def load_damaged(rank, damaged, whole):
    """Load a damaged checkpoint together, then a whole one."""
    layout = Layout(dp=3)
    error = error_of(
        distckpt.load,
        blank_targets(layout, rank),
        damaged,
        validate_access_integrity=False,
        share_reads="on",
    )
    in_step = sum_over_ranks(rank)
    wrong, _, _ = load_counting(rank, layout, whole, {"share_reads": "on"})
    return type(error), str(error), in_step, wrong


@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_damage_that_one_rank_finds_is_told_to_all(run, damage, checkpoint, tmp_path):
    damaged = str(tmp_path / "checkpoint")
    # Not the bytes of another checkpoint: those are shared with other tests.
    shards = {
        k: ShardedTensor.from_rank_offsets(k, tensor_from(content_of(k), TENSORS[k][1]))
        for k in TENSORS
    }
    distckpt.save(shards, damaged)
    (name,) = os.listdir(f"{damaged}/tensors")
    with open(f"{damaged}/tensors/{name}", "r+b") as file:
        if damage == "cut off":
            file.truncate(os.path.getsize(file.name) - 1)
        else:
            # The last byte of a large tensor: one of three ranks reads it.
            at = file.read().rindex(content_of("large")[-1, -4:].tobytes())
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    results = run(load_damaged, 3, damaged, checkpoint)
    kinds, texts, sums, wrong = zip(*results, strict=True)
    assert sums == (3, 3, 3)
    assert wrong == ([], [], [])
    assert len(set(texts)) == 1
    assert damaged in texts[0]
    if damage == "flipped":
        assert kinds == (RankFailedError,) * 3
        assert "Checksum mismatch" in texts[0]
        assert "'large'" in texts[0]


def ask_differently(rank, path):
    """One rank asks for what is not there, while the others are ready to share."""
    key = "absent" if rank == 1 else "norm"
    shard = ShardedTensor.from_rank_offsets(key, torch.zeros(10), replica_id=rank)
    error = error_of(
        distckpt.load, {"a": shard}, path, validate_access_integrity=False, share_reads="on"
    )
    return type(error), "absent" in str(error), sum_over_ranks(1)


def test_a_rank_that_asks_for_what_is_not_there(run, checkpoint):
    assert run(ask_differently, 3, checkpoint) == [(RankFailedError, True, 3)] * 3


def load_large(rank, path, mode, delay, num_machines=1):
    """Load one large tensor as replicas; return whether it is right, bytes read from the store and
    locally, and the report.
    """
    lock, read = threading.Lock(), [0]

    def slowly(file, start, stop):
        if "/tensors/" in file and start is not None:
            with lock:
                read[0] += stop - start
            time.sleep(delay)

    shard = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(36, MIB, dtype=torch.int32), replica_id=rank
    )
    reports = []
    with hooked_reads(slowly), counted_reads() as local, on_machine(rank % num_machines):
        distckpt.load(
            {"w": shard},
            path,
            validate_access_integrity=False,
            share_reads=mode,
            on_report=reports.append,
        )
    expected = torch.arange(36, dtype=torch.int32)[:, None]
    return bool((shard.data == expected).all()), read[0], local.num_bytes, reports[0]


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """One tensor of 144 MiB, enough for "auto" to think about it."""
    path = str(tmp_path_factory.mktemp("large") / "checkpoint")
    values = torch.arange(36, dtype=torch.int32)[:, None].expand(36, MIB).contiguous()
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, path, durable=False)
    return path


def test_auto_shares_what_a_slow_store_holds(large_checkpoint):
    results = run(load_large, 2, f"hooked://{large_checkpoint}", "auto", 0.2)
    assert [is_right for is_right, *_ in results] == [True] * 2
    # Beside what each rank reads to see how fast it does.
    assert 144 * MIB <= sum(num_bytes for _, num_bytes, *_ in results) <= (144 + 2 * 8) * MIB
    first, second = (report for *_, report in results)
    # A request for 8 MiB takes 0.2 s.
    assert 0 < first.read_rate <= 8 * MIB / 0.2 < first.send_rate
    assert 128 * MIB <= first.sent_bytes <= 144 * MIB
    assert "to each other" in str(first)
    assert (second.read_rate, second.send_rate) == (first.read_rate, first.send_rate)


def test_auto_is_right_whatever_it_decides(large_checkpoint):
    results = run(load_large, 3, f"hooked://{large_checkpoint}", "auto", 0)
    assert [is_right for is_right, *_ in results] == [True] * 3
    assert 144 * MIB <= sum(num_bytes for _, num_bytes, *_ in results) <= 3 * 144 * MIB


def test_auto_on_one_machine_reads_a_local_path_as_if_alone(large_checkpoint):
    results = run(load_large, 2, large_checkpoint, "auto", 0)
    assert [is_right for is_right, *_ in results] == [True] * 2
    assert all(num_bytes >= 144 * MIB for _, _, num_bytes, _ in results)
    shared = run(load_large, 2, large_checkpoint, "on", 0)
    assert [is_right for is_right, *_ in shared] == [True] * 2
    assert all(72 * MIB <= num_bytes < 96 * MIB for _, _, num_bytes, _ in shared)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_auto_on_several_machines_does_what_its_report_says(large_checkpoint, num_ranks):
    results = run(load_large, num_ranks, large_checkpoint, "auto", 0, 2)
    assert [is_right for is_right, *_ in results] == [True] * num_ranks
    report = results[0][-1]
    assert min(report.read_rate, report.send_rate) > 0
    assert (report.sent_bytes > 0) == (report.send_rate > report.read_rate)
    read = [num_bytes for _, _, num_bytes, _ in results]
    if report.sent_bytes:
        assert sum(read) < (144 + num_ranks * (8 + 16)) * MIB
    else:
        assert min(read) >= 144 * MIB


@pytest.mark.parametrize(("mode", "sent_bytes"), [("on", 144 * MIB), ("off", 0), ("auto", 0)])
def test_the_report_of_one_machine_has_what_was_sent(large_checkpoint, mode, sent_bytes):
    for *_, report in run(load_large, 2, large_checkpoint, mode, 0):
        assert (report.sent_bytes, report.read_rate, report.send_rate) == (sent_bytes, 0, 0)


SMALL_SHAPE, NUM_SMALL = (256, 512), 64


def load_parts_of_directory(rank, path, axis):
    """Load a fourth of each tensor of a model directory; return what is wrong, and the sizes of
    the reads.
    """
    sizes, preadv = [], os.preadv

    def counted(fd, buffers, position):
        sizes.append(preadv(fd, buffers, position))
        return sizes[-1]

    state = {}
    for number in range(NUM_SMALL):
        target = torch.zeros([n // 4 if i == axis else n for i, n in enumerate(SMALL_SHAPE)])
        state[f"t{number:02}"] = ShardedTensor.from_rank_offsets(
            f"t{number:02}", target, (axis, rank, 4)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        distckpt.load(state, path, share_reads="on")
    wrong = []
    for number, (key, shard) in enumerate(state.items()):
        expected = np.split(small_values(number), 4, axis)[rank]
        if not np.array_equal(shard.data.numpy(), expected):
            wrong.append(key)
    return wrong, sizes


def small_values(number):
    return np.random.default_rng(number).standard_normal(SMALL_SHAPE, np.float32)


@pytest.mark.parametrize("axis", [0, 1])
def test_small_tensors_of_a_model_directory_are_read_once_in_large_requests(run, tmp_path, axis):
    tensors = {f"t{i:02}": torch.from_numpy(small_values(i)) for i in range(NUM_SMALL)}
    names = sorted(tensors)
    write_indexed(
        tmp_path,
        {
            f"model-{number:05d}-of-00002.safetensors": {
                key: tensors[key] for key in names[32 * (number - 1) : 32 * number]
            }
            for number in (1, 2)
        },
    )
    results = run(load_parts_of_directory, 4, str(tmp_path), axis)
    assert [wrong for wrong, _ in results] == [[]] * 4
    sizes = [size for _, sizes in results for size in sizes]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    assert np.median(sizes) >= MIB


def peak_of_load(rank, path):
    """Return by how many bytes resident memory grows at most while strided targets are filled, and
    whether they are.
    """
    target = torch.zeros(36, 2 * MIB, dtype=torch.int32)[:, ::2]
    shard = ShardedTensor.from_rank_offsets("w", target, replica_id=rank)
    kwargs = {
        "validate_access_integrity": False,
        "share_reads": "on",
        "max_inflight_bytes": 16 * MIB,
    }
    grown = peak_memory_bytes(lambda: distckpt.load({"w": shard}, path, **kwargs))
    return grown, bool((target == torch.arange(36, dtype=torch.int32)[:, None]).all())


def test_memory_is_bounded(large_checkpoint):
    for grown, is_right in run(peak_of_load, 2, large_checkpoint):
        assert is_right
        assert grown < (16 + 48) * MIB, f"{grown / MIB:.0f} MiB"


def test_other_modes_are_refused(checkpoint):
    with pytest.raises(ValueError, match="'auto', 'on' or 'off', got 'yes'"):
        distckpt.load({}, checkpoint, share_reads="yes")


def load_and_stop(rank, path):
    """Load; rank 1 waits in its first read until it is killed."""

    def wait(file, start, stop):
        if rank == 1 and "/tensors/" in file:
            ask_parent()

    with hooked_reads(wait):
        error = error_of(
            distckpt.load,
            blank_targets(Layout(dp=3), rank),
            f"hooked://{path}",
            validate_access_integrity=False,
            share_reads="on",
        )
    return type(error), list(error.failures)


def test_a_rank_that_dies_while_it_reads(checkpoint):
    with launched(load_and_stop, 3, checkpoint, group_timeout=15) as launch:
        launch.wait_for_signal(1)
        launch.kill(1)
        first, _, last = launch.outcomes()
    assert first.value == last.value == (RankFailedError, [1])


def load_columns_and_stop(rank, path):
    """Load columns of one chunk; the rank that reads it for all waits until it is killed."""

    def wait(file, start, stop):
        if "/tensors/" in file and start is not None:
            ask_parent()

    layout = Layout(tp=4)
    blank = np.zeros_like(content_of("columns"))
    part = part_of("columns", layout, rank)
    shard = irregular_shard("columns", blank, torch.bfloat16, part, 0)
    with hooked_reads(wait):
        error = error_of(
            distckpt.load,
            {"columns": shard},
            f"hooked://{path}",
            validate_access_integrity=False,
            share_reads="on",
        )
    return type(error), list(error.failures)


def test_a_rank_that_dies_while_it_reads_for_others(checkpoint):
    with launched(load_columns_and_stop, 4, checkpoint, group_timeout=15) as launch:
        # The middle of the chunk lies in the second of four shares.
        launch.wait_for_signal(1)
        launch.kill(1)
        first, _, *others = launch.outcomes()
    assert [each.value for each in (first, *others)] == [(RankFailedError, [1])] * 3
