"""Weights for inference engines such as vLLM and SGLang.

Engines call these functions to take versions from a trainer, tensors one after the other in bounded
memory, and buckets of bytes.

`distckpt.record_loader` describes where the weight loader of an engine puts tensors, without code
for the model.
"""

from distckpt._base.public import set_public_home
from distckpt.engines._buckets import (
    Bucket,
    BucketEntry,
    pack_buckets,
    stream_tensors,
    unpack_bucket,
)
from distckpt.engines._receivers import (
    RouteInfo,
    register_vllm,
    sglang_loader,
    sglang_message,
)

__all__ = [
    "Bucket",
    "BucketEntry",
    "RouteInfo",
    "pack_buckets",
    "register_vllm",
    "sglang_loader",
    "sglang_message",
    "stream_tensors",
    "unpack_bucket",
]

set_public_home(globals())
