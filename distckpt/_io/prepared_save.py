"""Prepared saves: everything is decided, nothing is written yet."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from distckpt._io.write import NewFile
from distckpt._plan.layout import PlannedChunk
from distckpt._ranks.collectives import Ranks


class FileCopies(Protocol):
    """The interface of `HostCopies`, which copies data for background saves."""

    def copy(self, files: Sequence[NewFile]) -> Sequence[NewFile]:
        """Return the same files with copied data."""


class OwnedChunk(NamedTuple):
    """A chunk of a tensor that this rank would write.

    The values of its pieces are views of the tensors in the state dict.
    """

    chunk: PlannedChunk
    values: list[torch.Tensor]


class PreparedSave(ABC):
    """A save that all ranks have planned and not yet written.

    Attributes:
        num_bytes: the bytes that this rank is going to write.
        plan_reused: whether the plan was made for an earlier save.
        folder_suffix: the end of the names of the folders `tensors` and `objects`. `save` sets it
            before `write` if several saves may write in one place, on object stores. None for a
            strategy that gives files fixed names: its saves are not kept apart there, and do not
            replace a checkpoint.
        exchanges_in_write: whether ranks exchange something within `write_own`.
        written: on the coordinator, after `complete`: the name and size of each file, which `save`
            checks before it commits.
    """

    num_bytes: int = 0
    plan_reused: bool = False
    folder_suffix: str | None = None
    exchanges_in_write = True
    written: Sequence[tuple[str, int]] = ()

    def stage(self, copies: FileCopies) -> PreparedSave | None:
        """Return the same save with copied tensors, so that training can continue.

        Not a collective operation. The default returns None: `async_save` finishes such a save
        before it returns.
        """
        del copies
        return None

    @abstractmethod
    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        """Write all shards into a directory of this save alone.

        See `SaveShardedStrategy.save`.

        After `stage` this runs in a background thread, and must use no process group except
        the one of `ranks`.
        """

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        """Write the files of this rank; return its report for `complete`.

        The default calls `write`.
        """
        fields = self.write(checkpoint_dir, ranks)
        if not ranks.is_coordinator:
            fields = None
        return json.dumps(fields).encode()

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any] | None:
        """Return fields of the marker, on the coordinator.

        Args:
            checkpoint_dir: the directory of the files.
            told: the result of `write_own` on each rank.
        """
        del checkpoint_dir
        fields: Mapping[str, Any] | None = json.loads(told[0])
        return fields
