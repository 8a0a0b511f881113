"""Reads of a checkpoint that another program may overwrite or remove.

    for attempt in read_attempts(ranks, location):
        with attempt:
            stored = open_checkpoint(ranks, location, attempt=attempt)
            ...

The body runs again when the checkpoint was overwritten while it ran, so that no values of two
checkpoints are mixed. Work that cannot begin again reads an open checkpoint in the context
`reading`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.manifest import Manifest
from distckpt._format.marker import CONFIG_FNAME, marker_of, replaced
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io import background
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.file_state import FileState, has_changed, written_to

logger = logging.getLogger(__name__)

MAX_READS = 20
"""Number of reads of a repeatedly overwritten checkpoint before an error."""

_LOGS = (".md", ".txt", ".log", ".jsonl", ".lock", ".tmp")
"""Endings of files that no format reads, but programs write to."""
_WHOLE_SECONDS = 2.0
"""Resolution of file times on some file systems: one or two seconds."""
_TICK_SECONDS = 0.02
"""Resolution of file times elsewhere: a tick of the system's clock."""

_UNCHANGED = 0
_REPLACED = 1
_REMOVED = 2


class ReadAttempt:
    """One attempt to read a checkpoint, as a context.

    Two checkpoints with the same marker have the same content: the marker holds the checksum of the
    manifest, which holds the checksums of all data. For another format, the states of the files
    must be the same.

    Collective operation: all ranks must enter and leave it. At the end they agree whether to read
    again. An error that comes from a removal is replaced by a CheckpointNotFoundError that says so.

    Attributes:
        marker: on rank 0, the marker when the attempt began, if there was one.
        states: the states of the files that describe and hold a checkpoint of another format; on
            other ranks than 0, of the local files that they read.
        is_final: whether the checkpoint stayed the same.
        changed: the file that changed, if this rank knows it.
    """

    def __init__(self, ranks: Ranks, location: str) -> None:
        self._ranks = ranks
        self._location = location
        self.marker: dict[str, Any] | None = None
        self.states: dict[str, FileState] = {}
        self.is_final = False
        self.changed = location

    def __enter__(self) -> ReadAttempt:
        if self._ranks.is_coordinator:
            self.marker = marker_of(self._location)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None and not self._ranks.are_in_step_after(error):
            return False
        looks = self._ranks.is_coordinator or bool(self.states)
        change = _agree(self._ranks, error, self._change, looks)
        if change == _REPLACED:
            if looks:
                self.changed = _changed_name(self._location, self.states)
            if self._ranks.is_coordinator:
                logger.warning(
                    "%s was overwritten while it was read: reading the new one", self.changed
                )
            return True
        self.is_final = True
        # If the checkpoint was missing from the beginning, the error says so.
        if change == _REMOVED and not isinstance(error, CheckpointNotFoundError | None):
            self._ranks.raise_together(removed(self._location), error)
        return False

    def check_is_there(self) -> None:
        """Check that the checkpoint has not been removed since.

        It is for readers that raise no errors of files.

        Raises:
            CheckpointNotFoundError: it was removed.
        """
        if self._change() == _REMOVED:
            raise removed(self._location)

    def _change(self) -> int:
        if self.states:
            return _change_of_files(self._location, self.states)
        return _change_of(self._location, self.marker)


def read_attempts(ranks: Ranks, location: str) -> Iterator[ReadAttempt]:
    """Yield attempts to read a checkpoint until one was not disturbed.

    See the example above. Collective operation: all ranks must iterate. Waits first for this
    process to finish writing there.

    Raises:
        CheckpointingException: it was overwritten during `MAX_READS` attempts.
        CheckpointNotFoundError: it was removed during an attempt.
    """
    background.wait_for_location(location)
    for _ in range(MAX_READS):
        attempt = ReadAttempt(ranks, location)
        yield attempt
        if attempt.is_final:
            return
    raise CheckpointingException(
        f"{attempt.changed!r} was overwritten {MAX_READS} times, each time before the checkpoint "
        "was read. Load it when it is left alone."
    )


