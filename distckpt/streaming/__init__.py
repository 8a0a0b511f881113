"""Write safetensors files from tensors that come one at a time: one tensor in memory, however large
the model is.

Names, dtypes and shapes are announced before, so that every byte has its place before the first
tensor comes.
"""

from distckpt._base.public import set_public_home
from distckpt.streaming._save import (
    DTYPE_ELEMENT_SIZE,
    DTYPE_TO_SAFETENSORS,
    StateDictMeta,
    StateDictMetaItem,
    TensorMeta,
    save_safetensors_streaming,
    save_safetensors_streaming_sharded,
)

__all__ = [
    "DTYPE_ELEMENT_SIZE",
    "DTYPE_TO_SAFETENSORS",
    "StateDictMeta",
    "StateDictMetaItem",
    "TensorMeta",
    "save_safetensors_streaming",
    "save_safetensors_streaming_sharded",
]

set_public_home(globals())
