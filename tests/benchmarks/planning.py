"""What planning costs at scale: seconds, memory and bytes of rank 0 and of others, by layout and
number of ranks.

    python tests/benchmarks/planning.py [--layouts 3d fsdp2 ep] [--ranks 256 512 1024]
        [--tensors 1000] [--chunks 1000000] [--profile] [--json FILE]

One process makes up the descriptions of all ranks, without tensor data, and calls what rank 0 calls
between gathering them and sending plans. Seconds are of CPU time, so that other programs hardly
matter. With several numbers of ranks, the last column is the exponent e of the power law N**e that
fits best.

- 3d: TP8 x PP16, and as many replicas as it takes; norms are replicated over TP too, embeddings are
  on two stages.
- fsdp2: every rank has a part of the rows of every tensor, none of some where there are not enough.
- ep: experts, each under keys of its own, divided over 64 ranks; their rows over the others, other
  tensors as in fsdp2.
"""

from __future__ import annotations

import cProfile
import hashlib
import pstats
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from measure import peak_memory_bytes, timed
from report import Cell, Report, parser_of

from distckpt import InvalidShardingError, ShardedTensor
from distckpt._base.garbage import paused_garbage_collection
from distckpt._format.checksum import BLOCK_BYTES
from distckpt._format.columns import pack
from distckpt._format.manifest import (
    CHECKSUM_BYTES,
    ChunkTable,
    Manifest,
    ShardFile,
    file_of_checksums,
    planned_manifest,
    report_of,
)
from distckpt._format.manifest_parts import divided
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, row_hashes
from distckpt._plan import stored_plan
from distckpt._plan.layout import (
    checksum_file_name,
    chunk_table,
    lay_out_files,
    loaded_plans,
    manifest_of_keys,
    structure_of_all,
)
from distckpt._plan.load import Request, plan_load
from distckpt._plan.save import Pieces, find_aliases, plan_owners
from distckpt._state.shards import ShardTable, merge_tables, shard_table
from distckpt._state.validation import (
    find_differences,
    replica_factors,
    stride_of,
    validate_shards,
)
from distckpt._storage import locations

_T = TypeVar("_T")

TP, PP, EP = 8, 16, 64
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
EXPERTS_PER_RANK = 2
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
STATES = [
    ("model.", torch.bfloat16),
    ("optimizer.exp_avg.", torch.float32),
    ("optimizer.exp_avg_sq.", torch.float32),
]


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__, runs=None, has_files=False)
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS))
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1024], help=f"multiples of TP x PP = {TP * PP}"
    )
    parser.add_argument("--tensors", type=int, default=1000, help="per rank")
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, help="in the manifest; 0 leaves it out"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of planning goes"
    )
    arguments = parser.parse_args()
    if any(num_ranks % (TP * PP) for num_ranks in arguments.ranks):
        parser.error(f"--ranks must be multiples of {TP * PP}")
    report = Report(arguments)
    report.about = f"{arguments.tensors} tensors on each rank; seconds are of CPU time."
    profiler = cProfile.Profile()
    for layout in arguments.layouts:
        found = []
        for num_ranks in arguments.ranks:
            tables = list(LAYOUTS[layout](num_ranks, arguments.tensors))
            with paused_garbage_collection():  # as `save` does
                found.append(plan_a_save(tables, profiler if arguments.profile else None))
        heads = [
            f"a save of {layout}",
            *(f"{count} ranks" for count in arguments.ranks),
            "exponent",
        ]
        report.add(heads, _compared(arguments.ranks, found))
    if arguments.chunks:
        found_of_manifest = write_and_open_a_manifest(arguments.chunks)
        rows = [[name, _text(value)] for name, value in found_of_manifest.items()]
        report.add([f"a manifest of {arguments.chunks:,} chunks", ""], rows)
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(30)
    report.finish()


