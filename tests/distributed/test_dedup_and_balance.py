"""Every byte is written once, and every rank writes its share, seen from the sizes of the files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt.megatron.serialization import get_default_save_sharded_strategy
from distckpt.megatron.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from tests.support.disk import data_bytes_by_rank, entries_of
from tests.support.layouts import Layout, bytes_of, global_bytes, tensor_from

HIDDEN, FFN, VOCABULARY, NUM_LAYERS = 128, 344, 1024, 2
LLAMA = {
    "embedding": ((VOCABULARY, HIDDEN), 0),
    "output": ((VOCABULARY, HIDDEN), 0),
    "norm": ((HIDDEN,), None),
    **{
        f"layers.{i}.{name}": placed
        for i in range(NUM_LAYERS)
        for name, placed in {
            "qkv": ((3 * HIDDEN, HIDDEN), 0),
            "out": ((HIDDEN, HIDDEN), 1),
            "gate": ((FFN, HIDDEN), 0),
            "up": ((FFN, HIDDEN), 0),
            "down": ((HIDDEN, FFN), 1),
            "norm1": ((HIDDEN,), None),
            "norm2": ((HIDDEN,), None),
        }.items()
    },
}


def llama_state(layout, rank):
    """Weights in bfloat16 and two float32 moments; data parallel ranks hold copies, and so all
    ranks of the norms.
    """
    tp, _, dp = layout.position(rank)
    state = {}
    for name, (shape, axis) in LLAMA.items():
        for prefix, dtype in (
            ("", torch.bfloat16),
            ("exp_avg.", torch.float32),
            ("exp_avg_sq.", torch.float32),
        ):
            local = (
                shape
                if axis is None
                else tuple(n // layout.tp if i == axis else n for i, n in enumerate(shape))
            )
            offsets = () if axis is None else ((axis, tp, layout.tp),)
            replica_id = (0, dp) if axis is not None else (tp, dp)
            data = torch.ones(local, dtype=dtype)
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name, data, *offsets, replica_id=replica_id
            )
    return state


def save_llama(rank, layout, path):
    distckpt.save(llama_state(layout, rank), path)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, dp=4), Layout(tp=1, dp=3), Layout(tp=4, dp=1)], ids=str
)
def test_a_model_with_adam_is_written_once_and_evenly(run, layout, tmp_path):
    run(save_llama, layout.num_ranks, layout, str(tmp_path / "checkpoint"))
    written = data_bytes_by_rank(tmp_path / "checkpoint")
    assert sum(written.values()) == sum(math.prod(shape) for shape, _ in LLAMA.values()) * (
        2 + 4 + 4
    )
    assert len(written) == layout.num_ranks
    assert max(written.values()) / (sum(written.values()) / layout.num_ranks) <= 1.05, written


LARGE = (1111, 333)


def save_large(rank, path, kind):
    content = global_bytes("large", LARGE, torch.float32)
    tensor = tensor_from(content, torch.float32)
    if kind == "one row":
        tensor = tensor.reshape(1, -1)
    distckpt.save(
        {"large": ShardedTensor.from_rank_offsets("large", tensor, replica_id=rank)}, path
    )


@pytest.mark.parametrize("kind", ["rows", "one row"])
def test_one_large_replicated_tensor_is_sliced_over_its_replicas(run, kind, tmp_path):
    path = tmp_path / "checkpoint"
    run(save_large, 4, str(path), kind)
    written = data_bytes_by_rank(path)
    assert sum(written.values()) == math.prod(LARGE) * 4
    assert sorted(written) == [0, 1, 2, 3]
    assert max(written.values()) / (sum(written.values()) / 4) <= 1.05, written
    loaded = distckpt.open(str(path)).read_tensors()["large"].reshape(LARGE)
    assert np.array_equal(bytes_of(loaded), global_bytes("large", LARGE, torch.float32))


def save_small(rank, path):
    state = {
        f"small.{i}": ShardedTensor.from_rank_offsets(
            f"small.{i}", torch.full((10,), float(i)), replica_id=rank
        )
        for i in range(40)
    }
    distckpt.save(state, path)


def test_small_replicated_tensors_are_not_cut(run, tmp_path):
    run(save_small, 4, str(tmp_path / "checkpoint"))
    for i in range(40):
        stored = [
            shape
            for shapes in entries_of(tmp_path / "checkpoint", f"small.{i}").values()
            for shape in shapes
        ]
        assert stored == [[10]]


def save_unequal(rank, path):
    """Rank 0 alone has much; what it shares with the others is theirs to write."""
    state = {
        "shared": ShardedTensor.from_rank_offsets("shared", torch.ones(300, 100), replica_id=rank)
    }
    if rank == 0:
        state["alone"] = ShardedTensor.from_rank_offsets("alone", torch.ones(100, 100))
    distckpt.save(state, path)


def test_a_rank_with_much_of_its_own_writes_less_of_what_is_shared(run, tmp_path):
    run(save_unequal, 4, str(tmp_path / "checkpoint"))
    written = data_bytes_by_rank(tmp_path / "checkpoint")
    assert sum(written.values()) == (300 * 100 + 100 * 100) * 4
    assert max(written.values()) / (sum(written.values()) / 4) <= 1.05, written


def save_flat_copies(rank, path):
    """Ranks 0 and 1 hold one run of the elements each, ranks 2 and 3 copies of them."""
    elements = global_bytes("flat", (60, 500), torch.float32).reshape(-1, 4)
    mine = slice(0, 13_007) if rank % 2 == 0 else slice(13_007, 30_000)
    data = tensor_from(elements[mine], torch.float32)
    shard = ShardedTensor.from_rank_offsets_flat(
        "flat", data, (60, 500), flattened_range=mine, replica_id=rank // 2
    )
    distckpt.save({"flat": shard}, path)


def test_copies_of_flat_shards_are_written_once(run, tmp_path):
    path = tmp_path / "checkpoint"
    run(save_flat_copies, 4, str(path))
    written = data_bytes_by_rank(path)
    assert sum(written.values()) == 30_000 * 4
    # Rank 1 and 3 share more than rank 0 and 2, and nobody else holds it.
    assert [written[rank] for rank in range(4)] == pytest.approx(
        [13_007 * 2, 16_993 * 2, 13_007 * 2, 16_993 * 2], abs=4096
    )
    loaded = distckpt.open(str(path)).read_tensors()["flat"]
    assert np.array_equal(bytes_of(loaded), global_bytes("flat", (60, 500), torch.float32))


def save_tied(rank, path):
    """The output layer of a pipeline's last stage is the embedding of its first: one memory, two
    keys.
    """
    weight = torch.arange(20_000.0).reshape(200, 100)
    state = {
        name: ShardedTensor.from_rank_offsets(name, weight, replica_id=rank)
        for name in ("embedding", "output.weight")
    }
    distckpt.save(state, path)


def test_tied_tensors_are_written_once(run, tmp_path):
    path = tmp_path / "checkpoint"
    run(save_tied, 2, str(path))
    assert sum(data_bytes_by_rank(path).values()) == 20_000 * 4
    loaded = distckpt.open(str(path)).read_tensors()
    for key in ("embedding", "output.weight"):
        assert torch.equal(loaded[key], torch.arange(20_000.0).reshape(200, 100)), key


def save_within_groups(rank, path, groups):
    handles = [torch.distributed.new_group(members) for members in groups]
    mine = next(handle for handle, members in zip(handles, groups, strict=True) if rank in members)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), mine)
    shared = ShardedTensor.from_rank_offsets("shared", torch.ones(400, 100), replica_id=rank)
    half = torch.full((400, 100), float(rank % 2))
    halves = ShardedTensor.from_rank_offsets("halves", half, (0, rank % 2, 2), replica_id=rank // 2)
    distckpt.save({"shared": shared, "halves": halves}, path, strategy=strategy)


def test_the_fully_parallel_wrapper_keeps_sharing_inside_its_group(run, tmp_path):
    path = tmp_path / "checkpoint"
    run(save_within_groups, 4, str(path), [[0, 2], [1, 3]])
    # The main replicas of "shared" and of the first half are on rank 0, that of the second half is
    # on rank 1.
    assert set(entries_of(path, "shared")) <= {0, 2}
    written = data_bytes_by_rank(path)
    assert sum(written.values()) == 3 * 400 * 100 * 4
    assert [written[rank] for rank in range(4)] == pytest.approx(
        [160_000, 80_000, 160_000, 80_000], abs=4096
    )
    loaded = distckpt.open(str(path)).read_tensors()
    assert torch.equal(loaded["shared"], torch.ones(400, 100))
    assert torch.equal(
        loaded["halves"], torch.arange(2.0).repeat_interleave(400)[:, None].expand(800, 100)
    )
