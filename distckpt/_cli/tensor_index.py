"""Indices of tensors as text, as in `up.weight[0:4, :, 3]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from distckpt._geometry.region import Region

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
    items = _complete(text, shape)
    dropped = tuple(axis for axis, item in enumerate(items) if _INTEGER.fullmatch(item))
    spans = []
    for axis, (item, size) in enumerate(zip(items, shape, strict=True)):
        spans.append(_span(text, axis, item, size))
    offset = tuple(start for start, _ in spans)
    extent = tuple(max(0, stop - start) for start, stop in spans)
    return Selection(Region(offset, extent), dropped)


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
