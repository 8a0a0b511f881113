"""Megatron's reader of metadata in its own format.

It is for programs that read it; distckpt does not use it.
"""

from distckpt.megatron._forwarding import forward

__getattr__ = forward(
    "strategies.cached_metadata_filesystem_reader", "CachedMetadataFileSystemReader"
)
