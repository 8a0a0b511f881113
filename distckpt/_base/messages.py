"""Texts for error messages: key patterns, similar names, valid choices."""

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
"""The shortest part of a name in a search for similar names."""

_MAX_NAMED = 3
"""Up to this number, all keys with the same fault are named."""


def summarize_keys(keys: Iterable[str], limit: int = 10) -> str:
    """Describe keys in one line: `decoder.layers.{0..31}.mlp.weight (32 keys), embedding.weight`.

    At most `limit` patterns are named; the rest are counted.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in sorted(set(keys), key=natural_order):
        groups.setdefault(without_numbers(key), []).append(key)
    patterns = []
    for members in groups.values():
        if len(members) > 1:
            patterns.append(f"{key_pattern(members)!r} ({len(members)} keys)")
        else:
            patterns.append(repr(members[0]))
    if len(patterns) > limit:
        num_left = sum(len(members) for members in list(groups.values())[limit:])
        patterns[limit:] = [f"... and {num_left} more keys"]
    return ", ".join(patterns)


class KeyFault(NamedTuple):
    """A fault of a key.

    `text` follows the key in messages. Faults of one `kind` are described together.
    """

    key: str
    text: str
    kind: object


def summarize_faults(faults: Iterable[KeyFault], limit: int = 5) -> list[str]:
    """Describe the faults of keys, one line for each kind.

    The line has the text of the kind's first fault. At most `limit` kinds are described; the keys
    of all others are summarized in one more line.
    """
    kinds: dict[object, list[KeyFault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    lines = []
    for alike in list(kinds.values())[:limit]:
        keys = list(dict.fromkeys(fault.key for fault in alike))
        names = ", ".join(f"key {key!r}" for key in keys[:_MAX_NAMED])
        if len(keys) > _MAX_NAMED:
            names = f"{summarize_keys(keys)}, such as key {keys[0]!r}"
        lines.append(names + alike[0].text)
    rest: list[str] = []
    for alike in list(kinds.values())[limit:]:
        rest += [fault.key for fault in alike]
    if rest:
        lines.append(f"and there is more like that: {summarize_keys(rest)}")
    return lines


def natural_order(key: str) -> list[str | int]:
    """Sort key that puts `layers.2` before `layers.10`."""
    # Text and numbers alternate, so that like is compared with like.
    parts: list[str | int] = list(_NUMBER.split(key))
    parts[1::2] = map(int, parts[1::2])
    return parts


def did_you_mean(key: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean 'a' or 'b'?)` with the nearest names.

    Names that contain the key count, too; an empty string if there are none.
    """
    compared = list(candidates)[:_MAX_CANDIDATES]
    near = difflib.get_close_matches(key, compared, n=2, cutoff=0.75)
    if not near and len(key) >= _MIN_PART:
        near = [name for name in compared if key in name][:2]
    if not near:
        return ""
    return f" (did you mean {' or '.join(map(repr, near))}?)"


def nearest_names(keys: Sequence[str], known: Iterable[str]) -> str:
    """Return a hint to follow a list of unknown keys.

    It is the prefix by which they differ from known ones, or a near name.
    """
    return other_prefix(keys, known) or did_you_mean(keys[0], known)


def other_prefix(keys: Sequence[str], known: Iterable[str], are: str = "stored") -> str:
    """Return ` (stored with the prefix 'model.')` if most keys differ so.

    They differ from known ones, which `are` stored, or given; else an empty string.
    """
    keys = keys[:_MAX_COMPARED]
    differences = collections.Counter(_prefix_differences(keys, known))
    if not differences:
        return ""
    (asked, stored), count = differences.most_common(1)[0]
    # A prefix replacing another one may be a coincidence.
    if 2 * count < len(keys) or (count == 1 and asked and stored):
        return ""
    number = f"{count} of them " if count < len(keys) else ""
    if not asked:
        return f" ({number}{are} with the prefix {stored!r})"
    if not stored:
        return f" ({number}{are} without {asked!r})"
    return f" ({number}{are} with {stored!r} in place of {asked!r})"


def _prefix_differences(keys: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the differing prefixes of keys and known names that end alike."""
    prefixes: dict[str, str] = {}
    for name in itertools.islice(known, 10_000):
        for start in _starts(name):
            prefixes.setdefault(name[start:], name[:start])
    for key in keys:
        end = next((key[start:] for start in _starts(key) if key[start:] in prefixes), None)
        if end is None:
            continue
        asked = key.removesuffix(end)
        stored = prefixes[end]
        # One name alone, such as `weight`, means little.
        if "." in end or not (asked and stored):
            yield asked, stored


def _starts(key: str) -> Iterator[int]:
    """Yield the beginnings of the dotted parts of a key."""
    yield 0
    yield from (match.end() for match in re.finditer(r"\.", key))


def without_numbers(key: str) -> tuple[str, ...]:
    """Return the texts between a key's numbers, to group similar keys."""
    return tuple(_NUMBER.split(key)[::2])


def key_pattern(members: Sequence[str]) -> str:
    """Return the pattern of keys that differ only in numbers: `layers.{0..3}.weight`."""
    numbers = zip(*(_NUMBER.findall(member) for member in members), strict=True)
    ranges = iter([_range_text(sorted(set(map(int, column)))) for column in numbers])
    return _NUMBER.sub(lambda _: next(ranges), members[0])


def _range_text(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    # Consecutive numbers have the same distance from their places in the list.
    runs = []
    for _, group in itertools.groupby(enumerate(values), lambda pair: pair[1] - pair[0]):
        runs.append([number for _, number in group])
    long = 2 if len(runs) == 1 else 3
    texts: list[str] = []
    for run in runs:
        if len(run) >= long:
            texts.append(f"{run[0]}..{run[-1]}")
        else:
            texts += map(str, run)
    if len(texts) > 6:
        texts[6:] = ["..."]
    return f"{{{','.join(texts)}}}"


def first_line(error: BaseException) -> str:
    """Return the message of an error, without torch's stack."""
    return next(iter(str(error).splitlines()), "")


def check_num_bytes(name: str, value: object) -> None:
    """Refuse an argument that is no number of bytes, such as '1GB'."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a number of bytes, got {value!r:.100}")
    if value < 0:
        raise ValueError(f"{name} is a number of bytes and must not be negative, got {value}")


def check_file_bytes(name: str, value: object) -> None:
    """Refuse an argument that is not a file size, such as '5GB'."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of bytes, such as 5_000_000_000, got {value!r:.100}")
    if not value > 0:
        raise ValueError(f"{name} is the size of a file and must be positive, got {value!r}")


def check_count(name: str, value: object) -> None:
    """Refuse an argument that is not a count of at least 1."""
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
    """Raise TypeError for an argument that is no path, URL or None."""
    if not isinstance(value, str | os.PathLike | None):
        raise TypeError(f"{name} is a path or a URL, got {value!r:.100}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError if an argument is not one of its choices."""
    if value not in choices:
        raise ValueError(
            f"{name} must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {value!r}"
        )
