"""Run all benchmarks in turn, and bring figures, tables and pictures up to date.

    python benchmarks/run_all.py [--quick] [--only NAME ...] [--dir DIR] [--docs DOCS]
        [--render]

Each writes its figures to docs/figures/NAME.json, from which the tables of the README here and the
pictures of the pages are made. Run it on a machine that does nothing else: figures that noise makes
worthless are marked (see `report.py`). A benchmark that fails leaves its older figures as they are,
and the exit status is 1; one that lacks a package is left out. --quick runs all with small sizes,
to see that they work, and keeps no figures unless --docs says where. --render runs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from page import render

HERE = Path(__file__).parent
ROOT = HERE.parent


class Benchmark(NamedTuple):
    """A script, its arguments for figures and for a quick look, and the packages that it needs."""

    name: str
    full: str
    quick: str
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark(
        "save_load",
        "--dir DIR --gb 1 --ranks 2 --runs 5 --peaks",
        "--dir DIR --gb 0.02 --runs 1 --cases save",
    ),
    Benchmark("checksums", "--dir DIR --gb 0.5 --runs 15", "--dir DIR --gb 0.04 --runs 1"),
    Benchmark("small_tensors", "--dir DIR --runs 5", "--dir DIR --tensors 100 --runs 1"),
    Benchmark("async_save", "--dir DIR --gb 2 --runs 5", "--dir DIR --gb 0.02 --runs 1"),
    Benchmark("interpreter_lock", "--dir DIR --runs 7", "--dir DIR --gb 0.05 --runs 1"),
    Benchmark(
        "values",
        "--dir DIR --gigabytes 2 --runs 5",
        "--dir DIR --gigabytes 0.01 --kib 512 --runs 1",
    ),
    Benchmark("merging", "--dir DIR --runs 5", "--dir DIR --gigabytes 0.03 --runs 1"),
    Benchmark("quantized", "--dir DIR --runs 5", "--dir DIR --mib 32 --runs 1"),
    Benchmark(
        "object_storage", "--mib 128 --runs 5", "--mib 4 --runs 1", ("moto", "boto3", "s3fs")
    ),
    Benchmark(
        "planning",
        "--layouts fsdp2 zero1 ddp --ranks 256 1024 4096 --chunks 1000000",
        "--layouts fsdp2 zero1 --ranks 128 256 --tensors 50 --chunks 1600",
    ),
    Benchmark("repeated_save", "--dir DIR --runs 6", "--dir DIR --ranks 2 --tensors 50 --runs 1"),
    Benchmark("shared_reads", "--dir DIR --runs 9", "--dir DIR --gb 0.03 --runs 1"),
    Benchmark(
        "cold_start",
        "--counted --layers 4 --dir DIR",
        "--counted --layers 1 --real-layers 1 --models Llama-405B --layouts FSDP --dir DIR",
    ),
    Benchmark("gpu", "--dir DIR --gb 4 --runs 7", "--dir DIR --gb 0.05 --runs 1"),
    Benchmark("modules", "--tensors 10000", "--tensors 100 --runs 1"),
    Benchmark(
        "consolidation", "--dir DIR --runs 5", "--dir DIR --scale 0.01 --runs 1 --only tiny import"
    ),
    Benchmark("import_time", "--runs 9", "--runs 1"),
    Benchmark("optimizers", "", "AdamW Lion", ("pytorch_optimizer",)),
)


def main() -> int:
    """Run them; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes; the figures mean nothing"
    )
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="where checkpoints go; they are deleted again"
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="a folder for figures, pictures and a README.md with the tables, instead of docs and "
        "the README here (default with --quick: a temporary one)",
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="only make tables and pictures of the figures there are",
    )
    arguments = parser.parse_args()
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2 and not arguments.render:
        print(
            f"This machine is busy (load {load:.1f} on {cores} cores): wait, or expect marked "
            "figures.",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        docs = arguments.docs or (Path(folder) if arguments.quick else ROOT / "docs")
        readme = HERE / "README.md" if docs == ROOT / "docs" else docs / "README.md"
        if docs == Path(folder):
            shutil.copyfile(HERE / "README.md", readme)
        (docs / "figures").mkdir(exist_ok=True)
        chosen = (
            [] if arguments.render else [one for one in BENCHMARKS if one.name in arguments.only]
        )
        failed = [
            one.name
            for one in chosen
            if not run(one, arguments, docs / "figures" / f"{one.name}.json")
        ]
        render(docs, readme)
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


def run(benchmark: Benchmark, arguments: argparse.Namespace, figures: Path) -> bool:
    """Run a benchmark; return False when it failed."""
    missing = [name for name in benchmark.needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{benchmark.name} is left out: {' and '.join(missing)} not installed.", flush=True)
        return True
    options = (benchmark.quick if arguments.quick else benchmark.full).split()
    words = [arguments.dir if option == "DIR" else option for option in options]
    command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *words, "--json", str(figures)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = time.perf_counter()
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode
    print(
        f"\n{benchmark.name}: exit status {code}, {time.perf_counter() - started:.0f} s\n",
        flush=True,
    )
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
