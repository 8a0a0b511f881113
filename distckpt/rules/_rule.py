"""The base of rules: patterns of keys, and conversions of tensors."""

from __future__ import annotations

import bisect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from distckpt._base.dtypes import PACKED_PER_ITEM
from distckpt._base.errors import InvalidShardingError
from distckpt.rules._mapped import MappedTensor

Captures: TypeAlias = tuple[str, ...]
"""Text that each wildcard of a pattern matches, in order."""

Produced: TypeAlias = Iterable[tuple[str, MappedTensor]]
"""New tensors with their names."""

_WILDCARD = re.compile(r"(\*\*?)")
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\+(\d+))?\}")


class Step(NamedTuple):
    """One application of a rule.

    The keys `consumed` go, the pairs (name, tensor) in `produced` come.
    """

    consumed: tuple[str, ...]
    produced: tuple[tuple[str, MappedTensor], ...]


@dataclass(frozen=True)
class Rule(ABC):
    """A change of some tensors of a checkpoint.

    Attributes:
        optional: whether the rule may match nothing, which is an error otherwise.
        count: number of matches that the rule must have in an export, where it is known beforehand
            (the number of layers, say). A load, whose ranks may hold parts of the model, does not
            count.
    """

    optional: bool = field(default=False, kw_only=True, repr=False)
    count: int | None = field(default=None, kw_only=True, repr=False)

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Patterns of the keys that the rule consumes."""

    @abstractmethod
    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        """Apply the rule to every match among `tensors`."""


@dataclass(frozen=True)
class OneKeyRule(Rule):
    """A rule that converts one tensor at a time."""

    pattern: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.pattern,)

    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        for key, captures in find_matches(self.pattern, tensors):
            yield Step((key,), tuple(self.convert(key, tensors[key], captures)))

    @abstractmethod
    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        """Make the new tensors of one tensor."""


@dataclass(frozen=True)
class OneNameRule(OneKeyRule):
    """A rule that makes one tensor, named `to`, of each."""

    to: str

    def __post_init__(self) -> None:
        check_names(self, (self.to,))


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], Captures | None]:
    """Return the function that matches a key.

    Each wildcard, from the first one on, takes as much as it can. A regular expression is fast
    where it has one way to go back; else it could take forever.
    """
    pieces = _WILDCARD.split(pattern)
    if pieces.count("**") > 1 or any(
        len(_WILDCARD.findall(part)) > 1 for part in pattern.split(".")
    ):
        return lambda key: _match(pieces, key)
    groups = {"*": "([^.]+)", "**": "(.+)"}
    regex = re.compile(
        "".join(groups.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL
    )

    def match_key(key: str) -> Captures | None:
        match = regex.fullmatch(key)
        return match.groups() if match is not None else None

    return match_key


def _match(pieces: Sequence[str], key: str) -> Captures | None:
    """Match in time that hardly exceeds pieces times the key's length."""
    # For each piece, from the end of the pattern on: the positions where the rest may begin.
    starts = [[len(key)]]
    for piece in reversed(pieces):
        ends = starts[-1]
        starts.append([at for at in range(len(key) + 1) if _end_of(piece, key, at, ends) >= 0])
    position = 0
    captures = []
    for piece, ends in zip(pieces, reversed(starts[:-1]), strict=True):
        end = _end_of(piece, key, position, ends)
        if end < 0:
            return None
        if piece in ("*", "**"):
            captures.append(key[position:end])
        position = end
    return tuple(captures)


def _end_of(piece: str, key: str, start: int, ends: Sequence[int]) -> int:
    """Return the last position where a piece may end, or -1."""
    first = start + 1
    last = len(key)
    if piece == "*":
        last = start + len(key[start:].partition(".")[0])
    elif piece != "**":
        first = last = start + len(piece)
        if not key.startswith(piece, start):
            return -1
    place = bisect.bisect_right(ends, last)
    if place and ends[place - 1] >= first:
        return ends[place - 1]
    return -1


def find_matches(pattern: str, keys: Mapping[str, object]) -> Iterator[tuple[str, Captures]]:
    """Find the keys that a pattern matches, with the wildcards' texts."""
    if not count_wildcards(pattern):
        if pattern in keys:
            yield pattern, ()
        return
    match = _matcher(pattern)
    end = pattern.rpartition("*")[2]
    for key in keys:
        # Most keys end differently, which is faster to notice.
        if key.endswith(end) and (captures := match(key)) is not None:
            yield key, captures


def count_wildcards(pattern: str) -> int:
    """Count the `*` and `**` of a pattern."""
    return len(_WILDCARD.findall(pattern))


def fill_captures(pattern: str, captures: Captures) -> str:
    """Replace the wildcards of a pattern by `captures`."""
    values = iter(captures)
    return _WILDCARD.sub(lambda _: next(values), pattern)


def fill_name(name: str, captures: Captures, index: int | None = None) -> str:
    """Replace {0}, {1}, ... by `captures` and {i} by `index`.

    {0+3} adds 3 to a number.
    """

    def value_of(match: re.Match[str]) -> str:
        value = str(index) if match[1] == "i" else captures[int(match[1])]
        if match[2] is None:
            return value
        return str(int(value) + int(match[2]))

    return _PLACEHOLDER.sub(value_of, name)


def check_names(rule: Rule, names: Sequence[str], *, has_index: bool = False) -> None:
    """Raise ValueError for names that use unknown placeholders.

    The pattern does not provide them.
    """
    if isinstance(names, str):
        raise ValueError(f"{rule}: give a tuple of names, not the string {names!r}")
    known = {str(number) for number in range(count_wildcards(rule.reads[0]))}
    if has_index:
        known.add("i")
    for name in names:
        used = {placeholder for placeholder, _ in _PLACEHOLDER.findall(name)}
        if used - known:
            raise ValueError(
                f"{rule}: {name!r} uses {{{min(used - known)}}}, which the pattern does not provide"
            )
        if has_index and "i" not in used:
            raise ValueError(f"{rule}: {name!r} must contain {{i}}, the index in the stack")


def normalize_axis(rule: Rule, key: str, tensor: MappedTensor, axis: int) -> int:
    """Count a negative axis from the first one."""
    ndim = len(tensor.shape)
    if not -ndim <= axis < ndim:
        raise misfit(rule, key, tensor, f"it has no axis {axis}")
    return axis % ndim


def check_packed(
    rule: Rule,
    key: str,
    tensor: MappedTensor,
    *,
    moves_last_axis: bool,
) -> None:
    """Refuse to separate elements that share a byte.

    4-bit types pack them along the last axis.
    """
    if moves_last_axis and tensor.dtype in PACKED_PER_ITEM:
        raise misfit(
            rule, key, tensor, "the elements along its last axis share bytes and must stay together"
        )


def misfit(rule: Rule, key: str, tensor: MappedTensor, why: str) -> InvalidShardingError:
    """Return the error for a rule that does not fit a tensor."""
    return InvalidShardingError(
        f"{rule} does not fit {key!r} of shape {tensor.shape} and dtype {tensor.dtype}: {why}. "
        "Correct the rule."
    )
