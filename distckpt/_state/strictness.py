"""Treatment of keys that only the checkpoint or only the request has.

`distckpt.megatron.validation` is the public path.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from enum import Enum

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, nearest_names, summarize_keys

logger = logging.getLogger(__name__)


class StrictHandling(Enum):
    """Reaction of a load to keys that only one side has.

    The sides are the checkpoint and the request; names and meaning are Megatron's. *Unexpected*
    keys are requested and not in the checkpoint. *Missing* keys are in the checkpoint and requested
    by no rank.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Unexpected keys are an error while loading; missing ones are ignored. This does not hold
    below a module in the request.
    """
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are left out with a warning; missing ones are ignored."""
    LOG_ALL = "log_all"
    """Unexpected keys are left out with a warning; missing ones are warned about."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys are an error; missing ones are ignored."""
    RAISE_ALL = "raise_all"
    """Unexpected and missing keys are errors."""
    RETURN_UNEXPECTED = "return_unexpected"
    """`load` returns `(state_dict, missing, unexpected)`. The first lacks the unexpected keys."""
    RETURN_ALL = "return_all"
    """The same, and missing keys are looked for."""
    IGNORE_ALL = "ignore_all"
    """Unexpected keys are left out silently; missing ones are ignored."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the keys of the checkpoint must be known."""
        return parse_strict_flag(val) != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the keys that all ranks request must be known."""
        return parse_strict_flag(val) in (
            StrictHandling.LOG_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
            StrictHandling.IGNORE_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether `load` returns the differing keys."""
        return parse_strict_flag(val) in (
            StrictHandling.RETURN_UNEXPECTED,
            StrictHandling.RETURN_ALL,
        )


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the mode of a name, or of Megatron's enum.

    Raises:
        ValueError: no such mode.
    """
    if isinstance(strict, StrictHandling):
        return strict
    is_megatrons = type(strict).__name__ == StrictHandling.__name__
    try:
        if is_megatrons:
            return StrictHandling(getattr(strict, "value", None))
        return StrictHandling(strict)
    except ValueError:
        names = [mode.value for mode in StrictHandling]
        hint = did_you_mean(str(strict), names)
        if isinstance(strict, bool):
            mode = "raise_all" if strict else "log_all"
            hint = f" (torch's {strict} is {mode!r} here)"
        raise ValueError(
            f"Invalid strict flag: {strict!r}{hint}. Use a StrictHandling or one of "
            f"{', '.join(map(repr, names))}."
        ) from None


def _mismatch_message(
    missing: Iterable[str], unexpected: Iterable[str], known: Iterable[str], location: str
) -> str:
    """Describe differing keys by pattern, with near names in the checkpoint."""
    missing = sorted(missing)
    unexpected = sorted(unexpected)
    lines = [f"The requested keys and those in the checkpoint {location!r} differ."]
    if unexpected:
        hint = nearest_names(unexpected, known)
        lines.append(
            "Unexpected keys (requested, not in the checkpoint): "
            f"{summarize_keys(unexpected)}{hint}."
        )
    if missing:
        lines.append(
            f"Missing keys (in the checkpoint, requested by no rank): {summarize_keys(missing)}."
        )
    return " ".join(lines)


def handle_mismatch(
    strict: StrictHandling,
    missing: Collection[str],
    unexpected: Collection[str],
    known: Iterable[str],
    location: str,
) -> None:
    """Raise an error, warn or do nothing about differing keys.

    `strict` decides; the error is a LoadMismatchError.
    """
    if strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.LOG_UNEXPECTED):
        missing = ()
    if not (missing or unexpected):
        return
    if strict in (StrictHandling.RAISE_ALL, StrictHandling.RAISE_UNEXPECTED):
        message = _mismatch_message(missing, unexpected, known, location)
        way_out = (
            "Correct the sharded state dict, or pass strict='report' to load what both have "
            "(StrictHandling.LOG_ALL in distckpt.megatron)."
        )
        raise LoadMismatchError(f"{message} {way_out}", missing=missing, unexpected=unexpected)
    if strict in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED):
        logger.warning(_mismatch_message(missing, unexpected, known, location))
