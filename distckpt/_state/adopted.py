"""Conversion of sharded state dicts of Megatron Core's objects.

Each object is converted to its equivalent in distckpt. Objects are recognized by their structure,
so Megatron need not be installed, and every version and copy of it will do.
"""

from __future__ import annotations

import functools
import io
import signal
from collections.abc import Callable
from typing import Any

import torch

from distckpt._format.codec import register_object_type
from distckpt.mapping._base import ShardedBase, kind_of
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory

# The arguments of Megatron's scripts hold a signal.
register_object_type(signal.Signals)
# Transformer layers keep their extra state in files in memory.
register_object_type(io.BytesIO, "io.BytesIO", to_state=io.BytesIO.getvalue, from_state=io.BytesIO)


def adopt(node: Any) -> Any:
    """Convert an object of Megatron to its equivalent in distckpt.

    Other values are returned as they are.
    """
    convert = _converter_of(type(node))  # type: ignore[arg-type]  # Classes are hashable.
    if convert is None:
        return node
    return convert(node)


def _adopt_tensor(node: Any) -> ShardedTensor:
    data = node.data
    dtype = node.dtype
    # Megatron stores 8-bit tensors of Transformer Engine in the precision that they represent.
    is_packed = (
        getattr(type(data), "dequantize", torch.Tensor.dequantize) is not torch.Tensor.dequantize
    )
    if data is not None and is_packed:
        data = data.detach().dequantize()
        dtype = data.dtype
    return ShardedTensor(
        node.key,
        data,
        dtype,
        node.local_shape,
        node.global_shape,
        node.global_offset,
        node.axis_fragmentations,
        node.replica_id,
        node.prepend_axis_num,
        node.allow_shape_mismatch,
        getattr(node, "flattened_range", None),
    )


def _adopt_factory(node: Any) -> ShardedTensorFactory:
    flat = getattr(node, "flattened_range", None)
    return ShardedTensorFactory(
        node.key, node.data, node.build_fn, node.merge_fn, node.replica_id, flat
    )


_CONVERTERS: dict[str | None, Callable[[Any], Any]] = {
    "ShardedTensor": _adopt_tensor,
    "ShardedObject": lambda node: ShardedObject(
        node.key, node.data, node.global_shape, node.global_offset, node.replica_id
    ),
    "ShardedTensorFactory": _adopt_factory,
    "LocalNonpersistentObject": lambda node: LocalNonpersistentObject(node.unwrap()),
}


@functools.cache
def _converter_of(cls: type) -> Callable[[Any], Any] | None:
    if issubclass(cls, ShardedBase | LocalNonpersistentObject):
        return None
    return _CONVERTERS.get(kind_of(cls))  # type: ignore[arg-type]  # Classes are hashable.
