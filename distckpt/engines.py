"""Weights for inference engines: tensors one after the other in bounded memory, and buckets of
bytes.

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

__all__ = [
    "Bucket",
    "BucketEntry",
    "pack_buckets",
    "stream_tensors",
    "unpack_bucket",
]

set_public_home(globals())
