"""The memory in which targets are filled: their own, or copies.

Copies give the targets their values at the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import as_integers
from distckpt._base.errors import InvalidShardingError
from distckpt._base.memory import num_bytes_spanned, repeats_memory
from distckpt._io.exchange import copy_values
from distckpt._move.pieces import Pieces


class Staged(NamedTuple):
    """The targets of a rank.

    Attributes:
        targets: as the caller gave them.
        views: the memory to fill for each: its own, or a copy.
    """

    targets: Pieces
    views: list[torch.Tensor]

    @classmethod
    def of(
        cls, sources: Pieces, targets: Pieces, atomic: bool, fresh: Collection[int] = ()
    ) -> Staged:
        """Choose the memory; with `atomic`, no target is changed before `commit`.

        A target in memory that is given from is filled at the end in any case, as are `fresh` ones.
        """
        _refuse_repeated_memory(targets)
        shared = [atomic] * len(targets.views)
        if not atomic:
            shared = _share_memory(targets.views, sources.views)
            shared = [is_shared or row in fresh for row, is_shared in enumerate(shared)]
        staged = zip(targets.views, shared, strict=True)
        views = []
        for view, is_staged in staged:
            if is_staged:
                view = torch.empty_like(view, memory_format=_DENSE)
            views.append(view)
        for view, piece in zip(views, targets.table, strict=True):
            if piece.kind.may_differ:
                view.detach().zero_()
        return cls(targets, views)

    @torch.no_grad()
    def commit(self, pairs: Iterable[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """Give the targets their values.

        Return the pairs (first, second) among `pairs` whose second target changed elements of the
        first.
        """
        earlier: dict[int, list[int]] = {}
        for first, second in pairs:
            earlier.setdefault(second, []).append(first)
        changed: list[tuple[int, int]] = []
        for row, (view, target) in enumerate(zip(self.views, self.targets.views, strict=True)):
            firsts = earlier.get(row, [])
            before = self._bits(firsts)
            if view is not target:
                copy_values(view, target)
            same = map(torch.equal, before, self._bits(firsts))
            marked = zip(firsts, same, strict=True)
            changed += [(first, row) for first, is_same in marked if not is_same]
        self._complete()
        return changed

    def _bits(self, rows: Iterable[int]) -> list[torch.Tensor]:
        """Return copies of the values of targets, which NaN equals as well."""
        views = (self.targets.views[row].detach() for row in rows)
        return [as_integers(view.resolve_conj().resolve_neg().clone()) for view in views]

    def _complete(self) -> None:
        """Write the values that are not moved."""
        for padding in self.targets.padding:
            padding.zero_()
        # Once, if several targets are the same memory.
        adds = {}
        for view, add in zip(self.targets.views, self.targets.adds, strict=True):
            adds[(view.data_ptr(), view.shape, view.stride())] = (view, add)
        for view, add in adds.values():
            if add:
                view.add_(add)


_DENSE = torch.contiguous_format


def _refuse_repeated_memory(targets: Pieces) -> None:
    """Refuse targets with several elements at one address, as in expanded tensors."""
    for row, view in enumerate(targets.views):
        if repeats_memory(view):
            raise InvalidShardingError(
                f"Key {targets.key(row)!r} is to be filled in memory where several of its elements "
                f"are one (shape {tuple(view.shape)}, strides {view.stride()}): give it a tensor "
                "that is not expanded or overlapping."
            )


def _share_memory(views: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether its memory may overlap another one's."""
    ends: list[tuple[int, int]] = []
    for start, stop in sorted(map(_extent, others)):
        if ends and start <= ends[-1][1]:
            ends[-1] = (ends[-1][0], max(stop, ends[-1][1]))
        else:
            ends.append((start, stop))
    starts = [start for start, _ in ends]
    overlaps = []
    for view in views:
        start, stop = _extent(view)
        place = bisect.bisect_left(starts, stop) - 1
        overlaps.append(start < stop and place >= 0 and ends[place][1] > start)
    return overlaps


def _extent(view: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's bytes begin and end."""
    size = num_bytes_spanned(view)
    if size:
        return (view.data_ptr(), view.data_ptr() + size)
    return (0, 0)
