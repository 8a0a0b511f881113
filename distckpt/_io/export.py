"""Writing output files: ranges of a checkpoint's chunks, through a bounded window, in their new
place.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, is_lossless_cast, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.memory import Bytes, bounce_buffer
from distckpt._base.threads import NUM_THREADS, UNIT_BYTES
from distckpt._format import safetensors_file
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, flat_range_regions, intersect, whole
from distckpt._geometry.units import Span, cut_region, units_of
from distckpt._io.read import read_chunks_into
from distckpt._io.sums import read_requests, round_once
from distckpt._io.write import Fill, NewFile, WriteSettings, write_files
from distckpt._plan.export import Change, OutputFile, OutputTensor
from distckpt._plan.load import Request
from distckpt._quantization.encode import encode, needs_maximum, regions_to_encode
from distckpt._quantization.numbers import scratch
from distckpt._quantization.quantized import part_regions
from distckpt._rules.mapped import resolve, target_view

_WINDOWS_PER_THREAD = 4
"""Buffers of `UNIT_BYTES` a thread may use at a time: window, bounce buffer with its widening,
conversion.
"""
_COUNTED_AT_ONCE = 1 << 18
"""Elements; counting makes several temporary tensors of 8 bytes an element."""
_ENCODED_AT_ONCE = 1 << 20
"""Elements."""
_counting = threading.Lock()
"""Held while a thread adds to the number of overflows of a tensor, to which others may add as
well.
"""


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

    Each thread uses up to four windows of `UNIT_BYTES`. `progress` is called with numbers of bytes,
    from several threads. Returns how many values did not fit the dtype they were converted to, for
    tensors that have such values.
    """
    entries = [safetensors_file.Entry(t.name, t.dtype, t.shape, t.num_bytes) for t in file.tensors]
    order = safetensors_file.layout_order(entries)
    tensors, entries = [file.tensors[i] for i in order], [entries[i] for i in order]
    header, _ = safetensors_file.build_header(entries, {"format": "pt"})
    overflows: dict[str, int] = {}
    fill = filling(stored, tensors, overflows)
    sizes = [entry.num_bytes for entry in entries]
    settings = WriteSettings(
        with_checksums=False, num_threads=num_threads, num_requests=num_threads, progress=progress
    )
    write_files([NewFile(location, header, sizes, fill)], settings)
    return overflows


def check_tied(
    stored: StoredCheckpoint, pairs: Iterable[tuple[OutputTensor, OutputTensor]]
) -> None:
    """Compare tensors that are stored apart with those that take their places in the export, a
    window at a time.

    Raises:
        LoadMismatchError: they differ.
    """
    for pair in pairs:
        left_out, exported = pair
        kinds = {(each.shape, each.mapped.dtype) for each in pair}
        for region in cut_region(whole(exported.shape), _ENCODED_AT_ONCE):
            views = [
                torch.empty(region.shape, dtype=FROM_NAME[exported.mapped.dtype]) for _ in pair
            ]
            if len(kinds) == 1:
                _read_regions(
                    stored, [(each, region, view) for each, view in zip(pair, views, strict=True)]
                )
            if len(kinds) > 1 or not torch.equal(
                *(view.view(-1).view(torch.uint8) for view in views)
            ):
                raise LoadMismatchError(
                    f"{left_out.name!r} and {exported.name!r} are stored in {stored.location!r} "
                    "and differ; the configuration says that they are one tensor, and only the "
                    "second would be exported. Let tie_word_embeddings be false there, or leave "
                    "out the one that is not of the model with `keys`.",
                    unexpected=[left_out.name],
                )


