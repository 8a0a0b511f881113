"""A save of which everything is decided and nothing written."""

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
    """What a save in the background copies data with; the class is `HostCopies`."""

    def copy(self, files: Sequence[NewFile]) -> Sequence[NewFile]:
        """Return files to write in the place of others, whose data they have in copies."""


class OwnedChunk(NamedTuple):
    """A chunk of a tensor that this rank would write, and the values of its pieces, which are views
    of the tensors of the state dict.
    """

    chunk: PlannedChunk
    values: list[torch.Tensor]


class PreparedSave(ABC):
    """A save of which everything is decided, on all ranks, and nothing written.

    Attributes:
        num_bytes: how much this rank is going to write.
        plan_reused: whether the plan was made for an earlier save.
        folder_suffix: the end of the names of the folders `tensors` and `objects`. `save` sets it
            before `write` if several saves may write in one place, on object stores. None for a
            strategy that gives files fixed names: its saves are not kept apart there, and do not
            replace a checkpoint.
        exchanges_in_write: whether ranks exchange something within `write_own`.
        written: on the coordinator, after `complete`: name and size of each file. `save` looks at
            them before it commits.
    """

    num_bytes: int = 0
    plan_reused: bool = False
    folder_suffix: str | None = None
    exchanges_in_write = True
    written: Sequence[tuple[str, int]] = ()

    def stage(self, copies: FileCopies) -> PreparedSave | None:
        """Return the same save with everything it writes in copies, so that the caller's tensors
        may change.

        Not a collective operation. The default returns None: `async_save` finishes such a save
        before it returns.
        """
        del copies
        return None

    @abstractmethod
    def write(self, checkpoint_dir: str, ranks: Ranks) -> Mapping[str, Any] | None:
        """Write all shards into a directory that nobody else uses, see `SaveShardedStrategy.save`.

        After `stage` this runs in a background thread, and must use no other process group than
        that of `ranks`.
        """

    def write_own(self, checkpoint_dir: str, ranks: Ranks) -> bytes:
        """Write what this rank owns; return what the coordinator needs for `complete`.

        The default calls `write`.
        """
        fields = self.write(checkpoint_dir, ranks)
        return json.dumps(fields if ranks.is_coordinator else None).encode()

    def complete(self, checkpoint_dir: str, told: Sequence[bytes]) -> Mapping[str, Any] | None:
        """Return fields of the marker, given what `write_own` of each rank has returned; for the
        coordinator.
        """
        del checkpoint_dir
        fields: Mapping[str, Any] | None = json.loads(told[0])
        return fields
