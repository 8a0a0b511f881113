"""Texts for error messages: many keys as a few patterns, similar names for an unknown key, valid
choices.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Longer runs of digits are several numbers: Python refuses to convert thousands of digits.
_NUMBER = re.compile(r"([0-9]{1,18})")
_MAX_COMPARED = 1000
_MAX_CANDIDATES = 10_000
_MIN_PART = 3
"""The shortest part of a name by which it is found."""

_MAX_NAMED = 3
"""Up to this number, all keys with the same fault are named."""


def summarize_keys(keys: Iterable[str], limit: int = 10) -> str:
    """Describe keys in one line: `decoder.layers.{0..31}.mlp.weight (32 keys), embedding.weight`.

    At most `limit` patterns are named; the rest are counted.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in sorted(set(keys), key=natural_order):
        groups.setdefault(without_numbers(key), []).append(key)
    patterns = [
        f"{key_pattern(members)!r} ({len(members)} keys)" if len(members) > 1 else repr(members[0])
        for members in groups.values()
    ]
    if len(patterns) > limit:
        num_left = sum(len(members) for members in list(groups.values())[limit:])
        patterns[limit:] = [f"... and {num_left} more keys"]
    return ", ".join(patterns)


class KeyFault(NamedTuple):
    """A fault of a key; `text` follows the key in messages. Faults of one `kind` are described
    together.
    """

    key: str
    text: str
    kind: object


def summarize_faults(faults: Iterable[KeyFault], limit: int = 5) -> list[str]:
    """Describe what is wrong with keys: one line for each kind of fault, with the text of its
    first.

    At most `limit` kinds are described; the keys of all others are summarized in one more line.
    """
    kinds: dict[object, list[KeyFault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    lines = []
    for alike in list(kinds.values())[:limit]:
        keys = list(dict.fromkeys(fault.key for fault in alike))
        several = f"{summarize_keys(keys)}, such as key {keys[0]!r}"
        names = several if len(keys) > _MAX_NAMED else ", ".join(f"key {key!r}" for key in keys)
        lines.append(names + alike[0].text)
    rest = [fault.key for alike in list(kinds.values())[limit:] for fault in alike]
    return [*lines, f"and there is more like that: {summarize_keys(rest)}"] if rest else lines


def natural_order(key: str) -> list[str | int]:
    """Sort key that puts `layers.2` before `layers.10`."""
    # Text and numbers alternate, so that like is compared with like.
    parts: list[str | int] = list(_NUMBER.split(key))
    parts[1::2] = map(int, parts[1::2])
    return parts


def did_you_mean(key: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean 'a' or 'b'?)` with the nearest names, or names that contain the key,
    an empty string if there are none.
    """
    compared = list(candidates)[:_MAX_CANDIDATES]
    near = difflib.get_close_matches(key, compared, n=2, cutoff=0.75)
    if not near and len(key) >= _MIN_PART:
        near = [name for name in compared if key in name][:2]
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def nearest_names(keys: Sequence[str], known: Iterable[str]) -> str:
    """Return a text to follow a list of unknown keys: the prefix by which they differ from known
    ones, or a near name.
    """
    return other_prefix(keys, known) or did_you_mean(keys[0], known)


def other_prefix(keys: Sequence[str], known: Iterable[str], are: str = "stored") -> str:
    """Return ` (stored with the prefix 'model.')` if most keys differ from known ones in that way,
    else an empty string. The known ones `are` stored, or given.
    """
    keys = keys[:_MAX_COMPARED]
    differences = collections.Counter(_prefix_differences(keys, known))
    if not differences:
        return ""
    (asked, stored), count = differences.most_common(1)[0]
    # A prefix in place of another one may be a coincidence.
    if 2 * count < len(keys) or (count == 1 and asked and stored):
        return ""
    number = f"{count} of them " if count < len(keys) else ""
    if not asked:
        return f" ({number}{are} with the prefix {stored!r})"
    if not stored:
        return f" ({number}{are} without {asked!r})"
    return f" ({number}{are} with {stored!r} in place of {asked!r})"


def _prefix_differences(keys: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the prefixes of a key and of a known one that end alike, for each key that has one."""
    prefixes: dict[str, str] = {}
    for name in itertools.islice(known, 10_000):
        for start in _starts(name):
            prefixes.setdefault(name[start:], name[:start])
    for key in keys:
        end = next((key[start:] for start in _starts(key) if key[start:] in prefixes), None)
        if end is None:
            continue
        asked, stored = key.removesuffix(end), prefixes[end]
        # One name alone, such as `weight`, means little.
        if "." in end or not (asked and stored):
            yield asked, stored


def _starts(key: str) -> Iterator[int]:
    """Yield where the dotted parts of a key begin."""
    yield 0
    yield from (match.end() for match in re.finditer(r"\.", key))


def without_numbers(key: str) -> tuple[str, ...]:
    """Return what is between the numbers in a key, to group keys that differ only in numbers."""
    return tuple(_NUMBER.split(key)[::2])


def key_pattern(members: Sequence[str]) -> str:
    """Return the pattern of keys that differ only in numbers: `layers.{0..3}.weight`."""
    numbers = zip(*(_NUMBER.findall(member) for member in members), strict=True)
    ranges = iter([_range_text(sorted({int(n) for n in column})) for column in numbers])
    return _NUMBER.sub(lambda _: next(ranges), members[0])


def _range_text(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    # Consecutive numbers have the same distance from their places in the list.
    runs = [
        [n for _, n in run]
        for _, run in itertools.groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    ]
    long = 2 if len(runs) == 1 else 3
    texts = [
        text
        for run in runs
        for text in ([f"{run[0]}..{run[-1]}"] if len(run) >= long else map(str, run))
    ]
    return f"{{{','.join(texts[:6])}{',...' if len(texts) > 6 else ''}}}"


def first_line(error: BaseException) -> str:
    """Return what an error says, without the stack that torch adds to it."""
    return next(iter(str(error).splitlines()), "")


def check_num_bytes(name: str, value: object) -> None:
    """Raise an error if an argument is not a number of bytes, such as '1GB'."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a number of bytes, got {value!r:.100}")
    if value < 0:
        raise ValueError(f"{name} is a number of bytes and must not be negative, got {value}")


def check_file_bytes(name: str, value: object) -> None:
    """Raise an error if an argument is not the size of a file in bytes, such as '5GB'."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of bytes, such as 5_000_000_000, got {value!r:.100}")
    if not value > 0:
        raise ValueError(f"{name} is the size of a file and must be positive, got {value!r}")


def check_count(name: str, value: object) -> None:
    """Raise an error if an argument is not a number of things, from 1."""
    if type(value) is not int:
        raise TypeError(f"{name} is a number from 1, got {value!r:.100}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_tolerance(name: str, value: object) -> None:
    """Raise an error if an argument is not a difference to tolerate."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, got {value!r:.100}")
    if not value >= 0:
        raise ValueError(f"{name} is a difference to tolerate, 0 or more, got {value!r}")


def check_path(name: str, value: object) -> None:
    """Raise TypeError if an argument is neither a path or URL nor None."""
    if not isinstance(value, str | os.PathLike | None):
        raise TypeError(f"{name} is a path or a URL, got {value!r:.100}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError if an argument is not one of its choices."""
    if value not in choices:
        raise ValueError(
            f"{name} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {value!r}"
        )
