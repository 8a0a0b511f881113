"""`distckpt cat`: print or save the values of a tensor or an object."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from distckpt._base.dtypes import FROM_NAME, to_numpy
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, other_prefix
from distckpt._base.options import Progress
from distckpt._checkpoint.consistent_read import check_files
from distckpt._checkpoint.stored_values import (
    StoredTensor,
    holds_objects,
    load_common_state,
    read_encoded,
)
from distckpt._format import codec
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._geometry.units import cut_region
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations
from distckpt.cli._output import Output, shape_text
from distckpt.cli._plain import plain, without_middle
from distckpt.cli._selection import opened_at

_SUMMARIZED = 1000
"""Largest number of elements that is read and printed in full.

Of larger tensors only the edges are read and printed, as numpy prints them.
"""
_EDGE = 3
_MAX_LISTED = 100
"""Longest list in an object that is printed in full; of longer ones only the ends are."""
_WINDOW_ELEMENTS = 4 << 20
_WIDTH = 120


def run(arguments: Namespace, output: Output) -> int:
    """Print or save values, unless the checkpoint is replaced meanwhile."""
    with opened_at(arguments.path) as stored:
        _show(stored, arguments, output)
    return 0


def _show(stored: StoredCheckpoint, arguments: Namespace, output: Output) -> None:
    key, index = split_key(stored, arguments.key or COMMON_KEY)
    if key == COMMON_KEY or stored.is_object(key):
        if arguments.npy or index is not None:
            raise ValueError(
                f"{key!r} is an object: it cannot be sliced or written as a numpy array"
            )
        _show_object(stored, key, output)
        return
    tensor = StoredTensor(stored, key)
    selection = parse_index(index or "", tensor.shape)
    if arguments.npy:
        _save(stored, tensor, selection, arguments.npy, output)
    elif output.as_json:
        values = to_numpy(tensor.read(selection.region)).reshape(selection.shape)
        check_files(stored)
        output.json({**_facts(tensor, selection), "values": plain(values.tolist())})
    else:
        text = printed(tensor, selection)
        check_files(stored)
        output.line(f"{_title(tensor, selection)}\n{text}")


# --- Arguments ------------------------------------------------------------------------------------


def split_key(stored: StoredCheckpoint, text: str) -> tuple[str, str | None]:
    """Divide `key[slice]` into the key and the text between the brackets.

    Keys may contain brackets themselves.
    """
    known = stored.manifest.key_index
    if text in known or (text == COMMON_KEY and holds_objects(stored)):
        return text, None
    match = re.fullmatch(r"(.*)\[([^\[\]]*)\]", text, re.DOTALL)
    key = text
    if match:
        key = match[1]
    if key not in known:
        if key == COMMON_KEY:
            raise LoadMismatchError(f"There is no common state in {stored.location!r}: name a key")
        if key.partition(".")[0] in load_common_state(stored):
            raise LoadMismatchError(
                f"{key!r} is a value of the common state of {stored.location!r}, which is printed "
                "without a key."
            )
        near = did_you_mean(key, known) or other_prefix([key], known)
        raise LoadMismatchError(f"Not in {stored.location!r}: key {key!r}{near}")
    return key, match[2] if match else None


# --- Tensors --------------------------------------------------------------------------------------


def printed(tensor: StoredTensor, selection: Selection) -> str:
    """Print values as numpy does, reading only the printed ones."""
    region = selection.region
    if region.num_elements <= _SUMMARIZED:
        array = to_numpy(tensor.read(region)).reshape(selection.shape)
        return np.array2string(array, separator=", ", max_line_width=_WIDTH)
    # Along each long axis the first and the last indices, and one in between for the rest.
    short = tuple(min(size, 2 * _EDGE + 1) for size in region.shape)
    array = np.zeros(short, _numpy_dtype(tensor.dtype))
    for source, place in _corners(region, short):
        array[place.slices()] = to_numpy(tensor.read(source))
    array = array.reshape([n for axis, n in enumerate(short) if axis not in selection.dropped])
    return np.array2string(
        array, separator=", ", max_line_width=_WIDTH, threshold=0, edgeitems=_EDGE
    )


def _corners(region: Region, short: tuple[int, ...]) -> Iterator[tuple[Region, Region]]:
    """Yield a region's corners, and their places in the shortened tensor."""
    axes = []
    for start, size, length in zip(region.offset, region.shape, short, strict=True):
        spans = [(start, 0, size)]
        if size != length:
            spans = [(start, 0, _EDGE), (start + size - _EDGE, length - _EDGE, _EDGE)]
        axes.append(spans)
    for corner in itertools.product(*axes):
        sources, places, extents = zip(*corner, strict=True)
        yield Region(sources, extents), Region(places, extents)


def _save(
    stored: StoredCheckpoint, tensor: StoredTensor, selection: Selection, path: str, output: Output
) -> None:
    """Write a .npy file, a window at a time; it appears when it is complete."""
    temporary = locations.temporary_beside(path)
    try:
        with (
            locations.naming(path),
            open(temporary, "xb") as file,
            output.progress("saving") as progress,
        ):
            _write_npy(file, tensor, selection, progress)
        check_files(stored)
        os.replace(temporary, path)
    except BaseException:
        locations.remove_file(temporary)
        raise
    saved = _numpy_dtype(tensor.dtype)
    is_exact = torch.from_numpy(np.empty(0, saved)).dtype == FROM_NAME[tensor.dtype]
    output.json({**_facts(tensor, selection), "file": path, "saved_as": str(saved)})
    output.line(
        f"{_title(tensor, selection)}, saved in {path}"
        + ("" if is_exact else f" as {saved}, since numpy has no {tensor.dtype}")
    )


