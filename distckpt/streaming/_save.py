"""Writing of safetensors files from tensors that come one at a time.

One tensor is in memory, however large the model is. Names, dtypes and shapes are announced before,
so that every byte has its place before the first tensor comes.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES, PACKED_PER_ITEM, TO_NAME, as_torch_dtype
from distckpt._base.errors import CheckpointExistsError
from distckpt._base.libc import write_all
from distckpt._base.memory import Bytes, tensor_bytes
from distckpt._base.messages import check_file_bytes, did_you_mean, summarize_keys
from distckpt._base.threads import UNIT_BYTES
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings, new_output
from distckpt._commit.target import check_replaceable
from distckpt._format import hf_names
from distckpt._format.safetensors_file import Entry, build_header, layout_order, stored_shape
from distckpt._io.write import create_file
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations, object_store
from distckpt.streaming._tensors import chunk_tensor_by_memory, to_plain_memory

DTYPE_TO_SAFETENSORS: dict[torch.dtype | str, str] = {
    spelling: name
    for dtype, name in TO_NAME.items()
    for spelling in (dtype, str(dtype), str(dtype).removeprefix("torch."), name, name.lower())
}
"""Safetensors name of a dtype in any of its spellings.

These are torch.bfloat16, "torch.bfloat16", "bfloat16", "BF16" and "bf16", for example.
"""

DTYPE_ELEMENT_SIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in FROM_NAME.items()}
"""Bytes per item by safetensors dtype (F4 packs two elements)."""

StateDictMetaItem: TypeAlias = tuple[str, torch.dtype | str, Sequence[int]]
"""Name, dtype in any spelling, and shape of an announced tensor."""
StateDictMeta: TypeAlias = Iterable[StateDictMetaItem]


class TensorMeta(NamedTuple):
    """Name, safetensors dtype and torch shape of an announced tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data."""
        return math.prod(self.shape) * DTYPE_ELEMENT_SIZE[self.dtype]


def save_safetensors_streaming(
    tensor_iter: Iterable[tuple[str, torch.Tensor]],
    filepath: str | os.PathLike[str],
    state_dict_meta: StateDictMeta,
    *,
    rename: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file from tensors that come one at a time.

    An earlier file at the destination stays until the new one is complete and on disk. Nothing is
    left of an unsuccessful call.

        meta = [(name, tensor.dtype, tensor.shape) for name, tensor in model.state_dict().items()]
        save_safetensors_streaming(model.state_dict().items(), "model.safetensors", meta)

    Args:
        tensor_iter: gives `(name, tensor)`, each announced tensor once, in any order; of any device
            and strides. A tensor is let go before the next is asked for.
        filepath: the file to write, or a URL. An object store takes tensors only in the order of
            the announcement (or, where that would leave items unaligned, tensors of larger items
            first), and no file that exists.
        state_dict_meta: `(name, dtype, shape)` of every tensor that will come.
        rename: whether to put the file in its place; otherwise the caller renames the temporary
            file `<filepath>.tmp`, which must not be written to by another call meanwhile.
        metadata: texts for the header, in addition to `format: pt`.

    Returns:
        `filepath`, or with `rename=False` the path of the complete temporary file.

    Raises:
        ValueError: the tensors differ from the announcement, a dtype is not one of safetensors, or
            the announcement contradicts itself.
        CheckpointExistsError: an object store has such a file, or a directory of that name is
            there.
    """
    location = locations.normalize(filepath)
    layout = _lay_out([list(_announced(state_dict_meta).values())], metadata)
    is_local = locations.is_local(location)
    if not (is_local or rename):
        raise ValueError(
            f"rename=False needs a local path; {os.fspath(filepath)!r} can only be written in place"
        )
    is_taken = os.path.isdir if is_local else locations.exists
    if is_taken(location):
        raise _in_the_way(location)
    written = location
    if not rename:
        # Programs look for it there; a file of an earlier call is replaced.
        written = f"{location}.tmp"
        locations.remove_file(written)
    elif is_local:
        written = locations.temporary_beside(location)
    with _written_files([written], layout, tensor_iter):
        if is_local and rename:
            locations.replace_file(written, location)
    return os.fspath(filepath) if rename else written


