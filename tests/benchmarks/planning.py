"""How long the coordinator thinks: validate and plan a save for thousands of ranks, write and open a huge manifest.

    python tests/benchmarks/planning.py [--ranks 1024] [--tensors 1000] [--chunks 1000000] [--profile] [--json FILE]

One process, made-up descriptions, no tensor data. The layout is TP8 x PP16, and as many data-parallel replicas as it
takes to use all ranks; norms are replicated over TP as well, and the embedding is on the first and the last stage.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine_facts, markdown_table, timed

from distckpt import ShardedTensor
from distckpt._base.memory import paused_garbage_collection
from distckpt._format.manifest import ChunkTable, Manifest, ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._plan.load import Request, plan_load
from distckpt._plan.save import find_aliases, plan_owners
from distckpt._state.shards import ShardTable, describe, merge_tables
from distckpt._state.validation import validate_shards
from distckpt._storage import locations

TP, PP = 8, 16
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
# Name, axis that tensor parallelism divides (None: replicated), global shape: one layer of a Llama.
LAYER: list[tuple[str, int | None, tuple[int, ...]]] = [
    ("self_attn.q_proj.weight", 0, (HIDDEN, HIDDEN)),
    ("self_attn.k_proj.weight", 0, (HIDDEN // 4, HIDDEN)),
    ("self_attn.v_proj.weight", 0, (HIDDEN // 4, HIDDEN)),
    ("self_attn.o_proj.weight", 1, (HIDDEN, HIDDEN)),
    ("mlp.gate_proj.weight", 0, (INTERMEDIATE, HIDDEN)),
    ("mlp.up_proj.weight", 0, (INTERMEDIATE, HIDDEN)),
    ("mlp.down_proj.weight", 1, (HIDDEN, INTERMEDIATE)),
    ("input_layernorm.weight", None, (HIDDEN,)),
    ("post_attention_layernorm.weight", None, (HIDDEN,)),
]
STATES = [("model.", torch.bfloat16), ("optimizer.exp_avg.", torch.float32), ("optimizer.exp_avg_sq.", torch.float32)]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help=f"a multiple of TP x PP = {TP * PP}")
    parser.add_argument("--tensors", type=int, default=1000, help="per rank")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="in the manifest")
    parser.add_argument("--profile", action="store_true", help="print where the time of planning goes")
    parser.add_argument("--json", help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.ranks % (TP * PP):
        parser.error(f"--ranks must be a multiple of {TP * PP}")
    print(machine_facts(None), end="\n\n")
    profiler = cProfile.Profile()
    planning = plan_a_save(arguments.ranks, arguments.tensors, profiler if arguments.profile else None)
    print(f"Planning a save of {arguments.ranks} ranks x {arguments.tensors} tensors:\n\n{_table(planning)}\n")
    manifest = write_and_open_a_manifest(arguments.chunks)
    print(f"A manifest of {arguments.chunks:,} chunks:\n\n{_table(manifest)}")
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(30)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"planning": planning, "manifest": manifest}, indent=1))


def plan_a_save(num_ranks: int, num_tensors: int, profiler: cProfile.Profile | None) -> dict[str, Any]:
    """Time what rank 0 does between gathering descriptions and scattering plans."""
    messages = [table.to_bytes() for table in rank_tables(num_ranks, num_tensors)]
    figures: dict[str, Any] = {}
    if profiler:
        profiler.enable()
    tables, figures["decode descriptions, s"] = timed(lambda: ShardTable.all_from_bytes(messages))
    merged, figures["merge, s"] = timed(lambda: merge_tables(tables))
    _, figures["validate, s"] = timed(lambda: validate_shards(merged))
    aliases, figures["find tied tensors, s"] = timed(lambda: find_aliases(merged))
    pieces, figures["give owners, s"] = timed(lambda: plan_owners(merged, num_ranks, aliases, [0] * num_ranks))
    plans, figures["encode plans, s"] = timed(lambda: [piece.to_bytes() for piece in pieces])
    if profiler:
        profiler.disable()
    figures["merge to owners, s (bar: 10)"] = sum(
        figures[f"{step}, s"] for step in ("merge", "validate", "find tied tensors", "give owners")
    )
    item_bytes = np.array([2 if dtype == "BF16" else 4 for dtype in merged.dtypes])
    loads = []
    for rank, piece in enumerate(pieces):
        table = tables[rank]
        key_of_shard = np.searchsorted(table.shard_ids, piece.shard_ids)
        itemsizes = np.array([2 if d == "BF16" else 4 for d in table.dtypes])[table.key_ids[key_of_shard]]
        loads.append(int((np.prod(piece.shapes, axis=1) * itemsizes).sum()))
    stored = np.prod(merged.global_shapes.astype(np.int64), axis=1) * item_bytes
    assert sum(loads) == stored.sum(), "not every byte has one owner"
    figures["keys"] = len(merged.keys)
    figures["shards of all ranks"] = len(merged.ranks)
    figures["bytes of descriptions, MB"] = sum(map(len, messages)) / 1e6
    figures["bytes of plans, MB"] = sum(map(len, plans)) / 1e6
    figures["pieces to write"] = sum(len(piece.shard_ids) for piece in pieces)
    figures["bytes per rank, max / mean"] = max(loads) / (sum(loads) / num_ranks)
    return figures


def rank_tables(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Describe the shards of every rank. Data-parallel replicas differ in `is_main` only."""
    num_replicas = num_ranks // (TP * PP)
    by_place: dict[tuple[int, int], ShardTable] = {}
    for rank in range(num_ranks):
        place, replica = (rank % TP, rank // TP // num_replicas), rank // TP % num_replicas
        if place not in by_place:
            by_place[place] = describe(list(_shards(*place, num_tensors)))
        table = by_place[place]
        yield table if replica == 0 else table._replace(is_main=np.zeros_like(table.is_main))


def _shards(tp_rank: int, pp_rank: int, num_tensors: int) -> Iterator[ShardedTensor]:
    """Yield one rank's shards: whole layers, each as weight and two moments, cut off after `num_tensors`."""
    weights: list[tuple[str, int | None, tuple[int, ...], int]] = []
    if pp_rank in (0, PP - 1):
        weights.append(("embed_tokens.weight", 0, (VOCABULARY, HIDDEN), int(pp_rank > 0)))
    num_weights = -(-num_tensors // len(STATES))
    for index in range(num_weights - len(weights)):
        name, axis, shape = LAYER[index % len(LAYER)]
        layer = pp_rank * num_weights + index // len(LAYER)
        weights.append((f"layers.{layer}.{name}", axis, shape, 0))
    kinds = [(prefix, dtype, *weight) for prefix, dtype in STATES for weight in weights]
    for prefix, dtype, name, axis, shape, copy in kinds[:num_tensors]:
        data = torch.empty([n // TP if i == axis else n for i, n in enumerate(shape)], dtype=dtype, device="meta")
        offsets = () if axis is None else ((axis, tp_rank, TP),)
        replica_id = (copy, 0 if axis is not None else tp_rank)
        yield ShardedTensor.from_rank_offsets(prefix + name, data, *offsets, replica_id=replica_id)


def write_and_open_a_manifest(num_chunks: int) -> dict[str, Any]:
    """Time writing a manifest, opening it, and planning one rank's load out of it under another layout."""
    manifest = made_up_manifest(num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        location = f"{folder}/manifest.safetensors"
        _, writing = timed(lambda: locations.write_bytes(location, manifest.to_bytes()))
        num_bytes = Path(location).stat().st_size
        opened, opening = timed(lambda: Manifest.from_bytes(locations.read_bytes(location), location))
    requests = [
        # One of 4 ranks that share a tensor by columns, where it was saved in 16 parts by rows.
        Request(key, shape, Region((0, shape[1] // 4), (shape[0], shape[1] // 4)))
        for key, shape in list(zip(opened.keys, opened.global_shapes, strict=True))[:1000]
    ]
    stored = StoredCheckpoint("checkpoint", opened)
    with paused_garbage_collection():  # as `load` does
        _, first = timed(lambda: plan_load(stored, requests[:1]))
        copies, planning = timed(lambda: plan_load(stored, requests))
    return {
        "write, s (bar: 3)": writing,
        "open, s (bar: 0.5)": opening,
        "first request of a load, s": first,
        f"plan a load of {len(requests)} tensors, s": planning,
        "parts of chunks in that plan": len(copies),
        "keys": len(opened.keys),
        "size, MB": num_bytes / 1e6,
    }


def made_up_manifest(num_chunks: int) -> Manifest:
    """Make the manifest of tensors of 16 chunks of 2 MiB each, in 1024 files."""
    per_key, rows, columns, block_bytes, num_files, header_bytes = 16, 512, 2048, 1 << 20, 1024, 4096
    num_keys = num_chunks // per_key
    num_chunks = num_keys * per_key
    chunk_bytes = rows * columns * 2
    chunk, zeros = np.arange(num_chunks), np.zeros(num_chunks, np.int64)
    file_bytes = header_bytes + -(-num_chunks // num_files) * chunk_bytes
    return Manifest(
        keys=[f"model.layers.{i // 9}.{LAYER[i % 9][0]}" for i in range(num_keys)],
        dtypes=["BF16"] * num_keys,
        global_shapes=[(rows * per_key, columns)] * num_keys,
        chunks=ChunkTable.empty()._replace(
            files=[
                ShardFile(f"tensors/shard-{i + 1:05d}-model-00001-of-00001.safetensors", file_bytes, header_bytes, i)
                for i in range(num_files)
            ],
            key_ids=chunk // per_key,
            file_ids=chunk % num_files,
            first_bytes=header_bytes + chunk // num_files * chunk_bytes,
            num_bytes=np.full(num_chunks, chunk_bytes),
            offsets=np.stack([chunk % per_key * rows, zeros], axis=1),
            shapes=np.stack([zeros + rows, zeros + columns], axis=1),
            block_checksums=np.arange(num_chunks * (chunk_bytes // block_bytes), dtype=np.uint64),
        ),
        aliases={},
        block_bytes=block_bytes,
    )


def _table(figures: dict[str, Any]) -> str:
    rows = [[name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"] for name, value in figures.items()]
    return markdown_table(["", ""], rows)


if __name__ == "__main__":
    main()
