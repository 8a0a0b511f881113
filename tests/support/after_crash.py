"""What a power failure may leave of a folder, derived from a recording of the calls that were made
below it.

The model is harsher than any one file system, so that what holds here holds on all:

- What a call has changed may or may not be on the disk until an `fsync` of the file or directory
  that it changed has returned. Each change is kept or lost by itself, whatever became of those
  before it: of a file that was not fsynced any part may be missing, it may be shorter, or have
  zeros where bytes were to be; a write may be torn.
- The names in a directory are contents of the directory: creations, renames, links and removals
  count until it is fsynced as a file's bytes do. An fsync of a file says nothing about its name.
- A rename is one change of one directory; that of a file between two directories is not modelled,
  nobody makes any.
- Writes that went around the page cache (O_DIRECT) are like others.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.support.calls import WRITES, Call

Tree: TypeAlias = Mapping[str, "bytes | None"]
"""Relative path -> contents; None for a directory."""

SYNCS = ("fsync", "fdatasync")
_ROOT = 0


class Change(NamedTuple):
    """Something that the disk may not have yet.

    Attributes:
        number: of the call that made it.
        inode: the file or directory that it is part of.
        names: of a directory: name -> inode, None where a name goes.
        offset: of a file: the first byte that is written.
        data: of a file: what is written.
        size: of a file: its size from now on; with `data` and for reserved space at least that.
    """

    number: int
    inode: int
    names: Mapping[str, int | None] | None = None
    offset: int = 0
    data: bytes | None = None
    size: int = 0


class Folders(NamedTuple):
    """What lies in a folder, by inodes: contents of files (empty for those yet to come) and names
    in directories.
    """

    files: dict[int, bytes]
    directories: dict[int, dict[str, int]]


class History(NamedTuple):
    """A folder as it was, and everything that was changed in it.

    Attributes:
        before: what was there, and on the disk.
        changes: in order.
        synced_at: for each change the number of the call that brought it to the disk, infinity when
            none did.
        num_calls: that were recorded.
    """

    before: Folders
    changes: list[Change]
    synced_at: list[float]
    num_calls: int

    @property
    def crash_points(self) -> list[int]:
        """Numbers of calls after which power may fail so that all that can be left is left by one
        of them.

        Until the next fsync what may be left only becomes more; after it, it is a part of what
        could be before.
        """
        ends = {int(number) for number in self.synced_at if number != math.inf}
        return [*(number - 1 for number in sorted(ends)), self.num_calls]


def merged(recordings: Sequence[Sequence[Call]]) -> list[Call]:
    """Bring the recordings of several processes of one machine into one order, with new numbers and
    descriptors.
    """
    calls = []
    for rank, recording in enumerate(recordings):
        first_fd = rank << 20
        for call in recording:
            is_opened = call.name == "open" and not call.failed
            outcome = call.outcome + first_fd if is_opened else call.outcome
            calls.append(call._replace(fd=call.fd + first_fd, outcome=outcome))
    calls.sort(key=lambda call: call.started)
    return [call._replace(number=number) for number, call in enumerate(calls, 1)]


def tree_of(folder: Path) -> Tree:
    """Read a whole folder."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in paths
    }


def write_tree(tree: Tree, folder: Path) -> None:
    """Make a folder of that content."""
    folder.mkdir()
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def history_of(before: Tree, calls: Sequence[Call]) -> History:
    """Work out from what a folder held, and the calls that followed, what was changed and brought
    to the disk.
    """
    replay = _Replay(before)
    directories = {inode: dict(names) for inode, names in replay.directories.items()}
    for call in calls:
        if not call.failed:
            replay.apply(call)
    return History(
        Folders(replay.files, directories),
        replay.changes,
        replay.synced_at,
        calls[-1].number if calls else 0,
    )