def save_safetensors_streaming_sharded(
    tensor_iter: Iterable[tuple[str, torch.Tensor]],
    output_dir: str | os.PathLike[str],
    state_dict_meta: StateDictMeta,
    *,
    max_file_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Write a Hugging Face directory, one tensor after the other.

    Tensors are divided into `model-00001-of-0000n.safetensors` in the order of the announcement,
    with an index; tensors that fit one file become `model.safetensors` without an index. Everything
    is written next to the directory and put in its place in one step: an earlier export there stays
    until then, other files there stay. On an object store files are written in place, the index
    last.

    Args:
        tensor_iter: gives `(name, tensor)`, see `save_safetensors_streaming`.
        output_dir: the directory to write, or a URL. An object store must not have an export there.
        state_dict_meta: `(name, dtype, shape)` of every tensor that will come.
        max_file_bytes: size of the tensors of a file at most; a larger tensor gets a file of its
            own.
        metadata: texts for the headers, in addition to `format: pt`.

    Returns:
        The paths of the files with tensors, in order.

    Raises:
        ValueError: as `save_safetensors_streaming` does, or the limit is not positive.
        CheckpointExistsError: an object store has an export there, or a file is in the way.
    """
    check_file_bytes("max_file_bytes", max_file_bytes)
    entries = _announced(state_dict_meta)
    sizes = {name: entry.num_bytes for name, entry in entries.items()}
    groups = hf_names.group_keys_by_bytes(sizes, max_file_bytes) or [[]]
    layout = _lay_out([[entries[name] for name in group] for group in groups], metadata)
    names = hf_names.output_filenames(hf_names.BASE_PREFIX, len(groups))
    location = posix.resolve(os.fspath(output_dir))
    posix.put_back(location)
    _check_has_no_export(location)
    check_replaceable(location)
    index_name = hf_names.index_filename(hf_names.BASE_PREFIX)
    with new_output(Ranks.alone(), location, OutputSettings()) as output:
        with output.being_written():
            paths = [locations.join(output.location, name) for name in names]
            with _written_files(paths, layout, tensor_iter):
                if len(names) > 1:
                    index = _index(entries.values(), layout, names)
                    locations.write_bytes(locations.join(output.location, index_name), index)
                output.sync()
        output.commit_beside_others(hf_names.belongs_to_export)
    return [locations.join(os.fspath(output_dir), name) for name in names]


def _announced(state_dict_meta: StateDictMeta) -> dict[str, Entry]:
    """Check an announcement, and return its tensors by name."""
    entries: dict[str, Entry] = {}
    for name, dtype, shape in state_dict_meta:
        known = TO_NAME.get(_dtype_of(name, dtype))
        if known is None:
            raise ValueError(
                f"the tensor {name!r} is announced as {dtype}, which safetensors does not have"
            )
        sizes = tuple(operator.index(size) for size in shape)
        if known in PACKED_PER_ITEM and not sizes:
            raise ValueError(
                f"the tensor {name!r} is announced as {dtype} without axes, of which a file cannot "
                "hold the two elements"
            )
        if min(sizes, default=0) < 0:
            raise ValueError(f"the tensor {name!r} is announced with the shape {sizes}")
        if name in entries:
            raise ValueError(f"the tensor {name!r} is announced twice")
        if name == "__metadata__" or not _is_text(name):
            raise ValueError(
                f"the tensor {name!r} is announced under a name that safetensors does not allow"
            )
        meta = TensorMeta(name, known, sizes)
        entries[name] = Entry(*meta, meta.num_bytes)
    return entries


def _dtype_of(name: str, dtype: torch.dtype | str) -> torch.dtype:
    try:
        return as_torch_dtype(dtype)
    except ValueError as error:
        raise ValueError(
            f"the tensor {name!r} is announced with an unknown dtype: {error}"
        ) from error


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()


def _index(entries: Collection[Entry], layout: StreamLayout, names: Sequence[str]) -> bytes:
    total_bytes = sum(entry.num_bytes for entry in entries)
    total_parameters = sum(math.prod(stored_shape(entry.dtype, entry.shape)) for entry in entries)
    files = {name: names[number] for name, (number, _) in layout.places.items()}
    return hf_names.index_json(files, total_bytes, total_parameters)


def _check_has_no_export(location: str) -> None:
    """Refuse a file, and an export on an object store."""
    if not locations.exists(location):
        return
    if not locations.isdir(location):
        raise _in_the_way(location)
    if not locations.is_local(location):
        for name in filter(hf_names.belongs_to_export, locations.list_names(location)):
            raise _in_the_way(locations.join(location, name))


def _in_the_way(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{path!r} is there already: remove it, or choose another place.")


# ---- files, which local disks take in any order, and object stores in order


class StreamLayout(NamedTuple):
    """The layout of all files.

    It has the header and size of each file, and by name the file and entry of each tensor, in
    order.
    """

    headers: list[bytes]
    num_bytes: list[int]
    places: dict[str, tuple[int, Entry]]


def _lay_out(groups: Sequence[Sequence[Entry]], metadata: Mapping[str, str] | None) -> StreamLayout:
    """Lay out one file for each group of tensors."""
    texts = {"format": "pt", **(metadata or {})}
    for key, value in texts.items():
        if not (_is_text(key) and _is_text(value)):
            raise ValueError(f"header metadata holds texts only, {key!r} is not one")
    layout = StreamLayout([], [], {})
    for number, group in enumerate(groups):
        entries = _aligned(group)
        header, first_bytes = build_header(entries, texts)
        layout.headers.append(header)
        layout.num_bytes.append(len(header) + sum(entry.num_bytes for entry in entries))
        for entry, first_byte in zip(entries, first_bytes, strict=True):
            layout.places[entry.name] = number, entry._replace(first_byte=first_byte)
    return layout


def _aligned(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Keep the announced order, unless items would be unaligned.

    Tensors mostly come in this order.
    """
    position = 0
    for entry in entries:
        if position % ITEM_BYTES[entry.dtype]:
            return [entries[i] for i in layout_order(entries)]
        position += entry.num_bytes
    return entries


class _Files:
    """Files of a layout, of which one at a time is open.

    There may be more than a process may open.
    """

    def __init__(self, paths: Sequence[str], layout: StreamLayout) -> None:
        self._paths = paths
        self._layout = layout
        self._created: list[str] = []
        self._location = ""
        self._file: Any = None

    def finish(self) -> None:
        """Complete all files."""
        self._close()

    def remove(self) -> None:
        """Remove the files."""
        # An open file of an object store becomes visible when it is closed, at the latest by the
        # garbage collector: close, then remove.
        with contextlib.suppress(Exception):
            self._close()
        for location in self._created:
            locations.remove_file(location)

    def _close(self) -> None:
        # It is closed whatever its closing reports.
        file = self._file
        self._file = None
        if file is not None:
            with locations.naming(self._location):
                file.close()


class _LocalFiles(_Files):
    """Local files of known layout, whose tensors come in any order."""

    def create(self) -> None:
        # A full disk is found before the first tensor comes.
        headers = self._layout.headers
        sizes = self._layout.num_bytes
        for location, header, num_bytes in zip(self._paths, headers, sizes, strict=True):
            create_file(location, header, num_bytes)
            self._created.append(location)

    def write(self, file: int, entry: Entry, tensor: torch.Tensor) -> None:
        location = self._paths[file]
        if self._file is None or self._location != location:
            self._close()
            self._file = open(location, "r+b", buffering=0)  # noqa: SIM115  # See `_close`.
            self._location = location
        position = entry.first_byte
        with locations.naming(location):
            for window in _windows(tensor):
                write_all(self._file.fileno(), [window], position)
                position += len(window)

    def finish(self) -> None:
        super().finish()
        for location in self._paths:
            with locations.naming(location), open(location, "r+b", buffering=0) as file:
                os.fsync(file.fileno())


class _RemoteFiles(_Files):
    """Files of an object store, which are written from beginning to end."""

    def create(self) -> None:
        self._next_places = iter(self._layout.places.values())
        self._begin_next()

    def write(self, file: int, entry: Entry, tensor: torch.Tensor) -> None:
        expected_file, expected = next(self._next_places)
        if entry != expected:
            raise ValueError(
                f"the tensor {entry.name!r} came where {expected.name!r} has its place; "
                f"{self._paths[expected_file]!r} can only be written in order: give the "
                "tensors in this order, or write to a local file"
            )
        if file == len(self._created):
            self._begin_next()
        for window in _windows(tensor):
            self._file.write(memoryview(window))

    def remove(self) -> None:
        super().remove()
        # Their parts, if closing has failed.
        for location in self._created:
            locations.remove_tree(location)

    def _begin_next(self) -> None:
        self._close()
        number = len(self._created)
        self._location = self._paths[number]
        self._file = object_store.at(self._location).open_for_writing()
        self._created.append(self._location)
        self._file.write(self._layout.headers[number])


@contextlib.contextmanager
def _written_files(
    paths: Sequence[str],
    layout: StreamLayout,
    tensor_iter: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[None]:
    """Write files of a layout from tensors that come, before the body.

    They are removed when this or the body raises.

    Raises:
        ValueError: announced tensors are missing, or other tensors have come.
    """
    files: _LocalFiles | _RemoteFiles = _RemoteFiles(paths, layout)
    if locations.is_local(paths[0]):
        files = _LocalFiles(paths, layout)
    awaited = dict.fromkeys(layout.places)
    try:
        files.create()
        for name, tensor in tensor_iter:
            _check(layout, awaited, name, tensor)
            files.write(*layout.places[name], tensor.detach())
            del awaited[name]
            # Its memory is needed for the next one.
            del tensor
        if awaited:
            raise ValueError(
                f"{len(awaited)} of {len(layout.places)} announced tensors were not written: "
                f"{summarize_keys(awaited)}"
            )
        files.finish()
        yield
    except BaseException:
        files.remove()
        raise


def _check(
    layout: StreamLayout, awaited: Mapping[str, None], name: str, tensor: torch.Tensor
) -> None:
    if name not in layout.places:
        raise ValueError(
            f"the tensor {name!r} came but was not "
            f"announced{did_you_mean(str(name), layout.places)}"
        )
    if name not in awaited:
        raise ValueError(f"the tensor {name!r} came twice")
    if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "to_local"):
        raise ValueError(
            f"{name!r} came as a {type(tensor).__name__}: give plain tensors (of a DTensor "
            "full_tensor())"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"the tensor {name!r} came as {tensor.dtype} in {tensor.layout} on {tensor.device}: "
            "not dense"
        )
    _, entry = layout.places[name]
    dtype = TO_NAME.get(tensor.dtype, str(tensor.dtype))
    shape = tuple(tensor.shape)
    if (dtype, shape) != (entry.dtype, entry.shape):
        raise ValueError(
            f"the tensor {name!r} came as {dtype} {shape}, but was announced as {entry.dtype} "
            f"{entry.shape}"
        )


def _windows(tensor: torch.Tensor) -> Iterator[Bytes]:
    """Divide a tensor into its bytes, a window at a time."""
    for chunk in chunk_tensor_by_memory(tensor, UNIT_BYTES):
        yield tensor_bytes(to_plain_memory(chunk))
