"""Directories of Orbax, their items, and the trees of these."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from distckpt._base.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from distckpt._foreign.orbax.values import OCDBT_NAME, read_json, unreadable
from distckpt._storage import locations

TREE_NAME = "_METADATA"
"""The file of an item that names all leaves of its tree."""
_STEP_NAME = "_CHECKPOINT_METADATA"
_STEP_NAMES = {_STEP_NAME, "orbax.checkpoint"}
"""Files in the directory of a step, or of a single item."""
_JSON_NAMES = {"metadata", "metrics"}
"""Files of items that hold JSON."""
_LEGACY_NAMES = {"checkpoint", ".zarray"}
"""The file of versions before 0.4, and that of an array."""
_TELLING = {TREE_NAME, *_STEP_NAMES, *_JSON_NAMES, *_LEGACY_NAMES}
_UNFINISHED = ".orbax-checkpoint-tmp"
_OUTSIDE = {"", ".", ".."}
_MAX_LOOKS = 8
"""Folders of a root that are looked at."""
_STEP_FOLDER = re.compile(r"(?:.*_)?(\d{1,18})")
_HANDLER_OF_READ = re.compile(r".*\b(Standard|PyTree|Array|Json)(Checkpoint)?Handler")
"""Orbax's classes for items that are read here."""
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
"""Values by the types of leaves without stored data."""

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """A tree in a checkpoint.

    Attributes:
        name: the name of the item in the checkpoint; "" if the directory is the item.
        folder: the location of its directory.
        prefix: beginning of its keys.
        uses_ocdbt: whether arrays are in a database instead of a folder each.
        uses_zarr3: whether arrays have version 3 of the Zarr format.
        is_complete: whether each chunk is stored, also one that holds nothing but zeros.
    """

    name: str
    folder: str
    prefix: str
    uses_ocdbt: bool
    uses_zarr3: bool
    is_complete: bool


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
        item: the tree.
        path: the keys that lead to it; indices of sequences are strings, too.
        kind: "array", "scalar" for a number of Python, which is stored as an array, or "value".
        value: the value, if that is its kind.
    """

    item: Item
    path: tuple[str, ...]
    kind: Literal["array", "scalar", "value"]
    value: Any = None

    @property
    def name(self) -> str:
        """Orbax's name of its array."""
        return ".".join(self.path)

    @property
    def key(self) -> str:
        """Its key in the checkpoint."""
        return self.item.prefix + self.name

    @property
    def whole_path(self) -> tuple[str, ...]:
        """Its path in the checkpoint."""
        return (self.item.name, *self.path) if self.item.prefix else self.path


Layout = tuple[list[Leaf], dict[str, Any]]
"""The leaves of all trees of a checkpoint, and the items that are JSON, by name."""


def is_checkpoint(location: str) -> bool:
    """Return whether a directory is one of Orbax."""
    if not locations.isdir(location):
        return False
    names = set(locations.list_names(location))
    if not names.isdisjoint({TREE_NAME, OCDBT_NAME, *_STEP_NAMES}):
        return True
    inside = _look_inside(location, names)
    # Arrays in folders beside the file of an old version.
    is_legacy = names.union(*inside.values()) >= _LEGACY_NAMES
    return is_legacy or _newest_step(inside) is not None or bool(_trees_in(inside, names))


def read_layout(location: str) -> Layout:
    """Read all that a checkpoint stores outside of arrays.

    Raises:
        CheckpointNotFoundError: it is a directory with several steps.
        CorruptCheckpointError: a file is damaged, the save did not finish, or two leaves have one
            array.
    """
    if _UNFINISHED in locations.split(location)[1]:
        raise CorruptCheckpointError(
            f"{location!r} is the directory of a save that has not finished: load another step."
        )
    names = set(locations.list_names(location))
    if TREE_NAME in names:
        return _read_item(location, "", ""), {}
    inside = _look_inside(location, names)
    trees = _trees_in(inside, names)
    if not trees:
        raise _nothing_to_read(location, names, _newest_step(inside))
    values = {}
    for name in sorted(inside):
        for file in inside[name] & _JSON_NAMES:
            path = locations.join(location, name, file)
            # At a URL, it may be a folder.
            if locations.isfile(path):
                values[name] = read_json(path)
    # One tree has the names that the program gave; of several, each name begins with the item.
    leaves = []
    for name in trees:
        prefix = f"{name}." if len(trees) > 1 else ""
        leaves += _read_item(locations.join(location, name), name, prefix)
    _check_keys(location, leaves)
    if _STEP_NAME in names:
        _check_items(location, names, {*trees, *values})
    return leaves, values


