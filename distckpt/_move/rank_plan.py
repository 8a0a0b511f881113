"""The part of one rank in a move, as tables of numbers."""

from __future__ import annotations

from typing import NamedTuple

from distckpt._format.columns import compress, decompress, pack, unpack
from distckpt._geometry.region import IntArray


class RankPlan(NamedTuple):
    """The part of one rank in the `num_waves` waves of a move.

    Attributes:
        num_waves: the number of waves on all ranks.
        sent_bytes: bytes that all ranks together send to other machines.
        has_gaps: whether any rank has `gaps`.
        num_bytes: bytes that this rank gets, in the dtypes in which they are moved.
        dtypes: safetensors names, which `takes` and `sent` refer to.
        compared: `rank, key`: for each, arrived values are compared with sent ones; their places in
            this list are slots.
        copies: `source, target, *source offset, *target offset, *shape`: pieces of this rank, and
            the places of a region in them.
        packs: `wave, start, source, *offset, *shape`: a region of a piece, and where its bytes
            begin in the buffer.
        takes: `wave, holder, is_landed, start, dtype, target, *offset, *shape, *place, *unit`: the
            rank whose buffer holds a unit, whether it is the buffer for received (landed) units or
            for packed ones, and the unit's start there; the place of a region in the target, and in
            the unit, and the shape of the unit.
        sends: `wave, peer, start, bytes, tag`: in the buffer for packed units.
        forwards: the same, in the buffer for units that landed in the wave before.
        receives: the same, in the buffer for units that land.
        gaps: `target, *offset, *shape`: regions that no rank holds.
        sent: `slot, source, dtype, *offset, *shape`: a region of a piece that another rank gets,
            and the dtype in which it keeps it.
        arrived: `slot, target, is_cast, *offset, *shape`: a region that this rank gets, and whether
            it keeps it in another dtype than the one in which it is moved.
    """

    num_waves: int
    sent_bytes: int
    has_gaps: bool
    num_bytes: int
    dtypes: list[str]
    compared: list[tuple[int, str]]
    copies: IntArray
    packs: IntArray
    takes: IntArray
    sends: IntArray
    forwards: IntArray
    receives: IntArray
    gaps: IntArray
    sent: IntArray
    arrived: IntArray

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        columns = {name: getattr(self, name) for name in TABLES}
        return compress(pack(self[: -len(TABLES)], columns))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPlan:
        """Decode the result of `to_bytes`."""
        fields, columns = unpack(decompress(data))
        return cls(*fields, *(columns[name] for name in TABLES))


TABLES = RankPlan._fields[RankPlan._fields.index("copies") :]
"""The names of the fields that are tables."""
