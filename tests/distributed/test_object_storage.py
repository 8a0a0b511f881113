"""Several ranks save to and load from a real S3 server."""

from __future__ import annotations

import json
import threading

import numpy as np
import psutil
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from distckpt._io import write
from distckpt.megatron.core import CheckpointExistsError, RankFailedError
from tests.support.harness import ask_parent, error_of, launched, run, sum_over_ranks
from tests.support.other_program import as_another_program
from tests.support.s3_server import client, keys_in, reached_at, uploads_in

ROWS = 1 << 11
"""Of 1024 elements and 4 bytes each: with two ranks each has 4 MiB of a table."""


def table(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, 1024), np.float32))


def state(rank: int, num_ranks: int, values: torch.Tensor, axis: int = 0) -> dict:
    piece = values.chunk(num_ranks, axis)[rank].contiguous()
    return {"t": ShardedTensor.from_rank_offsets("t", piece, (axis, rank, num_ranks)), "step": 5}


def save_and_load(rank, server, location):
    with reached_at(server):
        distckpt.save(state(rank, 2, table(1)), location)
        distckpt.save(state(rank, 2, table(2)), location, overwrite=True)
        loaded = distckpt.load(
            state(rank, 2, torch.zeros(ROWS, 1024), axis=1), location, verify=True
        )
        distckpt.consolidate(location, f"{location}-hf", max_file_bytes=6 << 20)
        return torch.equal(loaded["t"], table(2).chunk(2, 1)[rank]), loaded["step"]


def test_save_load_overwrite_and_consolidate(server, bucket):
    assert run(save_and_load, 2, server, f"{bucket}/c") == [(True, 5)] * 2
    files = keys_in(server, f"{bucket}/c")
    assert len(files) == 5
    nonce = json.loads(
        client(server).get_object(Bucket=bucket[5:], Key="c/metadata.json")["Body"].read()
    )["save"]
    assert sum(name.startswith(f"tensors-{nonce}/") for name in files) == 2
    assert keys_in(server, f"{bucket}/c-hf") == ["model.safetensors"]
    assert uploads_in(server, bucket) == []


def save_into_several_folders(rank, server, location):
    """Save as if a folder had room for two ranks, replace that, and fail to replace it."""
    write.FOLDER_RANKS = 2

    def fail(num_bytes, total_bytes):
        raise OSError(5, "the cable is out", "eth0")

    rows = 40 * 8
    with reached_at(server):
        distckpt.save(state(rank, 5, table(1, rows)), location)
        distckpt.save(state(rank, 5, table(2, rows)), location, overwrite=True)
        failing = state(rank, 5, table(3, rows))
        error = error_of(distckpt.save, failing, location, overwrite=True, progress=fail)
        loaded = distckpt.load(state(rank, 5, torch.zeros(rows, 1024)), location)
    return isinstance(error, RankFailedError), torch.equal(
        loaded["t"], table(2, rows).chunk(5)[rank]
    )


def test_many_ranks_write_into_several_folders(server, bucket):
    location = f"{bucket}/c"
    assert run(save_into_several_folders, 5, server, location) == [(True, True)] * 5
    files = keys_in(server, location)
    marker = client(server).get_object(Bucket=bucket[5:], Key="c/metadata.json")["Body"].read()
    nonce = json.loads(marker)["save"]
    folders = ["", "", "-1", "-1", "-2"]
    assert files == [
        "manifest" + ("" if "manifest.safetensors" in files else f"-{nonce}") + ".safetensors",
        "metadata.json",
        f"objects-{nonce}/rank-00001.safetensors",
        *sorted(
            f"tensors-{nonce}{folder}/shard-{rank:05d}-model-00001-of-00001.safetensors"
            for rank, folder in enumerate(folders, 1)
        ),
    ]
    with reached_at(server):
        report = distckpt.verify(location)
        assert report.is_whole
        assert report.strays == ()
        target = {"t": ShardedTensor.from_rank_offsets("t", torch.zeros(320, 1024))}
        assert torch.equal(distckpt.load(target, location)["t"], table(2, 320))
        distckpt.save({"step": 6}, location, overwrite=True)
    assert len(keys_in(server, location)) == 3


LARGE_ROWS = 9 << 10
"""36 MiB: each of two ranks puts 18 MiB in two parts."""


def fail_on_rank_1(rank, server, location):
    def progress(num_bytes, total_bytes):
        if rank == 1:
            raise OSError(5, "the cable is out", "eth0")

    with reached_at(server):
        error = error_of(
            distckpt.save, state(rank, 2, table(1, LARGE_ROWS)), location, progress=progress
        )
        return isinstance(error, RankFailedError), str(error), sum_over_ranks(1)


def test_a_failing_rank_leaves_nothing(server, bucket):
    for is_same, text, total in run(fail_on_rank_1, 2, server, f"{bucket}/c"):
        assert is_same
        assert total == 2
        assert "rank 1" in text
        assert "the cable is out" in text
    assert keys_in(server, bucket) == []
    assert uploads_in(server, bucket) == []


def wait_in_the_middle(rank, server, location):
    def progress(num_bytes, total_bytes):
        if rank == 1:
            ask_parent()

    with reached_at(server):
        error = error_of(
            distckpt.save, state(rank, 2, table(1, LARGE_ROWS)), location, progress=progress
        )
        return isinstance(error, RankFailedError)


