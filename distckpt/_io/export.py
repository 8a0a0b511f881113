"""Writing output files: ranges of a checkpoint's chunks, through a bounded window, in their new place."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_lossless_cast, is_summed
from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import Bytes, bounce_buffer
from distckpt._base.threads import NUM_THREADS, UNIT_BYTES
from distckpt._format import safetensors_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.mapped import resolve, target_view
from distckpt._geometry.region import Region, cut_region, flat_range_regions, intersect, whole
from distckpt._io.read import read_chunks_into
from distckpt._io.read_values import read_requests
from distckpt._io.write import Fill, NewFile, Span, WriteSettings, write_files
from distckpt._plan.export import Change, OutputFile, OutputTensor
from distckpt._plan.load import Request
from distckpt._quantization.encode import encode, needs_maximum, regions_to_encode
from distckpt._quantization.numbers import scratch
from distckpt._quantization.quantized import part_regions

_WINDOWS_PER_THREAD = 4
"""Buffers of `UNIT_BYTES` a thread may use at a time: window, bounce buffer with its widening, conversion."""
_COUNTED_AT_ONCE = 1 << 18
"""Elements; counting makes several temporary tensors of 8 bytes an element."""
_ENCODED_AT_ONCE = 1 << 20
"""Elements."""
_counting = threading.Lock()
"""Held while a thread adds to the number of overflows of a tensor, to which others may add as well."""


def num_export_threads(max_inflight_bytes: int) -> int:
    """Return how many threads, one at least, may write output within a limit of memory."""
    return min(NUM_THREADS, max(1, max_inflight_bytes // (_WINDOWS_PER_THREAD * UNIT_BYTES)))


def write_output_file(
    stored: StoredCheckpoint,
    file: OutputFile,
    location: str,
    num_threads: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write one output file at a location that does not exist yet.

    Each thread uses up to four windows of `UNIT_BYTES`. `progress` is called with numbers of bytes, from several
    threads. Returns how many values did not fit the dtype they were converted to, for tensors that have such values.
    """
    entries = [safetensors_file.Entry(t.name, t.dtype, t.shape, t.num_bytes) for t in file.tensors]
    order = safetensors_file.layout_order(entries)
    tensors, entries = [file.tensors[i] for i in order], [entries[i] for i in order]
    header, _ = safetensors_file.build_header(entries, {"format": "pt"})
    overflows: dict[str, int] = {}
    fill = filling(stored, tensors, overflows)
    sizes = [entry.num_bytes for entry in entries]
    settings = WriteSettings(with_checksums=False, num_threads=num_threads, num_requests=num_threads, progress=progress)
    write_files([NewFile(location, header, sizes, fill)], settings)
    return overflows


def filling(stored: StoredCheckpoint, tensors: Sequence[OutputTensor], overflows: dict[str, int]) -> Fill:
    """Return the function that fills a file whose chunks are `tensors`.

    It adds to `overflows`, by name, the number of values that did not fit the dtype they were converted to.
    """
    chunks = [_complete_chunk(stored, tensor) for tensor in tensors]
    to_encode = {tensor.encoded.quantized.parts["codes"].key: tensor for tensor in tensors if tensor.encoded}
    find_maximum = functools.cache(lambda key: _find_maximum(stored, to_encode[key]))

    def fill(unit: Sequence[Span], memory_of_thread: Bytes) -> list[Bytes]:
        filled = memory_of_thread[: sum(span.num_bytes for span in unit)]
        plain: list[tuple[int, Bytes]] = []
        as_read: list[tuple[Span, Bytes]] = []
        begin = 0
        for span in unit:
            memory = filled[begin : begin + span.num_bytes]
            begin += len(memory)
            tensor, chunk, dtype = tensors[span.chunk], chunks[span.chunk], FROM_NAME[tensors[span.chunk].dtype]
            if chunk is not None and len(memory) == tensor.num_bytes:
                plain.append((chunk, memory))
            elif tensor.encoded is not None:
                quantized = tensor.encoded.quantized
                maximum = find_maximum(quantized.parts["codes"].key) if needs_maximum(quantized) else 0.0
                _encode_range(stored, tensor, span, memory, maximum)
            elif not _is_computed(stored, tensor) and is_lossless_cast(FROM_NAME[tensor.mapped.dtype], dtype):
                as_read.append((span, memory))
            elif num_overflows := _read_and_cast(stored, tensor, span, memory):
                with _counting:
                    overflows[tensor.name] = overflows.get(tensor.name, 0) + num_overflows
        read_chunks_into(stored, [chunk for chunk, _ in plain], [memory for _, memory in plain], num_threads=1)
        _read_ranges(stored, tensors, as_read)
        return [filled]

    return fill


