"""The exception tree. `distckpt.megatron.core` is the public path."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_LISTED_RANKS = 8


class CheckpointingException(Exception):
    """Base class of the errors of distckpt.

    In programs that have imported Megatron Core, they can also be caught as its class of the same
    name.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CheckpointingException:
        """Make an error that is also a Megatron error.

        The order of imports of the two packages does not matter.
        """
        kind: Any = cls
        theirs: Any = megatron_error()
        if theirs is not None and not issubclass(cls, theirs):
            kind = class_of_both(kind, theirs)
        error: CheckpointingException = super().__new__(kind, *args)
        return error


def megatron_error() -> type[Exception] | None:
    """Return the class of Megatron's errors, None where Megatron is not imported."""
    module = sys.modules.get("megatron.core.dist_checkpointing.core")
    return getattr(module, "CheckpointingException", None)


@functools.cache
def class_of_both(cls: Any, theirs: Any) -> Any:
    """Return a class derived from both, which is pickled as the first."""

    def reduce(self: Any) -> tuple[Any, ...]:
        return (cls, *cls.__reduce__(self)[1:])

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, theirs), {**names, "__reduce__": reduce})


class InvalidShardingError(CheckpointingException, ValueError):
    """Shards that overlap, leave gaps, contradict each other, or cannot be placed."""


class CheckpointNotFoundError(CheckpointingException, FileNotFoundError):
    """No complete checkpoint at the location: its marker is missing."""


class CheckpointExistsError(CheckpointingException, FileExistsError):
    """A complete checkpoint is already there, and `overwrite` is not set."""


class CorruptCheckpointError(CheckpointingException):
    """Checkpoint files that are missing or damaged, or contradict the marker.

    Attributes:
        file: the location of a part of the manifest that is missing or damaged; None in errors
            about other files, which the message names.
    """

    file: str | None = None


class LoadMismatchError(CheckpointingException, LookupError):
    """A checkpoint that does not match the request of a load.

    Attributes:
        missing: keys of the checkpoint that no rank requested.
        unexpected: requested keys that the checkpoint does not have in the requested form.
    """

    def __init__(
        self, message: str, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = frozenset(missing)
        self.unexpected = frozenset(unexpected)


class UnsupportedObjectError(CheckpointingException, TypeError):
    """An object that cannot be stored: its type is neither built in nor registered."""


class RankFailedError(CheckpointingException):
    """Failure of some ranks, raised on all with each rank's error.

    Attributes:
        failures: the exception of each failed rank, by rank number, in ascending order.
        is_lost_contact: whether a rank died or did not answer; the process group is unusable then.
    """

    is_lost_contact = False

    def __init__(
        self,
        failures: Mapping[int, BaseException],
        message: str | None = None,
        *,
        phase: str | None = None,
    ) -> None:
        """Describe the ranks' phase and each failure, unless `message` is there."""
        if message is None:
            message = _describe_failures(failures, phase)
        super().__init__(message)
        self.failures = dict(sorted(failures.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception rebuilds itself from `args`, which hold the message and not the failures.
        return type(self), (self.failures, str(self)), self.__dict__


def add_to_message(error: Exception, text: str) -> None:
    """Add a text to the message of an error."""
    if isinstance(error, OSError) and error.errno is not None:
        error.strerror = f"{error.strerror} ({text})"
    else:
        error.args = (f"{error} ({text})", *error.args[1:])


def _describe_failures(failures: Mapping[int, BaseException], phase: str | None) -> str:
    lines = [
        f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())
    ]
    if len(lines) > _MAX_LISTED_RANKS:
        lines[_MAX_LISTED_RANKS:] = [f"... and {len(lines) - _MAX_LISTED_RANKS} more"]
    ranks = f"{len(failures)} ranks"
    if len(failures) == 1:
        ranks = "1 rank"
    during = "" if phase is None else f" during {phase!r}"
    return "\n  ".join([f"{ranks} failed{during}, so all ranks stopped:", *lines])
