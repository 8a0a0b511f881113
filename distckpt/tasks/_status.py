"""Status of work in parts, and how it is abandoned."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from distckpt._commit.conditional_put import SAVE
from distckpt._format.hf_names import INDEX_NAME
from distckpt._format.marker import marker_of
from distckpt._storage import locations, object_store
from distckpt.tasks._journal import Journal, Worker, journals_beside, other_owner
from distckpt.tasks._run import abort_uploads


@dataclass(frozen=True)
class PartsStatus:
    """The progress of work in parts.

    Attributes:
        journal: the directory with the notes of whole pieces.
        verb: the verb that is run.
        sources: the locations it reads.
        num_whole: pieces that are whole.
        num_total: all pieces.
        bytes_whole: size of the pieces that are whole.
        bytes_running: bytes that processes at work have done of pieces that are not whole.
        bytes_total: size of all pieces.
        missing: names of files or tensors that have pieces that are not whole.
        workers: processes that are at work, or were killed.
        is_complete: whether the output has appeared.
    """

    journal: str
    verb: str
    sources: tuple[str, ...]
    num_whole: int
    num_total: int
    bytes_whole: int
    bytes_running: int
    bytes_total: int
    missing: tuple[str, ...]
    workers: tuple[Worker, ...]
    is_complete: bool


def statuses(place: str) -> list[PartsStatus]:
    """Return the progress of all work in parts for an output location.

    Only journals are read.
    """
    status_list = []
    for journal in journals_beside(place):
        header = journal.header()
        if header is not None:
            status_list.append(_status(journal, header))
    return status_list


def _status(journal: Journal, header: dict[str, Any]) -> PartsStatus:
    recorded = journal.recorded()
    pieces = header["pieces"]
    sizes = [stop - start for _, start, stop in pieces]
    missing = []
    for i, (name, _, _) in enumerate(pieces):
        if i not in recorded:
            missing.append(name)
    workers = journal.workers()
    # Several processes may do the same piece.
    running = {}
    for worker in sorted(workers, key=attrgetter("piece_bytes")):
        if worker.is_running and worker.number not in recorded:
            running[worker.number] = worker.piece_bytes
    return PartsStatus(
        journal.location,
        header["verb"],
        tuple(header["sources"]),
        num_whole=len(recorded),
        num_total=len(pieces),
        bytes_whole=sum(size for i, size in enumerate(sizes) if i in recorded),
        bytes_running=sum(running.values()),
        bytes_total=sum(sizes),
        missing=tuple(dict.fromkeys(missing)),
        workers=tuple(workers),
        is_complete=journal.has_appeared(),
    )


def abandon(place: str) -> list[str]:
    """Remove the journals of all work in parts for an output location.

    The files it has written go as well, unless they are complete. Return the locations of the
    journals.

    No process may be at work there.

    Raises:
        OSError: a journal could not be removed; the rest was.
    """
    removed: list[str] = []
    left: list[str] = []
    for journal in journals_beside(place):
        if not locations.is_local(place):
            _abandon_uploaded(journal, place)
        locations.remove_tree(journal.location)
        is_left = locations.is_local(place) and os.path.lexists(journal.location)
        (left if is_left else removed).append(journal.location)
    if left:
        _refuse_left(left[0])
    return removed


def _abandon_uploaded(journal: Journal, place: str) -> None:
    """Remove incomplete files from their place on an object store, and uploads."""
    header = journal.header()
    if header is None:
        return
    files = header["files"]
    is_there = locations.exists(locations.join(place, INDEX_NAME))
    # A process may have been killed before it could note that all is complete.
    is_complete = is_there or (marker_of(place) or {}).get(SAVE) == journal.nonce
    if not journal.is_done() and not is_complete:
        object_store.remove_all([locations.join(place, name) for name in files])
    if journal.is_done() or not is_complete:
        abort_uploads(place, files)


def _refuse_left(location: str) -> None:
    owner = other_owner(location)
    if owner is not None:
        text = f"the journal cannot be removed, it belongs to user {owner}"
        raise PermissionError(errno.EACCES, text, location)
    text = "some of the journal cannot be removed: a part is writing into it, or another user did"
    raise OSError(errno.EBUSY, text, location)
