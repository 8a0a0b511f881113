"""The journal of work in parts: a directory beside the output in which processes note what is
whole.

    .NAME.parts-NONCE/header.json           what is done, from what, with which options
    .NAME.parts-NONCE/piece-000012.json     the result of a piece whose bytes are on disk
    .NAME.parts-NONCE/part-NONCE.json       a process that is at work
    .NAME.parts-NONCE/done-HASH.json        files of the output, once it is complete, and their hash
    .NAME.parts-NONCE/lock                  locked by who completes the work, on local disks
    .NAME.parts-NONCE/.NAME.tmp-NONCE/      the output until then, on local disks

The nonce is a hash of everything that the result depends on, so all processes that do the same find
the same journal. Every file of it is written in one step, has a checksum, and is never changed,
but for the notes of processes.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.reports import sealed, unsealed
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._commit import hidden_directories
from distckpt._parts.work import Attempt, Part, Piece, Work
from distckpt._storage import locations

logger = logging.getLogger(__name__)

HEADER, LOCK = "header.json", "lock"
_DONE = re.compile(r"done-[0-9a-f]{16}\.json")
_RECORD = re.compile(r"piece-(\d{6,})\.json")
_NOTE = re.compile(r"part-[0-9a-f]{16}\.json")
_HEADER_FORM = {"verb": str, "sources": list, "facts": dict, "pieces": list, "files": list}
_RECORD_FORM = {"result": object, "seconds": float}
_DONE_FORM = {"proof": object}
_NOTE_FORM = {
    "part": str,
    "host": str,
    "pid": int,
    "piece": str,
    "number": int,
    "piece_bytes": int,
    "num_bytes": int,
}
_SECONDS_BETWEEN = 5.0
"""A process at work says so this often."""
SECONDS_SILENT = 60.0
"""Who has said nothing for so long is not at work any more."""
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Worker:
    """A process that is doing a part, or that was killed while it did.

    Attributes:
        part: which part, such as `3/16`.
        host: name of its machine.
        pid: its process there.
        piece: what it is doing.
        number: of the piece.
        piece_bytes: how much of the piece it has done.
        num_bytes: how much of its part it has done.
        seconds: since it last said so.
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
        """Tell whether it is at work, as far as can be told."""
        return self.seconds < SECONDS_SILENT


