"""The plan of a save from the view of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from distckpt._format.chunk_table import ChunkTable
from distckpt._format.columns import pack, unpack
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray
from distckpt._plan.save import Pieces
from distckpt._ranks.collectives import Ranks

if TYPE_CHECKING:
    from distckpt._io.replica_differences import ReplicasToCompare

SHARDS_OF_PLANNER = 1 << 20
"""Shards per planner: saves with more shards in total are planned by several ranks."""
MAX_PLANNERS = 16
"""Largest number of ranks that plan together."""


def num_planners_for(num_shards: int, num_ranks: int) -> int:
    """Return the number of ranks that plan; 1 for the coordinator alone."""
    needed = -(-num_shards // SHARDS_OF_PLANNER)
    return max(1, min(needed, MAX_PLANNERS, num_ranks))


class Share(NamedTuple):
    """The part of one rank in a new plan.

    Attributes:
        number: identifies the plan on all ranks.
        stride: see `replica_weights`; 0 if no rank has replicas.
        sampled: rows of this rank whose samples the coordinator needs; None if all replicas are
            equal.
        has_checksum_file: whether each rank writes the checksums of its blocks into a file.
        factors: a number for each row of the rank's table, see `replica_factors`.
        pieces: the pieces that this rank writes.
    """

    number: int
    stride: int
    sampled: list[int] | None
    has_checksum_file: bool
    factors: IntArray
    pieces: Pieces

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return pack(self[:4], {"factors": self.factors, **self.pieces._asdict()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Share:
        """Decode the result of `to_bytes`."""
        (number, stride, sampled, has_checksum_file), columns = unpack(data)
        factors = columns.pop("factors")
        return cls(number, stride, sampled, has_checksum_file, factors, Pieces(**columns))


class SharedPlan(NamedTuple):
    """The view of one rank of a new plan of all ranks.

    Attributes:
        share: the part of this rank.
        manifest: the keys of all ranks; only on the coordinator.
        differing: replicas that differ, if there are any; only on the coordinator.
        divide_chunks: a collective operation, None if the coordinator sorts all chunks. It takes
            the chunks that this rank writes, and returns the chunks that no part of the manifest
            has; on the coordinator, also the parts by name.
    """

    share: Share
    manifest: Manifest | None = None
    differing: ReplicasToCompare | None = None
    divide_chunks: Callable[[Ranks, ChunkTable], tuple[ChunkTable, Mapping[str, bytes]]] | None = (
        None
    )
