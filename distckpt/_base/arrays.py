"""Sizes and dtypes of arrays of any library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.lazy import torch
from distckpt._base.messages import did_you_mean


def estimate_array_nbytes(array: Any) -> int:
    """Return the size of an array in bytes, without touching its data.

    It is a torch tensor on any device (also "meta"), a numpy array, or anything else with `shape`
    and `dtype` (of torch, of numpy, or by name). A DTensor counts as a whole; its `to_local()` is
    the part on this rank.

    Raises:
        TypeError: it has no shape and dtype.
    """
    if isinstance(array, torch.Tensor):
        return array.numel() * array.element_size()
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"the size of a {type(array).__name__} is unknown: it has no shape and dtype"
        )
    dtype = array.dtype
    if not isinstance(dtype, np.dtype):
        dtype = as_torch_dtype(dtype)
    return int(math.prod(array.shape) * dtype.itemsize)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of a transposed tensor's axes in memory, outermost first.

    None for other tensors, expanded ones included.
    """
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return None
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    if order == sorted(order):
        return None
    return order


def in_memory_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy of a tensor with its axes reordered in memory."""
    return tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])


def as_torch_dtype(dtype: torch.dtype | str | np.dtype[Any] | type) -> torch.dtype:
    """Return the torch dtype for a torch or numpy dtype or name.

    Names are "bfloat16", "torch.bfloat16", "BF16" or "bf16".

    Raises:
        ValueError: there is no such dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        dtype = np.dtype(dtype).name
    torch_dtype = FROM_NAME.get(dtype.upper(), getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(
            f"torch {torch.__version__} has no dtype {dtype!r}{did_you_mean(dtype, FROM_NAME)}"
        )
    return torch_dtype