def _computed_dtype(stored: StoredCheckpoint, tensor: OutputTensor) -> torch.dtype:
    """Return the dtype that a tensor is read in: that of sums, which are rounded once, is not that of their terms."""
    dtype = FROM_NAME[tensor.mapped.dtype]
    if not _is_computed(stored, tensor):
        return dtype
    return torch.float64 if stored.sources or dtype == torch.float64 else torch.float32


def _is_computed(stored: StoredCheckpoint, tensor: OutputTensor) -> bool:
    dtype = FROM_NAME[tensor.mapped.dtype]
    return dtype.is_floating_point and is_summed(dtype) and bool(stored.sources or tensor.change)


def _complete_chunk(stored: StoredCheckpoint, tensor: OutputTensor) -> int | None:
    """Return the chunk whose bytes are exactly those of a tensor, None when there is no such chunk."""
    part = tensor.mapped.parts[0] if len(tensor.mapped.parts) == 1 else None
    is_computed = stored.sources or tensor.encoded or tensor.change or tensor.dtype != tensor.mapped.dtype
    if part is None or part.add or is_computed or part.order != tuple(range(len(part.order))):
        return None
    chunks = stored.chunks_of(part.key)
    is_whole = part.source.shape == stored.global_shape(part.key) and part.target.shape == tensor.mapped.shape
    has_one = len(chunks) == 1 and int(stored.manifest.num_bytes[chunks[0]]) == tensor.num_bytes
    return chunks[0] if is_whole and has_one and chunks[0] not in stored.quantized else None


def _read_ranges(
    stored: StoredCheckpoint, tensors: Sequence[OutputTensor], ranges: Sequence[tuple[Span, Bytes]]
) -> None:
    """Read ranges of output tensors, in their dtypes, into the memory beside each."""
    wanted: list[tuple[OutputTensor, Region, torch.Tensor]] = []
    for span, memory in ranges:
        mapped, dtype = tensors[span.chunk].mapped, FROM_NAME[tensors[span.chunk].dtype]
        values = torch.from_numpy(memory).view(dtype)
        if mapped.padding:
            memory[:] = 0
        first, last = span.start // dtype.itemsize, span.stop // dtype.itemsize
        done = 0
        for region in flat_range_regions(mapped.shape, first, last):
            view = values[done : done + region.num_elements].view(region.shape)
            done += region.num_elements
            wanted.append((tensors[span.chunk], region, view))
    _read_regions(stored, wanted)


def _read_regions(stored: StoredCheckpoint, wanted: Sequence[tuple[OutputTensor, Region, torch.Tensor]]) -> None:
    """Read regions of tensors, each into a view of its shape."""
    found = [
        (target_view(view, *pair), pair[1])
        for tensor, region, view in wanted
        for pair in resolve(tensor.mapped, region)
    ]
    requests = [Request(part.key, stored.global_shape(part.key), part.source) for _, part in found]
    views = [view for view, _ in found]
    read_requests(stored, requests, views)
    for view, part in found:
        if part.add:
            view.add_(part.add)
    for tensor, region, view in wanted:
        if tensor.change is not None:
            _apply(tensor.change, region, view)


def _apply(change: Change, region: Region, view: torch.Tensor) -> None:
    """Change a region of a tensor as an adapter says."""

    def read(key: str, place: Region) -> torch.Tensor:
        values = torch.empty(place.shape, dtype=FROM_NAME[change.adapter.dtype_name(key)])
        request = Request(key, change.adapter.global_shape(key), place)
        read_requests(change.adapter, [request], [values])
        return values.to(view.dtype)

    if change.replacement is not None:
        view.copy_(read(change.replacement, region))
    if change.b is None:
        return
    view = view.T if change.transposed else view
    row, column = region.offset[::-1] if change.transposed else region.offset
    rank = change.adapter.global_shape(change.a)[0]
    b = read(change.b, Region((row, 0), (view.shape[0], rank)))
    view.add_((b @ read(change.a, Region((0, column), (rank, view.shape[1])))).mul_(change.scaling))


def _read_and_cast(stored: StoredCheckpoint, tensor: OutputTensor, span: Span, memory: Bytes) -> int:
    """Read a range, convert it, and count the values that do not fit."""
    source, goal = _computed_dtype(stored, tensor), FROM_NAME[tensor.dtype]
    first, last = span.start // goal.itemsize, span.stop // goal.itemsize
    is_computed = _is_computed(stored, tensor)
    step = UNIT_BYTES // (torch.float64.itemsize if is_computed else source.itemsize)
    overflows = 0
    converted = torch.from_numpy(memory).view(goal)
    for begin in range(first, last, step):
        end = min(begin + step, last)
        wide = bounce_buffer("cast", (end - begin) * source.itemsize)
        bytes_of = Span(0, begin * source.itemsize, end * source.itemsize)
        _read_ranges(stored, [tensor._replace(dtype=TO_NAME[source])], [(bytes_of, wide)])
        values, target = torch.from_numpy(wide).view(source), converted[begin - first : end - first]
        if is_computed and not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
            overflows += _count_overflowed_sums(stored, tensor, begin, values)
        for low in range(0, len(values), _COUNTED_AT_ONCE):
            window, place = values[low : low + _COUNTED_AT_ONCE], target[low : low + _COUNTED_AT_ONCE]
            is_far = source == torch.float64 and goal.is_floating_point and goal.itemsize < 4
            place.copy_(_rounded_to_odd(window) if is_far else window)
            overflows += _count_overflows(window, place)
    return overflows


