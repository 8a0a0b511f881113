"""Work that is divided into pieces: the definition of a verb, and the facts it depends on.

A verb defines its pieces, the way to do one, and the way to combine their results. The choice of
the processes that do them, and the record of finished ones, is up to `_run`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from distckpt._base import version
from distckpt._base.errors import CheckpointingException
from distckpt._checkpoint.consistent_read import reading, states_of_files
from distckpt._checkpoint.opening import check_is_unchanged
from distckpt._format.manifest import FORMAT_VERSION
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.extra_files import ExtraFiles
from distckpt._plan.export import OutputTensor
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.tasks._journal import Journal
from distckpt.tasks._pieces import Piece

_VERSION = 3
"""Version of the division into pieces and of the contents of journals.

Processes of another version do not go on with them.
"""
_MAX_TEXT = 200
_CONFIG = "config.json"
_MAX_CONFIG = 1 << 28
_UNIMPORTANT = ("max_inflight_bytes", "progress")
"""Options that do not change the output."""
_PLANNED = ("rules", "fqn_to_index_mapping")
"""Options that show in the plan.

Their text may differ from process to process.
"""

AddBytes: TypeAlias = Callable[[int], None]
"""A function that notes bytes that are done."""


class Work(ABC):
    """The work of a verb with some arguments, as pieces.

    Attributes:
        verb: its name.
        place: location next to the journal, which is named after it.
        facts: the facts on which the result depends, by name; another value is other work.
        checkpoints: the checkpoints to read.
        pieces: the same in each process with the same arguments.
    """

    verb: str
    place: str
    facts: Mapping[str, str]
    checkpoints: Sequence[StoredCheckpoint] = ()
    pieces: Sequence[Piece] = ()

    @property
    def sources(self) -> list[str]:
        """Locations of the checkpoints to read."""
        return [stored.location for stored in self.checkpoints]

    @functools.cached_property
    def nonce(self) -> str:
        """A hash of everything that the result depends on."""
        pieces = [[piece.name, piece.start, piece.stop] for piece in self.pieces]
        text = json.dumps({"facts": dict(self.facts), "pieces": pieces})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def header(self) -> dict[str, Any]:
        """Return the description of the work, for its journal."""
        return {
            "verb": self.verb,
            "sources": self.sources,
            "facts": dict(self.facts),
            "pieces": [[piece.name, piece.start, piece.stop] for piece in self.pieces],
            "files": self.files(),
        }

    @functools.cached_property
    def journal(self) -> Journal:
        """The journal, which need not exist."""
        parent, name = locations.split(self.place)
        return Journal(locations.join(parent, f".{name}.parts-{self.nonce}"))

    def run(self, assigned: Iterable[int], add_bytes: AddBytes) -> Iterator[tuple[int, Any]]:
        """Do pieces one after the other.

        Yield the number of each and its result, for JSON, when its output is on disk.
        """
        with (
            reading(Ranks.alone(), self.checkpoints),
            OpenFiles.for_many_reads() as files,
        ):
            self.use(files)
            for number in assigned:
                yield number, self.do(number, add_bytes)

    def use(self, files: OpenFiles) -> None:
        """Read through files that stay open during a run."""
        del files

    @abstractmethod
    def do(self, number: int, add_bytes: AddBytes) -> Any:
        """Do a piece; return its result, for JSON, when its output is on disk."""

    @abstractmethod
    def report(self, results: Sequence[Any], seconds: float) -> Any:
        """Combine the results of all pieces; `seconds` is the sum of their times."""

    def costs(self) -> Sequence[int]:
        """Return the cost of each piece, in bytes of copied output."""
        return [piece.num_bytes for piece in self.pieces]

    # Work that only reads has no output, and needs nothing of the following.

    def files(self) -> list[str]:
        """Return the names of the files of the output."""
        return []

    def damaged(self) -> list[str]:
        """Return the files that differ from the output of the pieces."""
        return []

    def check(self) -> None:
        """Refuse to begin, for example because the target exists."""
        return

    def begin(self, is_new: bool) -> None:
        """Make the files that the pieces are written into."""
        del is_new

    def is_begun(self) -> bool:
        """Whether the files that the pieces are written into exist."""
        return True

    def complete(self, results: Sequence[Any]) -> None:
        """Check sources and the output of the pieces; add the rest.

        May be called again.
        """
        del results
        check_sources(self.facts, self.checkpoints)

    def directory(self) -> str:
        """Return the directory of the output before it appears."""
        return self.place

    def proof(self, directory: str) -> Any:
        """Return a proof that identifies the complete output, see `_outputs`.

        None where there is none.
        """
        return {"sizes": []}

    def commit(self, results: Sequence[Any]) -> None:
        """Let the output appear in one step."""
        del results


# --- Facts on which a result depends --------------------------------------------------------------


def facts_of(
    options: Mapping[str, Any],
    checkpoints: Sequence[StoredCheckpoint],
    outputs: Iterable[OutputTensor] = (),
) -> dict[str, str]:
    """Return the facts on which the result depends, by name.

    Args:
        options: of the call.
        checkpoints: the checkpoints to read.
        outputs: the tensors to write.
    """
    option_texts = {}
    for name, value in options.items():
        if name in (*_UNIMPORTANT, *_PLANNED):
            continue
        if name == "keys" and value is not None:
            # Their order does not matter.
            value = sorted({value} if isinstance(value, str) else set(value))
        option_texts[name] = _short(value)
    # Two versions may compute different values from the same input.
    versions = {
        "the version of distckpt": version.__version__,
        "the version of journals": f"{_VERSION}, format {FORMAT_VERSION}",
    }
    facts = {**versions, **option_texts, **facts_of_sources(checkpoints)}
    plan = _digest(repr(tuple(output)).encode() for output in outputs)
    return {**facts, "the plan (rules, names, shapes)": plan}


def facts_of_extra_files(extra: ExtraFiles) -> dict[str, str]:
    """Return texts that identify the files next to the weights, by name."""
    contents = {}
    for path in extra.copied:
        contents[locations.split(path)[1]] = locations.read_bytes(path)
    facts = {}
    for name, content in {**contents, **extra.written}.items():
        facts[f"the extra file {name}"] = _digest([content])
    return facts


def facts_of_sources(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return a text that identifies the content of each source."""
    facts = {}
    for number, stored in enumerate(checkpoints):
        name = f"the source {number}" if len(checkpoints) > 1 else "the source"
        facts[name] = _content_of(stored)
    return facts


