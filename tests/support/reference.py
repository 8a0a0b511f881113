"""What the installed releases of torch and safetensors lack; tests that need it are skipped by
name.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint

OLD_SAFETENSORS = tuple(int(part) for part in safetensors.__version__.split(".")[:2]) < (0, 8)
NEW_DTYPES = {
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
"""The dtypes that safetensors reads and writes since 0.8, or a release shortly before, by their
names in files.
"""


needs_torchs_hugging_face = pytest.mark.skipif(
    not hasattr(torch.distributed.checkpoint, "HuggingFaceStorageWriter"),
    reason=f"torch {torch.__version__} has no reader and writer of Hugging Face files",
)


fsdp2_trains = pytest.mark.skipif(
    torch.__version__ < "2.7",
    reason="FSDP2 of torch 2.6 neither trains on the CPU nor has uneven parts beside others",
)


has_routes = pytest.mark.skipif(torch.__version__ < "2.7", reason="a Route needs a newer torch")


def needs_dtypes(*names: str) -> pytest.MarkDecorator:
    """Skip a test where torch is too old for these dtypes."""
    lacking = [name for name in names if not hasattr(torch, name)]
    return pytest.mark.skipif(
        bool(lacking), reason=f"torch {torch.__version__} has no {', '.join(lacking)}"
    )


def forms(names: Iterable[str]) -> list[Any]:
    """Return names of quantised forms as parameters; those with scales of E8M0 are skipped where
    torch is too old.
    """
    marks = needs_dtypes("float8_e8m0fnu")
    return [
        pytest.param(name, marks=marks if re.search("ue8m0|mxfp4.packed", name) else ())
        for name in names
    ]


def skip_where_safetensors_lacks(*dtypes: torch.dtype | str) -> None:
    """Skip a test that reads or writes tensors with safetensors itself, where that is too old for
    one of the dtypes.
    """
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if OLD_SAFETENSORS and (lacking := names & {*NEW_DTYPES, *NEW_DTYPES.values()}):
        pytest.skip(f"safetensors {safetensors.__version__} has no {', '.join(sorted(lacking))}")


def megatron_or_skip(module: str) -> Any:
    """Import a module below `megatron.core`; skip the test where Megatron Core is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its optional dependencies warn when they are absent
        pytest.importorskip(
            "megatron.core", reason="megatron-core is not installed; only the comparison is skipped"
        )
        return importlib.import_module(f"megatron.core.{module}")
