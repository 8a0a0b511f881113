"""A job that starts from a model directory on shared storage: bytes and requests, counted.

    python benchmarks/cold_start.py --counted [--models GLM-5 ...] [--layouts FSDP ...]
        [--layers 4] [--dir DIR] [--json FILE]

Ranks load a directory with the names, shapes and files of a model on Hugging Face. First 64 ranks
on 8 nodes, of which nothing is read: the files are sparse, so that they take no disk, and their
headers are the true ones. The figures are those of `distckpt plan`.

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
import statistics
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from cold_models import FILE_BYTES, MODELS, Weight, scaled, weights_of, write_directory
from measure import peak_memory_bytes
from report import Cell, Report, parser_of

import distckpt
from distckpt._base.options import LoadOptions
from distckpt._foreign.hugging_face import read_directory
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io import shared_read
from distckpt._plan.decoded import decoded
from distckpt._tools.layouts import Layout, Place, divide_tensors, layout_of
from distckpt._tools.planned_costs import Job, LoadCosts, load_costs, tensors_in_memory
from distckpt.cli._processes import run_ranks
from tests.support.read_counts import counted_reads

MIB = 1 << 20
AS_VALUES = ", FP8 to bf16"
CASES = ["GLM-5", "DeepSeek-V3", "DeepSeek-V3" + AS_VALUES, "Llama-405B"]
LAYOUTS = ("FSDP", "HSDP", "TP x PP", "EP")
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
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--layers", type=int, help="only so many decoder layers")
    parser.add_argument("--real-layers", type=int, default=8, help="of the directory for processes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = "Bytes are parts of those of the tensors in the files."
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
    "median KiB",
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
        write_directory(Path(location), weights)
        view = StoredCheckpoint(location, read_directory(location))
        if name.endswith(AS_VALUES):
            view = decoded(view)
        for layout in arguments.layouts:
            if layout != "EP" or sizes.experts:
                job = job_of(view, IMITATED, layout, full.layers / sizes.layers)
                costs = planned(view, job)
                for way in arguments.ways:
                    yield [f"{layout}, {way}", *figures_of(costs[way], bytes_of(weights))]


def bytes_of(weights: Sequence[Weight]) -> int:
    return sum(weight.num_bytes for weight in weights)


# --- Plans ----------------------------------------------------------------------------------------


class PartialJob(Job):
    """A job whose ranks hold some of the layers, and units are as large as for all of them."""

    def __init__(
        self, view: StoredCheckpoint, layout: Layout, num_nodes: int, factor: float
    ) -> None:
        super().__init__(divide_tensors(tensors_in_memory(view), layout), layout, num_nodes)
        self._factor = factor

    def num_bytes_at(self, place: Place) -> int:
        """Return the memory of the tensors of a rank, with those of all layers."""
        return int(super().num_bytes_at(place) * self._factor)


def job_of(view: StoredCheckpoint, grid: Grid, layout: str, factor: float = 1.0) -> Job:
    """Return the ranks that load; the whole model has `factor` times as many bytes."""
    degrees = {
        "FSDP": {"fsdp": grid.ranks},
        "HSDP": {"fsdp": grid.ranks_of_node},
        "TP x PP": {"tp": grid.ranks_of_node, "pp": grid.nodes},
        "EP": {"ep": grid.ranks},
    }
    return PartialJob(view, layout_of(grid.ranks, degrees[layout]), grid.nodes, factor)


def planned(view: StoredCheckpoint, job: Job) -> dict[str, LoadCosts]:
    """Return the costs of a load in both ways."""
    return dict(zip(WAYS, load_costs(view, job, LoadOptions()), strict=True))


def figures_of(costs: LoadCosts, total: int) -> list[Cell]:
    """Return the cells of a row."""
    by_node = [node.storage_bytes for node in costs.nodes]
    sizes = Counter[int]()
    for node in costs.nodes:
        sizes.update(node.sizes)
    return [
        f"{sum(by_node) / total:.3f}",
        f"{max(by_node) / total:.4f}",
        f"{sum(read_by_nodes(costs)) / total:.3f}",
        f"{sizes.total():,}",
        f"{statistics.median_high(sizes.elements()) / 1024:,.1f}",
    ]


def read_by_nodes(costs: LoadCosts) -> list[int]:
    """Return the bytes that the ranks of each node ask for."""
    return [sum(num_bytes for num_bytes, _ in node.ranks) for node in costs.nodes]


# --- Processes ------------------------------------------------------------------------------------


def real_rows(name: str, arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yield a row for each layout and way."""
    sizes = scaled(MODELS[name.removesuffix(AS_VALUES)], SCALE)
    weights = list(weights_of(sizes._replace(layers=arguments.real_layers)))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        location = f"{folder}/model"
        write_directory(Path(location), weights, FILE_BYTES // SCALE**2, content_of)
        view = StoredCheckpoint(location, read_directory(location))
        total = bytes_of(weights)
        cases = list(itertools.product(arguments.layouts, arguments.ways))
        outcomes_of_cases = run_ranks(load_cases, REAL.ranks, location, cases, weights)
        for (layout, way), outcomes in zip(cases, outcomes_of_cases, strict=True):
            as_planned = read_by_nodes(planned(view, job_of(view, REAL, layout))[way])
            read, grown, faults, maps, sent = map(list, zip(*outcomes, strict=True))
            yield [
                f"{layout}, {way}",
                f"{sum(read) / total:.3f}",
                f"{sum(as_planned) / total:.3f}",
                f"{max(sums_of_nodes(read)) / total:.4f}",
                f"{max(as_planned) / total:.4f}",
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
    shared_read.host_number = lambda: rank // REAL.ranks_of_node
    contents = {weight.name: content_of(weight) for weight in weights}
    view = StoredCheckpoint(location, read_directory(location))
    outcomes = []
    # The first load imports modules, which counts as reading.
    for layout, way in [cases[-1], *cases]:
        job = job_of(view, REAL, layout)
        shards = {}
        for described in job.shards_at(job.places[rank]):
            data = torch.ones(described.local_shape, dtype=torch.uint8).to(described.dtype)
            shards[described.key] = replace(described, data=data)
        outcomes.append(load_counted(location, shards, way))
        check_values(shards, contents, rank)
    return outcomes[1:]


def check_values(
    shards: Mapping[str, distckpt.ShardedTensor], contents: Mapping[str, bytes], rank: int
) -> None:
    """Compare loaded values with the bytes of the files."""
    for name, shard in shards.items():
        data = shard.data
        assert data is not None
        expected = torch.frombuffer(bytearray(contents[name]), dtype=data.dtype)
        region = Region(shard.global_offset, shard.local_shape)
        part = expected.view(shard.global_shape)[region.slices()]
        if not torch.equal(data.view(torch.uint8), part.view(torch.uint8)):
            raise ValueError(f"{name} is wrong on rank {rank}")


def load_counted(
    location: str, shards: Mapping[str, distckpt.ShardedTensor], way: str
) -> list[tuple[int, ...]]:
    """Load in this process; return figures of each rank, see `real_rows`."""
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
    found: list[Any] = [None] * REAL.ranks
    dist.all_gather_object(found, (num_read, grown, faults, num_mapped, reports[0].sent_bytes))
    return found


if __name__ == "__main__":
    main()
