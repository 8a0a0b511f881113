"""The journal of work in parts: a directory next to the output.

Processes note in it which pieces are whole.

    .NAME.parts-NONCE/header.json           the verb, its sources and its options
    .NAME.parts-NONCE/piece-000012.json     the result of a piece whose bytes are on disk
    .NAME.parts-NONCE/part-NONCE.json       a process that is at work
    .NAME.parts-NONCE/done-HASH.json        files of the output, once it is complete, and their hash
    .NAME.parts-NONCE/lock                  locked while the work is completed, on local disks
    .NAME.parts-NONCE/.NAME.tmp-NONCE/      the output until then, on local disks

The nonce is a hash of everything that the result depends on, so all processes that do the same find
the same journal. Every file of it is written in one step, has a checksum, and is never changed,
except for the notes of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.options import sealed, unsealed
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._commit import hidden_directories
from distckpt._storage import locations
from distckpt.tasks._pieces import Part, Piece

logger = logging.getLogger(__name__)

HEADER = "header.json"
LOCK = "lock"
_DONE = re.compile(r"done-[0-9a-f]{16}\.json")
_RECORD = re.compile(r"piece-(\d{6,})\.json")
_NOTE = re.compile(r"part-[0-9a-f]{16}\.json")
_HEADER_FORM = {"verb": str, "sources": list, "facts": dict, "pieces": list, "files": list}
_RECORD_FORM = {"result": object, "seconds": float}
_DONE_FORM = {"proof": object}
_SECONDS_BETWEEN = 5.0
"""Seconds between two notes of a process at work."""
SECONDS_SILENT = 60.0
"""Seconds without a note after which a process counts as dead."""
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Worker:
    """A process that does a part, or was killed doing it.

    Attributes:
        part: its part, such as `3/16`.
        host: name of its machine.
        pid: its process there.
        piece: name of its current piece.
        number: of the piece.
        piece_bytes: bytes of the piece that are done.
        num_bytes: bytes of its part that are done.
        seconds: time since its last note.
    """

    part: str
    host: str
    pid: int
    piece: str
    number: int
    piece_bytes: int
    num_bytes: int
    seconds: float

    @property
    def is_running(self) -> bool:
        """Whether it is at work, as far as can be known."""
        return self.seconds < SECONDS_SILENT


_NOTE_FORM = get_type_hints(Worker)
del _NOTE_FORM["seconds"]


class Journal:
    """A journal at a location.

    Attributes:
        location: of its directory.
        nonce: a hash of the work's facts.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.nonce = hidden_directories.nonce_of(location)

    def _path(self, name: str) -> str:
        return locations.join(self.location, name)

    def _read(self, name: str, form: Mapping[str, type]) -> dict[str, Any] | None:
        """Return the content of a file, or None where there is none.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        path = self._path(name)
        try:
            return unsealed(locations.read_bytes(path, _MAX_BYTES), form)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{path!r} is damaged ({error}). Run the parts again, which write it anew "
                "unless all are done, or remove the journal: --abandon, or distckpt.tasks.abandon."
            ) from error

    def _read_if_whole(self, name: str, form: Mapping[str, type]) -> dict[str, Any] | None:
        """Return the content of a file, or None where there is none.

        A damaged file counts as none, and a warning says so.
        """
        try:
            return self._read(name, form)
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
            return None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        locations.write_bytes(self._path(name), sealed(content).encode())

    # --- The work

    def header(self) -> dict[str, Any] | None:
        """Return the description of the work; None where there is none."""
        return self._read(HEADER, _HEADER_FORM)

    def is_begun(self) -> bool:
        """Whether there is a journal.

        A damaged header is made anew.
        """
        return self._read_if_whole(HEADER, _HEADER_FORM) is not None

    def begin(self, header: Mapping[str, Any]) -> None:
        """Make the journal, with the description of the work."""
        locations.make_directories(self.location)
        self._write(HEADER, header)

    def recorded(self) -> set[int]:
        """Return the numbers of the pieces that are whole."""
        numbers = set()
        for match in map(_RECORD.fullmatch, self._names()):
            if match:
                numbers.add(int(match[1]))
        return numbers

    def has_record(self, number: int) -> bool:
        """Whether a piece is whole."""
        return self._read_if_whole(_record_name(number), _RECORD_FORM) is not None

    def _names(self) -> list[str]:
        try:
            return locations.list_names(self.location)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def record(self, number: int, result: Any, seconds: float) -> None:
        """Note that a piece is whole."""
        self._write(_record_name(number), {"result": result, "seconds": seconds})

    def forget(self, numbers: Iterable[int]) -> None:
        """Note that pieces are not whole any more."""
        for number in numbers:
            locations.remove_file(self._path(_record_name(number)))

    def records(self, count: int) -> tuple[list[dict[str, Any] | None], str]:
        """Return the records of all pieces, and the first bad one's fault.

        The record is None where it is missing or damaged.
        """
        records: list[dict[str, Any] | None] = [None] * count
        damage: dict[int, str] = {}

        def read(number: int) -> None:
            try:
                records[number] = self._read(_record_name(number), _RECORD_FORM)
            except CorruptCheckpointError as error:
                damage[number] = str(error)

        run_threads(read, range(count), NUM_REQUESTS)
        if None not in records:
            return records, ""
        first = records.index(None)
        absence = (
            f"{self.location!r} lacks the record of piece {first}: another program removed it, or "
            "abandoned this attempt."
        )
        return records, damage.get(first, absence)

    def note_done(self, proof: Any) -> None:
        """Note a proof of this work's output, if there is one."""
        if proof is not None:
            self._write(_done_name(proof), {"proof": proof})

    def forget_done(self) -> None:
        """Note that the work is not done any more."""
        for name in self._done_names():
            locations.remove_file(self._path(name))

    def _done_names(self) -> list[str]:
        return list(filter(_DONE.fullmatch, self._names()))

    def is_done(self) -> bool:
        """Whether the work ended, unless it was killed just before."""
        return bool(self._done_names())

    def is_proof(self, proof: Any) -> bool:
        """Whether a proof identifies the output of this work.

        There are several proofs where processes have completed it at the same time, or were killed.
        """
        # The name is enough, so damage inside of the file costs nothing.
        return _done_name(proof) in self._done_names()

    def proofs(self) -> list[Any]:
        """Return the proofs of the output that can be read."""
        proofs = []
        for name in self._done_names():
            note = self._read_if_whole(name, _DONE_FORM)
            if note is not None:
                proofs.append(note["proof"])
        return proofs

    def has_appeared(self) -> bool:
        """Whether the output has appeared: it was complete, and is not in the journal."""
        return self.is_done() and not self._outputs()

    def remove_output(self) -> None:
        """Remove a late process's new beginning once the output has appeared."""
        for name in self._outputs():
            locations.remove_tree(self._path(name))

    def _outputs(self) -> list[str]:
        return list(filter(hidden_directories.parse, self._names()))

    # --- Who is at work

    @contextlib.contextmanager
    def at_work(self, part: Part) -> Iterator[Note]:
        """Note this process's work on a part while the body runs."""
        path = self._path(f"part-{secrets.token_hex(8)}.json")
        host = os.uname().nodename
        try:
            yield Note(path, {"part": str(part), "host": host, "pid": os.getpid()})
        finally:
            with contextlib.suppress(OSError):
                locations.remove_file(path)

    def workers(self) -> list[Worker]:
        """Return the processes that are at work, or were killed."""
        workers = []
        for name in filter(_NOTE.fullmatch, self._names()):
            note = self._read_if_whole(name, _NOTE_FORM)
            written = locations.modified_time(self._path(name))
            if note is not None and written is not None:
                fields = {name: note[name] for name in _NOTE_FORM}
                workers.append(Worker(**fields, seconds=max(0.0, time.time() - written)))
        return workers


