"""`distckpt plan`: the costs of a load and a save, before a job is queued."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from distckpt._base.messages import summarize_keys
from distckpt._base.options import LoadOptions
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.planned_reads import PlannedReads
from distckpt._tools.layouts import Layout, divide_tensors, layout_of, whole_keys
from distckpt._tools.planned_costs import (
    Job,
    LoadCosts,
    SaveCosts,
    load_costs,
    save_costs,
    tensors_in_memory,
)
from distckpt.cli._output import DIM, Output, count_text, size_text
from distckpt.cli._selection import opened_at
from distckpt.families._config import config_for, rules_for
from distckpt.rules._rule import Rule


def run(arguments: Namespace, output: Output) -> int:
    """Print the costs of a load, with shared reads or not, and of a save."""
    num_ranks = arguments.ranks
    nodes = _nodes_of(num_ranks, arguments.nodes)
    layout = layout_of(num_ranks, arguments.layout)
    with opened_at(arguments.path) as stored:
        rules = _rules_of(stored, arguments.family)
        tensors = divide_tensors(tensors_in_memory(stored, rules), layout)
        job = Job(tensors, layout)
        facts = {
            "path": stored.location,
            "num_tensors": len(tensors),
            "stored_bytes": sum(file.num_bytes for file in stored.manifest.files),
            "layout": {**layout._asdict(), "num_replicas": layout.num_replicas},
            "whole": whole_keys(tensors) if layout.tp > 1 else [],
        }
        for share_reads in ("off", "on"):
            costs = load_costs(stored, job, LoadOptions(share_reads=share_reads), rules)
            facts[f"load_share_reads_{share_reads}"] = _load_facts(costs, nodes, arguments.storage)
        facts["save"] = _save_facts(save_costs(job), nodes, arguments.storage)
    output.json(facts)
    _show(facts, layout, len(nodes), output)
    return 0


def _nodes_of(num_ranks: int, num_nodes: int) -> list[range]:
    """Return the ranks of each node, which follow one another."""
    if num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} ranks are not the same number on each of {num_nodes} nodes: --ranks is "
            f"a multiple of --nodes, such as {-(-num_ranks // num_nodes) * num_nodes}."
        )
    step = num_ranks // num_nodes
    return [range(first, first + step) for first in range(0, num_ranks, step)]


def _rules_of(stored: StoredCheckpoint, family: str | None) -> Sequence[Rule]:
    return rules_for(config_for(family, stored.location), (), stored.manifest.shapes_by_key)


# --- Facts ----------------------------------------------------------------------------------------


def _load_facts(
    costs: LoadCosts, nodes: Sequence[range], storage: tuple[int, float] | None
) -> dict[str, Any]:
    of_nodes = []
    for ranks in nodes:
        reads = PlannedReads.joined(costs.reads[rank] for rank in ranks)
        of_nodes.append(
            {
                "storage_bytes": costs.storage_bytes(ranks),
                "read_bytes": reads.num_bytes,
                "requests": reads.num_requests,
            }
        )
    sizes = np.concatenate([reads.stops - reads.starts for reads in costs.reads])
    tensor_bytes = max(costs.tensor_bytes)
    facts = {
        "storage_bytes": sum(node["storage_bytes"] for node in of_nodes),
        "read_bytes": sum(node["read_bytes"] for node in of_nodes),
        "requests": sum(node["requests"] for node in of_nodes),
        "median_request_bytes": int(np.median(sizes)) if len(sizes) else 0,
        "largest_node": {
            name: max(node[name] for node in of_nodes)
            for name in ("storage_bytes", "read_bytes", "requests")
        },
        "largest_rank": {
            "read_bytes": max(reads.num_bytes for reads in costs.reads),
            "requests": max(reads.num_requests for reads in costs.reads),
            "tensor_bytes": tensor_bytes,
            "memory_bytes": tensor_bytes + costs.inflight_bytes,
        },
        "nodes": of_nodes,
    }
    if storage is not None:
        bandwidth, latency = storage
        waiting = facts["largest_rank"]["requests"] * latency / costs.num_parallel
        facts["seconds"] = max(facts["largest_node"]["storage_bytes"] / bandwidth, waiting)
    return facts


def _save_facts(
    costs: SaveCosts, nodes: Sequence[range], storage: tuple[int, float] | None
) -> dict[str, Any]:
    of_nodes = []
    for ranks in nodes:
        num_bytes = sum(costs.num_bytes[rank] for rank in ranks)
        of_nodes.append({"bytes": num_bytes, "files": sum(costs.num_files[rank] for rank in ranks)})
    facts: dict[str, Any] = {
        "bytes": sum(costs.num_bytes),
        "files": sum(costs.num_files),
        "largest_node": {
            name: max(node[name] for node in of_nodes) for name in ("bytes", "files")
        },
        "largest_rank": {"bytes": max(costs.num_bytes), "files": max(costs.num_files)},
        "nodes": of_nodes,
    }
    if storage is not None:
        bandwidth, latency = storage
        waiting = facts["largest_rank"]["files"] * latency
        facts["seconds"] = max(facts["largest_node"]["bytes"] / bandwidth, waiting)
    return facts


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
        rows.append(["seconds", *(f"{part['seconds']:,.1f}" for part in (alone, shared, save))])
    output.table(["", "load, each for itself", "load, shared reads", "save"], rows)
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
