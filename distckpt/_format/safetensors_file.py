"""The safetensors byte layout: `[u64 header length][JSON header, padded with spaces][data]`.

No other module knows it. Data begins at a multiple of `DATA_ALIGNMENT`, and entries follow one
another without gaps in descending order of item size, so that each is aligned to its items. Small
files of bytes, which are made in one piece (`join_file`), are only padded as the format prescribes.

Files are not trusted: functions that read raise `ValueError` for headers that contradict the format
or themselves.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distckpt._base.dtypes import ITEM_BYTES, PACKED_PER_ITEM, is_known
from distckpt._base.errors import CorruptCheckpointError
from distckpt._format.checksum import checksum
from distckpt._format.marker import file_size, read_file
from distckpt._geometry.region import MAX_NDIM, Region
from distckpt._storage import locations

DATA_ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header; readers of the format refuse longer ones."""
SHARDING_INFO = "DCP_SHARDING_INFO"
"""Metadata field of torch's sharded files: offsets in global tensors."""
GLOBAL_SHAPES = "distckpt_global_shapes"
"""Metadata field of our shard files: the entries' global shapes."""
CHECKSUMS_SUFFIX = ".checksums"
_INTEGER = frozenset({int})


class Entry(NamedTuple):
    """A tensor in a file.

    It has its name, its safetensors dtype name, its shape in torch items, its size and its
    beginning.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    first_byte: int = -1


_PLACE = operator.attrgetter("first_byte", "num_bytes")


class ShardFile(NamedTuple):
    """A file of the checkpoint.

    It has its name, relative to the directory, its size, and the size and checksum of its header.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: int

    @classmethod
    def of(cls, name: str, data: bytes) -> ShardFile:
        """Describe a file whose bytes all count as header."""
        return cls(name, len(data), len(data), checksum(data))

    @property
    def holds_checksums(self) -> bool:
        """Return whether it holds the checksums of blocks.

        They are of all files that are listed between the previous such file and this one. All of
        its bytes count as header.
        """
        return self.name.endswith(CHECKSUMS_SUFFIX)


def shard_file_name(rank: int, index: int, count: int) -> str:
    """Return the name of a rank's index-th shard file (from 0).

    It is the name of torch's sharded Hugging Face writer, for `count` files of a rank.
    """
    return f"shard-{rank + 1:05d}-model-{index + 1:05d}-of-{count:05d}.safetensors"


def object_file_name(rank: int) -> str:
    """Return the name of the file with a rank's encoded objects."""
    return f"rank-{rank + 1:05d}.safetensors"


def layout_order(entries: Sequence[Entry]) -> list[int]:
    """Return the order of entries in a file: larger items first."""
    return sorted(range(len(entries)), key=lambda i: -ITEM_BYTES[entries[i].dtype])


