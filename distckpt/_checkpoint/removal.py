"""Checkpoints that another program removes while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations


@contextlib.contextmanager
def noticing_removal(ranks: Ranks, location: str) -> Iterator[None]:
    """Report that a checkpoint was removed while it was read, instead of reporting it as
    damaged.
    """
    try:
        yield
    except (CorruptCheckpointError, OSError) as error:
        if ranks.is_known_to_all(error) or locations.exists(location):
            raise
        raise CheckpointNotFoundError(
            f"{location!r} was removed while it was being loaded, by whatever limits how many "
            "checkpoints are kept, perhaps. What was loaded so far is incomplete: load another "
            "checkpoint."
        ) from error