class Note:
    """The note of a process about its progress."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields
        self._piece = ""
        self._number = -1
        self._num_bytes = self._bytes_before = 0
        self._written = -_SECONDS_BETWEEN

    def begin(self, number: int, piece: Piece) -> None:
        """Note the next piece."""
        self._piece = piece.name
        self._number = number
        self._bytes_before = self._num_bytes
        self._write()

    def report(self, num_bytes: int, total: int) -> None:
        """Note how many bytes are done; one thread calls at a time."""
        self._num_bytes = num_bytes
        self._write()

    def _write(self) -> None:
        """Write the note, unless it was written a short while ago."""
        now = time.monotonic()
        if now - self._written < _SECONDS_BETWEEN:
            return
        self._written = now
        content = {
            **self._fields,
            "piece": self._piece,
            "number": self._number,
            "piece_bytes": self._num_bytes - self._bytes_before,
            "num_bytes": self._num_bytes,
        }
        # It is not needed after a power failure, nor where it cannot be written.
        with contextlib.suppress(OSError):
            locations.write_bytes(self._path, sealed(content).encode(), durable=False)


def _record_name(number: int) -> str:
    return f"piece-{number:06d}.json"


def _done_name(proof: Any) -> str:
    digest = hashlib.sha256(json.dumps(proof).encode()).hexdigest()[:16]
    return f"done-{digest}.json"


# --- Journals of a location -----------------------------------------------------------------------


def journals_beside(place: str) -> list[Journal]:
    """Return the journals of work in parts for an output location."""
    parent, name = locations.split(place)
    try:
        names = locations.list_names(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    journals = []
    for item in names:
        parts = hidden_directories.parse(item)
        if parts is not None and (parts.name, parts.kind) == (name, "parts"):
            journals.append(Journal(locations.join(parent, item)))
    return journals


def other_owner(location: str) -> int | None:
    """Return a local directory's owner, or None if it is this user."""
    if not locations.is_local(location) or not os.path.lexists(location):
        return None
    owner = os.stat(location).st_uid
    if owner == os.geteuid():
        return None
    return owner
