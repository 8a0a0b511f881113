"""A job that starts from a model directory on shared storage: bytes and requests, counted.

    python benchmarks/cold_start.py --counted [--models GLM-5 ...] [--layouts FSDP2 ...]
        [--layers 8] [--dir DIR] [--json FILE]

64 ranks on 8 nodes load a directory with the names, shapes and files of a model on Hugging Face.
The files are sparse, so that they take no disk, and their headers are the true ones. One process
calls what all ranks call: it reads the headers, plans each rank's load and the shared reads, and
lists the requests. Nothing else is read.

- FSDP2: each rank has rows of each tensor.
- HSDP: the 8 ranks of a node have rows of each tensor; the nodes are replicas.
- TP8 x PP8: the 8 ranks of a node divide each matrix of their layers by rows or columns.
- EP64: each rank has its experts, and all of the other tensors.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cold_models import MODELS, Weight, weights_of, write_directory
from report import Cell, Report, parser_of

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Copier
from distckpt._foreign.hugging_face import read_directory
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region, run_starts, whole
from distckpt._io.read import FETCH_PITCH_BYTES, _in_file_order, _Reading
from distckpt._io.read_parts import parts_of
from distckpt._io.shared_read import OwnUnits, Wave, _Pieces
from distckpt._plan.decoded import decoded, plan_decoding
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._plan.share import ReadCosts, SharePlan, describe_units, divide, unit_bytes_for
from distckpt._plan.share_out import plan_shares
from distckpt._storage.open_files import OpenFiles

NODES, RANKS_OF_NODE = 8, 8
RANKS = NODES * RANKS_OF_NODE
MIB = 1 << 20
AS_VALUES = ", FP8 to bf16"
CASES = ["GLM-5", "DeepSeek-V3", "DeepSeek-V3" + AS_VALUES, "Llama-405B"]
WAYS = ("off", "on")


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, runs=None)
    parser.add_argument("--counted", action="store_true", help="count bytes and requests")
    parser.add_argument("--models", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--layers", type=int, help="only so many decoder layers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{RANKS} ranks on {NODES} nodes load a model directory; requests are planned, not sent."
    )
    for name in arguments.models:
        report.add(HEADS, list(rows_of_model(name, arguments)), name)
    report.finish()


HEADS = (
    "layout, share_reads",
    "of the directory, job",
    "the largest node",
    "read by ranks",
    "requests",
    "median MiB",
)


def rows_of_model(name: str, arguments: argparse.Namespace) -> Iterator[list[Cell]]:
    """Yield a row for each layout and way."""
    sizes = MODELS[name.removesuffix(AS_VALUES)]
    scale = 1.0
    if arguments.layers:
        scale = sizes.layers / arguments.layers
        sizes = sizes._replace(layers=arguments.layers)
    weights = list(weights_of(sizes))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        location = f"{folder}/model"
        total = write_directory(Path(location), weights)
        stored = StoredCheckpoint(location, read_directory(location))
        job = Job(stored, total, scale)
        if name.endswith(AS_VALUES):
            job = Job(decoded(stored), total, scale)
            weights = [weight._replace(dtype="BF16") for weight in weights if not is_scale(weight)]
        for layout in arguments.layouts:
            if layout == "EP64" and not sizes.experts:
                continue
            wanted = [list(LAYOUTS[layout](weights, sizes.layers, rank)) for rank in range(RANKS)]
            for way in arguments.ways:
                yield [f"{layout}, {way}", *job.figures(wanted, way)]


def is_scale(weight: Weight) -> bool:
    return weight.name.endswith("weight_scale_inv")


# --- Layouts --------------------------------------------------------------------------------------

Wanted = Iterator[tuple[Weight, Region]]


def fsdp(weights: Sequence[Weight], num_layers: int, rank: int) -> Wanted:
    """Yield rows of each tensor."""
    for weight in weights:
        yield from cut(weight, 0, rank, RANKS)


def hsdp(weights: Sequence[Weight], num_layers: int, rank: int) -> Wanted:
    """Yield rows of each tensor; each node has all."""
    for weight in weights:
        yield from cut(weight, 0, rank % RANKS_OF_NODE, RANKS_OF_NODE)


def tensor_parallel(weights: Sequence[Weight], num_layers: int, rank: int) -> Wanted:
    """Yield a part of each matrix of the node's layers."""
    for weight in weights:
        if weight.layer * NODES // num_layers == rank // RANKS_OF_NODE:
            yield from cut(weight, weight.axis, rank % RANKS_OF_NODE, RANKS_OF_NODE)


