"""A job that starts from a model directory on shared storage: bytes and requests, counted.

    python benchmarks/cold_start.py --counted [--models GLM-5 ...] [--layouts FSDP ...]
        [--layers 4] [--dir DIR] [--json FILE]

Ranks load a directory with the names, shapes and files of a model on Hugging Face. First 64 ranks
on 8 nodes, of which nothing is read: the files are sparse, so that they take no disk, and their
headers are the true ones. One process calls what all ranks call, reads the headers, plans each
rank's load and the shared reads, and lists the requests.

Then 8 processes, which take themselves to be on 4 nodes, load a directory whose tensors have a
1,024th of the bytes, and compare all values. Their reads are counted by the kernel, beside those
that were planned.

- FSDP: each rank has rows of each tensor.
- HSDP: the ranks of a node have rows of each tensor; the nodes are replicas.
- TP x PP: the ranks of a node divide each matrix of their layers by rows or columns.
- EP: each rank has its experts, and all of the other tensors.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from cold_models import FILE_BYTES, MODELS, Weight, scaled, weights_of, write_directory
from measure import peak_memory_bytes
from report import Cell, Report, parser_of

import distckpt
from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier
from distckpt._foreign.hugging_face import read_directory
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region, run_starts, whole
from distckpt._io import shared_read
from distckpt._io.read import Reading, are_near, in_file_order
from distckpt._io.read_parts import parts_of
from distckpt._io.shared_read import OwnUnits, Wave
from distckpt._plan.decoded import decoded, plan_decoding
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._plan.share import SharePlan, costs_of, describe_units, divide, unit_bytes_for
from distckpt._plan.share_out import plan_shares
from distckpt._storage.open_files import OpenFiles
from distckpt.cli._processes import run_ranks
from tests.support.read_counts import counted_reads

MIB = 1 << 20
GUESSED_BYTES = 128 << 10
"""Bytes of a file that are read at first, for its header."""
AS_VALUES = ", FP8 to bf16"
CASES = ["GLM-5", "DeepSeek-V3", "DeepSeek-V3" + AS_VALUES, "Llama-405B"]
WAYS = ("off", "on")


class Grid(NamedTuple):
    """The ranks of a job."""

    nodes: int
    ranks_of_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_of_node


IMITATED = Grid(8, 8)
REAL = Grid(4, 2)
SCALE = 32
"""Divisor of the dimensions of a directory that is really loaded."""


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__, runs=None)
    parser.add_argument("--counted", action="store_true", help="count bytes and requests")
    parser.add_argument("--models", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--layers", type=int, help="only so many decoder layers")
    parser.add_argument("--real-layers", type=int, default=8, help="of the directory for processes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = "Bytes are parts of the directory's, headers and index included."
    for name in arguments.models:
        caption = f"{name}, {IMITATED.ranks} imitated ranks on {IMITATED.nodes} nodes"
        report.add(HEADS, list(imitated_rows(name, arguments)), caption)
    caption = f"{arguments.models[0]}, {REAL.ranks} processes as {REAL.nodes} nodes"
    report.add(REAL_HEADS, list(real_rows(arguments.models[0], arguments)), caption)
    report.finish()


HEADS = (
    "layout, share_reads",
    "leave storage",
    "for the largest node",
    "read by ranks",
    "requests",
    "median MiB",
)
REAL_HEADS = (
    "layout, share_reads",
    "read by ranks",
    "as planned",
    "largest node",
    "as planned",
    "sent",
    "most extra MiB of a rank",
    "major faults",
    "mapped files",
)


def imitated_rows(name: str, arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yield a row for each layout and way."""
    full = MODELS[name.removesuffix(AS_VALUES)]
    sizes = full._replace(layers=arguments.layers or full.layers)
    weights = list(weights_of(sizes))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        location = f"{folder}/model"
        total = write_directory(Path(location), weights)
        stored = StoredCheckpoint(location, read_directory(location))
        if name.endswith(AS_VALUES):
            stored = decoded(stored)
            weights = [weight._replace(dtype="BF16") for weight in weights if not is_scale(weight)]
        job = Job(IMITATED, stored, total, full.layers / sizes.layers)
        for layout, way in itertools.product(arguments.layouts, arguments.ways):
            if layout != "EP" or sizes.experts:
                wanted = wanted_by_ranks(layout, IMITATED, weights)
                yield [f"{layout}, {way}", *job.figures(wanted, way)]


def is_scale(weight: Weight) -> bool:
    return weight.name.endswith("weight_scale_inv")


# --- Layouts --------------------------------------------------------------------------------------

