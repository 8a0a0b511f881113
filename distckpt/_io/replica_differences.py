"""Differences between replicas: drift that a save reports, or unrelated tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt._state.common_differences import compare_samples, largest_of
from distckpt._state.shards import GlobalTable
from distckpt._state.validation import (
    ReplicaDifferences,
    different_replicas_error,
    keep_whole,
)

logger = logging.getLogger(__name__)

MAX_PAIRS = 1024
"""Sample pairs, of at most 1 KiB each, that the coordinator compares."""


class Pair(NamedTuple):
    """A replica, and the main replica of its region.

    Both are named by their rank and their place in `rows_of_ranks`.
    """

    key: str
    dtype: str
    num_elements: int
    main: tuple[int, int]
    other: tuple[int, int]


class ReplicasToCompare(NamedTuple):
    """Replicas that differ, and a selection to compare.

    Attributes:
        keys: keys of all replicas that differ.
        ranks: ranks whose replica differs from the main replica.
        pairs: the selected replicas, whose samples are compared.
        rows_of_ranks: for each rank, the rows of its own table whose samples are needed.
        error: the error about all replicas that differ.
    """

    keys: list[str]
    ranks: list[int]
    pairs: list[Pair]
    rows_of_ranks: list[list[int]]
    error: InvalidShardingError


def keep_different_whole(
    table: GlobalTable, differences: ReplicaDifferences, starts: Sequence[int], are_errors: bool
) -> ReplicasToCompare:
    """Select replicas to write whole, and some to compare.

    They are selected evenly over all of them; of equal replicas, one is enough. `starts` has the
    first row of each rank in the table.

    Raises:
        InvalidShardingError: `are_errors`.
    """
    error = different_replicas_error(table, differences)
    if are_errors:
        raise error
    keep_whole(table, differences)
    rows, firsts = differences
    contents = np.column_stack((firsts, table.digests[rows].astype(np.int64)))
    _, distinct = np.unique(contents, axis=0, return_index=True)
    selection = np.sort(distinct)[:: 1 + len(distinct) // MAX_PAIRS]
    needed = np.unique(np.concatenate((rows[selection], firsts[selection])))
    rows_of_ranks: list[list[int]] = [[] for _ in starts]
    places: dict[int, tuple[int, int]] = {}
    for row in needed.tolist():
        rank = int(table.ranks[row])
        places[row] = rank, len(rows_of_ranks[rank])
        rows_of_ranks[rank].append(row - starts[rank])
    pairs = []
    for row, first in zip(rows[selection].tolist(), firsts[selection].tolist(), strict=True):
        pairs.append(_pair(table, places, row, first))
    key_ids = np.unique(table.key_ids[rows])
    return ReplicasToCompare(
        keys=[table.keys[key_id] for key_id in key_ids.tolist()],
        ranks=np.unique(table.ranks[rows]).tolist(),
        pairs=pairs,
        rows_of_ranks=rows_of_ranks,
        error=error,
    )


def _pair(table: GlobalTable, places: dict[int, tuple[int, int]], row: int, first: int) -> Pair:
    key_id = table.key_ids[row]
    return Pair(
        key=table.keys[key_id],
        dtype=table.dtypes[key_id],
        num_elements=table.row_region(row).num_elements,
        main=places[first],
        other=places[row],
    )


def report_differences(
    compared: ReplicasToCompare,
    samples: Sequence[Sequence[bytes]],
    warns: bool,
) -> None:
    """Warn of replicas that differ.

    `samples` are by rank, in the order of `rows_of_ranks`. Tensors that have nothing in common are
    no drift but a mistake; `warns` stores them all the same.

    Raises:
        InvalidShardingError: most of the elements that differ are of tensors which have nothing in
            common, unless `warns`.
    """
    differences = []
    unrelated = []
    for pair in compared.pairs:
        main = _sample(samples, pair.main)
        difference = compare_samples(pair.dtype, main, _sample(samples, pair.other))
        differences.append(difference)
        if difference.is_unrelated:
            unrelated.append(pair)
    are_most = 2 * _num_elements(unrelated) >= _num_elements(compared.pairs)
    if unrelated and are_most and not warns:
        raise compared.error
    more = ", ..." if len(compared.ranks) > 8 else ""
    names = dict.fromkeys(pair.key for pair in unrelated)
    logger.warning(
        "replicas differ: %s on rank %s differ from their main replicas by %s%s. Each tensor is "
        "stored whole, from its main replica. If they should be equal, look for an operation that "
        "is not deterministic, or a gradient that is not reduced; validate_replicas=True makes it "
        "an error.",
        summarize_keys(compared.keys),
        ", ".join(map(str, compared.ranks[:8])) + more,
        largest_of(differences),
        f", and {summarize_keys(names)} have nothing in common with them" if names else "",
    )


def _num_elements(pairs: Sequence[Pair]) -> int:
    return sum(pair.num_elements for pair in pairs)


def _sample(samples: Sequence[Sequence[bytes]], place: tuple[int, int]) -> bytes:
    rank, number = place
    return samples[rank][number]
