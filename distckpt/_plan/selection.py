"""Selection of tensors: patterns of keys, and changes of their prefixes."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._format.manifest import OBJECT, Manifest
from distckpt.rules._mapped import TensorSpec

logger = logging.getLogger(__name__)

_SPECIAL = frozenset("*?[")


def matches(key: str, patterns: str | Sequence[str]) -> bool:
    """Whether a key matches a pattern.

    Patterns with `*`, `?` or `[` match as in file names, others by prefix. Patterns behind a `!`
    exclude keys; if there are no other patterns, all other keys match.
    """
    included, excluded = divided(patterns)
    if any(_fits(key, pattern) for pattern in excluded):
        return False
    if not included:
        return bool(excluded)
    return any(_fits(key, pattern) for pattern in included)


def divided(patterns: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the patterns to include, and the patterns to exclude."""
    listed = patterns
    if isinstance(patterns, str):
        listed = [patterns]
    included = []
    excluded = []
    for pattern in listed:
        if pattern.startswith("!"):
            excluded.append(pattern[1:])
        else:
            included.append(pattern)
    return included, excluded


def _fits(key: str, pattern: str) -> bool:
    if _SPECIAL.isdisjoint(pattern):
        return key.startswith(pattern)
    return fnmatch.fnmatchcase(key, pattern)


def check_patterns(keys: object) -> None:
    """Check that `keys` is a pattern, a list of patterns, or None.

    Raises:
        TypeError: it is something else.
    """
    listed = keys if isinstance(keys, Collection) else [keys]
    if keys is not None and not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"keys is a pattern of keys, or a list of them, got {keys!r:.200}.")


def check_rename(rename: object) -> None:
    """Check an argument that gives keys other beginnings.

    Raises:
        TypeError: it is neither a dict of texts nor None.
    """
    is_dict = isinstance(rename, Mapping | None)
    names = (*rename, *rename.values()) if isinstance(rename, Mapping) else ()
    if not is_dict or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"rename is a dict of old beginnings of names -> new ones, got {rename!r:.200}."
        )


def check_all_match(
    names: Collection[str],
    keys: str | Sequence[str] | None = None,
    rename: Iterable[str] = (),
    where: str = "",
) -> None:
    """Refuse patterns and old prefixes that match none of the names.

    For patterns that exclude keys, this only warns.

    Raises:
        LoadMismatchError: one matches nothing.
    """
    included, excluded = divided(keys or ())
    absent = _without_match(excluded, names)
    if absent:
        named = ", ".join(map(repr, absent))
        logger.warning("no tensor%s matches %s, which is to be left out", where, named)
    unused = []
    for old in rename:
        if not any(name.startswith(old) for name in names):
            unused.append(old)
    unused += _without_match(included, names)
    if unused:
        there = summarize_keys(names) or "none"
        raise LoadMismatchError(
            f"No tensor{where} matches {', '.join(map(repr, unused))}; there are {there}."
        )


def _without_match(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    unmatched = []
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            unmatched.append(pattern)
    return unmatched


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the prefix of a name; the first of the old prefixes that it begins with counts."""
    for old, new in rename.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def select_tensors(
    manifest: Manifest,
    keys: str | Sequence[str] | None,
    write_tied: bool,
    hidden: Set[str] = frozenset(),
    left_out: Set[str] = frozenset(),
) -> dict[str, TensorSpec]:
    """Return the stored tensors that match, in natural order.

    Args:
        manifest: manifest of the checkpoint.
        keys: see `matches`; None for all.
        write_tied: whether to return all tied tensors that match; else only the first of them.
        hidden: keys that are no tensors of the model, such as scales.
        left_out: further keys to leave out, such as an optimizer's.

    Raises:
        LoadMismatchError: nothing matches, or nothing matches one of the patterns.
    """
    check_patterns(keys)
    names = names_of_tensors(manifest)
    visible = []
    for name in names:
        if name not in hidden and name not in left_out:
            visible.append(name)
    selected = visible
    if keys is not None:
        selected = []
        for name in visible:
            if matches(name, keys):
                selected.append(name)
    if not selected:
        raise _nothing_selected(keys, visible, _optimizer_note(names, left_out))
    check_all_match(names, keys)
    if not write_tied:
        selected = _first_of_tied(selected, manifest.key_index)
    infos = {}
    for name in sorted(selected, key=natural_order):
        key_id = manifest.key_index[name]
        infos[name] = TensorSpec(manifest.global_shapes[key_id], manifest.dtypes[key_id])
    return infos


def _nothing_selected(
    keys: str | Sequence[str] | None, visible: Sequence[str], optimizer_note: str
) -> LoadMismatchError:
    if keys is None and not optimizer_note:
        return LoadMismatchError(
            "The checkpoint holds no tensors: plain tensors in a state dict, such as those of "
            "model.state_dict(), are saved in common state. Save the module itself, "
            '{"model": model}.'
        )
    there = summarize_keys(visible) or "none"
    pattern = "the model" if keys is None else repr(keys)
    return LoadMismatchError(f"No tensor matches {pattern}; there are {there}{optimizer_note}.")


def _optimizer_note(names: Iterable[str], left_out: Set[str]) -> str:
    """Name the optimizers' tensors, which an export leaves out by default."""
    optimizer_names = []
    for name in names:
        if name in left_out:
            optimizer_names.append(name)
    if not optimizer_names:
        return ""
    return f' besides an optimizer\'s, which keys="*" selects: {summarize_keys(optimizer_names)}'


def _first_of_tied(names: Iterable[str], key_index: Mapping[str, int]) -> list[str]:
    firsts: dict[int, str] = {}
    for name in names:
        firsts.setdefault(key_index[name], name)
    return list(firsts.values())


def names_of_tensors(manifest: Manifest) -> list[str]:
    """Return all names of tensors, tied ones at the end."""
    key_index = manifest.key_index
    dtypes = manifest.dtypes
    all_names = (*manifest.keys, *manifest.aliases)
    return [name for name in all_names if dtypes[key_index[name]] != OBJECT]
