"""Names of the directories that are put beside an output: `.NAME.KIND-NONCE`."""

from __future__ import annotations

import re
import secrets
from typing import Literal, NamedTuple

from distckpt._storage import locations

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
    parent, name = locations.split(location)
    return locations.join(parent, f".{name}.{kind}-{nonce or secrets.token_hex(8)}")


def nonce_of(directory: str) -> str:
    """Return the nonce of a directory that `beside` has named."""
    hidden = parse(locations.split(directory)[1])
    assert hidden is not None, directory
    return hidden.nonce


def target_of(directory: str) -> str:
    """Return the output that a directory is beside, which `beside` has named."""
    parent, name = locations.split(directory)
    hidden = parse(name)
    assert hidden is not None, directory
    return locations.join(parent, hidden.name)


def left_beside(location: str, kind: Kind) -> list[str]:
    """Return the directories of a kind that are beside a local output."""
    parent, name = locations.split(location)
    found = locations.list_names(parent) if locations.isdir(parent) else []
    hidden = [(other, parse(other)) for other in found]
    return [
        locations.join(parent, other)
        for other, parts in hidden
        if parts is not None and (parts.name, parts.kind) == (name, kind)
    ]
