"""Data loaders under another number of ranks: the rest of the epoch is read once, or refused.

Ranks are loaders of one process here: they exchange nothing but the checkpoint.
"""

from __future__ import annotations

import itertools
import multiprocessing
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

import distckpt
from tests.support.harness import error_of

pytest.importorskip("torchdata.stateful_dataloader")

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, StatefulDistributedSampler

from distckpt.integrations.torchdata import DataProgress, Shards

# torchdata calls a deprecated function, and torch counts the cores of the machine.
pytestmark = pytest.mark.filterwarnings("ignore:.*(set_vital|worker processes)")


class Counting(Sampler):
    """Batches of a global order, as Megatron's sampler of pretraining."""

    def __init__(self, num, batch_size, rank, size):
        self.num, self.micro_batch_size, self.rank, self.size = num, batch_size, rank, size
        self.consumed_samples = 0

    def __iter__(self):
        step = self.micro_batch_size * self.size
        for first in range(self.consumed_samples, self.num, step):
            begin = first + self.rank * self.micro_batch_size
            if begin < self.num:
                yield list(range(begin, min(begin + self.micro_batch_size, self.num)))

    def __len__(self):
        return (self.num - self.consumed_samples) // (self.micro_batch_size * self.size)


class CountingAsItGoes(Counting):
    """Its next iteration begins after what was taken from it, not after what was read."""

    def __iter__(self):
        for batch in super().__iter__():
            self.consumed_samples += len(batch)
            yield batch


class Blocks(DistributedSampler):
    """An order of its own: each rank has a block of neighbors."""

    def __iter__(self):
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def numbers(shards):
    for shard in shards:
        for place in range(2 + 3 * shard):
            yield {"x": 100 * shard + place}


def hugging_face(num_shards):
    datasets = pytest.importorskip("datasets")
    shards = {"shards": list(range(num_shards))}
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs=shards)


def values_of(examples):
    return torch.tensor([example["x"] for example in examples], dtype=torch.int64)


SAMPLERS = {"torch": DistributedSampler, "torchdata": StatefulDistributedSampler}


def loader_of(kind, rank, size, workers, batch, num, *, epoch=3, **options):
    options["num_workers"] = workers
    if kind == "shards":
        data = Shards(hugging_face(num), rank, size)
        return StatefulDataLoader(data, batch_size=batch, collate_fn=values_of, **options)
    if kind == "counting":
        sampler = Counting(num, batch, rank, size)
        return StatefulDataLoader(range(num), batch_sampler=sampler, **options)
    name, _, in_order = kind.partition(" ")
    sampler = SAMPLERS[name](range(num), size, rank, shuffle=not in_order, seed=5)
    sampler.set_epoch(epoch)
    return StatefulDataLoader(range(num), batch_size=batch, sampler=sampler, **options)


class Job:
    """The loaders of all ranks."""

    def __init__(self, kind, size, workers, batch, num, **options):
        self.loaders = []
        for rank in range(size):
            self.loaders.append(loader_of(kind, rank, size, workers, batch, num, **options))
        self.progress = [DataProgress(each, n, size) for n, each in enumerate(self.loaders)]
        self.iterators = None

    def save(self, path):
        """Save as ranks do: state that they have in common is that of the first one."""
        if isinstance(self.loaders[0].dataset, Shards):
            state = {"data": self.progress}
        else:
            states = [progress.state_dict() for progress in self.progress]
            places = {(each["position"], each["epoch"]) for each in states}
            assert len(places) == 1
            state = {"data": self.progress[0], "others": [each["positions"] for each in states[1:]]}
        distckpt.save(state, path, overwrite=True)

    def load(self, path):
        if isinstance(self.loaders[0].dataset, Shards):
            distckpt.load({"data": self.progress}, path)
        else:
            for progress in self.progress:
                distckpt.load({"data": progress}, path)

    def steps(self, count=None):
        """Make steps, or all; return the examples of each step, and of all ranks together."""
        if self.iterators is None:
            self.iterators = [iter(loader) for loader in self.loaders]
        steps = []
        while count is None or len(steps) < count:
            batches = [next(iterator, None) for iterator in self.iterators]
            if all(batch is None for batch in batches):
                break
            steps.append([x for batch in batches if batch is not None for x in batch.tolist()])
        return steps


