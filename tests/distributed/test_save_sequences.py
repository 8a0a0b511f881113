"""Sequences of saves of different state dicts: each ends as it does in a process that has saved
nothing before.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor
from tests.support.harness import run
from tests.support.sampling import one_in

NUM_RANKS = 3


def replica(key, value):
    return ShardedTensor.from_rank_offsets(key, torch.full((200,), float(value)))


def part(key, rank):
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), float(rank)), (0, rank, NUM_RANKS))


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 2)


def trained(seed):
    net = model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 + seed)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": net, "optimizer": optimizer}


ENTRIES = {
    "value": lambda rank: {"a": 3},
    "another value": lambda rank: {"a": "v"},
    "value of each rank": lambda rank: {"a": rank},
    "tensor as value": lambda rank: {"a": torch.ones(3)},
    "tensor of each rank as value": lambda rank: {"a": torch.arange(3.0) + 50 * rank},
    "replica": lambda rank: {"a": replica("x", 1)},
    "replica of another key": lambda rank: {"c": replica("y", 1)},
    "replica of each rank": lambda rank: {"a": replica("x", 9 * rank)},
    "part": lambda rank: {"c": part("z", rank)},
    "object": lambda rank: {"c": ShardedObject("o", rank, (NUM_RANKS,), (rank,))},
    "model": lambda rank: {"model": model(0)},
    "model of each rank": lambda rank: {"model": model(rank)},
    "trained": lambda rank: trained(0),
    "trained on each rank": lambda rank: trained(rank),
    "schedule": lambda rank: {"c": torch.optim.lr_scheduler.StepLR(trained(0)["optimizer"], 1)},
    "lock": lambda rank: {"model": threading.Lock()},
    "lock beside": lambda rank: {"lock": threading.Lock()},
}


def sequences(seed):
    """Return, for each of some saves, the names of the entries of each rank."""
    choice = random.Random(seed)
    saves = []
    for _ in range(4):
        common = choice.sample(sorted(ENTRIES), 2)
        names = [list(common) for _ in range(NUM_RANKS)]
        if choice.random() < 0.7:
            names[choice.randrange(NUM_RANKS)][1] = choice.choice(sorted(ENTRIES))
        if choice.random() < 0.3:
            del names[choice.randrange(NUM_RANKS)][0]
        saves.append(names)
    return saves


def outcomes(rank, saves, path):
    """Make some saves; return the errors of this rank."""
    errors = []
    for number, names in enumerate(saves):
        state = {}
        for name in names[rank]:
            state |= ENTRIES[name](rank)
        try:
            distckpt.save(state, f"{path}_{number}")
            errors.append(None)
        except distckpt.CheckpointingException as error:
            errors.append(f"{type(error).__name__}: {error}".replace(path, "path"))
    return errors


def content(path):
    stored = distckpt.open(path)
    tensors = {key: value.tolist() for key, value in stored.read_tensors().items()}
    objects = {key: repr(stored.objects[key]) for key in sorted(stored.objects)}
    return tensors, objects, repr(stored.common_state)


@pytest.mark.parametrize("seed", one_in(12, range(24)))
def test_a_save_is_judged_by_its_own_content(seed, tmp_path):
    saves = sequences(seed)
    in_turn = run(outcomes, NUM_RANKS, saves, str(tmp_path / "in_turn"))
    num_saved = 0
    for number, names in enumerate(saves):
        fresh = run(outcomes, NUM_RANKS, [names], str(tmp_path / f"fresh_{number}"))
        errors = [of_rank[number] for of_rank in in_turn]
        assert errors == [
            of_rank[0].replace(f"fresh_{number}_0", "") if of_rank[0] else None for of_rank in fresh
        ], names
        if errors[0] is None:
            num_saved += 1
            own = content(tmp_path / f"in_turn_{number}")
            assert own == content(tmp_path / f"fresh_{number}_0"), names


def alternate(rank, path):
    """Let ranks remember different entries, and then save the same."""
    first = [{"c": "v"}, {"a": 3}, {"a": replica("x", 1)}][rank]
    second = [{"c": "v"}, {"c": "v"}, {"a": replica("x", 1)}][rank]
    results = []
    for number, state in enumerate([first, {"c": "w"}, second, {"c": "w"}, {"c": "w"}]):
        distckpt.save(state, f"{path}_{number}")
        distckpt.async_save(state, f"{path}_{number}_async").result(60)
        results.append(distckpt.load({}, f"{path}_{number}")["c"])
    return results


def test_ranks_that_remember_different_saves_save_together(tmp_path):
    for results in run(alternate, NUM_RANKS, str(tmp_path / "saved")):
        assert results == ["v", "w", "v", "w", "w"]