def build_header(
    entries: Sequence[Entry], metadata: Mapping[str, str], alignment: int = DATA_ALIGNMENT
) -> tuple[bytes, list[int]]:
    """Lay out a file of entries in `layout_order`.

    Data begins at a multiple of `alignment`. Returns the header (all bytes before the data), and
    the beginning of each entry in the file. The file ends where the last entry does.
    """
    quoted = json.encoder.encode_basestring
    fields = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
    members = [f'"__metadata__":{fields}']
    kinds: dict[Any, str] = {}
    offsets = []
    position = 0
    # There are thousands of entries, many of the same dtype and shape.
    for name, dtype, shape, num_bytes, _ in entries:
        kind = kinds.get((dtype, shape))
        if kind is None:
            sizes = ",".join(map(str, stored_shape(dtype, shape)))
            kind = kinds[dtype, shape] = f'"dtype":"{dtype}","shape":[{sizes}]'
        offsets.append(position)
        end = position + num_bytes
        members.append(f'{quoted(name)}:{{{kind},"data_offsets":[{position},{end}]}}')
        position = end
    text = f"{{{','.join(members)}}}".encode("utf-8", "surrogatepass")
    padded = -(-(8 + len(text)) // alignment) * alignment
    if padded - 8 > MAX_HEADER_BYTES:
        raise ValueError(
            f"a safetensors header of {padded} bytes for {len(entries)} entries exceeds 100 MB"
        )
    data = struct.pack("<Q", padded - 8) + text.ljust(padded - 8)
    return data, [len(data) + offset for offset in offsets]


def join_file(
    entries: Mapping[str, bytes | bytearray | memoryview], metadata: Mapping[str, str]
) -> bytes:
    """Return a file of byte entries (U8) in the given order.

    Equal arguments give equal files. The safetensors library would write metadata in random order
    and copy the data twice.
    """
    layout = [Entry(name, "U8", (len(raw),), len(raw)) for name, raw in entries.items()]
    header, _ = build_header(layout, metadata, alignment=8)
    return b"".join([header, *entries.values()])


def header_length(head: bytes | memoryview, file_bytes: int) -> int:
    """Return the number of bytes before the data.

    The first 8 bytes of the file or more tell it.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8:
        raise ValueError(f"it has only {file_bytes} bytes")
    if length > MAX_HEADER_BYTES:
        start = bytes(head[:40])
        text = repr(start.decode()) if start.isascii() else "other bytes"
        raise ValueError(f"it does not begin with the length of a header, but with {text}")
    if not length:
        raise ValueError("it begins with zeros: perhaps space was reserved, and nothing copied yet")
    if 8 + length > file_bytes:
        raise ValueError(
            f"its header needs {8 + length} bytes, it has {file_bytes}: it was cut off"
        )
    return 8 + length


def parse_header(header: bytes | memoryview, file_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    """Parse the bytes before the data.

    Return metadata, and entries in byte order.
    """
    members = parse_json(str(header[8:], "utf-8"))
    metadata = _metadata_of(members)
    entries = _stored_entries(members, len(header))
    entries.sort(key=_PLACE)
    position = len(header)
    for entry in entries:
        if entry.first_byte != position:
            raise ValueError(
                f"the entry {entry.name[:50]!r} begins at {entry.first_byte} instead of {position}"
            )
        position += entry.num_bytes
    if position != file_bytes:
        fault = "it was cut off" if file_bytes < position else "something was added to it"
        raise ValueError(f"its header says {position} bytes, it has {file_bytes}: {fault}")
    return metadata, entries


def _metadata_of(members: Any) -> dict[str, str]:
    """Take the metadata out of a header."""
    metadata = members
    if type(members) is dict:
        metadata = members.pop("__metadata__", None)
    if metadata is None and members is not None:
        metadata = {}  # MLX writes null
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("the header is not a JSON object with strings as metadata")
    return metadata


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as the format demands.

    No object has a name twice, and there are no NaN or infinities.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct_pairs)
    except RecursionError as error:
        raise ValueError("JSON nests too deeply") from error


def sharding_metadata(regions: Mapping[str, Region], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with the global offsets of entries.

    torch and NeMo Automodel read them there.
    """
    info = {key: {"saved_offsets": list(region.offset)} for key, region in regions.items()}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        SHARDING_INFO: json.dumps(info, separators=(",", ":"), ensure_ascii=False),
        **extra,
    }


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as the format counts it.

    Along the last axis, it counts elements of packed types rather than items.
    """
    packed = PACKED_PER_ITEM.get(dtype, 1)
    if packed == 1:
        return shape
    if not shape:
        return (packed,)
    return (*shape[:-1], shape[-1] * packed)


def _stored_entries(members: Mapping[str, Any], data_start: int) -> list[Entry]:
    """Check the members of a header, and return them as entries.

    Many tensors have the same dtype and shape, which are checked once.
    """
    kinds: dict[Any, tuple[int, ...]] = {}
    entries = []
    for name, member in members.items():
        first, end = member["data_offsets"]
        shape = tuple(member["shape"])
        kind = (member["dtype"], shape, end - first)
        # 1.0 and True equal 1, and are no sizes.
        are_integers = _INTEGER.issuperset(map(type, (first, end, *shape)))
        if not are_integers or kind not in kinds:
            kinds[kind] = _shape_in_items(name, *kind, are_integers)
        entries.append(Entry(name, kind[0], kinds[kind], kind[2], data_start + first))
    return entries


def _shape_in_items(
    name: str, dtype: str, shape: tuple[int, ...], num_bytes: int, are_integers: bool
) -> tuple[int, ...]:
    """Return an entry's shape in torch items, after checking its kind."""
    if not are_integers or not 0 <= min((num_bytes, *shape)) <= max((num_bytes, *shape)) < 2**62:
        raise ValueError(f"the entry {name[:50]!r} has no proper shape and position")
    if not is_known(dtype):
        raise ValueError(
            f"the entry {name[:50]!r} has the dtype {dtype!r:.50}, which torch does not have"
        )
    if dtype in PACKED_PER_ITEM:
        packed = PACKED_PER_ITEM[dtype]
        if not shape or shape[-1] % packed:
            raise ValueError(f"the size of the entry {name[:50]!r} is not a whole number of bytes")
        shape = (*shape[:-1], shape[-1] // packed)
    if len(shape) > MAX_NDIM or math.prod(shape) * ITEM_BYTES[dtype] != num_bytes:
        raise ValueError(
            f"the entry {name[:50]!r} of shape {list(shape)!s:.100} and dtype {dtype} has "
            f"{num_bytes} bytes"
        )
    return shape


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _distinct_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object has a name twice")
    return result


# --- Read header ----------------------------------------------------------------------------------


_GUESSED_BYTES = 1 << 17
"""Size of the first read: most headers are no longer."""


@dataclass(frozen=True)
class Header:
    """Sizes of a file and its header, and the header's content."""

    num_bytes: int
    header_bytes: int
    checksum: int
    metadata: dict[str, str]
    entries: list[Entry]


def read_header(path: str) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ValueError: it is damaged.
    """
    size, head = read_header_bytes(path)
    return Header(size, len(head), checksum(head), *parse_header(head, size))


def read_header_bytes(path: str) -> tuple[int, bytes]:
    """Return a safetensors file's size, and its header as stored.

    Raises:
        ValueError: its length is damaged.
    """
    size = file_size(path)
    head = locations.read_range(path, 0, min(size, _GUESSED_BYTES))
    header_bytes = header_length(head, size)
    if header_bytes > len(head):
        head += locations.read_range(path, len(head), header_bytes)
    return size, head[:header_bytes]


def read_as_saved(path: str, file: ShardFile, kind: str, way_out: str) -> bytes:
    """Read a file whose bytes all count as header.

    Args:
        path: its location.
        file: its description in the manifest.
        kind: the beginning of errors about it, such as "The part of the manifest".
        way_out: what else helps than to restore it from a copy.

    Raises:
        CorruptCheckpointError: it is missing or damaged.
    """
    try:
        data = read_file(path, file.num_bytes)
    except FileNotFoundError as error:
        raise _damaged(path, kind, "is missing", way_out) from error
    if len(data) != file.num_bytes or checksum(data) != file.header_checksum:
        fault = "is not the one that was saved (size or checksum differs from the manifest)"
        raise _damaged(path, kind, fault, way_out)
    return data


def _damaged(path: str, kind: str, fault: str, way_out: str) -> CorruptCheckpointError:
    error = CorruptCheckpointError(
        f"{kind} {path!r} {fault}: restore it from a copy, or {way_out}."
    )
    error.file = path
    return error
