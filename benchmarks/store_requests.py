"""What loads ask an object store for at scale: files, requests and bytes of each rank, simulated.

    python benchmarks/store_requests.py [--cases 8b-tp 405b 671b] [--json FILE]

One process makes up the manifest that a save of all ranks writes, without any data, and calls what
ranks call to plan their loads: regions, shared reads, and the ranges of files. Nothing is read.

- 8b-tp: Llama 8B with Adam, saved by 256 FSDP2 ranks, loaded by 128 ranks, TP8 x PP16.
- 405b: Llama 405B with master weights and Adam, saved by 4,096 FSDP2 ranks, loaded by 512.
- 671b: DeepSeek-V3 with the same, saved by 2,048 ranks (experts over 64, rows of each over 32),
  loaded by 1,024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from report import Cell, Report, parser_of

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES
from distckpt._base.memory import Copier
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray, Region
from distckpt._io.read import Reading, in_file_order
from distckpt._io.read_parts import parts_of
from distckpt._plan.layout import PlannedChunk, lay_out_tensor_file
from distckpt._plan.load import Copy, Request, plan_load
from distckpt._plan.share import ReadCosts, SharePlan, describe_units, divide, unit_bytes_for
from distckpt._plan.share_out import plan_shares
from distckpt._storage.open_files import OpenFiles

URL = "s3://bucket/checkpoint"
TP, PP, EP = 8, 16, 64
STATES = {"model.": "BF16", "master.": "F32", "exp_avg.": "F32", "exp_avg_sq.": "F32"}


@dataclass(frozen=True)
class Weight:
    """A weight: its shape, the axis that tensor parallelism divides (None: all have it), its layer
    and, of an expert, its number.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    layer: int = 0
    expert: int | None = None


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__, runs=None, has_files=False)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--sample", type=int, default=8, help="ranks that plan on their own")
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = "Simulated loads from an object store; nothing is read."
    for case in arguments.cases:
        report.add([case, "alone", "shared"], CASES[case](arguments.sample))
    report.finish()


# --- Cases ----------------------------------------------------------------------------------------


