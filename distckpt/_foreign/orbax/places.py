"""Places of the bytes that tensorstore decodes values from."""

from __future__ import annotations

import urllib.parse
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from distckpt._storage import locations

if TYPE_CHECKING:
    import tensorstore


class Place(NamedTuple):
    """Bytes of a file; `stop` is None at its end."""

    file: str
    start: int
    stop: int | None


class _Entry(NamedTuple):
    """An entry of a node: the location of a value or node, and what keys there begin with.

    The location of a value in the node itself is empty.
    """

    location: str
    prefix: bytes


class Database:
    """The index of a database (OCDBT). Nodes are read when a key needs them."""

    def __init__(self, folder: str, store: tensorstore.KvStore) -> None:
        self._folder = folder
        self._store = store
        self._root: str | None = None
        self._nodes: dict[str, tuple[list[bytes], list[_Entry]]] = {}

    def places_of(self, key: str) -> Iterator[Place]:
        """Yield all bytes that lead to a value, and its own.

        Each node is read after its place was yielded.
        """
        yield Place(locations.join(self._folder, "manifest.ocdbt"), 0, None)
        if self._root is None:
            newest = self._dump()["versions"][-1]
            self._root = newest["root"].get("location", "")
        location = self._root
        rest = key.encode()
        while location:
            kind, base, path, start, num_bytes = location.split(":")
            name = urllib.parse.unquote(base + path)
            first = int(start)
            yield Place(locations.join(self._folder, name), first, first + int(num_bytes))
            if kind == "value":
                return
            location, prefix = self._find(location, rest)
            rest = rest.removeprefix(prefix)

    def _find(self, location: str, key: bytes) -> _Entry:
        """Return the entry of a node that leads to a key, or an empty one."""
        if location not in self._nodes:
            entries = self._dump(location)["entries"]
            self._nodes[location] = ([entry["key"] for entry in entries], _entries(entries))
        keys, found = self._nodes[location]
        index = bisect_right(keys, key) - 1
        if index < 0:
            return _Entry("", b"")
        is_value = found[index].location.partition(":")[0] != "btreenode"
        if is_value and keys[index] != key:
            return _Entry("", b"")
        return found[index]

    def _dump(self, *node: str) -> Any:
        import tensorstore

        return tensorstore.ocdbt.dump(self._store, *node).result()


def _entries(entries: list[dict[str, Any]]) -> list[_Entry]:
    found = []
    for entry in entries:
        location = entry.get("location") or entry.get("indirect_value") or ""
        found.append(_Entry(location, entry.get("subtree_common_prefix", b"")))
    return found


def name_of_chunk(array: tensorstore.TensorStore, offset: tuple[int, ...]) -> str:
    """Return the name of the value that holds a chunk of an array.

    It may hold several, which are decoded one by one.
    """
    metadata = array.spec().to_json()["metadata"]
    encoding = metadata.get("chunk_key_encoding", {})
    is_default = encoding.get("name") == "default"
    usual = metadata.get("dimension_separator", "/" if is_default else ".")
    separator = encoding.get("configuration", {}).get("separator", usual)
    grid = metadata.get("chunk_grid", {}).get("configuration", {})
    sizes = metadata.get("chunks") or grid.get("chunk_shape", [])
    parts = ["c"] * is_default
    for first, size in zip(offset, sizes, strict=True):
        parts.append(str(first // size))
    return separator.join(parts) or "0"
