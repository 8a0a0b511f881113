"""Progress of data loaders under any number of data parallel ranks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler, get_worker_info

from distckpt._base.errors import LoadMismatchError
from distckpt.mapping import ShardedObject, ShardedTensor
from distckpt.mapping._base import OpenReplicaId

__all__ = ["DataProgress", "Shards"]

_NUM_CELLS = 1 << 14
"""Length of the axis on which any number of ranks stores positions."""

_ORIGINS = ("torch.utils.data.distributed", "torchdata.stateful_dataloader.sampler")
"""Modules with samplers in the order of torch's `DistributedSampler`."""

_BEGINS: MutableMapping[Any, int] = WeakKeyDictionary()
"""Position at which the iteration of a loader after a load begins.

It belongs to the loader: each save may make another `DataProgress` of it.
"""


class Shards(IterableDataset[Any]):
    """Data shards of a Hugging Face `IterableDataset` that this rank reads.

        dataset = load_dataset("json", data_files=files, streaming=True, split="train")
        loader = StatefulDataLoader(Shards(dataset, dp_rank, dp_size), batch_size=8, num_workers=2)

    Rank r of n, and each of its workers, reads every n-th data shard, one after the other, and
    keeps the place in each.

    Args:
        dataset: has `num_shards`, `shard` and `iter`, and a state. It is not split among ranks yet.
        rank: data parallel rank.
        size: number of data parallel ranks, at most the number of data shards.

    Raises:
        ValueError: it has too few data shards or is split already, has no examples (a format of
            tables), or does not read each once when resumed (a shuffle buffer) or divided (`take`).
    """

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.size = size
        self.num_shards = dataset.num_shards
        fault = _fault_of(getattr(dataset, "_ex_iterable", None))
        if self.num_shards < size:
            fault = (
                f"{self.num_shards} data shards for {size} ranks, and a data shard is read by one "
                "rank: store it in more files, or make more by reshard()"
            )
        if getattr(dataset, "_distributed", None) is not None:
            fault = (
                "a part made by split_dataset_by_node, which depends on the number of ranks: give "
                "Shards the whole dataset"
            )
        if getattr(getattr(dataset, "_formatting", None), "is_table", False):
            fault = "a format of tables instead of examples: call with_format() with another one"
        if fault:
            raise ValueError(f"The {type(dataset).__name__} has {fault}.")
        self._places: dict[int, Any] = {}
        self._is_resumed = False
        self._part: tuple[int, Any] | None = None

    @property
    def own(self) -> range:
        """The numbers of the data shards of this rank, or worker."""
        own = range(self.rank, self.num_shards, self.size)
        worker = get_worker_info()
        if worker is None:
            return own
        return own[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest after a load, once; everything otherwise."""
        if not self._is_resumed:
            self._places = {}
        self._is_resumed = False
        for number in self.own:
            part = self.dataset.shard(num_shards=self.num_shards, index=number, contiguous=False)
            if self._places.get(number) is not None:
                part.load_state_dict(self._places[number])
            self._part = (number, part)
            # `iter(part)` in a worker would divide the data shard among the workers.
            for batch in part.iter(batch_size=1):
                yield {name: values[0] for name, values in batch.items()}
            self._places[number] = part.state_dict()
            self._part = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place in each data shard of this rank, or worker."""
        places = dict(self._places)
        if self._part is not None:
            number, part = self._part
            places[number] = part.state_dict()
        return {"places": [[number, places.get(number)] for number in self.own]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the places of data shards, for the next iteration."""
        self._places = dict(state["places"])
        self._is_resumed = True
        self._part = None


_FAULTS = {
    "BufferShuffled": "a shuffle buffer, whose examples are lost when it is resumed: shuffle "
    "before the dataset is stored, or leave shuffle() out",
    "Take": "a part made by take(), which takes other examples of each data shard: store that part",
    "Skip": "a part made by skip(), which skips other examples of each data shard: store the rest",
    "Repeat": "a repeat() without end, so that each rank reads its first data shard only: iterate "
    "over the loader again instead",
}
"""Beginnings of names of classes in datasets, and their faults."""


def _fault_of(iterable: Any) -> str:
    """Describe why an iterable cannot be divided, or return ""."""
    for beginning, fault in _FAULTS.items():
        has_end = getattr(iterable, "num_times", None) is not None
        if type(iterable).__name__.startswith(beginning) and not has_end:
            return fault
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", ())]
    faults = map(_fault_of, filter(None, inner))
    return next(filter(None, faults), "")


class DataProgress:
    """Progress of a data loader, for any number of data parallel ranks.

        loader = StatefulDataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
        state = {"model": model, "data": DataProgress(loader, dp_rank, dp_size)}

    Saved on n ranks and loaded on m, with any number of workers, the rest of an epoch is read once:
    no example is repeated, none is left out. It is for torchdata's `StatefulDataLoader` with

    - a map-style dataset and a `DistributedSampler` (also torchdata's), or on a single rank a
      sequential one: the global order of the examples goes on, too;
    - a sampler that counts: its attribute `consumed_samples` is the number of examples of all ranks
      at which its next iteration begins, and its order does not depend on the number of ranks;
    - `Shards`: each data shard goes on where it was.

    A loader that cannot be divided exactly is refused, when this is made or loaded.

    Args:
        loader: of this rank.
        rank: data parallel rank. Ranks that read the same have the same one.
        size: number of data parallel ranks.
        name: of the loader in the checkpoint, different for each loader.

    Raises:
        ValueError: the loader reads in an order that depends on the number of ranks.
    """

    def __init__(self, loader: Any, rank: int, size: int, name: str = "data") -> None:
        self._loader = loader
        self._place = (rank, size)
        self._name = name
        if not hasattr(loader, "next_iter_state"):
            raise self._refused("it has no state: use torchdata's StatefulDataLoader")
        self._mark = loader.snapshot_every_n_steps << 32
        """Number from which on that iteration counts its batches: others begin with 0."""
        samplers = (loader.sampler, loader.batch_sampler)
        counters = (each for each in samplers if hasattr(each, "consumed_samples"))
        self._counter: Any = next(counters, None)
        self._order = self._order_of_data()

    def _order_of_data(self) -> dict[str, Any]:
        """Describe the order, which must be the same for a load; ValueError if ranks change it."""
        loader = self._loader
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise self._refused("workers give batches in any order: leave out in_order=False")
        if isinstance(loader.dataset, Shards):
            self._check_size(loader.dataset.rank, loader.dataset.size)
            if loader.num_workers and loader.snapshot_every_n_steps != 1:
                raise self._refused("snapshot_every_n_steps is not 1, so places lag behind")
            return {}
        if isinstance(loader.dataset, IterableDataset):
            raise self._refused("each rank reads an iterable of its own: wrap its data in Shards")
        if hasattr(loader.dataset, "state_dict"):
            raise self._refused("its dataset has a state of its own on each rank")
        return {**self._order_of_sampler(), "examples": len(loader.dataset)}

    def _order_of_sampler(self) -> dict[str, Any]:
        """Describe the order of a sampler, see `_order_of_data`."""
        sampler = self._loader.sampler
        if self._counter is not None:
            return self._order_of_counter()
        if self._loader.batch_size is None:
            raise self._refused("its batch sampler does not count (`consumed_samples`)")
        # Subclasses may have orders of their own.
        origin = type(sampler).__iter__.__module__
        if isinstance(sampler, DistributedSampler) and origin in _ORIGINS:
            self._check_size(sampler.rank, sampler.num_replicas)
            if sampler.shuffle:
                return {"sampler": "DistributedSampler", "seed": sampler.seed}
        elif type(sampler) is not SequentialSampler or self._place[1] > 1:
            name = type(sampler).__name__
            raise self._refused(f"it has the order of its own {name}: use a DistributedSampler")
        return {"sampler": "sequential"}

    def _order_of_counter(self) -> dict[str, Any]:
        """Describe the order of a sampler that counts, see `_order_of_data`."""
        name = type(self._counter).__name__
        if hasattr(self._counter, "data_sharding"):
            raise self._refused("its sampler shuffles buckets that depend on the ranks")
        probe = copy.copy(self._counter)
        begin = probe.consumed_samples
        with torch.random.fork_rng(devices=[]):
            list(itertools.islice(probe, 2))
        if probe.consumed_samples != begin:
            # The loader takes batches in advance.
            raise self._refused(f"its {name} changes consumed_samples while it is iterated")
        return {"sampler": name}

    def _check_size(self, *place: int) -> None:
        if place != self._place:
            raise self._refused(f"its data is for rank and size {place}, not {self._place}")

    def _refused(self, reason: str) -> ValueError:
        return ValueError(
            f"The data loader {self._name!r} cannot go on under another number of ranks: {reason}."
        )

    # --- Saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the common position of all ranks, or places in data shards."""
        loader = self._loader
        state = loader.next_iter_state or {}
        if loader._iterator is not None:
            state = loader.state_dict()
        is_finished = state.get("_iterator_finished", False)
        if isinstance(loader.dataset, Shards):
            return {"shards": self._cells(state, is_finished)}
        # After the end of an epoch, the next iteration is another one.
        position = 0
        if self._counter is not None or (state and not is_finished):
            position = self._position(state)
        epoch = None if is_finished else getattr(loader.sampler, "epoch", None)
        rank, size = self._place
        # Ranks have read as many examples each: a load compares their positions.
        begin = _NUM_CELLS * rank // size
        cells = torch.full((_NUM_CELLS * (rank + 1) // size - begin,), position)
        shape = tuple(cells.shape)
        place = (f"{self._name}.positions", cells, cells.dtype, shape, (_NUM_CELLS,), (begin,))
        return {
            "order": self._order,
            "size": size,
            "epoch": epoch,
            "position": position,
            "positions": ShardedTensor(*place, None, OpenReplicaId((0,))),
        }

    def _cells(self, state: Any, is_finished: bool) -> list[ShardedObject]:
        """Describe the places in data shards as cells.

        Those of other ranks are copies: a load looks in them whether all ranks had finished.
        """
        places: dict[int, Any] = {}
        for each in _snapshot_of(state)["_worker_snapshots"].values():
            places.update(each.get("dataset_state", {}).get("places", ()))
        cells = []
        count = self._loader.dataset.num_shards
        key = f"{self._name}.places_in_{count}_shards"
        for number in range(count):
            copy_id = OpenReplicaId((int(number not in self._loader.dataset.own),))
            place = {"place": places.get(number), "is_finished": is_finished}
            cells.append(ShardedObject(key, place, (count,), (number,), copy_id))
        return cells

    def _position(self, state: Mapping[str, Any]) -> int:
        """Return the number of examples that all ranks together have read."""
        loader = self._loader
        later = state.get("_steps_since_snapshot", 0)
        snapshot = _snapshot_of(state)
        batches = snapshot["_snapshot_step"] + later
        if self._counter is not None:
            size = getattr(self._counter, "micro_batch_size", loader.batch_size) * self._place[1]
            return int(self._counter.consumed_samples + batches * size)
        read = snapshot["_main_snapshot"]["_sampler_iter_state"]["samples_yielded"]
        read += later * loader.batch_size
        if read >= len(loader.sampler):
            return len(loader.sampler) * self._place[1]
        begin = 0
        if batches >= self._mark:
            begin = _BEGINS.get(loader, 0)
            batches -= self._mark
        return int(begin + batches * loader.batch_size * self._place[1])

    # --- Loading ----------------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position or places, with the next iteration.

        Raises:
            LoadMismatchError: the rest cannot be divided among the ranks exactly.
        """
        loader = self._loader
        loader.next_iter_state = None
        loader.load_state_dict({})
        if isinstance(loader.dataset, Shards):
            self._resume_shards(state)
            return
        if state["order"] != self._order:
            raise self._mismatch(state, f"the order was {state['order']}, and is {self._order}")
        positions = {state["position"], *state["positions"].tolist()}
        if len(positions) > 1:
            raise self._mismatch(state, f"ranks were at different positions, {sorted(positions)}")
        if self._counter is not None:
            self._counter.consumed_samples = state["position"]
            return
        if state["epoch"] is not None and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(state["epoch"])
        if state["position"]:
            self._resume(state)

    def _mismatch(self, state: Mapping[str, Any], reason: str) -> LoadMismatchError:
        return LoadMismatchError(
            f"The data loader {self._name!r}, saved on {state['size']} data parallel ranks, cannot "
            f"go on on {self._place[1]}: {reason}."
        )

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Begin in the middle of the sampler's order."""
        loader = self._loader
        rank, size = self._place
        num = len(loader.sampler)
        position = min(state["position"], num * size)
        if position >= self._order["examples"]:
            position = num * size
        begins = [min(num, position // size + (each < position % size)) for each in range(size)]
        rounded = math.floor if loader.drop_last else math.ceil
        lengths = {rounded((num - begin) / loader.batch_size) for begin in begins}
        if len(lengths) > 1:
            raise self._mismatch(
                state,
                f"after {position} examples ranks would have {sorted(lengths)} batches of "
                f"{loader.batch_size} left. Load a step whose number of examples "
                f"{size * loader.batch_size} divides, or take another batch size",
            )
        fresh = self._fresh_state()
        fresh["_num_yielded"] = self._mark
        fresh.get("_snapshot", {})["_snapshot_step"] = self._mark
        of_sampler = _snapshot_of(fresh)["_main_snapshot"]["_sampler_iter_state"]
        of_sampler["samples_yielded"] = begins[rank]
        if "sampler_state" in of_sampler:
            of_sampler["sampler_state"] = {"yielded": begins[rank]}
        loader.load_state_dict(fresh)
        _BEGINS[loader] = position

    def _resume_shards(self, state: Mapping[str, Any]) -> None:
        """Begin in the middle of data shards."""
        cells = state["shards"]
        if all(cell["is_finished"] for cell in cells):
            return  # The next iteration is another epoch.
        places = [[number, cells[number]["place"]] for number in self._loader.dataset.own]
        fresh = self._fresh_state()
        for each in _snapshot_of(fresh)["_worker_snapshots"].values():
            each["dataset_state"] = {"places": places}
        self._loader.load_state_dict(fresh)

    def _fresh_state(self) -> Any:
        """Return the state of a loader that has read nothing."""
        with torch.random.fork_rng(devices=[]):
            fresh = self._loader.state_dict()
        self._loader.load_state_dict({})
        return fresh


def _snapshot_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the snapshot in a loader's state, also without workers."""
    own = {"_snapshot_step": state.get("_num_yielded", 0), "_main_snapshot": state}
    return {"_worker_snapshots": {"": state}, **own, **state.get("_snapshot", {})}