Wanted = Iterator[tuple[Weight, Region]]


def wanted_by_ranks(
    layout: str, grid: Grid, weights: Sequence[Weight]
) -> list[list[tuple[Weight, Region]]]:
    """Return the regions that each rank requests."""
    return [list(LAYOUTS[layout](grid, weights, rank)) for rank in range(grid.ranks)]


def fsdp(grid: Grid, weights: Sequence[Weight], rank: int) -> Wanted:
    """Yield rows of each tensor."""
    for weight in weights:
        yield from cut(weight, 0, rank, grid.ranks)


def hsdp(grid: Grid, weights: Sequence[Weight], rank: int) -> Wanted:
    """Yield rows of each tensor; each node has all."""
    for weight in weights:
        yield from cut(weight, 0, rank % grid.ranks_of_node, grid.ranks_of_node)


def tensor_parallel(grid: Grid, weights: Sequence[Weight], rank: int) -> Wanted:
    """Yield a part of each matrix of the node's layers."""
    node, part = divmod(rank, grid.ranks_of_node)
    num_layers = weights[-1].layer + 1
    for weight in weights:
        if weight.layer * grid.nodes // num_layers == node:
            yield from cut(weight, weight.axis, part, grid.ranks_of_node)


def expert_parallel(grid: Grid, weights: Sequence[Weight], rank: int) -> Wanted:
    """Yield the rank's experts and all other tensors."""
    experts = max(weight.expert or 0 for weight in weights) + 1
    for weight in weights:
        if weight.expert is None or weight.expert * grid.ranks // experts == rank:
            yield weight, whole(weight.shape)


