"""The regions of tensors that a rank gives or takes, with memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import InvalidShardingError
from distckpt._format.columns import compress, decompress
from distckpt._geometry.region import Region
from distckpt._plan.load import Request, request_of
from distckpt._plan.translate import Translated, translate
from distckpt._state.shards import region_view, shard_regions
from distckpt.mapping._base import BufferReplicaId, OpenReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import is_main_replica
from distckpt.rules._mapped import UNCHANGED, adjacent_rows
from distckpt.rules._rule import Rule


class Kind(NamedTuple):
    """A tensor as one side of a move knows it.

    `dtype` is its safetensors name. With `may_differ`, the other side may have another shape
    (padding).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    may_differ: bool


class Piece(NamedTuple):
    """A region of a tensor, without memory.

    `is_main` tells whether it is of the main replica, `is_buffer` whether only the first replica
    counts.
    """

    kind: Kind
    region: Region
    is_main: bool
    is_buffer: bool


class Pieces(NamedTuple):
    """The pieces of one rank.

    Attributes:
        table: their places in their tensors.
        views: the memory of each, shaped as its region; of any strides, device and dtype.
        changes: the factor that makes values in memory of moved values, and the number added then.
        padding: memory without a counterpart on the other side: zeros.
    """

    table: list[Piece]
    views: list[torch.Tensor]
    changes: list[tuple[float, float]]
    padding: list[torch.Tensor]

    def key(self, row: int) -> str:
        """Return the name of the tensor of a piece."""
        return self.table[row].kind.key


def packed(values: Sequence[Any]) -> bytes:
    """Encode a message, which may end with a table of pieces."""
    return compress(json.dumps(values, default=int).encode())


def unpacked(message: bytes) -> list[Any]:
    """Decode a result of `packed`."""
    values: list[Any] = json.loads(decompress(message))
    return values


def table_of(rows: Sequence[Sequence[Any]]) -> list[Piece]:
    """Return the pieces that a rank has sent, from JSON."""
    pieces = []
    for (key, dtype, shape, may_differ), (offset, size), is_main, is_buffer in rows:
        kind = Kind(key, dtype, tuple(shape), may_differ)
        pieces.append(Piece(kind, Region(tuple(offset), tuple(size)), is_main, is_buffer))
    return pieces


def pieces_of(
    shards: Sequence[ShardedTensor], rules: Sequence[Rule], *, drops: bool = False
) -> Pieces:
    """Return the pieces of shards, under the names that rules give them.

    With `drops`, shards that rules leave out are left out here, too.

    Raises:
        InvalidShardingError: a shard has no data.
    """
    owners: list[ShardedTensor] = []
    requests: list[Request] = []
    views: list[torch.Tensor] = []
    for shard in shards:
        if shard.data is None:
            raise InvalidShardingError(
                f"Key {shard.key!r} has no data: give each ShardedTensor the memory that is moved."
            )
        for region in shard_regions(shard):
            owners.append(shard)
            requests.append(request_of(shard, region))
            views.append(region_view(shard, region))
    same = [UNCHANGED] * len(owners)
    translated = Translated(list(range(len(owners))), requests, views, same, [])
    if rules:
        translated = translate(rules, requests, views, drops=drops)
    pieces = Pieces([], [], [], translated.padding)
    for number, request, view, change in zip(*translated[:4], strict=True):
        shape = request.global_shape
        kind = Kind(request.key, TO_NAME[view.dtype], shape, request.allow_shape_mismatch)
        replica = owners[number].replica_id
        is_main = not isinstance(replica, OpenReplicaId) and is_main_replica(replica)
        is_buffer = isinstance(replica, BufferReplicaId)
        steps = request.step or (1,) * len(shape)
        for region, place in adjacent_rows(request.region, steps):
            pieces.table.append(Piece(kind, region, is_main, is_buffer))
            pieces.views.append(view[place.slices()] if request.step else view)
            pieces.changes.append(change)
    return pieces
