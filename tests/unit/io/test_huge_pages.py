"""Memory that a load allocates is in huge pages, as far as the system has them. Asked of the
kernel, by address.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import ShardedTensor

pytestmark = pytest.mark.skipif(
    not (
        hasattr(mmap, "MADV_HUGEPAGE")
        and Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    ),
    reason="the system has no transparent huge pages",
)
ROWS = 4096


def is_in_huge_pages(tensor):
    """Tell whether huge pages were asked for, at the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif line.startswith("VmFlags:") and is_inside:
            return "hg" in line.split()
    raise AssertionError("the tensor is nowhere")


def test_tensors_without_memory(tmp_path):
    values = torch.randn(ROWS, 1024)
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    described = ShardedTensor.from_rank_offsets("w", values).without_data()
    loaded = distckpt.load({"w": described}, tmp_path / "c")["w"]
    assert is_in_huge_pages(loaded)
    assert torch.equal(loaded, values)


def test_modules_on_the_meta_device_and_states_of_optimizers(tmp_path):
    model = torch.nn.Linear(1024, ROWS)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    distckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")

    fresh = torch.nn.Linear(1024, ROWS, device="meta")
    distckpt.load({"model": fresh}, tmp_path / "c", materialize="cpu")
    assert is_in_huge_pages(fresh.weight)
    assert torch.equal(fresh.weight, model.weight)

    resumed = torch.optim.AdamW(fresh.parameters())
    distckpt.load({"optimizer": resumed, "model": fresh}, tmp_path / "c")
    for name in ("exp_avg", "exp_avg_sq"):
        assert is_in_huge_pages(resumed.state[fresh.weight][name])
        assert torch.equal(resumed.state[fresh.weight][name], optimizer.state[model.weight][name])
