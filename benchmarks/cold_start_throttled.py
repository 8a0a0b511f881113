"""The start of a job from a model directory on slow shared storage, beside other libraries.

    pip install mfusepy transformers [runai-model-streamer humanize] [fastsafetensors]
    python benchmarks/cold_start_throttled.py [--nodes 2] [--ranks-per-node 2] [--mbps 200]
        [--latency-ms 1] [--gb 0.7] [--layouts whole fsdp tp] [--only NAME ...] [--runs 7]
        [--read-ahead-kib 1024] [--dir DIR]

Nodes are imitated on one machine, as root: each has a host name of its own, and a mount of its own
(see `throttled_mount.py`) that delivers `--mbps`, and each request after `--latency-ms`. All ranks
load one Hugging Face directory of bfloat16 weights under a Llama's names, in six files:

- whole: each rank has the whole model, as under data parallelism.
- fsdp: each rank has its rows of every tensor, FSDP2 over all ranks.
- tp: each rank has its rows or columns, tensor parallelism over all ranks.

A time ends when the last rank has touched every page of its parameters. Before each load the mount
is a new one, and nothing is in the page cache. The floor is the time in which all mounts together
deliver the files once. Libraries that are not installed are left out. Loads are checked against the
files before they are timed.

Ranks exchange through this machine's loopback device and share its processors: with many nodes,
choose a rate of storage as far below that as storage is below a network.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cold_start_ways import LAYOUTS, OURS, WAYS, Case, Way, local_parts
from measure import time_together
from report import Report, figure, median, parser_of, ratio
from torch.distributed.device_mesh import init_device_mesh

NUM_FILES = 6
HIDDEN = 2048
LAYER_GB = 0.09
PAGE_BYTES = 4096


def main() -> None:
    """Print the table, or be one of the processes that measure."""
    arguments = parse()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    if arguments.node is not None:
        run_node(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = Report(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="distckpt-benchmark-") as folder:
        arguments.work = folder
        write_model(Path(folder, "model"), arguments.gb)
        (Path(folder) / "mount").mkdir()
        run_nodes(arguments)
        measured = json.loads((Path(folder) / "result.json").read_text())
        num_bytes = sum(file.stat().st_size for file in Path(folder, "model").iterdir())
    floor = num_bytes / (arguments.nodes * arguments.mbps * 1e6)
    report.about = (
        f"{arguments.nodes} nodes of {arguments.ranks_per_node} rank(s), {num_bytes / 1e9:.2f} GB "
        f"in {NUM_FILES} files, {arguments.mbps:g} MB/s for each node, "
        f"{arguments.latency_ms:g} ms for each request. The floor is {floor:.2f} s."
    )
    for layout in arguments.layouts:
        report.add(HEADS, rows_of(measured[layout], floor, num_bytes), f"Layout: {layout}.")
    report.finish(versions=versions(), rounds=measured)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, runs=7)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--mbps", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--read-ahead-kib", type=int, default=1024)
    parser.add_argument("--gb", type=float, default=0.7)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--only", nargs="+", help="names of the ways, see the table")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- Tables ---------------------------------------------------------------------------------------

HEADS = ("", "seconds", "of the floor", "time / ours", "read", "reads", "CPU s")


def rows_of(
    measured: dict[str, list[dict[str, float]]], floor: float, num_bytes: int
) -> list[list[Any]]:
    """Return the rows of a layout: medians of the rounds of each way."""
    rows = []
    for name, rounds in measured.items():
        if not rounds:
            rows.append([name, *["fails"] * (len(HEADS) - 1)])
            continue
        seconds, read, reads, processor = (
            [each[key] for each in rounds] for key in ("seconds", "bytes", "reads", "processor")
        )
        ours = [each["seconds"] for each in measured.get(OURS, rounds)]
        rows.append(
            [
                name,
                median(seconds),
                figure(f"{floor / statistics.median(seconds):.2f}", seconds),
                ratio(seconds, ours),
                f"{statistics.median(read) / num_bytes:.2f} x",
                f"{statistics.median(reads):.0f}",
                median(processor),
            ]
        )
    return rows


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in sorted({way.package for way in WAYS} | {"mfusepy"}):
        try:
            found[name] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            continue
    return found


# --- Model ----------------------------------------------------------------------------------------


def write_model(folder: Path, gigabytes: float) -> None:
    """Write a directory as the transformers library does, with random weights in six files."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=11 * HIDDEN // 4,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=max(1, round((gigabytes - 0.13) / LAYER_GB)),
        vocab_size=16000,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        specs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    total = sum(spec.nbytes for spec in specs.values())
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    group: dict[str, torch.Tensor] = {}
    written = 0
    for name, spec in specs.items():
        group[name] = torch.randn(spec.shape, generator=generator).to(spec.dtype)
        written += spec.nbytes
        number = len({*weight_map.values()}) + 1
        if written >= total * number / NUM_FILES:
            file = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
            save_file(group, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(group, file))
            group.clear()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# --- Nodes ----------------------------------------------------------------------------------------


def run_nodes(arguments: argparse.Namespace) -> None:
    """Run all nodes, each with mounts and a host name of its own."""
    nodes = [
        subprocess.Popen(
            ["unshare", "--mount", "--uts", *command(arguments), "--node", str(number)],
            start_new_session=True,
        )
        for number in range(arguments.nodes)
    ]
    try:
        codes = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            # Its ranks and its mount, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    if any(codes):
        raise SystemExit(f"nodes ended with {codes}")


