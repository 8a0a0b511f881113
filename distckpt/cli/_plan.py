"""`distckpt plan`: the costs of a load and a save, before a job is queued."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.messages import summarize_keys
from distckpt._plan.decoded import decoded
from distckpt._tools.layouts import Layout, divide_tensors, layout_of, whole_keys
from distckpt._tools.planned_costs import (
    Job,
    LoadingRanks,
    NodeLoad,
    save_costs,
    tensors_in_memory,
)
from distckpt.cli._output import DIM, Output, count_text, size_text
from distckpt.cli._selection import opened_at
from distckpt.families._config import config_for, rules_for


def run(arguments: Namespace, output: Output) -> int:
    """Print the costs of a load and a save."""
    layout = layout_of(arguments.ranks, arguments.layout)
    with opened_at(arguments.path) as stored, paused_garbage_collection():
        config = config_for(arguments.family, stored.location)
        rules = rules_for(config, (), stored.manifest.shapes_by_key)
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
        loading = LoadingRanks(view, job, rules)
        alone = list(loading.nodes_alone())
        facts["load_share_reads_off"] = _load_facts(loading, alone, arguments.storage)
        together = list(loading.nodes_together())
        facts["load_share_reads_on"] = _load_facts(loading, together, arguments.storage)
        facts["save"] = _save_facts(save_costs(job), job.nodes, arguments.storage)
    output.json(facts)
    _show(facts, layout, arguments.nodes, output)
    return 0


# --- Facts ----------------------------------------------------------------------------------------


def _load_facts(
    loading: LoadingRanks, reads: Sequence[NodeLoad], storage: tuple[int, float] | None
) -> dict[str, Any]:
    nodes = []
    sizes = Counter[int]()
    ranks: list[tuple[int, int]] = []
    for node in reads:
        sizes.update(node.sizes)
        ranks += node.ranks
        nodes.append(
            {
                "storage_bytes": node.storage_bytes,
                "read_bytes": sum(num_bytes for num_bytes, _ in node.ranks),
                "requests": node.sizes.total(),
            }
        )
    tensor_bytes = max(loading.tensor_bytes)
    of_rank = {
        "read_bytes": max(num_bytes for num_bytes, _ in ranks),
        "requests": max(num_requests for _, num_requests in ranks),
        "tensor_bytes": tensor_bytes,
        "memory_bytes": tensor_bytes + loading.inflight_bytes,
    }
    waiting = of_rank["requests"] / loading.num_parallel
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


_LOADS = ("load_share_reads_off", "load_share_reads_on")
_ROWS = (
    ("all nodes", "", "storage_bytes", "bytes"),
    ("largest node", "largest_node", "storage_bytes", "bytes"),
    ("  requests, files", "largest_node", "requests", "files"),
    ("median request", "", "median_request_bytes", ""),
    ("largest rank", "largest_rank", "read_bytes", "bytes"),
    ("  its tensors", "largest_rank", "tensor_bytes", ""),
    ("  memory, at most", "largest_rank", "memory_bytes", ""),
    ("time", "", "seconds", "seconds"),
)
"""Rows of the table: title, group of the figures, figure of a load, and of a save."""


def _show(facts: dict[str, Any], layout: Layout, num_nodes: int, output: Output) -> None:
    output.line(
        f"{count_text(facts['num_tensors'], 'tensor')} of {facts['path']}, "
        f"{size_text(facts['stored_bytes'])}; {count_text(layout.num_ranks, 'rank')} on "
        f"{count_text(num_nodes, 'node')}: {_layout_text(layout)}"
    )
    output.line()
    rows = []
    for title, group, of_load, of_save in _ROWS:
        cells = [_cell(facts[load], group, of_load) for load in _LOADS]
        cells.append(_cell(facts["save"], group, of_save))
        if any(cells):
            rows.append([title, *cells])
    output.table(["", "load, share_reads=off", "share_reads=on", "save"], rows)
    if facts["whole"]:
        output.line()
        output.line(f"whole on each rank of tp: {summarize_keys(facts['whole'], 5)}", DIM)


def _cell(costs: Mapping[str, Any], group: str, name: str) -> str:
    """Format a figure of a load or save; an empty string where there is none."""
    figure = costs.get(group, costs).get(name)
    if figure is None:
        return ""
    if name == "seconds":
        return f"{figure:,.3f} s"
    if name in ("requests", "files"):
        return f"{figure:,}"
    return size_text(figure)


def _layout_text(layout: Layout) -> str:
    degrees = []
    for name in ("fsdp", "tp", "pp", "ep"):
        degree = getattr(layout, name)
        if degree > 1:
            degrees.append(f"{name}={degree}")
    return ", ".join([*degrees, count_text(layout.num_replicas, "replica")])