@contextlib.contextmanager
def reading(ranks: Ranks, checkpoints: Sequence[StoredCheckpoint]) -> Iterator[None]:
    """Report errors of reading as a removal or replacement of the checkpoint.

    That is their cause when an open checkpoint has changed meanwhile.

    Collective operation: all ranks must enter and leave it.

    Raises:
        CheckpointNotFoundError: a checkpoint was removed.
        CheckpointingException: a checkpoint was replaced.
    """
    try:
        yield
    except BaseException as error:
        if not ranks.are_in_step_after(error):
            raise
        _raise_if_changed(ranks, checkpoints, error)
        raise


@contextlib.contextmanager
def reading_unchanged(ranks: Ranks, checkpoints: Sequence[StoredCheckpoint]) -> Iterator[None]:
    """Like `reading`, and check files without checksums also after success.

    It is for operations that end with a result. Committed results are checked before that, see
    `check_is_unchanged`.
    """
    with reading(ranks, checkpoints):
        yield
    if not all(stored.manifest.origin is None for stored in checkpoints):
        _raise_if_changed(ranks, checkpoints, None)


def check_files(stored: StoredCheckpoint) -> None:
    """Check that the files of another format's checkpoint have not changed.

    They are compared with their states when it was opened.

    Raises:
        CheckpointingException: one was replaced or written to.
    """
    changed = changed_file(stored.location, stored.states)
    if changed is not None:
        raise written_to(changed)


def _raise_if_changed(
    ranks: Ranks, checkpoints: Sequence[StoredCheckpoint], error: BaseException | None
) -> None:
    looks = ranks.is_coordinator or any(stored.states for stored in checkpoints)
    index, change = divmod(_agree(ranks, error, lambda: _first_change(checkpoints), looks), 3)
    if change != _UNCHANGED:
        stored = checkpoints[index]
        if change == _REMOVED:
            ranks.raise_together(removed(stored.location), error)
        if stored.manifest.origin is None:
            ranks.raise_together(replaced(stored.location), error)
        # The rank that looks knows the replaced file.
        changed = _changed_name(stored.location, stored.states)
        ranks.raise_together(written_to(changed), error)


def _changed_name(location: str, states: Mapping[str, FileState]) -> str:
    # Other ranks do not wait for an error of the storage here.
    with contextlib.suppress(OSError):
        return changed_file(location, states) or location
    return location


def check_is_there(stored: StoredCheckpoint) -> None:
    """Check that an open checkpoint has not been removed since.

    It is for readers that raise no errors of files.

    Raises:
        CheckpointNotFoundError: it was removed.
    """
    if _first_change([stored]) == _REMOVED:
        raise removed(stored.location)


def removed(location: str) -> CheckpointNotFoundError:
    """Return the error that a checkpoint was removed while it was read."""
    return CheckpointNotFoundError(
        f"{location!r} was removed while it was being read, by whatever limits how many "
        "checkpoints are kept, perhaps. What was read so far is incomplete: read another "
        "checkpoint."
    )


def _agree(ranks: Ranks, error: BaseException | None, look: Callable[[], int], looks: bool) -> int:
    """Return the first change that a rank sees: one that `looks`.

    `_UNCHANGED` if the error of some rank does not come from files.
    """
    may_come_from_files = error is None or isinstance(error, CheckpointingException | OSError)
    change = _UNCHANGED
    if looks and may_come_from_files:
        change = look()
    votes = ranks.all_gather_numbers([may_come_from_files, change])
    if not votes[:, 0].all():
        return _UNCHANGED
    return next((number for number in votes[:, 1].tolist() if number != _UNCHANGED), _UNCHANGED)


def _change_of(location: str, marker: dict[str, Any] | None) -> int:
    """Return the change of a checkpoint since its marker was read."""
    after = marker_of(location)
    if after is not None:
        return _REPLACED if after != marker else _UNCHANGED
    if marker is None:
        return _removal_of(location)
    return _removal_of(locations.join(location, CONFIG_FNAME))


def _first_change(checkpoints: Sequence[StoredCheckpoint]) -> int:
    """Return the first change of some checkpoints, plus three times its index."""
    for index, stored in enumerate(checkpoints):
        if stored.marker.get("manifest") is None:
            change = _change_of_files(stored.location, stored.states)
        else:
            change = _change_of(stored.location, dict(stored.marker))
        if change != _UNCHANGED:
            return 3 * index + change
    return _UNCHANGED


