"""Ranks that load parts of the same chunks from a real S3 server read each byte once. Expected
values are those of numpy indexing, requests and bytes those that the server was asked for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distckpt
from benchmarks.measure import peak_memory_bytes
from distckpt import RankFailedError, ShardedTensor
from tests.support.harness import error_of, sum_over_ranks
from tests.support.s3_server import Fault, FaultyProxy, new_bucket, reached_at
from tests.support.sampling import one_in

SHAPES = {
    "layers.0.o_proj": (512, 1024),
    "layers.0.q_proj": (512, 1024),
    "layers.1.o_proj": (512, 1024),
    "layers.1.q_proj": (512, 1024),
    "norm": (1024,),
}
MIB = 1 << 20


def values_of(key, shape):
    seed = np.frombuffer(key.encode().ljust(16), np.uint32)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def even_rows(size, part, count):
    step = -(-size // count)
    return slice(min(part * step, size), min((part + 1) * step, size))


def shard_of(key, shape, place, data, replica=0):
    region = [(s.start or 0, len(range(*s.indices(n)))) for s, n in zip(place, shape, strict=True)]
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=tuple(shape),
        global_offset=tuple(offset for offset, _ in region),
        axis_fragmentations=None,
        replica_id=replica,
    )


def save_rows(rank, url, num_ranks, shapes, location):
    """Save as FSDP2 does: rows of every tensor on each rank."""
    state = {}
    for key, shape in shapes.items():
        rows = even_rows(shape[0], rank, num_ranks)
        place = (rows, *[slice(0, n) for n in shape[1:]])
        data = torch.from_numpy(values_of(key, shape)[place].copy())
        state[key] = shard_of(key, shape, place, data)
    # Ranks have the environment of the process that forks them, which may be older than the server.
    with reached_at(url):
        distckpt.save(state, location)


def load_places(rank, url, location, shapes, places_of_ranks, options):
    """Load some places of tensors on each rank; say which are wrong, and the bytes asked for."""
    wanted = places_of_ranks[rank]
    state = {
        number: shard_of(
            key, shapes[key], place, torch.zeros(values_of(key, shapes[key])[place].shape), 1
        )
        for number, (key, place) in enumerate(wanted)
    }
    targets = {number: shard.data for number, shard in state.items()}
    with reached_at(url):
        distckpt.load({"t": state}, location, validate_access_integrity=False, **options)
    wrong = [
        key
        for number, (key, place) in enumerate(wanted)
        if not np.array_equal(targets[number].numpy(), values_of(key, shapes[key])[place])
    ]
    return wrong, sum(target.nbytes for target in targets.values())


def loaded(run, s3, location, shapes, places_of_ranks, **options):
    """Load on as many ranks as there are places; return what was wanted and the ranges read."""
    proxy = FaultyProxy(s3)
    with proxy.running() as url:
        results = run(
            load_places, len(places_of_ranks), url, location, shapes, places_of_ranks, options
        )
    assert [wrong for wrong, _ in results] == [[]] * len(results)
    return results, [(p, a, b) for p, a, b in proxy.ranges if "/tensors" in p]


def bytes_in(ranges):
    return sum(stop - start for _, start, stop in ranges)


def pipeline_places(tp, pp):
    """Places of tensors under tensor and pipeline parallelism, for each rank."""
    places = []
    for rank in range(tp * pp):
        part, stage = rank % tp, rank // tp
        columns = np.s_[:, even_rows(1024, part, tp)]
        rows = np.s_[even_rows(512, part, tp), :]
        of_rank = [(f"layers.{stage}.o_proj", columns), (f"layers.{stage}.q_proj", rows)]
        if stage == pp - 1:
            of_rank.append(("norm", (slice(None),)))
        places.append(of_rank)
    return places


@pytest.mark.parametrize("verify", one_in(2, [True, False]))
def test_tensor_and_pipeline_parallel_ranks_read_what_fsdp_saved_once(run, server, verify):
    location = f"{new_bucket(server)}/c"
    run(save_rows, 4, server, 4, SHAPES, location)
    places = pipeline_places(4, 2)
    total = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
    options = {"verify": verify}
    _, shared = loaded(run, server, location, SHAPES, places, share_reads="on", **options)
    assert total <= bytes_in(shared) <= 1.05 * total
    _, alone = loaded(run, server, location, SHAPES, places, share_reads="off", **options)
    assert bytes_in(alone) > 2 * total
    assert len(shared) < len(alone)


def random_places(rng, num_ranks):
    def some(size):
        low, high = sorted(rng.integers(0, size + 1, 2).tolist())
        return slice(low, high) if low < high else slice(0, size)

    return [
        [
            (key, tuple(some(size) for size in SHAPES[key]))
            for key in rng.choice(sorted(SHAPES), rng.integers(0, 6)).tolist()
        ]
        for _ in range(num_ranks)
    ]


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_any_regions_are_right_and_sharing_reads_no_more(run, server, seed):
    rng = np.random.default_rng(seed)
    location = f"{new_bucket(server)}/c"
    writers, readers = rng.integers(1, 5), rng.integers(2, 7)
    run(save_rows, writers, server, writers, SHAPES, location)
    places = random_places(rng, readers)
    _, shared = loaded(run, server, location, SHAPES, places, share_reads="on")
    _, alone = loaded(run, server, location, SHAPES, places, share_reads="off")
    assert bytes_in(shared) <= 1.05 * bytes_in(alone)


LARGE = {"w": (8192, 4096)}


def load_columns_counting_memory(rank, url, location):
    """Load a fourth of the columns in bf16; return by how much memory grew, and what is wrong."""
    place = np.s_[:, even_rows(4096, rank, 4)]
    target = torch.zeros(8192, 1024, dtype=torch.bfloat16)
    with reached_at(url):
        grown = peak_memory_bytes(
            lambda: distckpt.load(
                {"w": shard_of("w", LARGE["w"], place, target, 1)},
                location,
                validate_access_integrity=False,
                share_reads="on",
                allow_dtype_cast=True,
                max_inflight_bytes=96 * MIB,
            )
        )
    expected = torch.from_numpy(values_of("w", LARGE["w"])[place]).to(torch.bfloat16)
    return grown, torch.equal(target, expected)


def test_memory_for_other_ranks_is_within_the_limit(run, server):
    location = f"{new_bucket(server)}/c"
    run(save_rows, 1, server, 1, LARGE, location)
    for grown, is_right in run(load_columns_counting_memory, 4, server, location):
        assert is_right
        assert grown < (96 + 48) * MIB, f"{grown / MIB:.0f} MiB"


def load_refused(rank, url, location):
    place = np.s_[:, even_rows(1024, rank, 4)]
    shard = shard_of("layers.0.o_proj", (512, 1024), place, torch.zeros(512, 256), 1)
    with reached_at(url):
        error = error_of(
            distckpt.load,
            {"w": shard},
            location,
            validate_access_integrity=False,
            share_reads="on",
        )
    return type(error), str(error), sum_over_ranks(1)


def test_a_range_that_one_rank_cannot_read_is_an_error_on_all(run, server):
    location = f"{new_bucket(server)}/c"
    run(save_rows, 4, server, 4, SHAPES, location)
    proxy = FaultyProxy(server, Fault("GET", "tensors-.*shard-00003", "403", count=99))
    with proxy.running() as url:
        results = run(load_refused, 4, url, location)
    kinds, texts, in_step = zip(*results, strict=True)
    assert kinds == (RankFailedError,) * 4
    assert in_step == (4,) * 4
    assert len(set(texts)) == 1
    assert "shard-00003" in texts[0]