def tensor_parallel_load(sample: int) -> list[list[Cell]]:
    """Load Llama 8B on TP x PP ranks; all of them plan, with and without sharing."""
    weights = list(llama(32, 4096, 14336, 1024))
    stored = StoredCheckpoint(URL, saved_by_rows(weights, 256))
    wanted = []
    for rank in range(TP * PP):
        part, stage = rank % TP, rank // TP
        mine = [weight for weight in weights if weight.layer * PP // 32 == stage]
        wanted.append([(weight, place_in(weight, part)) for weight in mine])
    return compared(stored, wanted)


def place_in(weight: Weight, part: int) -> Region:
    """Return what a tensor parallel rank has of a weight."""
    if weight.axis is None:
        return Region((0,) * len(weight.shape), weight.shape)
    size = weight.shape[weight.axis] // TP
    offset, shape = [0] * len(weight.shape), list(weight.shape)
    offset[weight.axis], shape[weight.axis] = part * size, size
    return Region(tuple(offset), tuple(shape))


def fully_sharded_load(sample: int) -> list[list[Cell]]:
    """Load Llama 405B on 512 ranks; a few of them plan, and share nothing."""
    weights = list(llama(126, 16384, 53248, 1024))
    stored = StoredCheckpoint(URL, saved_by_rows(weights, 4096))
    return compared(stored, [rows_of(weights, r, 512) for r in sampled(512, sample)], False)


def expert_parallel_load(sample: int) -> list[list[Cell]]:
    """Load DeepSeek-V3 on 1,024 ranks; a few of them plan, and share nothing."""
    weights = list(deepseek())
    stored = StoredCheckpoint(URL, saved_by_rows(weights, 2048))
    return compared(stored, [rows_of(weights, r, 1024) for r in sampled(1024, sample)], False)


def sampled(num_ranks: int, count: int) -> list[int]:
    return np.linspace(0, num_ranks - 1, count).astype(int).tolist()


def rows_of(weights: Sequence[Weight], rank: int, num_ranks: int) -> list[tuple[Weight, Region]]:
    """Return what a rank has of each weight: rows of those that are not of other ranks' experts."""
    found = []
    for weight in weights:
        part, count = part_of(weight, rank, num_ranks)
        if part is not None:
            step = -(-weight.shape[0] // count)
            first = min(part * step, weight.shape[0])
            rows = min(first + step, weight.shape[0]) - first
            if rows:
                rest = weight.shape[1:]
                found.append((weight, Region((first, *[0] * len(rest)), (rows, *rest))))
    return found


def part_of(weight: Weight, rank: int, num_ranks: int) -> tuple[int | None, int]:
    """Return which part of its rows a rank has, None if it has none, and how many parts there
    are.
    """
    if weight.expert is None:
        return rank, num_ranks
    return (rank // EP if weight.expert % EP == rank % EP else None), num_ranks // EP


CASES = {"8b-tp": tensor_parallel_load, "405b": fully_sharded_load, "671b": expert_parallel_load}


# --- Models ---------------------------------------------------------------------------------------


def llama(num_layers: int, hidden: int, inner: int, kv: int) -> Iterator[Weight]:
    """Yield the weights of a Llama 3."""
    yield Weight("embed_tokens.weight", (128256, hidden), 0)
    last = num_layers - 1
    yield Weight("norm.weight", (hidden,), None, last)
    yield Weight("lm_head.weight", (128256, hidden), 0, last)
    for layer in range(num_layers):
        for name, shape, axis in (
            ("self_attn.q_proj", (hidden, hidden), 0),
            ("self_attn.k_proj", (kv, hidden), 0),
            ("self_attn.v_proj", (kv, hidden), 0),
            ("self_attn.o_proj", (hidden, hidden), 1),
            ("mlp.gate_proj", (inner, hidden), 0),
            ("mlp.up_proj", (inner, hidden), 0),
            ("mlp.down_proj", (hidden, inner), 1),
            ("input_layernorm", (hidden,), None),
            ("post_attention_layernorm", (hidden,), None),
        ):
            yield Weight(f"layers.{layer}.{name}.weight", shape, axis, layer)


def deepseek() -> Iterator[Weight]:
    """Yield the weights of DeepSeek-V3, without its layer for the prediction of further tokens."""
    hidden = 7168
    yield Weight("embed_tokens.weight", (129280, hidden))
    yield Weight("norm.weight", (hidden,))
    yield Weight("lm_head.weight", (129280, hidden))
    for layer in range(61):
        attention = {
            "q_a_proj": (1536, hidden),
            "q_b_proj": (24576, 1536),
            "kv_a_proj": (576, hidden),
            "kv_b_proj": (32768, 512),
            "o_proj": (hidden, 16384),
            "q_a_norm": (1536,),
            "kv_a_norm": (512,),
        }
        for name, shape in attention.items():
            yield Weight(f"layers.{layer}.self_attn.{name}.weight", shape)
        yield Weight(f"layers.{layer}.input_layernorm.weight", (hidden,))
        yield Weight(f"layers.{layer}.post_attention_layernorm.weight", (hidden,))
        if layer >= 3:
            yield Weight(f"layers.{layer}.mlp.gate.weight", (256, hidden))
        inner = 18432 if layer < 3 else 2048
        kinds = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for name, shape in kinds.items():
            yield Weight(f"layers.{layer}.mlp.shared_{name}.weight", shape)
            for expert in range(256 if layer >= 3 else 0):
                key = f"layers.{layer}.mlp.experts.{expert}.{name}.weight"
                yield Weight(key, shape, expert=expert)


# --- What was saved -------------------------------------------------------------------------------


def saved_by_rows(weights: Sequence[Weight], num_ranks: int) -> Manifest:
    """Make the manifest of a save of `num_ranks` ranks, which have rows of each weight. The file of
    each is laid out as by the first rank with the same keys.
    """
    keys = [
        (prefix + weight.name, dtype, weight)
        for prefix, dtype in STATES.items()
        for weight in weights
    ]
    keys.sort(key=lambda item: item[0])
    num_kinds = EP if any(weight.expert is not None for weight in weights) else 1
    ndim = 2
    columns: list[tuple[IntArray, ...]] = []
    files: list[ShardFile] = [ShardFile("", 0, 0, 0)] * num_ranks
    for kind in range(num_kinds):
        ranks = np.arange(kind, num_ranks, num_kinds)
        columns.append(_chunks_of_kind(keys, ranks, num_ranks, files))
    key_ids, file_ids, first_bytes, num_bytes, first_rows, rows = map(
        np.concatenate, zip(*columns, strict=True)
    )
    order = np.lexsort((first_rows, key_ids))
    shapes = np.array([(*weight.shape, 1)[:2] for _, _, weight in keys], np.int64)[key_ids]
    shapes[:, 0] = rows
    offsets = np.zeros((len(rows), ndim), np.int64)
    offsets[:, 0] = first_rows
    table = ChunkTable(
        files,
        *(column[order] for column in (key_ids, file_ids, first_bytes, num_bytes, offsets, shapes)),
        np.zeros(0, np.uint64),
    )
    return Manifest(
        [key for key, _, _ in keys],
        [dtype for _, dtype, _ in keys],
        [weight.shape for _, _, weight in keys],
        table,
        {},
    )


def _chunks_of_kind(
    keys: Sequence[tuple[str, str, Weight]],
    ranks: IntArray,
    num_ranks: int,
    files: list[ShardFile],
) -> tuple[IntArray, ...]:
    """Return the columns of the chunks of some ranks that have the same keys; note their files."""
    first = int(ranks[0])
    mine, parts, counts = [], [], []
    for number, (_, _, weight) in enumerate(keys):
        part, count = part_of(weight, first, num_ranks)
        if part is not None:
            mine.append(number)
            parts.append(ranks if weight.expert is None else ranks // EP)
            counts.append(count)
    chunks = []
    for number in mine:
        key, dtype, weight = keys[number]
        _, region = rows_of([weight], first, num_ranks)[0]
        size = region.num_elements * ITEM_BYTES[dtype]
        chunks.append(PlannedChunk(number, key, dtype, region, size))
    global_shapes = {keys[number][0]: keys[number][2].shape for number in mine}
    planned = lay_out_tensor_file("tensors/a", chunks, global_shapes)
    place = {chunk.key_id: i for i, chunk in enumerate(planned.chunks)}
    order = np.argsort([place[number] for number in mine])
    row_bytes = np.array([c.num_bytes // c.region.shape[0] for c in chunks], np.int64)
    sizes = np.array([keys[number][2].shape[0] for number in mine], np.int64)[:, None]
    step = -(-sizes // np.array(counts, np.int64)[:, None])
    first_rows = np.minimum(np.stack(parts) * step, sizes)
    rows = np.minimum(first_rows + step, sizes) - first_rows
    num_bytes = rows * row_bytes[:, None]
    first_bytes = np.empty_like(num_bytes)
    ends = np.cumsum(num_bytes[order], axis=0) + len(planned.header)
    first_bytes[order] = ends - num_bytes[order]
    for rank, size in zip(ranks.tolist(), ends[-1].tolist(), strict=True):
        name = f"tensors/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        files[rank] = ShardFile(name, size, len(planned.header), 0)
    has = rows > 0
    key_ids = np.broadcast_to(np.array(mine, np.int64)[:, None], rows.shape)
    file_ids = np.broadcast_to(ranks, rows.shape)
    return tuple(c[has] for c in (key_ids, file_ids, first_bytes, num_bytes, first_rows, rows))


# --- What is read ---------------------------------------------------------------------------------


def compared(
    stored: StoredCheckpoint,
    wanted: Sequence[Sequence[tuple[Weight, Region]]],
    has_all: bool = True,
) -> list[list[Cell]]:
    """Count what ranks ask for that want some regions, each alone and, if these are all ranks,
    sharing what they read.
    """
    requests = [
        [
            Request(prefix + weight.name, weight.shape, region)
            for prefix in STATES
            for weight, region in of_rank
        ]
        for of_rank in wanted
    ]
    copies = [plan_load(stored, of_rank) for of_rank in requests]
    alone = [counted(stored, c, r) for c, r in zip(copies, requests, strict=True)]
    shared = reads_together(stored, copies, requests) if has_all else None
    rows: list[list[Cell]] = []
    for name, value in _figures(stored, alone).items():
        rows.append([name, value, _figures(stored, shared)[name] if shared else ""])
    return rows


def _figures(stored: StoredCheckpoint, found: list[dict[str, Any]]) -> dict[str, str]:
    wanted = sum(each["wanted"] for each in found)
    once = int(np.unique(np.concatenate([each["chunks"] for each in found])).size)
    in_chunks = stored.manifest.num_bytes[
        np.unique(np.concatenate([each["chunks"] for each in found]))
    ].sum()
    return {
        "GB wanted by a rank, at most": f"{max(e['wanted'] for e in found) / 1e9:.2f}",
        "GB read by a rank, at most": f"{max(e['read'] for e in found) / 1e9:.2f}",
        "read per byte wanted": f"{sum(e['read'] for e in found) / wanted:.3f}",
        "read per byte of these chunks": f"{sum(e['read'] for e in found) / in_chunks:.3f}",
        "files of a rank, at most": f"{max(e['files'] for e in found):,}",
        "ranged GETs of a rank, at most": f"{max(e['gets'] for e in found):,}",
        "ranged GETs of these ranks": f"{sum(e['gets'] for e in found):,}",
        "chunks that are read": f"{once:,}",
    }


def counted(
    stored: StoredCheckpoint, copies: Sequence[Copy], requests: Sequence[Request]
) -> dict[str, Any]:
    """Count what reading some copies asks an object store for."""
    index = stored.manifest.key_index
    dtypes = [FROM_NAME[stored.manifest.dtypes[index[r.key]]] for r in requests]
    # Nobody writes into this memory, so it takes none.
    targets = [torch.empty(r.region.shape, dtype=d) for r, d in zip(requests, dtypes, strict=True)]
    copier = Copier(targets)
    parts = parts_of(stored, copies, targets, copier)
    plain = stored_without_checksums(stored)
    reading = Reading(in_file_order(plain, copier, parts), OpenFiles())
    gets = read = 0
    files = set()
    for units in reading.near_units():
        start = reading._position(units[0])
        ends = [reading._position(u) + sum(s.num_bytes for s in u) for u in units]
        gets, read = gets + 1, read + max(ends) - start
        files.add(reading.file_of(units[0]))
    return {
        "wanted": sum(target.nbytes for target in targets),
        "read": read,
        "files": len(files),
        "gets": gets,
        "chunks": np.array([copy.chunk for copy in copies], np.int64),
    }


def stored_without_checksums(stored: StoredCheckpoint) -> StoredCheckpoint:
    """Return the checkpoint as what fetches no checksums; parts are already cut between blocks."""
    return StoredCheckpoint(stored.location, stored.manifest, verify=False)


def reads_together(
    stored: StoredCheckpoint,
    copies: Sequence[Sequence[Copy]],
    requests: Sequence[Sequence[Request]],
) -> list[dict[str, Any]]:
    """Count what ranks ask for that share what they read."""
    manifest = stored.manifest
    costs = ReadCosts(manifest)
    wanted = [sum(target_bytes(manifest, r) for r in of_rank) for of_rank in requests]
    unit_bytes = unit_bytes_for(max(wanted))
    divided = [divide(manifest, of_rank, unit_bytes) for of_rank in copies]
    messages = [
        describe_units(costs, units, [_dtype_of(manifest, r) for r in of_rank], 0).to_bytes()
        for rank, (units, of_rank) in enumerate(zip(divided, requests, strict=True))
    ]
    found = []
    for rank, plan in enumerate(map(SharePlan.from_bytes, plan_shares(messages, costs))):
        alone = [unit for unit, r in zip(divided[rank], plan.readers, strict=True) if r < 0]
        mine, regions = list(alone), list(requests[rank])
        for chunk, offset, shape in zip(
            plan.read_chunks.tolist(),
            plan.read_offsets.tolist(),
            plan.read_shapes.tolist(),
            strict=True,
        ):
            key = manifest.keys[int(manifest.key_ids[chunk])]
            ndim = len(manifest.global_shapes[int(manifest.key_ids[chunk])])
            region = Region(tuple(offset[:ndim]), tuple(shape[:ndim]))
            place = Region((0,) * ndim, region.shape)
            mine.append(Copy(chunk, region, len(regions), place))
            regions.append(Request(key, (), place))
        one = counted(stored, mine, regions)
        one["wanted"] = wanted[rank]
        found.append(one)
    return found


def _dtype_of(manifest: Manifest, request: Request) -> torch.dtype:
    return FROM_NAME[manifest.dtypes[manifest.key_index[request.key]]]


def target_bytes(manifest: Manifest, request: Request) -> int:
    """Return the bytes of a request."""
    item = ITEM_BYTES[manifest.dtypes[manifest.key_index[request.key]]]
    return request.region.num_elements * item


if __name__ == "__main__":
    main()
