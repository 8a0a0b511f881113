"""Plans of moves between random layouts, carried out by numpy for ranks that are only imagined."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from distckpt import ShardedTensor
from distckpt._base.dtypes import FROM_NAME
from distckpt._move.assignment import MoveSettings
from distckpt._move.pieces import Pieces, packed, pieces_of, unpacked
from distckpt._move.plan import RankPlan, plan_moves
from tests.support.layouts import global_bytes
from tests.support.random_layouts import DTYPES, elements_of, random_shards

BUCKET_BYTES = 512
TABLES = RankPlan._fields[: RankPlan._fields.index("compared")]
_Buffer: TypeAlias = tuple[int, bool, int]


class Simulation:
    """Ranks that carry out plans round by round, with the buffers that they have.

    Attributes:
        num_rounds: until all is done.
        sent: by rank, how often it has sent each byte, by the number of the byte.
        given: by rank, how many bytes it has sent that it did not receive before.
        received: by rank, how many bytes it has received.
    """

    def __init__(
        self, plans: list[RankPlan], sources: list[Pieces], targets: list[Pieces], bucket: int
    ) -> None:
        self._sources, self._targets = sources, targets
        # By table and rank, the rows of each round.
        self._rows = {name: [by_wave(getattr(plan, name)) for plan in plans] for name in TABLES}
        self._numbers, total = numbers_of(sources)
        self._values: defaultdict[_Buffer, np.ndarray] = defaultdict(
            lambda: np.zeros(bucket, np.uint8)
        )
        # Of the byte that is at each place.
        self._origins: defaultdict[_Buffer, np.ndarray] = defaultdict(
            lambda: np.full(bucket, -1, np.int64)
        )
        self.sent = [np.zeros(total, np.int64) for _ in plans]
        self.given, self.received = [0] * len(plans), [0] * len(plans)
        self._uses: defaultdict[_Buffer, np.ndarray] = defaultdict(lambda: np.zeros(bucket, "S1"))
        self.num_rounds = plans[0].num_waves + 2
        for rank, plan in enumerate(plans):
            self._copy(rank, plan)
        for number in range(self.num_rounds):
            self._uses.clear()
            for rank in range(len(plans)):
                self._do_round(number, rank)

    @property
    def num_bytes(self) -> list[int]:
        """Return what each rank has sent."""
        return [int(counts.sum()) for counts in self.sent]

    def _do_round(self, number: int, rank: int) -> None:
        wave = number - 1
        for _, start, source, at, shape in self._rows["packs"][rank][number]:
            self._pack((rank, False, number % 2), start, source, at, shape)
        arriving = sorted(
            (peer, tag, size) for _, peer, _, size, tag in self._rows["receives"][rank][wave]
        )
        on_the_way = sorted(
            (sender, tag, size)
            for name in ("sends", "forwards")
            for sender, by_round in enumerate(self._rows[name])
            for _, peer, _, size, tag in by_round[wave]
            if peer == rank
        )
        # All that a rank waits for in a round is sent in the same round.
        assert arriving == on_the_way
        for name, is_landed in (("sends", False), ("forwards", True)):
            for _, peer, start, size, tag in self._rows[name][rank][wave]:
                buffer = (rank, is_landed, (wave - is_landed) % 2)
                self._send(buffer, slice(start, start + size), peer, (wave, rank, tag))
        for taken in (wave, wave - 1):
            for _, holder, has_landed, *unit in self._rows["takes"][rank][taken]:
                if has_landed == (taken < wave):
                    self._take((holder, bool(has_landed), taken % 2), rank, unit)

    def _use(self, buffer: _Buffer, place: slice, is_written: bool) -> None:
        """Note that bytes are used in this round; none is written and used otherwise at a time."""
        uses = self._uses[buffer][place]
        assert len(uses) == place.stop - place.start
        assert not (uses == b"w").any()
        assert not is_written or not (uses == b"r").any()
        uses[:] = b"w" if is_written else b"r"

    def _copy(self, rank: int, plan: RankPlan) -> None:
        for source, target, at, to, shape in plan.copies:
            cut(self._targets[rank].views[target], to, shape).copy_(
                cut(self._sources[rank].views[source], at, shape)
            )

    def _pack(
        self, buffer: _Buffer, start: int, source: int, at: list[int], shape: list[int]
    ) -> None:
        values = cut(self._sources[buffer[0]].views[source], at, shape).contiguous()
        data = values.view(-1).view(torch.uint8).numpy() if values.numel() else np.zeros(0)
        numbers = cut_array(self._numbers[buffer[0]][source], at, shape)
        place = slice(start, start + len(data))
        self._use(buffer, place, is_written=True)
        self._values[buffer][place] = data
        self._origins[buffer][place] = numbers.reshape(-1)

    def _send(
        self, buffer: _Buffer, place: slice, peer: int, message: tuple[int, int, int]
    ) -> None:
        self._use(buffer, place, is_written=False)
        wave, sender, tag = message
        ((start, size),) = [
            row[2:4]
            for row in self._rows["receives"][peer][wave]
            if row[1] == sender and row[4] == tag
        ]
        to, landing = (peer, True, wave % 2), slice(start, start + size)
        self._use(to, landing, is_written=True)
        self._values[to][landing] = self._values[buffer][place]
        origins = self._origins[buffer][place]
        self._origins[to][landing] = origins
        self.received[peer] += size
        self.given[sender] += 0 if buffer[1] else size
        counts = self.sent[sender]
        counts += np.bincount(origins[origins >= 0], minlength=len(counts))

    def _take(self, buffer: _Buffer, rank: int, taken: list[Any]) -> None:
        start, dtype, row, to, shape, at, unit = taken
        kind, target = FROM_NAME[dtype], self._targets[rank].views[row]
        bounds = slice(start, start + math.prod(unit) * kind.itemsize)
        self._use(buffer, bounds, is_written=False)
        values = torch.from_numpy(self._values[buffer][bounds].copy()).view(kind)
        values = values.view(tuple(unit[: target.ndim]))
        cut(target, to, shape).copy_(cut(values, at, shape))


def by_wave(rows: list[list[Any]]) -> defaultdict[int, list[list[Any]]]:
    found: defaultdict[int, list[list[Any]]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found


def numbers_of(sources: list[Pieces]) -> tuple[list[list[np.ndarray]], int]:
    """Number the bytes of all tensors; return those of each piece of each rank, and their count."""
    first: dict[str, int] = {}
    total = 0
    for pieces in sources:
        for kind, *_ in pieces.table:
            if kind.key not in first:
                first[kind.key] = total
                total += math.prod(kind.shape) * FROM_NAME[kind.dtype].itemsize
    found: list[list[np.ndarray]] = []
    for pieces in sources:
        found.append([])
        for kind, region, *_ in pieces.table:
            item = FROM_NAME[kind.dtype].itemsize
            numbers = np.arange(math.prod(kind.shape) * item).reshape(*kind.shape, item)
            found[-1].append(first[kind.key] + numbers[region.slices()])
    return found, total


def cut_array(array: np.ndarray, offset: list[int], shape: list[int]) -> np.ndarray:
    slices = [slice(o, o + n) for o, n in zip(offset, shape, strict=True)]
    return array[tuple(slices[: array.ndim - 1])]


def cut(tensor: torch.Tensor, offset: list[int], shape: list[int]) -> torch.Tensor:
    return tensor[
        tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=False))[: tensor.ndim]
    ]


def check_pair(seed: int) -> None:
    """Move tensors between two random layouts of random ranks on random machines."""
    random = np.random.default_rng(seed)
    num_ranks = int(random.integers(1, 9))
    hosts = random.integers(0, int(random.integers(1, 9)), num_ranks).tolist()
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
    plans = [RankPlan(*unpacked(packed(plan))) for plan in plan_moves(*tables, settings)]
    done = Simulation(plans, sources, targets, BUCKET_BYTES)
    for rank, shards in enumerate(takers):
        for shard, values in zip(shards, expected[rank], strict=True):
            as_bytes = [
                t.contiguous().view(-1).view(torch.uint8) for t in (shard.data, values) if t.numel()
            ]
            assert not as_bytes or torch.equal(*as_bytes), (seed, rank, shard)
    assert sum(done.num_bytes) == plans[0].sent_bytes == lower_bound, seed
    check_loads(done, hosts, seed)


def check_loads(done: Simulation, hosts: list[int], seed: int) -> None:
    """A machine sends each byte twice at most, unless all it gives is twice what one receives."""
    num_given, num_received = (
        np.bincount(hosts, weights=counts) for counts in (done.given, done.received)
    )
    for rank, counts in enumerate(done.sent):
        is_light = num_given[hosts[rank]] <= 2 * num_received.max()
        assert is_light or counts.max(initial=0) <= 2, (seed, rank)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed):
    check_pair(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_a_thousand_random_layouts(first):
    for seed in range(first, first + 50):
        check_pair(seed)


# --- Many machines --------------------------------------------------------------------------------

NUM_HOSTS = 7
ROWS, WIDTH = 56, 64


def spread(
    layouts: list[list[tuple[slice, slice]]], num_keys: int = 8
) -> tuple[list[RankPlan], Simulation]:
    """Plan and simulate a move from rank 0 to machines whose ranks take regions of each tensor."""
    regions = [None, *(region for layout in layouts for region in layout)]
    hosts = [0, *(host for host, layout in enumerate(layouts, 1) for _ in layout)]
    contents = {f"{n}": torch.randn(ROWS, WIDTH) for n in range(num_keys)}

    def shard_of(key: str, place: tuple[slice, slice], data: torch.Tensor) -> ShardedTensor:
        offset, shape = tuple(part.start for part in place), tuple(data.shape)
        return ShardedTensor(key, data, data.dtype, shape, (ROWS, WIDTH), offset, None)

    sources, targets = [], []
    for region in regions:
        given = [shard_of(k, WHOLE, c) for k, c in contents.items()] if region is None else []
        taken = (
            {} if region is None else {k: torch.zeros_like(c[region]) for k, c in contents.items()}
        )
        sources.append(pieces_of(given, ()))
        targets.append(pieces_of([shard_of(k, region, c) for k, c in taken.items()], ()))
    tables = [[side.table for side in sides] for sides in (sources, targets)]
    plans = plan_moves(*tables, MoveSettings(hosts, BUCKET))
    done = Simulation(plans, sources, targets, BUCKET)
    for region, pieces in zip(regions, targets, strict=True):
        for view, content in zip(pieces.views, contents.values(), strict=bool(region)):
            assert torch.equal(view, content[region])
    return plans, done


BUCKET = 16 * WIDTH * 4
TOTAL = 8 * ROWS * WIDTH * 4


WHOLE = (slice(0, ROWS), slice(0, WIDTH))


def rows(count: int) -> list[tuple[slice, slice]]:
    step = ROWS // count
    return [(slice(i * step, (i + 1) * step), slice(0, WIDTH)) for i in range(count)]


def columns(count: int) -> list[tuple[slice, slice]]:
    step = WIDTH // count
    return [(slice(0, ROWS), slice(i * step, (i + 1) * step)) for i in range(count)]


def last_wave(plans: list[RankPlan]) -> int:
    return max(row[0] for plan in plans for row in plan.packs)


@pytest.mark.parametrize("layout", [[WHOLE], rows(4), [WHOLE] * 4])
def test_what_many_machines_want_is_sent_once_by_each(layout):
    plans, done = spread([layout] * NUM_HOSTS)
    assert sum(done.num_bytes) == NUM_HOSTS * TOTAL
    assert done.num_bytes[0] == TOTAL
    by_rank = np.array(done.num_bytes[1:]).reshape(NUM_HOSTS, len(layout))
    # Six of them pass on all that they get, half of it to two others; the seventh is the last one.
    by_host = np.sort(by_rank.sum(axis=1))
    assert (abs(by_host - [0, *[TOTAL] * (NUM_HOSTS - 1)]) <= BUCKET).all()
    # So do their ranks: who receives something passes it on.
    assert (np.ptp(by_rank, axis=1) <= BUCKET).all()
    # The last machine has a unit three steps after it was packed. No buffer stays empty for that.
    num_waves = last_wave(plans) + 1
    assert num_waves == TOTAL / BUCKET
    assert done.num_rounds == num_waves + 4


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_one_or_two_machines_get_all_from_the_giver(num_hosts):
    plans, done = spread([rows(2)] * num_hosts)
    assert done.num_bytes == [num_hosts * TOTAL] + [0] * 2 * num_hosts
    assert done.num_rounds == last_wave(plans) + 3


def test_machines_with_different_layouts_pass_on_what_they_have_in_common():
    layouts = [rows(2), rows(4), rows(7), columns(2), columns(4), columns(1), rows(8)]
    _, done = spread(layouts)
    assert sum(done.num_bytes) == NUM_HOSTS * TOTAL
    assert done.num_bytes[0] == TOTAL
    check_loads(done, [0, *(host for host, of in enumerate(layouts, 1) for _ in of)], 0)


def test_givers_send_directly_where_none_sends_more_than_others_receive():
    """As in a gather of all parts by all machines: to pass them on would gain nothing."""
    num_ranks, shape = 5, (20, 64)
    content = torch.randn(shape)
    sources, targets = [], []
    for rank in range(num_ranks):
        part, full = content.chunk(num_ranks)[rank].clone(), torch.zeros(shape)
        given = ShardedTensor.from_rank_offsets("key", part, (0, rank, num_ranks))
        taken = ShardedTensor.from_rank_offsets("key", full, replica_id=rank)
        sources.append(pieces_of([given], ()))
        targets.append(pieces_of([taken], ()))
    tables = [[side.table for side in sides] for sides in (sources, targets)]
    plans = plan_moves(*tables, MoveSettings(list(range(num_ranks)), BUCKET))
    done = Simulation(plans, sources, targets, BUCKET)
    assert done.num_bytes == [part.nbytes * (num_ranks - 1)] * num_ranks
    assert done.num_rounds == 3


def test_small_tensors_go_together():
    """A message for each small tensor would take longer than what is in it."""
    num_keys = 128
    plans, done = spread([[(slice(0, 1), slice(0, WIDTH))]] * NUM_HOSTS, num_keys)
    num_waves = num_keys * WIDTH * 4 / BUCKET
    assert sum(len(plan.receives) for plan in plans) <= 4 * NUM_HOSTS * (num_waves + 1)
    assert max(done.num_bytes) == num_keys * WIDTH * 4