def _check_items(location: str, names: set[str], found: set[str]) -> None:
    """Check that each readable item of a step was found."""
    path = locations.join(location, _STEP_NAME)
    try:
        handlers = dict(read_json(path)["item_handlers"])
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable("The list of items", path, error) from error
    for name in sorted(set(handlers) - found):
        folder = locations.join(location, name)
        if name not in names or _HANDLER_OF_READ.fullmatch(str(handlers[name])):
            raise CorruptCheckpointError(
                f"{folder!r}, an item that {path!r} names, is missing or lacks its file "
                f"{TREE_NAME!r} or 'metadata': restore it from a copy. To read another item alone, "
                "give its directory."
            )
        logger.warning(
            "%r is left out: only Orbax reads items of %r. All other items are read.",
            folder,
            handlers[name],
        )


def _nothing_to_read(location: str, names: set[str], step: str | None) -> CheckpointingException:
    """Return the error about a directory without a tree."""
    if step is not None:
        return CheckpointNotFoundError(
            f"{location!r} holds several steps of Orbax: give the directory of one. The newest is "
            f"{locations.join(location, step)!r}."
        )
    if "checkpoint" in names:
        return CheckpointingException(
            f"{location!r} was written by an old version of Orbax or Flax, which keeps arrays in "
            "the file 'checkpoint': restore it with Orbax and save it again."
        )
    return CheckpointNotFoundError(
        f"{location!r} is of Orbax, but no item with arrays: neither it nor a folder in it has a "
        f"file {TREE_NAME!r}. The save did not finish, or not all files were copied."
    )


def _look_inside(location: str, names: set[str]) -> dict[str, set[str]]:
    """Return the files that tell a folder's kind, by folder."""
    looked = names
    if names.isdisjoint(_STEP_NAMES):
        # Of a root, the newest steps are enough; on an object store, each look takes a request.
        steps = sorted((name for name in names if _step_of(name) >= 0), key=_step_of)
        looked = names.difference(steps)
        if len(looked) > _MAX_LOOKS and not locations.is_local(location):
            looked = set()
        looked = looked.union(steps[-_MAX_LOOKS:])
    inside = {}
    for name in looked:
        path = locations.join(location, name)
        if locations.is_local(path):
            inside[name] = {file for file in _TELLING if locations.isfile(f"{path}/{file}")}
            continue
        with contextlib.suppress(FileNotFoundError):
            inside[name] = _TELLING.intersection(locations.list_names(path))
    return inside


def _newest_step(inside: Mapping[str, set[str]]) -> str | None:
    """Return the folder of the newest step, or None."""
    steps = [name for name in inside if _step_of(name) >= 0 and inside[name] & _STEP_NAMES]
    return max(steps, default=None, key=_step_of)


def _trees_in(inside: Mapping[str, set[str]], names: set[str]) -> list[str]:
    """Return the folders that hold a tree."""
    is_marked = bool(names & _STEP_NAMES)
    trees: list[str] = []
    for name in sorted(inside, key=lambda name: (_step_of(name) >= 0, name)):
        # In the root of a run, folders with such names are steps; in a step, they are items.
        is_item = is_marked or bool(trees) or _step_of(name) < 0
        # What old versions wrote has no such file; elsewhere, it makes a folder a checkpoint.
        is_other = not is_marked and bool(inside[name] & _STEP_NAMES)
        if is_item and not is_other and TREE_NAME in inside[name] and _UNFINISHED not in name:
            trees.append(name)
    return trees


