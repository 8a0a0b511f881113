"""The vote of all ranks on reusing their cached plan.

It opens each save. A repeated save exchanges nothing else before it writes, so the vote carries
everything that the ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_FLAGS_BYTES = 3
"""Size of the three flags at the beginning of an encoded verdict."""


class PlanVote(NamedTuple):
    """The vote of one rank.

    Attributes:
        state_digest: a digest of everything that must be the same on all ranks.
        plan_number: identifies the rank's cached plan; 0 without one.
        is_described: whether the rank has described its shards, for a new plan.
        replica_digest: a digest of samples of replicas, see `weighted_digest`.
        num_bytes: the bytes that the rank writes according to its plan.
        num_shards: the number of shards on the rank.
    """

    state_digest: int = 0
    plan_number: int = 0
    is_described: bool = False
    replica_digest: int = 0
    num_bytes: int = 0
    num_shards: int = 0

    def to_bytes(self) -> bytes:
        """Encode for sending."""
        return np.array(self, np.int64).tobytes()


class PlanVerdict(NamedTuple):
    """The result of the votes of all ranks.

    Attributes:
        is_same_state: whether all `state_digest`s are equal.
        reuses_plan: whether the state is the same, all ranks have the same cached plan, and
            replicas are still equal.
        are_described: whether all ranks have described their shards.
        num_shards: the number of shards on all ranks.
        num_bytes: the bytes that all ranks write according to the plan; on the coordinator.
    """

    is_same_state: bool
    reuses_plan: bool
    are_described: bool
    num_shards: int
    num_bytes: int = 0

    @classmethod
    def of(cls, votes: Sequence[bytes]) -> PlanVerdict:
        """Compare the votes of all ranks."""
        rows = np.frombuffer(b"".join(votes), np.int64).reshape(len(votes), -1)
        states, numbers, are_described, digests, sizes, counts = rows.T
        is_same_state = bool((states == states[0]).all())
        is_same_plan = bool(numbers[0]) and bool((numbers == numbers[0]).all())
        # The digests of equal replicas add up to 0 modulo 2**64.
        are_equal = not digests.sum()
        return cls(
            is_same_state=is_same_state,
            reuses_plan=is_same_state and is_same_plan and are_equal,
            are_described=bool(are_described.all()),
            num_shards=int(counts.sum()),
            num_bytes=int(sizes.sum()),
        )

    def to_bytes(self) -> bytes:
        """Encode for sending, without `num_bytes`."""
        return bytes(self[:_FLAGS_BYTES]) + self.num_shards.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanVerdict:
        """Decode the result of `to_bytes`."""
        is_same_state, reuses_plan, are_described = map(bool, data[:_FLAGS_BYTES])
        num_shards = int.from_bytes(data[_FLAGS_BYTES:], "little")
        return cls(is_same_state, reuses_plan, are_described, num_shards)