def expert_parallel(weights: Sequence[Weight], num_layers: int, rank: int) -> Wanted:
    """Yield the rank's experts and all other tensors."""
    experts = max(weight.expert or 0 for weight in weights) + 1
    for weight in weights:
        if weight.expert is None or weight.expert * RANKS // experts == rank:
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


LAYOUTS = {"FSDP2": fsdp, "HSDP": hsdp, "TP8 x PP8": tensor_parallel, "EP64": expert_parallel}


# --- Plans ----------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """Requests to storage: file, first byte and end of each, and whether it could have 1 MiB."""

    files: IntArray
    starts: IntArray
    stops: IntArray
    is_large: IntArray


class Job(NamedTuple):
    """A directory of `total` bytes, opened; the whole model has `scale` times as many."""

    stored: StoredCheckpoint
    total: int
    scale: float

    def figures(self, wanted: Sequence[Sequence[tuple[Weight, Region]]], way: str) -> list[Cell]:
        """Return the cells of a row."""
        if way == "off":
            asked = []
            for rank, of_rank in enumerate(wanted):
                copies, targets = self.planned(of_rank)
                asked.append(self.asked(rank, copies, targets))
        else:
            asked = list(self.asked_together(wanted, way))
        by_node = []
        for first in range(0, RANKS, RANKS_OF_NODE):
            by_node.append(bytes_once(asked[first : first + RANKS_OF_NODE]))
        sizes = np.concatenate([each.stops - each.starts for each in asked])
        is_large = np.concatenate([each.is_large for each in asked])
        return [
            f"{sum(by_node) / self.total:.3f}",
            f"{max(by_node) / self.total:.4f}",
            f"{sizes.sum() / self.total:.3f}",
            f"{len(sizes):,}",
            f"{np.median(sizes[is_large > 0]) / MIB:.2f}",
        ]

    def planned(
        self, wanted: Sequence[tuple[Weight, Region]]
    ) -> tuple[list[Copy], list[torch.Tensor]]:
        """Plan the load of a rank. Nobody writes into the targets, so they take no memory."""
        requests = [Request(weight.name, weight.shape, region) for weight, region in wanted]
        targets = []
        for weight, region in wanted:
            targets.append(torch.empty(region.shape, dtype=FROM_NAME[weight.dtype]))
        return plan_load(self.stored, requests), targets

    def asked_together(
        self, wanted: Sequence[Sequence[tuple[Weight, Region]]], way: str
    ) -> Iterator[Asked]:
        """Yield what each rank asks for if reads are shared."""
        manifest = self.stored.manifest
        costs = ReadCosts(manifest, are_exact=True)
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
            pieces = _Pieces(copies, divide(manifest, copies, unit_bytes))
            own = OwnUnits(plan, pieces.divided.units, targets)
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
            rows.extend(
                (i, 0, file.header_bytes, 0) for i, file in enumerate(stored.manifest.files)
            )
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
        table = _in_file_order(self.stored, copier, parts)
        sizes = self.stored.manifest.num_bytes
        reading = _Reading(table, OpenFiles())
        for unit in reading.units():
            file = reading.file_of(unit)
            part = table.parts[unit[0].chunk]
            is_large = int(max(sizes[table.parts[span.chunk].chunk] for span in unit) >= MIB)
            if not part.is_sparse:
                start = reading._position(unit)
                yield file, start, start + sum(span.num_bytes for span in unit), is_large
                continue
            item = self.stored.dtype_of(part.chunk).itemsize
            shape = self.stored.manifest.chunk_region(part.chunk).shape
            starts = run_starts(shape, part.region) * item
            first = int(self.stored.manifest.first_bytes[part.chunk])
            if part.stop - part.start < len(starts) * FETCH_PITCH_BYTES:
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


if __name__ == "__main__":
    main()
