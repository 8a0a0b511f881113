"""Names of the directories that are put beside an output on a local disk: `.NAME.KIND-NONCE`."""

from __future__ import annotations

import os
import re
import secrets
from typing import Literal, NamedTuple

Kind = Literal["tmp", "old", "trash", "incomplete", "damaged"]
"""What is in such a directory: an output that is being written, what an overwrite is replacing,
what is being removed, what an unfinished save has left, and a checkpoint that is damaged.
"""

_HIDDEN = re.compile(r"\.(.+)\.(tmp|old|trash|incomplete|damaged)-([0-9a-f]{16})", re.DOTALL)


class HiddenName(NamedTuple):
    """The name of a directory beside an output.

    Attributes:
        name: of the output.
        kind: what is in the directory.
        nonce: 16 hex digits.
    """

    name: str
    kind: str
    nonce: str


def parse(name: str) -> HiddenName | None:
    """Return the parts of a name, None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return None if match is None else HiddenName(match[1], match[2], match[3])


def beside(location: str, kind: Kind, nonce: str | None = None) -> str:
    """Return the path of a directory beside a local output, a new one without a nonce."""
    parent, name = os.path.split(location)
    return os.path.join(parent, f".{name}.{kind}-{nonce or secrets.token_hex(8)}")


def nonce_of(directory: str) -> str:
    """Return the nonce of a directory that `beside` has named."""
    hidden = parse(os.path.basename(directory))
    assert hidden is not None, directory
    return hidden.nonce


def target_of(directory: str) -> str:
    """Return the output that a directory is beside, which `beside` has named."""
    parent, name = os.path.split(directory)
    hidden = parse(name)
    assert hidden is not None, directory
    return os.path.join(parent, hidden.name)


def left_beside(location: str, kind: Kind) -> list[str]:
    """Return the directories of a kind that are beside a local output."""
    parent, name = os.path.split(location)
    try:
        found = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Everything else, such as other steps, is passed over without a closer look.
    start = f".{name}.{kind}-"
    hidden = [(other, parse(other)) for other in found if other.startswith(start)]
    return [
        os.path.join(parent, other)
        for other, parts in hidden
        if parts is not None and (parts.name, parts.kind) == (name, kind)
    ]
