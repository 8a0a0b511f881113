"""What ranks send each other: along a tree where there are many, and in few messages."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import ShardedTensor
from distckpt._ranks import groups
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import Exchanges, pack_parts, unpack_parts
from tests.support.collectives import counted_collectives
from tests.support.divided import plan_on_ranks
from tests.support.harness import error_of, run, sum_over_ranks
from tests.support.manifests import set_limits

SIZES = (0, 1, 503, 504, 505, 100_000)
"""Around what fits into one message."""


def payload(rank, size):
    return np.random.default_rng([rank, size]).bytes(size)


def exchange(rank, fan_out):
    """Exchange payloads of all sizes in every way; return what is wrong."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "FAN_OUT", fan_out)
        ranks = Exchanges()
        wrong = []
        for shift in range(len(SIZES)):
            sizes = [SIZES[(other + shift) % len(SIZES)] for other in range(ranks.size)]
            of_all = [payload(other, size) for other, size in enumerate(sizes)]
            own, is_first = of_all[rank], ranks.is_coordinator
            results = {
                "gather": (ranks.gather(own), of_all if is_first else []),
                "all_gather": (ranks.all_gather(own), of_all),
                "scatter": (ranks.scatter(of_all if is_first else []), own),
                "broadcast": (ranks.broadcast(own if is_first else b""), of_all[0]),
                "gather_once": (
                    ranks.gather_once([own, b"same" * shift]),
                    [of_all, [b"same" * shift] * ranks.size] if is_first else [[], []],
                ),
                "numbers": (
                    ranks.all_gather_numbers([rank, -shift]).tolist(),
                    [[other, -shift] for other in range(ranks.size)],
                ),
            }
            wrong += [name for name, (found, expected) in results.items() if found != expected]
        return wrong


@pytest.mark.parametrize(("num_ranks", "fan_out"), [(3, 16), (3, 2), (4, 3), (5, 2)])
def test_every_rank_gets_what_others_sent(num_ranks, fan_out):
    assert run(exchange, num_ranks, fan_out) == [[]] * num_ranks


def gather_what_some_have_in_common(rank):
    members = dist.new_group([3, 1, 2])
    if rank == 0:
        return None
    ranks = Ranks(members)
    return ranks.gather_once(
        [["", b"same", b"other", b"same"][rank], b"", b"own %d" % rank, b"all"]
    )


def test_what_ranks_have_in_common_is_gathered_from_one():
    results = run(gather_what_some_have_in_common, 4)
    gathered = [
        [b"same", b"other", b"same"],
        [b""] * 3,
        [b"own 1", b"own 2", b"own 3"],
        [b"all"] * 3,
    ]
    assert results == [None, gathered, *[[[]] * 4] * 2]


def rows_of(rank, num_ranks, value):
    rows = torch.full((2, 8), float(100 * value + rank))
    copied = torch.full((3,), float(value))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, num_ranks)),
        "copied": ShardedTensor.from_rank_offsets("copied", copied, replica_id=rank),
        "step": value,
    }


def save_along_a_tree(rank, num_ranks, folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "FAN_OUT", 2)
        for value in (1, 2):
            distckpt.save(rows_of(rank, num_ranks, value), f"{folder}/{value}")
        distckpt.async_save(rows_of(rank, num_ranks, 3), f"{folder}/3").result(60)
        target = rows_of(rank, num_ranks, 0)
        steps = [distckpt.load(target, f"{folder}/{value}")["step"] for value in (1, 2, 3)]
        wrong = rows_of(rank, num_ranks, 4)
        if rank == num_ranks - 1:
            wrong["rows"].data = torch.zeros(1, 1)
        return (
            steps,
            target["rows"].data[0, 0].item(),
            error_of(distckpt.save, wrong, f"{folder}/4"),
        )


def test_saves_and_loads_along_a_tree(tmp_path):
    num_ranks = 5
    outcomes = run(save_along_a_tree, num_ranks, num_ranks, str(tmp_path))
    for rank, (steps, last, error) in enumerate(outcomes):
        assert steps == [1, 2, 3]
        assert last == 300.0 + rank
        assert isinstance(error, distckpt.RankFailedError)
        assert list(error.failures) == [num_ranks - 1]
    for value in (1, 2, 3):
        rows = distckpt.open(tmp_path / str(value)).read_tensors()["rows"]
        assert rows[::2, 0].tolist() == [100.0 * value + rank for rank in range(num_ranks)]


def count_collectives(rank, num_ranks, folder):
    """Return the collectives of each of three saves of one structure."""
    with counted_collectives() as calls:
        counts = []
        for value in range(3):
            calls.clear()
            distckpt.save(rows_of(rank, num_ranks, value), f"{folder}/{value}")
            counts.append(dict(calls))
        return counts


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_repeated_save_makes_four_collectives(num_ranks, tmp_path):
    for counts in run(count_collectives, num_ranks, num_ranks, str(tmp_path)):
        assert counts[1:] == [{"gather": 2, "broadcast": 2}] * 2