def _change_of_files(location: str, states: Mapping[str, FileState]) -> int:
    """Return the change of another format's checkpoint since its description.

    It has no marker that would tell.
    """
    changed = None
    # As in `_removal_of`.
    with contextlib.suppress(OSError):
        changed = changed_file(location, states)
    # Afterwards: a file that is removed between two looks does not count as replaced.
    change = _removal_of(location)
    if change == _UNCHANGED and changed is not None:
        return _REPLACED
    return change


def _removal_of(path: str) -> int:
    # A disk that does not answer says nothing about its files.
    with contextlib.suppress(OSError):
        return _UNCHANGED if locations.exists(path) else _REMOVED
    return _UNCHANGED


# --- States of another program's files ------------------------------------------------------------
# Without checksums, nothing in the files tells that another program has replaced some of them since
# they were described.


def describe(
    location: str,
    read_manifest: Callable[[str], Manifest],
    states: dict[str, FileState],
    names: tuple[str, ...] = (),
) -> Manifest:
    """Describe another program's checkpoint, and record its files' states before.

    The states are recorded first, since the reader may have seen either version of a file that is
    replaced later. They include the states of neighboring files that describe the checkpoint.

    Args:
        location: location of the checkpoint.
        read_manifest: makes its manifest.
        states: filled with the states, by location.
        names: endings of the files that describe it; all files but logs if there are none.
    """
    states.update(_states_within(location, names))
    seconds = seconds_until_settled(states.values(), time.time())
    if seconds:
        time.sleep(seconds)
        states.update(_states_within(location, names))
    manifest = read_manifest(location)
    states.update(states_of_files(location, manifest, states))
    return manifest


def seconds_until_settled(states: Iterable[FileState], now: float) -> float:
    """Return the seconds until any further write changes a file's time.

    Only local files count.
    """
    waits = [0.0]
    for state in states:
        if state.inode is not None and state.modified is not None:
            is_whole = state.modified == int(state.modified)
            step = _WHOLE_SECONDS if is_whole else _TICK_SECONDS
            age = now - state.modified
            waits.append(step - age if age >= 0 else 0.0)
    return max(waits)


def _states_within(location: str, names: tuple[str, ...]) -> dict[str, FileState]:
    """Return the states of the files that describe a checkpoint, by location.

    They are the files directly inside a directory or prefix, or a single file. Unreadable ones are
    left out.
    """
    if not locations.is_local(location):
        inside: dict[str, FileState] = {}
        for path, state in locations.listed_states(location).items():
            if locations.split(path)[0] == location:
                inside[path] = state
        return {path: inside[path] for path in describing(inside, names)}
    if not locations.isdir(location):
        return states_of([location], {})
    paths = [locations.join(location, name) for name in locations.list_names(location)]
    return states_of(describing(paths, names), {})


def describing(paths: Iterable[str], names: tuple[str, ...]) -> list[str]:
    if names:
        return [path for path in paths if path.endswith(names)]
    return [path for path in paths if not path.endswith(_LOGS)]


def states_of_files(
    location: str, manifest: Manifest, known: Mapping[str, FileState]
) -> dict[str, FileState]:
    """Return the states of a checkpoint's files, by location.

    Known states are used, other files are looked at. Missing ones are left out.
    """
    stored = StoredCheckpoint(location, manifest)
    paths = [stored.path_of_file(file_id) for file_id in range(len(manifest.files))]
    return states_of(paths, known)


def changed_file(location: str, states: Mapping[str, FileState]) -> str | None:
    """Return a file at a location that has changed, or None."""
    if not states:
        return None
    now = states_of(list(states), locations.listed_states(location))
    for path, before in states.items():
        if has_changed(before, now.get(path), partial(_state_of, path)):
            return path
    return None


def _state_of(path: str) -> FileState | None:
    return states_of([path], {}).get(path)


def states_of(paths: list[str], known: Mapping[str, FileState]) -> dict[str, FileState]:
    """Return the states of files, by location.

    Known states are used, other files are looked at. Missing ones are left out.
    """
    states = {path: known[path] for path in paths if path in known}

    def look(path: str) -> None:
        # A missing file, or a directory, is an error of a later step.
        with contextlib.suppress(OSError):
            states[path] = locations.file_state(path)

    others = [path for path in paths if path not in states]
    is_local = all(map(locations.is_local, others))
    run_threads(look, others, 1 if is_local else NUM_REQUESTS)
    return states
