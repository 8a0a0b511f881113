"""Weights for inference engines such as vLLM and SGLang.

Engines call these functions to take versions from a trainer, tensors one after the other in bounded
memory, and buckets of bytes.

`distckpt.record_loader` describes where the weight loader of an engine puts tensors, without code
for the model.
"""

from distckpt._base.public import set_public_home
from distckpt._engines.buckets import (
    Bucket,
    BucketEntry,
    pack_buckets,
    stream_tensors,
    unpack_bucket,
)
from distckpt._engines.receiver import RouteInfo
from distckpt._engines.sglang import sglang_loader, sglang_message
from distckpt._engines.vllm import register_vllm

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
