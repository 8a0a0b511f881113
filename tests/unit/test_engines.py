"""`distckpt.engines`: tensors for engines in bounded memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import distckpt

VALUES = {
    "a": torch.arange(7, dtype=torch.bfloat16),
    "b": torch.randn(5, 3).t(),
    "c": torch.tensor(3),
    "d": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "e": torch.empty(0, 3),
}


@pytest.mark.parametrize("max_bytes", [1, 40, 64, 10_000])
def test_buckets_hold_tensors_as_they_are(max_bytes):
    buckets = list(distckpt.engines.pack_buckets(VALUES.items(), max_bytes=max_bytes))
    loaded = [each for bucket in buckets for each in distckpt.engines.unpack_bucket(bucket)]
    assert [name for name, _ in loaded] == list(VALUES)
    for name, tensor in loaded:
        expected = VALUES[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.float(), expected.float())
    for bucket in buckets:
        assert bucket.data.nbytes <= max_bytes or len(bucket.entries) == 1
        for entry in bucket.entries:  # as SGLang reads them
            flat = bucket.data[entry.start_idx : entry.end_idx].view(entry.dtype)
            assert flat.numel() == entry.numel


def test_one_tensor_is_asked_for_at_a_time():
    alive = []

    def tensors():
        for number in range(4):
            tensor = torch.full((4,), float(number))
            alive.append(tensor)
            yield str(number), tensor
            alive.clear()

    buckets = distckpt.engines.pack_buckets(tensors(), max_bytes=32)
    assert [len(bucket.entries) for bucket in buckets] == [2, 2]


@pytest.mark.parametrize("max_bytes", [1, 70, 10_000])
def test_tensors_of_a_directory_come_one_after_the_other(max_bytes, tmp_path):
    save_file({k: v.contiguous() for k, v in VALUES.items()}, tmp_path / "model.safetensors")
    streamed = dict(distckpt.engines.stream_tensors(tmp_path, max_bytes=max_bytes))
    assert streamed.keys() == VALUES.keys()
    for key, tensor in streamed.items():
        assert torch.equal(tensor.float(), VALUES[key].float())
