"""What transformers may do to tensors when it converts their names, recorded as rules: checked
against torch.
"""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt.families._transformers_names import _Recorder
from distckpt.rules import Assemble, TensorSpec, apply_rules
from tests.support.hf_folders import read_export
from tests.support.states import save_checkpoint

SHAPE = (3, 4, 6)
OPERATIONS = {
    "chunk": lambda w: w.chunk(2, dim=2)[1],
    "split": lambda w: w.split([1, 3], 1)[1],
    # Releases of transformers differ in whether they name the axis.
    "squeeze": lambda w: torch.chunk(w, 3, dim=0)[2].squeeze(),
    "squeeze several": lambda w: w.split(1)[1].split(1, 2)[4].squeeze(),
    "squeeze an axis": lambda w: w.split(1)[1].squeeze(0),
    "squeeze the last axis": lambda w: w.split(1, 2)[3].squeeze(-1),
    "squeeze no axis": lambda w: w.squeeze(1),
    "unbind": lambda w: torch.unbind(w, dim=1)[2],
    "cat": lambda w: torch.cat(w.split(2, dim=-1)[::-1], dim=-1),
    "stack": lambda w: torch.stack(w.unbind(0), dim=1),
    "permute": lambda w: w.permute(2, 0, 1),
    "transpose": lambda w: w.transpose(-1, -2).contiguous(),
    "reshape": lambda w: w.reshape(12, -1),
}


@pytest.mark.parametrize("change", OPERATIONS.values(), ids=OPERATIONS)
def test_recorded_operations_are_those_of_torch(tmp_path, change):
    values = torch.arange(72.0).reshape(SHAPE)
    source = save_checkpoint(tmp_path / "c", {"w": values})
    as_stored = apply_rules([], {"w": TensorSpec(SHAPE, "F32")})["w"]
    recorded = change(_Recorder.make(as_stored))
    distckpt.consolidate(
        source, tmp_path / "out", rules=[Assemble({"out": recorded.mapped}, {"w": SHAPE})]
    )
    assert torch.equal(read_export(tmp_path / "out")["out"], change(values))
