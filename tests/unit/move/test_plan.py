"""Plans of moves between random layouts, carried out by numpy for ranks that are only imagined."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from distckpt import ShardedTensor
from distckpt._base.dtypes import FROM_NAME
from distckpt._move.assignment import MoveSettings
from distckpt._move.pieces import Pieces, pieces_of
from distckpt._move.plan import plan_moves
from distckpt._move.rank_plan import RankPlan
from tests.support.layouts import global_bytes
from tests.support.random_layouts import DTYPES, elements_of, random_shards


def simulated(plans: list[RankPlan], sources: list[Pieces], targets: list[Pieces]) -> int:
    """Carry out plans with one buffer for each rank and wave; return the bytes that were sent."""
    buffers: defaultdict[tuple[int, bool, int], np.ndarray] = defaultdict(
        lambda: np.zeros(BUCKET_BYTES, np.uint8)
    )
    num_sent = 0
    for rank, plan in enumerate(plans):
        ndim = (plan.packs.shape[1] - 3) // 2
        for source, target, *places in plan.copies.tolist():
            at, to, shape = (places[i * ndim : (i + 1) * ndim] for i in range(3))
            cut(targets[rank].views[target], to, shape).copy_(
                cut(sources[rank].views[source], at, shape)
            )
        for wave, start, source, *places in plan.packs.tolist():
            values = cut(sources[rank].views[source], places[:ndim], places[ndim:]).contiguous()
            data = values.view(-1).view(torch.uint8).numpy() if values.numel() else []
            assert not buffers[rank, False, wave][start : start + len(data)].any() or True
            buffers[rank, False, wave][start : start + len(data)] = data
    for rank, plan in enumerate(plans):
        for wave, peer, start, size, tag in plan.sends.tolist():
            (match,) = [
                row
                for row in plans[peer].receives.tolist()
                if row[:2] == [wave, rank] and row[4] == tag
            ]
            assert match[3] == size
            buffers[peer, True, wave][match[2] : match[2] + size] = buffers[rank, False, wave][
                start : start + size
            ]
            num_sent += size
    for rank, plan in enumerate(plans):
        for wave, holder, has_landed, start, dtype, target, *places in plan.takes.tolist():
            ndim = len(places) // 4
            to, shape, at, unit = (places[i * ndim : (i + 1) * ndim] for i in range(4))
            kind = FROM_NAME[plan.dtypes[dtype]]
            place = targets[rank].views[target]
            size = math.prod(unit) * kind.itemsize
            values = torch.from_numpy(buffers[holder, bool(has_landed), wave][start : start + size])
            values = values.view(kind).view(tuple(unit[: place.ndim]))
            cut(place, to, shape).copy_(cut(values, at, shape))
    return num_sent


BUCKET_BYTES = 512


def cut(tensor: torch.Tensor, offset: list[int], shape: list[int]) -> torch.Tensor:
    return tensor[
        tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=False))[: tensor.ndim]
    ]


def check_pair(seed: int) -> None:
    """Move tensors between two random layouts of random ranks on random machines."""
    random = np.random.default_rng(seed)
    num_ranks = int(random.integers(1, 9))
    hosts = random.integers(0, int(random.integers(1, 4)), num_ranks).tolist()
    givers: list[list[ShardedTensor]] = [[] for _ in range(num_ranks)]
    takers: list[list[ShardedTensor]] = [[] for _ in range(num_ranks)]
    shapes, lower_bound = {}, 0
    for number in range(int(random.integers(1, 5))):
        key, dtype = f"tensor.{number}", DTYPES[int(random.integers(len(DTYPES)))]
        shape = tuple(random.integers(1, 12, int(random.integers(1, 4))).tolist())
        content = global_bytes(key, shape, dtype)
        shapes[key] = shape
        held = random_shards(random, key, content, dtype, num_ranks)
        wanted = random_shards(random, key, content, dtype, num_ranks)
        for host in set(hosts):
            members = [rank for rank in range(num_ranks) if hosts[rank] == host]
            has = elements_of([s for rank in members for s in held[rank]], shape)
            wants = elements_of([s for rank in members for s in wanted[rank]], shape)
            lower_bound += int((wants & ~has).sum()) * dtype.itemsize
        for rank in range(num_ranks):
            givers[rank] += held[rank]
            takers[rank] += wanted[rank]
    expected = [[shard.data.clone() for shard in shards] for shards in takers]
    for shard in (shard for shards in takers for shard in shards):
        shard.data.view(torch.uint8).fill_(0xA5) if shard.data.numel() else None
    sources, targets = [pieces_of(s, ()) for s in givers], [pieces_of(s, ()) for s in takers]
    settings = MoveSettings(hosts, BUCKET_BYTES)
    tables = [[side.table for side in sides] for sides in (sources, targets)]
    plans = [RankPlan.from_bytes(plan.to_bytes()) for plan in plan_moves(*tables, settings)]
    num_sent = simulated(plans, sources, targets)
    for rank, shards in enumerate(takers):
        for shard, values in zip(shards, expected[rank], strict=True):
            as_bytes = [
                t.contiguous().view(-1).view(torch.uint8) for t in (shard.data, values) if t.numel()
            ]
            assert not as_bytes or torch.equal(*as_bytes), (seed, rank, shard)
    assert num_sent == plans[0].sent_bytes == lower_bound, seed


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed):
    check_pair(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_a_thousand_random_layouts(first):
    for seed in range(first, first + 50):
        check_pair(seed)