class Journal:
    """A journal at a location.

    Attributes:
        location: of its directory.
        attempt: the same, with what stands for the facts of the work.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.attempt = Attempt(location, hidden_directories.nonce_of(location))

    @classmethod
    def of(cls, work: Work) -> Journal:
        """Return the journal of some work, which need not be there."""
        text = json.dumps({"facts": dict(work.facts), "pieces": _listed(work.pieces)})
        nonce = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(_beside(work.place, nonce))

    def _path(self, name: str) -> str:
        return locations.join(self.location, name)

    def _read(self, name: str, form: Mapping[str, type]) -> dict[str, Any] | None:
        """Return the content of a file, None where there is none.

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
        """Return the content of a file; None where there is none, and with a warning where it is
        damaged.
        """
        try:
            return self._read(name, form)
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
            return None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        locations.write_bytes(self._path(name), sealed(content).encode())

    # --- What is done

    def header(self) -> dict[str, Any] | None:
        """Return what the journal is of; None where there is none."""
        return self._read(HEADER, _HEADER_FORM)

    def is_begun(self) -> bool:
        """Tell whether there is a journal; a damaged header is made anew."""
        return self._read_if_whole(HEADER, _HEADER_FORM) is not None

    def begin(self, work: Work) -> None:
        """Make the journal."""
        locations.make_directories(self.location)
        content = {
            "verb": work.verb,
            "sources": list(work.sources),
            "facts": dict(work.facts),
            "pieces": _listed(work.pieces),
            "files": work.files(self.attempt),
        }
        self._write(HEADER, content)

    def recorded(self) -> set[int]:
        """Return the numbers of the pieces that are whole."""
        found = map(_RECORD.fullmatch, self._names())
        return {int(match[1]) for match in found if match}

    def has_record(self, number: int) -> bool:
        """Tell whether a piece is whole."""
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
        """Return the records of all pieces, None for those that are missing or damaged, and why the
        first of these is.
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
        """Note what tells the output that this work makes, if it is there."""
        if proof is not None:
            self._write(_done_name(proof), {"proof": proof})

    def forget_done(self) -> None:
        """Note that the work is not done any more."""
        for name in self._done_names():
            locations.remove_file(self._path(name))

    def _done_names(self) -> list[str]:
        return [name for name in self._names() if _DONE.fullmatch(name)]

    def is_done(self) -> bool:
        """Tell whether the work came to its end, if it was not killed just before."""
        return bool(self._done_names())

    def is_proof(self, proof: Any) -> bool:
        """Tell whether something tells the output of this work: one of several where processes have
        completed it at the same time, or were killed.
        """
        # The name is enough, so damage inside of the file costs nothing.
        return _done_name(proof) in self._done_names()

    def proofs(self) -> list[Any]:
        """Return what tells the output, as far as it can be read."""
        found = [self._read_if_whole(name, _DONE_FORM) for name in self._done_names()]
        return [each["proof"] for each in found if each is not None]

    def has_appeared(self) -> bool:
        """Tell whether the output has appeared: it was complete, and is not in the journal."""
        return self.is_done() and not self._outputs()

    def remove_output(self) -> None:
        """Remove what a process that was late has begun again, when the output has appeared."""
        for name in self._outputs():
            locations.remove_tree(self._path(name))

    def _outputs(self) -> list[str]:
        return [name for name in self._names() if hidden_directories.parse(name) is not None]

    # --- Who is at work

    @contextlib.contextmanager
    def at_work(self, part: Part) -> Iterator[Note]:
        """Note that this process is doing a part as long as the body runs."""
        path = self._path(f"part-{secrets.token_hex(8)}.json")
        host = os.uname().nodename
        try:
            yield Note(path, {"part": str(part), "host": host, "pid": os.getpid()})
        finally:
            with contextlib.suppress(OSError):
                locations.remove_file(path)

    def workers(self) -> list[Worker]:
        """Return who is at work, or was killed."""
        found = []
        for name in filter(_NOTE.fullmatch, self._names()):
            note = self._read_if_whole(name, _NOTE_FORM)
            written = locations.modified_time(self._path(name))
            if note is not None and written is not None:
                fields = {name: note[name] for name in _NOTE_FORM}
                found.append(Worker(**fields, seconds=max(0.0, time.time() - written)))
        return found


class Note:
    """What a process says of itself."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self._path, self._fields = path, fields
        self._piece, self._number = "", -1
        self._num_bytes = self._bytes_before = 0
        self._written = -_SECONDS_BETWEEN

    def begin(self, number: int, piece: Piece) -> None:
        """Say which piece comes next."""
        self._piece, self._number, self._bytes_before = piece.name, number, self._num_bytes
        self._write()

    def report(self, num_bytes: int, total: int) -> None:
        """Say how many bytes are done; one thread calls at a time."""
        self._num_bytes = num_bytes
        self._write()

    def _write(self) -> None:
        """Write the note, unless that was done a short while ago."""
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
        # Nobody needs it after a power failure, nor when it cannot be written.
        with contextlib.suppress(OSError):
            locations.write_bytes(self._path, sealed(content).encode(), durable=False)


def _record_name(number: int) -> str:
    return f"piece-{number:06d}.json"


def _done_name(proof: Any) -> str:
    digest = hashlib.sha256(json.dumps(proof).encode()).hexdigest()[:16]
    return f"done-{digest}.json"


def _listed(pieces: Sequence[Piece]) -> list[list[Any]]:
    return [[piece.name, piece.start, piece.stop] for piece in pieces]


# --- Journals beside a location -------------------------------------------------------------------


def _beside(place: str, nonce: str) -> str:
    parent, name = locations.split(place)
    return locations.join(parent, f".{name}.parts-{nonce}")


def journals_beside(place: str) -> list[Journal]:
    """Return the journals of work in parts whose output appears at a location."""
    parent, name = locations.split(place)
    try:
        names = locations.list_names(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    hidden = [(each, hidden_directories.parse(each)) for each in names]
    return [
        Journal(locations.join(parent, each))
        for each, parts in hidden
        if parts is not None and (parts.name, parts.kind) == (name, "parts")
    ]
