"""Tensor-by-tensor building blocks with bounded memory: measure, divide, move, gather and
broadcast.

Everything here works without a process group. DTensors are recognized by their methods, so nothing
here depends on `torch.distributed`.
"""

from distckpt._base.dtypes import as_torch_dtype, estimate_array_nbytes
from distckpt._base.public import set_public_home
from distckpt.streaming._tensors import (
    TensorFunction,
    TensorSource,
    apply_gather_functions,
    broadcast_tensor,
    chunk_tensor_by_memory,
    estimate_available_memory,
    flatten_for_broadcast,
    is_gcs_path,
    parse_gcs_path,
    read_process_array,
    reshard,
    to_host,
    to_plain_memory,
    unflatten_from_broadcast,
)

__all__ = [
    "TensorFunction",
    "TensorSource",
    "apply_gather_functions",
    "as_torch_dtype",
    "broadcast_tensor",
    "chunk_tensor_by_memory",
    "estimate_array_nbytes",
    "estimate_available_memory",
    "flatten_for_broadcast",
    "is_gcs_path",
    "parse_gcs_path",
    "read_process_array",
    "reshard",
    "to_host",
    "to_plain_memory",
    "unflatten_from_broadcast",
]

set_public_home(globals())
