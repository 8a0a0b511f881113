"""The safetensors byte layout: `[u64 header length][JSON header, padded with spaces][data]`.

The only module that knows it. Data starts at a multiple of `DATA_ALIGNMENT`, entries follow one another without gaps
in descending order of item size, so that every entry is aligned to its items. Small files of bytes, which are made and
read whole (`join_file`, `split_header` and `split_data`), are padded no further than the format asks for.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME, PACKED_PER_ITEM
from distckpt._geometry.region import MAX_NDIM, Region

DATA_ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer headers."""
SHARDING_INFO = "DCP_SHARDING_INFO"
"""Header metadata entry of torch's sharded files: where in the global tensors the entries lie."""
GLOBAL_SHAPES = "distckpt_global_shapes"
"""Header metadata entry of our shard files: the global shapes of the entries."""


_ITEM_BYTES = {name: dtype.itemsize for name, dtype in FROM_NAME.items()}


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
    return sorted(range(len(entries)), key=lambda i: -_ITEM_BYTES[entries[i].dtype])


def build_header(
    entries: Sequence[Entry], metadata: Mapping[str, str], alignment: int = DATA_ALIGNMENT
) -> tuple[bytes, list[int]]:
    """Lay out a file.

    Args:
        entries: in the order of `layout_order`.
        metadata: what goes under `__metadata__`.
        alignment: the data start at a multiple of it, in bytes.

    Returns:
        `(header, first_bytes)`: all bytes before the data, and where in the file each entry begins. The file ends
        with its last entry.

    Raises:
        ValueError: the header would be longer than readers accept.
    """
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    members = [f'"__metadata__":{encode(dict(metadata))}']
    offsets = []
    position = 0
    # Put together by hand, in half the time: there are thousands of entries.
    for name, dtype, shape, num_bytes in entries:
        offsets.append(position)
        sizes = ",".join(map(str, stored_shape(dtype, shape)))
        end = position + num_bytes
        members.append(f'{encode(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{position},{end}]}}')
        position = end
    text = f"{{{','.join(members)}}}".encode("utf-8", "surrogatepass")
    padded = -(-(8 + len(text)) // alignment) * alignment
    if padded - 8 > MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {padded} bytes for {len(entries)} entries exceeds 100 MB")
    data = struct.pack("<Q", padded - 8) + text.ljust(padded - 8)
    return data, [len(data) + offset for offset in offsets]


def join_file(entries: Mapping[str, bytes | bytearray | memoryview], metadata: Mapping[str, str]) -> bytes:
    """Make a whole file of entries that are bytes (U8), in the order given.

    The safetensors library is of no use here: it writes metadata in random order and copies the data twice.

    Args:
        entries: name -> bytes.
        metadata: what goes under `__metadata__`.

    Returns:
        The file. The same arguments in the same order give the same bytes.

    Raises:
        ValueError: the header would be longer than readers accept.
    """
    described = [Entry(name, "U8", (len(raw),), len(raw)) for name, raw in entries.items()]
    header, _ = build_header(described, metadata, alignment=8)
    return b"".join([header, *entries.values()])


class StoredEntry(NamedTuple):
    """One tensor in a file: like `Entry`, and where in the file it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


_PLACE = operator.itemgetter(3, 4)


def header_length(head: bytes, file_bytes: int) -> int:
    """Return how many bytes at the beginning of a file are not data.

    Raises:
        ValueError: the file is too short, or claims a header that readers refuse.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise ValueError("the header is cut off")
    return 8 + length


def parse_header(header: bytes, file_bytes: int) -> tuple[dict[str, str], list[StoredEntry]]:
    """Read the header of a file of tensors, which is not trusted.

    Args:
        header: the first `header_length` bytes.
        file_bytes: size of the whole file.

    Returns:
        `(metadata, entries)`, entries in the order in which they stand in the file.

    Raises:
        ValueError: the header contradicts itself or the size of the file, or a dtype is unknown.
    """
    metadata, described, _ = split_header(memoryview(header))
    entries = [_stored_entry(name, entry, len(header)) for name, entry in described.items()]
    entries.sort(key=_PLACE)
    position = len(header)
    for entry in entries:
        if entry.first_byte != position:
            raise ValueError(f"the entry {entry.name[:50]!r} begins at {entry.first_byte} instead of {position}")
        position += entry.num_bytes
    if position != file_bytes:
        raise ValueError(f"the entries end at byte {position}, the file at {file_bytes}")
    return metadata, entries


def split_header(blob: memoryview) -> tuple[dict[str, str], dict[str, Any], memoryview]:
    """Take the header off a whole file.

    Args:
        blob: the file as bytes. It is not trusted.

    Returns:
        `(metadata, described, data)`: what stands under `__metadata__`; name -> what the header says of each entry,
        unchecked, for `split_data`; and a view of the data.

    Raises:
        ValueError: the header is cut off, too long, or no JSON object with metadata of texts.
    """
    header_bytes = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or header_bytes > min(len(blob) - 8, MAX_HEADER_BYTES):
        raise ValueError("the header is cut off")
    header = parse_json(str(blob[8 : 8 + header_bytes], "utf-8"))
    metadata = header.pop("__metadata__", {}) if type(header) is dict else None
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("the header is no JSON object with metadata of texts")
    return metadata, header, blob[8 + header_bytes :]


def split_data(described: Mapping[str, Any], data: memoryview) -> dict[str, memoryview]:
    """Cut the data of a file of bytes into its entries.

    Args:
        described: name -> what the header says of the entry, as `split_header` gives it.
        data: the bytes after the header.

    Returns:
        Name -> view of the entry's bytes, in the order in which they stand in the file.

    Raises:
        ValueError: an entry is not of bytes (U8), or the entries do not cover the data without gap or overlap.
    """
    ranges = {name: _byte_range(name, entry) for name, entry in described.items()}
    entries = {}
    position = 0
    for name, (first, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if not first == position <= end <= len(data):
            raise ValueError(f"the entry {name[:50]!r} does not fit the file")
        entries[name] = data[first:end]
        position = end
    if position != len(data):
        raise ValueError(f"{len(data)} bytes of data, {position} described")
    return entries


def parse_json(text: str) -> Any:
    """Parse JSON as the format demands it: without names that an object has twice, and without NaN and infinities.

    Raises:
        ValueError: the text is not such JSON, or nests too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct_pairs)
    except RecursionError as error:
        raise ValueError("JSON nests too deeply") from error


def sharding_metadata(regions: Mapping[str, Region], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the header metadata that lets torch's and NeMo Automodel's readers find each entry's global offset."""
    info = {key: {"saved_offsets": list(region.offset)} for key, region in regions.items()}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        SHARDING_INFO: json.dumps(info, separators=(",", ":"), ensure_ascii=False),
        **extra,
    }


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as the format counts it: packed types count elements along the last axis, torch counts items."""
    packed = PACKED_PER_ITEM.get(dtype, 1)
    if packed == 1:
        return shape
    return (*shape[:-1], shape[-1] * packed) if shape else (packed,)


def _stored_entry(name: str, entry: Any, data_start: int) -> StoredEntry:
    dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    for number in (first, end, *shape):
        if type(number) is int and 0 <= number < 2**62:
            continue
        raise ValueError(f"the entry {name[:50]!r} has no proper shape and position")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"the entry {name[:50]!r} has the dtype {dtype!r:.50}, which torch does not have")
    if dtype in PACKED_PER_ITEM:
        packed = PACKED_PER_ITEM[dtype]
        if not shape or shape[-1] % packed:
            raise ValueError(f"the entry {name[:50]!r} does not fill whole bytes")
        shape = [*shape[:-1], shape[-1] // packed]
    if len(shape) > MAX_NDIM or math.prod(shape) * _ITEM_BYTES[dtype] != end - first:
        raise ValueError(f"the entry {name[:50]!r} of shape {shape!s:.100} and dtype {dtype} has {end - first} bytes")
    return StoredEntry(name, dtype, tuple(shape), data_start + first, end - first)


def _byte_range(name: str, entry: object) -> tuple[int, int]:
    match entry:
        case {"dtype": "U8", "shape": [size], "data_offsets": [first, end]}:
            # A JSON true would pass for 1.
            if type(first) is int and type(end) is int and size == end - first:
                return first, end
    raise ValueError(f"the entry {name[:50]!r} does not fit the file")


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _distinct_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object has a name twice")
    return result
