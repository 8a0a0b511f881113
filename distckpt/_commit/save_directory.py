"""The directory that a save is written into: made by rank 0, and one and the same on all ranks.

Ranks that share no storage would each leave their files where no other rank sees them. The name of
the directory ends in a random nonce, so whoever sees it under its own path sees the directory that
rank 0 has made, whatever that path is: nodes may mount one file system in different places.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import run_threads
from distckpt._commit import hidden_names, posix, running
from distckpt._commit.target import prepare_to_replace
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

SECONDS_TO_APPEAR = 10.0
"""So long a network file system may take to show on one node what another one has written. Ranks
with a shorter timeout give up earlier, before the others lose contact with the one that looks.
"""
_FILES_PER_THREAD = 64
_MAX_THREADS = 16


@dataclass(frozen=True)
class SaveDirectory:
    """The place that all ranks of a save write into, as this rank sees it.

    Attributes:
        nonce: of the save.
        location: of the directory; the target itself on an object store.
        target: where the save is to appear.
        first_host: of rank 0.
        first_target: where rank 0 sees the target.
        num_bytes: how much all ranks together are going to write.
    """

    nonce: str
    location: str
    target: str
    first_host: str
    first_target: str
    num_bytes: int


def choose_directory(ranks: Ranks, target: str, num_bytes: int) -> SaveDirectory:
    """Choose where a save is written, given how much this rank is going to write; nothing is made
    yet.

    Collective operation: all ranks must call it.
    """
    chosen = (
        [running.new_nonce(target), os.uname().nodename, target] if ranks.is_coordinator else []
    )
    sent = [
        json.loads(text) for text in ranks.all_gather(json.dumps([num_bytes, *chosen]).encode())
    ]
    _, nonce, host, first_target = sent[0]
    total = sum(own for own, *_ in sent)
    place = hidden_names.beside(target, "tmp", nonce) if locations.is_local(target) else target
    return SaveDirectory(nonce, place, target, host, first_target, total)


def make_directory(
    ranks: Ranks,
    place: SaveDirectory,
    held: contextlib.ExitStack,
    folders: Sequence[str],
    durable: bool,
) -> None:
    """Make the directory with folders of these names, and check that all ranks see it.

    Collective operation: all ranks must call it. A local directory is locked until `held` is
    closed. Nothing but directories has been written when this raises, which it also does when there
    is no space for what the ranks are going to write.
    """
    with ranks.phase("create directories", decision=True):
        if ranks.is_coordinator:
            if locations.is_local(place.location):
                _make_hidden(place, held, durable)
            with _naming_target(place):
                posix.prepare(place.location, folders, durable)
            if locations.is_local(place.location):
                _check_space(place)
    if ranks.size > 1:
        with ranks.phase("find the directory of the save"):
            _check_is_seen(ranks, place, folders)


def _make_hidden(place: SaveDirectory, held: contextlib.ExitStack, durable: bool) -> None:
    _remove_empty_leftovers(place.target)
    with _naming_target(place):
        held.enter_context(running.locked_directory(place.location, durable))
    prepare_to_replace(place.target, place.location)


@contextlib.contextmanager
def _naming_target(place: SaveDirectory) -> Iterator[None]:
    """Put the target into errors of the system, where they have the hidden directory."""
    try:
        yield
    except OSError as error:
        if not str(error.filename).startswith(place.location) or place.location == place.target:
            raise
        text = f"{error.strerror}: a save makes a directory beside its target"
        raise OSError(error.errno, text, place.target) from error


def _remove_empty_leftovers(target: str) -> None:
    """Remove directories of ended saves of this target in which no file is left.

    Network file systems keep a removed file as long as a reader has it open, and its directory.
    """
    for path in hidden_names.left_beside(target, "tmp"):
        with running.claimed(path) as has_ended:
            if has_ended and not any(files for _, _, files in os.walk(path)):
                locations.remove_tree(path)


def _check_space(place: SaveDirectory) -> None:
    """Raise ENOSPC when a file system, which all ranks share, certainly has no room for so many
    bytes.
    """
    try:
        disk = os.statvfs(place.location)
    except OSError:
        return
    # The last blocks are for root. Some network file systems know no numbers, and report 0.
    free = disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
    if disk.f_blocks and 0 < free < place.num_bytes:
        numbers = (
            f"{place.num_bytes} bytes are to be written, and host {os.uname().nodename!r} reports "
            f"{free} free"
        )
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {numbers}", place.target)


def _check_is_seen(ranks: Ranks, place: SaveDirectory, folders: Sequence[str]) -> None:
    if locations.is_local(place.target) and locations.is_local(place.first_target):
        made = [locations.join(place.location, name) for name in folders] or [place.location]
        is_same = _wait_until(lambda: all(map(locations.isdir, made)), _seconds_to_appear(ranks))
    else:
        is_same = place.target == place.first_target
    if not is_same:
        raise CheckpointingException(
            f"{place.target!r} on rank {ranks.rank} (host {os.uname().nodename!r}) is not the "
            f"place that rank 0 (host {place.first_host!r}) calls {place.first_target!r}: what one "
            "writes, the other does not see. Give all ranks the same location, on storage that "
            "all nodes share."
        )


def _seconds_to_appear(ranks: Ranks) -> float:
    return min(SECONDS_TO_APPEAR, ranks.timeout / 3)


def check_files(ranks: Ranks, directory: str, files: Sequence[tuple[str, int]]) -> None:
    """Check that files, given as names in a directory and sizes, are there; for the coordinator."""
    wrong = dict(files)
    found: dict[str, int | None] = {}

    def look_at(name: str) -> None:
        found[name] = _size_of(locations.join(directory, name))

    def are_right() -> bool:
        run_threads(look_at, wrong, min(_MAX_THREADS, 1 + len(wrong) // _FILES_PER_THREAD))
        for name in [name for name, size in wrong.items() if found[name] == size]:
            del wrong[name]
        return not wrong

    # A single process has written all of them itself, and object stores show what they have.
    is_waiting = ranks.size > 1 and locations.is_local(directory)
    if _wait_until(are_right, _seconds_to_appear(ranks) if is_waiting else 0.0):
        return
    name, size = next(iter(wrong.items()))
    state = "is missing" if found[name] is None else f"has {found[name]} bytes instead of {size}"
    more = f" (and {len(wrong) - 1} more files)" if len(wrong) > 1 else ""
    raise CheckpointingException(
        f"{locations.join(directory, name)!r} was written and {state} as rank 0 (host "
        f"{os.uname().nodename!r}) sees it{more}: another program removes or changes files there, "
        "or not all ranks share this storage. Nothing was committed."
    )


def _size_of(path: str) -> int | None:
    try:
        return locations.file_size(path)
    except FileNotFoundError:
        return None


def _wait_until(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline, delay = time.monotonic() + seconds, 0.01
    while not is_true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(delay)
        delay = min(2 * delay, 0.5)
    return True
