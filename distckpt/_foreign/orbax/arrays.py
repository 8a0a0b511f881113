"""Arrays of Orbax as files, decoded when they are read.

An array is stored in chunks that are compressed one by one. The file of an array has the values of
one chunk after the other, each in row-major order. A chunk is decoded once for all reads that are
near each other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from distckpt._base.dtypes import ITEM_BYTES, STORED_NAMES
from distckpt._base.errors import CorruptCheckpointError, UnsupportedObjectError
from distckpt._base.memory import Bytes, copy_into
from distckpt._foreign.orbax.layout import Layout, Leaf, read_layout
from distckpt._foreign.orbax.values import Database, Value, import_tensorstore, unreadable
from distckpt._foreign.seals import SEALED, Seal, find_seal
from distckpt._format.foreign_formats import ORBAX
from distckpt._geometry.region import Region
from distckpt._geometry.units import Span, spans_within
from distckpt._storage import locations, object_store
from distckpt._storage.remote import NO_BYTES, RemoteLocation

if TYPE_CHECKING:
    import tensorstore

DECODED_BYTES = 64 << 20
"""Memory for decoded chunks; a larger one is alone."""
_MOST_DECODED_BYTES = 1 << 30
"""Memory for chunks side by side, all of which each row needs."""
_SETTLED_BYTES = 16 << 20
"""Memory for decoded chunks between two calls."""
_MAX_HEAD_BYTES = 1 << 20
"""Limit of metadata, and of a chunk beyond its values."""
_DRIVERS = {False: ("zarr", ".zarray"), True: ("zarr3", "zarr.json")}
"""Drivers of tensorstore and files of metadata, by `uses_zarr3`."""
_NAMINGS: dict[str, tuple[list[str], str]] = {"default": (["c"], "/"), "v2": ([], ".")}
"""Beginnings and usual separators of the names of chunks."""

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
        leaf: its place in the checkpoint.
        array: the array of tensorstore. At a URL, its chunks are in memory while they are decoded.
        shape: its shape.
        dtype: the safetensors name of the dtype that its values are read as.
        numpy_dtype: that dtype; it is another one than that of the array where torch lacks it.
        chunk: the shape of its chunks, which may reach beyond it.
        cells: the regions of its chunks, in the order of their bytes.
        sizes: the bytes of each cell.
    """

    leaf: Leaf
    array: tensorstore.TensorStore
    shape: tuple[int, ...]
    dtype: str
    numpy_dtype: Any
    chunk: tuple[int, ...]
    cells: list[Region]
    sizes: list[int]

    def name_of(self, cell: int) -> str:
        """Return the name of a chunk."""
        metadata = self.array.spec().to_json()["metadata"]
        encoding = metadata.get("chunk_key_encoding", {"name": "v2", "configuration": metadata})
        first, separator = _NAMINGS[encoding["name"]]
        fields = encoding.get("configuration", {})
        separator = fields.get("separator", fields.get("dimension_separator", separator))
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

    def __init__(self, location: str, seal: Seal | None) -> None:
        self._location = location
        self._seal = seal
        self._is_local = locations.is_local(location)
        self._arrays: dict[str, StoredArray] = {}
        self._databases: dict[str, Database] = {}
        self._cells = DecodedCells()

    @cached_property
    def layout(self) -> Layout:
        """Return the items of the checkpoint."""
        return read_layout(self._location)

    @cached_property
    def files(self) -> dict[str, Leaf]:
        """Return the arrays by the names of their files."""
        arrays: dict[str, Leaf] = {}
        for leaf in self.layout[0]:
            if leaf.kind == "value":
                continue
            name = "/".join(filter(None, [leaf.item.name, leaf.name]))
            if "/" in leaf.name or not locations.is_inner_name(name, max_parts=2):
                name = f"array {len(arrays)}"
            arrays[name] = leaf
        return arrays

    def open(self, file: str) -> StoredArray:
        """Open an array, unless that has been done."""
        ts = import_tensorstore()
        if file not in self._arrays:
            self._arrays[file] = self._open(ts, self.files[file])
        return self._arrays[file]

    def settle(self) -> None:
        """End a call: the next one finds some chunks decoded, and compares all others again."""
        if self._seal is not None:
            self._seal.forget()
        self._cells.shrink(_SETTLED_BYTES)

    def _open(self, ts: Any, leaf: Leaf) -> StoredArray:
        # Chunks are kept here, not by tensorstore: it keeps none that exceeds its limit.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        driver, name = _DRIVERS[leaf.item.uses_zarr3]
        store = {"driver": "memory"}
        if self._is_local:
            store = _local_store(leaf)
        spec = {
            "driver": driver,
            "kvstore": store,
            "fill_missing_data_reads": not leaf.item.is_complete,
        }
        with self._compared(leaf, name):
            if not self._is_local:
                # tensorstore would know neither all stores nor their settings.
                value = self._value(leaf, name)
                memory = ts.KvStore.open(store, context=context).result()
                memory.write(name, value and value.read(_MAX_HEAD_BYTES)).result()
            array = ts.open(spec, open=True, read=True, context=context).result()
        dtype = _WIDER.get(array.dtype.name, array.dtype.name)
        if dtype not in STORED_NAMES:
            raise UnsupportedObjectError(
                f"{leaf.key!r} in {leaf.item.folder!r} has dtype {array.dtype.name}, "
                "which distckpt does not store: save it with another one."
            )
        shape = tuple(array.shape)
        chunk = tuple(array.chunk_layout.write_chunk.shape or shape)
        cells = list(_cells(shape, chunk))
        sizes = [cell.num_elements * ITEM_BYTES[STORED_NAMES[dtype]] for cell in cells]
        numpy_dtype = ts.dtype(dtype).numpy_dtype
        name = STORED_NAMES[dtype]
        return StoredArray(leaf, array, shape, name, numpy_dtype, chunk, cells, sizes)

    def _value(self, leaf: Leaf, name: str) -> Value | None:
        """Return the metadata or a chunk; None if the index lacks it."""
        folder = leaf.item.folder
        if not leaf.item.uses_ocdbt:
            return Value(locations.join(folder, leaf.name, name))
        database = self._databases.setdefault(folder, Database(folder, self._seal))
        return database.find(f"{leaf.name}/{name}")

    @contextlib.contextmanager
    def _compared(self, leaf: Leaf, name: str, region: str = "") -> Iterator[None]:
        """Read metadata or a chunk of an array, compared with the seal."""
        what = f"{leaf.key!r}{region}"
        try:
            if self._seal is not None:
                value = self._value(leaf, name)
                if value is not None:
                    value.compare(self._seal, what)
            yield
        except (ValueError, FileNotFoundError) as error:
            value = self._value(leaf, name) or Value(leaf.item.folder)
            raise unreadable(what, value.file, error) from error

    def read_scalar(self, file: str) -> Any:
        """Return the number that an array of one element holds."""
        array = self.open(file)
        if array.shape:
            raise CorruptCheckpointError(
                f"{array.leaf.key!r} in {array.leaf.item.folder!r} has the shape {array.shape}, "
                "but should be a number: the files are of different saves."
            )
        content: Any = self._decode(array, 0)
        return content.view(array.numpy_dtype)[0].item()

    def read_into(self, file: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of a file on; return the bytes."""
        array = self.open(file)
        stop = start + sum(map(len, buffers))
        spans = spans_within(array.sizes, start, stop)
        return _scatter((self._decoded(file, array, span) for span in spans), buffers)

    def _decoded(self, file: str, array: StoredArray, span: Span) -> Bytes:
        """Return some bytes of a cell."""
        # The chunks that the first row goes through.
        shape = [*array.cells[0].shape[:1], *array.shape[1:]]
        side_by_side = math.prod(shape) * ITEM_BYTES[array.dtype]
        max_bytes = max(DECODED_BYTES, min(side_by_side, _MOST_DECODED_BYTES))
        size = array.sizes[span.chunk]
        decode = partial(self._decode, array, span.chunk)
        cell = self._cells.get((file, span.chunk), size, span.num_bytes, max_bytes, decode)
        return cell[span.start : span.stop]

    def _decode(self, array: StoredArray, cell: int) -> Bytes:
        """Read and decode a chunk."""
        leaf = array.leaf
        name = array.name_of(cell)
        memory: Any = array.array.kvstore
        with self._compared(leaf, name, f", {array.cells[cell]}"):
            if self._is_local:
                return array.decode(cell)
            value = self._value(leaf, name)
            # No compressed chunk is larger.
            max_bytes = 2 * math.prod(array.chunk) * ITEM_BYTES[array.dtype] + _MAX_HEAD_BYTES
            try:
                memory.write(name, value and value.read(max_bytes)).result()
            except FileNotFoundError:
                # Chunks of zeros may be left out, not the files that a database names.
                if leaf.item.uses_ocdbt:
                    raise
            content = array.decode(cell)
            memory.write(name, None).result()
            return content


def _local_store(leaf: Leaf) -> dict[str, Any]:
    """Return where tensorstore finds a local array."""
    folder = leaf.item.folder
    if not leaf.item.uses_ocdbt:
        return {"driver": "file", "path": f"{folder}/{leaf.name}/"}
    base = {"driver": "file", "path": f"{folder}/"}
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

    A chunk stays until it was read whole, or another one needs its memory and no thread waits for
    it. Each is decoded by one thread, for which the others wait.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._contents: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._unread: dict[tuple[str, int], int] = {}
        self._num_waiting: Counter[tuple[str, int]] = Counter()
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

        It has `num_bytes`, of which the caller reads `num_read`. `max_bytes` limits the memory of
        all chunks.
        """
        with self._changed:
            self._num_waiting[key] += 1
            self._changed.wait_for(lambda: self._is_turn(key, num_bytes, max_bytes))
            if key in self._contents:
                return self._read(key, num_read)
            self._unread[key] = num_bytes
            self._num_bytes += num_bytes
        try:
            content = decode()
        except BaseException:
            with self._changed:
                self._num_waiting[key] -= 1
                self._forget(key, num_bytes)
            raise
        with self._changed:
            self._contents[key] = content
            return self._read(key, num_read)

    def _is_turn(self, key: tuple[str, int], num_bytes: int, max_bytes: int) -> bool:
        """Return whether a chunk is there, or has room to be decoded."""
        # Of a chunk that another thread decodes, bytes are unread.
        if key in self._contents or key in self._unread:
            return key in self._contents
        self._drop(max_bytes - num_bytes)
        return not self._num_bytes or self._num_bytes + num_bytes <= max_bytes

    def shrink(self, max_bytes: int) -> None:
        """Give back memory beyond a limit."""
        with self._changed:
            self._drop(max_bytes)

    def _drop(self, max_bytes: int) -> None:
        for other in list(self._contents):
            if self._num_bytes > max_bytes and not self._num_waiting[other]:
                self._forget(other, len(self._contents.pop(other)))

    def _read(self, key: tuple[str, int], num_bytes: int) -> Bytes:
        """Return a content, of which some bytes are read now."""
        content = self._contents[key]
        self._contents.move_to_end(key)
        self._unread[key] -= num_bytes
        self._num_waiting[key] -= 1
        if self._unread[key] <= 0:
            self._forget(key, len(self._contents.pop(key)))
        self._changed.notify_all()
        return content

    def _forget(self, key: tuple[str, int], num_bytes: int) -> None:
        """Give back the memory of a chunk."""
        self._num_bytes -= num_bytes
        del self._unread[key]
        self._changed.notify_all()


# ---- files


class ArrayFile(RemoteLocation):
    """The URL of an array of a checkpoint, which is only read."""

    def __init__(self, location: str, decoded: dict[str, Any] | None) -> None:
        super().__init__(location)
        place, _, self._file = location.removeprefix(object_store.DECODED).rpartition("/!/")
        # All reads of one call share decoded chunks and compared blocks.
        known = {} if decoded is None else decoded
        arrays = known.get(place)
        if arrays is None:
            folder = place.removeprefix(SEALED)
            seal = find_seal(folder, ORBAX.name) if folder != place else None
            arrays = known.setdefault(place, OrbaxArrays(folder, seal))
        self._arrays: OrbaxArrays = arrays

    def read_into(self, buffers: Sequence[Bytes], start: int) -> int:
        return self._arrays.read_into(self._file, buffers, start)

    def read_range(self, start: int, num_bytes: int) -> Bytes:
        content = np.empty(num_bytes, np.uint8)
        return content[: self.read_into([content], start)]

    def size(self) -> int:
        return sum(self._arrays.open(self._file).sizes)

    def kind(self) -> Literal["file"]:
        return "file"

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        # Nor has it a state: those of the files of the checkpoint tell whether it has changed.
        raise OSError(errno.EROFS, "checkpoints of Orbax are only read", self.location)

    list_names = list_files = modified_time = state = read = write = write_stream = _refuse
    open_for_writing = remove = version = _put_if = _is_temporary = _translated = _refuse
