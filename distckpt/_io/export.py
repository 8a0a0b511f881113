"""Writing output files: ranges of a checkpoint's chunks, through a bounded window, in their new place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast
from distckpt._base.memory import Bytes, bounce_buffer
from distckpt._base.threads import UNIT_BYTES
from distckpt._format import safetensors_file
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray, flat_range_regions
from distckpt._io.read import read_chunks_into, read_copies
from distckpt._io.write import Fill, NewFile, Span, WriteSettings, write_files
from distckpt._plan.export import OutputFile, OutputTensor
from distckpt._plan.load import Request, plan_load
from distckpt.rules import resolve, target_view

_COUNTED_AT_ONCE = 1 << 17
"""Elements; counting makes several temporary tensors of 8 bytes an element."""


class Source(NamedTuple):
    """Where an export reads: the location, its manifest, and how reads are verified."""

    location: str
    manifest: Manifest
    verify: str


def write_output_file(
    source: Source,
    file: OutputFile,
    location: str,
    num_threads: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write one output file.

    Args:
        source: what to read.
        file: what it holds.
        location: must not exist.
        num_threads: each uses up to four windows of `UNIT_BYTES`.
        progress: told the number of bytes whenever some have been written, from several threads.

    Returns:
        For each tensor in which values did not fit the dtype they were converted to, how many.
    """
    entries = [safetensors_file.Entry(t.name, t.dtype, t.mapped.shape, t.num_bytes) for t in file.tensors]
    order = safetensors_file.layout_order(entries)
    tensors, entries = [file.tensors[i] for i in order], [entries[i] for i in order]
    header, _ = safetensors_file.build_header(entries, {"format": "pt"})
    overflows = np.zeros(len(tensors), np.int64)
    fill = filling(source, tensors, overflows)
    sizes = [entry.num_bytes for entry in entries]
    settings = WriteSettings(with_checksums=False, num_threads=num_threads, num_requests=num_threads, progress=progress)
    write_files([NewFile(location, header, sizes, fill)], settings)
    return {tensors[i].name: int(overflows[i]) for i in np.flatnonzero(overflows).tolist()}


def filling(source: Source, tensors: Sequence[OutputTensor], overflows: IntArray) -> Fill:
    """Return what fills a file.

    Args:
        source: what to read.
        tensors: the chunks of the file, one after the other.
        overflows: for each of them, added to: the values that did not fit the dtype they were converted to.
    """
    chunks = _whole_chunks(source.manifest, tensors)

    def fill(unit: Sequence[Span], scratch: Bytes) -> list[Bytes]:
        filled = scratch[: sum(part.num_bytes for part in unit)]
        plain: list[tuple[int, Bytes]] = []
        others: list[tuple[Span, Bytes]] = []
        begin = 0
        for part in unit:
            memory = filled[begin : begin + part.num_bytes]
            begin += len(memory)
            chunk = chunks[part.chunk]
            if chunk is not None and len(memory) == tensors[part.chunk].num_bytes:
                plain.append((chunk, memory))
            else:
                others.append((part, memory))
        read_chunks_into(source.location, source.manifest, *_columns(plain), source.verify, num_threads=1)
        _read_ranges(source, tensors, [pair for pair in others if not _is_cast(tensors[pair[0].chunk])])
        for part, memory in others:
            if _is_cast(tensors[part.chunk]):
                overflows[part.chunk] += _read_and_cast(source, tensors, part, memory)
        return [filled]

    return fill


def _columns(pairs: Sequence[tuple[int, Bytes]]) -> tuple[list[int], list[Bytes]]:
    return [chunk for chunk, _ in pairs], [memory for _, memory in pairs]


def _is_cast(tensor: OutputTensor) -> bool:
    return tensor.dtype != tensor.mapped.dtype


