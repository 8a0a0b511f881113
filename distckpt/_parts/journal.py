"""The journal of work in parts: a directory beside the output in which processes note what is
whole.

    .NAME.parts-NONCE/header.json           what is done, from what, with which options
    .NAME.parts-NONCE/piece-000012.json     the result of a piece whose bytes are on disk
    .NAME.parts-NONCE/part-NONCE.json       a process that is at work
    .NAME.parts-NONCE/done-HASH.json        what tells the output, once it is complete
    .NAME.parts-NONCE/lock                  locked by who completes the work, on local disks
    .NAME.parts-NONCE/.NAME.tmp-NONCE/      the output until then, on local disks

The nonce is a hash of everything that the result depends on, so all processes that do the same find
the same journal. Every file of it is written in one step, and none is ever changed but the notes of
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._commit import hidden_directories
from distckpt._parts.work import Attempt, Part, Piece, Work
from distckpt._storage import locations

HEADER, LOCK = "header.json", "lock"
_DONE = re.compile(r"done-[0-9a-f]{16}\.json")
_RECORD = re.compile(r"piece-(\d{6,})\.json")
_NOTE = re.compile(r"part-[0-9a-f]{16}\.json")
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

    def _read(self, name: str) -> Any:
        """Return the content of a file, None where there is none."""
        try:
            return json.loads(locations.read_bytes(self._path(name), _MAX_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise CheckpointingException(
                f"{self._path(name)!r} is damaged ({error}): remove it, and run the parts again."
            ) from error

    def _write(self, name: str, content: Any) -> None:
        locations.write_bytes(self._path(name), json.dumps(content).encode())

    # --- What is done

    def header(self) -> dict[str, Any] | None:
        """Return what the journal is of; None where there is none."""
        header: dict[str, Any] | None = self._read(HEADER)
        return header

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
        return self._read(_record_name(number)) is not None

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
            locations.remove_file(self._path(f"piece-{number:06d}.json"))

    def results(self, count: int) -> tuple[list[Any], float]:
        """Return the results of all pieces, and the seconds that they have taken."""
        records: list[Any] = [None] * count

        def read(number: int) -> None:
            records[number] = self._read(_record_name(number))

        run_threads(read, range(count), NUM_REQUESTS)
        if None in records:
            raise CheckpointingException(
                f"{self.location!r} lacks the record of piece {records.index(None)}: another "
                "program removed it, or abandoned this attempt. Remove the journal (--abandon, or "
                "distckpt.tasks.abandon), and begin again."
            )
        seconds = sum(record["seconds"] for record in records)
        return [record["result"] for record in records], seconds

    def note_done(self, proof: Any) -> None:
        """Note what tells the output that this work makes, if it is there."""
        if proof is not None:
            digest = hashlib.sha256(json.dumps(proof).encode()).hexdigest()[:16]
            self._write(f"done-{digest}.json", proof)

    def proofs(self) -> list[Any]:
        """Return what tells the output, if the work came to that: several where processes have
        completed it at the same time, or were killed.
        """
        return [self._read(name) for name in self._names() if _DONE.fullmatch(name)]

    def has_appeared(self) -> bool:
        """Tell whether the output has appeared: it was complete, and is not in the journal."""
        return any(map(_DONE.fullmatch, self._names())) and not self._outputs()

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
            note, written = self._read(name), locations.modified_time(self._path(name))
            if note is not None and written is not None:
                found.append(Worker(**note, seconds=max(0.0, time.time() - written)))
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
            locations.write_bytes(self._path, json.dumps(content).encode(), durable=False)


def _record_name(number: int) -> str:
    return f"piece-{number:06d}.json"


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
