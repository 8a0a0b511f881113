"""Save and load a Llama with Adam at tensor parallel 2, beside the other ways to do it.

    python tests/benchmarks/save_load.py [--gb 2] [--ranks 2] [--runs 5] [--dir DIR] [--json FILE] [--only NAME ...]

Prints a table for docs/performance.md. Weights are bf16, the two moments of Adam fp32. In every round each contestant
saves (its data is on disk when it returns) and loads what it saved (files in the page cache, into tensors that are
there already); what is loaded is compared with what was saved. Seconds go from a barrier to the end of the last rank,
medians over the rounds. A round before the first is not counted; one after the last measures memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _contest import Figures, measure, tables
from _contestants import Part, State, contestants, local_bytes
from _measure import machine_facts, run_ranks

HIDDEN, INTERMEDIATE, KEY_VALUE = 1024, 2816, 256
LAYER: list[tuple[str, tuple[int, ...], int | None]] = [
    ("self_attn.q_proj.weight", (HIDDEN, HIDDEN), 0),
    ("self_attn.k_proj.weight", (KEY_VALUE, HIDDEN), 0),
    ("self_attn.v_proj.weight", (KEY_VALUE, HIDDEN), 0),
    ("self_attn.o_proj.weight", (HIDDEN, HIDDEN), 1),
    ("mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN), 0),
    ("mlp.up_proj.weight", (INTERMEDIATE, HIDDEN), 0),
    ("mlp.down_proj.weight", (HIDDEN, INTERMEDIATE), 1),
    ("input_layernorm.weight", (HIDDEN,), None),
    ("post_attention_layernorm.weight", (HIDDEN,), None),
]
BYTES_PER_PARAMETER = 2 + 4 + 4


def main() -> None:
    """Run the ranks, print what rank 0 made of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where checkpoints go; they are deleted again")
    parser.add_argument("--json", help="also write all figures here")
    parser.add_argument("--only", nargs="+", help="contestants whose name begins with one of these")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        run_ranks(run_rank, arguments.ranks, llama_sizes(arguments.gb), arguments, folder)


def llama_sizes(gigabytes: float) -> tuple[int, int]:
    """Return vocabulary and number of layers that make a state of about that size."""
    parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
    vocabulary = int(min(parameters / 2e8, 1) * 32000) // 256 * 256
    layer_parameters = 2 * HIDDEN * (HIDDEN + KEY_VALUE) + 3 * HIDDEN * INTERMEDIATE
    return vocabulary, max(1, round((parameters - 2 * vocabulary * HIDDEN) / layer_parameters))


def llama_state(vocabulary: int, num_layers: int) -> State:
    """Make this rank's part of the state, with random values; copies are equal on all ranks."""
    weights: dict[str, tuple[tuple[int, ...], int | None]] = {"embed_tokens.weight": ((vocabulary, HIDDEN), 0)}
    for layer in range(num_layers):
        weights |= {f"layers.{layer}.{name}": (shape, axis) for name, shape, axis in LAYER}
    weights |= {"norm.weight": ((HIDDEN,), None), "lm_head.weight": ((vocabulary, HIDDEN), 0)}
    num_ranks = dist.get_world_size()
    own, common = (torch.Generator().manual_seed(seed) for seed in (dist.get_rank() + 1, 0))
    state: dict[str, Part] = {}
    for prefix, dtype in (
        ("model.", torch.bfloat16), ("optimizer.exp_avg.", torch.float32), ("optimizer.exp_avg_sq.", torch.float32)
    ):  # fmt: skip
        for name, (shape, axis) in weights.items():
            local_shape = [size // num_ranks if i == axis else size for i, size in enumerate(shape)]
            generator = common if axis is None else own
            state[prefix + name] = Part(torch.empty(local_shape, dtype=dtype).normal_(generator=generator), axis)
    return state


def run_rank(rank: int, sizes: tuple[int, int], arguments: argparse.Namespace, folder: str) -> None:
    """Measure everything in one rank; rank 0 prints."""
    state = llama_state(*sizes)
    targets = {key: Part(torch.zeros_like(part.local), part.axis) for key, part in state.items()}
    taking_part = [c for c in contestants() if not arguments.only or c.name.startswith(tuple(arguments.only))]
    results = measure(taking_part, state, targets, arguments.runs, folder)
    num_bytes = torch.tensor(local_bytes(state))
    dist.all_reduce(num_bytes)
    if rank == 0:
        print(report(results, int(num_bytes), sizes, arguments))
        if arguments.json:
            figures = [result._asdict() for result in results]
            Path(arguments.json).write_text(json.dumps({"bytes": int(num_bytes), "figures": figures}, indent=1))


def report(results: list[Figures], num_bytes: int, sizes: tuple[int, int], arguments: argparse.Namespace) -> str:
    """Lay out the figures as Markdown."""
    vocabulary, num_layers = sizes
    facts = (
        f"{num_bytes / 1e9:.2f} GB: a Llama of hidden size {HIDDEN}, {num_layers} layers, vocabulary {vocabulary}, "
        f"bf16 with fp32 moments. {arguments.ranks} gloo ranks, TP{arguments.ranks}, median of {arguments.runs} rounds."
    )
    command = f"`{' '.join(['python', *sys.argv])}`: {machine_facts(arguments.dir)}."
    return "\n\n".join([command, facts, tables(results, num_bytes), NOTES])


NOTES = """\
All saves end with the data on disk. DCP calls fsync itself (`sync_files=True`, its default; up to 8 KB in the stream's
buffer and the directory are not synced). So does HuggingFaceStorageWriter; its files and directory, and those of
save_file, are synced once more within the time measured. Megatron writes in forked processes, whose memory is not
counted. Raw: as many bytes from one buffer in requests of 16 MiB (after fallocate where buffered), then fsync; reads go
straight into the tensors. Extra peak memory is what became resident beyond what was before; files that are mapped (by
safetensors readers) count while their pages are resident."""


if __name__ == "__main__":
    main()
