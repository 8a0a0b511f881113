"""Arrays of Orbax as files, decoded when they are read.

An array is stored in chunks that are compressed one by one. The file of an array has the values of
one chunk after the other, each in row-major order. A chunk is decoded once for all reads that are
near each other.
"""

from __future__ import annotations

import errno
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from distckpt._base.dtypes import ITEM_BYTES, STORED_NAMES
from distckpt._base.errors import CorruptCheckpointError, UnsupportedObjectError
from distckpt._base.memory import Bytes, copy_into
from distckpt._foreign.orbax.layout import Item, Layout, Leaf, read_layout
from distckpt._foreign.orbax.values import Database, Value, import_tensorstore, unreadable
from distckpt._foreign.seals import Seal, find_seal
from distckpt._format.foreign_formats import ORBAX
from distckpt._geometry.region import Region
from distckpt._geometry.units import Span, spans_within
from distckpt._storage import locations, object_store
from distckpt._storage.file_state import FileState
from distckpt._storage.remote import NO_BYTES, RemoteLocation

if TYPE_CHECKING:
    import tensorstore

DECODED_BYTES = 64 << 20
"""Memory for decoded chunks; a larger one is alone."""
_MOST_DECODED_BYTES = 1 << 30
"""Memory for chunks side by side, all of which each row needs."""
_MAX_HEAD_BYTES = 1 << 20

_WIDER = {
    "int2": "int8",
    "int4": "int8",
    "uint2": "uint8",
    "uint4": "uint8",
    "float4_e2m1fn": "bfloat16",
    "float8_e3m4": "bfloat16",
    "float8_e4m3b11fnuz": "bfloat16",
}
"""Dtypes that hold the values of dtypes that torch lacks."""


