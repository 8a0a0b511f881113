"""Doing work in parts: finding and doing the missing pieces, and completing the work."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distckpt._base.errors import CheckpointingException
from distckpt._base.interrupts import operation
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._commit import hidden_directories
from distckpt._storage import locations, object_store
from distckpt.tasks._journal import LOCK, Journal, Note, journals_beside, other_owner
from distckpt.tasks._pieces import Part, share

if TYPE_CHECKING:
    from distckpt.tasks._work import Work


@dataclass(frozen=True)
class PartReport:
    """The outcome of a call, and the progress of the work.

    Attributes:
        part: the part that was done, such as `3/16`.
        journal: the directory with the notes of whole pieces.
        num_pieces: pieces that this call has done.
        num_bytes: size of these.
        num_whole: pieces of all parts that are whole.
        num_total: pieces of all parts.
        seconds: duration of the call.
        is_complete: whether all is done, and the output has appeared.
        report: the report of the verb, when all is done; its `seconds` are the sum over all parts.
            None before.
    """

    part: str
    journal: str
    num_pieces: int
    num_bytes: int
    num_whole: int
    num_total: int
    seconds: float
    is_complete: bool = False
    report: Any = None


@operation
def run_part(work: Work, part: Part, progress: Progress | None = None) -> PartReport:
    """Do a part's missing pieces; complete the work after the last one.

    Raises:
        CheckpointingException: other work, which is not complete, has a journal for the same
            output.
    """
    with _naming_owner(work.journal.location):
        return _run_part(work, part, progress)


def _run_part(work: Work, part: Part, progress: Progress | None) -> PartReport:
    started = time.perf_counter()
    num_pieces = 0
    num_bytes = 0
    if not is_complete(work):
        try:
            _open(work)
            recorded = work.journal.recorded()
            numbers = []
            for number in share(work.costs(), part):
                if number not in recorded:
                    numbers.append(number)
            for number in _run(work, part, numbers, progress):
                num_pieces += 1
                num_bytes += work.pieces[number].num_bytes
        except OSError as error:
            # Another process may have done the same meanwhile, and completed the work.
            if not is_complete(work):
                _check_is_there(work.journal, error)
                raise
    num_whole = len(work.journal.recorded())
    is_whole = num_whole >= len(work.pieces) or is_complete(work)
    return PartReport(
        str(part),
        work.journal.location,
        num_pieces,
        num_bytes,
        num_whole,
        len(work.pieces),
        time.perf_counter() - started,
        is_whole,
        _finish(work) if is_whole else None,
    )


@operation
def finish(work: Work) -> Any:
    """Complete work whose pieces are all whole, and return the verb's report.

    Raises:
        CheckpointingException: pieces are missing.
    """
    with _naming_owner(work.journal.location):
        if not is_complete(work):
            _check_others(work)
            _check_is_all(work)
        return _finish(work)


@contextlib.contextmanager
def _naming_owner(location: str) -> Iterator[None]:
    """Name the owner of a journal where access to it is denied."""
    try:
        yield
    except PermissionError as error:
        owner = other_owner(location)
        if owner is None or not str(error.filename).startswith(location):
            raise
        text = (
            f"{error.strerror} (the journal belongs to user {owner}: parts of several users need "
            "a directory of their group, and umask 002)"
        )
        raise PermissionError(error.errno, text, error.filename) from error


def _check_is_there(journal: Journal, error: OSError) -> None:
    """Raise a clear error if all was abandoned during this part."""
    if isinstance(error, FileNotFoundError) and not journal.is_begun():
        text = "the work was abandoned while this part was at it; run the part again"
        raise FileNotFoundError(errno.ENOENT, text, journal.location) from error


def _check_is_all(work: Work) -> None:
    recorded = work.journal.recorded()
    missing = []
    for i in range(len(work.pieces)):
        if i not in recorded:
            missing.append(i)
    if missing:
        name = work.pieces[missing[0]].name
        raise CheckpointingException(
            f"{len(missing)} of {len(work.pieces)} pieces of {work.place!r} are missing, the first "
            f"of them of {name!r}: run the parts again, any number of them, such as --part 0/1 for "
            "all that is left."
        )


def is_complete(work: Work) -> bool:
    """Whether the output of some work is in its place.

    Raises:
        CheckpointingException: it was, and other files are there now, or none.
    """
    if not work.journal.is_done():
        return False
    proof = work.proof(work.place)
    if work.journal.is_proof(proof):
        return True
    difference = _difference(work.journal, proof)
    # On a local disk it may be about to take the place of an earlier one.
    is_open = locations.is_local(work.place) or not difference
    if is_open and work.is_begun():
        return False
    # Another part may have put it there between the two looks.
    if work.journal.is_proof(work.proof(work.place)):
        return True
    raise CheckpointingException(
        f"{work.place!r} was completed in parts, and was removed or replaced since{difference}. To "
        f"do it again, remove the journal {work.journal.location!r} first (--abandon, or "
        "distckpt.tasks.abandon)."
    )


def _difference(journal: Journal, proof: Any) -> str:
    """Name a file that is missing, or changed since completion. Sizes are compared."""
    if proof is None:
        return ""
    now = dict(proof["sizes"])
    for before in journal.proofs():
        for name, size in before["sizes"]:
            if name not in now:
                return f": {name!r} is missing"
            if now[name] != size:
                return f": {name!r} has {now[name]} bytes instead of {size}"
    return ""


def _open(work: Work) -> None:
    """Begin some work, or go on with it."""
    _check_others(work)
    is_new = not work.journal.is_begun()
    if is_new:
        work.check()
        work.journal.begin(work.header())
    elif work.journal.recorded() and not work.is_begun():
        if is_complete(work):
            return
        raise CheckpointingException(
            f"What parts have written for {work.place!r} was removed from "
            f"{work.journal.location!r}: abandon this attempt (--abandon, or "
            "distckpt.tasks.abandon) and begin again."
        )
    work.begin(is_new)


def _check_others(work: Work) -> None:
    """Refuse to begin while other work for the same output is incomplete."""
    for other in journals_beside(work.place):
        if other.location == work.journal.location or other.is_done():
            continue
        header = other.header()
        if header is None:
            continue
        raise CheckpointingException(
            f"Other work in parts is not complete for {work.place!r} ({other.location!r}): "
            f"{_differences(work, header)}. Go on with the same arguments, or remove what it has "
            "written: --abandon, or distckpt.tasks.abandon."
        )


def _differences(work: Work, header: dict[str, Any]) -> str:
    """Describe the differences between this work and another one."""
    other_facts = header["facts"]
    if header["verb"] != work.verb:
        return f"it is {header['verb']}, this is {work.verb}"
    named = {}
    for name in other_facts | dict(work.facts):
        if other_facts.get(name) != work.facts.get(name):
            named[name] = (other_facts.get(name), work.facts.get(name))
    texts = []
    for name, (before, now) in named.items():
        texts.append(f"{name} was {before!s:.100} and is {now!s:.100}")
    return "; ".join(texts) or "the division into pieces is another"


def _run(
    work: Work, part: Part, numbers: Sequence[int], progress: Progress | None
) -> Iterator[int]:
    """Do pieces; yield the number of each that is whole now."""
    if not numbers:
        return
    directory = work.directory()
    with work.journal.at_work(part) as note, _existence_check(directory) as check:

        def report(done: int, total: int) -> None:
            note.report(done, total)
            if progress is not None:
                progress(done, total)

        counter = ProgressCounter(report, sum(work.pieces[i].num_bytes for i in numbers))
        assigned = _missing(work, numbers, note)
        before = time.perf_counter()
        for number, result in work.run(assigned, counter.add):
            now = time.perf_counter()
            # Otherwise the record could be about files that were removed with another attempt.
            check()
            work.journal.record(number, result, now - before)
            before = now
            yield number
        counter.finish()


@contextlib.contextmanager
def _existence_check(directory: str) -> Iterator[Callable[[], None]]:
    """Yield a function that fails once a local directory is removed. Renaming counts, too.

    For anything else than a local directory it does nothing.
    """
    if not (locations.is_local(directory) and locations.isdir(directory)):
        yield lambda: None
        return
    with hidden_directories.kept_in_sight(directory) as is_same:

        def check() -> None:
            if not is_same():
                text = "removed while this part was writing into it; run the part again"
                raise FileNotFoundError(errno.ENOENT, text, directory)

        yield check


def _missing(work: Work, candidates: Iterable[int], note: Note) -> Iterator[int]:
    """Yield the pieces that are still missing when their turn comes."""
    files = set(work.files())
    numbers_by_file = defaultdict(list)
    for number, piece in enumerate(work.pieces):
        numbers_by_file[piece.name].append(number)
    for number in candidates:
        name = work.pieces[number].name
        if not work.journal.has_record(number):
            if name in files and len(numbers_by_file[name]) > 1:
                _forget_removed(work, name, numbers_by_file[name])
            note.begin(number, work.pieces[number])
            yield number


def _forget_removed(work: Work, name: str, numbers: Sequence[int]) -> None:
    """Let parts repeat whole pieces whose file was removed.

    The file is made anew for the next piece, and would have zeros in their place.
    """
    directory = work.directory()
    path = locations.join(directory, name)
    if not locations.is_local(path):
        return
    # Read first: another process may make the file at any time.
    whole = [number for number in numbers if work.journal.has_record(number)]
    if whole and locations.isdir(directory) and not locations.exists(path):
        work.journal.forget(whole)


def _finish(work: Work) -> Any:
    """Complete the work unless it is complete; return the report of the verb."""
    results, seconds = _results(work)
    if not is_complete(work):
        try:
            with _alone(work.journal):
                _complete(work, results)
        except (OSError, CheckpointingException) as error:
            damaged = work.damaged()
            lost = _lost(work, damaged)
            # Where there are no locks, another process may have done the same meanwhile, and have
            # moved the files whose sizes were just read.
            if not is_complete(work):
                if lost:
                    _cut(work, damaged)
                    raise _again(work, lost, error) from error
                raise
        abort_uploads(work.place, work.files())
    with locations.only_logging(f"clear up in {work.journal.location}"):
        work.journal.remove_output()
    return work.report(results, seconds)


def _results(work: Work) -> tuple[list[Any], float]:
    """Return the results of all pieces, and the seconds they took.

    Raises:
        CheckpointingException: records are missing or damaged. Parts do these pieces again.
    """
    records, fault = work.journal.records(len(work.pieces))
    if fault:
        absent = []
        for i, record in enumerate(records):
            if record is None:
                absent.append(i)
        raise _without_records(work, absent, fault)
    whole = [record for record in records if record is not None]
    return [record["result"] for record in whole], sum(record["seconds"] for record in whole)


def _without_records(work: Work, numbers: Sequence[int], fault: str) -> CheckpointingException:
    """Let parts repeat pieces unless only the report lacks them; return the error."""
    has_output = bool(work.files())
    if has_output and is_complete(work):
        return CheckpointingException(
            f"{fault} {work.place!r} is complete, and its report alone is lost: remove the journal "
            "(--abandon, or distckpt.tasks.abandon), which leaves the output."
        )
    if not has_output:
        work.journal.forget_done()
    return _again(work, numbers, fault)


def _again(work: Work, numbers: Sequence[int], fault: object) -> CheckpointingException:
    """Let parts do pieces again; return the error that says so."""
    work.journal.forget(numbers)
    return CheckpointingException(
        f"{fault} {len(numbers)} of {len(work.pieces)} pieces must be done again: run the parts "
        "again."
    )


def _lost(work: Work, damaged: Sequence[str]) -> list[int]:
    """Return whole pieces whose files were removed, cut or damaged since."""
    if not work.is_begun():
        return []
    directory = work.directory()
    sizes = {}
    for name in work.files():
        sizes[name] = _size_of(locations.join(directory, name))
    sizes.update(dict.fromkeys(damaged, 0))
    lost = []
    for i, piece in enumerate(work.pieces):
        if sizes.get(piece.name, math.inf) < piece.stop:
            lost.append(i)
    return lost


def _cut(work: Work, names: Iterable[str]) -> None:
    """Cut local files to their planned size; written again, longer ones would stay as long.

    They are not removed: another process may be writing them again already.
    """
    if not locations.is_local(work.place):
        return
    directory = work.directory()
    for name in names:
        path = locations.join(directory, name)
        planned = max(piece.stop for piece in work.pieces if piece.name == name)
        if _size_of(path) > planned:
            os.truncate(path, planned)


def _size_of(path: str) -> int:
    try:
        return locations.file_size(path)
    except FileNotFoundError:
        return 0


def abort_uploads(place: str, files: Sequence[str]) -> None:
    """Abort uploads of killed processes to files that are whole."""
    if files and not locations.is_local(place):
        object_store.abort_uploads(place, [locations.join(place, name) for name in files])


def _complete(work: Work, results: Sequence[Any]) -> None:
    if is_complete(work):
        return
    # The note is true when the output has appeared.
    work.complete(results)
    work.journal.note_done(work.proof(work.directory()))
    work.commit(results)
    work.journal.note_done(work.proof(work.place))


def _alone(journal: Journal) -> contextlib.AbstractContextManager[object]:
    if locations.is_local(journal.location):
        return hidden_directories.locked_if_offered(locations.join(journal.location, LOCK))
    return contextlib.nullcontext()
