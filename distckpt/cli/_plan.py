"""`distckpt plan`: the costs of a load and a save, before a job is queued."""

from __future__ import annotations

import contextlib
import gc
import itertools
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from distckpt._base.messages import summarize_keys
from distckpt._base.options import LoadOptions
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.decoded import decoded
from distckpt._tools.layouts import Layout, divide_tensors, layout_of, whole_keys
from distckpt._tools.planned_costs import (
    Job,
    LoadCosts,
    load_costs,
    save_costs,
    tensors_in_memory,
)
from distckpt.cli._output import DIM, Output, count_text, size_text
from distckpt.cli._selection import opened_at
from distckpt.families._config import config_for, rules_for
from distckpt.rules._rule import Rule

_LOAD_FACTS = ("storage_bytes", "read_bytes", "requests")


def run(arguments: Namespace, output: Output) -> int:
    """Print the costs of a load and a save."""
    layout = layout_of(arguments.ranks, arguments.layout)
    with opened_at(arguments.path) as stored, _without_collection():
        rules = _rules_of(stored, arguments.family)
        view = decoded(stored)
        tensors = divide_tensors(tensors_in_memory(view, rules), layout)
        job = Job(tensors, layout, arguments.nodes)
        facts = {
            "path": stored.location,
            "num_tensors": len(tensors),
            "stored_bytes": sum(file.num_bytes for file in stored.manifest.files),
            "layout": {**layout._asdict(), "num_replicas": layout.num_replicas},
            "whole": whole_keys(tensors) if layout.tp > 1 else [],
        }
        costs = load_costs(view, job, LoadOptions(), rules)
        for share_reads, of_load in zip(("off", "on"), costs, strict=True):
            facts[f"load_share_reads_{share_reads}"] = _load_facts(of_load, arguments.storage)
        facts["save"] = _save_facts(save_costs(job), job.nodes, arguments.storage)
    output.json(facts)
    _show(facts, layout, arguments.nodes, output)
    return 0


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Leave out the search for cycles, of which plans have none.

    Among their many tuples it would take a third of the time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _rules_of(stored: StoredCheckpoint, family: str | None) -> Sequence[Rule]:
    return rules_for(config_for(family, stored.location), (), stored.manifest.shapes_by_key)


# --- Facts ----------------------------------------------------------------------------------------


def _load_facts(costs: LoadCosts, storage: tuple[int, float] | None) -> dict[str, Any]:
    nodes = []
    sizes = Counter[int]()
    ranks = list(itertools.chain(*(node.ranks for node in costs.nodes)))
    for node in costs.nodes:
        sizes.update(node.sizes)
        read_bytes = sum(num_bytes for num_bytes, _ in node.ranks)
        facts = (node.storage_bytes, read_bytes, node.sizes.total())
        nodes.append(dict(zip(_LOAD_FACTS, facts, strict=True)))
    tensor_bytes = max(costs.tensor_bytes)
    of_rank = {
        "read_bytes": max(num_bytes for num_bytes, _ in ranks),
        "requests": max(num_requests for _, num_requests in ranks),
        "tensor_bytes": tensor_bytes,
        "memory_bytes": tensor_bytes + costs.inflight_bytes,
    }
    waiting = of_rank["requests"] / costs.num_parallel
    return {
        **_of_nodes(nodes),
        "median_request_bytes": _median(sizes),
        "largest_rank": of_rank,
        **_seconds(max(node["storage_bytes"] for node in nodes), waiting, storage),
    }


def _save_facts(
    costs: Sequence[tuple[int, int]], nodes: Sequence[range], storage: tuple[int, float] | None
) -> dict[str, Any]:
    of_nodes = []
    for ranks in nodes:
        num_bytes, num_files = map(sum, zip(*(costs[rank] for rank in ranks), strict=True))
        of_nodes.append({"bytes": num_bytes, "files": num_files})
    num_bytes, num_files = map(max, zip(*costs, strict=True))
    return {
        **_of_nodes(of_nodes),
        "largest_rank": {"bytes": num_bytes, "files": num_files},
        **_seconds(max(node["bytes"] for node in of_nodes), num_files, storage),
    }


def _of_nodes(nodes: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return the sums and maxima of the figures of nodes."""
    facts: dict[str, Any] = {name: sum(node[name] for node in nodes) for name in nodes[0]}
    facts["largest_node"] = {name: max(node[name] for node in nodes) for name in nodes[0]}
    return {**facts, "nodes": nodes}


def _seconds(
    num_bytes: int, num_waits: float, storage: tuple[int, float] | None
) -> dict[str, float]:
    """Return the longer time: of bytes, or of requests in turn."""
    if storage is None:
        return {}
    bandwidth, latency = storage
    return {"seconds": max(num_bytes / bandwidth, num_waits * latency)}


def _median(sizes: Counter[int]) -> int:
    """Return the size of the request in the middle."""
    left = sizes.total() // 2
    for size in sorted(sizes):
        left -= sizes[size]
        if left < 0:
            return size
    return 0


# --- Table ----------------------------------------------------------------------------------------


def _show(facts: dict[str, Any], layout: Layout, num_nodes: int, output: Output) -> None:
    alone, shared, save = (
        facts[name] for name in ("load_share_reads_off", "load_share_reads_on", "save")
    )
    output.line(
        f"{count_text(facts['num_tensors'], 'tensor')} of {facts['path']}, "
        f"{size_text(facts['stored_bytes'])}; {count_text(layout.num_ranks, 'rank')} on "
        f"{count_text(num_nodes, 'node')}: {_layout_text(layout)}"
    )
    output.line()
    loads = (alone, shared)
    rows = [
        ["all nodes", *_sizes(loads, "storage_bytes"), size_text(save["bytes"])],
        ["largest node", *_of_largest(loads, "node", "storage_bytes"), _largest(save, "node")],
        ["  requests, files", *_counts(loads, "node"), f"{save['largest_node']['files']:,}"],
        ["median request", *_sizes(loads, "median_request_bytes"), ""],
        ["largest rank", *_of_largest(loads, "rank", "read_bytes"), _largest(save, "rank")],
        ["  its tensors", *_of_largest(loads, "rank", "tensor_bytes"), ""],
        ["  memory, at most", *_of_largest(loads, "rank", "memory_bytes"), ""],
    ]
    if "seconds" in save:
        rows.append(["time", *(f"{part['seconds']:,.3f} s" for part in (alone, shared, save))])
    output.table(["", "load, share_reads=off", "share_reads=on", "save"], rows)
    if facts["whole"]:
        output.line()
        output.line(f"whole on each rank of tp: {summarize_keys(facts['whole'], 5)}", DIM)


def _layout_text(layout: Layout) -> str:
    degrees = [
        f"{name}={getattr(layout, name)}"
        for name in ("fsdp", "tp", "pp", "ep")
        if getattr(layout, name) > 1
    ]
    return ", ".join([*degrees, count_text(layout.num_replicas, "replica")])


def _sizes(loads: Sequence[dict[str, Any]], name: str) -> list[str]:
    return [size_text(load[name]) for load in loads]


def _of_largest(loads: Sequence[dict[str, Any]], kind: str, name: str) -> list[str]:
    return _sizes([load[f"largest_{kind}"] for load in loads], name)


def _counts(loads: Sequence[dict[str, Any]], kind: str) -> list[str]:
    return [f"{load[f'largest_{kind}']['requests']:,}" for load in loads]


def _largest(save: dict[str, Any], kind: str) -> str:
    return size_text(save[f"largest_{kind}"]["bytes"])
