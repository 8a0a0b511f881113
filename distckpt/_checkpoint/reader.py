"""The interface of readers of other formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint


class Reader(ABC):
    """Reader of the checkpoints of one format that is not distckpt's.

    A reader describes the bytes of files that hold the regions of tensors. Everything else follows
    from that: `load` with any parallel layout, `consolidate`, `reshard`, `verify`, `diff` and the
    command line.

    Attributes:
        name: the name of the format. Rank 0 opens checkpoints, and other ranks find the reader by
            the name in the manifest: register it on every rank.
    """

    name: str

    @abstractmethod
    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        """Return whether a checkpoint of this format is at a location.

        Args:
            location: a path or URL.
            marker: the fields of the `metadata.json` there, None if there is no such file. A marker
                of distckpt is never given.
        """

    @abstractmethod
    def manifest(self, location: str) -> Manifest:
        """Describe a checkpoint, see `build_manifest`.

        Called in one process only.

        Raises:
            CorruptCheckpointError: a file is damaged or missing; the message names it.
        """

    def is_unchanged(self, stored: StoredCheckpoint) -> bool:
        """Return whether a checkpoint still is as `manifest` described it.

        Exports ask before they commit. By default it is described again.
        """
        return self.manifest(stored.location).to_bytes() == stored.manifest.to_bytes()

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        """Load parts of objects, see `read_chunks`.

        It is for formats that hold objects as well as tensors.

        Args:
            stored: the checkpoint.
            chunks: the chunks to load; `stored.key_of(chunk)` is the key of one.

        Returns:
            A value for each chunk.
        """
        if chunks:
            raise CheckpointingException(
                f"{type(self).__name__} describes objects, but has no load_objects."
            )
        return []

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Return the state outside of tensors, such as arguments and step counters.

        It must be a dict, and is an empty one by default.
        """
        del stored
        return {}

    @property
    def holds_objects(self) -> bool:
        """Return whether the format has objects or common state at all."""
        cls = type(self)
        return (
            cls.load_objects is not Reader.load_objects
            or cls.load_common_state is not Reader.load_common_state
        )
