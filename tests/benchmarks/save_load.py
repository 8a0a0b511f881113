"""Save and load a Llama with Adam at tensor parallel 2, beside the other ways to do it.

    python tests/benchmarks/save_load.py [--gb 2] [--ranks 2] [--runs 5] [--dir DIR] [--json FILE] [--only NAME ...]

Prints a table for docs/performance.md. Weights are bf16, the two moments of Adam fp32. In every round each contestant
saves (its data is on disk when it returns) and loads what it saved (files in the page cache, into tensors that are
there already); what is loaded in the first round, which is not counted, is compared with what was saved. Seconds go
from a barrier to the end of the last rank, medians over the rounds. A round after the last measures memory.
`distckpt bench DIR` measures more cases of the same contestants, without memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from _contest import CASES, by_contestant, tables
from _measure import machine_facts

from distckpt._bench.figures import Outcome, to_json
from distckpt._bench.run import run_benchmark
from distckpt._bench.state import llama_sizes


def main() -> None:
    """Run the contest and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where checkpoints go; they are deleted again")
    parser.add_argument("--json", help="also write all figures here, as `distckpt bench` does")
    parser.add_argument("--only", nargs="+", help="contestants whose name begins with one of these")
    arguments = parser.parse_args()
    only = tuple(arguments.only) if arguments.only else None
    outcome = run_benchmark(
        arguments.dir, arguments.gb, arguments.ranks, arguments.runs, CASES, only, with_peaks=True,
        tell=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(report(outcome, arguments))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(to_json(outcome), indent=1) + "\n")


def report(outcome: Outcome, arguments: argparse.Namespace) -> str:
    """Lay out the figures as Markdown."""
    sizes = llama_sizes(arguments.gb)
    facts = (
        f"{outcome.num_bytes / 1e9:.2f} GB: a Llama of hidden size {sizes.hidden}, {sizes.num_layers} layers, "
        f"vocabulary {sizes.vocabulary}, bf16 with fp32 moments. "
        f"{arguments.ranks} gloo ranks, TP{arguments.ranks}, median of {arguments.runs} rounds."
    )
    command = f"`{' '.join(['python', *sys.argv])}`: {machine_facts(arguments.dir)}."
    missing = [f"{name}: {why}." for name, why in {**outcome.left_out, **outcome.failed}.items()]
    return "\n\n".join([command, facts, tables(by_contestant(outcome.figures), outcome.num_bytes), NOTES, *missing])


NOTES = """\
All saves end with the data on disk. DCP calls fsync itself (`sync_files=True`, its default; up to 8 KB in the stream's
buffer and the directory are not synced). So does HuggingFaceStorageWriter; its files and directory, and those of
save_file, are synced once more within the time measured. Megatron writes in forked processes, whose memory is not
counted. Raw: as many bytes from one buffer in requests of 16 MiB (after fallocate where buffered), then fsync; reads go
straight into the tensors. Extra peak memory is what became resident beyond what was before; files that are mapped (by
safetensors readers) count while their pages are resident."""


if __name__ == "__main__":
    main()
