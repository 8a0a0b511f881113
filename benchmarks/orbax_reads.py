"""Reads of Orbax checkpoints: time, processor time and memory, beside Orbax's own restore.

    python benchmarks/orbax_reads.py --python VENV/bin/python [--mib 1024] [--runs 3] [--dir DIR]

`--python` is one with `orbax-checkpoint` and, to compare with it, `orbaxport`; this one needs
`distckpt[orbax]`. Each read is a process of its own, warm, and contestants take turns. Memory is
the growth of the peak during the read, past the imports; of loads into tensors that are there
already, so that they need none for the result, all else includes it. The checkpoint has bfloat16
matrices of 64 MiB, in one chunk each, in chunks of 8 MiB, or one matrix of all in one chunk.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MATRIX_MIB = 64
LAYOUTS = ("chunks of 64 MiB", "chunks of 8 MiB", "one chunk")
OURS = ("distckpt load", "distckpt 1/16 of the rows", "distckpt consolidate", "distckpt verify")
OTHERS = ("Orbax restore", "Orbax restore, numpy", "orbaxport")


def main() -> None:
    """Write checkpoints, and print a table for each."""
    from report import Report, median, parser_of

    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--python", required=True, help="with orbax-checkpoint")
    parser.add_argument("--mib", type=int, default=1024)
    arguments = parser.parse_args()
    report = Report(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        for layout in LAYOUTS:
            source = f"{folder}/{layout}"
            call(arguments.python, "write", source, f"{folder}/out", arguments.mib)
            found: dict[str, list[dict[str, float]]] = {}
            for number in range(arguments.runs + 1):
                for way in (*OURS, *OTHERS):
                    python = sys.executable if way in OURS else arguments.python
                    figures = call(python, way, source, f"{folder}/out", arguments.mib)
                    # The first round fills the page cache.
                    if number and figures is not None:
                        found.setdefault(way, []).append(figures)
            rows = []
            for way, runs in found.items():
                columns = {name: [run[name] for run in runs] for name in runs[0]}
                seconds = median(columns["seconds"])
                rows.append([way, seconds, median(columns["processor"]), median(columns["MiB"])])
            heads = [layout, "seconds", "processor seconds", "MiB of memory"]
            report.add(heads, rows)
    report.finish()


def call(python: str, way: str, source: str, target: str, mib: int) -> dict[str, float] | None:
    """Run one way in a process of its own; None if what it needs is not installed."""
    command = [python, __file__, way, source, target, str(mib)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named 'orbaxport'" in result.stderr:
        return None
    if result.returncode:
        raise RuntimeError(f"{way}: {result.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


# --- In a process of its own ----------------------------------------------------------------------


def child(way: str, source: str, target: str, mib: int) -> None:
    """Prepare a way, measure it, and print its figures."""
    if way == "write":
        write(source, mib)
        print("{}")
        return
    prepare = prepare_ours if way in OURS else prepare_other
    function = prepare(way, source, target)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status_kib("VmRSS")
    used = processor_seconds()
    start = time.perf_counter()
    function()
    figures = {"seconds": time.perf_counter() - start, "processor": processor_seconds() - used}
    print(json.dumps({**figures, "MiB": (status_kib("VmHWM") - before) / 1024}))


def processor_seconds() -> float:
    """Return the seconds that this process has computed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def status_kib(field: str) -> int:
    """Return a figure of this process's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0])


def write(folder: str, mib: int) -> None:
    """Write a checkpoint in one of the layouts."""
    import ml_dtypes
    import numpy as np
    from orbax.checkpoint import PyTreeCheckpointer, SaveArgs

    generator = np.random.default_rng(0)
    tree: dict[str, Any] = {}
    for number in range(mib // MATRIX_MIB):
        values = generator.standard_normal((4096, 8192), dtype=np.float32) * 0.02
        tree[f"layer{number}"] = values.astype(ml_dtypes.bfloat16)
    if folder.endswith(LAYOUTS[2]):
        tree = {"all": np.concatenate(list(tree.values()))}
    settings = {}
    if folder.endswith(LAYOUTS[1]):
        settings["save_args"] = dict.fromkeys(tree, SaveArgs(chunk_byte_size=8 << 20))
    PyTreeCheckpointer().save(folder, tree, **settings)


def prepare_ours(way: str, source: str, target: str) -> Callable[[], Any]:
    """Import distckpt, and return the function to measure."""
    import torch

    import distckpt

    opened = distckpt.open(source)
    shapes = {key: opened.tensors[key].shape for key in opened.tensors}
    if way == OURS[0]:
        state = {}
        for key, shape in shapes.items():
            values = torch.ones(shape, dtype=torch.bfloat16)
            state[key] = distckpt.ShardedTensor.from_rank_offsets(key, values)
        return lambda: distckpt.load(state, source)
    if way == OURS[1]:
        rows = {key: (slice(0, shape[0] // 16),) for key, shape in shapes.items()}
        return lambda: [opened.read(key, rows[key]) for key in shapes]
    if way == OURS[2]:
        return lambda: distckpt.consolidate(source, target, overwrite=True)
    return lambda: distckpt.verify(source)


def prepare_other(way: str, source: str, target: str) -> Callable[[], Any]:
    """Import Orbax or orbaxport, and return the function to measure."""
    import jax
    import numpy as np
    from orbax.checkpoint import PyTreeCheckpointer, RestoreArgs

    if way == OTHERS[2]:
        import orbaxport

        return lambda: orbaxport.convert(source, f"{target}.safetensors", verbose=False)
    checkpointer = PyTreeCheckpointer()
    tree = checkpointer.metadata(source).item_metadata.tree
    settings = {}
    if way == OTHERS[1]:
        as_numpy = RestoreArgs(restore_type=np.ndarray)
        settings["restore_args"] = jax.tree.map(lambda _: as_numpy, dict(tree))
    return lambda: jax.block_until_ready(checkpointer.restore(source, **settings))


if __name__ == "__main__":
    if len(sys.argv) > 4 and not sys.argv[1].startswith("-"):
        child(*sys.argv[1:4], mib=int(sys.argv[4]))
    else:
        main()
