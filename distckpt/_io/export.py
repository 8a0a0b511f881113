"""Writing of export files, one bounded window of tensors at a time."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.memory import Bytes, bounce_buffer, in_huge_pages
from distckpt._base.threads import UNIT_BYTES, Progress, num_threads_within
from distckpt._format.columns import joined_ranges
from distckpt._geometry.region import flat_range_regions, whole
from distckpt._geometry.units import Unit, cut_region, sizes_of, units_of
from distckpt._io.read import read_parts
from distckpt._io.read_parts import ReadPart
from distckpt._io.tensor_source import TensorSource, Wanted
from distckpt._io.write import Fill, NewFile, WriteSettings
from distckpt._plan.export import OutputFile, OutputTensor
from distckpt._quantization.numbers import scratch
from distckpt.rules._mapped import same_as

_WINDOWS_PER_THREAD = 4
"""Buffers of `UNIT_BYTES` that a thread may use at a time: window, bounce buffer with its widening,
conversion.
"""
_SHARE_OF_BAND = 5
"""Three bands, and windows, share the memory."""
_COMPARED_AT_ONCE = 1 << 20
"""Elements of two tensors that are compared at a time."""
_counting = threading.Lock()
"""Lock for adding to the overflow counts, which threads share."""


def num_export_threads(max_inflight_bytes: int) -> int:
    """Return the number of threads within a memory limit, at least one."""
    return num_threads_within(max_inflight_bytes // _WINDOWS_PER_THREAD)


def export_settings(num_threads: int, progress: Progress | None = None) -> WriteSettings:
    """Return the write settings of an export's files.

    Each thread uses up to four windows of `UNIT_BYTES`. `progress` is called with numbers of bytes,
    from several threads.
    """
    return WriteSettings(
        with_checksums=False, num_threads=num_threads, num_requests=num_threads, progress=progress
    )


def output_file(
    source: TensorSource,
    file: OutputFile,
    location: str,
    overflows: dict[str, int],
    max_inflight_bytes: int,
) -> NewFile:
    """Describe a file for a location where none is yet; writing it fills `overflows`."""
    tensors, header = file.laid_out
    fill = filling(source, tensors, overflows, max_inflight_bytes // _SHARE_OF_BAND)
    return NewFile(location, header, [tensor.num_bytes for tensor in tensors], fill)


def differing(
    source: TensorSource, pairs: Iterable[tuple[OutputTensor, OutputTensor]]
) -> list[str]:
    """Return the first names of tensor pairs with different values.

    Tensors are compared a window at a time.
    """
    return [one.name for one, other in pairs if not _are_equal(source, one, other)]


def _are_equal(source: TensorSource, one: OutputTensor, other: OutputTensor) -> bool:
    if (one.shape, one.mapped.dtype) != (other.shape, other.mapped.dtype):
        return False
    dtype = FROM_NAME[one.mapped.dtype]
    for region in cut_region(whole(one.shape), _COMPARED_AT_ONCE):
        views = [torch.empty(region.shape, dtype=dtype, device="cpu") for _ in range(2)]
        source.read([Wanted(one, region, views[0]), Wanted(other, region, views[1])])
        if not torch.equal(*(view.view(-1).view(torch.uint8) for view in views)):
            return False
    return True


# --- Filling files --------------------------------------------------------------------------------


class _Range(NamedTuple):
    """Flat memory for elements of an output tensor.

    It holds the elements from index `first` on, in the dtype to read.
    """

    tensor: OutputTensor
    first: int
    values: torch.Tensor


def filling(
    source: TensorSource,
    tensors: Sequence[OutputTensor],
    overflows: dict[str, int],
    band_bytes: int = 0,
) -> Fill:
    """Return the function that fills a file whose chunks are `tensors`.

    It adds to `overflows`, by name, the number of values that did not fit the dtype they were
    converted to. `band_bytes` is for transposed tensors, see `_Bands`.
    """
    bands = _Bands(source, band_bytes)

    def fill(unit: Unit, memory_of_thread: Bytes) -> list[Bytes]:
        filled = memory_of_thread[: sum(sizes_of(unit))]
        copied, as_read, to_cast = _divide(source, tensors, unit, filled)
        read_parts(source.stored, copied, num_threads=1)
        bands.read(as_read)
        to_cast += _overflowed(source, as_read)
        for tensor, num_overflows in _read_and_cast(source, bands, to_cast):
            with _counting:
                overflows[tensor.name] = overflows.get(tensor.name, 0) + num_overflows
        return [filled]

    return fill


class _Bands:
    """Rows of transposed tensors, of which two bands stay in memory.

    These rows are columns of stored tensors: to read a few costs as much as to read many. Threads
    share the bands, since their units follow each other.
    """

    def __init__(self, source: TensorSource, num_bytes: int) -> None:
        self._source = source
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._bands: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def read(self, ranges: Sequence[_Range]) -> None:
        """Read ranges, those of transposed tensors by bands."""
        direct = []
        for piece in ranges:
            is_small = piece.values.nbytes < self._num_bytes
            if is_small and _is_transposed(self._source, piece):
                self._copy(*piece)
            else:
                direct.append(piece)
        _read_directly(self._source, direct)

    def _copy(self, tensor: OutputTensor, first: int, values: torch.Tensor) -> None:
        size = self._num_bytes // values.itemsize
        row = tensor.num_elements // tensor.shape[0]
        # A part of a row is read by itself.
        size = size // row * row or size
        while len(values):
            place = first % size
            band = self._band(tensor, first - place, size, values.dtype)
            found = band[place : place + len(values)]
            values[: len(found)] = found
            values = values[len(found) :]
            first += len(found)

    def _band(
        self, tensor: OutputTensor, first: int, size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        key = (tensor.name, first, dtype)
        with self._lock:
            if key not in self._bands:
                while len(self._bands) > 1:
                    del self._bands[next(iter(self._bands))]
                size = min(size, tensor.num_elements - first)
                # Memory of malloc would stay in the heaps of all threads.
                memory = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                values = in_huge_pages(torch.frombuffer(memory, dtype=dtype))
                _read_directly(self._source, [_Range(tensor, first, values)])
                self._bands[key] = values
            return self._bands[key]


def _is_transposed(source: TensorSource, piece: _Range) -> bool:
    """Whether a range is a part of a transposed tensor."""
    tensor = piece.tensor
    if len(piece.values) == tensor.num_elements or not source.is_stored(tensor):
        return False
    # All parts are alike.
    return any(list(part.order) != sorted(part.order) for part in tensor.mapped.parts[:1])


def _divide(
    source: TensorSource, tensors: Sequence[OutputTensor], unit: Unit, filled: Bytes
) -> tuple[list[ReadPart], list[_Range], list[_Range]]:
    """Divide the memory for a unit by kind of work.

    Bytes of whole chunks are copied; other ranges are read in the dtype of the export, or in
    another one and converted.
    """
    copied: list[ReadPart] = []
    as_read: list[_Range] = []
    to_cast: list[_Range] = []
    begin = 0
    for span, chunks in zip(unit, _copied_chunks(source, tensors, unit), strict=True):
        for chunk, start, stop in chunks:
            memory = filled[begin + start : begin + stop]
            copied.append(ReadPart(chunk, 0, stop - start, memory, 0))
        end = begin + span.num_bytes
        if not chunks:
            tensor = tensors[span.chunk]
            values = torch.from_numpy(filled[begin:end]).view(FROM_NAME[tensor.dtype])
            alike = as_read if source.converts(tensor) else to_cast
            alike.append(_Range(tensor, span.start // values.itemsize, values))
        begin = end
    return copied, as_read, to_cast


def _copied_chunks(
    source: TensorSource, tensors: Sequence[OutputTensor], unit: Unit
) -> list[list[tuple[int, int, int]]]:
    """Return for each span the chunks that hold its bytes in order.

    Each has its beginning and end in the span. Only spans of whole tensors have some.
    """
    stored = source.stored
    manifest = stored.manifest
    chunks_of_spans: list[list[tuple[int, int, int]]] = [[] for _ in unit]
    copied = list(_copied_tensors(source, tensors, unit))
    if not copied:
        return chunks_of_spans
    # All at once: thousands of lookups in arrays take longer.
    places, key_ids, row_bytes = np.array(copied, np.int64).T
    firsts = manifest.key_starts[key_ids]
    counts = manifest.key_starts[key_ids + 1] - firsts
    chunks = joined_ranges(firsts, counts)
    row_bytes = np.repeat(row_bytes, counts)
    starts = manifest.offsets[chunks, :1].sum(axis=1) * row_bytes
    stops = starts + manifest.shapes[chunks, :1].prod(axis=1) * row_bytes
    # Parts of rows are not contiguous.
    stops[stops - starts != manifest.num_bytes[chunks]] = -1
    rows = iter(zip(chunks.tolist(), starts.tolist(), stops.tolist(), strict=True))
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        chunks_of_span = list(islice(rows, count))
        end = 0
        for _, start, stop in chunks_of_span:
            end = stop if start == end else -1
        if end == unit[place].num_bytes and chunks_of_span[0][0] not in stored.quantized:
            chunks_of_spans[place] = chunks_of_span
    return chunks_of_spans


def _copied_tensors(
    source: TensorSource, tensors: Sequence[OutputTensor], unit: Unit
) -> Iterator[tuple[int, int, int]]:
    """Yield place, key id and row bytes of each whole stored tensor."""
    manifest = source.stored.manifest
    for place, span in enumerate(unit):
        tensor = tensors[span.chunk]
        mapped = tensor.mapped
        is_whole = span.num_bytes == tensor.num_bytes
        if not is_whole or tensor.dtype != mapped.dtype or not source.is_stored(tensor):
            continue
        key = same_as(mapped)
        if key is None:
            continue
        key_id = manifest.key_index[key]
        if manifest.global_shapes[key_id] == tensor.shape:
            # Scalars have no axes.
            num_rows = (*tensor.shape, 1)[0]
            yield place, key_id, tensor.num_bytes // num_rows


def _read_directly(source: TensorSource, ranges: Sequence[_Range], factor: float = 1.0) -> None:
    """Read ranges, times a factor."""
    regions = []
    for tensor, first, values in ranges:
        done = 0
        for region in flat_range_regions(tensor.shape, first, first + len(values)):
            view = values[done : done + region.num_elements].view(region.shape)
            done += region.num_elements
            regions.append(Wanted(tensor, region, view))
    source.read(regions, factor)


def _overflowed(source: TensorSource, ranges: Sequence[_Range]) -> list[_Range]:
    """Return ranges of computed values that may have overflowed.

    They are computed again to count the overflows.
    """
    overflowed = []
    for computed in ranges:
        if source.may_overflow(computed.tensor) and not are_finite(computed.values):
            overflowed.append(computed)
    return overflowed


def _read_and_cast(
    source: TensorSource, bands: _Bands, ranges: Sequence[_Range]
) -> Iterator[tuple[OutputTensor, int]]:
    """Read and convert ranges; yield the numbers of values that do not fit."""
    sizes = []
    for piece in ranges:
        # Places in memory fit any dtype.
        sizes.append(-(-len(piece.values) * source.dtype_of(piece.tensor).itemsize // 16) * 16)
    for unit in units_of(sizes, UNIT_BYTES, 16):
        memory = torch.from_numpy(bounce_buffer("cast", UNIT_BYTES))
        wide: list[_Range] = []
        targets: list[torch.Tensor] = []
        begin = 0
        for span in unit:
            tensor, first, target = ranges[span.chunk]
            dtype = source.dtype_of(tensor)
            start = span.start // dtype.itemsize
            stop = span.stop // dtype.itemsize
            targets.append(target[start:stop])
            values = memory[begin : begin + span.num_bytes].view(dtype)[: len(targets[-1])]
            wide.append(_Range(tensor, first + start, values))
            begin += span.num_bytes
        bands.read(wide)
        for piece, target in zip(wide, targets, strict=True):
            num_overflows = _count_overflowed(source, piece) + cast_and_count(piece.values, target)
            if num_overflows:
                yield piece.tensor, num_overflows


def _count_overflowed(source: TensorSource, computed: _Range) -> int:
    """Count results that overflowed, though their sources are finite.

    With a factor of 0 such results are 0; results of sources that are not finite stay so.
    """
    tensor, first, values = computed
    if not source.may_overflow(tensor) or are_finite(values):
        return 0
    zeros = scratch("zeros", values.shape, torch.promote_types(values.dtype, torch.float64))
    _read_directly(source, [_Range(tensor, first, zeros)], factor=0.0)
    return int((zeros.isfinite() & ~values.isfinite()).sum())


# --- Casts ----------------------------------------------------------------------------------------


_COUNTED_AT_ONCE = 1 << 18
"""Elements that are counted at a time: counting takes several temporary tensors of 8 bytes an
element.
"""


def cast_and_count(values: torch.Tensor, target: torch.Tensor) -> int:
    """Convert flat values; return the number that do not fit."""
    overflows = 0
    for low in range(0, len(values), _COUNTED_AT_ONCE):
        window = values[low : low + _COUNTED_AT_ONCE]
        place = target[low : low + _COUNTED_AT_ONCE]
        round_once(window, place)
        overflows += _count_overflows(window, place)
    return overflows


def round_once(values: torch.Tensor, target: torch.Tensor) -> None:
    """Convert values with a single rounding, overwriting float64 values.

    Torch converts float64 to 16 and 8 bits by way of float32, which would round twice. So float64
    values are shortened first: the last digit that stays says whether any digit was cut off (as
    many as 13 stay). The scratch memory is the one for products, which is in cache.
    """
    is_narrow = target.dtype.is_floating_point and target.dtype.itemsize < 4
    if values.dtype == torch.float64 and is_narrow:
        bits = values.view(torch.int64).numpy()
        cut = (1 << 40) - 1
        rest = np.bitwise_and(bits, cut, out=scratch("product", bits.shape, torch.int64).numpy())
        np.bitwise_or(bits, np.add(rest, cut, out=rest), out=bits)
        np.bitwise_and(bits, ~cut, out=bits)
    target.copy_(values)


def are_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN."""
    if values.dtype.is_complex:
        values = values.view(values.dtype.to_real())
    elif values.itemsize == 1:
        values = values.float()
    return len(values) == 0 or all(math.isfinite(limit.item()) for limit in values.aminmax())