def plan_a_save(tables: list[ShardTable], profiler: cProfile.Profile | None) -> dict[str, Any]:
    """Return what the ranks spend on the plan of a save, see `distckpt._io.save.make_plan`."""
    figures: dict[str, Any] = {}
    planned: list[tuple[list[Pieces], list[bytes]]] = []
    messages, sent_bytes = sent(tables)
    other = len(tables) // 2

    def on_rank_0() -> None:
        if profiler:
            profiler.enable()
        planned.append(plan_for_all(messages, len(tables), figures))
        if profiler:
            profiler.disable()

    peak_0 = peak_memory_bytes(on_rank_0)
    ((pieces, plans),) = planned
    peak_other = peak_memory_bytes(lambda: lay_out_files(other, tables[other], pieces[other]))
    _, figures["another rank: describe and lay out, s"] = cpu_timed(
        lambda: (sent([tables[other]]), lay_out_files(other, tables[other], pieces[other]))
    )
    figures["rank 0: the error of a missing rank, s"] = seconds_to_refuse(
        tables[:other] + tables[other + 1 :]
    )
    figures["rank 0: receives, MB"] = sum(sent_bytes) / 1e6
    figures["another rank: sends at most, MB"] = max(sent_bytes) / 1e6
    figures["rank 0: sends, MB"] = sum(map(len, plans)) / 1e6
    figures["another rank: receives at most, MB"] = max(map(len, plans)) / 1e6
    figures["rank 0: memory, messages included, MB"] = (peak_0 + sum(sent_bytes)) / 1e6
    figures["another rank: memory, MB"] = peak_other / 1e6
    figures.update(check(tables, pieces))
    figures.update(save_again(tables, pieces))
    digest = hashlib.sha256(b"".join(column.tobytes() for piece in pieces for column in piece))
    figures["digest of the plan"] = digest.hexdigest()[:16]
    return figures