def joined(steps):
    return list(itertools.chain.from_iterable(steps))


def order_of(kind, num):
    """The global order, as torch documents that of DistributedSampler: by seed and epoch."""
    if kind in ("counting", "torch in order"):
        return list(range(num))
    generator = torch.Generator().manual_seed(5 + 3)
    return torch.randperm(num, generator=generator).tolist()


CHAINS = {
    # Each is (ranks, workers, batch of a rank, steps), the last without steps.
    "2-4-1": [(2, 0, 2, 3), (4, 0, 1, 2), (1, 0, 4, None)],
    "2-1-2 with workers": [(2, 1, 2, 2), (1, 4, 2, 3), (2, 0, 3, None)],
    "1-3-2": [(1, 2, 4, 1), (3, 0, 4, 2), (2, 2, 4, None)],
    "3-2, position not divided": [(3, 0, 1, 3), (2, 0, 8, None)],
    "3-4-2, not divided": [(3, 0, 1, 1), (4, 0, 8, 1), (2, 2, 8, None)],
    "0 steps": [(2, 0, 2, 0), (3, 0, 4, None)],
    "same ranks": [(2, 0, 3, 2), (2, 2, 3, 1), (2, 0, 3, None)],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("kind", ["torch", "torchdata", "torch in order", "counting"])
def test_the_global_order_goes_on(kind, chain, tmp_path):
    expected = order_of(kind, 60)
    place = 0
    for number, (size, workers, batch, count) in enumerate(chain):
        job = Job(kind, size, workers, batch, 60, epoch=0 if number else 3)
        if number:
            job.load(tmp_path / "step")
        for step in job.steps(count):
            assert sorted(step) == sorted(expected[place : place + len(step)])
            place += len(step)
        if count is not None:
            job.save(tmp_path / "step")
    assert place == 60


@pytest.mark.parametrize("kind", ["torch", "torchdata", "counting"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_later_save_may_make_another_progress(kind, steps, tmp_path):
    job = Job(kind, 2, 0, 2, 24)
    place = len(joined(job.steps(2)))
    job.save(tmp_path / "step")
    other = Job(kind, 1, 0, 2, 24)
    other.load(tmp_path / "step")
    if steps:
        place += len(joined(other.steps(steps)))
    other.progress = [DataProgress(other.loaders[0], 0, 1)]
    other.save(tmp_path / "later")
    last = Job(kind, 2, 0, 2, 24)
    last.load(tmp_path / "later")
    assert sorted(joined(last.steps())) == sorted(order_of(kind, 24)[place:])


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_each_data_shard_goes_on(chain, tmp_path):
    examples = []
    for number, (size, workers, batch, count) in enumerate(chain):
        job = Job("shards", size, workers, batch, 5)
        if number:
            job.load(tmp_path / "step")
        for step in job.steps(count):
            examples += step
        job.save(tmp_path / "step")
    assert sorted(examples) == sorted(example["x"] for example in hugging_face(5))


@pytest.mark.parametrize(("size", "workers"), [(4, 0), (4, 1), (2, 0)])
def test_a_rank_that_has_read_its_data_shards_waits_for_the_others(size, workers, tmp_path):
    """The third of four ranks has 8 of 57 examples, and ends before the others."""
    job = Job("shards", 4, 0, 4, 6)
    examples = joined(job.steps(3))
    job.save(tmp_path / "step")
    other = Job("shards", size, workers, 2, 6)
    other.load(tmp_path / "step")
    examples += joined(other.steps())
    assert sorted(examples) == sorted(example["x"] for example in hugging_face(6))


@pytest.mark.parametrize("kind", ["torch", "torchdata", "shards"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_has_ended_is_followed_by_a_whole_one(kind, workers, tmp_path):
    num = 4 if kind == "shards" else 12
    job = Job(kind, 2, 0, 2, num)
    first = sorted(joined(job.steps()))
    job.save(tmp_path / "step")
    other = Job(kind, 1, workers, 2, num)
    other.load(tmp_path / "step")
    assert sorted(joined(other.steps())) == first


@pytest.mark.parametrize("kind", ["torch", "shards"])
@pytest.mark.parametrize("workers", [0, 2, -2], ids=["none", "2", "2 persistent"])
def test_after_the_rest_of_an_epoch_comes_a_whole_one(kind, workers, tmp_path):
    num = 4 if kind == "shards" else 12
    job = Job(kind, 2, 0, 2, num)
    job.steps(2)
    job.save(tmp_path / "step")
    other = Job(kind, 1, abs(workers), 2, num, persistent_workers=workers < 0)
    other.load(tmp_path / "step")
    rest = joined(other.steps())
    other.iterators = None
    again = joined(other.steps(3))
    other.save(tmp_path / "again")
    last = Job(kind, 2, 0, 3, num)
    last.load(tmp_path / "again")
    again += joined(last.steps())
    assert len(rest) < len(again) == len(set(again))


@pytest.mark.parametrize("workers", [0, 2])
def test_snapshots_of_every_third_step_go_on(workers, tmp_path):
    options = {"snapshot_every_n_steps": 3}
    job = Job("torch", 2, workers, 2, 60, **options)
    seen = joined(job.steps(4))
    job.save(tmp_path / "step")
    job = Job("torch", 4, workers, 1, 60, epoch=0, **options)
    job.load(tmp_path / "step")
    seen += joined(job.steps(5))
    job.save(tmp_path / "step")
    last = Job("torch", 1, 0, 3, 60, epoch=0)
    last.load(tmp_path / "step")
    seen += joined(last.steps())
    assert sorted(seen) == list(range(60))
    assert len(order_of("torch", 60)) == len(seen)


def test_padding_that_was_read_is_not_repeated(tmp_path):
    job = Job("torch", 2, 0, 1, 13)
    assert len(joined(job.steps(7))) == 14  # DistributedSampler repeats one
    job.save(tmp_path / "step")
    other = Job("torch", 4, 0, 1, 13)
    other.load(tmp_path / "step")
    assert other.steps() == []


def test_a_load_leaves_random_numbers_alone(tmp_path):
    job = Job("torch", 2, 0, 2, 12)
    job.steps(1)
    job.save(tmp_path / "step")
    other = Job("torch", 1, 0, 2, 12)
    before = torch.get_rng_state()
    other.load(tmp_path / "step")
    assert torch.equal(torch.get_rng_state(), before)


# --- Refusals -------------------------------------------------------------------------------------


def saved(tmp_path, *arguments, steps, **options):
    job = Job(*arguments, **options)
    job.steps(steps)
    job.save(tmp_path / "step")


REFUSED = {
    "other examples": (("torch", 1, 0, 2, 13), "'examples': 12"),
    "another order": (("torch in order", 1, 0, 2, 12), "'sampler': 'DistributedSampler'"),
    "another kind": (("counting", 1, 0, 2, 12), "'sampler': 'Counting'"),
    "uneven batches": (("torch", 4, 0, 1, 12), r"after 6 examples ranks would have \[1, 2\]"),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_divided_is_refused_with_loader_sizes_and_reason(
    arguments, reason, tmp_path
):
    saved(tmp_path, "torch", 3, 0, 2, 12, steps=1)
    job = Job(*arguments)
    with pytest.raises(distckpt.LoadMismatchError, match=reason) as caught:
        job.load(tmp_path / "step")
    size = arguments[1]
    text = f"'data', saved on 3 data parallel ranks, cannot go on on {size}: "
    assert text in str(caught.value)


def test_another_number_of_data_shards_is_refused(tmp_path):
    saved(tmp_path, "shards", 2, 0, 2, 4, steps=1)
    job = Job("shards", 2, 0, 2, 5)
    with pytest.raises(distckpt.LoadMismatchError, match="places_in_5_shards"):
        job.load(tmp_path / "step")


def test_loaders_whose_order_depends_on_ranks_are_refused():
    data = range(8)
    sharded = Counting(8, 2, 0, 1)
    sharded.data_sharding = True
    counting = CountingAsItGoes(8, 2, 0, 1)
    own_batches = BatchSampler(RandomSampler(data), 2, drop_last=False)
    cases = [
        (DataLoader(data), (0, 1), "use torchdata's StatefulDataLoader"),
        (StatefulDataLoader(data, shuffle=True), (0, 1), "RandomSampler"),
        (StatefulDataLoader(data), (0, 2), "SequentialSampler"),
        (StatefulDataLoader(data, sampler=DistributedSampler(data, 2, 1)), (0, 2), r"\(1, 2\)"),
        (StatefulDataLoader(data, batch_sampler=[[0, 1]]), (0, 1), "batch sampler"),
        (StatefulDataLoader(data, batch_sampler=sharded), (0, 1), "buckets"),
        (StatefulDataLoader(data, sampler=RandomSampler(data)), (0, 1), "RandomSampler"),
        (StatefulDataLoader(data, sampler=Blocks(data, 2, 0)), (0, 2), "Blocks"),
        (StatefulDataLoader(data, batch_sampler=own_batches), (0, 1), "batch sampler"),
        (StatefulDataLoader(data, batch_sampler=counting), (0, 1), "CountingAsItGoes"),
        (StatefulDataLoader(data, num_workers=2, in_order=False), (0, 1), "in_order"),
    ]
    for loader, place, reason in cases:
        with pytest.raises(ValueError, match=f"'train' cannot go on .*{reason}"):
            DataProgress(loader, *place, name="train")


def test_data_that_cannot_be_resumed_is_refused():
    dataset = hugging_face(4)
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node(dataset, 0, 2)
    cases = [
        (dataset.shuffle(seed=1, buffer_size=8), 2, "shuffle buffer"),
        (dataset.shuffle(seed=1, buffer_size=8).map(dict), 2, "shuffle buffer"),
        (dataset.take(9).map(dict), 2, r"take\(\)"),
        (dataset.skip(2), 2, r"skip\(\)"),
        (dataset.repeat(None).map(dict), 2, r"repeat\(\)"),
        (dataset.with_format("arrow"), 2, "tables"),
        (split, 2, "split_dataset_by_node"),
        (dataset, 5, "4 data shards for 5 ranks"),
    ]
    for given, size, reason in cases:
        with pytest.raises(ValueError, match=reason):
            Shards(given, 0, size)
    with pytest.raises(ValueError, match="wrap its data in Shards"):
        DataProgress(StatefulDataLoader(split), 0, 2)


# --- Processes ------------------------------------------------------------------------------------


def on_ranks(rank, path, num_steps, loads):
    # Ranks of tests are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False
    size = torch.distributed.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = loader_of("torch", rank, size, 1, 2, 24)
        state = {"data": DataProgress(loader, rank, size), "step": 1}
        if loads and num_steps:
            return str(error_of(distckpt.load, state, path))
        if loads:
            distckpt.load(state, path)
            return [batch.tolist() for batch in loader]
        batches = [batch.tolist() for _, batch in zip(range(num_steps[rank]), loader, strict=False)]
        distckpt.save(state, path)
    return batches


def test_processes_take_the_rest(run, tmp_path):
    path = str(tmp_path / "step")
    seen = run(on_ranks, 2, path, (2, 2), False)
    seen += run(on_ranks, 1, path, None, True)
    assert sorted(x for batches in seen for batch in batches for x in batch) == list(range(24))


def test_ranks_at_different_positions_are_refused(run, tmp_path):
    path = str(tmp_path / "step")
    run(on_ranks, 2, path, (2, 1), False)
    for error in run(on_ranks, 2, path, (0, 0), True):
        assert "ranks were at different positions, [4, 8]" in error
