"""Moves between random layouts of real ranks, against numpy: values, what is exchanged and sent,
and fingerprints.

The planner alone is tested with more ranks and machines in tests/unit/move/test_plan.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distckpt
from distckpt import ShardedTensor
from distckpt.rules import Concat, Rename, Rule, Transpose
from tests.support.exchanges import watching_exchanges
from tests.support.harness import run
from tests.support.layouts import bytes_of, global_bytes, tensor_from
from tests.support.machines import on_machine
from tests.support.random_layouts import DTYPES, elements_of, random_shards

NUM_RANKS = 4
DESCRIBING = {"gather", "compare what is given", "plan the move"}
"""Exchanges that descriptions and plans take."""


class Pair(NamedTuple):
    """What all ranks give and take; `expected` is in the bytes of each new tensor."""

    old: list[dict[str, Any]]
    new: list[dict[str, Any]]
    rules: list[Rule]
    expected: dict[str, np.ndarray]
    hosts: list[int]
    lower_bound: int


def random_pair(seed: int, num_ranks: int, most_hosts: int) -> Pair:
    random = np.random.default_rng(seed)
    hosts = random.integers(0, int(random.integers(1, 1 + most_hosts)), num_ranks).tolist()
    old: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    new: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
    expected, rules, bound = {}, list[Rule](), 0
    for number in range(int(random.integers(1, 4))):
        dtype = DTYPES[int(random.integers(len(DTYPES)))]
        shape = tuple(random.integers(1, 24, int(random.integers(1, 4))).tolist())
        content = global_bytes(f"{seed}.{number}", shape, dtype)
        kind = str(random.choice(["same", "rename", "transpose", "concat"]))
        names = {f"old.{number}": content}
        target, made = f"new.{number}", content
        if kind == "same" or (kind == "transpose" and len(shape) < 2):
            target = f"old.{number}"
        elif kind == "rename":
            rules.append(Rename(f"old.{number}", target))
        elif kind == "transpose":
            order = tuple(random.permutation(len(shape)).tolist())
            rules.append(Transpose(f"old.{number}", target, order))
            made = content.transpose(*order, len(shape))
        else:
            names[f"more.{number}"] = content[::-1]
            rules.append(Concat((f"old.{number}", f"more.{number}"), target, axis=0))
            made = np.concatenate([content, content[::-1]])
        expected[target] = made
        layout = int(random.integers(1 << 30))
        # A rank has all members of a Concat or none, as a rule demands.
        held = {
            key: random_shards(np.random.default_rng(layout), key, c, dtype, num_ranks)
            for key, c in names.items()
        }
        wanted = random_shards(random, target, made, dtype, num_ranks)
        for rank in range(num_ranks):
            for key, shards in held.items():
                old[rank][key] = shards[rank]
            new[rank][target] = wanted[rank]
        bound += _lower_bound(hosts, names, held, (target, wanted), rules) * dtype.itemsize
    return Pair(old, new, rules, expected, hosts, bound)


def _lower_bound(
    hosts: list[int],
    names: dict[str, np.ndarray],
    held: dict[str, list[list[ShardedTensor]]],
    wanted: tuple[str, list[list[ShardedTensor]]],
    rules: list[Rule],
) -> int:
    """Count the elements that each machine wants and does not hold."""
    target, takers = wanted
    total = 0
    for host in set(hosts):
        members = [rank for rank, other in enumerate(hosts) if other == host]
        masks = [
            elements_of([s for rank in members for s in held[key][rank]], content.shape[:-1])
            for key, content in names.items()
        ]
        has = np.concatenate(masks) if len(masks) > 1 else masks[0]
        if rules and isinstance(rules[-1], Transpose) and target not in names:
            has = has.transpose(rules[-1].order)
        wants = elements_of([s for rank in members for s in takers[rank]], has.shape)
        total += int((wants & ~has).sum())
    return total


def _data_of(state: dict[str, Any]) -> list[ShardedTensor]:
    return [shard for shards in state.values() for shard in shards]


def _is_right(state: dict[str, Any], expected: dict[str, np.ndarray]) -> bool:
    for shard in _data_of(state):
        content = expected[shard.key]
        if shard.flattened_range is not None:
            shape = content.shape[:-1]
            flat = content.reshape(-1, content.shape[-1])
            places = np.ravel_multi_index(shard.global_coordinates(), shape)
            part = flat[places]
        else:
            part = content[shard.global_slice()]
        if not np.array_equal(bytes_of(shard.data).reshape(-1), part.reshape(-1)):
            return False
    return True


def _moved(rank: int, seed: int, most_hosts: int) -> list[int]:
    pair = random_pair(seed, dist.get_world_size(), most_hosts)
    old, new = pair.old[rank], pair.new[rank]
    # Its buffers are made for these machines.
    group = dist.new_group()
    exchanged: list[list[str]] = []
    for _ in range(2):
        for shard in _data_of(new):
            if shard.data.numel():
                shard.data.view(torch.uint8).fill_(0xA5)
        exchanged.append([])
        with watching_exchanges(exchanged[-1].append), on_machine(pair.hosts[rank]):
            report = distckpt.redistribute(
                old, new, rules=pair.rules, process_group=group, max_inflight_bytes=4 * 4096
            )
        assert _is_right(new, pair.expected), seed
        assert report.sent_bytes <= 1.02 * pair.lower_bound, seed
    dist.destroy_process_group(group)
    assert DESCRIBING.intersection(exchanged[0]), seed
    assert not DESCRIBING.intersection(exchanged[1]), (seed, exchanged[1])
    found = distckpt.fingerprint(new)
    whole = {key: tensor_from(c, _data_of_key(pair, key).dtype) for key, c in pair.expected.items()}
    alone = {
        key: ShardedTensor.from_rank_offsets(key, value, replica_id=rank)
        for key, value in whole.items()
    }
    assert found == distckpt.fingerprint(alone), seed
    if not pair.rules:
        assert found == distckpt.fingerprint(old), seed
    return [report.sent_bytes, pair.lower_bound]


def _data_of_key(pair: Pair, key: str) -> ShardedTensor:
    shards = (shard for state in pair.new for shard in state.get(key, ()))
    return next(shards)


def _random_moves(rank: int, first: int, count: int, most_hosts: int) -> list[int]:
    totals = np.zeros(2, np.int64)
    for seed in range(first, first + count):
        totals += _moved(rank, seed, most_hosts)
    return totals.tolist()


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 20), *(pytest.param(n, 100, marks=pytest.mark.slow) for n in range(1000, 2000, 100))],
)
def test_random_layouts(first, count):
    for sent, bound in run(_random_moves, NUM_RANKS, first, count, 3):
        assert sent <= 1.02 * bound


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 6), *(pytest.param(n, 50, marks=pytest.mark.slow) for n in range(3000, 3200, 50))],
)
def test_random_layouts_of_many_machines(first, count):
    """Machines that have got something pass it on."""
    for sent, bound in run(_random_moves, 8, first, count, 8):
        assert sent <= 1.02 * bound


def _dtensor_moves(rank: int, first: int, count: int) -> None:
    """As FSDP2 and tensor parallelism divide parameters."""
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        shape = tuple(random.integers(1, 30, int(random.integers(1, 4))).tolist())
        full = tensor_from(global_bytes(str(seed), shape, torch.int32), torch.int32)
        sides = []
        for values in (full, torch.zeros_like(full)):
            mesh = meshes[int(random.integers(2))]
            axes = random.integers(-1, len(shape), mesh.ndim).tolist()
            placements = [Replicate() if axis < 0 else Shard(axis) for axis in axes]
            sides.append({"weight": distribute_tensor(values, mesh, placements)})
        old, new = sides
        assert isinstance(new["weight"], DTensor)
        distckpt.redistribute(old, new)
        assert torch.equal(new["weight"].full_tensor(), full), seed
        assert distckpt.fingerprint(new) == distckpt.fingerprint(old), seed


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 10), *(pytest.param(n, 100, marks=pytest.mark.slow) for n in range(1000, 1300, 100))],
)
def test_random_dtensors(first, count):
    run(_dtensor_moves, NUM_RANKS, first, count)