def command(arguments: argparse.Namespace) -> list[str]:
    """Return the command of a process that measures: with the same options, and the work folder."""
    given = sys.argv[1:]
    if "--work" in given:
        given = given[: given.index("--work")]
    return [sys.executable, __file__, *given, "--work", arguments.work]


def run_node(arguments: argparse.Namespace) -> None:
    """Start the ranks of this node, and wait for them."""
    socket.sethostname(f"node{arguments.node}")
    first = arguments.node * arguments.ranks_per_node
    ranks = [
        subprocess.Popen([*command(arguments), "--node", str(arguments.node), "--rank", str(rank)])
        for rank in range(first, first + arguments.ranks_per_node)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(1)


class Mount:
    """The mount of this node, which its first rank renews."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.path = f"{arguments.work}/mount"
        self._counts = Path(f"{arguments.work}/counts-{arguments.node}.json")
        self._server: subprocess.Popen[bytes] | None = None

    def renew(self) -> None:
        """Mount again: nothing is cached then."""
        self.remove()
        arguments = self._arguments
        script = Path(__file__).with_name("throttled_mount.py")
        self._server = subprocess.Popen(
            [
                *(sys.executable, str(script), f"{arguments.work}/model", self.path),
                *("--mbps", str(arguments.mbps)),
                *("--latency", str(arguments.latency_ms / 1000)),
                *("--counts", str(self._counts)),
            ]
        )
        while not os.path.ismount(self.path):
            if self._server.poll() is not None:
                raise RuntimeError("The mount has failed.")
            time.sleep(0.01)
        device = os.stat(self.path).st_dev
        read_ahead = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        Path(read_ahead).write_text(str(arguments.read_ahead_kib), encoding="ascii")

    def remove(self) -> dict[str, int]:
        """Unmount; return the numbers of requests and bytes."""
        if self._server is None:
            return {"reads": 0, "bytes": 0}
        subprocess.run(["umount", self.path], check=True)
        self._server.wait()
        self._server = None
        counts: dict[str, int] = json.loads(self._counts.read_text(encoding="utf-8"))
        return counts


# --- Ranks ----------------------------------------------------------------------------------------


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure all ways by turns; rank 0 writes the rounds."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = arguments.rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % arguments.ranks_per_node))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.work}/rendezvous",
        rank=rank,
        world_size=arguments.nodes * arguments.ranks_per_node,
        timeout=timedelta(seconds=300),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mount = Mount(arguments)
    ways = [way for way in WAYS if way.is_installed and way.name in (arguments.only or [way.name])]
    measured = {}
    for layout in arguments.layouts:
        measured[layout] = measure_layout(Case(mount.path, layout, mesh), mount, ways, arguments)
    if rank == 0:
        Path(arguments.work, "result.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_layout(
    case: Case, mount: Mount, ways: list[Way], arguments: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of each way; a way that fails has none."""
    works = []
    for way in ways:
        problem = problem_of(way, case._replace(folder=f"{arguments.work}/model"))
        if problem and dist.get_rank() == 0:
            print(f"{way.name}, {case.layout}: {problem}", file=sys.stderr)
        if not problem:
            works.append(way)
    rounds: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for _ in range(arguments.runs):
        for way in works:
            rounds[way.name].append(one_round(way, case, mount))
    return rounds


def problem_of(way: Way, case: Case) -> str:
    """Load from the files themselves, and compare; return the error of any rank."""
    problem = ""
    try:
        check(way.load(case), case)
    except Exception:
        problem = traceback.format_exc()
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def check(model: torch.nn.Module, case: Case) -> None:
    """Compare a model with the files."""
    from safetensors import safe_open

    weight_map = json.loads(Path(case.folder, "model.safetensors.index.json").read_text())
    for name, memory, place in local_parts(model):
        path = Path(case.folder, weight_map["weight_map"][name])
        with safe_open(path, framework="pt") as file:
            if not torch.equal(memory, file.get_slice(name)[place]):
                raise ValueError(f"{name} has other values than its file")


def one_round(way: Way, case: Case, mount: Mount) -> dict[str, float]:
    """Load once from a new mount; return the figures of all ranks."""
    gc.collect()
    is_first = int(os.environ["LOCAL_RANK"]) == 0
    if is_first:
        mount.renew()
    before = sum(os.times()[:2])
    loaded: list[torch.nn.Module] = []

    def load() -> None:
        loaded.append(way.load(case))
        touch(loaded[0])

    seconds = time_together(load)
    processor = sum(os.times()[:2]) - before
    loaded.clear()
    gc.collect()
    dist.barrier()
    counts = mount.remove() if is_first else {"reads": 0, "bytes": 0}
    figures = torch.tensor([processor, counts["reads"], counts["bytes"]], dtype=torch.float64)
    dist.all_reduce(figures)
    names = ("processor", "reads", "bytes")
    return {"seconds": seconds, **dict(zip(names, figures.tolist(), strict=True))}


def touch(model: torch.nn.Module) -> None:
    """Read every page of the parameters: some ways return memory that is read from files later."""
    for _, memory, _ in local_parts(model):
        memory.contiguous().view(-1).view(torch.uint8)[::PAGE_BYTES].sum()


if __name__ == "__main__":
    main()