def filling(
    stored: StoredCheckpoint, tensors: Sequence[OutputTensor], overflows: dict[str, int]
) -> Fill:
    """Return the function that fills a file whose chunks are `tensors`.

    It adds to `overflows`, by name, the number of values that did not fit the dtype they were
    converted to.
    """
    chunks = [_complete_chunk(stored, tensor) for tensor in tensors]
    to_encode = {
        tensor.encoded.quantized.parts["codes"].key: tensor for tensor in tensors if tensor.encoded
    }
    find_maximum = functools.cache(lambda key: _find_maximum(stored, to_encode[key]))

    def fill(unit: Sequence[Span], memory_of_thread: Bytes) -> list[Bytes]:
        filled = memory_of_thread[: sum(span.num_bytes for span in unit)]
        plain: list[tuple[int, Bytes]] = []
        as_read: list[_Range] = []
        to_cast: list[_Range] = []
        begin = 0
        for span in unit:
            memory = filled[begin : begin + span.num_bytes]
            begin += len(memory)
            tensor, chunk = tensors[span.chunk], chunks[span.chunk]
            if chunk is not None and len(memory) == tensor.num_bytes:
                plain.append((chunk, memory))
            elif tensor.encoded is not None:
                quantized = tensor.encoded.quantized
                maximum = (
                    find_maximum(quantized.parts["codes"].key) if needs_maximum(quantized) else 0.0
                )
                _encode_range(stored, tensor, span, memory, maximum)
            else:
                values = torch.from_numpy(memory).view(FROM_NAME[tensor.dtype])
                ranges = as_read if _can_read_as(stored, tensor) else to_cast
                ranges.append(_Range(tensor, span.start // values.itemsize, values))
        read_chunks_into(
            stored, [chunk for chunk, _ in plain], [memory for _, memory in plain], num_threads=1
        )
        _read_ranges(stored, as_read)
        if stored.sources:
            # Sums that overflowed are computed again, to count them.
            to_cast += [
                each
                for each in as_read
                if _is_sum(stored, each.tensor) and not _is_finite(each.values)
            ]
        for tensor, num_overflows in _read_and_cast(stored, to_cast):
            with _counting:
                overflows[tensor.name] = overflows.get(tensor.name, 0) + num_overflows
        return [filled]

    return fill


class _Range(NamedTuple):
    """Flat memory for elements of an output tensor, from the one of index `first` on, in the dtype
    to read them in.
    """

    tensor: OutputTensor
    first: int
    values: torch.Tensor


def _can_read_as(stored: StoredCheckpoint, tensor: OutputTensor) -> bool:
    """Tell whether a tensor can be read in its dtype in the output, with no loss beyond the one
    rounding of a sum.
    """
    dtype, target = FROM_NAME[tensor.mapped.dtype], FROM_NAME[tensor.dtype]
    if _is_sum(stored, tensor):
        is_rounded_last = tensor.change is None and not any(
            part.add for part in tensor.mapped.parts
        )
        return is_rounded_last and (target.is_floating_point or target.is_complex)
    return tensor.change is None and is_lossless_cast(dtype, target)


def _computed_dtype(stored: StoredCheckpoint, tensor: OutputTensor) -> torch.dtype:
    """Return the dtype that a tensor is read in: that of sums, which are rounded once, is not that
    of their terms.
    """
    dtype = FROM_NAME[tensor.mapped.dtype]
    if _is_sum(stored, tensor):
        return torch.complex128 if dtype.is_complex else torch.float64
    return torch.promote_types(dtype, torch.float32) if tensor.change else dtype


def _is_sum(stored: StoredCheckpoint, tensor: OutputTensor) -> bool:
    return bool(stored.sources) and is_summed(FROM_NAME[tensor.mapped.dtype])


def _complete_chunk(stored: StoredCheckpoint, tensor: OutputTensor) -> int | None:
    """Return the chunk whose bytes are exactly those of a tensor, None when there is no such
    chunk.
    """
    part = tensor.mapped.parts[0] if len(tensor.mapped.parts) == 1 else None
    is_computed = (
        stored.sources or tensor.encoded or tensor.change or tensor.dtype != tensor.mapped.dtype
    )
    if part is None or part.add or is_computed or part.order != tuple(range(len(part.order))):
        return None
    chunks = stored.chunks_of(part.key)
    is_whole = (
        part.source.shape == stored.global_shape(part.key)
        and part.target.shape == tensor.mapped.shape
    )
    has_one = len(chunks) == 1 and int(stored.manifest.num_bytes[chunks[0]]) == tensor.num_bytes
    return chunks[0] if is_whole and has_one and chunks[0] not in stored.quantized else None


def _read_ranges(stored: StoredCheckpoint, ranges: Sequence[_Range]) -> None:
    wanted: list[tuple[OutputTensor, Region, torch.Tensor]] = []
    for tensor, first, values in ranges:
        if tensor.mapped.padding:
            values.zero_()
        done = 0
        for region in flat_range_regions(tensor.mapped.shape, first, first + len(values)):
            view = values[done : done + region.num_elements].view(region.shape)
            done += region.num_elements
            wanted.append((tensor, region, view))
    _read_regions(stored, wanted)


def _read_regions(
    stored: StoredCheckpoint, wanted: Sequence[tuple[OutputTensor, Region, torch.Tensor]]
) -> None:
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
    ranks = change.adapter.global_shape(change.a)[0]
    num = max(change.num_experts, 1)
    b = read(change.b, Region((row + change.first_row, 0), (view.shape[0], ranks)))[
        :, change.expert :: num
    ]
    a = read(
        change.a, Region((change.expert * (ranks // num), column), (ranks // num, view.shape[1]))
    )
    view.add_((b * change.scaling) @ a)


def _read_and_cast(
    stored: StoredCheckpoint, ranges: Sequence[_Range]
) -> Iterator[tuple[OutputTensor, int]]:
    """Read ranges and convert them; yield numbers of values that do not fit."""
    dtypes = [_computed_dtype(stored, tensor) for tensor, _, _ in ranges]
    # Places in memory fit any dtype.
    sizes = [
        -(-len(target) * dtype.itemsize // 16) * 16
        for (_, _, target), dtype in zip(ranges, dtypes, strict=True)
    ]
    for unit in units_of(sizes, UNIT_BYTES, 16):
        memory = torch.from_numpy(bounce_buffer("cast", UNIT_BYTES))
        wide: list[_Range] = []
        targets: list[torch.Tensor] = []
        begin = 0
        for span in unit:
            (tensor, first, target), dtype = ranges[span.chunk], dtypes[span.chunk]
            start, stop = span.start // dtype.itemsize, span.stop // dtype.itemsize
            targets.append(target[start:stop])
            values = memory[begin : begin + span.num_bytes].view(dtype)[: len(targets[-1])]
            wide.append(_Range(tensor, first + start, values))
            begin += span.num_bytes
        _read_ranges(stored, wide)
        for each, target in zip(wide, targets, strict=True):
            if num_overflows := _count_overflowed_sums(stored, each) + _cast(each.values, target):
                yield each.tensor, num_overflows


def _cast(values: torch.Tensor, target: torch.Tensor) -> int:
    """Convert values, and count those that do not fit."""
    overflows = 0
    for low in range(0, len(values), _COUNTED_AT_ONCE):
        window, place = values[low : low + _COUNTED_AT_ONCE], target[low : low + _COUNTED_AT_ONCE]
        round_once(window, place)
        overflows += _count_overflows(window, place)
    return overflows


def _count_overflowed_sums(stored: StoredCheckpoint, computed: _Range) -> int:
    """Count the results that are not finite though all of their terms are: these times 0 are 0, and
    others not.
    """
    tensor, first, values = computed
    if not (tensor.change or _is_sum(stored, tensor)) or _is_finite(values):
        return 0
    nothing = stored._replace(
        sources=tuple((source, 0.0) for source, _ in stored.sources or [(stored, 0.0)])
    )
    change = tensor.change and tensor.change._replace(scaling=0.0)
    zeros = scratch("zeros", values.shape, torch.promote_types(values.dtype, torch.float64))
    _read_ranges(nothing, [_Range(tensor._replace(change=change), first, zeros)])
    return int((zeros.isfinite() & ~values.isfinite()).sum())


def _is_finite(values: torch.Tensor) -> bool:
    if values.dtype.is_complex:
        values = values.view(values.dtype.to_real())
    elif values.itemsize == 1:
        values = values.float()
    return len(values) == 0 or all(math.isfinite(limit.item()) for limit in values.aminmax())


def _read_values(stored: StoredCheckpoint, tensor: OutputTensor, region: Region) -> torch.Tensor:
    """Read a region of a tensor that is to be quantized, with the axes of the quantized form, as
    float32.
    """
    assert tensor.encoded is not None
    quantized = tensor.encoded.quantized
    values = scratch("to encode", region.shape, torch.float32)
    if tensor.mapped.padding:
        values.zero_()
    view = values.transpose(-2, -1) if quantized.transposed else values
    _read_regions(stored, [(tensor, quantized.to_model(region), view)])
    return values


def _find_maximum(stored: StoredCheckpoint, tensor: OutputTensor) -> float:
    """Return the largest magnitude in a tensor that is to be quantized."""
    assert tensor.encoded is not None
    pieces = cut_region(whole(tensor.encoded.quantized.shape), _ENCODED_AT_ONCE)
    return max(float(_read_values(stored, tensor, piece).abs_().max()) for piece in pieces)


def _encode_range(
    stored: StoredCheckpoint, tensor: OutputTensor, span: Span, memory: Bytes, maximum: float
) -> None:
    """Quantize what a range of a part is made of."""
    assert tensor.encoded is not None
    (quantized, role), dtype = tensor.encoded, FROM_NAME[tensor.dtype]
    content, done = torch.from_numpy(memory).view(dtype), 0
    for wanted in flat_range_regions(
        tensor.shape, span.start // dtype.itemsize, span.stop // dtype.itemsize
    ):
        target = content[done : done + wanted.num_elements].view(wanted.shape)
        done += wanted.num_elements
        for region in regions_to_encode(quantized, role, wanted, _ENCODED_AT_ONCE):
            try:
                part = encode(quantized, _read_values(stored, tensor, region), region, maximum)[
                    role
                ]
            except ValueError as error:
                raise CheckpointingException(
                    f"{tensor.name!r} cannot be quantized: {error}, in region {region} of the "
                    "tensor it is made of. Leave the tensor out of `quantize`, or correct it."
                ) from error
            place = part_regions(quantized, region)[role]
            common = intersect(place, wanted)
            if common is not None:
                part = part.contiguous().view(dtype).view(place.shape)
                target[common.relative_to(wanted.offset).slices()] = part[
                    common.relative_to(place.offset).slices()
                ]


def _count_overflows(values: torch.Tensor, converted: torch.Tensor) -> int:
    """Count the values beyond the range of what they were converted to; infinities may stay
    infinite.
    """
    dtype = converted.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        if values.dtype.is_floating_point:
            doubles = values.double().trunc()
            return len(values) - int(((doubles >= limits.min) & (doubles < limits.max + 1.0)).sum())
        integers = values.numpy()
        return len(values) - int(((integers >= limits.min) & (integers <= limits.max)).sum())
    info = torch.finfo(dtype)
    # What is less than half a unit in the last place above the largest number is rounded to it.
    # Some 8-bit floats hold their largest number, or NaN, in the place of infinities.
    limit = info.max + math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)
    if values.dtype.is_floating_point:
        low, high = values.aminmax()
        if -limit < low.item() <= high.item() < limit:
            return 0
    if values.dtype.is_complex:
        values, converted = (
            values.view(-1, 1).view(values.dtype.to_real()),
            converted.view(-1, 1).view(dtype.to_real()),
        )
    doubles = values.double()
    beyond = doubles.abs() >= limit
    kept = (
        doubles.isinf() & (converted.real if converted.is_complex() else converted.float()).isinf()
    )
    return int((beyond & ~kept).view(len(values), -1).any(1).sum())