def save_again(tables: list[ShardTable], pieces: list[Pieces]) -> dict[str, Any]:
    """Return what rank 0 spends on the manifest of a save whose plan was kept, with files of
    checksums.
    """
    laid_out = []
    for rank, (table, of_rank) in enumerate(zip(tables, pieces, strict=True)):
        laid_out.append(chunk_table(lay_out_files(rank, table, of_rank)[0]))
        laid_out[-1].files.append(ShardFile(checksum_file_name(rank), 0, 0, 0))
    merged = merge_tables(list(tables))
    factors = np.split(
        replica_factors(merged), np.cumsum([len(table.key_ids) for table in tables])[:-1]
    )
    manifest = manifest_of_keys(merged, find_aliases(merged))
    manifest.plan = stored_plan.note_of_plan(
        structure_of_all(table.description() for table in tables),
        stride_of(np.concatenate(factors)),
        [stored_plan.factors_to_bytes(each) for each in factors],
    )
    planned = planned_manifest(manifest, laid_out)
    none = np.zeros(0, np.int64)
    reports = []
    for own in laid_out:
        num_blocks = int((-(-own.num_bytes // BLOCK_BYTES)).sum())
        file = file_of_checksums("", bytes(CHECKSUM_BYTES * num_blocks))
        reports.append(report_of([file], none, none.astype(np.uint64)))

    def complete() -> int:
        chunks, parts = divided(planned.completed(reports))
        contents = [planned.manifest.to_bytes(chunks), *parts.values()]
        with tempfile.TemporaryDirectory() as folder:
            for number, content in enumerate(contents):
                locations.write_bytes(f"{folder}/{number}", content)
        return sum(map(len, contents))

    num_bytes, seconds = cpu_timed(complete)
    return {
        "rank 0: manifest of a repeated save, s": seconds,
        "manifest, MB": num_bytes / 1e6,
        "rank 0: receives in a repeated save, MB": sum(map(len, reports)) / 1e6,
        **save_after_restart(tables, planned.manifest.to_bytes(planned.completed(reports))),
    }


def save_after_restart(tables: list[ShardTable], manifest: bytes) -> dict[str, Any]:
    """Return what ranks spend instead of planning when they have loaded a checkpoint of the same
    structure.
    """
    loaded = Manifest.from_bytes(manifest, "manifest")
    figures = {}
    for rank, name in ((0, "rank 0"), (len(tables) // 2, "another rank")):

        def remember(rank: int = rank) -> None:
            stored_plan.remember(rank, len(tables), loaded, "0")

        def restore(rank: int = rank) -> None:
            table = tables[rank]
            found = stored_plan.restored(loaded_plans[0], table, table.description())
            assert found is not None

        _, figures[f"{name}: remembers the plan of a load, s"] = cpu_timed(remember)
        with paused_garbage_collection():
            _, figures[f"{name}: first save after a restart, s"] = cpu_timed(restore)
        figures[f"{name}: memory for that, MB"] = peak_memory_bytes(restore) / 1e6
    return figures


def sent(tables: list[ShardTable]) -> tuple[Any, list[int]]:
    """Return what rank 0 gets, and how many bytes of it each rank sends: of equal messages the
    first one.
    """
    messages, sent_bytes = [], np.zeros(len(tables), np.int64)
    for column in zip(*(table.to_messages() for table in tables), strict=True):
        first: dict[bytes, int] = {}
        for rank, message in enumerate(column):
            if first.setdefault(message, rank) == rank:
                sent_bytes[rank] += len(message)
        known = {message: message for message in first}
        messages.append([known[message] for message in column])
    return messages, sent_bytes.tolist()


def received(messages: Any) -> list[ShardTable]:
    """Return the tables that `sent` has sent."""
    return ShardTable.all_from_messages(*messages)


def plan_for_all(
    messages: Any, num_ranks: int, figures: dict[str, Any]
) -> tuple[list[Pieces], list[bytes]]:
    """Do what rank 0 does, and note the seconds of each step."""
    steps: dict[str, float] = {}

    def step(name: str, function: Callable[[], _T]) -> _T:
        result, steps[f"rank 0: {name}, s"] = cpu_timed(function)
        return result

    tables = step("decode descriptions", lambda: received(messages))
    ends = np.cumsum([len(table.key_ids) for table in tables])[:-1]
    merged = step("merge", lambda: merge_tables(tables))
    tables.clear()
    step("validate", lambda: validate_shards(merged))
    step("compare replicas", lambda: find_differences(merged))
    aliases = step("find tied tensors", lambda: find_aliases(merged))
    pieces = step("give owners", lambda: plan_owners(merged, num_ranks, aliases, [0] * num_ranks))
    factors = step("find replicas", lambda: replica_factors(merged))
    pairs = list(zip(np.split(factors, ends), pieces, strict=True))
    plans = step(
        "encode plans", lambda: [pack([1, 1], {"factors": f, **p._asdict()}) for f, p in pairs]
    )
    figures.update(steps)
    figures["rank 0: all of it, s"] = sum(steps.values())
    return pieces, plans


def seconds_to_refuse(tables: list[ShardTable]) -> float:
    """Return how long the error about missing shards takes."""
    merged = merge_tables(tables)
    started = time.process_time()
    try:
        validate_shards(merged)
    except InvalidShardingError:
        return time.process_time() - started
    return float("nan")


def check(tables: list[ShardTable], pieces: list[Pieces]) -> dict[str, Any]:
    """Check that every byte has one owner; return what the plan is like."""
    merged = merge_tables(tables)
    item_bytes = np.array([2 if dtype == "BF16" else 4 for dtype in merged.dtypes])
    index = {key: i for i, key in enumerate(merged.keys)}
    loads = []
    for table, piece in zip(tables, pieces, strict=True):
        kinds = item_bytes[[index[key] for key in table.keys]]
        key_of_shard = np.searchsorted(table.shard_ids, piece.shard_ids)
        loads.append(
            int((np.prod(piece.shapes, axis=1) * kinds[table.key_ids[key_of_shard]]).sum())
        )
    stored = np.prod(merged.global_shapes.astype(np.int64), axis=1) * item_bytes
    assert sum(loads) == stored.sum(), "not every byte has one owner"
    return {
        "keys": len(merged.keys),
        "shards of all ranks": len(merged.ranks),
        "pieces to write": sum(len(piece.shard_ids) for piece in pieces),
        "bytes to write per rank, max / mean": max(loads) / (sum(loads) / len(tables)),
    }


def cpu_timed(function: Callable[[], _T]) -> tuple[_T, float]:
    """Call a function; return its result and the seconds of CPU time."""
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


# --- Layouts --------------------------------------------------------------------------------------


def three_dimensional(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Describe the shards of every rank. Data-parallel replicas differ in `is_main` only."""
    num_replicas = num_ranks // (TP * PP)
    by_place: dict[tuple[int, int], ShardTable] = {}
    for rank in range(num_ranks):
        place, replica = (rank % TP, rank // TP // num_replicas), rank // TP % num_replicas
        if place not in by_place:
            by_place[place] = _sampled(shard_table(list(_shards(*place, num_tensors))))
        table = by_place[place]
        yield table if replica == 0 else table._replace(is_main=np.zeros_like(table.is_main))


def _shards(tp_rank: int, pp_rank: int, num_tensors: int) -> Iterator[ShardedTensor]:
    """Yield one rank's shards: whole layers, each as weight and two moments, cut off after
    `num_tensors`.
    """
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
        data = torch.empty(
            [n // TP if i == axis else n for i, n in enumerate(shape)], dtype=dtype, device="meta"
        )
        offsets = () if axis is None else ((axis, tp_rank, TP),)
        replica_id = (copy, 0 if axis is not None else tp_rank)
        yield ShardedTensor.from_rank_offsets(prefix + name, data, *offsets, replica_id=replica_id)


def fully_sharded(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Describe the shards of every rank, where each has rows of every tensor."""
    whole = _whole([("embed_tokens.weight", (VOCABULARY, HIDDEN))], LAYER, num_tensors)
    for rank in range(num_ranks):
        yield _rows_of(whole, np.full(len(whole.keys), rank), np.full(len(whole.keys), num_ranks))


def expert_parallel(num_ranks: int, num_tensors: int) -> Iterator[ShardTable]:
    """Describe the shards of every rank, where each has rows of a few experts, and of every other
    tensor.
    """
    others = [layer for layer in LAYER if not layer[0].startswith("mlp.")] + [
        ("mlp.gate.weight", 0, (128, HIDDEN))
    ]
    for rank in range(num_ranks):
        expert_rank, part = rank % EP, rank // EP
        if part == 0:
            experts = [
                (f"mlp.experts.{expert_rank * EXPERTS_PER_RANK + i}.{name}", axis, shape)
                for i in range(EXPERTS_PER_RANK)
                for name, axis, shape in (
                    ("up_proj", 0, (3072, HIDDEN)),
                    ("down_proj", 0, (HIDDEN, 1536)),
                )
            ]
            # One for each expert rank, made in the first round.
            wholes = [] if rank == 0 else wholes  # noqa: F821
            wholes.append(_whole([], others + experts, num_tensors))
        whole = wholes[expert_rank]
        is_expert = np.array([".experts." in key for key in whole.keys])
        counts = np.where(is_expert, num_ranks // EP, num_ranks)
        yield _rows_of(whole, np.where(is_expert, part, rank), counts)


def _whole(first: list[Any], layer: list[Any], num_tensors: int) -> ShardTable:
    """Describe `num_tensors` whole tensors: some, and then layers, each as weight and two
    moments.
    """
    num_weights = -(-num_tensors // len(STATES))
    weights = list(first)
    for index in range(num_weights - len(weights)):
        name, _, shape = layer[index % len(layer)]
        weights.append((f"layers.{index // len(layer)}.{name}", shape))
    kinds = [(prefix + name, dtype, shape) for prefix, dtype in STATES for name, shape in weights][
        :num_tensors
    ]
    shards = [
        ShardedTensor.from_rank_offsets(k, torch.empty(s, dtype=d, device="meta"))
        for k, d, s in kinds
    ]
    return shard_table(shards)


def _rows_of(whole: ShardTable, parts: Any, counts: Any) -> ShardTable:
    """Take one of `counts` parts of the rows of each tensor, as `torch.chunk` divides them."""
    offsets, shapes = whole.offsets.copy(), whole.shapes.copy()
    step = -(-shapes[:, 0] // counts)
    offsets[:, 0] = np.minimum(parts * step, shapes[:, 0])
    shapes[:, 0] = np.minimum(offsets[:, 0] + step, shapes[:, 0]) - offsets[:, 0]
    return _sampled(whole._replace(offsets=offsets, shapes=shapes))


def _sampled(table: ShardTable) -> ShardTable:
    """Give each region of a key the hash of made-up contents."""
    names = np.array([zlib.crc32(key.encode()) for key in table.keys])[table.key_ids]
    return table._replace(digests=row_hashes([names, *table.offsets.T, *table.shapes.T]))


LAYOUTS = {"3d": three_dimensional, "fsdp2": fully_sharded, "ep": expert_parallel}


# --- The manifest ---------------------------------------------------------------------------------


def write_and_open_a_manifest(num_chunks: int) -> dict[str, Any]:
    """Time writing a manifest, opening it, and planning one rank's load out of it under another
    layout.
    """
    manifest = made_up_manifest(num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        location = f"{folder}/manifest.safetensors"
        _, writing = timed(lambda: locations.write_bytes(location, manifest.to_bytes()))
        num_bytes = Path(location).stat().st_size
        opened, opening = timed(
            lambda: Manifest.from_bytes(locations.read_bytes(location), location)
        )
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
    per_key, rows, columns, block_bytes, num_files, header_bytes = (
        16,
        512,
        2048,
        1 << 20,
        1024,
        4096,
    )
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
                ShardFile(
                    f"tensors/shard-{i + 1:05d}-model-00001-of-00001.safetensors",
                    file_bytes,
                    header_bytes,
                    i,
                )
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


def _compared(num_ranks: list[int], found: list[dict[str, Any]]) -> list[list[Cell]]:
    """Make rows with a column for each number of ranks, and the exponents of growth."""
    rows = []
    for name in found[0]:
        values = [figures[name] for figures in found]
        exponent = ""
        if len(found) > 1 and not isinstance(values[0], str) and all(value > 0 for value in values):
            exponent = f"{np.polyfit(np.log(num_ranks), np.log(values), 1)[0]:.2f}"
        rows.append([name, *map(_text, values), exponent])
    return rows


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:,.3f}"
        if isinstance(value, float)
        else f"{value:,}"
    )


if __name__ == "__main__":
    main()