class _Replay:
    """The folder while the recorded calls are made once more."""

    def __init__(self, before: Tree) -> None:
        self.files: dict[int, bytes] = {}
        self.directories: dict[int, dict[str, int]] = {_ROOT: {}}
        self.changes: list[Change] = []
        self.synced_at: list[float] = []
        self._unsynced: dict[int, list[int]] = {}
        self._inodes = itertools.count(_ROOT + 1)
        self._opened: dict[int, int] = {}
        for path in sorted(before):
            inode = self._create(before[path])
            parent, name = os.path.split(path)
            self.directories[self._inode(parent)][name] = inode

    def apply(self, call: Call) -> None:  # noqa: C901 one branch a call
        """Make one successful call."""
        path = call.paths[0]
        inode = self._opened.get(call.fd, -1)
        if call.name == "open":
            self._open(call, path)
        elif call.name == "mkdir":
            self._name(call, {path: self._create(None)})
        elif call.name in ("unlink", "remove", "rmdir"):
            self._name(call, {path: None})
        elif call.name in ("rename", "replace"):
            # Of two names of one file both stay, says POSIX.
            if self._find(call.paths[1]) != self._inode(path):
                self._name(call, {path: None, call.paths[1]: self._inode(path)})
        elif call.name == "renameat2":
            self._name(call, {path: self._inode(call.paths[1]), call.paths[1]: self._inode(path)})
        elif call.name == "link":
            self._name(call, {call.paths[1]: self._inode(path)})
        elif call.name in SYNCS:
            for index in self._unsynced.pop(inode, []):
                self.synced_at[index] = call.number
        elif call.changes_something:
            self._write(call, inode)

    def _write(self, call: Call, inode: int) -> None:
        if call.name in WRITES:
            # What was not written of a short write is no part of it.
            data = call.data[: call.outcome]
            self._change(
                Change(call.number, inode, None, call.offset, data, call.offset + len(data))
            )
        elif call.name in ("fallocate", "posix_fallocate"):
            self._change(Change(call.number, inode, None, 0, b"", call.offset + call.length))
        elif call.name == "ftruncate":
            self._change(Change(call.number, inode, size=call.length))
        else:
            raise NotImplementedError(f"there is no model of {call}")

    def _open(self, call: Call, path: str) -> None:
        if self._find(path) is None:
            self._name(call, {path: self._create(b"")})
        self._opened[call.outcome] = self._inode(path)
        if call.flags & os.O_TRUNC:
            self._change(Change(call.number, self._inode(path), size=0))

    def _create(self, content: bytes | None) -> int:
        inode = next(self._inodes)
        if content is None:
            self.directories[inode] = {}
        else:
            self.files[inode] = content
        return inode

    def _inode(self, path: str) -> int:
        inode = self._find(path)
        assert inode is not None, path
        return inode

    def _find(self, path: str) -> int | None:
        inode: int | None = _ROOT
        for name in path.split("/") if path not in ("", ".") else ():
            inode = None if inode is None else self.directories[inode].get(name)
        return inode

    def _name(self, call: Call, entries: Mapping[str, int | None]) -> None:
        parents = {os.path.dirname(path) for path in entries}
        if len(parents) > 1:
            raise NotImplementedError(f"there is no model of a rename between directories: {call}")
        inode = self._inode(parents.pop())
        names = {os.path.basename(path): entry for path, entry in entries.items()}
        _rename(self.directories[inode], names)
        self._change(Change(call.number, inode, names))

    def _change(self, change: Change) -> None:
        self._unsynced.setdefault(change.inode, []).append(len(self.changes))
        self.changes.append(change)
        self.synced_at.append(math.inf)


def _rename(directory: dict[str, int], names: Mapping[str, int | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            directory.pop(name, None)
        else:
            directory[name] = inode


# --- States ---------------------------------------------------------------------------------------

_LOST, _KEPT, _TORN = 0.0, 1.0, 0.5
"""How much of a change is on the disk."""


def states_after(history: History, number: int, max_states: int, seed: int = 0) -> Iterator[Tree]:
    """Yield what may be left when power fails after the call of this number has returned.

    Args:
        history: what was done.
        number: of the last call that was made.
        max_states: up to so many combinations of what is kept and lost are all tried; of more a
            choice: all, none, each change alone lost, torn or kept, those up to each one, and as
            many as `max_states` by chance.
        seed: of chance.
    """
    done = [index for index, change in enumerate(history.changes) if change.number <= number]
    pending = [index for index in done if history.synced_at[index] > number]
    options = [
        (_KEPT, _LOST, _TORN) if history.changes[index].data else (_KEPT, _LOST)
        for index in pending
    ]
    chosen = (
        itertools.product(*options)
        if math.prod(map(len, options)) <= max_states
        else _choice_of(options, max_states, random.Random(seed))
    )
    for shares in chosen:
        on_disk = dict.fromkeys(done, _KEPT) | dict(zip(pending, shares, strict=True))
        yield _tree_with(history, on_disk)


def _choice_of(
    options: Sequence[Sequence[float]], count: int, chance: random.Random
) -> Iterator[tuple[float, ...]]:
    all_kept, all_lost = [_KEPT] * len(options), [_LOST] * len(options)
    yield tuple(all_kept)
    yield tuple(all_lost)
    for index, shares in enumerate(options):
        for share in shares:
            yield (*all_kept[:index], share, *all_kept[index + 1 :])
            yield (*all_lost[:index], share, *all_lost[index + 1 :])
            yield (*all_kept[:index], share, *all_lost[index + 1 :])
    for _ in range(count):
        yield tuple(chance.choice(shares) for shares in options)


def _tree_with(history: History, on_disk: Mapping[int, float]) -> Tree:
    """Put together what is there when of each change that share is."""
    directories = {inode: dict(names) for inode, names in history.before.directories.items()}
    written: dict[int, list[tuple[Change, float]]] = {}
    for index, share in on_disk.items():
        change = history.changes[index]
        if change.names is None:
            written.setdefault(change.inode, []).append((change, share))
        elif share:
            _rename(directories.setdefault(change.inode, {}), change.names)
    tree: dict[str, bytes | None] = {}
    todo = [("", _ROOT)]
    while todo:
        place, folder = todo.pop()
        for name, inode in directories.get(folder, {}).items():
            path = os.path.join(place, name)
            if inode in history.before.files:
                tree[path] = _content(history.before.files[inode], written.get(inode, ()))
            else:
                tree[path] = None
                todo.append((path, inode))
    return tree


def _content(before: bytes, changes: Sequence[tuple[Change, float]]) -> bytes:
    content = bytearray(before)
    for change, share in changes:
        if not share:
            continue
        data = (change.data or b"")[: math.ceil(len(change.data or b"") * share)]
        size = change.size if share == _KEPT else change.offset + len(data)
        if change.data is None:
            del content[size:]
        content.extend(bytes(max(0, size - len(content))))
        content[change.offset : change.offset + len(data)] = data
    return bytes(content)
