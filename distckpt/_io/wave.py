"""One wave of shared reads: a rank's reads and its messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._geometry.region import IntArray, Region, whole
from distckpt._io.exchange import (
    ALIGN_BYTES,
    Message,
    copy_values,
    make_messages,
)
from distckpt._plan.load import Copy
from distckpt._plan.share import SharePlan


class OwnUnits(NamedTuple):
    """The units of this rank in a plan: parts of copies into `targets`."""

    plan: SharePlan
    units: Sequence[Copy]
    targets: Sequence[torch.Tensor]

    def target(self, unit: int) -> torch.Tensor:
        """Return the part of its target that a unit fills."""
        _, _, request, region = self.units[unit]
        target = self.targets[request]
        if region.shape == tuple(target.shape):
            return target
        return target[region.slices()]

    def held_bytes(self) -> IntArray:
        """Return the memory to hold each region that this rank reads.

        It is 0 for a region that is read into a target.
        """
        items = [self.targets[self.units[unit].request].itemsize for unit in self._unit_in()]
        sizes = np.prod(self.plan.read_shapes, axis=1) * np.array(items, np.int64)
        return np.where(self.plan.read_units < 0, -(-sizes // ALIGN_BYTES) * ALIGN_BYTES, 0)

    def regions(self, wave: int, held: torch.Tensor) -> dict[int, ReadRegion]:
        """Return this rank's regions in a wave, by number in the plan.

        Regions that no target holds go into `held`, bytes.
        """
        plan = self.plan
        unit_in = self._unit_in()
        sizes = self.held_bytes().tolist()
        regions: dict[int, ReadRegion] = {}
        end = 0
        numbers = np.flatnonzero(plan.read_waves == wave)
        places = zip(
            numbers.tolist(),
            plan.read_units[numbers].tolist(),
            plan.read_offsets[numbers].tolist(),
            plan.read_shapes[numbers].tolist(),
            strict=True,
        )
        for number, unit, offset, shape in places:
            sample = self.units[unit_in[number]]
            if unit >= 0:
                source = self.units[unit].source
                regions[number] = ReadRegion(sample.chunk, source, self.target(unit), unit)
                continue
            ndim = len(sample.source.shape)
            target = self.targets[sample.request]
            region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
            num_bytes = region.num_elements * target.itemsize
            memory = held[end : end + num_bytes].view(target.dtype).view(region.shape)
            end += sizes[number]
            regions[number] = ReadRegion(sample.chunk, region, memory, unit)
        return regions

    def _unit_in(self) -> list[int]:
        """Return a unit in each region that this rank reads."""
        unit_in = np.zeros(len(self.plan.read_chunks), np.int64)
        mine = np.flatnonzero(self.plan.unit_reads >= 0)
        unit_in[self.plan.unit_reads[mine]] = mine
        return unit_in.tolist()


class ReadRegion(NamedTuple):
    """A region of a chunk that this rank reads for several.

    Its memory is the target of `unit`, or held memory if `unit` is -1.
    """

    chunk: int
    region: Region
    memory: torch.Tensor
    unit: int

    def part(self, part: Region) -> torch.Tensor:
        """Return a part of the region, by its place in the chunk."""
        if part.shape == self.region.shape:
            return self.memory
        return self.memory[part.relative_to(self.region.offset).slices()]


class Wave:
    """This rank's reads and messages in one wave."""

    def __init__(self, own: OwnUnits, number: int, held: torch.Tensor) -> None:
        self._own = own
        self._number = number
        self._regions = own.regions(number, held)

    @property
    def direct_units(self) -> IntArray:
        """The units that are read into their targets."""
        units = []
        for read in self._regions.values():
            if read.unit >= 0:
                units.append(read.unit)
        return np.array(units, np.int64)

    def held_copies(self, first_request: int) -> tuple[list[Copy], list[torch.Tensor]]:
        """Return the reads into held memory, and their targets.

        They are copies of further requests.
        """
        reads = []
        for read in self._regions.values():
            if read.unit < 0:
                reads.append(read)
        copies = []
        for number, read in enumerate(reads, first_request):
            copies.append(Copy(read.chunk, read.region, number, whole(read.region.shape)))
        return copies, [read.memory for read in reads]

    def fill_own(self) -> None:
        """Fill this rank's other units from the regions it has read."""
        own = self._own
        plan = self._own.plan
        mine = np.flatnonzero((plan.waves == self._number) & (plan.unit_reads >= 0))
        others = mine[plan.read_units[plan.unit_reads[mine]] != mine]
        for unit in others.tolist():
            source = self._regions[int(plan.unit_reads[unit])].part(own.units[unit].source)
            copy_values(source.detach(), own.target(unit).detach())

    def messages(self, rank: int) -> list[Message]:
        """Put together the messages between this rank and each peer."""
        own = self._own
        plan = self._own.plan
        by_peer: dict[tuple[int, bool], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for peer, sequence, view in self._sent_views():
            by_peer[peer, True].append((sequence, view))
        received = np.flatnonzero((plan.waves == self._number) & (plan.readers != rank))
        for unit in received[np.argsort(plan.sequence[received])].tolist():
            content = int(plan.sequence[unit]), own.target(unit)
            by_peer[int(plan.readers[unit]), False].append(content)
        messages: list[Message] = []
        for (peer, is_sent), contents in by_peer.items():
            messages.extend(make_messages(rank, peer, is_sent, contents))
        return messages

    def _sent_views(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the peer, sequence number and memory of each sent part."""
        plan = self._own.plan
        sent = np.flatnonzero(plan.read_waves[plan.send_reads] == self._number)
        reads, *columns = (column[sent] for column in plan.sends)
        is_whole = (columns[-1] == plan.read_shapes[reads]).all(axis=1)
        for number, whole_region, peer, sequence, offset, shape in zip(
            reads.tolist(), is_whole.tolist(), *(c.tolist() for c in columns), strict=True
        ):
            read = self._regions[number]
            if whole_region:
                yield peer, sequence, read.memory
                continue
            ndim = len(read.region.shape)
            yield peer, sequence, read.part(Region(tuple(offset[:ndim]), tuple(shape[:ndim])))
