"""Common state: everything in a state dict that is not sharded.

It is saved once, from rank 0, and compared between ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distckpt._base.errors import UnsupportedObjectError
from distckpt._base.tree import copied
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt.mapping._wrappers import CommonStateDict, StateDict

logger = logging.getLogger(__name__)

COMMON_KEY = "distckpt.common_state"
"""Key of the object that holds common state in a checkpoint; reserved."""
CONTENT_METADATA = "content_metadata"
"""Entry of common state that describes the content of a checkpoint."""


def object_text(key: str) -> str:
    """Name an object at the beginning of a message."""
    if key == COMMON_KEY:
        return "Common state"
    return f"The object {key!r:.300}"


def storable_metadata(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of content metadata that can be stored.

    It lacks the process group.
    """
    if metadata is None:
        return None
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def comparable(
    common: CommonStateDict, preprocess: Callable[[CommonStateDict], StateDict] | None
) -> CommonStateDict:
    """Prepare common state for comparison.

    The caller's function gets a copy, so it cannot change the values that are saved.
    """
    if preprocess is None:
        return common
    return preprocess(copied(common))


def encoded(key: str, value: Any, leaves_out: bool) -> bytes:
    """Encode an object, perhaps without values that cannot be stored.

    They are left out if `leaves_out`.

    Raises:
        UnsupportedObjectError: it holds a value that cannot be stored.
    """
    try:
        return codec.encode(value, refuses_left_out=True)
    except UnsupportedObjectError as error:
        if not leaves_out:
            raise UnsupportedObjectError(f"{object_text(key)} cannot be saved: {error}") from error
    storable, problems = codec.without_unsupported(value)
    logger.warning(
        "%s is stored without %d of its values, which cannot be stored: %s",
        object_text(key),
        len(problems),
        "; ".join(problems),
    )
    return codec.encode(storable)


def digest(common: CommonStateDict) -> int:
    """Return a 61-bit hash of common state, for `check_differences`."""
    return checksum(codec.encode(common)) >> 3
