"""Broadcasting, gathering and resharding tensors on real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distckpt.tensors import (
    apply_gather_functions,
    broadcast_tensor,
    estimate_array_nbytes,
    flatten_for_broadcast,
    reshard,
    to_host,
    unflatten_from_broadcast,
)
from tests.support.harness import error_of, run, sum_over_ranks

FULL = torch.arange(24 * 5, dtype=torch.float32).reshape(24, 5)


def with_values(kind, blank):
    """A tensor of some kind; blank ones have other values and other memory, but the same shape and
    dtype.
    """
    full = torch.zeros_like(FULL) if blank else FULL.clone()
    match kind:
        case "contiguous":
            return full
        case "strided":
            # Only the receivers' memory is strided.
            return torch.zeros(5, 48).T[::2] if blank else full
        case "conjugate":
            return (full * 1j).conj()
        case "fp8":
            return full.to(torch.float8_e4m3fn)
        case "bool":
            return full > 60
        case "0-dim":
            return full[3, 3].clone()
        case "empty":
            return full[:0]
        case "parameter":
            return torch.nn.Parameter(full)
    raise AssertionError(kind)


KINDS = ["contiguous", "strided", "conjugate", "fp8", "bool", "0-dim", "empty", "parameter"]


def broadcast_kinds(rank, limit):
    wrong = []
    for src in range(2):
        for kind in KINDS:
            tensor = with_values(kind, blank=rank != src)
            # Every rank may have another limit; the smallest holds.
            result = broadcast_tensor(tensor, limit + 100 * rank, src=src)
            if result is not tensor or not torch.equal(
                result.detach().resolve_conj(), with_values(kind, False)
            ):
                wrong.append((src, kind))
    return wrong


@pytest.mark.parametrize("limit", [8, 30, 10_000])
def test_every_kind_of_tensor_arrives(limit):
    assert run(broadcast_kinds, 2, limit) == [[], []]


def broadcast_in_a_sub_group(rank):
    members = dist.new_group([2, 1])
    tensor = torch.full((3,), float(rank))
    if rank in (1, 2):
        broadcast_tensor(tensor, 4, src=1, process_group=members)
    return tensor.tolist(), sum_over_ranks(1)


def test_src_counts_in_the_group():
    zero, one, two = run(broadcast_in_a_sub_group, 3)
    assert zero == ([0, 0, 0], 3)
    # The members of a group are in ascending order of their global ranks.
    assert one == two == ([2, 2, 2], 3)


def broadcast_wrongly(rank, kind):
    tensor = torch.zeros(
        4 + (kind == "shape") * rank, dtype=torch.float64 if kind == "dtype" and rank else None
    )
    argument = None if kind == "type" and rank else tensor
    limit = 2 if kind == "limit" and rank else 100
    error = error_of(broadcast_tensor, argument, limit, src=2 if kind == "src" else 0)
    return type(error).__name__, str(error), sum_over_ranks(1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "[5]"),
        ("dtype", "float64"),
        ("type", "NoneType"),
        ("limit", "limit of 2 bytes"),
        ("src", "src is 2"),
    ],
)
def test_ranks_that_disagree_all_hear_of_it(kind, text):
    for name, message, total in run(broadcast_wrongly, 2, kind):
        assert (name, total) == ("RankFailedError", 2)
        assert text in message


def gather_and_reshard(rank):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(FULL, mesh, [Shard(0)])
    state = {"m": {"w": rows, "b": torch.ones(2)}, "list": [rows]}
    gathered = apply_gather_functions(state, True, False, False)
    columns = reshard(rows, [Shard(1)])
    uneven = reshard(rows, (mesh, [Replicate()]))
    host = to_host(rows, torch.bfloat16, mesh, True)
    made = reshard(FULL, (mesh, [Shard(0)]))
    sent = broadcast_tensor(FULL.clone() * (rank == 0), 64, (mesh, [Shard(1)]))
    flat = flatten_for_broadcast(state)
    return {
        "gathered": all(
            torch.equal(gathered["m"]["w"], FULL) for w in (gathered["m"]["w"], gathered["list"][0])
        ),
        "plain": type(gathered["m"]["w"]) is torch.Tensor and gathered["m"]["b"] is state["m"]["b"],
        "untouched": isinstance(state["m"]["w"], DTensor),
        "columns": torch.equal(columns.to_local(), FULL.tensor_split([3], dim=1)[rank]),
        "replicated": torch.equal(uneven.to_local(), FULL),
        "same": reshard(rows, None) is rows,
        "made": torch.equal(made.to_local(), rows.to_local()),
        "sent": torch.equal(sent.to_local(), columns.to_local()),
        "host": type(host) is torch.Tensor and torch.equal(host, FULL.bfloat16()),
        "bytes": (estimate_array_nbytes(rows), estimate_array_nbytes(rows.to_local()))
        == (480, 240),
        "flat": unflatten_from_broadcast(flat, state)["m"]["w"] is rows,
    }


def test_distributed_tensors_are_gathered_and_resharded():
    for checks in run(gather_and_reshard, 2):
        assert [name for name, is_right in checks.items() if not is_right] == []