def _whole_chunks(manifest: Manifest, tensors: Sequence[OutputTensor]) -> list[int | None]:
    """Return for each tensor the chunk whose bytes are exactly its own, None when there is no such chunk."""
    rows, num_bytes = manifest.key_starts.tolist(), manifest.num_bytes.tolist()
    chunks: list[int | None] = []
    for tensor in tensors:
        chunk = None
        if len(tensor.mapped.parts) == 1 and not _is_cast(tensor):
            part = tensor.mapped.parts[0]
            key_id = manifest.key_index[part.key]
            row = rows[key_id]
            # One whole tensor becomes another, and there is one chunk, which is as large.
            is_whole = part.source.shape == manifest.global_shapes[key_id] and part.target.shape == tensor.mapped.shape
            in_order = part.order == tuple(range(len(part.order)))
            if is_whole and in_order and rows[key_id + 1] == row + 1 and num_bytes[row] == tensor.num_bytes:
                chunk = row
        chunks.append(chunk)
    return chunks


def _read_ranges(source: Source, tensors: Sequence[OutputTensor], ranges: Sequence[tuple[Span, Bytes]]) -> None:
    """Read ranges of output tensors, in the dtype they are stored in, into the memory beside each."""
    requests: list[Request] = []
    targets: list[torch.Tensor] = []
    for part, memory in ranges:
        mapped = tensors[part.chunk].mapped
        dtype = FROM_NAME[mapped.dtype]
        values = torch.from_numpy(memory).view(dtype)
        if mapped.padding:
            memory[:] = 0
        first, last = part.start // dtype.itemsize, part.stop // dtype.itemsize
        done = 0
        for run in flat_range_regions(mapped.shape, first, last):
            view = values[done : done + run.num_elements].view(run.shape)
            done += run.num_elements
            for place, piece in resolve(mapped, run):
                shape = source.manifest.global_shapes[source.manifest.key_index[piece.key]]
                requests.append(Request(piece.key, shape, piece.source))
                targets.append(target_view(view[place.slices()], piece))
    copies = plan_load(source.manifest, requests, source.location)
    read_copies(source.location, source.manifest, copies, targets, source.verify, num_threads=1)


def _read_and_cast(source: Source, tensors: Sequence[OutputTensor], part: Span, memory: Bytes) -> int:
    """Read a range, convert it, and count the values that do not fit."""
    tensor = tensors[part.chunk]
    stored, wanted = FROM_NAME[tensor.mapped.dtype], FROM_NAME[tensor.dtype]
    first, last = part.start // wanted.itemsize, part.stop // wanted.itemsize
    step = UNIT_BYTES // stored.itemsize
    overflows = 0
    converted = torch.from_numpy(memory).view(wanted)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        wide = bounce_buffer("cast", (end - begin) * stored.itemsize)
        bytes_of = Span(part.chunk, begin * stored.itemsize, end * stored.itemsize)
        _read_ranges(source, tensors, [(bytes_of, wide)])
        values, target = torch.from_numpy(wide).view(stored), converted[begin - first : end - first]
        target.copy_(values)
        if not is_lossless_cast(stored, wanted):
            for low in range(0, len(values), _COUNTED_AT_ONCE):
                high = low + _COUNTED_AT_ONCE
                overflows += _count_overflows(values[low:high], target[low:high])
    return overflows


def _count_overflows(values: torch.Tensor, converted: torch.Tensor) -> int:
    """Count the values beyond the range of what they were converted to; infinities may stay infinite."""
    dtype = converted.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        if values.dtype.is_floating_point:
            doubles = values.double().trunc()
            return len(values) - int(((doubles >= limits.min) & (doubles < limits.max + 1.0)).sum())
        integers = values.numpy()
        return len(values) - int(((integers >= limits.min) & (integers <= limits.max)).sum())
    doubles, info = values.double(), torch.finfo(dtype)
    # What is less than half a unit in the last place above the largest number is rounded to it. Some 8-bit floats
    # hold their largest number, or NaN, in the place of infinities.
    beyond = doubles.abs() >= info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2
    kept = doubles.isinf() & (converted.real if dtype.is_complex else converted.float()).isinf()
    return int((beyond & ~kept).sum())
