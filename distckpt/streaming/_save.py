"""Writing of safetensors files from tensors that come one at a time.

One tensor is in memory, however large the model is. Names, dtypes and shapes are announced before,
so that every byte has its place before the first tensor comes.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import FROM_NAME, PACKED_PER_ITEM, TO_NAME, as_torch_dtype
from distckpt._base.errors import CheckpointExistsError
from distckpt._base.messages import check_file_bytes
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings, new_output
from distckpt._commit.target import check_replaceable
from distckpt._format import hf_names
from distckpt._format.safetensors_file import Entry, stored_shape
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.streaming._files import StreamLayout, lay_out, written_files

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
    layout = _lay_out([_read_meta(state_dict_meta)], metadata)
    if not locations.is_local(location):
        if not rename:
            raise ValueError(
                f"rename=False needs a local path; {os.fspath(filepath)!r} can only be written in "
                "place"
            )
        if locations.exists(location):
            raise _in_the_way(location)
        with written_files([location], layout, tensor_iter):
            return os.fspath(filepath)
    if os.path.isdir(location):
        raise _in_the_way(location)
    if not rename:
        # Programs look for it there; a file of an earlier call is replaced.
        temporary = f"{location}.tmp"
        locations.remove_file(temporary)
        with written_files([temporary], layout, tensor_iter):
            return temporary
    temporary = locations.temporary_beside(location)
    with written_files([temporary], layout, tensor_iter):
        locations.replace_file(temporary, location)
    return os.fspath(filepath)


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
    metas = {meta.name: meta for meta in _read_meta(state_dict_meta)}
    groups = hf_names.group_keys_by_bytes(
        {name: meta.num_bytes for name, meta in metas.items()}, max_file_bytes
    ) or [[]]
    metas_of_files = []
    for group in groups:
        metas_of_files.append([metas[name] for name in group])
    layout = _lay_out(metas_of_files, metadata)
    names = hf_names.output_filenames(hf_names.BASE_PREFIX, len(groups))
    location = posix.resolve(os.fspath(output_dir))
    posix.put_back(location)
    _check_has_no_export(location)
    check_replaceable(location)
    index_name = hf_names.index_filename(hf_names.BASE_PREFIX)
    with new_output(Ranks.alone(), location, OutputSettings()) as output:
        with output.being_written():
            paths = [locations.join(output.location, name) for name in names]
            with written_files(paths, layout, tensor_iter):
                if len(names) > 1:
                    index = _index(metas.values(), layout, names)
                    locations.write_bytes(locations.join(output.location, index_name), index)
                output.sync()
        output.commit_beside_others(hf_names.belongs_to_export)
    return [locations.join(os.fspath(output_dir), name) for name in names]


def _read_meta(state_dict_meta: StateDictMeta) -> list[TensorMeta]:
    metas: dict[str, TensorMeta] = {}
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
        if name in metas or name == "__metadata__" or not _is_text(name):
            problem = "twice" if name in metas else "under a name that safetensors does not allow"
            raise ValueError(f"the tensor {name!r} is announced {problem}")
        metas[name] = TensorMeta(name, known, sizes)
    return list(metas.values())


def _dtype_of(name: str, dtype: torch.dtype | str) -> torch.dtype:
    try:
        return as_torch_dtype(dtype)
    except ValueError as error:
        raise ValueError(
            f"the tensor {name!r} is announced with an unknown dtype: {error}"
        ) from error


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()


def _lay_out(
    groups: Sequence[Sequence[TensorMeta]], metadata: Mapping[str, str] | None
) -> StreamLayout:
    texts = {"format": "pt", **(metadata or {})}
    bad = []
    for key, value in texts.items():
        if not (_is_text(key) and _is_text(value)):
            bad.append(key)
    if bad:
        raise ValueError(f"header metadata holds texts only, {bad[0]!r} is not one")
    entries = []
    for group in groups:
        entries.append([Entry(*meta, meta.num_bytes) for meta in group])
    return lay_out(entries, texts)


def _index(
    metas: Iterable[TensorMeta],
    layout: StreamLayout,
    names: Sequence[str],
) -> bytes:
    total_bytes = sum(meta.num_bytes for meta in metas)
    total_parameters = sum(math.prod(stored_shape(meta.dtype, meta.shape)) for meta in metas)
    return hf_names.index_json(
        {key: names[file] for key, (file, _) in layout.places.items()},
        total_bytes,
        total_parameters,
    )


def _check_has_no_export(location: str) -> None:
    """Refuse a file, and a folder of an object store with an export."""
    if not locations.exists(location):
        return
    if not locations.isdir(location):
        raise _in_the_way(location)
    if not locations.is_local(location):
        for name in filter(hf_names.belongs_to_export, locations.list_names(location)):
            raise _in_the_way(locations.join(location, name))


def _in_the_way(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{path!r} is there already: remove it, or choose another place.")