def test_a_killed_rank_leaves_nothing(server, bucket):
    with launched(wait_in_the_middle, 2, server, f"{bucket}/c", group_timeout=15.0) as launch:
        launch.wait_for_signal(1)
        assert uploads_in(server, bucket)
        launch.kill(1)
        assert launch.outcomes()[0].value is True
    assert uploads_in(server, bucket) == []
    assert keys_in(server, bucket) == []


def race(rank, server, location):
    """Ranks 0 and 1 are one program, ranks 2 and 3 another one."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    group, number = groups[rank // 2], rank // 2
    with reached_at(server):
        for attempt in range(4):
            values = table(10 * attempt + number, 256)
            torch.distributed.barrier()
            error = error_of(
                distckpt.save,
                state(rank % 2, 2, values),
                f"{location}/{attempt}",
                process_group=group,
                overwrite=attempt > 1,
            )
            errors: list = [None] * 4
            torch.distributed.all_gather_object(errors, type(error))
            # With overwrite both may win, one after the other.
            assert errors[0] is errors[1]
            assert errors[2] is errors[3]
            assert {errors[0], errors[2]} <= {type(None), CheckpointExistsError}
            winners = [n for n in (0, 1) if errors[2 * n] is type(None)]
            assert len(winners) == 1 if attempt <= 1 else winners
            loaded = distckpt.load(
                state(rank, 4, torch.zeros(256, 1024)), f"{location}/{attempt}", verify=True
            )["t"]
            found = [
                torch.equal(loaded, table(10 * attempt + n, 256).chunk(4)[rank]) for n in winners
            ]
            results: list = [None] * 4
            torch.distributed.all_gather_object(results, found)
            assert any(all(row) for row in zip(*results, strict=True))
    return True


def test_two_programs_that_save_to_one_place(server, bucket):
    assert run(race, 4, server, bucket) == [True] * 4
    for attempt in range(4):
        assert len(keys_in(server, f"{bucket}/{attempt}")) == 5
    assert uploads_in(server, bucket) == []


def save_while_another_program_saves(rank, server, location):
    alone = [torch.distributed.new_group([number]) for number in range(2)][rank]
    others = iter([1] * rank)

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, {"step": 6}, location, process_group=alone)

    # The server answers 500 to a part of an upload that is gone.
    with reached_at(server, AWS_MAX_ATTEMPTS="2"):
        error = error_of(
            distckpt.save, state(rank, 2, table(1, LARGE_ROWS)), location, progress=progress
        )
        return type(error), str(error), sum_over_ranks(1)


def test_all_ranks_say_that_another_program_has_saved(server, bucket):
    for kind, text, total in run(save_while_another_program_saves, 2, server, f"{bucket}/c"):
        assert kind is CheckpointExistsError, text
        assert "Another program has saved" in text
        assert total == 2
    assert uploads_in(server, bucket) == []
    with reached_at(server):
        assert distckpt.open(f"{bucket}/c").common_state == {"step": 6}


def manage(rank, server, root):
    with reached_at(server), CheckpointManager(root, keep_last=2) as manager:
        for step in range(1, 5):
            manager.save(step, state(rank, 2, table(step, 256)))
        manager.wait()
        loaded = manager.load(state(rank, 2, torch.zeros(256, 1024)))
        return (
            manager.steps(),
            manager.latest(),
            torch.equal(loaded["t"], table(4, 256).chunk(2)[rank]),
        )


def test_a_manager(server, bucket):
    assert run(manage, 2, server, f"{bucket}/runs") == [([3, 4], 4, True)] * 2


def save_again(rank, server, root):
    with reached_at(server), CheckpointManager(root) as manager:
        manager.save(4, state(rank, 2, table(2, 256))).result()
        loaded = manager.load(state(rank, 2, torch.zeros(256, 1024)), 4)
        return torch.equal(loaded["t"], table(2, 256).chunk(2)[rank])


def test_a_manager_replaces_a_damaged_step(server, bucket):
    run(manage, 2, server, f"{bucket}/runs")
    for name in keys_in(server, f"{bucket}/runs/step_00000004"):
        if name.startswith("manifest"):
            key = f"runs/step_00000004/{name}"
            client(server).delete_object(Bucket=bucket[5:], Key=key)
    assert run(save_again, 2, server, f"{bucket}/runs") == [True, True]


def save_within(rank, server, location):
    """Return how much more memory a save takes than there was before it, in bytes."""
    values = torch.ones(96 << 20, dtype=torch.uint8)
    process, peak, done = psutil.Process(), [0], threading.Event()
    with reached_at(server):
        distckpt.save(
            {"t": ShardedTensor.from_rank_offsets("t", values[: 17 << 20])},
            f"{location}-0",
            max_inflight_bytes=1,
        )
        before = process.memory_info().rss

        def watch():
            while not done.wait(0.002):
                peak[0] = max(peak[0], process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        distckpt.save(
            {"t": ShardedTensor.from_rank_offsets("t", values)}, location, max_inflight_bytes=1
        )
        done.set()
        watcher.join()
    return peak[0] - before


def test_a_file_is_never_in_memory_whole(server, bucket):
    [more] = run(save_within, 1, server, f"{bucket}/c")
    assert more < 48 << 20
