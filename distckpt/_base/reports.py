"""Reports of saves and loads, and lines of JSON with a checksum.

Reports tell the bytes moved and the duration of each phase. The lines are for all records outside
of checkpoints that are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Report:
    """Size and duration of a save or load, the same everywhere."""

    location: str
    """Location of the checkpoint."""
    num_bytes: int
    """Bytes of tensors and objects, of all ranks together."""
    seconds: float
    """Seconds from the call to the return, on the slowest rank."""
    phases: Mapping[str, float]
    """Seconds by phase, each on its slowest rank."""
    slowest_rank: int
    """The rank that spent most time moving bytes."""
    num_ranks: int
    """Number of ranks."""
    _verb: ClassVar[str]

    @property
    def gigabytes_per_second(self) -> float:
        """The rate in GB per second, of all ranks together."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """Return one line for a log."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        slowest = f", slowest rank {self.slowest_rank}" if self.num_ranks > 1 else ""
        return (
            f"{self._verb} {self.location}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.2f} s "
            f"({self.gigabytes_per_second:.2f} GB/s; {phases}{slowest})"
        )


@dataclass(frozen=True)
class SaveReport(_Report):
    """The size and duration of a save.

    Phases: "describe" (flattening the state dict, comparing common state), "plan" (dividing the
    writing among ranks), "stage" (copying tensors, in a background save), "write" (shard files and
    manifest) and "commit".
    """

    plan_reused: bool = False
    """Whether the plan of an earlier save was used."""
    _verb = "saved"


@dataclass(frozen=True)
class LoadReport(_Report):
    """The size and duration of a load.

    Phases: "plan" (finding the checkpoint, comparing the requests) and "read" (manifest, tensors
    and objects). `num_bytes` counts the requests of all ranks.
    """

    missing: frozenset[str] = frozenset()
    """Keys of the checkpoint whose values were left out.

    Where `strict` compares keys, these are the keys that no rank requested, else the keys that
    modules and optimizers have no place for. Also tensors that are tied to other tensors now and
    were not when they were saved.
    """
    unexpected: frozenset[str] = frozenset()
    """Keys that some rank requested and the checkpoint does not have; they were left out."""
    _verb = "loaded"


@dataclass(frozen=True)
class MoveReport(_Report):
    """The size and duration of a move of tensors between ranks.

    Phases: "plan" (describing both sides, planning unless the plan is known) and "move".
    `num_bytes` counts the values that all ranks got, in their original dtypes.
    """

    sent_bytes: int = 0
    """Bytes that went from one machine to another."""
    version: int | None = None
    """The version that a `Route` moved."""
    _verb = "moved"


def publish(
    report: SaveReport | LoadReport | MoveReport, on_report: Callable[[Any], object]
) -> None:
    """Pass a report to the caller's function.

    Its exceptions are logged and go no further: the save or load has succeeded on all ranks.
    """
    try:
        on_report(report)
    except Exception:
        logger.exception("%s, and on_report failed", report)


# --- Lines with a checksum ------------------------------------------------------------------------

_CHECKSUM = "checksum"


def sealed(fields: Mapping[str, Any]) -> str:
    """Encode fields as a line of JSON that ends with their checksum."""
    return json.dumps({**fields, _CHECKSUM: _digest(fields)})


def unsealed(line: str | bytes, form: Mapping[str, type]) -> dict[str, Any]:
    """Decode a line that `sealed` made.

    Args:
        line: may be written with other spaces.
        form: names and types of fields that it must have.

    Raises:
        ValueError: it is something else, was damaged or edited.
    """
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        digest = fields.pop(_CHECKSUM, None)
        if digest != _digest(fields):
            raise ValueError("the content does not match the checksum in it")
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    wrong = [name for name, kind in form.items() if not isinstance(fields.get(name), kind)]
    if wrong:
        raise ValueError(f"the field {wrong[0]!r} is missing, or of another type")
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    # Of the values, not of the text: other programs write the same values with other spaces.
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()