def _write_npy(
    file: BinaryIO, tensor: StoredTensor, selection: Selection, progress: Progress
) -> None:
    saved = _numpy_dtype(tensor.dtype)
    descr = np.lib.format.dtype_to_descr(saved)
    fields = {"descr": descr, "fortran_order": False, "shape": selection.shape}
    np.lib.format.write_array_header_1_0(file, fields)
    num_bytes = selection.region.num_elements * saved.itemsize
    done = 0
    progress(done, num_bytes)
    for region in cut_region(selection.region, _WINDOW_ELEMENTS):
        values = to_numpy(tensor.read(region))
        file.write(values.tobytes())
        done += values.nbytes
        progress(done, num_bytes)


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    return to_numpy(torch.empty(0, dtype=FROM_NAME[dtype])).dtype


def _facts(tensor: StoredTensor, selection: Selection) -> dict[str, Any]:
    shapes = {
        "global_shape": tensor.shape,
        "offset": selection.region.offset,
        "shape": selection.shape,
    }
    return {"key": tensor.key, "dtype": tensor.dtype, **shapes}


def _title(tensor: StoredTensor, selection: Selection) -> str:
    region = ""
    if tensor.shape:
        region = str(selection.region)
    return f"{tensor.key}{region}: {shape_text(selection.shape)} {tensor.dtype}"


# --- Objects --------------------------------------------------------------------------------------


def _show_object(stored: StoredCheckpoint, key: str, output: Output) -> None:
    limit = {}
    if output.as_json:
        limit = {"max_elements": math.inf}
    parts = []
    for offset, blob in sorted(read_encoded(stored, key).items()):
        value = plain(codec.decode(blob, placeholders=True), **limit)
        parts.append({"offset": offset, "value": value})
    check_files(stored)
    output.json({"key": key, "parts": parts})
    for part in parts:
        if len(parts) > 1:
            output.line(f"{key}{list(part['offset'])}:")
        output.line(json.dumps(_shortened(part["value"]), indent=2, ensure_ascii=False))


def _shortened(value: Any) -> Any:
    """Leave out the middle of long lists of numbers and texts."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    is_flat = not any(isinstance(item, list | dict) for item in value)
    if is_flat and len(value) > _MAX_LISTED:
        return without_middle(value)
    return list(map(_shortened, value))


# --- Tensor index ---------------------------------------------------------------------------------


_INTEGER = re.compile(r"-?\d+")
_SLICE = re.compile(r"(-?\d+)?\s*:\s*(-?\d+)?")


@dataclass(frozen=True)
class Selection:
    """Part of a tensor: its region, and the axes that an index (rather than a slice) removes."""

    region: Region
    dropped: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape without the dropped axes."""
        return tuple(n for axis, n in enumerate(self.region.shape) if axis not in self.dropped)


def parse_index(text: str, shape: tuple[int, ...]) -> Selection:
    """Parse the text between the brackets as numpy would, without steps.

    Raises:
        ValueError: it is not an index of a tensor of this shape.
    """
    offset = []
    extent = []
    dropped = []
    for axis, (item, size) in enumerate(zip(_complete(text, shape), shape, strict=True)):
        start, stop = _span(text, axis, item, size)
        offset.append(start)
        extent.append(max(0, stop - start))
        if _INTEGER.fullmatch(item):
            dropped.append(axis)
    return Selection(Region(tuple(offset), tuple(extent)), tuple(dropped))


def _complete(text: str, shape: tuple[int, ...]) -> Sequence[str]:
    """Return an item for each axis."""
    items = []
    if text.strip():
        items = [item.strip() for item in text.split(",")]
    num_ellipses = items.count("...")
    if num_ellipses > 1 or len(items) - num_ellipses > len(shape):
        raise ValueError(
            f"[{text}] has more indices than the tensor has axes: its shape is {shape}"
        )
    if num_ellipses:
        place = items.index("...")
        items[place : place + 1] = [":"] * (len(shape) - len(items) + 1)
    return [*items, *[":"] * (len(shape) - len(items))]


def _span(text: str, axis: int, item: str, size: int) -> tuple[int, int]:
    """Return the start and stop of an item."""
    if _INTEGER.fullmatch(item):
        start = int(item) + (size if int(item) < 0 else 0)
        if not 0 <= start < size:
            raise ValueError(f"[{text}]: {item} is out of range for axis {axis} of size {size}")
        return start, start + 1
    match = _SLICE.fullmatch(item)
    if match is None:
        raise ValueError(
            f"[{text}]: {item!r} is neither an index nor start:stop (steps are not supported)"
        )
    bounds = []
    for bound in match.groups():
        bounds.append(None if bound is None else int(bound))
    start, stop, _ = slice(*bounds).indices(size)
    return start, stop