def _step_of(name: str) -> int:
    """Return the step that a name ends with, or -1."""
    match = _STEP_FOLDER.fullmatch(name)
    if match is None:
        return -1
    return int(match[1])


# ---- trees


def _read_item(folder: str, name: str, prefix: str) -> list[Leaf]:
    path = locations.join(folder, TREE_NAME)
    described = read_json(path)
    try:
        rows = list(described["tree_metadata"].values())
        uses_ocdbt = described.get("use_ocdbt")
        if uses_ocdbt is None:
            uses_ocdbt = locations.exists(locations.join(folder, OCDBT_NAME))
        is_complete = bool(described.get("store_array_data_equal_to_fill_value"))
        uses_zarr3 = bool(described.get("use_zarr3"))
        item = Item(name, folder, prefix, bool(uses_ocdbt), uses_zarr3, is_complete)
        strings: dict[str, Any] = {}
        leaves = [_leaf(item, row, strings) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable("The tree", path, error) from error
    _check_keys(folder, leaves)
    return leaves


def _leaf(item: Item, entry: Any, strings: dict[str, Any]) -> Leaf:
    """Return a leaf; `strings` is filled when one needs it."""
    path = tuple(str(key["key"]) for key in entry["key_metadata"])
    kind = str(entry["value_metadata"]["value_type"])
    leaf = Leaf(item, path, "scalar" if kind == "scalar" else "array")
    if kind in _EMPTY:
        return Leaf(item, path, "value", _EMPTY[kind])
    if kind == "string":
        file = locations.join(item.folder, "_strings.json")
        try:
            if not strings:
                strings.update(read_json(file))
            return Leaf(item, path, "value", strings[leaf.name])
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(repr(leaf.name), file, error) from error
    if leaf.kind == "array" and entry["value_metadata"].get("skip_deserialize"):
        raise CheckpointingException(
            f"{leaf.name!r} in {item.folder!r} is of the kind {kind!r}, which only Orbax reads: "
            "restore the checkpoint with it, and save the tree without that leaf."
        )
    return leaf


def _check_keys(location: str, leaves: Iterable[Leaf]) -> None:
    """Check that names are possible, and keys different."""
    known: dict[str, tuple[str, ...]] = {}
    for leaf in leaves:
        # Only in a database, a name may lead anywhere.
        is_inside = leaf.item.uses_ocdbt or _OUTSIDE.isdisjoint(leaf.name.split("/"))
        if leaf.kind != "value" and not (is_inside and leaf.name):
            raise CheckpointingException(
                f"{leaf.item.folder!r} holds an array with the name {leaf.name!r}, which no key "
                "can have: save the tree with other names."
            )
        path = leaf.whole_path
        if known.setdefault(leaf.key, path) != path:
            raise CorruptCheckpointError(
                f"{location!r} holds {list(known[leaf.key])} and {list(path)}, and Orbax has given "
                f"both the name {leaf.key!r}: in one tree it writes them to one array, so that one "
                "is lost. Save them again without dots in their names. To read everything else "
                f"of one item, give its directory, and remove both from {TREE_NAME!r} in a "
                "copy of it."
            )


def common_state(
    layout: Layout, scalars: Mapping[tuple[str, ...], Any], location: str
) -> dict[str, Any]:
    """Return nested dicts of everything but arrays.

    `scalars` are numbers by their paths.
    """
    leaves, others = layout
    values = dict(scalars)
    for leaf in leaves:
        if leaf.kind == "value":
            values[leaf.whole_path] = leaf.value
    tree: dict[str, Any] = {}
    for path in sorted(values):
        _put(tree, path, values[path], location)
    for name, value in others.items():
        _put(tree, (name,), value, location)
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any, location: str) -> None:
    """Put a value at a path, where nothing may be."""
    node: Any = tree
    for key in path[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict) or path[-1] in node:
        raise CorruptCheckpointError(
            f"{location!r} holds two values at {list(path)}: give the directory of one item, or "
            "restore the files, if they are of different saves."
        )
    node[path[-1]] = value
