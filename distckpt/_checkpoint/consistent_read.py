"""Reading a checkpoint that another program may overwrite meanwhile.

    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, marker=attempt.marker)
            ...

The body runs again when the checkpoint was overwritten while it ran, so that nothing comes from two
of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._format.marker import marker_of
from distckpt._io import background
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

MAX_READS = 20
"""Number of times that a checkpoint is read which is overwritten each time."""


class ReadAttempt:
    """One attempt to read a checkpoint, as a context.

    Two checkpoints with the same marker have the same content: the marker holds the checksum of the
    manifest, which holds the checksums of all data.

    Collective operation: all ranks must enter and leave it. At the end they exchange whether to
    read again.

    Attributes:
        marker: on rank 0, the marker when the attempt began, if there was one.
        is_final: whether the checkpoint stayed the same.
    """

    def __init__(self, ranks: Ranks, location: str) -> None:
        self._ranks = ranks
        self._location = location
        self.marker: dict[str, Any] | None = None
        self.is_final = False

    def __enter__(self) -> ReadAttempt:
        if self._ranks.is_coordinator:
            self.marker = marker_of(self._location)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None and not self._ranks.are_in_step_after(error):
            return False
        may_repeat = error is None or isinstance(error, CheckpointingException | OSError)
        if self._ranks.is_coordinator:
            after = marker_of(self._location)
            # Without a marker nothing has replaced it; that it was removed is reported where it was
            # noticed.
            was_replaced = after is not None and after != self.marker
            may_repeat = may_repeat and was_replaced
        if not self._ranks.all_gather_numbers([may_repeat]).all():
            self.is_final = True
            return False
        if self._ranks.is_coordinator:
            logger.warning(
                "%s was overwritten while it was read: reading the new one", self._location
            )
        return True


def read_attempts(ranks: Ranks, location: str) -> Iterator[ReadAttempt]:
    """Yield attempts to read a checkpoint until one was not disturbed, see the example above.

    Collective operation: all ranks must iterate. Waits first for this process to finish writing
    there.

    Raises:
        CheckpointingException: it was overwritten during `MAX_READS` attempts.
    """
    background.wait_for_location(location)
    for _ in range(MAX_READS):
        attempt = ReadAttempt(ranks, location)
        yield attempt
        if attempt.is_final:
            return
    raise CheckpointingException(
        f"{location!r} was overwritten {MAX_READS} times, each time before it was read. Load it "
        "when it is left alone."
    )
