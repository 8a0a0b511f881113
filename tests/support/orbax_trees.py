"""Tensors compared with the trees that Orbax was given."""

from __future__ import annotations

import numpy as np
import torch

from tests.data.make_orbax import leaves_of

WIDER = {"int4": "int8", "int2": "int8"} | dict.fromkeys(
    ["float8_e4m3b11fnuz", "float8_e3m4", "float4_e2m1fn"], "bfloat16"
)
"""Dtypes that torch lacks, and those of the tensors that hold their values."""


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check(found, tree):
    """Compare all bits with what was given to Orbax."""
    expected = leaves_of(tree)
    assert set(found) == set(expected)
    for name, array in expected.items():
        values = array.astype(np.dtype(WIDER.get(array.dtype.name, array.dtype.name)))
        assert found[name].shape == array.shape
        assert str(found[name].dtype) == f"torch.{values.dtype.name}"
        assert bits(found[name]) == values.tobytes()
