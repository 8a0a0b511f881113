"""The seam for formats of other programs: what a reader of one has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint


class Reader(ABC):
    """Reads the checkpoints of one format that is not distckpt's own.

    A reader describes which bytes of which files hold which regions of tensors. Everything else
    follows from that: `load` with any parallel layout, `consolidate`, `reshard`, `verify`, `diff`
    and the command line.

    Attributes:
        name: of the format. The manifests that a reader builds carry it from rank 0, which opens
            checkpoints, to the other ranks: register the reader on every rank.
    """

    name: str

    @abstractmethod
    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        """Tell whether a checkpoint of this format is at a location.

        Args:
            location: a path or URL.
            marker: the fields of a `metadata.json` there, None when there is none. It is never one
                of distckpt's.
        """

    @abstractmethod
    def manifest(self, location: str) -> Manifest:
        """Describe a checkpoint, see `build_manifest`; one process calls.

        Raises:
            CorruptCheckpointError: naming the file that is damaged or missing.
        """

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        """Load parts of objects, see `read_chunks`. Only for formats that hold objects beside
        tensors.

        Args:
            stored: the checkpoint.
            chunks: which of its chunks; `stored.key_of(chunk)` says whose each is.

        Returns:
            A value for each chunk.
        """
        if chunks:
            raise CheckpointingException(
                f"{type(self).__name__} describes objects, but has no load_objects."
            )
        return []

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load the state that belongs to no tensor, such as arguments and step counters: a dict,
        empty by default.
        """
        del stored
        return {}

    @property
    def holds_objects(self) -> bool:
        """Tell whether the format has objects or common state at all."""
        cls = type(self)
        return (
            cls.load_objects is not Reader.load_objects
            or cls.load_common_state is not Reader.load_common_state
        )
