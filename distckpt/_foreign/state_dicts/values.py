"""Lists and dicts of PyTorch's state dicts, whose items are stored under names with dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt._base.errors import LoadMismatchError


def nested_by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name as nested dicts, one per name part.

    Raises:
        LoadMismatchError: a name is the beginning of another one.
    """
    nested: dict[str, Any] = {}
    # Shorter names come before names that begin with them.
    for name in sorted(values):
        *outer, last = name.split(".")
        node = nested
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise unknown_keys_error(f"entry {name!r}")
        node[last] = values[name]
    return nested


def joined_value(value: Any, parts: Mapping[str, Any], owner: str) -> Any:
    """Return a list or dict with its separately stored tensors.

    torch names the items of lists by their places, and the items of dicts by their keys as text.

    Args:
        value: the items that are no tensors; None without any.
        parts: the tensors, see `nested_by_name`.
        owner: name of the value, for an error.

    Raises:
        LoadMismatchError: it is a dict whose keys are no text.
    """
    items: dict[Any, Any] = {}
    if isinstance(value, list):
        items = dict(enumerate(value))
    elif value:
        items = dict(value)
    keys = {str(key): key for key in items}
    for name, inner in parts.items():
        key = keys.get(name, _key_of(name))
        if isinstance(inner, dict):
            items[key] = joined_value(items.get(key), inner, owner)
        else:
            items[key] = inner
    if not isinstance(value, dict) and items.keys() == {*range(len(items))}:
        return [items[place] for place in range(len(items))]
    if int in map(type, items.keys() - keys.values()):
        raise unknown_keys_error(owner)
    return items


def _key_of(name: str) -> str | int:
    return int(name) if name.isdecimal() else name


def unknown_keys_error(owner: str) -> LoadMismatchError:
    """Return the error about a dict whose keys cannot be known."""
    return LoadMismatchError(
        f"The {owner} has tensors in a dict whose keys are no text, which their names do not tell. "
        "Load the state dict itself, with `optimizer.state_dict()` in the place of the optimizer, "
        "and give it to `optimizer.load_state_dict`."
    )