def count_with_planners(rank, num_ranks, folder):
    """Do the same where the first save is planned by several ranks, and so large that they make
    parts of the manifest.
    """
    plan_on_ranks(2)
    set_limits(pytest.MonkeyPatch(), part_rows=1 << 20)
    return count_collectives(rank, num_ranks, folder)


def test_planners_take_as_many_collectives_as_documented(tmp_path):
    for alone, divided in zip(
        run(count_collectives, 4, 4, str(tmp_path / "alone")),
        run(count_with_planners, 4, 4, str(tmp_path / "divided")),
        strict=True,
    ):
        assert sum(alone[0].values()) == 13
        assert sum(divided[0].values()) == 26
        assert divided[1:] == alone[1:]


def differ_in_a_part(rank):
    """One rank fails within a part of a phase."""

    def work():
        ranks = Ranks()
        with ranks.phase("the whole"):
            with ranks.part("the first half"):
                pass
            with ranks.part("the other half", decision=True):
                if rank == 1:
                    raise OSError(5, "broken")

    return error_of(work)


def test_an_error_names_the_part_of_a_phase():
    for error in run(differ_in_a_part, 2):
        assert "1 rank failed during 'the other half'" in str(error)
        assert list(error.failures) == [1]


def answer_each(rank, fan_out, failing):
    """Tell the coordinator a number, which answers each rank with another; a rank fails, or the
    coordinator with its answer. Return the answer or error, and whether the ranks are in step.
    """

    def answers(told):
        if failing == "answer":
            raise ValueError("no answer")
        return [payload(number[0], 600) for number in told.payloads]

    def tell():
        ranks = Ranks()
        with ranks.telling("tell a number", answer_each=True) as told:
            if rank == failing:
                raise ValueError(f"no number from {rank}")
            told.payload = bytes([10 * rank])
        return ranks.decide_each("answer", lambda: answers(told), told)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "FAN_OUT", fan_out)
        found = tell() if failing is None else str(error_of(tell))
        return found, sum_over_ranks(1)


@pytest.mark.parametrize("fan_out", [16, 2])
@pytest.mark.parametrize("failing", [None, 0, 2, "answer"])
def test_each_rank_gets_an_answer_or_all_raise_the_same_error(fan_out, failing):
    answers, sums = zip(*run(answer_each, 3, fan_out, failing), strict=True)
    assert sums == (3, 3, 3)
    if failing is None:
        assert list(answers) == [payload(10 * rank, 600) for rank in range(3)]
        return
    assert len(set(answers)) == 1
    missing = "no answer" if failing == "answer" else f"no number from {failing}"
    assert missing in answers[0]
    if failing != "answer":
        assert f"rank {failing}" in answers[0]


def count_in_loads(rank, folder):
    """Return the collectives of a load in which ranks read alone, and of one in which they share
    what they read.
    """
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(100), replica_id=rank)
    distckpt.save({"w": shard}, folder)
    with counted_collectives() as calls:
        counts = []
        for mode in ("off", "on"):
            calls.clear()
            distckpt.load({"w": shard}, folder, share_reads=mode)
            counts.append(dict(calls))
        return counts


def test_to_share_what_is_read_takes_four_collectives_if_it_is_one_wave(tmp_path):
    for alone, shared in run(count_in_loads, 2, str(tmp_path / "checkpoint")):
        more = {name: shared[name] - alone.get(name, 0) for name in shared}
        assert more == {"gather": 2, "broadcast": 1, "scatter": 1}


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"ab", b"", b"c" * 1000]])
def test_packed_parts_are_the_same_again(parts):
    assert unpack_parts(pack_parts(parts)) == parts


def num_sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        # The descriptor of the directory itself is closed by now.
        links.append(os.readlink(path) if os.path.lexists(path) else "")
    return sum(link.startswith("socket") for link in links)


def connections_of_saves_and_loads(rank, num_ranks, fan_out, path):
    """Return how many connections they open; all ranks are connected by the group before."""

    def state(value):
        part = torch.full((1, 4), float(value))
        return {"a": ShardedTensor.from_rank_offsets("a", part, (0, rank, num_ranks))}

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "FAN_OUT", fan_out)
        sum_over_ranks(1)
        before = num_sockets()
        distckpt.save(state(rank), f"{path}/first")
        distckpt.save(state(rank), f"{path}/second")
        loaded = state(-1)
        distckpt.load(loaded, f"{path}/second")
        assert (loaded["a"].data == rank).all()
        return num_sockets() - before


@pytest.mark.parametrize(
    ("num_ranks", "fan_out", "num_levels"),
    [
        (20, 4, 3),
        pytest.param(128, 16, 2, marks=pytest.mark.slow),
        pytest.param(320, 16, 3, marks=pytest.mark.slow),
    ],
)
def test_connections_grow_with_the_levels_of_the_tree(tmp_path, num_ranks, fan_out, num_levels):
    opened = run(connections_of_saves_and_loads, num_ranks, num_ranks, fan_out, str(tmp_path))
    # One rank with the others of a group on each level, and the store; a mesh would be more.
    most = (fan_out - 1) * num_levels + 4
    assert 0 < max(opened) <= most < num_ranks - 1
