"""The safetensors byte layout: `[u64 header length][JSON header, padded with spaces][data]`.

The only module that knows it. Data starts at a multiple of `DATA_ALIGNMENT`, entries follow one another without gaps
in descending order of item size, so that every entry is aligned to its items.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distckpt import _dtypes
from distckpt._region import Region

DATA_ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer headers."""


class Entry(NamedTuple):
    """One tensor to be laid out: its name, safetensors dtype name, shape in torch items and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def shard_file_name(rank: int, index: int, count: int) -> str:
    """Name the index-th (from 0) of the `count` shard files of a rank, as torch's sharded Hugging Face writer does."""
    return f"shard-{rank + 1:05d}-model-{index + 1:05d}-of-{count:05d}.safetensors"


def object_file_name(rank: int) -> str:
    """Name the file with the encoded objects of a rank."""
    return f"rank-{rank + 1:05d}.safetensors"


def layout_order(entries: Sequence[Entry]) -> list[int]:
    """Return the order in which entries stand in a file: larger items first, otherwise as given."""
    return sorted(range(len(entries)), key=lambda i: -_alignment(entries[i].dtype))


def build_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Lay out a file.

    Args:
        entries: in the order of `layout_order`.
        metadata: what goes under `__metadata__`.

    Returns:
        `(header, first_bytes)`: all bytes before the data, and where in the file each entry begins. The file ends
        with its last entry.

    Raises:
        ValueError: the header would be longer than readers accept.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets = []
    position = 0
    for entry in entries:
        offsets.append(position)
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(stored_shape(entry.dtype, entry.shape)),
            "data_offsets": [position, position + entry.num_bytes],
        }
        position += entry.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    padded = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    if padded - 8 > MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {padded} bytes for {len(entries)} entries exceeds 100 MB")
    data = struct.pack("<Q", padded - 8) + text.ljust(padded - 8)
    return data, [len(data) + offset for offset in offsets]


def sharding_metadata(regions: Mapping[str, Region], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the header metadata that lets torch's and NeMo Automodel's readers find each entry's global offset."""
    info = {key: {"saved_offsets": list(region.offset)} for key, region in regions.items()}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(info, separators=(",", ":"), ensure_ascii=False),
        **extra,
    }


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as the format counts it: packed types count elements along the last axis, torch counts items."""
    packed = _dtypes.PACKED_PER_ITEM.get(dtype, 1)
    if packed == 1:
        return shape
    return (*shape[:-1], shape[-1] * packed) if shape else (packed,)


def _alignment(dtype: str) -> int:
    return _dtypes.FROM_NAME[dtype].itemsize
