"""Quantised directories on several ranks: slices of tensor parallelism, shared reads, and errors on
every rank.
"""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import RankFailedError, ShardedTensor
from tests.support.harness import error_of, sum_over_ranks
from tests.support.hf_folders import read_export, same_bytes, write_plain
from tests.support.quantized_models import fp8_block
from tests.support.reference import needs_dtypes

pytestmark = needs_dtypes("float8_e4m3fn")

KEY, ROWS, COLUMNS, NUM_RANKS = "l.up.weight", 300, 200, 2


def load_parts(rank, path, mode):
    """Rows are divided, unaligned to blocks, columns too; all ranks have the gate."""
    state = {
        "rows": ShardedTensor.from_rank_offsets(
            KEY, torch.empty(ROWS // 2, COLUMNS), (0, rank, NUM_RANKS)
        ),
        "gate": ShardedTensor.from_rank_offsets(
            "l.gate.weight", torch.empty(4, COLUMNS), replica_id=rank
        ),
    }
    columns = {
        "it": ShardedTensor.from_rank_offsets(
            KEY, torch.empty(ROWS, COLUMNS // 2), (1, rank, NUM_RANKS)
        )
    }
    replicas = {
        "it": ShardedTensor.from_rank_offsets(KEY, torch.empty(ROWS, COLUMNS), replica_id=rank)
    }
    loaded = [distckpt.load(each, path, share_reads=mode) for each in (state, columns, replicas)]
    return loaded[0]["rows"], loaded[0]["gate"], loaded[1]["it"], loaded[2]["it"]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_every_rank_gets_its_slices(run, tmp_path, mode):
    torch.manual_seed(0)
    model = fp8_block(ROWS, COLUMNS)
    model.write(tmp_path / "model")
    values, gate = model.values[KEY], model.values["l.gate.weight"]
    for rank, (rows, found, columns, replica) in enumerate(
        run(load_parts, NUM_RANKS, str(tmp_path / "model"), mode)
    ):
        assert torch.equal(rows, values.chunk(2)[rank])
        assert torch.equal(columns, values.chunk(2, 1)[rank])
        assert torch.equal(found, gate)
        assert torch.equal(replica, values)


def load_codes(rank, path):
    """Rank 1 alone requests codes of an unknown form in another dtype."""
    key, dtype = ("codes", torch.float32) if rank else ("norm", torch.float32)
    state = {"it": ShardedTensor.from_rank_offsets(key, torch.zeros(4), replica_id=0)}
    error = error_of(distckpt.load, state, path, validate_access_integrity=False)
    return error, state["it"].dtype == dtype, sum_over_ranks(rank)


def test_all_ranks_raise_when_one_requests_codes_as_values(run, tmp_path):
    tensors = {
        "codes": torch.ones(4, dtype=torch.uint8),
        "codes.absmax": torch.ones(1),
        "norm": torch.ones(4),
    }
    write_plain(tmp_path / "model/model.safetensors", tensors)
    for error, _, total in run(load_codes, NUM_RANKS, str(tmp_path / "model")):
        assert isinstance(error, RankFailedError)
        assert total == 1
        assert "'codes.absmax' holds their scales" in str(error)


def export(rank, source, target):
    del rank
    distckpt.consolidate(source, target, quantize="fp8-block", max_file_bytes=40_000)


def test_ranks_quantise_their_files(run, tmp_path):
    torch.manual_seed(0)
    tensors = {f"l.{number}.weight": torch.randn(150, 200) for number in range(3)}
    write_plain(tmp_path / "model/model.safetensors", tensors)
    run(export, NUM_RANKS, str(tmp_path / "model"), str(tmp_path / "of two"))
    export(0, tmp_path / "model", tmp_path / "of one")
    assert len(list((tmp_path / "of two").glob("*.safetensors"))) == 3
    assert same_bytes(read_export(tmp_path / "of two"), read_export(tmp_path / "of one"))
