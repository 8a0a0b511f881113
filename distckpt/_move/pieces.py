"""The regions of tensors that a rank gives or takes, with memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import InvalidShardingError
from distckpt._format.columns import compress, decompress, pack, unpack
from distckpt._geometry.region import IntArray, Region, regions_to_arrays
from distckpt._plan.load import Request, request_of
from distckpt._plan.translate import Translated, translate
from distckpt._state.shards import region_view, shard_regions
from distckpt.mapping._base import BufferReplicaId, OpenReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import is_main_replica
from distckpt.rules._rule import Rule

_COLUMNS = ("kind_ids", "is_main", "is_buffer", "offsets", "shapes")


class Kind(NamedTuple):
    """A tensor as one side of a move knows it.

    `dtype` is its safetensors name. With `may_differ`, the other side may have another shape
    (padding).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    may_differ: bool


class PieceTable(NamedTuple):
    """The pieces of one rank, without memory.

    `kind_ids`, `is_main` (replica) and `is_buffer` (only the first replica counts) have shape (n,).
    `offsets` and `shapes` have shape (n, max ndim), padded with 0 and 1.
    """

    kinds: list[Kind]
    kind_ids: IntArray
    is_main: npt.NDArray[np.bool_]
    is_buffer: npt.NDArray[np.bool_]
    offsets: IntArray
    shapes: IntArray

    def region(self, row: int) -> Region:
        """Return the region of one piece."""
        ndim = len(self.kinds[self.kind_ids[row]].shape)
        return Region(
            tuple(self.offsets[row, :ndim].tolist()), tuple(self.shapes[row, :ndim].tolist())
        )

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return compress(pack(self.kinds, {name: getattr(self, name) for name in _COLUMNS}))

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceTable:
        """Decode the result of `to_bytes`."""
        kinds, columns = unpack(decompress(data))
        return cls([Kind(key, dtype, tuple(shape), m) for key, dtype, shape, m in kinds], **columns)


class Pieces(NamedTuple):
    """The pieces of one rank.

    Attributes:
        table: their places in their tensors.
        views: the memory of each, shaped as its region; of any strides, device and dtype.
        adds: the surplus of the values in memory over the moved values.
        padding: memory without a counterpart on the other side: zeros.
    """

    table: PieceTable
    views: list[torch.Tensor]
    adds: list[float]
    padding: list[torch.Tensor]


def pieces_of(
    shards: Sequence[ShardedTensor], rules: Sequence[Rule], *, drops: bool = False
) -> Pieces:
    """Return the pieces of shards, under the names that rules give them.

    With `drops`, shards that rules leave out are left out here, too.

    Raises:
        InvalidShardingError: a shard has no data.
    """
    without = next((shard for shard in shards if shard.data is None), None)
    if without is not None:
        raise InvalidShardingError(
            f"Key {without.key!r} has no data: give each ShardedTensor the memory that is moved."
        )
    pieces = []
    for number, shard in enumerate(shards):
        for region in shard_regions(shard):
            pieces.append((number, region))
    requests = [request_of(shards[number], region) for number, region in pieces]
    views = [region_view(shards[number], region) for number, region in pieces]
    if rules:
        translated = translate(rules, requests, views, drops=drops)
    else:
        translated = _untranslated(requests, views)
    return _pieces(translated, [shards[pieces[number][0]] for number in translated.numbers])


def _untranslated(requests: list[Request], views: list[torch.Tensor]) -> Translated:
    return Translated(list(range(len(requests))), requests, views, [0.0] * len(requests), [])


def _pieces(translated: Translated, owners: Sequence[ShardedTensor]) -> Pieces:
    kinds: dict[Kind, int] = {}
    rows: list[tuple[int, bool, bool]] = []
    regions: list[Region] = []
    views: list[torch.Tensor] = []
    adds: list[float] = []
    for request, view, add, owner in zip(*translated[1:4], owners, strict=True):
        dtype = TO_NAME[view.dtype]
        kind = Kind(request.key, dtype, request.global_shape, request.allow_shape_mismatch)
        row = (kinds.setdefault(kind, len(kinds)), *_copy_kind(owner))
        for region, part in _single_steps(request, view):
            rows.append(row)
            regions.append(region)
            views.append(part)
            adds.append(add)
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    table = PieceTable(
        list(kinds),
        columns[0].copy(),
        columns[1].astype(np.bool_),
        columns[2].astype(np.bool_),
        *regions_to_arrays(regions),
    )
    return Pieces(table, views, adds, translated.padding)


def _copy_kind(shard: ShardedTensor) -> tuple[bool, bool]:
    """Whether a shard is a main replica, and whether a buffer's. Its replica id says so."""
    replica = shard.replica_id
    is_main = not isinstance(replica, OpenReplicaId) and is_main_replica(replica)
    return is_main, isinstance(replica, BufferReplicaId)


def _single_steps(request: Request, view: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
    """Cut a piece whose elements lie apart into contiguous ones."""
    apart = [axis for axis, step in enumerate(request.step) if step > 1]
    if not apart:
        yield request.region, view
        return
    offset, shape = request.region
    step = request.step
    for index in itertools.product(*(range(shape[axis]) for axis in apart)):
        first = list(offset)
        size = list(shape)
        place = [slice(None)] * len(shape)
        for axis, number in zip(apart, index, strict=True):
            first[axis] += number * step[axis]
            size[axis] = 1
            place[axis] = slice(number, number + 1)
        yield Region(tuple(first), tuple(size)), view[tuple(place)]
