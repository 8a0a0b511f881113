"""Slices with gaps: only their bytes are read, whatever the layout of file and target; and what may
go wrong then.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import CorruptCheckpointError, ShardedTensor
from distckpt._io import read
from tests.support.hf_folders import write_indexed, write_plain
from tests.support.read_counts import counted_reads
from tests.support.states import numbered

HEADER_BYTES = 1 << 18
"""The beginning of a file, at most, in which its header is looked for."""


@pytest.fixture(autouse=True, scope="module")
def loaded_before(tmp_path_factory):
    """Load something: modules that are imported then are not to be counted."""
    path = tmp_path_factory.mktemp("first")
    write_plain(path / "model.safetensors", {"w": numbered(96, 4096, dtype=torch.int32)})
    distckpt.load(
        {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(48, 4096).int(), (0, 1, 2))}, path
    )


def asked_for(key, tensor, spans, target):
    """Load the region `spans` of a tensor; returns the shard."""
    offset, extent = tuple(low for low, _ in spans), tuple(high - low for low, high in spans)
    return ShardedTensor(key, target, target.dtype, extent, tuple(tensor.shape), offset, None)


# ---- what is read

# Rows of 8 KiB and more, so that there is something to gain in leaving gaps out.
SHAPES = [(40, 2048), (6, 7, 2304), (3, 5, 4, 1100), (2, 3, 2, 3, 2100), (700, 2500)]


def strided(draw, extent, dtype):
    """Make a target whose memory is contiguous, has gaps, or lies in another order."""
    kind = draw(st.sampled_from(["contiguous", "gaps", "transposed"]))
    if kind == "contiguous":
        return torch.full(extent, -1).to(dtype)
    if kind == "gaps":
        return torch.full([n + 3 for n in extent], -1).to(dtype)[
            tuple(slice(1, 1 + n) for n in extent)
        ]
    return torch.full(extent[::-1], -1).to(dtype).permute(tuple(range(len(extent)))[::-1])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_region_into_any_memory(data):
    tensor = numbered(*data.draw(st.sampled_from(SHAPES), "shape"), dtype=torch.int32)
    spans = [
        tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
        for n in tensor.shape
    ]
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "dtype")
    target = strided(data.draw, [high - low for low, high in spans], dtype)
    surroundings = target._base.clone() if target._base is not None else None
    with tempfile.TemporaryDirectory() as directory:
        write_plain(
            Path(directory) / "model.safetensors",
            {"other": numbered(5, dtype=torch.int32), "w": tensor},
        )
        distckpt.load({"w": asked_for("w", tensor, spans, target)}, directory)
    assert np.array_equal(target.numpy(), tensor.numpy()[tuple(slice(*span) for span in spans)])
    if surroundings is not None and target._base.shape != target.shape[::-1]:
        target.fill_(-1)
        assert torch.equal(target._base, surroundings), "nothing is written beside the target"


HIDDEN, FFN, ROWS = 2048, 11008, 96
LLAMA = {
    "model.embed_tokens.weight": (0, (4 * ROWS, HIDDEN)),
    "model.layers.0.self_attn.q_proj.weight": (0, (ROWS, HIDDEN)),
    "model.layers.0.self_attn.o_proj.weight": (1, (2 * ROWS, HIDDEN)),
    "model.layers.0.mlp.gate_proj.weight": (0, (FFN, ROWS)),
    "model.layers.0.mlp.down_proj.weight": (1, (2 * ROWS, FFN)),
    "model.layers.0.experts.down_proj": (2, (3, ROWS, 2 * HIDDEN)),
}
"""Name -> the axis that tensor parallelism cuts, and a shape: runs are 4, 8 and 21.5 KiB long, gaps
as long.
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_bytes_of_a_model_and_hardly_more(tmp_path, rank):
    tensors = {key: numbered(*shape, dtype=torch.int32) for key, (_, shape) in LLAMA.items()}
    names = list(tensors)
    files = {
        f"model-{i + 1:05d}-of-00002.safetensors": {k: tensors[k] for k in names[i::2]}
        for i in range(2)
    }
    write_indexed(tmp_path, files)
    state, expected = {}, {}
    for key, (axis, _) in LLAMA.items():
        expected[key] = tensors[key].chunk(2, axis)[rank]
        state[key] = ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(expected[key]), (axis, rank, 2)
        )
    with counted_reads() as counts:
        distckpt.load(state, tmp_path)
    for key, shard in state.items():
        assert np.array_equal(shard.data.numpy(), expected[key].numpy()), key
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert counts.num_bytes <= 1.02 * num_bytes + len(files) * HEADER_BYTES