class StoredArray(NamedTuple):
    """An opened array.

    Attributes:
        array: the array of tensorstore. At a URL, its chunks are in memory while they are decoded.
        shape: its shape.
        dtype: the safetensors name of the dtype that its values are read as.
        numpy_dtype: that dtype; it is another one than that of the array where torch lacks it.
        chunk: the shape of its chunks, which may reach beyond it.
        cells: the regions of its chunks, in the order of their bytes.
        sizes: the bytes of each cell.
    """

    array: tensorstore.TensorStore
    shape: tuple[int, ...]
    dtype: str
    numpy_dtype: Any
    chunk: tuple[int, ...]
    cells: list[Region]
    sizes: list[int]

    @property
    def bytes_side_by_side(self) -> int:
        """Return the bytes of the chunks that the first row goes through."""
        return math.prod([*self.cells[0].shape[:1], *self.shape[1:]]) * ITEM_BYTES[self.dtype]

    @property
    def max_encoded_bytes(self) -> int:
        """Return a size that no chunk exceeds, even if it cannot be compressed."""
        return 2 * math.prod(self.chunk) * ITEM_BYTES[self.dtype] + _MAX_HEAD_BYTES

    def name_of(self, cell: int) -> str:
        """Return the name of a chunk."""
        metadata = self.array.spec().to_json()["metadata"]
        encoding = metadata.get("chunk_key_encoding", {"name": "v2"})
        first, separator = (["c"], "/") if encoding["name"] == "default" else ([], ".")
        separator = encoding.get("configuration", metadata).get("separator", separator)
        separator = metadata.get("dimension_separator", separator)
        offsets = zip(self.cells[cell].offset, self.chunk, strict=True)
        return separator.join([*first, *(str(start // step) for start, step in offsets)]) or "0"

    def decode(self, cell: int) -> Bytes:
        """Return the values of a cell."""
        values = self.array[self.cells[cell].slices()].read().result()
        values = np.ascontiguousarray(values.astype(self.numpy_dtype, copy=False))
        return values.reshape(-1).view(np.uint8)


class OrbaxArrays:
    """The arrays of a checkpoint, and chunks of them that stay decoded.

    With a seal, stored bytes are compared with it before they are decoded.
    """

    def __init__(self, location: str, find_seal: Callable[[], Seal | None] | None = None) -> None:
        self._location = location
        self._find_seal = find_seal
        self._arrays: dict[str, StoredArray] = {}
        self._databases: dict[str, Database] = {}
        self._cells = DecodedCells()

    @cached_property
    def layout(self) -> Layout:
        """Return the items of the checkpoint."""
        return read_layout(self._location)

    @cached_property
    def _seal(self) -> Seal | None:
        return self._find_seal() if self._find_seal else None

    @cached_property
    def files(self) -> dict[str, tuple[Item, Leaf]]:
        """Return the arrays by the names of their files."""
        found: dict[str, tuple[Item, Leaf]] = {}
        for item in self.layout.items:
            for leaf in item.leaves:
                if leaf.kind == "value":
                    continue
                name = "/".join(filter(None, [item.name, leaf.name]))
                if "/" in leaf.name or not locations.is_inner_name(name, max_parts=2):
                    name = f"array {len(found)}"
                found[name] = (item, leaf)
        return found

    def open(self, file: str) -> StoredArray:
        """Open an array, unless that has been done."""
        if file not in self._arrays:
            self._arrays[file] = self._open(*self.files[file])
        return self._arrays[file]

    def _open(self, item: Item, leaf: Leaf) -> StoredArray:
        ts = import_tensorstore()
        name = "zarr.json" if item.uses_zarr3 else ".zarray"
        # Chunks are kept here, not by tensorstore: it keeps none that exceeds its limit.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        spec = {
            "driver": "zarr3" if item.uses_zarr3 else "zarr",
            "kvstore": _store_of(item, leaf),
            "fill_missing_data_reads": not item.is_complete,
        }
        try:
            self._compare(repr(item.key_of(leaf)), item, leaf, name)
            if not locations.is_local(item.folder):
                store = ts.KvStore.open(spec["kvstore"], context=context).result()
                store.write(name, self._value(item, leaf, name).read()).result()
            array = ts.open(spec, open=True, read=True, context=context).result()
        except (ValueError, FileNotFoundError) as error:
            file = self._value(item, leaf, name).file
            raise unreadable(repr(item.key_of(leaf)), file, error) from error
        dtype = _WIDER.get(array.dtype.name, array.dtype.name)
        if dtype not in STORED_NAMES:
            raise UnsupportedObjectError(
                f"{item.key_of(leaf)!r} in {item.folder!r} has dtype {array.dtype.name}, "
                "which distckpt does not store: save it with another one."
            )
        shape = tuple(array.shape)
        chunk = tuple(array.chunk_layout.write_chunk.shape or shape)
        cells = list(_cells(shape, chunk))
        stored = STORED_NAMES[dtype]
        sizes = [cell.num_elements * ITEM_BYTES[stored] for cell in cells]
        numpy_dtype = ts.dtype(dtype).numpy_dtype
        return StoredArray(array, shape, stored, numpy_dtype, chunk, cells, sizes)

    def _value(self, item: Item, leaf: Leaf, name: str) -> Value:
        """Return the place of the metadata, or of a chunk, of an array."""
        key = f"{leaf.name}/{name}"
        if not item.uses_ocdbt:
            return Value(locations.join(item.folder, *key.split("/")))
        compare = self._seal.compare if self._seal else None
        return self._databases.setdefault(item.folder, Database(item.folder, compare)).find(key)

    def _compare(self, what: str, item: Item, leaf: Leaf, name: str) -> None:
        """Compare the metadata, or a chunk, of an array with the seal."""
        if self._seal is not None:
            value = self._value(item, leaf, name)
            if value.content is None:
                self._seal.compare(what, value.file, value.start, value.stop)

    def read_scalar(self, file: str) -> Any:
        """Return the number that an array of one element holds."""
        array = self.open(file)
        if array.shape:
            item, leaf = self.files[file]
            raise CorruptCheckpointError(
                f"{item.key_of(leaf)!r} in {item.folder!r} has the shape {array.shape}, but "
                "should be a number: the files are of different saves."
            )
        content = np.empty(ITEM_BYTES[array.dtype], np.uint8)
        self.read_into(file, [content], 0)
        return content.view(array.numpy_dtype)[0].item()

    def read_into(self, file: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of a file on; return the bytes."""
        array = self.open(file)
        stop = start + sum(map(len, buffers))
        spans = spans_within(array.sizes, start, stop)
        return _scatter((self._decoded(file, array, span) for span in spans), buffers)

    def _decoded(self, file: str, array: StoredArray, span: Span) -> Bytes:
        """Return some bytes of a cell."""
        max_bytes = max(DECODED_BYTES, min(array.bytes_side_by_side, _MOST_DECODED_BYTES))
        size = array.sizes[span.chunk]
        decode = partial(self._decode, file, array, span.chunk)
        cell = self._cells.get((file, span.chunk), size, span.num_bytes, max_bytes, decode)
        return cell[span.start : span.stop]

    def _decode(self, file: str, array: StoredArray, cell: int) -> Bytes:
        """Read and decode a chunk."""
        item, leaf = self.files[file]
        what = f"{item.key_of(leaf)!r}, {array.cells[cell]}"
        try:
            self._compare(what, item, leaf, array.name_of(cell))
            if locations.is_local(item.folder):
                return array.decode(cell)
            return self._decode_at_url(item, leaf, array, cell)
        except (ValueError, FileNotFoundError) as error:
            file = self._value(item, leaf, array.name_of(cell)).file
            raise unreadable(what, file, error) from error

    def _decode_at_url(self, item: Item, leaf: Leaf, array: StoredArray, cell: int) -> Bytes:
        name = array.name_of(cell)
        value = self._value(item, leaf, name)
        try:
            array.array.kvstore.write(name, value.read(array.max_encoded_bytes)).result()
        except FileNotFoundError:
            # A chunk of zeros need not be stored; files of a database must be there.
            if item.is_complete or value.num_bytes is not None:
                raise
        try:
            return array.decode(cell)
        finally:
            array.array.kvstore.write(name, None).result()


def _store_of(item: Item, leaf: Leaf) -> dict[str, Any]:
    """Return where tensorstore finds an array.

    It reads local files itself. At a URL, it would know neither all stores nor their settings.
    """
    if not locations.is_local(item.folder):
        return {"driver": "memory"}
    if not item.uses_ocdbt:
        return {"driver": "file", "path": f"{item.folder}/{leaf.name}/"}
    base = {"driver": "file", "path": f"{item.folder}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{leaf.name}/"}


def _cells(shape: tuple[int, ...], chunk: Sequence[int]) -> Iterator[Region]:
    """Yield the regions of the chunks of an array."""
    if 0 in shape:
        yield Region((0,) * len(shape), shape)
        return
    starts = [range(0, size, step) for size, step in zip(shape, chunk, strict=True)]
    for offset in itertools.product(*starts):
        limits = zip(shape, offset, chunk, strict=True)
        yield Region(offset, tuple(min(size - first, step) for size, first, step in limits))


def _scatter(contents: Iterable[Bytes], buffers: Sequence[Bytes]) -> int:
    """Copy consecutive contents into buffers; return the bytes copied."""
    num_bytes = 0
    rest = iter(buffers)
    room = NO_BYTES
    for content in contents:
        left = content
        while len(left):
            while not len(room):
                room = next(rest)
            count = copy_into([room], left)
            left = left[count:]
            room = room[count:]
            num_bytes += count
    return num_bytes


class DecodedCells:
    """Decoded chunks, shared by threads.

    A chunk stays until it was read whole, or another one needs its memory. Each is decoded by one
    thread, for which the others wait. An error is raised to all.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._contents: OrderedDict[tuple[str, int], Bytes | Exception] = OrderedDict()
        self._unread: dict[tuple[str, int], int] = {}
        self._pending: set[tuple[str, int]] = set()
        self._changed = threading.Condition()

    def get(
        self,
        key: tuple[str, int],
        num_bytes: int,
        num_read: int,
        max_bytes: int,
        decode: Callable[[], Bytes],
    ) -> Bytes:
        """Return the content of a chunk, which may be there already.

        Args:
            key: names the chunk.
            num_bytes: its size.
            num_read: the bytes of it that the caller reads.
            max_bytes: limit of the memory of all chunks.
            decode: decodes its content.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_turn(key, num_bytes, max_bytes))
            if key in self._contents:
                return self._read(key, num_read)
            self._pending.add(key)
            self._num_bytes += num_bytes
        content: Bytes | Exception
        try:
            content = decode()
        except Exception as error:
            content = error
        with self._changed:
            self._pending.remove(key)
            self._contents[key] = content
            self._unread[key] = num_bytes
            self._num_bytes -= num_bytes - _num_bytes(content)
            self._changed.notify_all()
            return self._read(key, num_read)

    def _is_turn(self, key: tuple[str, int], num_bytes: int, max_bytes: int) -> bool:
        """Return whether a chunk is there, or has room to be decoded."""
        if key in self._contents or key in self._pending:
            return key in self._contents
        while self._contents and self._num_bytes + num_bytes > max_bytes:
            self._drop(next(iter(self._contents)))
        return not self._num_bytes or self._num_bytes + num_bytes <= max_bytes

    def _read(self, key: tuple[str, int], num_bytes: int) -> Bytes:
        """Return a content, of which some bytes are read now."""
        content = self._contents[key]
        if isinstance(content, Exception):
            raise content
        self._contents.move_to_end(key)
        self._unread[key] -= num_bytes
        if self._unread[key] <= 0:
            self._drop(key)
        return content

    def _drop(self, key: tuple[str, int]) -> None:
        self._num_bytes -= _num_bytes(self._contents.pop(key))
        del self._unread[key]
        self._changed.notify_all()


def _num_bytes(content: Bytes | Exception) -> int:
    return 0 if isinstance(content, Exception) else len(content)


# ---- files


class ArrayFile(RemoteLocation):
    """The URL of an array of a checkpoint, which is only read."""

    def __init__(self, location: str, decoded: dict[str, Any] | None) -> None:
        super().__init__(location)
        place, _, self._file = location.partition("://")[2].rpartition("/!/")
        folder = place.removeprefix(object_store.SEALED)
        find = partial(find_seal, folder, ORBAX.name) if folder != place else None
        # All reads of one call share decoded chunks, and what was compared.
        self._arrays = OrbaxArrays(folder, find)
        if decoded is not None:
            self._arrays = decoded.setdefault(place, self._arrays)

    def read_into(self, buffers: Sequence[Bytes], start: int) -> int:
        return self._arrays.read_into(self._file, buffers, start)

    def read_range(self, start: int, num_bytes: int) -> Bytes:
        content = np.empty(num_bytes, np.uint8)
        return content[: self.read_into([content], start)]

    def read(self, max_bytes: int | None = None) -> bytes:
        return self.read_range(0, self.size()).tobytes()

    def size(self) -> int:
        return sum(self._arrays.open(self._file).sizes)

    def kind(self) -> Literal["file"]:
        return "file"

    def state(self) -> FileState:
        # The states of the files that the checkpoint consists of tell whether it has changed.
        raise self._refusal()

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> OSError:
        return OSError(errno.EROFS, "checkpoints of Orbax are only read", self.location)

    list_names = list_files = modified_time = write = write_stream = _refuse
    open_for_writing = remove = version = _put_if = _is_temporary = _translated = _refuse