def _count_overflows(values: torch.Tensor, converted: torch.Tensor) -> int:
    """Count the values beyond the range of the converted dtype. Infinities may stay infinite."""
    dtype = converted.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return _count_outside_integers(values, torch.iinfo(dtype))
    limit = _limit_of(dtype)
    if values.dtype.is_floating_point:
        low, high = values.aminmax()
        if -limit < low.item() <= high.item() < limit:
            return 0
    if values.dtype.is_complex:
        values = values.view(-1, 1).view(values.dtype.to_real())
        converted = converted.view(-1, 1).view(dtype.to_real())
    doubles = values.double()
    result = converted.real if converted.is_complex() else converted.float()
    has_overflown = (doubles.abs() >= limit) & ~(doubles.isinf() & result.isinf())
    return int(has_overflown.view(len(values), -1).any(1).sum())


def _limit_of(dtype: torch.dtype) -> float:
    """Return the magnitude from which on numbers do not fit a dtype.

    A number less than half a unit in the last place above the largest number is rounded to it. Some
    8-bit floats hold their largest number, or NaN, instead of infinities.
    """
    info = torch.finfo(dtype)
    return info.max + math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)


def _count_outside_integers(values: torch.Tensor, limits: torch.iinfo) -> int:
    if values.dtype.is_floating_point:
        doubles = values.double().trunc()
        return int((~((doubles >= limits.min) & (doubles < limits.max + 1.0))).sum())
    integers = values.numpy()
    return int(((integers < limits.min) | (integers > limits.max)).sum())
