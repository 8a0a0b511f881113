"""The exception tree. `distckpt.megatron.core` is the public path."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_LISTED_RANKS = 8


class CheckpointingException(Exception):
    """Base class of the errors of distckpt.

    In programs that have imported Megatron Core, they can be caught as that package's class of the
    same name, too.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CheckpointingException:
        """Make an error that is also one of Megatron, whichever package was imported first."""
        kind: Any = cls
        theirs: Any = megatron_error()
        if theirs is not None and not issubclass(cls, theirs):
            kind = class_of_both(kind, theirs)
        made: CheckpointingException = super().__new__(kind, *args)
        return made


def megatron_error() -> type[Exception] | None:
    """Return the class of Megatron's errors; None where Megatron has not been imported."""
    module = sys.modules.get("megatron.core.dist_checkpointing.core")
    return getattr(module, "CheckpointingException", None)


@functools.cache
def class_of_both(cls: Any, theirs: Any) -> Any:
    """Return a class derived from two, which is pickled as the first."""

    def reduce(self: Any) -> tuple[Any, ...]:
        return (cls, *cls.__reduce__(self)[1:])

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, theirs), {**names, "__reduce__": reduce})


class InvalidShardingError(CheckpointingException, ValueError):
    """Shards overlap, leave gaps, contradict each other, or describe an impossible placement."""


class CheckpointNotFoundError(CheckpointingException, FileNotFoundError):
    """There is no complete checkpoint at the location: its marker is missing."""


class CheckpointExistsError(CheckpointingException, FileExistsError):
    """A complete checkpoint is already there, and `overwrite` was not given."""


class CorruptCheckpointError(CheckpointingException):
    """Files of a checkpoint are missing or damaged, or contradict its marker.

    Attributes:
        file: the location of a part of the manifest that is missing or damaged; None in errors
            about other files, which the message names.
    """

    file: str | None = None


class LoadMismatchError(CheckpointingException, LookupError):
    """The checkpoint does not match what a load requests.

    Attributes:
        missing: keys that are in the checkpoint and no rank asked for.
        unexpected: keys that were asked for and are not in the checkpoint, or not as asked for.
    """

    def __init__(
        self, message: str, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = frozenset(missing)
        self.unexpected = frozenset(unexpected)


class UnsupportedObjectError(CheckpointingException, TypeError):
    """An object cannot be stored, because its type is neither built in nor registered."""


class RankFailedError(CheckpointingException):
    """Some ranks failed: raised on all ranks, with the error of each rank that failed.

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
        """Describe what the ranks were doing (`phase`) and each failure, or say `message`
        instead.
        """
        super().__init__(_describe_failures(failures, phase) if message is None else message)
        self.failures = dict(sorted(failures.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception rebuilds itself from `args`, which hold the message and not the failures.
        return type(self), (self.failures, str(self)), self.__dict__


def _describe_failures(failures: Mapping[int, BaseException], phase: str | None) -> str:
    lines = [
        f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())
    ]
    if len(lines) > _MAX_LISTED_RANKS:
        lines[_MAX_LISTED_RANKS:] = [f"... and {len(lines) - _MAX_LISTED_RANKS} more"]
    ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
    during = "" if phase is None else f" during {phase!r}"
    return "\n  ".join([f"{ranks} failed{during}, so all ranks stopped:", *lines])