@pytest.mark.parametrize(("columns", "ratio"), [(2048, 1), (256, 2)])
def test_what_lies_between_short_runs_is_read_along(tmp_path, columns, ratio):
    tensor = numbered(2048, columns, dtype=torch.int32)
    write_plain(tmp_path / "model.safetensors", {"w": tensor})
    target = torch.zeros(2048, columns // 2, dtype=tensor.dtype)
    with counted_reads() as counts:
        distckpt.load({"w": ShardedTensor.from_rank_offsets("w", target, (1, 1, 2))}, tmp_path)
    assert torch.equal(target, tensor[:, columns // 2 :])
    assert ratio * target.nbytes * 0.99 <= counts.num_bytes <= ratio * target.nbytes + HEADER_BYTES


def test_blocks_of_a_checkpoint_are_read_whole_where_they_are_verified(tmp_path):
    tensor = numbered(1024, 4096, dtype=torch.int32)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "saved")
    (file,) = (tmp_path / "saved" / "tensors").iterdir()
    # In a gap of the part that is asked for.
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size - tensor.nbytes + 600 * tensor[0].nbytes + 12)
        handle.write(b"?")

    def load(verify):
        target = torch.zeros(1024, 2048, dtype=tensor.dtype)
        part = ShardedTensor.from_rank_offsets("w", target, (1, 1, 2))
        with counted_reads() as counts:
            distckpt.load({"w": part}, tmp_path / "saved", verify=verify)
        assert torch.equal(target, tensor[:, 2048:])
        return counts.num_bytes - target.nbytes

    with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
        load(verify=True)
    assert 0 <= load(verify=False) < HEADER_BYTES


# ---- short runs, which go through scratch memory

WINDOWS = {
    "columns": numbered(2600, 700, dtype=torch.int16),
    "experts": numbered(3, 800, 600, dtype=torch.int16),
    "wide": numbered(90, 20_000, dtype=torch.int16),
}
"""Tensors of several MB: more than is read at once, and none has rows of a power of two."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    own = tmp_path_factory.mktemp("own") / "c"
    shards = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in WINDOWS.items()}
    distckpt.save(shards, own)
    plain = tmp_path_factory.mktemp("plain")
    write_plain(plain / "model.safetensors", WINDOWS)
    return [(own, True), (own, False), (plain, True)]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_short_runs_of_any_region(windows, data):
    key = data.draw(st.sampled_from(sorted(WINDOWS)), "key")
    values = WINDOWS[key].numpy()
    width = values.shape[-1]
    first = data.draw(st.integers(0, width - 1), "first column")
    num_columns = data.draw(st.integers(1, min(width - first, 2000)), "columns")
    rows = sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(60, values.shape[-2]))))
    spans = [(0, n) for n in values.shape[:-2]] + [tuple(rows), (first, first + num_columns)]
    expected = values[tuple(slice(*span) for span in spans)]
    for path, verify in windows:
        target = strided(data.draw, expected.shape, torch.int16)
        distckpt.load({"w": asked_for(key, WINDOWS[key], spans, target)}, path, verify=verify)
        assert np.array_equal(target.numpy(), expected)
        if target._base is not None and target._base.shape != target.shape[::-1]:
            target.fill_(-1)
            assert (target._base == -1).all(), "nothing is written beside the target"


def test_a_file_is_cut_off_while_short_runs_are_read(tmp_path):
    values = numbered(20_000, 700, dtype=torch.int16)
    write_plain(tmp_path / "model.safetensors", {"w": values})
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(20_000, 350).short(), (1, 1, 2))

    def cut(num_bytes, total):
        os.truncate(tmp_path / "model.safetensors", 10_000)

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        distckpt.load({"w": part}, tmp_path, progress=cut)


# ---- files that fail


@pytest.fixture
def cut_before_reading(monkeypatch):
    """Cut a file off when it has been found whole and its runs are about to be read."""

    def arrange(path, num_bytes):
        run_starts = read.run_starts

        def cut_first(shape, region):
            os.truncate(path, num_bytes)
            return run_starts(shape, region)

        monkeypatch.setattr(read, "run_starts", cut_first)

    return arrange


@pytest.mark.parametrize("missing", [1, 4096 * 50, 4096 * 4 * 96])
def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path, cut_before_reading, missing):
    values = numbered(96, 4096, dtype=torch.int32)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    (path,) = (tmp_path / "c" / "tensors").glob("*.safetensors")
    size = path.stat().st_size - missing
    cut_before_reading(path, size)
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(96, 2048, dtype=torch.int32), (1, 1, 2))
    with pytest.raises(
        CorruptCheckpointError, match=r"\.safetensors' ends at byte \d+, .*'w' goes on"
    ) as caught:
        distckpt.load({"w": part}, tmp_path / "c", verify=False)
    # Where the file ends in a gap, the next run is what is found missing.
    end = int(str(caught.value).split("ends at byte ")[1].split(",")[0])
    assert size <= end <= size + 2048 * 4
