"""Values of Orbax's keys: files, or ranges that a database names."""

from __future__ import annotations

import bisect
import importlib
import json
import os
import threading
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._base.threads import NUM_REQUESTS, PART_BYTES, Pool
from distckpt._foreign.seals import Seal
from distckpt._format.manifest import MAX_TABLE_BYTES
from distckpt._format.marker import read_file
from distckpt._storage import locations

OCDBT_NAME = "manifest.ocdbt"
_MAX_NODES = 5
"""Nodes of an index that stay in memory."""
_MAX_PARTS = 8
_USER: dict[str, int] = {}
"""Process that has used tensorstore, perhaps a parent."""


def import_tensorstore() -> Any:
    """Import tensorstore, before each use.

    Raises:
        CheckpointingException: it is not installed, or would end this forked process.
    """
    try:
        ts = importlib.import_module("tensorstore")
    except ImportError as error:
        raise CheckpointingException(
            "Checkpoints of Orbax are read with tensorstore: pip install 'distckpt[orbax]'."
        ) from error
    if _USER.setdefault("process", os.getpid()) != os.getpid():
        raise CheckpointingException(
            "tensorstore, which reads checkpoints of Orbax, does not work in a process that was "
            "forked from one that has used it: start this one with 'spawn' or 'forkserver' "
            "(multiprocessing_context of a DataLoader), or read before the fork."
        )
    return ts


class Value(NamedTuple):
    """The place of a value.

    Attributes:
        file: location of the file.
        start: first byte there.
        num_bytes: bytes of the range; None for the whole file.
        content: the value itself, if the index holds it.
    """

    file: str
    start: int = 0
    num_bytes: int | None = None
    content: bytes | None = None

    def compare(self, seal: Seal, name: str) -> None:
        """Compare the value with a seal; `name` is for the error."""
        if self.num_bytes is not None:
            seal.compare(name, self.file, self.start, self.start + self.num_bytes)
        elif self.content is None:
            seal.compare(name, self.file)

    def read(self, max_bytes: int = MAX_TABLE_BYTES) -> bytes:
        """Read the value.

        Raises:
            ValueError: it is longer than `max_bytes`, or the file ends before it does.
        """
        if self.content is not None:
            return self.content
        num_bytes = self.num_bytes
        if num_bytes is None:
            # A size takes a request.
            if max_bytes <= 3 * PART_BYTES:
                return read_file(self.file, max_bytes)
            num_bytes = locations.file_size(self.file)
        if num_bytes > max_bytes:
            raise ValueError(f"a value of at most {max_bytes} bytes has {num_bytes}")
        stop = self.start + num_bytes
        starts = range(self.start, stop, PART_BYTES)
        stops = [*starts[1:], stop]
        with Pool(NUM_REQUESTS, thread_name_prefix="distckpt-chunk") as pool:
            content = b"".join(pool.map(partial(locations.read_range, self.file), starts, stops))
        if len(content) < num_bytes:
            raise ValueError(f"the file ends before byte {stop}")
        return content


class Database:
    """The values of an OCDBT database. Its index is compared with a seal."""

    def __init__(self, folder: str, seal: Seal | None) -> None:
        self._folder = folder
        self._seal = seal
        self._lock = threading.Lock()
        self._nodes: OrderedDict[str, Any] = OrderedDict()

    def find(self, key: str) -> Value | None:
        """Return the value of a key, None if there is none."""
        entry = self._node(OCDBT_NAME, self._read_root)
        rest = key.encode()
        # A damaged index may lead back to a node above.
        for _ in range(entry["height"] + 1):
            prefix = entry.get("subtree_common_prefix", b"")
            if "location" not in entry or not rest.startswith(prefix):
                return None
            # Keys lack the beginning that all keys of the node have.
            rest = rest[len(prefix) :]
            keys, entries = self._node(entry["location"], self._read_node)
            row = bisect.bisect_right(keys, rest) - 1
            if row < 0:
                return None
            entry = entries[row]
        if entry.get("key") != rest or "location" in entry:
            return None
        if "indirect_value" in entry:
            return self._at(entry["indirect_value"])
        return Value(self._folder, content=entry["inline_value"])

    def _node(self, location: str, read: Callable[[str], Any]) -> Any:
        """Return a part of the index, which other threads may need, too."""
        with self._lock:
            if location not in self._nodes:
                try:
                    self._nodes[location] = read(location)
                except Exception as error:
                    # Each of them would repeat its requests for minutes.
                    self._nodes[location] = error
                if len(self._nodes) > _MAX_NODES:
                    self._nodes.popitem(last=False)
            self._nodes.move_to_end(location)
            node = self._nodes[location]
        if isinstance(node, Exception):
            raise node
        return node

    def _read_root(self, name: str) -> dict[str, Any]:
        path = locations.join(self._folder, name)
        try:
            if self._seal is not None:
                self._seal.compare("the index", path)
            root = _dump(name, read_file(path, MAX_TABLE_BYTES))["versions"][-1]
        except (FileNotFoundError, ValueError, LookupError) as error:
            raise unreadable("The index", path, error) from error
        return {**root["root"], "height": root["root_height"]}

    def _read_node(self, location: str) -> tuple[list[bytes], list[Any]]:
        value = self._at(location)
        kind, base, name, _, num_bytes = location.split(":")
        # The node alone, at the beginning of a file of its name.
        node = ":".join([kind, base, name, "0", num_bytes])
        try:
            if self._seal is not None:
                value.compare(self._seal, "the index")
            entries = _dump(urllib.parse.unquote(base + name), value.read(), node)["entries"]
        except (FileNotFoundError, ValueError) as error:
            raise unreadable("The index", value.file, error) from error
        return [entry["key"] for entry in entries], entries

    def _at(self, location: str) -> Value:
        """Return the value at a location of the index."""
        _, base, name, start, num_bytes = location.split(":")
        path = urllib.parse.unquote(base + name)
        if not locations.is_inner_name(path, _MAX_PARTS):
            raise CorruptCheckpointError(
                f"The index of {self._folder!r} names the file {path!r}, which is not inside of "
                "it: restore the checkpoint from a copy."
            )
        return Value(locations.join(self._folder, path), int(start), int(num_bytes))


def _dump(name: str, content: bytes, node: str | None = None) -> Any:
    """Return the fields of a database's manifest, or of a node."""
    ts = import_tensorstore()
    store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    store.write(name, content).result()
    return ts.ocdbt.dump(store, node).result()


def read_json(path: str) -> Any:
    """Read a JSON file of a checkpoint."""
    try:
        return json.loads(read_file(path, MAX_TABLE_BYTES))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise unreadable("JSON", path, error) from error


def unreadable(what: str, file: str, error: Exception) -> CorruptCheckpointError:
    """Return the error about a file that is damaged or missing."""
    text = "it is missing"
    if not isinstance(error, FileNotFoundError):
        # The specification of the array is of no use to users.
        text = str(error).partition(" [tensorstore_spec=")[0]
    return CorruptCheckpointError(
        f"{what} cannot be read from {file!r}: {text:.600}. Restore the file from a copy, load "
        "another step, or update tensorstore if it does not know a dtype."
    )