def facts_of_copies(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    """Return a text that distinguishes each source from its copies and replacements.

    It serves reports on the files themselves.
    """
    facts = {}
    for number, stored in enumerate(checkpoints):
        facts[f"the files of the source {number}"] = (
            f"{stored.location} {_digest([_looks_of(stored)])}"
        )
    return facts


def check_sources(facts: Mapping[str, str], checkpoints: Sequence[StoredCheckpoint]) -> None:
    """Refuse to complete work whose sources have changed since it began.

    Raises:
        CheckpointNotFoundError: one was removed.
        CheckpointingException: one has changed.
    """
    facts_now = facts_of_sources(checkpoints)
    for (name, fact), stored in zip(facts_now.items(), checkpoints, strict=True):
        check_is_unchanged(stored)
        if facts[name] != fact:
            raise CheckpointingException(
                f"{stored.location!r} was changed while parts were reading it: nothing was "
                "completed. Abandon this attempt (--abandon, or distckpt.tasks.abandon) and begin "
                "again."
            )


def _content_of(stored: StoredCheckpoint) -> str:
    """Return a text that identifies the content of a checkpoint."""
    manifest = stored.marker.get("manifest")
    if isinstance(manifest, dict):
        return str(manifest.get("checksum"))
    # Without checksums, sizes and times have to do.
    return _digest([stored.manifest.to_bytes(), _looks_of(stored), *_configs_of(stored)])


def _configs_of(stored: StoredCheckpoint) -> list[bytes]:
    """Return the contents of the configurations next to foreign files.

    They define how values are read: their quantization, or the scaling of an adapter.
    """
    location = stored.location
    names = []
    if locations.isdir(location):
        names = locations.list_names(location)
    paths = []
    for name in sorted(names):
        if name.endswith(_CONFIG):
            paths.append(locations.join(location, name))
    return [locations.read_bytes(path, _MAX_CONFIG) for path in paths]


def _looks_of(stored: StoredCheckpoint) -> bytes:
    """Return the sizes and times of a checkpoint's files, as JSON."""
    known = locations.listed_states(stored.location)
    states = states_of_files(stored.location, stored.manifest, known)
    # Sizes and times alone: modes and links may change between the parts, which can take days.
    return json.dumps([state[:2] for state in states.values()]).encode()


def _digest(texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text)
    return digest.hexdigest()[:16]


def _short(value: Any) -> str:
    text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... {_digest([text.encode()])}"
