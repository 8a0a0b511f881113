"""Statistics that a save has stored, returned without importing torch."""

from __future__ import annotations

from collections.abc import Sequence

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._format.manifest import STATS_VALUES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._format.tensor_stats import TensorStats, stats_of_key
from distckpt._plan.selection import matches


def saved_stats(
    stored: StoredCheckpoint, keys: Sequence[str] | None = None
) -> list[TensorStats] | None:
    """Return the stored statistics of each tensor that matches.

    Return None if some of them have none.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    if STATS_VALUES not in stored.manifest.figures:
        return None
    all_stats: list[TensorStats] = []
    for name in chosen_names(stored, keys):
        stats = stats_of_key(stored.manifest, name)
        if stats is None:
            return None
        all_stats.append(stats)
    return all_stats


def chosen_names(stored: StoredCheckpoint, keys: Sequence[str] | None) -> list[str]:
    """Return the names of the tensors that match, in natural order.

    Raises:
        LoadMismatchError: no tensor matches.
    """
    names = []
    for key in stored.manifest.key_index:
        if not stored.is_object(key):
            names.append(key)
    if not names:
        raise LoadMismatchError(
            f"{stored.location!r} has no tensors, only common state and objects."
        )
    names.sort(key=natural_order)
    if keys is None:
        return names
    matching = []
    for name in names:
        if matches(name, keys):
            matching.append(name)
    if not matching:
        patterns = ", ".join(map(repr, keys))
        there = summarize_keys(names)
        raise LoadMismatchError(
            f"No tensor of {stored.location!r} matches {patterns}; there are {there}."
        )
    return matching
