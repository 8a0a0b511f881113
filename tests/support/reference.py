"""What the installed releases of torch and safetensors lack; tests that need it are skipped by name."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint

OLD_SAFETENSORS = tuple(int(part) for part in safetensors.__version__.split(".")[:2]) < (0, 8)
NEW_DTYPES = {"complex64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
"""Names of the dtypes that safetensors reads since 0.8, or a release shortly before."""


needs_torchs_hugging_face = pytest.mark.skipif(
    not hasattr(torch.distributed.checkpoint, "HuggingFaceStorageWriter"),
    reason=f"torch {torch.__version__} has no reader and writer of Hugging Face files",
)


def needs_dtypes(*names: str) -> pytest.MarkDecorator:
    """Skip a test where torch is too old for these dtypes."""
    lacking = [name for name in names if not hasattr(torch, name)]
    return pytest.mark.skipif(bool(lacking), reason=f"torch {torch.__version__} has no {', '.join(lacking)}")


def skip_where_safetensors_lacks(dtype: torch.dtype) -> None:
    """Skip a test that reads a tensor with safetensors itself, where that is too old for the dtype."""
    if OLD_SAFETENSORS and str(dtype).removeprefix("torch.") in NEW_DTYPES:
        pytest.skip(f"safetensors {safetensors.__version__} reads no {dtype}")


def megatron_or_skip(module: str) -> Any:
    """Import a module below `megatron.core`; skip the test where Megatron Core is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optional dependencies warn when they are absent
        pytest.importorskip("megatron.core", reason="megatron-core is not installed; only the comparison is skipped")
        return importlib.import_module(f"megatron.core.{module}")
