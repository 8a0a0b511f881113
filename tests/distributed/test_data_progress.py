"""Data loaders under another number of ranks: the rest of the epoch is read once, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler

import distckpt
from tests.support.harness import kept_ranks

pytest.importorskip("torchdata.stateful_dataloader")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: E402

from distckpt.integrations.torchdata import DataProgress, Shards  # noqa: E402

@pytest.fixture(scope="module")
def run():
    with kept_ranks() as run_ranks:
        yield run_ranks


class Counting(Sampler):
    """Batches of a global order, as Megatron's sampler of pretraining."""

    def __init__(self, num, batch_size, rank, size):
        self.num, self.micro_batch_size, self.rank, self.size = num, batch_size, rank, size
        self.consumed_samples = 0

    def __iter__(self):
        step = self.micro_batch_size * self.size
        for first in range(self.consumed_samples, self.num - step + 1, step):
            begin = first + self.rank * self.micro_batch_size
            yield list(range(begin, begin + self.micro_batch_size))

    def __len__(self):
        return (self.num - self.consumed_samples) // (self.micro_batch_size * self.size)


def numbers(shards):
    for shard in shards:
        for place in range(5 + 3 * shard):
            yield {"x": 100 * shard + place}


def hugging_face(num_shards):
    from datasets import IterableDataset

    return IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(num_shards))})


SAMPLERS = {"torch": DistributedSampler, "torchdata": StatefulDistributedSampler}


def loader_of(kind, rank, size, workers, batch, num, epoch=3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls a deprecated function
        return _loader_of(kind, rank, size, workers, batch, num, epoch)


def _loader_of(kind, rank, size, workers, batch, num, epoch):
    options = {"num_workers": workers}
    if kind == "shards":
        data = Shards(hugging_face(num), rank, size)
        return StatefulDataLoader(data, batch_size=batch, collate_fn=values_of, **options)
    if kind == "counting":
        sampler = Counting(num, batch, rank, size)
        return StatefulDataLoader(range(num), batch_sampler=sampler, **options)
    name, _, shuffle = kind.partition(" ")
    sampler = SAMPLERS[name](range(num), size, rank, shuffle=not shuffle, seed=5)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(range(num), batch_size=batch, sampler=sampler, **options)


def values_of(examples):
    return torch.tensor([example["x"] for example in examples])


def read(rank, kind, num, workers, batch, steps, path, begin=None, then=None):
    """Load from `begin`, make some steps (None: all), and save at `then`."""
    size = torch.distributed.get_world_size()
    loader = loader_of(kind, rank, size, workers, batch, num, epoch=3 if begin is None else 0)
    progress = DataProgress(loader, rank, size)
    state = {"data": progress, "rng": distckpt.RngState({"all": (0, 1)})}
    if begin is not None:
        distckpt.load({"data": progress}, f"{path}/{begin}")
    batches = []
    iterator = iter(loader)
    while steps is None or len(batches) < steps:
        try:
            batches.append(next(iterator).tolist())
        except StopIteration:
            break
    if then is not None:
        distckpt.save(state, f"{path}/{then}")
    return batches


def in_steps(of_ranks):
    """Return the examples of each step, of all ranks."""
    return [sorted(sum(step, [])) for step in zip(*of_ranks, strict=True)]


def together(of_ranks):
    return sorted(x for batches in of_ranks for batch in batches for x in batch)


def order_of(kind, num):
    """The global order, as DistributedSampler documents it: by seed and epoch."""
    if kind in ("counting", "torch sequential"):
        return list(range(num))
    generator = torch.Generator().manual_seed(5 + 3)
    return torch.randperm(num, generator=generator).tolist()


CHAINS = [
    # Each is (ranks, workers, batch of a rank, steps), the last without steps.
    [(2, 0, 2, 3), (4, 0, 1, 2), (1, 0, 4, None)],
    [(4, 1, 1, 3), (2, 2, 2, None)],
    [(1, 2, 4, 2), (3, 0, 4, None)],
    [(3, 0, 2, 2), (2, 3, 3, 1), (3, 4, 2, None)],
]


@pytest.mark.parametrize("chain", CHAINS, ids=["2-4-1", "4-2", "1-3", "3-2-3"])
@pytest.mark.parametrize("kind", ["torch", "torchdata", "torch sequential", "counting"])
def test_the_global_order_goes_on(run, kind, chain, tmp_path):
    num = 60
    expected = order_of(kind, num)
    place = 0
    for number, (ranks, workers, batch, steps) in enumerate(chain):
        begin = number - 1 if number else None
        found = run(read, ranks, kind, num, workers, batch, steps, str(tmp_path), begin, number)
        for step in in_steps(found):
            assert step == sorted(expected[place : place + len(step)])
            place += len(step)
    assert place == num


@pytest.mark.parametrize("chain", CHAINS, ids=["2-4-1", "4-2", "1-3", "3-2-3"])
def test_each_data_shard_goes_on(run, chain, tmp_path):
    pytest.importorskip("datasets")
    examples = []
    for number, (ranks, workers, batch, steps) in enumerate(chain):
        begin = number - 1 if number else None
        found = run(read, ranks, "shards", 5, workers, batch, steps, str(tmp_path), begin, number)
        examples += together(found)
    assert sorted(examples) == [example["x"] for example in hugging_face(5)]