def cut(weight: Weight, axis: int | None, part: int, count: int) -> Wanted:
    """Yield one of so many parts along an axis, unless it is empty."""
    if axis is None:
        yield weight, whole(weight.shape)
        return
    size = weight.shape[axis]
    step = -(-size // count)
    first = min(part * step, size)
    extent = min(step, size - first)
    if extent:
        offset = tuple(first if i == axis else 0 for i in range(len(weight.shape)))
        shape = tuple(extent if i == axis else n for i, n in enumerate(weight.shape))
        yield weight, Region(offset, shape)


LAYOUTS = {"FSDP": fsdp, "HSDP": hsdp, "TP x PP": tensor_parallel, "EP": expert_parallel}


# --- Plans ----------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """Requests to storage: file, first byte and end of each, and whether it could have 1 MiB."""

    files: IntArray
    starts: IntArray
    stops: IntArray
    is_large: IntArray


class Job(NamedTuple):
    """A directory of `total` bytes, opened; the whole model has `scale` times as many."""

    grid: Grid
    stored: StoredCheckpoint
    total: int
    scale: float

    def figures(self, wanted: Sequence[Sequence[tuple[Weight, Region]]], way: str) -> list[Cell]:
        """Return the cells of a row."""
        asked = self.asked_by_ranks(wanted, way)
        by_node = self.bytes_of_nodes(asked)
        sizes = np.concatenate([each.stops - each.starts for each in asked])
        is_large = np.concatenate([each.is_large for each in asked])
        return [
            f"{sum(by_node) / self.total:.3f}",
            f"{max(by_node) / self.total:.4f}",
            f"{sizes.sum() / self.total:.3f}",
            f"{len(sizes):,}",
            f"{np.median(sizes[is_large > 0]) / MIB:.2f}",
        ]

    def asked_by_ranks(
        self, wanted: Sequence[Sequence[tuple[Weight, Region]]], way: str
    ) -> list[Asked]:
        """Return the requests of each rank."""
        if way == "on":
            return list(self.asked_together(wanted))
        asked = []
        for rank, of_rank in enumerate(wanted):
            asked.append(self.asked(rank, *self.planned(of_rank)))
        return asked

    def bytes_of_nodes(self, asked: Sequence[Asked]) -> list[int]:
        """Return the bytes that leave storage for each node, whose ranks share a cache."""
        by_node = []
        for first in range(0, self.grid.ranks, self.grid.ranks_of_node):
            by_node.append(bytes_once(asked[first : first + self.grid.ranks_of_node]))
        return by_node

    def planned(
        self, wanted: Sequence[tuple[Weight, Region]]
    ) -> tuple[list[Copy], list[torch.Tensor]]:
        """Plan the load of a rank. Nobody writes into the targets, so they take no memory."""
        requests = [Request(weight.name, weight.shape, region) for weight, region in wanted]
        targets = []
        for weight, region in wanted:
            targets.append(torch.empty(region.shape, dtype=FROM_NAME[weight.dtype]))
        return plan_load(self.stored, requests), targets

    def asked_together(self, wanted: Sequence[Sequence[tuple[Weight, Region]]]) -> Iterator[Asked]:
        """Yield what each rank asks for if reads are shared."""
        manifest = self.stored.manifest
        costs = costs_of(self.stored)
        unit_bytes = unit_bytes_for(int(max(map(bytes_of, wanted)) * self.scale))
        messages = []
        for of_rank in wanted:
            copies, targets = self.planned(of_rank)
            divided = divide(manifest, copies, unit_bytes)
            dtypes = [target.dtype for target in targets]
            messages.append(describe_units(costs, divided, dtypes, 0).to_bytes())
        for rank, data in enumerate(plan_shares(messages, costs)):
            plan = SharePlan.from_bytes(data)
            copies, targets = self.planned(wanted[rank])
            pieces = divide(manifest, copies, unit_bytes)
            own = OwnUnits(plan, pieces, targets)
            memory = torch.empty(int(own.held_bytes.sum()), dtype=torch.uint8)
            parts = [self.asked(rank, pieces.join(np.flatnonzero(plan.readers < 0)), targets)]
            for number in range(plan.num_waves):
                wave = Wave(own, number, memory)
                held, memories = wave.held_copies(len(targets))
                reads = [*pieces.join(wave.direct_units), *held]
                parts.append(self.asked(None, reads, [*targets, *memories]))
            yield Asked(*map(np.concatenate, zip(*parts, strict=True)))

    def asked(
        self, rank: int | None, copies: Sequence[Copy], targets: Sequence[torch.Tensor]
    ) -> Asked:
        """Return the requests for some copies, and for headers if a rank is given."""
        stored = self.stored
        batches = [[copy for copy in copies if copy.chunk not in stored.quantized]]
        memories = [targets]
        for piece in plan_decoding(stored, copies) if stored.quantized else ():
            batches.append(piece.copies)
            parts = []
            for role, region in piece.parts.items():
                dtype = FROM_NAME[piece.quantized.parts[role].dtype]
                parts.append(torch.empty(region.shape, dtype=dtype))
            memories.append(parts)
        rows = []
        for batch, memory in zip(batches, memories, strict=True):
            rows.extend(self._requests_for(batch, memory))
        if rank == 0:
            for number, described in enumerate(stored.manifest.files):
                num_bytes = max(GUESSED_BYTES, described.header_bytes)
                rows.append((number, 0, min(num_bytes, described.num_bytes), 0))
            index_bytes = self.total - sum(file.num_bytes for file in stored.manifest.files)
            rows.append((len(stored.manifest.files), 0, index_bytes, 0))
        elif rank is not None:
            # Other ranks compare the headers of the files that they read.
            for file in {row[0] for row in rows}:
                rows.append((file, 0, stored.manifest.files[file].header_bytes, 0))
        return Asked(*np.array(rows, np.int64).reshape(-1, 4).T)

    def _requests_for(
        self, copies: Sequence[Copy], targets: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield the requests of one call that reads some copies."""
        copier = Copier(targets)
        parts = parts_of(self.stored, copies, targets, copier)
        table = in_file_order(self.stored, copier, parts)
        sizes = self.stored.manifest.num_bytes
        reading = Reading(table, OpenFiles())
        for unit in reading.units():
            file = reading.file_of(unit)
            part = table.parts[unit[0].chunk]
            is_large = int(max(sizes[table.parts[span.chunk].chunk] for span in unit) >= MIB)
            if not part.is_sparse:
                start = reading.position(unit)
                yield file, start, start + sum(span.num_bytes for span in unit), is_large
                continue
            item = self.stored.dtype_of(part.chunk).itemsize
            shape = self.stored.manifest.chunk_region(part.chunk).shape
            starts = run_starts(shape, part.region) * item
            first = int(self.stored.manifest.first_bytes[part.chunk])
            if are_near(part, len(starts)):
                # The system brings all of it into its cache.
                yield file, first + part.start, first + part.stop, is_large
                continue
            run = part.region.num_elements * item // len(starts)
            for start in (first + starts).tolist():
                yield file, start, start + run, is_large


def bytes_of(wanted: Sequence[tuple[Weight, Region]]) -> int:
    return sum(FROM_NAME[weight.dtype].itemsize * region.num_elements for weight, region in wanted)


def bytes_once(asked: Sequence[Asked]) -> int:
    """Return the bytes that some ranks ask for, each byte once."""
    files, starts, stops, _ = map(np.concatenate, zip(*asked, strict=True))
    order = np.lexsort((starts, files))
    # Files one after the other, far apart.
    places = files[order] << 40
    ends = np.maximum.accumulate(places + stops[order])
    before = np.append(0, ends[:-1])
    return int(np.maximum(0, ends - np.maximum(places + starts[order], before)).sum())


# --- Processes ------------------------------------------------------------------------------------


def real_rows(name: str, arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yield a row for each layout and way."""
    sizes = scaled(MODELS[name.removesuffix(AS_VALUES)], SCALE)
    weights = list(weights_of(sizes._replace(layers=arguments.real_layers)))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        location = f"{folder}/model"
        total = write_directory(Path(location), weights, FILE_BYTES // SCALE**2, content_of)
        job = Job(REAL, StoredCheckpoint(location, read_directory(location)), total, 1.0)
        cases = list(itertools.product(arguments.layouts, arguments.ways))
        outcomes_of_cases = run_ranks(load_cases, REAL.ranks, location, cases, weights)
        for (layout, way), outcomes in zip(cases, outcomes_of_cases, strict=True):
            asked = job.asked_by_ranks(wanted_by_ranks(layout, REAL, weights), way)
            planned = [int((each.stops - each.starts).sum()) for each in asked]
            read, grown, faults, maps, sent = map(list, zip(*outcomes, strict=True))
            yield [
                f"{layout}, {way}",
                f"{sum(read) / total:.3f}",
                f"{sum(planned) / total:.3f}",
                f"{max(sums_of_nodes(read)) / total:.4f}",
                f"{max(sums_of_nodes(planned)) / total:.4f}",
                f"{sent[0] / total:.3f}",
                f"{max(grown) / MIB:.0f}",
                f"{sum(faults)}",
                f"{sum(maps)}",
            ]


def sums_of_nodes(numbers: Sequence[int]) -> list[int]:
    """Add up the numbers of each node's ranks."""
    return np.array(numbers).reshape(REAL.nodes, -1).sum(axis=1).tolist()  # type: ignore[no-any-return]


def content_of(weight: Weight) -> bytes:
    """Return the bytes of a tensor, others for each."""
    first = zlib.crc32(weight.name.encode())
    numbers = (np.arange(first, first + weight.num_bytes) * 2654435761 >> 13) & 63
    return numbers.astype(np.uint8).tobytes()


def load_cases(
    rank: int, location: str, cases: Sequence[tuple[str, str]], weights: Sequence[Weight]
) -> list[list[tuple[int, ...]]]:
    """Load each case in this process, see `load_counted`."""
    # The first load imports modules, which counts as reading.
    outcomes = [load_counted(rank, location, *case, weights) for case in [cases[-1], *cases]]
    return outcomes[1:]


def load_counted(
    rank: int, location: str, layout: str, way: str, weights: Sequence[Weight]
) -> list[tuple[int, ...]]:
    """Load in this process; return figures of each rank, see `real_rows`."""
    shared_read.host_number = lambda: rank // REAL.ranks_of_node
    wanted = list(LAYOUTS[layout](REAL, weights, rank))
    shards = {}
    for weight, region in wanted:
        data = torch.ones(region.shape, dtype=torch.uint8).to(FROM_NAME[weight.dtype])
        shards[weight.name] = distckpt.ShardedTensor(
            weight.name, data, data.dtype, region.shape, weight.shape, region.offset, None
        )
    reports: list[distckpt.LoadReport] = []
    maps: list[tuple[int, int]] = []

    def look(done: int, total: int) -> None:
        text = Path("/proc/self/maps").read_text()
        maps.append((len(text), text.count(location)))

    def load() -> None:
        distckpt.load(
            {"model": shards},
            location,
            validate_access_integrity=False,
            share_reads=way,
            progress=look,
            on_report=reports.append,
        )

    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    with counted_reads() as counts:
        grown = peak_memory_bytes(load)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    num_read = counts.num_bytes - sum(size for size, _ in maps)
    num_mapped = sum(count for _, count in maps)
    for weight, region in wanted:
        expected = torch.frombuffer(bytearray(content_of(weight)), dtype=FROM_NAME[weight.dtype])
        part = expected.view(weight.shape)[region.slices()]
        if not torch.equal(shards[weight.name].data.view(torch.uint8), part.view(torch.uint8)):
            raise ValueError(f"{weight.name} is wrong on rank {rank}")
    found: list[Any] = [None] * REAL.ranks
    dist.all_gather_object(found, (num_read, grown, faults, num_mapped, reports[0].sent_bytes))
    return found


if __name__ == "__main__":
    main()
