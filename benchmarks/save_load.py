"""Save and load a Llama with the moments of Adam, divided by tensor parallelism, beside the other
ways to do it.

    python benchmarks/save_load.py [--dir DIR] [--gb 2] [--ranks 2] [--runs 5]
        [--only NAME ...] [--cases ...]

Every contestant saves and loads in turn, round after round, in another order each time; medians
count, a first round does not, in which what is loaded is compared with what was saved. Seconds go
from a barrier to the end of the last rank. Raw is as many bytes in requests of 16 MiB, read
straight into the tensors. `--dir` may be a URL such as s3://bucket/prefix. The cases:

- save: until all data is on disk. DCP calls fsync itself; the files of its Hugging Face writer and
  of save_file are synced within the time measured. Megatron writes in forked processes, whose
  memory is not counted.
- save_unsynced: until the operating system has the data.
- warm_load: the same layout, files in the page cache, into tensors that are there already.
- cold_load: the same, files dropped from the page cache: with posix_fadvise, or, as root,
  drop_caches.
- reshard_axis: tensors that were divided along axis 0, divided along axis 1.
- reshard_one: rank 0 alone loads whole tensors.

`--peaks` adds a round that measures memory that became resident beyond what was before; files that
are mapped (by safetensors readers) count while their pages are resident. `distckpt bench DIR`
measures distckpt alone.
"""

from __future__ import annotations

from contest.contestants import ALONE
from contest.figures import Outcome, table_of, titles, to_json
from contest.rounds import Settings, run_rank
from contest.state import MAX_RANKS, llama_sizes
from report import Report, parser_of

from distckpt._storage import locations
from distckpt.cli._bench import scratch_folder
from distckpt.cli._processes import run_ranks
from distckpt.tensors import estimate_available_memory

RANK_BYTES = 500_000_000
"""Memory of a process that has imported torch and the other libraries."""
STATE_COPIES = 5
"""State, targets, and what the hungriest contestant takes."""


def main() -> None:
    """Run the contest and print it."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gb", type=float, default=2.0, help="size of the state, all ranks together"
    )
    parser.add_argument("--ranks", type=int, default=2, help="a power of two")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contestants whose name begins with one of these"
    )
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="default: all")
    parser.add_argument("--peaks", action="store_true", help="also measure memory")
    arguments = parser.parse_args()
    report = Report(arguments)
    folder = locations.normalize(arguments.dir)
    sizes = llama_sizes(arguments.gb)
    known = titles(is_store=not locations.is_local(folder))
    cases = tuple(case for case in known if not arguments.cases or case in arguments.cases)
    if not cases or set(arguments.cases or ()) - known.keys():
        parser.error(f"the cases are {', '.join(known)}")
    if arguments.ranks > MAX_RANKS or arguments.ranks & (arguments.ranks - 1):
        parser.error(f"--ranks must be a power of two up to {MAX_RANKS}")
    needed = (STATE_COPIES + (ALONE in cases)) * sizes.num_bytes + arguments.ranks * RANK_BYTES
    if estimate_available_memory() < needed:
        parser.error(
            f"{needed / 1e9:.1f} GB of memory are needed: use a smaller --gb or fewer --ranks"
        )
    with scratch_folder(folder) as scratch:
        settings = Settings(sizes.num_bytes, arguments.runs, cases, scratch, arguments.peaks)
        outcome: Outcome = run_ranks(run_rank, arguments.ranks, sizes, arguments.only, settings)
    report.about = (
        f"{outcome.num_bytes / 1e9:.2f} GB: a Llama of hidden size {sizes.hidden}, "
        f"{sizes.num_layers} layers, vocabulary {sizes.vocabulary}, bf16 with fp32 moments. "
        f"{outcome.num_ranks} gloo ranks, TP{outcome.num_ranks}, medians of {outcome.num_runs} "
        "rounds."
    )
    for case, figures in outcome.cases().items():
        report.add(*table_of(outcome.title(case), figures))
    report.notes += [f"{name}: {why}." for name, why in outcome.left_out.items()]
    report.finish(outcome=to_json(outcome))


if __name__ == "__main__":
    main()