def _count_overflowed_sums(stored: StoredCheckpoint, tensor: OutputTensor, begin: int, values: torch.Tensor) -> int:
    """Count the results that are not finite though their terms are: smaller ones, in float64, have a finite sum."""
    sources = tuple((source, max(-1.0, min(weight, 1.0)) / len(stored.sources)) for source, weight in stored.sources)
    place = Span(0, begin * torch.float64.itemsize, (begin + len(values)) * torch.float64.itemsize)
    again = bounce_buffer("smaller terms", place.num_bytes)
    _read_ranges(stored._replace(sources=sources), [tensor._replace(dtype="F64")], [(place, again)])
    return int((torch.from_numpy(again).view(torch.float64).isfinite() & ~values.isfinite()).sum())


def _read_values(stored: StoredCheckpoint, tensor: OutputTensor, region: Region) -> torch.Tensor:
    """Read a region of a tensor that is to be quantised, with the axes of the quantised form, as float32."""
    assert tensor.encoded is not None
    quantized = tensor.encoded.quantized
    values = scratch("to encode", region.shape, torch.float32)
    if tensor.mapped.padding:
        values.zero_()
    view = values.transpose(-2, -1) if quantized.transposed else values
    _read_regions(stored, [(tensor, quantized.to_model(region), view)])
    return values


def _find_maximum(stored: StoredCheckpoint, tensor: OutputTensor) -> float:
    """Return the largest magnitude in a tensor that is to be quantised."""
    assert tensor.encoded is not None
    pieces = cut_region(whole(tensor.encoded.quantized.shape), _ENCODED_AT_ONCE)
    return max(float(_read_values(stored, tensor, piece).abs_().max()) for piece in pieces)


def _encode_range(stored: StoredCheckpoint, tensor: OutputTensor, span: Span, memory: Bytes, maximum: float) -> None:
    """Quantise what a range of a part is made of."""
    assert tensor.encoded is not None
    (quantized, role), dtype = tensor.encoded, FROM_NAME[tensor.dtype]
    content, done = torch.from_numpy(memory).view(dtype), 0
    for wanted in flat_range_regions(tensor.shape, span.start // dtype.itemsize, span.stop // dtype.itemsize):
        target = content[done : done + wanted.num_elements].view(wanted.shape)
        done += wanted.num_elements
        for region in regions_to_encode(quantized, role, wanted, _ENCODED_AT_ONCE):
            try:
                part = encode(quantized, _read_values(stored, tensor, region), region, maximum)[role]
            except ValueError as error:
                raise CheckpointingException(
                    f"{tensor.name!r} cannot be quantised: {error}, in region {region} of the tensor it is made of. "
                    "Leave the tensor out of `quantize`, or correct it."
                ) from error
            place = part_regions(quantized, region)[role]
            common = intersect(place, wanted)
            if common is not None:
                part = part.contiguous().view(dtype).view(place.shape)
                target[common.relative_to(wanted.offset).slices()] = part[common.relative_to(place.offset).slices()]


def _rounded_to_odd(values: torch.Tensor) -> torch.Tensor:
    """Shorten float64 values, in place, so that a conversion by way of float32 rounds once to 16 or 8 bits.

    Of the digits that are cut off, the last one that stays says whether there was any (as many as 13 stay).
    """
    bits, cut = values.view(torch.int64), (1 << 40) - 1
    rest = torch.bitwise_and(bits, cut, out=scratch("rest", bits.shape, torch.int64))
    bits.bitwise_or_(rest.add_(cut)).bitwise_and_(~cut)
    return values


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
    info = torch.finfo(dtype)
    # What is less than half a unit in the last place above the largest number is rounded to it. Some 8-bit floats
    # hold their largest number, or NaN, in the place of infinities.
    limit = info.max + math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)
    if values.dtype.is_floating_point:
        low, high = values.aminmax()
        if -limit < low.item() <= high.item() < limit:
            return 0
    doubles = values.double()
    beyond = doubles.abs() >= limit
    kept = doubles.isinf() & (converted.real if dtype.is_complex else converted.float()).isinf()
    return int((beyond & ~kept).sum())
